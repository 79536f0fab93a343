"""Where one run takes place, as its driver sees it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daskdl.channel.leasing import Extent, Laps, RunPlan, extent_of
from daskdl.data.source import Source
from daskdl.errors import OptionError
from daskdl.packed import Packed
from daskdl.training.merge import Final
from daskdl.training.safekeeping import Kept
from daskdl.training.task import Recipe, TaskOptions

logger = logging.getLogger(__name__)

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
) -> Extent:
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
        return extent_of([-1] * source.parts, step, replicas, keys)
    extent = extent_of(source.lengths, step, replicas, keys)
    piece = extent.piece_rows
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
    extents: Mapping[str, Extent],
    relay_bytes: int,
) -> RunPlan:
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
    laps = Laps(
        replicas=len(seats),
        rows=None if steps is None else steps * options.step_rows,
        seconds=None if rule is None else rule.seconds,
        left=None if pause is None else pause.left,
        departed=() if pause is None else pause.departed,
    )
    plan = RunPlan(
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
