"""A fit on a simulated cluster: the real replicas, and a client as Dask's backend is.

Models and data are such that all sums are exact, so nothing depends on the machine.
"""

import asyncio
import contextlib
import dataclasses
import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from daskdl import (
    Callback,
    Checkpoint,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    errors,
)
from daskdl.channel import merging, protocol, scheduler, transport, worker
from daskdl.channel.protocol import NAME, Answer, BarrierKind
from daskdl.channel.routing import ROUTINGS
from daskdl.config import VERSION, Timeouts
from daskdl.data.inputs import ReadOptions
from daskdl.data.source import Source
from daskdl.saving.checkpoints import CheckpointPlan, Series
from daskdl.training import checkpointing
from daskdl.training import replica as replicas
from daskdl.training.backend import merge, run_spec_of
from daskdl.training.data_feed import LocalStore
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.replica import Replica
from tests.sim.network import SCHEDULER, Network, Server, SimScheduler, SimWorker
from tests.sim.oracle import (
    SIZE,
    UNIT,
    Oracle,
    WatchedAveraging,
    WatchedChannel,
    WatchedSharing,
)
from tests.sim.world import World
from tests.support.problems import replica_spec

POLL_S = 0.5
MAX_STORAGE_S = 2.0  # for writing or reading a part of a checkpoint
TIMEOUTS = Timeouts(join=20, request=4, silence=6, stop=4, rejoin=20, data=20)


