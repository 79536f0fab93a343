"""What a request over Dask's comms costs, measured between two ends in one thread.

Steps and exchanges of one replica without others, each part timed.

They are those of a replica: the same stepper, the same compressor, the same codec. In
the place of another replica's update the replica's own last one comes back to it.

What a Dask worker does beside a replica, whatever that computes.

Costs of a replica on this machine, as means over rehearsed steps.

Processes that rehearse at the same time, so that what they share is shared.

A process that measures at the same time as others.

It is started by :mod:`daskdl.planning.measure`, reads what to rehearse from its
standard input, says when it is ready, measures when it is told to, and goes on
rehearsing until the input ends, so that others are not measured alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import torch
from distributed import LocalCluster
from distributed.core import Server, rpc
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl import codec
from daskdl.channel.protocol import unwrap, wrap
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.config import Bound, Timeouts
from daskdl.data.checks import random_state_left_alone, trainable
from daskdl.errors import DivergedError, RunError, WaitTimeoutError
from daskdl.objective import Objective
from daskdl.planning.cost_model import Costs
from daskdl.serialization import Packed
from daskdl.thresholds import Sent
from daskdl.training.checkpointing import run_in_thread
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepper, Stepping
from daskdl.training.replica import process_environment

WARM, TIMED = 10, 40  # requests
MANY = 9  # items in a larger one
PAUSE_S = 0.003  # between requests, so that each finds what a replica's finds: cold


class RequestCosts(NamedTuple):
    """CPU time at either end, seconds."""

    request_s: float  # with one item
    item_s: float  # for each further one


def request_costs(
    frame: NDArray[np.uint8], meanwhile: Callable[[], object]
) -> RequestCosts:
    """Send a frame to and fro, over TCP on this machine.

    It has an event loop of its own, in a thread: the caller may be in one.

    Args:
        frame: Of an update.
        meanwhile: What the caller does again and again until it is done, as a replica
            trains beside its worker's event loop.
    """
    measured = run_in_thread(lambda: asyncio.run(_measure(frame)), "daskdl-plan")
    while not measured.done():
        meanwhile()
    return measured.result()


async def _measure(frame: NDArray[np.uint8]) -> RequestCosts:
    async def take(items: Any) -> dict[str, int]:
        return {"accepted": sum(unwrap(item).nbytes > 0 for item in items)}

    server = Server({"take": take})
    await server.listen("tcp://127.0.0.1:0")
    peer = rpc(server.address)
    try:
        await _cpu_s(peer, frame, 1, WARM)
        one_s = await _cpu_s(peer, frame, 1, TIMED)
        many_s = await _cpu_s(peer, frame, MANY, TIMED)
    finally:
        await peer.close_rpc()
        await server.close()
    # The thread is both ends.
    return RequestCosts(one_s / 2, max(0.0, many_s - one_s) / (MANY - 1) / 2)


async def _cpu_s(peer: Any, frame: NDArray[np.uint8], items: int, count: int) -> float:
    """CPU time of this thread for a request, the median."""
    taken = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        started = time.thread_time()
        await peer.take(items=[wrap(frame) for _ in range(items)])
        taken.append(time.thread_time() - started)
    return float(np.median(taken))


Frames = Sequence[NDArray[np.uint8]]

SETTLING = 100  # exchanges, at most, in which a threshold may settle
SETTLING_S = 1.0  # and how long, seconds, with steps; as long again without
LEAP = 3  # how often more a threshold's last change is made while it settles


@dataclass(frozen=True)
class Script:
    """What is rehearsed; packed, so that it works on copies only.

    Attributes:
        model: The user's.
        objective: What to make small.
        optimizer: Makes one from parameters.
        rows: X and y of a step.
        master: How updates are shared.
        threads: That torch computes with.
        device: As of a trainer.
    """

    model: nn.Module
    objective: Objective
    optimizer: Any
    rows: tuple[NDArray[Any], NDArray[Any]]
    master: GradientSharing
    threads: int
    device: str = "auto"


class Times(NamedTuple):
    """Of one step, seconds; and what its exchange made."""

    gradients_s: float
    optimizer_s: float
    encode_s: float
    apply_s: float
    decode_s: float
    update_bytes: float
    density: float


class Scene:
    """A replica on its own.

    Args:
        script: The caller's own copy; its model is trained.
        device: Where to compute.

    Attributes:
        rows: Of a step.
        threads: That torch computes with.
        parameters: Trainable ones.
        frames: The last update.
    """

    rows: int
    threads: int
    parameters: int
    frames: Frames

    def __init__(self, script: Script, device: torch.device) -> None:
        master, module = script.master, script.model.to(device).train()
        parameters = FlatParameters(module)
        self._flats = [group.flat for group in parameters.groups]
        self._compressor = Compressor(
            parameters, master.threshold, master.residual, master.apply
        )
        self._vector = self._compressor.vector
        optimizer: Optimizer = script.optimizer(trainable(module))
        self._stepper = Stepper(module, script.objective, optimizer, Stepping(), device)
        # As of one of two; with more, each sends less, and its threshold follows.
        self._scale = self._vector.set_scale_(master.scale(2))
        self._every = master.exchange_every
        self._data, self._device = script.rows, device
        self._random = np.random.default_rng(0)
        self._exchanges = 0
        self.rows, self.threads = len(script.rows[0]), script.threads
        self.parameters = self._vector.size
        self.frames = ()

    def step(self) -> Times:
        """Make the steps up to an exchange, the last one timed, and the exchange.

        Before that last one the former update is taken in.

        Raises:
            DivergedError: If the loss is not finite.
        """
        for _ in range(self._every - 1):
            self._move()
            self._vector.sync_from_parameters_()
        marks = [self._now()]
        updates = [codec.decode(frame.data) for frame in self.frames]
        marks.append(self._now())
        for update in updates:
            self._vector.apply_(update)
        marks.append(self._now())
        marks += self._move()
        entries = self._exchange()
        marks.append(self._now())
        decode_s, apply_s, gradients_s, optimizer_s, encode_s = np.diff(marks).tolist()
        return Times(
            gradients_s,
            optimizer_s,
            encode_s,
            apply_s,
            decode_s,
            sum(frame.nbytes for frame in self.frames),
            entries / self.parameters,
        )

    def _move(self) -> tuple[float, float]:
        """Make a step; when its gradients were there, and when it was made."""
        value = self._stepper.backward([self._batch()])
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss became {value} in a rehearsal of some steps; lower the "
                "learning rate of optimizer, or look for NaN in batch"
            )
        computed = self._now()
        self._stepper.update(self._scale)
        return computed, self._now()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the batch, drawn anew: one and the same would be learned by heart."""
        x, y = self._data
        drawn = self._random.integers(0, len(x), len(x))
        return torch.from_numpy(x[drawn]), torch.from_numpy(y[drawn])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _exchange(self) -> int:
        """Make an update of what moved and take it out; how many entries it has."""
        self._exchanges += 1
        compressor = self._compressor
        self._vector.sync_from_parameters_()
        updates = compressor.propose()
        stamp = codec.Stamp(0, 0, self._exchanges, self._exchanges)
        self.frames = [u.encode(stamp) for u in updates if u.entries]
        for update in updates:
            compressor.commit_(update)
        return sum(update.entries for update in updates)

    def settle(self) -> None:
        """Let the thresholds come to where they are after some hundred steps.

        A threshold moves by a few per cent in each exchange. So each of its changes is
        made several times over, until no threshold moves on, first while steps are
        made. Where these take too long, what the last one moved is then made again and
        again, without computing it anew; where the parameters were brought by that,
        they are brought back from, and what is in the residual stays.
        """
        if self._settles(self.step):
            return
        before = [flat.clone() for flat in self._flats]
        self._move()
        pairs = zip(self._flats, before, strict=True)
        movement = [self._every * (flat - former) for flat, former in pairs]
        self._settles(lambda: self._repeat(movement))
        self._vector.apply_counts_(self._way_to(before))

    def _settles(self, exchange: Callable[[], object]) -> bool:
        """Whether the thresholds moved no further in the end."""
        deadline = time.perf_counter() + SETTLING_S
        changes: Mapping[str, float] = {}
        for _ in range(SETTLING):
            former_changes, sent = changes, self._compressor.sent
            exchange()
            changes = _changes(sent, self._compressor.sent)
            if not _moving(former_changes, changes):
                return True
            if time.perf_counter() > deadline:
                break
            self._leap(changes)
        return False

    def _repeat(self, movement: Sequence[torch.Tensor]) -> None:
        for flat, moved in zip(self._flats, movement, strict=True):
            flat.add_(moved)
        self._exchange()

    def _way_to(self, values: Sequence[torch.Tensor]) -> NDArray[np.int32]:
        """From the parameters as they are to these, in steps of the grid."""
        grid, pairs = self._vector.grid, zip(values, self._flats, strict=True)
        ways = [((to.double() - flat.double()) / grid).round() for to, flat in pairs]
        return torch.cat([way.int().cpu() for way in ways]).numpy()

    def _leap(self, changes: Mapping[str, float]) -> None:
        for pattern, change in changes.items():
            group = self._compressor.groups[pattern]
            if group.sent is not None:
                threshold = group.sent.threshold * change**LEAP
                group.sent = group.sent._replace(threshold=threshold)


