"""Where replicas run: their places, their events, and what a run ended with."""

import asyncio
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from distributed import Client
from numpy.typing import NDArray

from daskdl.channel.leasing import (
    PartitionSizes,
    RunSpec,
    SyncIntervals,
    partition_sizes,
)
from daskdl.channel.protocol import Answer, Arrays, join, unwrap
from daskdl.config import Bound
from daskdl.data.futures import answers_of, workers_of
from daskdl.data.source import Source
from daskdl.errors import OptionError
from daskdl.serialization import Packed
from daskdl.thresholds import average_sent
from daskdl.training.base import CompressionState, Parameters, TrainingMaster
from daskdl.training.optimizer_step import OptimizerState, add
from daskdl.training.spec import Recipe, Result, TaskOptions

logger = logging.getLogger(__name__)

INT32 = np.iinfo(np.int32)


@dataclass
class Final:
    """What a fit ends with.

    Attributes:
        parameters: On which all agree, with the residuals of all together.
        optimizer: Averaged state; None if the run did not come to its end.
        outcome: What is left to the next fit; None if no replica left anything.
        schedule: Where it stands; empty if there is none, or no optimizer.
        steps: Rows of steps that were not reported before, packed.
        restored: Whether the parameters are those of the best epoch.
        met: Whether they are of any epoch; else they are those of the start.
    """

    parameters: Parameters
    optimizer: OptimizerState | None
    outcome: CompressionState | None
    schedule: bytes = b""
    steps: bytes = b""
    restored: bool = False
    met: bool = True


def merge(results: Sequence[Result]) -> Packed[Final]:
    """Join what the replicas left behind.

    The parameters are those on which all agreed last, which is what was validated. All
    that came to the end contribute what they had not sent yet: whole steps of the grid,
    so that the sum does not depend on its order. If some bring back the best epoch,
    that of the first of them is all there is: they are the same. If nobody came to the
    end, the last state on which they agreed is what is left, from the first that has
    one.

    Args:
        results: In order of replica, at least one.
    """
    ended = [result for result in results if result.finished]
    restored = [result for result in ended if result.restored][:1]
    used = restored or ended or _agreed(results)
    parts = [result.parameters.unpack() for result in used]
    states = [r.optimizer.unpack() for r in ended if r.optimizer is not None]
    final = Final(
        _sum(parts),
        add(states) if states else None,
        average_outcome([result.outcome for result in results]),
        ended[0].schedule if ended else b"",  # there all have agreed
        b"".join(result.steps for result in results),
        bool(restored),
        used[0].met,
    )
    return Packed(final, "result")


