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
from daskdl.channel.leasing import WHOLE_EPOCHS, RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import (
    NAME,
    BarrierKind,
    ChannelSpec,
    Message,
    MessageKind,
    wrap,
)
from daskdl.channel.remote import RemoteChannel
from daskdl.channel.routing import ROUTINGS, Routing
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Timeouts
from tests.support.run_states import extents

RUN = 7
SIZE = 50
GRID = 2.0**-24
PATIENCE_S = 20  # far above what anything here takes
EITHER = pytest.mark.parametrize("routing", ["plain", "mesh"])
TIMEOUTS = Timeouts(join=30, request=10, silence=30, stop=2, rejoin=300, data=30)


def bounds(**changed):
    """The time-outs of the tests, some of them shorter."""
    return dataclasses.replace(TIMEOUTS, **changed)


def on_workers(**options):
    """Dask's decorator; of a TimeoutError that leaves a test it would never return."""
    decorate = gen_cluster(client=True, timeout=60, **options)

    def decorated(test):
        @functools.wraps(test)
        async def ending(*arguments, **keywords):
            try:
                await test(*arguments, **keywords)
            except TimeoutError as error:
                raise AssertionError(f"it took too long: {error}") from error

        return decorate(ending)

    return decorated


two_workers = on_workers  # of Dask's default


def three_workers(**options):
    return on_workers(nthreads=[("127.0.0.1", 1)] * 3, **options)


def frame_of(stamp, *entries, count=1, size=SIZE):
    entries_K = np.array(sorted(entries, key=abs), np.int32)
    return codec.encode(stamp, size, count * GRID, entries_K)


def item_of(stamp, frame):
    return tuple(
        Message(MessageKind.UPDATE.value, *stamp[1:], frame.nbytes, wrap(frame))
    )


def publish(channel, *entries, step=0, count=1, **options):
    """Publish entries, by default position 1 only; say whether they were accepted."""
    entries = entries or (1,)
    return channel.publish(
        lambda stamp: frame_of(stamp, *entries, count=count), step, **options
    )


def next_stamp(channel, step):
    """The stamp of what the channel publishes next."""
    return codec.Stamp(channel.run, channel._replica, channel.published + 1, step)


def totals(arrived, size=SIZE):
    """What has arrived in all, in steps of the grid."""
    total = [0] * size if arrived.folded_N is None else arrived.folded_N.tolist()
    for update in arrived.updates:
        for entry in update.entries_K.tolist():
            sign = 1 if entry > 0 else -1
            total[abs(entry) - 1] += sign * round(update.threshold / GRID)
    return total


async def in_thread(function, *arguments, **keywords):
    """Run what blocks in a thread of its own, as a replica does."""
    task = asyncio.to_thread(function, *arguments, **keywords)
    return await asyncio.wait_for(task, PATIENCE_S)


def begin(function, *arguments, **keywords):
    return asyncio.ensure_future(in_thread(function, *arguments, **keywords))


def wait_until(ready):
    return async_poll_for(ready, PATIENCE_S)


async def meet(run, key, kind=BarrierKind.MEET):
    """Let all replicas meet at a barrier, each with its number as its note."""
    channels = run.channels.items()
    await asyncio.gather(*(in_thread(c.barrier, key, r, kind) for r, c in channels))