def _changes(before: Mapping[str, Sent], now: Mapping[str, Sent]) -> dict[str, float]:
    """By what factor each threshold has changed."""
    return {p: s.threshold / before[p].threshold for p, s in now.items() if p in before}


def _moving(former: Mapping[str, float], changes: Mapping[str, float]) -> bool:
    """Whether a threshold moves on: it changes, and not back again."""
    return any(
        change != 1 and (former.get(pattern, change) > 1) == (change > 1)
        for pattern, change in changes.items()
    )


@contextmanager
def idle_worker() -> Iterator[None]:
    """Keep a worker without a task in this process meanwhile.

    It sends heartbeats, takes samples for its profile, looks at its memory, in a
    thread of its own, with Python's lock.
    """
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,  # a heartbeat may be cut off in the end
    ):
        yield


WARM_STEPS = 2  # the first compile, and allocate
LEAST_STEPS, MOST_STEPS = 3, 200
TIMED_S = 2.5  # how long steps are timed, unless too few were


@contextmanager
def prepared(script: Packed[Script]) -> Iterator[Scene]:
    """Set the scene, with the first steps made and thresholds settled.

    Beside it is an idle Dask worker, as beside a replica.

    The process is as it was afterwards: torch's threads, all generators.

    Args:
        script: A copy of it is rehearsed.
    """
    own = script.unpack()
    with (
        random_state_left_alone(),
        process_environment(own.device, own.threads) as device,
        idle_worker(),
    ):
        scene = Scene(own, device)
        for _ in range(WARM_STEPS):
            scene.step()
        scene.settle()
        yield scene


