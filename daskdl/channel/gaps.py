"""Which missing updates are to be asked for, and when. No I/O, no clock."""

from collections.abc import Mapping, Sequence

PATIENCE_S = 1.0  # what is late for longer than this was dropped somewhere
MOST = 1000  # asked for at once, of one origin


class Gaps:
    """What is missing, and since when, or since it was last asked for.

    Example:
        >>> gaps = Gaps()
        >>> gaps.due({7: [3, 4]}, now=10.0), gaps.due({7: [4]}, now=11.0)
        ({}, {7: [4]})
        >>> gaps.due({7: [4]}, now=11.5)
        {}
    """

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def due(
        self, missing: Mapping[int, Sequence[int]], now: float
    ) -> dict[int, list[int]]:
        """What has been missing for so long that it is asked for now.

        Args:
            missing: Sequence numbers by origin.
            now: Seconds, on any clock.
        """
        keys = [(origin, s) for origin, gaps in missing.items() for s in gaps]
        self._since = {key: self._since.get(key, now) for key in keys}
        due: dict[int, list[int]] = {}
        for key, since in self._since.items():
            if now - since >= PATIENCE_S:
                self._since[key] = now
                due.setdefault(key[0], []).append(key[1])
        return due
