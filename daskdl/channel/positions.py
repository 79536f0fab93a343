"""Who has applied what: sequence numbers, duplicates and gaps. No I/O."""

from collections.abc import Mapping


class Positions:
    """For each origin, which of its updates have been received.

    Updates of one origin are numbered from 1. Normally they come in order;
    a retried or re-routed one may come twice, a lost one leaves a gap that a
    later repair fills.
    """

    def __init__(self) -> None:
        self._reached: dict[int, int] = {}
        self._missing: dict[int, set[int]] = {}

    def accept(self, origin: int, sequence: int) -> bool:
        """Note an update; False if it was noted before (a duplicate)."""
        reached = self._reached.get(origin, 0)
        missing = self._missing.setdefault(origin, set())
        if sequence <= reached:
            if sequence in missing:
                missing.remove(sequence)
                return True
            return False
        missing.update(range(reached + 1, sequence))
        self._reached[origin] = sequence
        return True

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether every update up to the target has been received."""
        return not self.behind(target)

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """The sequence numbers still missing up to a target, by origin."""
        behind: dict[int, list[int]] = {}
        for origin, last in target.items():
            gaps = {s for s in self._missing.get(origin, ()) if s <= last}
            gaps.update(range(self._reached.get(origin, 0) + 1, last + 1))
            if gaps:
                behind[origin] = sorted(gaps)
        return behind

    def vector(self) -> dict[int, int]:
        """The last sequence number received from each origin."""
        return dict(self._reached)