class Run:
    """One run on a cluster, and its channels by replica."""

    def __init__(self, client, scheduler, workers, spec):
        self.client, self.scheduler, self.workers = client, scheduler, list(workers)
        self.spec = spec
        self.channels = {}

    @property
    def plugin(self):
        return self.scheduler.extensions[NAME]

    @property
    def live(self):
        return self.plugin.runs[self.spec.run]

    @property
    def record(self):
        return self.live.state

    def worker_plugin(self, replica):
        return self.workers[replica].extensions[NAME]

    def link(self, replica):
        return self.worker_plugin(replica).endpoints[self.spec.run, replica]

    async def ask(self, operation, **fields):
        """What a client or a replica gets for an answer."""
        return await getattr(self.client.scheduler, operation)(**fields)

    async def deliver(self, replica, *items, run=None):
        """Hand items to a worker as the relay does."""
        return await self.scheduler.rpc(self.workers[replica].address).daskdl_deliver(
            run=self.spec.run if run is None else run,
            replica=replica,
            messages=list(items),
        )

    def open_channel(self, replica):
        spec = dataclasses.replace(self.spec, replica=replica)
        channel = RemoteChannel(self.worker_plugin(replica), spec)
        self.channels[replica] = channel
        return channel

    async def open(self, relay_bytes, pieces, min_replicas, synchronous, intervals):
        plan = {
            "run": self.spec.run,
            "replicas": {r: w.address for r, w in enumerate(self.workers)},
            "sizes": extents(pieces),
            "seed": None,
            "epochs_before": 0,
            "synchronous": synchronous,
            "relay_bytes": relay_bytes,
            "min_replicas": min_replicas,
            "timeouts": dataclasses.asdict(self.spec.timeouts),
            "relayed": ROUTINGS[self.spec.routing].relayed,
            "intervals": intervals,
        }
        answer = await self.ask("daskdl_open", spec=plan, client=self.client.id)
        assert answer["status"] == "ok"
        for replica in range(len(self.workers)):
            self.open_channel(replica)

    async def join(self):
        joins = [in_thread(channel.join) for channel in self.channels.values()]
        await asyncio.gather(*joins)
        boxes = self.record.outboxes.values()  # of what says who the members are
        await async_poll_for(lambda: not any(len(box) for box in boxes), PATIENCE_S)

    def where(self, replica):
        return self.workers[replica].address

    async def until(self, ready):
        """Wait until the record is as it should be."""
        await self.live.until(ready, PATIENCE_S)

    async def stop(self, reason):
        await self.ask("daskdl_stop", run=self.spec.run, reason=reason)

    async def shut(self):
        await self.ask("daskdl_close", run=self.spec.run)

    async def events(self):
        answer = await self.ask("daskdl_watch", run=self.spec.run, timeout_s=PATIENCE_S)
        return list(answer["events"])

    def vanish(self, replica):
        """The replica is gone without a word; its worker is still there."""
        self.link(replica).stop_sending()
        del self.worker_plugin(replica).endpoints[self.spec.run, replica]
        return self.channels.pop(replica)

    async def close(self):
        for channel in self.channels.values():
            await in_thread(channel.leave)
        tasks = list(self.live.tasks) if self.is_open else []
        await self.ask("daskdl_close", run=self.spec.run)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks)
        assert not self.is_open
        for worker in self.workers:
            links = worker.extensions[NAME].endpoints
            assert not [key for key in links if key[0] == self.spec.run]

    @property
    def is_open(self):
        return self.spec.run in self.plugin.runs


async def register(client):
    await client.register_plugin(ChannelSchedulerPlugin())
    await client.register_plugin(ChannelWorkerPlugin())


@contextlib.asynccontextmanager
async def a_run(
    client,
    scheduler,
    *workers,
    join=True,
    pieces=None,
    relay_bytes=2**20,
    min_replicas=1,
    synchronous=False,
    intervals=WHOLE_EPOCHS,
    **options,
):
    """A run with a replica on each worker; leaves nothing behind, and checks it."""
    await register(client)
    spec = ChannelSpec(RUN, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS)
    run = Run(client, scheduler, workers, dataclasses.replace(spec, **options))
    pieces = pieces or {"train": ()}
    await run.open(relay_bytes, pieces, min_replicas, synchronous, intervals)
    try:
        if join:
            await run.join()
        yield run
    finally:
        await run.close()


def held_up(handlers, operation, monkeypatch):
    """Let requests of one kind wait; the event lets them go on."""
    released, handler = asyncio.Event(), handlers[operation]

    async def waiting(**fields):
        await released.wait()
        return await handler(**fields)

    monkeypatch.setitem(handlers, operation, waiting)
    return released


def applied_by(channel):
    """A replica that serves what it has applied; entries as in `totals`."""
    total_N = np.zeros(SIZE, np.int32)

    def make():
        nonlocal total_N
        arrived = channel.drain()
        received = arrived.received
        total_N = total_N + np.array(totals(arrived), np.int32)
        return {
            "received": [[o, last, list(more)] for o, (last, more) in received.items()],
            "grid": GRID,
            "step": 3,
            "total_N": total_N,
        }

    return make


