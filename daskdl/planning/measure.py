"""Measures the costs of a replica's steps, exchanges and requests on this machine.

Dask workers measure, several at once if workers are to share the machine. Each replica
exchanges with itself: its channel returns its own updates.
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

SETTLING = 100  # most exchanges until thresholds have settled
SETTLING_S = 1.0  # most seconds with gradients, and as many without
POWER = 4  # exponent of each change of a threshold while it settles
WARM_STEPS = 2  # steps that compile and allocate, not timed
LEAST_STEPS, MOST_STEPS = 3, 200
TIMED_S = 2.5  # seconds of timed steps, if they are at least LEAST_STEPS
WARM_REQUESTS, REQUESTS = 10, 40
MANY = 9  # updates in a larger request
PAUSE_S = 0.003  # between requests, so that caches do not stay warm


@dataclass(frozen=True)
class BenchmarkSpec:
    """A step to measure."""

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
        run = RunSpec(0, {0: "", 1: ""}, {}, None, 0, in_step, 0, 1, vars(timeouts))
        size = sum(group.flat.numel() for group in parameters.groups)
        spec = ChannelSpec(
            *(0, 0, size, grid_for(parameters)),
            *(OUTBOX_BYTES, INBOX_BYTES, timeouts),
            in_step=in_step,
        )
        super().__init__(LocalRun(run), spec)
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
        """Receive the updates that were sent; return their bytes."""
        sent, self._sent = self._sent, []
        for message, frame in sent:
            self._inbox.put(message._replace(origin=1), codec.decode(frame.data))
        return sum(frame.nbytes for _, frame in sent)


@dataclass(frozen=True)
class _Hastened(ThresholdAlgorithm):
    """Wraps a rule and applies each change `POWER` times, to settle faster."""

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
        """Whether the threshold still changes, without reversing."""
        if not self.changes:
            return True
        previous, change = self.changes[-2:][0], self.changes[-1]
        return change != 1 and (previous > 1) == (change > 1)


class StepBenchmark:
    """Steps and exchanges of a replica, with settled thresholds."""

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
        # Dense updates of the first steps would hide all later updates.
        every = spec.master.exchange_every
        self._every = MEASURED_EVERY if every == "auto" else every
        self._master = dataclasses.replace(
            spec.master, warmup_steps=0, exchange_every=self._every
        )
        self._settle()

    def _attach(
        self,
        master: GradientSharing,
        carried: State | None = None,
    ) -> None:
        parameters = FlatParameters(self._module)
        self._channel = LoopbackChannel(parameters, master.synchronous)
        self._exchange = master.attach(
            ReplicaContext(
                self._module,
                self._channel,
                replica=0,
                members=[0],  # takes the whole residual; the other joins at once
            )
        )
        if carried is not None:
            self._exchange.load_(carried, [])

    def _settle(self) -> None:
        """Bring thresholds to their values after some hundred exchanges.

        Starts with training steps. If these take too long, repeats the movement of the
        last step instead, and undoes it at the end; the residual stays.
        """
        rules = {p: _Hastened(rule) for p, rule in self._master.thresholds.items()}
        self._attach(dataclasses.replace(self._master, threshold=rules))
        parameters = trainable(self._module)
        if not self._settles(rules, self.step):
            before = [p.detach().clone() for p in parameters]
            self._move()
            moved = [p.detach() - b for p, b in zip(parameters, before, strict=True)]
            self._settles(rules, lambda: self._repeat(moved))
            for parameter, values in zip(parameters, before, strict=True):
                parameter.detach().copy_(values)
        self._attach(self._master, self._exchange.carried(ended=True))

    def _settles(
        self, rules: Mapping[str, _Hastened], exchange: Callable[[], object]
    ) -> bool:
        deadline = time.perf_counter() + SETTLING_S
        for _ in range(SETTLING):
            exchange()
            if not any(rule.moving for rule in rules.values()):
                return True
            if time.perf_counter() > deadline:
                break
        return False

    def _repeat(self, moved: Sequence[Tensor]) -> None:
        for _ in range(self._every):
            self._exchange.before_step(0)
            for parameter, movement in zip(trainable(self._module), moved, strict=True):
                parameter.detach().add_(movement)
            self._exchange.after_step(0, len(self.spec.rows[0]))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _move(self) -> list[float]:
        """Take an optimizer step; return the times after gradients and after update."""
        x, y = self.spec.rows
        # Drawn with replacement, since the model would overfit a constant batch.
        drawn = self._random.integers(0, len(x), len(x))
        loss, _ = self._stepper.backward(
            [(torch.from_numpy(x[drawn]), torch.from_numpy(y[drawn]))]
        )
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} within some steps; lower the learning rate "
                "of optimizer, or look for NaN in batch"
            )
        computed = self._now()
        exchange = self._exchange
        self._stepper.update(exchange.learning_rate_scale, exchange.rate_factor)
        return [computed, self._now()]

    def step(self) -> dict[str, float]:
        """Receive an update, take steps up to the next exchange, and return costs."""
        every, started = self._every, self._now()
        nbytes = self._channel.receive()
        decode_s = self._now() - started
        parts = np.zeros(4)
        for _ in range(every):
            marks = [self._now()]
            self._exchange.before_step(0)
            marks += [self._now(), *self._move()]
            self._exchange.after_step(0, len(self.spec.rows[0]))
            parts += np.diff([*marks, self._now()])
        apply_s, gradients_s, optimizer_s, encode_s = parts.tolist()
        return {
            "update_bytes": nbytes,
            "decode_s": decode_s,
            "apply_s": apply_s,
            "gradients_s": gradients_s / every,
            "optimizer_s": optimizer_s / every,
            "encode_s": encode_s,
        }

    def measure(self) -> Costs:
        """Time steps for some seconds, then requests during further steps."""
        for _ in range(WARM_STEPS):
            self.step()
        self._exchange.stats()
        times: list[dict[str, float]] = []
        deadline = time.perf_counter() + TIMED_S
        while len(times) < LEAST_STEPS or (
            len(times) < MOST_STEPS and time.perf_counter() < deadline
        ):
            times.append(self.step())
        stats = self._exchange.stats()
        # Means, since medians would hide pauses due to other work on the same cores,
        # and the few exchanges that send something if most send nothing.
        means = {n: float(np.mean([step[n] for step in times])) for n in times[0]}
        frame = np.zeros(max(1, round(means["update_bytes"])), np.uint8)
        requests = run_in_thread(
            lambda: asyncio.run(request_costs(frame)), "daskdl-plan"
        )
        while not requests.done():
            self.step()
        request_s, item_s = requests.result()
        return Costs(
            rows=len(self.spec.rows[0]),
            parameters=sum(p.numel() for p in trainable(self._module)),
            threads=self.spec.threads,
            request_s=request_s,
            item_s=item_s,
            density=stats.density_sum / max(stats.exchanges, 1),
            adaptive=self._adaptive,
            **means,
        )


async def request_costs(frame: NDArray[np.uint8]) -> tuple[float, float]:
    """Send frames over TCP on this machine; return CPU seconds at either end.

    The first is the cost of a request with one frame, the second of each further frame.
    """

    async def take(items: Any) -> dict[str, int]:
        return {"accepted": sum(unwrap(item).nbytes > 0 for item in items)}

    async def cpu_s(items: int, count: int) -> float:
        taken = []
        for _ in range(count):
            await asyncio.sleep(PAUSE_S)
            started = time.thread_time()
            await peer.take(items=[wrap(frame) for _ in range(items)])
            taken.append(time.thread_time() - started)
        return float(np.median(taken)) / 2  # this thread is both ends

    server = Server({"take": take})
    await server.listen("tcp://127.0.0.1:0")
    peer: Any = rpc(server.address)
    try:
        await cpu_s(1, WARM_REQUESTS)
        one_s, many_s = await cpu_s(1, REQUESTS), await cpu_s(MANY, REQUESTS)
    finally:
        await peer.close_rpc()
        await server.close()
    return one_s, max(0.0, many_s - one_s) / (MANY - 1)


def _prepared(packed: Packed[BenchmarkSpec]) -> StepBenchmark:
    spec = packed.unpack()
    with process_environment("auto", spec.threads) as device:
        return StepBenchmark(spec, device)


def _measured(benchmark: StepBenchmark) -> Costs:
    with process_environment("auto", benchmark.spec.threads):
        return benchmark.measure()


def _wait(client: Client, futures: Sequence[Future], timeout_s: float | None) -> None:
    """Wait for all futures, or raise the first error."""
    for future in as_completed(futures, loop=client.loop, timeout=timeout_s):
        if future.status == "error":
            future.result()


def measure(
    packed: Packed[BenchmarkSpec], processes: int = 1, patience_s: float | None = None
) -> list[Costs]:
    """Measure on Dask workers, and return the costs measured by each.

    A single worker is a thread of this process; several workers are processes that
    measure at the same time. `patience_s` is added to the timeout of their start.
    """
    bound = Timeouts.from_config().bound("join")
    bound = bound._replace(seconds=bound.seconds + (patience_s or 0.0))
    seconds = None if patience_s is None else bound.seconds
    with (
        preserved_random_state(),  # Dask draws too
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=processes,
            threads_per_worker=1,
            processes=processes > 1,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address=":0",
            memory_limit=None,
            silence_logs=logging.CRITICAL,  # errors are raised here
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        submit = functools.partial(client.submit, pure=False)
        try:
            spec = client.scatter(packed, broadcast=True, hash=False)
            benchmarks = [submit(_prepared, spec, workers=[w]) for w in workers]
            _wait(client, benchmarks, seconds)  # none measures before all are ready
            pairs = zip(benchmarks, workers, strict=True)
            costs = [
                submit(_measured, benchmark, workers=[w]) for benchmark, w in pairs
            ]
            _wait(client, costs, seconds)
            return list(client.gather(costs))
        except KilledWorker as error:
            raise RunError(f"a process that measures costs died: {error}") from error
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"a process did not finish measuring within {bound}"
            ) from error
