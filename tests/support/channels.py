"""Runs of channels, over the workers of `gen_cluster` and among threads."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect

import numpy as np
import pytest
from distributed.utils_test import async_poll_for, gen_cluster

from daskdl import codec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import NAME, BarrierKind, Message, wrap
from daskdl.channel.remote import RemoteChannel
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Timeouts
from tests.sim.cluster import run_simulated, simulated
from tests.support.run_states import GRID, SIZE, SPEC, plan_of

RUN = SPEC.run
PATIENCE_S = 20  # far above what anything here takes
EITHER = pytest.mark.parametrize("routing", ["plain", "mesh"])
TIMEOUTS = Timeouts(join=30, request=10, silence=30, stop=2, rejoin=300, data=30)


def bounds(**changed):
    """The timeouts of the tests, some of them shorter."""
    return dataclasses.replace(TIMEOUTS, **changed)


def workers(count, **options):
    """Dask's decorator, which would never return if a TimeoutError left a test."""
    nthreads = [("127.0.0.1", 1)] * count
    decorate = gen_cluster(client=True, timeout=60, nthreads=nthreads, **options)

    def decorated(test):
        @functools.wraps(test)
        async def ending(*arguments, **keywords):
            try:
                await test(*arguments, **keywords)
            except TimeoutError as error:
                raise AssertionError(f"it took too long: {error}") from error

        return decorate(ending)

    return decorated


def everywhere(count):
    """The same test on Dask and on a simulated cluster, which must not differ.

    One with a `routing` is called with each; of a mesh, all but the connections is as
    on the simulated cluster, so that on Dask it is slow.
    """

    def decorate(test):
        places = {"dask": workers(count)(test), "sim": simulated(count)(test)}

        @functools.wraps(test)
        def wrapper(on, **parameters):
            places[on](**parameters)

        parameters_of_test = inspect.signature(places["sim"]).parameters.values()
        chosen = inspect.Parameter("on", inspect.Parameter.KEYWORD_ONLY)
        kept = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters_of_test
        ]
        wrapper.__signature__ = inspect.Signature([chosen, *kept])
        if "routing" not in wrapper.__signature__.parameters:
            return pytest.mark.parametrize("on", places)(wrapper)
        cases = [
            *(("dask", "plain"), pytest.param("dask", "mesh", marks=pytest.mark.slow)),
            *(("sim", "plain"), ("sim", "mesh")),
        ]
        return pytest.mark.parametrize(("on", "routing"), cases)(wrapper)

    return decorate


# ---- updates


def frame_of(stamp, *entries, count=1, size=SIZE):
    entries_K = np.array(sorted(entries, key=abs), np.int32)
    return codec.encode(stamp, size, count * GRID, entries_K)


def flipped(frame):
    """The frame with one bit of its payload changed."""
    damaged = frame.copy()
    damaged[-1] ^= 4
    return damaged


def item_of(stamp, frame):
    """The wire form of a message with a frame."""
    return Message.update(stamp, stamp.step, frame.nbytes, wrap(frame)).to_wire()


def publish(channel, *entries, step=0, count=1, **options):
    """Publish entries, by default position 1; return whether they were accepted."""
    entries = entries or (1,)
    encode = lambda stamp: frame_of(stamp, *entries, count=count)  # noqa: E731
    return channel.publish(encode, step, **options) is not None


def totals(drained, first=SIZE):
    """The sum of what was drained, in steps of the grid; its first values."""
    total = [0] * SIZE if drained.folded_N is None else drained.folded_N.tolist()
    for update in drained.updates:
        for entry in update.entries_K.tolist():
            sign = 1 if entry > 0 else -1
            total[abs(entry) - 1] += sign * round(update.threshold / GRID)
    return total[:first]


# ---- threads, requests and waits


async def in_thread(function, *arguments, **keywords):
    """Run what blocks in a thread of its own, as a replica does."""
    task = asyncio.to_thread(function, *arguments, **keywords)
    return await asyncio.wait_for(task, PATIENCE_S)