def rehearse(script: Packed[Script]) -> Costs:
    """Rehearse for about four seconds, or six exchanges, if these take longer.

    Args:
        script: A copy of it is rehearsed.

    Raises:
        DivergedError: If the loss is not finite.
    """
    with prepared(script) as scene:
        return measure(scene)


def measure(scene: Scene) -> Costs:
    """The costs of a prepared scene; steps go on while requests are measured.

    Raises:
        DivergedError: If the loss is not finite.
    """
    # Means: medians would not see the pauses that others' work on the same cores makes,
    # and if many exchanges send nothing, they would forget those that do.
    parts = np.mean(_timed(scene), axis=0).tolist()
    costs = dict(zip(Times._fields, parts, strict=True))
    frame = np.zeros(max(1, round(costs["update_bytes"])), np.uint8)
    return Costs(
        rows=scene.rows,
        parameters=scene.parameters,
        threads=scene.threads,
        **costs,
        **request_costs(frame, scene.step)._asdict(),
    )


def _timed(scene: Scene) -> list[Times]:
    times: list[Times] = []
    deadline = time.perf_counter() + TIMED_S
    while len(times) < LEAST_STEPS or (
        len(times) < MOST_STEPS and time.perf_counter() < deadline
    ):
        times.append(scene.step())
    return times


T = TypeVar("T")

READY = b"ready\n"
GO = b"!"
SHOWN = 2000  # characters of what a process said before it failed


