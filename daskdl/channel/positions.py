"""Who has applied what: sequence numbers, duplicates and gaps. No I/O."""

from collections.abc import Mapping, Sequence

# What was received of one origin: all up to a number, and those beyond a gap.
Received = tuple[int, Sequence[int]]


class Positions:
    """For each origin, which of its updates have been received.

    Updates of one origin are numbered from 1. Normally they come in order;
    a retried or re-routed one may come twice, a lost one leaves a gap that a
    later repair fills. Only what is beyond a gap takes memory, not the gap: a
    sequence number may be anything.

    Args:
        received: Where to start, as :meth:`received` gave it: that of a snapshot.
    """

    def __init__(self, received: Mapping[int, Received] | None = None) -> None:
        self._complete: dict[int, int] = {}  # received up to here, all of them
        self._beyond: dict[int, set[int]] = {}  # received after a gap
        for origin, (complete, beyond) in (received or {}).items():
            self._complete[origin] = complete
            self._beyond[origin] = set()
            for sequence in beyond:
                self.accept(origin, sequence)

    def accept(self, origin: int, sequence: int) -> bool:
        """Note an update; False if it was noted before (a duplicate)."""
        complete = self._complete.setdefault(origin, 0)
        beyond = self._beyond.setdefault(origin, set())
        if sequence <= complete or sequence in beyond:
            return False
        beyond.add(sequence)
        while complete + 1 in beyond:
            complete += 1
            beyond.remove(complete)
        self._complete[origin] = complete
        return True

    def has(self, origin: int, sequence: int) -> bool:
        """Whether an update has been received."""
        beyond = self._beyond.get(origin, ())
        return sequence <= self.complete(origin) or sequence in beyond

    def complete(self, origin: int) -> int:
        """All updates of an origin up to this one have been received."""
        return self._complete.get(origin, 0)

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether nothing is missing up to a target, however far that is."""
        return all(self.complete(origin) >= last for origin, last in target.items())

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """The sequence numbers still missing up to a target, by origin."""
        behind: dict[int, list[int]] = {}
        for origin, last in target.items():
            beyond = self._beyond.get(origin, set())
            awaited = range(self._complete.get(origin, 0) + 1, last + 1)
            gaps = [sequence for sequence in awaited if sequence not in beyond]
            if gaps:
                behind[origin] = gaps
        return behind

    def received(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """What exactly was received of each origin, in plain values for the wire.

        Returns:
            By origin: all of its updates up to this one were received, and these
            beyond the first gap, ascending.

        Example:
            >>> positions = Positions()
            >>> [positions.accept(7, sequence) for sequence in (1, 2, 5)]
            [True, True, True]
            >>> positions.received()
            {7: (2, (5,))}
        """
        return {
            origin: (complete, tuple(sorted(self._beyond[origin])))
            for origin, complete in self._complete.items()
        }
