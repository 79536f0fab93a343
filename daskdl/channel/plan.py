"""What a client asks for when it opens a run."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from daskdl.channel.leases import Done, Left, done_of, left_of
from daskdl.channel.shapes import (
    FromMinusOne,
    Identity,
    Positive,
    Whole,
    check,
    hints_of,
)
from daskdl.timeouts import Timeouts

# Fine enough that a replica twice as slow as the others delays them little at the end
# of an epoch, coarse enough that a piece is worth a request.
PIECES_PER_REPLICA = 8


class Extent(NamedTuple):
    """How much there is to train on in a phase, and in which portions."""

    rows: tuple[FromMinusOne, ...]  # of each part; -1 if only going through it tells
    keys: tuple[str, ...]  # of each part that a worker holds, else ""
    step_rows: Positive  # per optimizer step of one replica
    piece_rows: Positive  # aimed at; a multiple of `step_rows`


class Laps(NamedTuple):
    """How training epochs are divided: all replicas meet after each lap."""

    replicas: Positive = 1  # that the run begins with
    rows: Positive | None = None  # of each in one lap; None: as many as there are
    seconds: float | None = None  # after which the lap is ended; None: it is not
    left: Sequence[Left] | None = None  # of the first epoch; None: all of it
    departed: Sequence[Done] = ()  # of those that trained in that, in another run

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Self:
        """Read laps as they came over the wire, where a tuple has no names."""
        replicas, rows, seconds, left, departed = fields
        left = None if left is None else left_of(left)
        return cls(replicas, rows, seconds, left, done_of(departed))


WHOLE_EPOCHS = Laps()


def extent_of(
    rows: Sequence[int],
    step_rows: int,
    replicas: int,
    keys: Sequence[str] | None = None,
) -> Extent:
    """An extent with pieces of the usual size, about eight for each replica.

    Args:
        rows: Of each part; -1 if that is not known.
        step_rows: Per optimizer step of one replica.
        replicas: How many share it.
        keys: Dask key of each part that a worker holds, "" of others; None: all are
            loaded from elsewhere.

    Example:
        >>> extent_of([100, 60], step_rows=4, replicas=2).piece_rows
        12
    """
    total = sum(count for count in rows if count > 0)
    steps = -(-total // (PIECES_PER_REPLICA * replicas * step_rows))
    held = ("",) * len(rows) if keys is None else tuple(keys)
    counts = tuple(int(count) for count in rows)
    return Extent(counts, held, step_rows, max(steps, 1) * step_rows)


@dataclass(frozen=True)
class RunPlan:
    """Plain values, sent as a dict; see :meth:`of`.

    Attributes:
        run: Identity of the run, a random unsigned 64-bit integer.
        replicas: Worker address of each replica.
        extents: Of each phase ("train", "validation").
        seed: Of the order of the training parts; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        synchronous: Fixed shares instead of first come, first served.
        relay_bytes: Bound of the relay's queue for each replica.
        min_replicas: With fewer active ones nobody gets a piece.
        timeouts: Bounds on waiting, seconds, by name.
        routing: ``"plain"``, or ``"mesh"``: then no updates come here.
        first_epoch: That is trained, counted from 0; those before were, elsewhere.
        laps: How the epochs are divided.
    """

    run: Identity
    replicas: Mapping[Whole, str]
    extents: Mapping[str, Extent]
    seed: Whole | None
    epochs_before: Whole
    synchronous: bool
    relay_bytes: Whole
    min_replicas: Whole
    timeouts: Mapping[str, float]
    routing: str = "plain"
    first_epoch: Whole = 0
    laps: Laps = WHOLE_EPOCHS

    @property
    def order(self) -> int:
        """A checksum of what ranges of rows depend on: the data, and their order."""
        rows = self.extents["train"].rows
        return zlib.crc32(repr((rows, self.seed, self.epochs_before)).encode())

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read a plan as it came over the wire, where a tuple has no names.

        Raises:
            ValueError: If it is none that anybody makes, or a TypeError.
        """
        check(fields, hints_of(cls))
        extents = {
            phase: Extent(*extent) for phase, extent in fields["extents"].items()
        }
        laps = Laps.of(fields.get("laps", WHOLE_EPOCHS))
        plan = cls(**{**fields, "extents": extents, "laps": laps})
        if not plan.replicas or "train" not in extents:
            raise ValueError("a plan needs replicas, and what they train on")
        if any(len(rows) != len(keys) for rows, keys, *_ in extents.values()):
            raise ValueError("each part has one number of rows and one key")
        if plan.routing not in ("plain", "mesh"):
            raise ValueError(f"routing must be plain or mesh, got {plan.routing!r}")
        Timeouts(**plan.timeouts)
        return plan
