"""What replicas do at one meeting, from what each has said there. No I/O.

Every replica decides for itself, and all come to the same: they have read the same.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Said(NamedTuple):
    """What one replica says when it comes to a meeting."""

    seen: int  # number of the last meeting it was at
    mean: int  # number of the meeting whose mean it began from, -1: none
    examples: int  # trained on since
    ended: bool = False  # it has nothing left to do in this epoch
    parked: bool = False  # it is not there, but waits for a lease
    digest: int = 0  # of its parameters, if `ended`
    rests: bool = False  # there is nothing for it to train on at present
    owes: bool = False  # rounding has left something that is in no mean yet


@dataclass(frozen=True)
class Round:
    """One meeting, decided.

    Attributes:
        number: Of the meeting.
        latest: Number of the last mean that anybody has.
        weights: Of those whose models are averaged; their sum is 1. Empty: there is
            nothing to average.
        members: That get the new mean, ascending, if there is one.
        current: That have the latest mean, ascending.
        donors: Of those, who let others fetch it, ascending.
        whole: The mean is to be exact, and of all there is: because it will be the
            last of an epoch, or somebody has nothing in common with the others.
        settles: Nobody has trained since the latest mean, and all have ended: it is
            only completed by what rounding has left.
        over: All have ended, and have the same.
    """

    number: int
    latest: int
    weights: Mapping[int, float]
    members: tuple[int, ...]
    current: tuple[int, ...]
    donors: tuple[int, ...]
    whole: bool
    settles: bool
    over: bool

    @property
    def root(self) -> int:
        """Where the mean is made: a member that has the latest one."""
        there = [replica for replica in self.members if replica in self.current]
        return there[self.number % len(there)]


def round_of(notes: Mapping[int, Any], gone: Collection[int]) -> Round:
    """Decide what is done at a meeting.

    A mean counts what all who were there had trained. Whoever has not got it, because
    the one that was to pass it on was lost, has nothing to add to the next one; if
    nobody has got it, all still have what they had trained.

    Args:
        notes: Of each replica, the fields of `Said`.
        gone: Replicas that were lost, whatever they had said.

    Example:
        >>> said = {0: Said(4, 4, 60), 1: Said(4, 4, 20), 2: Said(4, 3, 20)}
        >>> decided = round_of(said, gone=[])
        >>> decided.number, decided.weights, decided.members
        (5, {0: 0.75, 1: 0.25}, (0, 1, 2))
    """
    here = {r: Said(*notes[r]) for r in sorted(notes) if r not in gone}
    latest = max(said.mean for said in here.values())
    current = [r for r, said in here.items() if said.mean == latest]
    ended = all(said.ended for said in here.values())
    if ended:
        same = here[current[0]].digest
        current = [r for r in current if here[r].digest == same]
    members = tuple(r for r, said in here.items() if not said.parked)
    trained = {r: here[r].examples for r in current if not here[r].parked}
    total = sum(trained.values())
    settles = ended and not total and any(said.owes for said in here.values())
    weights = {r: n / total for r, n in trained.items() if n} if total else {}
    decided = Round(
        number=1 + max(said.seen for said in here.values()),
        latest=latest,
        weights=weights,
        members=members,
        current=tuple(current),
        donors=tuple(r for r in current if not here[r].examples),
        whole=all(here[r].ended or here[r].rests for r in members)
        or latest < 0
        or len(members) < 2
        or not set(members) <= set(current),
        settles=settles,
        over=ended and not total and not settles and len(current) == len(here),
    )
    # All have the same; the root's need not travel up.
    return replace(decided, weights={decided.root: 1.0}) if settles else decided