def begin(function, *arguments, **keywords):
    return asyncio.ensure_future(in_thread(function, *arguments, **keywords))


def wait_until(ready):
    return async_poll_for(ready, PATIENCE_S)


def held_up(handlers, operation, monkeypatch):
    """Let requests of one kind wait for an event, which is returned."""
    released, handler = asyncio.Event(), handlers[operation]

    async def waiting(**fields):
        await released.wait()
        return await handler(**fields)

    monkeypatch.setitem(handlers, operation, waiting)
    return released


def recorded(handlers, operation, monkeypatch):
    """The fields of each request of one kind, from now on."""
    requests, handler = [], handlers[operation]

    async def recording(**fields):
        requests.append(fields)
        return await handler(**fields)

    monkeypatch.setitem(handlers, operation, recording)
    return requests


def done(number, examples=5, loss=0.5):
    """A finished lease."""
    return {"lease": number, "examples": examples, "loss": loss}


async def lease(channel, *finished, phase="train", epoch=0):
    """Lease a part of one row: its number and its key; None if there is none."""
    leased = await in_thread(channel.lease, phase, epoch, finished)
    return leased and (leased.number, leased.keys[leased.ranges[0].part])


async def all_wait_for(run, last):
    """Wait in each channel for updates; those of the replica itself do not count."""
    channels = run.channels.values()
    await asyncio.gather(*(in_thread(c.wait_for_updates, last) for c in channels))


async def meet(run, key, kind=BarrierKind.MEET):
    """Let all replicas meet at a barrier, each with its number as its payload."""
    channels = run.channels.items()
    return await asyncio.gather(
        *(in_thread(c.barrier, key, r, kind) for r, c in channels)
    )


def sent_by(run, replica, *entries):
    """Updates of one entry each as the replica would send them, not sent."""
    items = []
    for entry in entries:
        stamp = run.next_stamp(replica)
        items.append(item_of(stamp, frame_of(stamp, entry)))
        inbox = run.link(replica).inbox
        inbox.progress = inbox.progress._replace(sequence=stamp.sequence)
    return items


async def agree(run, load=None, replicas=(0, 1)):
    """Let replicas come to the same updates; return what each had to apply."""

    def end(channel):
        payload = {"sequence": channel.published}
        met = channel.barrier("end", payload, BarrierKind.AGREE)
        published = {r: fields["sequence"] for r, fields in met.payloads.items()}
        channel.agree("end", published, met.gone, load)
        return totals(channel.drain(), 9)

    return await asyncio.gather(*(in_thread(end, run.channels[r]) for r in replicas))


def applied_by(channel):
    """A snapshot function of a replica, of the sum of all that it drained."""
    total_N = np.zeros(SIZE, np.int32)

    def make():
        nonlocal total_N
        drained, received = channel.drain_for_snapshot()
        total_N = total_N + np.array(totals(drained), np.int32)
        return {
            "received": received,
            "grid": GRID,
            "step": 3,
            "total_N": total_N,
        }

    return make


# ---- runs


def settings(replicas, pieces=None, relay_bytes=2**20, **options):
    """The specs of the channels of replicas and of their run."""
    names = {"min_replicas", "synchronous", "intervals", "merge_s", "sum_fan_out"}
    names &= options.keys()
    plan = {name: options.pop(name) for name in names}
    defaults = {"timeouts": TIMEOUTS, "fan_out": 1}
    if "merge_s" in plan:
        defaults["routing"] = "merged"
    spec = dataclasses.replace(SPEC, **{**defaults, **options})
    run = plan_of(
        replicas,
        pieces or {"train": ()},
        spec.timeouts,
        run=spec.run,
        relay_bytes=relay_bytes,
        relayed=ROUTINGS[spec.routing].relayed,
        **plan,
    )
    return spec, run


def token_of(replica):
    """The token of a replica's requests to the scheduler."""
    return 1000 + replica


