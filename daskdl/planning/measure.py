"""Measures the costs of a replica's steps, exchanges and requests on this machine.

Dask workers measure, several at the same time if workers are to share the machine. Each
replica exchanges updates with itself, through a channel that returns what was sent.
"""

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
import numpy as np
import torch
from distributed import Client, Future, KilledWorker, LocalCluster, as_completed
from distributed.core import Server, rpc
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from daskdl import codec
from daskdl.channel.leasing import RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import ChannelSpec, Message, PeerProgress, unwrap, wrap
from daskdl.compression.flat import FlatParameters, grid_for
from daskdl.compression.thresholds import Outcome, Residual, ThresholdAlgorithm
from daskdl.config import Timeouts
from daskdl.data.checks import optimizer_of, preserved_random_state, trainable
from daskdl.errors import DivergedError, RunError, WaitTimeoutError
from daskdl.objective import Objective
from daskdl.planning.cost_model import MEASURED_EVERY, Costs
from daskdl.process_settings import process_environment
from daskdl.serialization import Packed
from daskdl.training.base import ReplicaContext, evaluating_in, train_
from daskdl.training.checkpointing import run_in_thread
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepper, Stepping, is_adaptive
from daskdl.training.state import State

SETTLING_EXCHANGES = 100  # most exchanges until thresholds have settled
SETTLING_S = 1.0  # most seconds for that with gradients, and again without
POWER = 4  # exponent of each change of a threshold while it settles
WARM_STEPS = 2  # untimed steps, which compile and allocate
MIN_STEPS, MAX_STEPS = 3, 200
TIMED_S = 2.5  # seconds of timed steps, or longer for MIN_STEPS
WARM_REQUESTS, REQUESTS = 10, 40
LARGE_REQUEST = 9  # updates in a large request
PAUSE_S = 0.003  # between requests, so that caches do not stay warm


@dataclass(frozen=True)
class BenchmarkSpec:
    """Picklable: a step to measure."""

    model: nn.Module
    objective: Objective
    optimizer: Any
    rows: tuple[NDArray[Any], NDArray[Any]]
    master: GradientSharing
    threads: int


class LoopbackChannel(LocalChannel):
    """A channel of two replicas that returns each update as an update of the other."""

    def __init__(self, parameters: FlatParameters, in_step: bool) -> None:
        timeouts = Timeouts.from_config()
        run_spec = RunSpec(
            run=0,
            replicas={0: "", 1: ""},
            sizes={},
            seed=None,
            epochs_before=0,
            synchronous=in_step,
            relay_bytes=0,
            min_replicas=1,
            timeouts=vars(timeouts),
        )
        channel_spec = ChannelSpec(
            run=0,
            replica=0,
            size=sum(group.flat.numel() for group in parameters.groups),
            grid=grid_for(parameters),
            outbox_bytes=OUTBOX_BYTES,
            inbox_bytes=INBOX_BYTES,
            timeouts=timeouts,
            in_step=in_step,
        )
        super().__init__(LocalRun(run_spec), channel_spec)
        self._sent: list[tuple[Message, NDArray[np.uint8]]] = []
        self._inbox.record_progress(1, PeerProgress())

    @override
    def _announce(self, progress: PeerProgress) -> None:
        self._inbox.progress = progress
        self._inbox.record_progress(1, PeerProgress(progress.step))

    @override
    def _queue(self, message: Message, frame: NDArray[np.uint8], force: bool) -> bool:
        self._sent.append((message, frame))
        self._inbox.advance(message)
        self._inbox.record_progress(1, PeerProgress(message.step))
        return True

    def receive(self) -> int:
        """Receive the updates that were sent, and return their size in bytes."""
        sent, self._sent = self._sent, []
        for message, frame in sent:
            self._inbox.put(message._replace(origin=1), codec.decode(frame.data))
        return sum(frame.nbytes for _, frame in sent)

    def receive_dense(self) -> None:
        """Receive an update of all parameters; no other update may follow."""
        step, sequence = self._inbox.progress.step, self._inbox.received.complete(1) + 1
        stamp = codec.Stamp(0, 1, sequence, step)
        zeros_N = np.zeros(self._spec.size, np.int32)
        frame = codec.encode_dense(stamp, self._spec.grid, zeros_N)
        message = Message.update(stamp, step, frame.nbytes)
        self._inbox.put(message, codec.decode(frame.data))


@dataclass(frozen=True)
class _FastSettling(ThresholdAlgorithm):
    """Wraps a rule and applies each of its changes `POWER` times."""

    rule: ThresholdAlgorithm
    changes: list[float] = field(default_factory=list)

    @override
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        threshold = self.rule.next_threshold(residual, last)
        if last is None:
            return threshold
        self.changes.append(threshold / last.threshold)
        return last.threshold * self.changes[-1] ** POWER

    @property
    def moving(self) -> bool:
        """Whether the threshold still moves, in the same direction as before."""
        if not self.changes:
            return True
        previous, change = self.changes[-2:][0], self.changes[-1]
        return change != 1 and (previous > 1) == (change > 1)


