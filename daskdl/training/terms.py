"""What replicas add up to make a mean: all they have, or rounded differences.

Both go through the same tree, see :mod:`daskdl.training.reduction`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from typing_extensions import override

from daskdl.channel.protocol import Arrays
from daskdl.codec import Kind, Stamp
from daskdl.training.feedback import Feedback
from daskdl.training.rounding import read, rounded
from daskdl.training.shares import SUM, Shares, add, is_linear


class Terms(ABC):
    """One replica's part in one mean.

    Attributes:
        kind: Of what travels.
        sent_bytes: Of what this replica adds to the mean, with those below it.
    """

    kind: str
    sent_bytes: int = 0

    @abstractmethod
    def own(self, weight: float | None) -> Arrays:
        """What this replica adds; empty: nothing.

        Args:
            weight: Of what it has trained; None: it has not.
        """

    @abstractmethod
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        """Its own, and what those below it have sent, as it goes on."""

    @abstractmethod
    def mean(self, total: Arrays) -> Arrays:
        """What the root has made, as all are to have it."""


class Whole(Terms):
    """Everything as it is, and what rounding has left before: none is left then.

    Args:
        shares: Of the replica.
        feedback: Of the replica.
        number: Of the mean.
    """

    kind = "MEAN"

    def __init__(self, shares: Shares, feedback: Feedback, number: int) -> None:
        self._shares = shares
        self._residual = feedback.residual
        feedback.propose(number, {})

    @override
    def own(self, weight: float | None) -> Arrays:
        own = _added(
            {} if weight is None else self._shares.take(weight), self._residual
        )
        self.sent_bytes = sum(array.nbytes for array in own.values())
        return own

    @override
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        return add(sums)

    @override
    def mean(self, total: Arrays) -> Arrays:
        return total


class Differences(Terms):
    """How far all have moved from what they had in common, rounded at each node.

    What rounding leaves there is sent with the next mean. What rounding could harm
    goes as it is, see :func:`daskdl.training.shares.is_linear`.

    Args:
        shares: Of the replica.
        common: What all had after the last mean, of what is linear.
        feedback: Of the replica.
        stamp: Of the frames; its sequence is the number of the mean.
    """

    kind = Kind.DENSE8.name

    def __init__(
        self, shares: Shares, common: Arrays, feedback: Feedback, stamp: Stamp
    ) -> None:
        self._shares = shares
        self._common = common
        self._feedback = feedback
        self._stamp = stamp

    @override
    def own(self, weight: float | None) -> Arrays:
        residual = self._feedback.residual
        return _added({} if weight is None else self._moved(weight), residual)

    def _moved(self, weight: float) -> Arrays:
        moved = self._shares.take(1.0)
        for name, common in self._common.items():
            moved[name] = moved[name] - common if name in moved else -common
        return {
            name: array * weight if name.startswith(SUM) else array
            for name, array in moved.items()
        }

    @override
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        total = add([read(one) for one in sums])
        linear = {name: array for name, array in total.items() if is_linear(name)}
        others = {name: array for name, array in total.items() if name not in linear}
        frames, left = rounded(linear, self._stamp)
        self._feedback.propose(self._stamp.sequence, left)
        sent = {**others, **frames}
        self.sent_bytes = sum(array.nbytes for array in sent.values())
        return sent

    @override
    def mean(self, total: Arrays) -> Arrays:
        return _added(read(total), self._common)


def _added(one: Arrays, two: Arrays) -> Arrays:
    there = [arrays for arrays in (one, two) if arrays]
    return add(there) if there else {}