class Run:
    """A run, and its channels by replica."""

    def __init__(self, spec):
        self.spec = spec
        self.channels = {}

    def next_stamp(self, replica, step=0):
        """The stamp of the next update of a replica."""
        number = self.channels[replica].published + 1
        return codec.Stamp(self.spec.run, replica, number, step)

    async def join(self):
        joins = [in_thread(channel.join) for channel in self.channels.values()]
        await asyncio.gather(*joins)


class DaskRun(Run):
    """A run on a cluster."""

    def __init__(self, client, scheduler, workers, spec):
        super().__init__(spec)
        self.client, self.scheduler, self.workers = client, scheduler, list(workers)

    @property
    def plugin(self):
        return self.scheduler.extensions[NAME]

    @property
    def live(self):
        return self.plugin.runs[self.spec.run]

    @property
    def record(self):
        return self.live.state

    def link(self, replica):
        plugin = self.workers[replica].extensions[NAME]
        return plugin.endpoints[self.spec.run, replica]

    def received(self, replica, origin):
        """The updates of an origin that a replica has received."""
        return self.link(replica).inbox.received.by_origin().get(origin, (0, ()))

    async def ask(self, operation, **fields):
        """The answer of the scheduler to a client or a replica of the run."""
        if operation != "daskdl_open":
            fields = {"secret": self.spec.secret, **fields}
        return await getattr(self.client.scheduler, operation)(**fields)

    async def ask_worker(self, replica, operation, /, **fields):
        """The answer of the worker of a replica to another member of the run."""
        identity = {
            "run": self.spec.run,
            "secret": self.spec.secret,
            "replica": replica,
        }
        rpc = self.scheduler.rpc(self.workers[replica].address)
        return await getattr(rpc, operation)(**{**identity, **fields})

    async def deliver(self, replica, *items, run=None):
        """Hand messages to a worker as the relay does."""
        of_run = {} if run is None else {"run": run}
        messages = list(items)
        return await self.ask_worker(
            replica, "daskdl_deliver", messages=messages, **of_run
        )

    def open_channel(self, replica):
        identity = {"replica": replica, "token": token_of(replica)}
        spec = dataclasses.replace(self.spec, **identity)
        plugin = self.workers[replica].extensions[NAME]
        self.channels[replica] = RemoteChannel(plugin, spec)
        return self.channels[replica]

    async def newcomer(self, worker):
        """Assign one more replica to a worker; its channel has not joined."""
        address = worker.address
        count = len(self.record.members.assigned_to(address)) + 1
        answer = await self.ask(
            "daskdl_assign", run=RUN, worker=address, replicas=count
        )
        (replica,) = answer["replicas"]
        self.workers.append(worker)
        return replica, self.open_channel(replica)

    async def join(self):
        await super().join()
        boxes = self.record.outboxes.values()  # memberships
        await wait_until(lambda: not any(len(box) for box in boxes))

    def where(self, replica):
        return self.workers[replica].address

    async def until(self, ready):
        """Wait until the state of the run is ready."""
        await self.live.until(ready, PATIENCE_S)

    async def has_left(self, replica):
        """Wait until all that a replica has published arrived at its destinations."""
        await wait_until(self.link(replica).routing.all_sent)

    async def stop(self, reason):
        await self.ask("daskdl_stop", run=self.spec.run, reason=reason)

    async def shut(self):
        await self.ask("daskdl_close", run=self.spec.run)

    async def events(self):
        answer = await self.ask("daskdl_watch", run=self.spec.run, timeout_s=PATIENCE_S)
        return list(answer["events"])

    def lose(self, replica):
        """Lose a replica without a word; its worker stays, and so does its channel."""
        self.vanish(replica)
        self.live.lose(replica, "in the middle of sending")

    def vanish(self, replica):
        """End a replica unnoticed; its worker stays."""
        self.link(replica).stop_sending()
        plugin = self.workers[replica].extensions[NAME]
        del plugin.endpoints[self.spec.run, replica], self.channels[replica]

    async def close(self):
        for channel in self.channels.values():
            await in_thread(channel.leave)
        is_open = self.spec.run in self.plugin.runs
        tasks = list(self.live.tasks) if is_open else []
        await self.shut()
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks)
        assert self.spec.run not in self.plugin.runs
        for worker in self.workers:
            endpoints = worker.extensions[NAME].endpoints
            assert not [key for key in endpoints if key[0] == self.spec.run]