def average_outcome(
    outcomes: Iterable[CompressionState | None],
) -> CompressionState | None:
    """Merge what several replicas leave to the next fit.

    Args:
        outcomes: One per replica; None where it did not even start.

    Returns:
        The mean of each pattern over those that have sent, and the most steps; None
        if there is nothing to merge.
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    patterns = dict.fromkeys(p for outcome in used for p in outcome.sent)
    means = {p: average_sent([o.sent.get(p) for o in used]) for p in patterns}
    sent = {p: mean for p, mean in means.items() if mean is not None}
    return CompressionState(sent, max(outcome.steps for outcome in used))


def _agreed(results: Sequence[Result]) -> Sequence[Result]:
    for result in results:
        parameters = result.parameters.unpack()
        if parameters:
            return [result]
    return results[:1]  # those that failed at their start have nothing


def _sum(parts: Sequence[Parameters]) -> Parameters:
    first = parts[0]
    if first.shared_N is None:
        return first
    total_N: NDArray[np.int64] = np.zeros(first.shared_N.shape, np.int64)
    for part in parts:
        if part.residual_N is not None:
            total_N += part.residual_N
    residual_N = np.clip(total_N, INT32.min, INT32.max).astype(np.int32)
    left = residual_N if residual_N.any() else None
    return replace(first, residual_N=left)


def most_replicas(examples: int | None, batch_size: int) -> int:
    """One for each step in an epoch: more would have nothing to do.

    Args:
        examples: Rows of the data; None: not known, so there is no limit.
        batch_size: Rows of a step, which may be those of several batches.
    """
    return sys.maxsize if examples is None else math.ceil(examples / batch_size)


def seats_of(master: TrainingMaster, client: Client, most: int) -> dict[int, str]:
    """Choose a worker address for each replica, by number from 0.

    Args:
        master: Says how many each worker is to have.
        client: Of the cluster.
        most: Replicas, see `most_replicas`.

    Raises:
        OptionError: If the cluster has no workers.
        OSError: If one of them does not answer.
    """
    workers = workers_of(client)
    try:
        each = replicas_on(master, client, workers)
    except OSError:
        there = set(client.nthreads())
        if there.issuperset(workers):
            raise
        return seats_of(master, client, most)  # one has gone meanwhile
    # Round robin, so that leaving some out leaves the workers evenly used.
    seats = [w for i in range(max(each.values())) for w in workers if i < each[w]]
    return dict(enumerate(seats[: _useful(len(seats), most)]))


def replicas_here(master: TrainingMaster, most: int) -> int:
    """Choose how many replicas this process is to have.

    Args:
        master: Says how many it is to have.
        most: See `most_replicas`.

    Raises:
        OptionError: If that is fewer than `min_replicas`: nobody can come later.
    """
    each = master.replicas_per_worker
    wanted = max(1, torch.cuda.device_count()) if each == "auto" else int(each)
    replicas = _useful(wanted, most)
    if master.min_replicas > replicas:
        raise OptionError(
            f"min_replicas must be at most {replicas}, the number of replicas in this "
            f"process, got {master.min_replicas}; without a cluster no more will come: "
            "set replicas_per_worker"
        )
    return replicas


def _useful(wanted: int, most: int) -> int:
    if wanted > most:
        logger.info("%s batches only: %s of %s replicas", most, most, wanted)
    return min(wanted, most)


def replicas_on(
    master: TrainingMaster, client: Client, workers: Sequence[str]
) -> dict[str, int]:
    """How many replicas each of these workers is to have.

    Raises:
        OSError: If a worker is gone, or does not answer; the latter is a
            WaitTimeoutError.
    """
    if master.replicas_per_worker != "auto":
        return dict.fromkeys(workers, int(master.replicas_per_worker))
    bound = master.timeouts().bound("request")
    what = "how many CUDA devices they have"
    devices = answers_of(client, workers, torch.cuda.device_count, bound, what)
    return {worker: max(1, devices[worker]) for worker in workers}


SHARED, REST = ".shared", ".rest"  # no tensor of a module has such a name
REST_TIMES = 4.0  # as long as the last one took: most of the network is for updates


class Kept(NamedTuple):
    """A state on which all replicas agreed."""

    epoch: int  # at the end of which, counted from 0
    arrays: Arrays

    @property
    def parameters(self) -> Parameters:
        """As the replicas had them."""
        pack: Packed[Parameters] = Packed.of(np.asarray(self.arrays[REST]), "model_")
        parameters = pack.unpack()
        if SHARED in self.arrays:
            return replace(parameters, shared_N=self.arrays[SHARED])
        exact = dict(parameters.exact or {})
        for name, like in exact.items():
            if name in self.arrays:
                flat = torch.from_numpy(self.arrays[name].copy())
                exact[name] = flat.view(like.dtype).reshape(like.shape)
        return replace(parameters, exact=exact)


def arrays_of(parameters: Parameters) -> Arrays:
    """What a replica lets the client fetch; what is large is not copied."""
    if parameters.shared_N is not None:
        rest = replace(parameters, shared_N=None)
        return {REST: Packed(rest, "model_").payload, SHARED: parameters.shared_N}
    exact = dict(parameters.exact or {})
    arrays = {}
    for name, tensor in exact.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if dense and tensor.numel():
            arrays[name] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            exact[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
    rest = replace(parameters, exact=exact)
    return {**arrays, REST: Packed(rest, "model_").payload}


class Safekeeping:
    """Brings agreed states to the client, on its event loop.

    Args:
        client: Of the cluster.
        run: Identity of the run.
        bound: For each request.

    Attributes:
        kept: The newest that is here as a whole, or None.
    """

    kept: Kept | None

    def __init__(self, client: Client, run: int, bound: Bound) -> None:
        self.kept = None
        self._client = client
        self._run = run
        self._bound = bound
        self._wanted = -1  # epoch that has ended last
        self._bringing: asyncio.Task[None] | None = None
        self._closed = False

    # ---- the client's thread

    def note(self, epoch: int) -> None:
        """An epoch has ended: have its state brought, or that of a later one."""
        self._client.loop.add_callback(self._begin, epoch)

    def close(self) -> None:
        """Bring nothing more; what is here stays."""
        self._client.loop.add_callback(self._end)

    # ---- event loop

    def _begin(self, epoch: int) -> None:
        self._wanted = epoch
        idle = self._bringing is None or self._bringing.done()
        if idle and not self._closed:
            self._bringing = asyncio.ensure_future(self._bring())

    def _end(self) -> None:
        self._closed = True
        if self._bringing is not None:
            self._bringing.cancel()

    async def _bring(self) -> None:
        now = asyncio.get_running_loop().time
        while self.kept is None or self.kept.epoch < self._wanted:
            began_at = now()
            try:
                kept = await self._newest()
            except OSError as error:  # the client's own requests say more
                logger.info("the agreed state was not brought: %s", error)
                return
            if kept is None:
                return
            self.kept = kept
            await asyncio.sleep(REST_TIMES * (now() - began_at))

    async def _newest(self) -> Kept | None:
        """Ask one replica after the other; None: no replica has it as a whole."""
        avoid: list[int] = []
        while True:
            first = await self._ask(self._wanted, 0, avoid)
            if first.get("replica") is None:
                return None
            kept = await self._whole(first)
            if kept is not None:
                return kept
            avoid.append(first["replica"])

    async def _whole(self, first: dict[str, Any]) -> Kept | None:
        if first["status"] != Answer.OK:
            return None
        epoch, replica, parts = first["epoch"], first["replica"], [first["bytes"]]
        while len(parts) < first["parts"]:
            answer = await self._ask(epoch, len(parts), (), replica)
            if answer["status"] != Answer.OK:
                return None
            parts.append(answer["bytes"])
        arrays = [np.frombuffer(unwrap(part), np.uint8) for part in parts]
        return Kept(epoch, join(first["forms"], arrays))

    async def _ask(
        self, epoch: int, part: int, avoid: Any, replica: int | None = None
    ) -> dict[str, Any]:
        asking: Awaitable[Any] = self._client.scheduler.daskdl_agreed(
            run=self._run, epoch=epoch, part=part, avoid=list(avoid), replica=replica
        )
        answer = await asyncio.wait_for(asking, self._bound.seconds)
        assert isinstance(answer, dict)
        return answer


Event = Mapping[str, Any]


class Stage(ABC):
    """A cluster, or a process, for the time of a run. One thread uses it.

    Attributes:
        seats: Where each replica is, or was.
    """

    seats: dict[int, str]

    @abstractmethod
    def open(self) -> None:
        """Begin the run; `close` has to follow."""

    @abstractmethod
    def start(self, recipe: Packed[Recipe]) -> None:
        """Let the replicas begin that the run is to begin with.

        Args:
            recipe: The user's objects.
        """

    @abstractmethod
    def news(self, seen: int, timeout_s: float) -> Sequence[Event]:
        """Events after the `seen` first ones; waits for one, but not for long."""

    @abstractmethod
    def heed(self, event: Event) -> None:
        """Do what an event asks for: seat a newcomer, give a replica up."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether every replica has ended that was not given up."""

    @abstractmethod
    def errors(self) -> Iterator[tuple[int, BaseException]]:
        """Replicas without which the run cannot go on, and what they raised.

        What a replica reports itself is an event, and is not among them.
        """

    @abstractmethod
    def given_up(self) -> list[int]:
        """Replicas of which nothing is expected any more, ascending."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Tell every replica to leave."""

    @abstractmethod
    def collect(self) -> Final | None:
        """Wait until the replicas have left, and join what they leave.

        Returns:
            What the run ended with; None if there is nothing.
        """

    def kept(self) -> Kept | None:
        """The newest agreed state that is here, where replicas can be lost."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave nothing of the run."""


