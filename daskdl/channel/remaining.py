"""Which of many things in a row are left. No I/O."""

from collections.abc import Iterator


class Remaining:
    """Positions 0 to n - 1, of which there are ever fewer.

    Finding the next one takes amortised constant time, however many have gone: each
    position that has gone points on towards the next that is left, and the way is
    shortened when it is walked.

    Args:
        count: How many there are at first.
    """

    def __init__(self, count: int) -> None:
        self._next = list(range(count + 1))
        self._end = count
        self._left = count

    def __len__(self) -> int:
        return self._left

    def first(self, start: int = 0) -> int | None:
        """The first that is left from a position on, None if there is none."""
        at, following = start, self._next
        while following[at] != at:
            following[at] = following[following[at]]
            at = following[at]
        return None if at == self._end else at

    def remove(self, position: int) -> None:
        """One that is left goes."""
        self._next[position] = position + 1
        self._left -= 1

    def round(self, start: int, most: int) -> Iterator[int]:
        """Those that are left, from a position on and round, but not too many.

        Args:
            start: Where to begin, below the count.
            most: So many, or all if there are fewer.
        """
        at = start
        for _ in range(min(most, self._left)):
            position = self.first(at)
            if position is None:
                position = self.first()
            assert position is not None  # some are left
            yield position
            at = position + 1
