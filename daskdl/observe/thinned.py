"""A bounded sequence of rows, also for the scheduler, which must not import torch."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """A bounded, evenly thinned sequence of numbered rows, in order of arrival.

    Beyond `most` rows, only rows with even numbers are kept, then only every fourth
    number, then every eighth, and so on. Rows with equal numbers are kept or dropped
    together. The last of them stay, even if they alone are more than `most`.

    Attributes:
        numbered: The rows with their numbers.
    """

    numbered: list[tuple[int, T]]

    def __init__(self, most: int) -> None:
        self.numbered = []
        self._most = most
        self._stride = 1
        self._highest = 0

    def wants(self, number: int) -> bool:
        """Whether a row with this number would be kept."""
        return number % self._stride == 0

    def add(self, number: int, row: T) -> None:
        """Add a row, unless its number is thinned out."""
        if not self.wants(number):
            return
        self.numbered.append((number, row))
        self._highest = max(self._highest, number)
        while len(self.numbered) > self._most and 2 * self._stride <= self._highest:
            self._stride *= 2
            self.numbered = [kept for kept in self.numbered if self.wants(kept[0])]

    def take(self) -> list[tuple[int, T]]:
        """Remove and return all rows with their numbers; keep the stride."""
        taken, self.numbered = self.numbered, []
        return taken