async def newcomer(run, worker):
    """Seat one more replica, on this worker; its channel has not joined."""
    answer = await run.ask("daskdl_assign", run=RUN, worker=worker.address, replicas=2)
    (replica,) = answer["replicas"]
    run.workers.append(worker)
    return replica, run.open_channel(replica)


KINDS = ("plain", "mesh", "local")


class ThreadsRun:
    """A run among threads, and its channels; as `channels.Run` is over Dask."""

    def __init__(self, replicas, spec, pieces, **plan):
        self.spec = spec
        self.channels = {}
        self._run = LocalRun(
            RunSpec(
                run=spec.run,
                replicas={r: self.where(r) for r in range(replicas)},
                sizes=extents(pieces),
                seed=None,
                epochs_before=0,
                relay_bytes=0,
                timeouts=dataclasses.asdict(spec.timeouts),
                **plan,
            )
        )
        for replica in range(replicas):
            self.open_channel(replica)

    @property
    def record(self):
        return self._run.state

    def where(self, replica):
        return f"chair {replica}"

    def open_channel(self, replica):
        spec = dataclasses.replace(self.spec, replica=replica)
        self.channels[replica] = LocalChannel(self._run, spec)

    async def join(self):
        joins = [in_thread(channel.join) for channel in self.channels.values()]
        await asyncio.gather(*joins)

    async def until(self, ready):
        def wait():
            with self._run.changed:
                assert self._run.changed.wait_for(ready, PATIENCE_S)

        await in_thread(wait)

    async def events(self):
        return await in_thread(self._run.watch, PATIENCE_S)

    async def stop(self, reason):
        self._run.stop(reason)

    async def shut(self):
        self._run.stop("the run was closed")

    async def close(self):
        for channel in self.channels.values():
            await in_thread(channel.leave)
        assert self._run.here == []
        assert self.record.outboxes == {}


@contextlib.asynccontextmanager
async def a_threads_run(
    replicas,
    join=True,
    pieces=None,
    min_replicas=1,
    synchronous=False,
    intervals=WHOLE_EPOCHS,
    fan_out=1,
    **options,
):
    spec = ChannelSpec(RUN, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS, fan_out=fan_out)
    spec = dataclasses.replace(spec, **options)
    plan = {
        "min_replicas": min_replicas,
        "synchronous": synchronous,
        "intervals": intervals,
    }
    run = ThreadsRun(replicas, spec, pieces or {"train": ()}, **plan)
    try:
        if join:
            await run.join()
        yield run
    finally:
        await run.close()


def every_channel(replicas=2, kinds=KINDS):
    """Call a test with a function that opens a run, once for each kind of channel.

    Args:
        replicas: In the run.
        kinds: Of channels, some of `KINDS`.
    """

    def decorate(test):
        async def over_dask(c, s, *workers, kind, call):
            options = {"routing": kind, "fan_out": 1}
            await call(functools.partial(a_run, c, s, *workers, **options))

        workers = [("127.0.0.1", 1)] * replicas
        over_dask = on_workers(nthreads=workers)(over_dask)

        @functools.wraps(test)
        def one(self, kind, **parameters):
            call = functools.partial(test, self, **parameters)
            if kind == "local":
                asyncio.run(call(functools.partial(a_threads_run, replicas)))
            else:
                over_dask(kind=kind, call=call)

        # What pytest looks at: the kind in the place of the function.
        own, _, *others = inspect.signature(test).parameters.values()
        chosen = inspect.Parameter("kind", own.kind)
        one.__signature__ = inspect.Signature([own, chosen, *others])
        return pytest.mark.parametrize("kind", kinds)(one)

    return decorate


class Direct(Routing):
    """Each replica sends to every other one itself, however many there are."""

    relayed = False

    def destinations(self):
        others = [replica for replica in self.workers if replica != self._replica]
        return [n for r in others if (n := self.neighbour(r)) is not None]


@pytest.fixture
def direct(monkeypatch):
    monkeypatch.setitem(ROUTINGS, "direct", Direct)