class StepBenchmark:
    """Measures the steps and exchanges of a replica whose thresholds have settled."""

    def __init__(self, spec: BenchmarkSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        evaluating = evaluating_in(spec.model)
        self._module = train_(spec.model.to(device), evaluating)
        optimizer = optimizer_of(spec.optimizer, self._module)
        self._adaptive = is_adaptive(optimizer)
        self._stepper = Stepper(
            self._module, spec.objective, optimizer, Stepping(), device
        )
        self._random = np.random.default_rng(0)
        every = spec.master.exchange_every
        self._every = MEASURED_EVERY if every == "auto" else every
        # Dense updates of the first steps would hide all later updates.
        self._master = dataclasses.replace(
            spec.master, warmup_steps=0, exchange_every=self._every
        )
        self._settle()

    def _attach(self, master: GradientSharing, carried: State | None = None) -> None:
        """Start a new exchange, with the carried state of the previous one."""
        parameters = FlatParameters(self._module)
        self._channel = LoopbackChannel(parameters, master.synchronous)
        self._exchange = master.attach(
            ReplicaContext(
                self._module,
                self._channel,
                replica=0,
                members=[0],  # so replica 0 takes the whole residual
            )
        )
        if carried is not None:
            self._exchange.load_(carried, [])

    def _settle(self) -> None:
        """Bring thresholds to their values after some hundred exchanges.

        This takes training steps. If they are too slow, it repeats the movement of the
        last step instead, and undoes the movement at the end; the residual stays.
        """
        rules = {
            pattern: _FastSettling(rule)
            for pattern, rule in self._master.thresholds.items()
        }
        self._attach(dataclasses.replace(self._master, threshold=rules))
        parameters = trainable(self._module)
        if not self._settles(rules, self.interval):
            before = [p.detach().clone() for p in parameters]
            self._step()
            movement = [p.detach() - b for p, b in zip(parameters, before, strict=True)]
            self._settles(rules, lambda: self._repeat(movement))
            for parameter, values in zip(parameters, before, strict=True):
                parameter.detach().copy_(values)
        self._attach(self._master, self._exchange.carried(ended=True))

    def _settles(
        self, rules: Mapping[str, _FastSettling], exchange: Callable[[], object]
    ) -> bool:
        """Exchange until the thresholds have settled; return whether they have."""
        deadline = time.perf_counter() + SETTLING_S
        for _ in range(SETTLING_EXCHANGES):
            exchange()
            if not any(rule.moving for rule in rules.values()):
                return True
            if time.perf_counter() > deadline:
                break
        return False

    def _repeat(self, movement: Sequence[Tensor]) -> None:
        """Move the parameters as a step did, up to the next exchange."""
        for _ in range(self._every):
            self._exchange.before_step(0)
            for parameter, delta in zip(trainable(self._module), movement, strict=True):
                parameter.detach().add_(delta)
            self._exchange.after_step(0, len(self.spec.rows[0]))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _step(self) -> tuple[float, float]:
        """Take an optimizer step; return the times after gradients and after update."""
        x, y = self.spec.rows
        # Drawn with replacement, because the model would overfit a constant batch.
        drawn = self._random.integers(0, len(x), len(x))
        loss, _ = self._stepper.backward(
            [(torch.from_numpy(x[drawn]), torch.from_numpy(y[drawn]))]
        )
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} within a few steps; lower the learning rate "
                "of optimizer, and check batch for NaN and infinity"
            )
        computed = self._now()
        exchange = self._exchange
        self._stepper.update(exchange.learning_rate_scale, exchange.rate_factor)
        return computed, self._now()

    def interval(self) -> dict[str, float]:
        """Receive an update, take steps up to the next exchange, and return costs."""
        started = self._now()
        nbytes = self._channel.receive()
        decode_s = self._now() - started
        clock = []
        for _ in range(self._every):
            started = self._now()
            self._exchange.before_step(0)
            applied = self._now()
            computed, updated = self._step()
            self._exchange.after_step(0, len(self.spec.rows[0]))
            clock.append([started, applied, computed, updated, self._now()])
        before_s, gradients_s, optimizer_s, after_s = np.diff(clock).T
        # The first step applies an update, and the last one sends an update.
        rest_s = [before_s[1:], after_s[:-1]] if self._every > 1 else [[0.0], [0.0]]
        before_rest_s, after_rest_s = map(float, map(np.median, rest_s))
        return {
            "update_bytes": nbytes,
            "decode_s": decode_s,
            "gradients_s": float(gradients_s.mean()),
            "optimizer_s": float(optimizer_s.mean()),
            "overhead_s": before_rest_s + after_rest_s,
            "apply_s": max(0.0, float(before_s[0]) - before_rest_s),
            "encode_s": max(0.0, float(after_s[-1]) - after_rest_s),
        }

    def _dense_s(self) -> float:
        """Measure how long it takes to apply an update of all parameters, seconds."""
        durations = []
        for _ in range(MIN_STEPS):
            self._channel.receive_dense()
            started = self._now()
            self._exchange.before_step(0)
            durations.append(self._now() - started)
            self._step()
            self._exchange.after_step(0, len(self.spec.rows[0]))
        return float(np.median(durations))

    def measure(self) -> Costs:
        """Measure steps for a few seconds, then requests during further steps."""
        for _ in range(WARM_STEPS):
            self.interval()
        self._exchange.stats()  # starts the statistics again
        intervals: list[dict[str, float]] = []
        deadline = time.perf_counter() + TIMED_S
        while len(intervals) < MIN_STEPS or (
            len(intervals) < MAX_STEPS and time.perf_counter() < deadline
        ):
            intervals.append(self.interval())
        stats = self._exchange.stats()
        # Medians would hide pauses due to other work on the same cores, and the few
        # exchanges that send something if most send nothing.
        means = {
            name: float(np.mean([costs[name] for costs in intervals]))
            for name in intervals[0]
        }
        frame = np.zeros(max(1, round(means["update_bytes"])), np.uint8)
        requests = run_in_thread(
            lambda: asyncio.run(request_costs(frame)), "daskdl-plan"
        )
        while not requests.done():
            self.interval()
        request_s, item_s = requests.result()
        return Costs(
            rows=len(self.spec.rows[0]),
            parameters=sum(p.numel() for p in trainable(self._module)),
            threads=self.spec.threads,
            request_s=request_s,
            item_s=item_s,
            density=stats.density_sum / max(stats.exchanges, 1),
            adaptive=self._adaptive,
            dense_s=self._dense_s(),
            **means,
        )