@contextlib.asynccontextmanager
async def a_run(client, scheduler, *workers, join=True, **options):
    """A run with a replica on each worker; checks that nothing is left behind."""
    await client.register_plugin(ChannelSchedulerPlugin())
    await client.register_plugin(ChannelWorkerPlugin())
    addresses = {r: worker.address for r, worker in enumerate(workers)}
    spec, plan = settings(addresses, **options)
    run = DaskRun(client, scheduler, workers, spec)
    answer = await run.ask("daskdl_open", spec=vars(plan), client=client.id)
    assert answer["status"] == "ok"
    for replica in addresses:
        run.open_channel(replica)
    try:
        if join:
            await run.join()
        yield run
    finally:
        await run.close()


class ThreadsRun(Run):
    """A run among threads."""

    def __init__(self, spec, plan):
        super().__init__(spec)
        self.run = LocalRun(plan)
        for replica in plan.replicas:
            self.open_channel(replica)

    @property
    def record(self):
        return self.run.state

    def where(self, replica):
        return self.record.members.replicas[replica].worker

    def open_channel(self, replica):
        spec = dataclasses.replace(self.spec, replica=replica)
        self.channels[replica] = LocalChannel(self.run, spec)

    async def until(self, ready):
        def wait():
            with self.run.changed:
                assert self.run.changed.wait_for(ready, PATIENCE_S)

        await in_thread(wait)

    async def has_left(self, replica):
        pass  # updates arrive before `publish` returns

    async def events(self):
        return await in_thread(self.run.watch, PATIENCE_S)

    async def stop(self, reason):
        self.run.stop(reason)

    async def shut(self):
        self.run.stop("the run was closed")


@contextlib.asynccontextmanager
async def a_threads_run(replicas, join=True, **options):
    run = ThreadsRun(*settings(replicas, **options))
    try:
        if join:
            await run.join()
        yield run
    finally:
        for channel in run.channels.values():
            await in_thread(channel.leave)
        assert run.record.members.present == []
        assert run.record.outboxes == {}


# The last two are a relay and a mesh on a simulated cluster.
KINDS = ("plain", "mesh", "local", "sim", "sim mesh")


def every_channel(replicas=2, kinds=KINDS):
    """Call a test with a function that opens a run, once for each kind of channel."""

    def decorate(test):
        async def over_dask(c, s, *workers, kind, call):
            await call(functools.partial(a_run, c, s, *workers, routing=kind))

        over_dask = workers(replicas)(over_dask)

        @functools.wraps(test)
        def wrapper(self, kind, **parameters):
            call = functools.partial(test, self, **parameters)
            if kind == "local":
                asyncio.run(call(functools.partial(a_threads_run, replicas)))
            elif kind.startswith("sim"):
                routing = {"sim": "plain", "sim mesh": "mesh"}[kind]

                async def over_network(c, s, *workers):
                    await call(
                        functools.partial(a_run, c, s, *workers, routing=routing)
                    )

                run_simulated(over_network, replicas)
            else:
                over_dask(kind=kind, call=call)

        # What pytest looks at: the kind in the place of the function.
        instance, _, *others = inspect.signature(test).parameters.values()
        chosen = inspect.Parameter("kind", instance.kind)
        wrapper.__signature__ = inspect.Signature([instance, chosen, *others])
        marks = {"mesh": pytest.mark.slow}  # see `everywhere`
        cases = [pytest.param(kind, marks=marks.get(kind, ())) for kind in kinds]
        return pytest.mark.parametrize("kind", cases)(wrapper)

    return decorate