def extent_for(
    options: TaskOptions,
    phase: str,
    source: Source,
    replicas: int,
    keys: Sequence[str] | None = None,
) -> PartitionSizes:
    """How much there is to train on in a phase, in portions; the log says how large.

    Args:
        options: Of the run.
        phase: ``"train"`` or ``"validation"``.
        source: Of which the lengths are known, if it is not sequential.
        replicas: How many share it.
        keys: Dask key of each part that a worker holds; None: none does.
    """
    step = options.piece_rows(phase)
    if source.lengths is None:
        return partition_sizes([-1] * source.parts, step, replicas, keys)
    extent = partition_sizes(source.lengths, step, replicas, keys)
    piece = extent.lease_rows
    small = sum(0 < rows < piece for rows in source.lengths)
    large = sum(rows > piece for rows in source.lengths)
    logger.info(
        "the %s data have %s parts of %s to %s rows and are leased in pieces of %s: %s "
        "smaller parts are put together, %s larger ones are split",
        phase,
        source.parts,
        min(source.lengths),
        max(source.lengths),
        piece,
        small,
        large,
    )
    return extent


def plan_of(
    options: TaskOptions,
    seats: Mapping[int, str],
    extents: Mapping[str, PartitionSizes],
    relay_bytes: int,
) -> RunSpec:
    """What is asked for when a run is opened.

    Args:
        options: Of the run.
        seats: Where each founder is.
        extents: Of each phase.
        relay_bytes: Bound of the relay's queue for each replica.

    Raises:
        OptionError: If checkpoints, to be written or to go on from, do not go with the
            data.
    """
    checkpoints, resume = options.checkpoints, options.resume
    rule = None if checkpoints is None else checkpoints.rule
    steps = None if rule is None else rule.steps
    if steps is not None and min(extents["train"].rows) < 0:
        raise OptionError(
            f"{rule} needs data of a known length, which this has not; write one every "
            "epoch, or every so many minutes"
        )
    pause = None if resume is None else resume.pause
    where = "" if resume is None else resume.url
    laps = SyncIntervals(
        replicas=len(seats),
        rows=None if steps is None else steps * options.step_rows,
        seconds=None if rule is None else rule.seconds,
        left=None if pause is None else pause.left,
        departed=() if pause is None else pause.departed,
    )
    plan = RunSpec(
        run=options.run,
        replicas=dict(seats),
        extents=extents,
        seed=options.shuffle_seed,
        epochs_before=options.epochs_before,
        synchronous=options.master.synchronous,
        relay_bytes=relay_bytes,
        min_replicas=options.master.min_replicas,
        timeouts=vars(options.timeouts),
        routing=options.routing,
        first_epoch=options.first_epoch,
        laps=laps,
    )
    if pause is not None and pause.order != plan.order:
        raise OptionError(
            f"{where} was written in the middle of an epoch, and the data, their "
            "parts, seed or shuffle are other ones now; resume with the same, or from "
            "a checkpoint of the end of an epoch"
        )
    return plan