class Weights(nn.Module):
    """One vector; its gradient does not depend on it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, SIZE + 1) * UNIT)

    def forward(self, x):
        return x @ self.weight


def mean_output(output, y):
    return output.mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


class Parts(Source):
    """Rows of small whole numbers, in parts."""

    in_memory = True

    def __init__(self, lengths, seed):
        chance = np.random.default_rng(seed)
        self.parts, self.lengths = len(lengths), list(lengths)
        arrays = [chance.integers(-4, 5, (rows, SIZE)) for rows in lengths]
        self._rows = [(x.astype(np.float32) * UNIT, np.zeros(len(x))) for x in arrays]
        self.first_rows = self._rows[0]

    @override
    def load(self, part):
        return self._rows[part]

    def mean_output(self, weight_N):
        """The mean output of `Weights` over all rows."""
        return np.concatenate([x for x, _ in self._rows]).mean(0) @ weight_N


class PacedParts(Parts):
    """Parts that take virtual time to load.

    Args:
        on_load: Called whenever a replica begins to load one.
    """

    def __init__(self, parts, world, mean_s, on_load):
        vars(self).update(vars(parts))
        self._world, self._mean_s, self._on_load = world, mean_s, on_load

    @override
    def load(self, part):
        self._on_load()
        self._world.current.sleep(self._mean_s * self._world.random.uniform(0.5, 1.5))
        return super().load(part)


@dataclass
class Setup:
    """What a fit is made of.

    Attributes:
        workers: How many workers there are at first.
        replicas: Replicas on each worker.
        routing: Name of one of `ROUTINGS`.
        master: Trains.
        lengths: Rows of the parts.
        validation: Rows of the parts of the validation data; empty: there are none.
        checkpoint_every: When checkpoints are written, see `Checkpoint`; None: never.
        step_s: Duration of a step of each replica, by number; others take the mean.
        stops: After which steps a callback stops the fit, counted over all replicas.
        start_s: Longest time until a task starts.
        build_s: Longest time that a replica takes to build its model.
        merge_s: If the routing merges, the longest time that updates wait in the relay
            for others, to be sent as their sum.
        forgets: Share of own updates that a replica no longer keeps when it has to
            subtract them from a sum.
        inline_bytes: Larger updates are decoded, and sums made and read, in a thread.
        tree_bytes: Smaller sums are sent to all workers.
        sum_fan_out: Workers to which larger ones are sent, see `RunSpec`.
    """

    workers: int = 3
    replicas: int = 1
    routing: str = "plain"
    master: GradientSharing = field(
        default_factory=lambda: GradientSharing(
            FixedThreshold(2.0**-6),
            KeepResidual(),
            exchange_every=1,
        )
    )
    epochs: int = 2
    batch_size: int = 4
    lengths: tuple = (48, 48, 32)
    validation: tuple = ()
    checkpoint_every: str | int | None = None
    seed: int = 0
    preempted: float = 0.0
    outbox_bytes: int = 2**20
    inbox_bytes: int = 2**20
    relay_bytes: int = 2**20
    batch_bytes: int = transport.BATCH_BYTES
    part_bytes: int = protocol.PART_BYTES
    mean_step_s: float = 0.05
    step_s: dict = field(default_factory=dict)
    stops: tuple = ()
    start_s: float = 0.0
    build_s: float = 0.0
    merge_s: float = 0.0
    forgets: float = 0.0
    inline_bytes: int = worker.INLINE_BYTES
    tree_bytes: int = merging.TREE_BYTES
    sum_fan_out: int = 2
    timeouts: Timeouts = TIMEOUTS


class Pace(Callback):
    """Makes a step take virtual time, and stops the fit after some steps.

    Args:
        on_stop: Called with the replica that stops the fit.
    """

    def __init__(self, world, setup, on_stop):
        self._world, self._setup, self._on_stop = world, setup, on_stop
        self._steps = 0  # of all replicas

    def on_step_end(self, step):
        mean_s = self._setup.step_s.get(step.replica, self._setup.mean_step_s)
        self._world.current.sleep(mean_s * self._world.random.uniform(0.5, 1.5))
        self._steps += 1
        if self._steps in self._setup.stops:
            step.stop()
            self._on_stop(step.replica)


class Client(Server):
    """The client of a fit: starts replicas, reads events, collects the results.

    Attributes:
        events: Events of the run, in order.
        error: Type and text of the error that ended the fit, or None.
        model: The merged result, once there is one.
        over: Whether the fit has ended.
    """

    def __init__(self, cluster, setup, resume):
        super().__init__(cluster.network, "tcp://client:1", "client")
        self.setup = setup
        self.events = []
        self.reports = []
        self.error = self.model = None
        self.over = False
        self._cluster = cluster
        self._sources = {"train": Parts(setup.lengths, setup.seed)}
        if setup.validation:
            self._sources["validation"] = Parts(setup.validation, setup.seed + 1)
        cluster.oracle.validation = self._sources.get("validation")
        self.checkpoints = None
        if setup.checkpoint_every is not None:
            url = f"memory://sim-{cluster.seed}"
            rule, series = Checkpoint(url, setup.checkpoint_every), Series.at(url)
            first, before = max(series.numbers(), default=0) + 1, 0
            run = f"run from {first}"
            if resume is not None:
                before = resume.count
            self.checkpoints = CheckpointPlan(series, rule, "fit", run, first, before)
        self._replicas = {}  # results by replica; None: not there yet
        self._results = {}
        cluster.scheduler.clients.add(self.name)
        spec = replica_spec(
            Weights(),
            objective=mean_output,
            optimizer=self._build,
            master=setup.master,
            epochs=setup.epochs,
            evaluation=EvaluationPlan(
                setup.epochs, validates="validation" in self._sources
            ),
            timeouts=setup.timeouts,
            read=ReadOptions(setup.batch_size),
            seed=setup.seed,
            max_loss_rise=None,
            telemetry_every=None,
            rows=self._sources["train"].first_rows,
            callbacks=[Pace(cluster.world, setup, self._stopped)],
            checkpoints=self.checkpoints,
            resume=resume,
        )
        self.spec: ReplicaSpec = dataclasses.replace(
            spec, outbox_bytes=setup.outbox_bytes, inbox_bytes=setup.inbox_bytes
        )

    def _build(self, parameters):
        """Make the optimizer of a replica, which takes its time."""
        world = self.network.world
        world.current.sleep(world.random.uniform(0.0, self.setup.build_s))
        return sgd(parameters)

    def _stopped(self, replica):
        """A replica stops the fit."""
        self.network.world.note(f"replica-{replica}", "stops the fit")
        self._cluster.on_moment("stop", self._replicas.get(replica))

    # ---- its event loop

    async def fit(self):
        """Train; `model` or `error` is there afterwards."""
        try:
            await self._train()
        except errors.DaskDLError as error:
            self.error = type(error).__name__, str(error)
        self.note(f"ends with {'a model' if self.error is None else self.error}")
        self.over = True

    def note(self, what):
        self.network.world.note(self.name, what)

    async def _train(self):
        setup, workers = self.setup, list(self._cluster.workers.values())
        places = [w for _ in range(setup.replicas) for w in workers]
        there = dict(enumerate(worker.address for worker in places))
        routing = ROUTINGS[setup.routing]
        run = run_spec_of(
            self.spec,
            there,
            self._sources,
            None,
            routing.relayed,
            setup.relay_bytes,
            setup.merge_s if routing.merges else 0.0,
        )
        run = dataclasses.replace(run, sum_fan_out=setup.sum_fan_out)
        await self._ask(protocol.OPEN, spec=vars(run), client=self.name)
        self._cluster.opened()
        for replica, address in there.items():
            await self._submit(replica, address)
        try:
            await self._follow()
            if self.error is not None:
                await self._ask(protocol.STOP, reason="the fit ends")
            await self._left()
            await self._ask(protocol.CLOSE)
        except errors.DaskDLError:
            self.start(self._request_close())
            raise
        results = [result for result in self._results.values() if result is not None]
        if self.error is None and not any(result.finished for result in results):
            self.error = "RunError", "no replica has come to the end"
        if self.error is None:
            self.model = merge(results)
            if self.checkpoints is not None and self.reports:
                self.checkpoints.conclude()

    async def _follow(self):
        posted, ended = (), False
        while posted or not ended:
            ended = self.error is not None or all(
                replica in self._results for replica in self._replicas
            )
            wait_s = 0 if ended else POLL_S
            answer = await self._ask(protocol.WATCH, timeout_s=wait_s)
            posted = answer["events"]
            for event in posted:
                await self._handle(event)

    async def _handle(self, event):
        self.events.append(event)
        match event:
            case {"kind": "removed" | "lost" | "retired", "replica": replica}:
                if replica not in self._results:
                    self._replicas.pop(replica, None)
            case {"kind": "worker", "worker": worker}:
                await self._assign(worker)
            case {"kind": "over", "waiting": waiting}:
                for replica in waiting:
                    self._replicas.pop(replica, None)
            case {"kind": "failed", "type": kind, "summary": summary}:
                self.error = self.error or (kind, summary)
            case {"kind": "stopped", "summary": summary}:
                self.error = self.error or ("RunError", summary)
            case {"kind": "report"}:
                self.reports.append(event)
                self.note(f"reads the report of epoch {event['epoch']}")

    async def _assign(self, worker):
        setup = self.setup
        fields = {"worker": worker, "replicas": setup.replicas}
        answer = await self._ask(protocol.ASSIGN, **fields)
        for replica in answer.get("replicas", ()):
            await self._submit(replica, worker)

    async def _left(self):
        """Wait for the replicas that are still there."""
        loop = self.process.loop
        end = loop.time() + self.setup.timeouts.stop
        while loop.time() < end:
            if all(replica in self._results for replica in self._replicas):
                return
            await asyncio.sleep(0.1)

    async def _request_close(self):
        """Ask a scheduler that does not answer to close the run."""
        fields = {"run": self.spec.run, "secret": self.spec.secret}
        with contextlib.suppress(OSError):
            await self.network.ask(self, SCHEDULER, protocol.CLOSE, fields)

    async def _ask(self, operation, **fields):
        if operation != protocol.OPEN:
            fields |= {"run": self.spec.run, "secret": self.spec.secret}
        bound = self.setup.timeouts.bound("request")
        try:
            async with asyncio.timeout(bound.seconds):
                answer = await self.network.ask(self, SCHEDULER, operation, fields)
        except TimeoutError:
            raise errors.WaitTimeoutError(
                f"the scheduler did not answer within {bound}"
            ) from None
        except OSError as error:
            raise errors.ChannelError(f"the scheduler was lost: {error}") from error
        if not isinstance(answer, dict) or answer["status"] == Answer.REFUSED:
            raise errors.ChannelError(f"the scheduler answered {answer!r}")
        return answer

    # ---- tasks

    async def _submit(self, replica, address):
        """Start a replica, as Dask starts a task."""
        worker = self._cluster.scheduler.workers.get(address)
        if worker is None:  # the model could not be sent there
            await self._ask(protocol.UNASSIGN, replica=replica)
            return
        self._replicas[replica] = address
        world = self.network.world
        delay_s = self.network.latency(self, worker)
        delay_s += world.random.uniform(0.0, self.setup.start_s)
        world.after(delay_s, worker.process, lambda: self._begin(replica, worker))

    def _begin(self, replica, worker):
        result = worker.process.start(f"replica-{replica}", self._run, replica, worker)
        result.add_done_callback(lambda result: self._ended(replica, result))

    def _ended(self, replica, result):
        def arrive():
            error = result.exception()
            if error is not None:
                self.note(f"the task of replica {replica} failed: {error!r}")
                self.error = self.error or (type(error).__name__, str(error))
            self._results[replica] = None if error else result.result()

        self.network.world.after(self.network.latency_s, self.process, arrive)

    def _run(self, replica, worker):
        """The task of a replica."""
        spec, oracle = self.spec, self._cluster.oracle
        of_replica = dataclasses.replace(spec, model=Weights())
        channel = WatchedChannel(
            worker.plugin,
            of_replica.channel_spec(replica, self.setup.routing),
            oracle,
        )
        channel.on_publish = functools.partial(
            self._cluster.on_moment, "publish", worker.address
        )
        channel.damages = functools.partial(self._cluster.damages, worker.address)
        chance, forgets = self.network.world.random, self.setup.forgets
        channel.forgets = lambda: bool(forgets) and chance.random() < forgets
        sources = dict(self._sources)
        if "validation" in sources:
            world, mean_s = self.network.world, self.setup.mean_step_s
            began = functools.partial(
                self._cluster.on_moment, "validate", worker.address
            )
            sources["validation"] = PacedParts(
                sources["validation"], world, mean_s, began
            )
        store = LocalStore(sources, channel, spec.timeouts, 1)
        finished = False
        try:
            result = Replica(
                replica, of_replica, channel, torch.device("cpu"), store
            ).run()
            finished = result.finished
            if channel.gave_up:
                oracle.gave_up(replica)
            return result
        finally:
            store.close()
            channel.leave(retires=channel.closing and not finished)


def watched(master, oracle):
    """The master with exchanges that the oracle looks at."""
    sharing = isinstance(master, GradientSharing)
    kind = WatchedSharing if sharing else WatchedAveraging
    values = {
        option.name: getattr(master, option.name)
        for option in dataclasses.fields(master)
    }
    return kind(**values, oracle=oracle)


class Cluster:
    """A scheduler, workers and a client.

    Args:
        seed: Of everything.
        setup: What is trained.
        trace: Gets what happens.
        resume: The checkpoint of an earlier fit, which this one resumes.

    Attributes:
        live: The run on the scheduler, once it is open.
        on_moment: Called with the name of what has happened to a replica, and the
            address of its worker.
        damages: Called with the address of a worker before an update of a replica
            there is kept and sent; returns whether it is damaged there.
    """

    def __init__(self, seed, setup, trace=None, resume=None):
        self.seed = seed
        self.world = World(seed, setup.preempted, trace)
        self._undo = pytest.MonkeyPatch()
        for module in (checkpointing, replicas):
            self._undo.setattr(module, "run_in_thread", self._read_or_write)
        for module in (transport, scheduler, worker):
            self._undo.setattr(module, "BATCH_BYTES", setup.batch_bytes)
        self._undo.setattr(protocol, "PART_BYTES", setup.part_bytes)
        self._undo.setattr(merging, "TREE_BYTES", setup.tree_bytes)
        for module in (scheduler, worker):
            self._undo.setattr(module, "INLINE_BYTES", setup.inline_bytes)
        self.network = Network(self.world)
        self.scheduler = SimScheduler(self.network)
        self.workers = {}
        for _ in range(setup.workers):
            self.add_worker()
        self.oracle = Oracle(self)
        self.oracle.resumes = resume is not None
        self.on_moment = lambda moment, worker=None: None
        self.damages = lambda worker: False
        setup = dataclasses.replace(setup, master=watched(setup.master, self.oracle))
        self.client = Client(self, setup, resume)

    def add_worker(self, address=None):
        """Start a worker, which has no replica yet."""
        number = len(self.workers)
        address = address or f"tcp://worker-{number}:1"
        name = f"worker-{number}"
        worker = SimWorker(self.network, self.scheduler, address, name)
        self.workers[name] = worker
        return worker

    def arrive(self, worker):
        """Let the scheduler know of a new worker."""
        versions = {"daskdl": VERSION, "torch": str(torch.__version__), "error": ""}
        fields = {"worker": worker.address, "versions": versions}

        async def ask():
            with contextlib.suppress(OSError):  # it is not used
                await self.network.ask(worker, SCHEDULER, protocol.ARRIVE, fields)

        worker.start(ask())

    def opened(self):
        """The run is open."""
        self.live = self.scheduler.extensions[NAME].runs[self.client.spec.run]
        state = self.live.state
        self.oracle.watch_leases(state)
        self.oracle.watch_relay(state)
        self.on_moment("open")
        members = state.members.replicas

        def watch(method, replica_at):
            original = getattr(state, method)

            def watched_(*arguments, **options):
                held = state.holding
                result = original(*arguments, **options)
                replica, moment = arguments[replica_at], method
                worker = members[replica].worker
                if method == "arrive" and ", round " in arguments[0]:
                    moment = "compare"
                elif method == "arrive" and arguments[-1] == BarrierKind.AGREE:
                    self.on_moment("agree", worker)
                if method != "join" or replica not in state.spec.replicas:
                    self.on_moment(moment, worker)
                if state.holding and not held:
                    if state.spec.relayed:
                        self.oracle.held()
                    self.on_moment("hold", worker)
                return result

            setattr(state, method, watched_)

        watch("arrive", 1)
        for method in ("join", "activate", "leave", "lose"):
            watch(method, 0)

    def _read_or_write(self, action, name):
        """Access a checkpoint in a thread of the world, which takes its time."""
        world, process = self.world, self.world.current.process

        def act():
            world.current.sleep(world.random.uniform(0.0, MAX_STORAGE_S))
            return action()

        return process.start(name, act)

    def close(self):
        """End all that is left, but checkpoints."""
        self.world.close()
        self._undo.undo()

    def fit(self, limit_s):
        """Run the fit to its end."""
        self.client.start(self.client.fit())
        self.world.run(lambda: self.client.over, limit_s)