async def request_costs(frame: NDArray[np.uint8]) -> tuple[float, float]:
    """Send frames over TCP on this machine, and measure CPU seconds at either end.

    Returns:
        The cost of a request with one frame, and of each further frame in a request.
    """

    async def take(items: Any) -> dict[str, int]:
        return {"accepted": sum(unwrap(item).nbytes > 0 for item in items)}

    async def request_cpu_s(frames: int, requests: int) -> float:
        durations = []
        for _ in range(requests):
            await asyncio.sleep(PAUSE_S)
            started = time.thread_time()
            await peer.take(items=[wrap(frame) for _ in range(frames)])
            durations.append(time.thread_time() - started)
        return float(np.median(durations)) / 2  # this thread serves both ends

    server = Server({"take": take})
    await server.listen("tcp://127.0.0.1:0")
    peer: Any = rpc(server.address)
    try:
        await request_cpu_s(1, WARM_REQUESTS)
        small_s = await request_cpu_s(1, REQUESTS)
        large_s = await request_cpu_s(LARGE_REQUEST, REQUESTS)
    finally:
        await peer.close_rpc()
        await server.close()
    return small_s, max(0.0, large_s - small_s) / (LARGE_REQUEST - 1)


def _prepare(packed: Packed[BenchmarkSpec]) -> StepBenchmark:
    spec = packed.unpack()
    with process_environment("auto", spec.threads) as device:
        return StepBenchmark(spec, device)


def _run(benchmark: StepBenchmark) -> Costs:
    with process_environment("auto", benchmark.spec.threads):
        return benchmark.measure()


def _wait(client: Client, futures: Sequence[Future], timeout_s: float | None) -> None:
    """Wait for all futures; raise the first error of any."""
    for future in as_completed(futures, loop=client.loop, timeout=timeout_s):
        if future.status == "error":
            future.result()


def measure(
    packed: Packed[BenchmarkSpec], processes: int = 1, patience_s: float | None = None
) -> list[Costs]:
    """Measure on Dask workers, and return the costs measured by each.

    Args:
        packed: The step to measure.
        processes: 1: a thread of this process measures. More: this number of processes
            measure at the same time.
        patience_s: Time that measuring may take in addition to ``daskdl.timeouts.join``
            before a WaitTimeoutError, seconds. None: wait without a bound.
    """
    bound = Timeouts.from_config().bound("join")
    bound = bound._replace(seconds=bound.seconds + (patience_s or 0.0))
    timeout_s = None if patience_s is None else bound.seconds
    with (
        preserved_random_state(),  # Dask draws random numbers too
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=processes,
            threads_per_worker=1,
            processes=processes > 1,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address=":0",
            memory_limit=None,
            silence_logs=logging.CRITICAL,  # errors are raised instead
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        submit = functools.partial(client.submit, pure=False)
        try:
            spec = client.scatter(packed, broadcast=True, hash=False)
            benchmarks = [
                submit(_prepare, spec, workers=[worker]) for worker in workers
            ]
            _wait(client, benchmarks, timeout_s)  # all start to measure together
            costs = [
                submit(_run, benchmark, workers=[worker])
                for benchmark, worker in zip(benchmarks, workers, strict=True)
            ]
            _wait(client, costs, timeout_s)
            return list(client.gather(costs))
        except KilledWorker as error:
            raise RunError(f"a process that measures costs died: {error}") from error
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"a process did not finish measuring within {bound}"
            ) from error