def rehearse_together(
    script: Packed[Script], processes: int, patience_s: float
) -> list[Costs]:
    """Rehearse in so many processes at once; each one's costs.

    They end when their standard input does: with this process at the latest.

    Args:
        script: What to rehearse.
        processes: How many.
        patience_s: How long a rehearsal may take, seconds, not counting what a process
            needs to start, for which there is the time-out `join`.

    Raises:
        RunError: If one of them failed.
        WaitTimeoutError: If one of them took too long.
    """
    bound = Timeouts.from_config().bound("join")
    bound = bound._replace(seconds=bound.seconds + patience_s)
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(_member(bound)) for _ in range(processes)]
        for member in members:
            member.send(script.payload)
        for member in members:
            if member.line() != READY:
                raise member.failed()
        for member in members:
            member.go()
        return [Costs(**json.loads(member.line())) for member in members]


class _Member:
    """One of the processes, and how long to wait for it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        said: IO[bytes],
        bound: Bound,
        stop: Bound,
    ) -> None:
        self._process, self._said = process, said
        self._bound, self._stop = bound, stop

    def send(self, payload: NDArray[np.uint8]) -> None:
        """Tell it what to rehearse."""
        self._write(payload.nbytes.to_bytes(8, "little"), payload.data)

    def go(self) -> None:
        """Tell it to measure."""
        self._write(GO)

    def line(self) -> bytes:
        """What it says next."""
        stream = self._process.stdout
        assert stream is not None
        line = self._waited(stream.readline)
        if not line:
            raise self.failed()
        return line

    def failed(self) -> RunError:
        """Why it says no more; it is given the time to end by itself."""
        return RunError(f"a process that rehearses {self._end()}: {self._last()}")

    def _write(self, *parts: bytes | memoryview) -> None:
        stream = self._process.stdin
        assert stream is not None
        # One that has ended says why when it is listened to.
        with contextlib.suppress(BrokenPipeError):
            self._waited(lambda: (stream.writelines(parts), stream.flush()))

    def _waited(self, talk: Callable[[], T]) -> T:
        """Talk to it, with a bound: it may hang."""
        talking: Future[T] = Future()

        def run() -> None:
            try:
                talking.set_result(talk())
            except OSError as error:
                talking.set_exception(error)

        threading.Thread(target=run, name="daskdl-plan", daemon=True).start()
        try:
            return talking.result(self._bound.seconds)
        except TimeoutError as error:
            raise WaitTimeoutError(
                "a process that rehearses has not answered within "
                f"{self._bound}: {self._last()}"
            ) from error

    def _end(self) -> str:
        try:
            status = self._process.wait(self._stop.seconds)
        except subprocess.TimeoutExpired:
            return f"says no more, and did not end within {self._stop}"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _last(self) -> str:
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        return text[-SHOWN:] or "it said nothing"


@contextlib.contextmanager
def _member(bound: Bound) -> Iterator[_Member]:
    stop = Timeouts.from_config().bound("stop")
    # It finds modules where this process does.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "daskdl.planning.measure"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
        )
        try:
            yield _Member(process, said, bound, stop)
        finally:
            process.kill()  # it has nothing to put away
            process.wait(stop.seconds)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def main() -> None:
    """Rehearse until the input ends."""
    heard, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What the user's code prints, or a library of C's, is not meant for the other.
    os.dup2(2, 1)
    nbytes = int.from_bytes(heard.read(8), "little")
    payload = np.frombuffer(heard.read(nbytes), np.uint8)
    going = threading.Event()

    def listen() -> None:
        # Not the buffered reader: its lock would be in the way of an end by an error.
        while os.read(heard.fileno(), len(GO)):
            going.set()
        os._exit(0)  # at once, also in the middle of a long step: nobody waits for it

    threading.Thread(target=listen, daemon=True).start()
    script: Packed[Script] = Packed.of(payload, "model")
    with prepared(script) as scene:
        told.write(READY)
        told.flush()
        while not going.is_set():
            scene.step()
        costs = dataclasses.asdict(measure(scene))
        told.write(json.dumps(costs).encode() + b"\n")
        told.flush()
        while True:
            scene.step()


if __name__ == "__main__":
    main()
