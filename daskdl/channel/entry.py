"""What a replica finds when it comes into a run."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """How a replica comes into a run.

    A founder finds all others there. A newcomer brings a snapshot with it: what
    another replica's `serve` made, which it has to load before it is activated.
    """

    members: Sequence[int]  # ascending, itself included; of a newcomer only itself
    snapshot: Mapping[str, Any] | None


class Seating(NamedTuple):
    """Where a newcomer begins."""

    members: Sequence[int]  # that train, ascending, itself included
    epoch: int  # counted from 0
    report: Mapping[int, Any]  # what all said at the end of the epoch before, if any
    lap: int = 0  # counted from 0 over all epochs
