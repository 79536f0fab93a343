"""A bounded sequence of rows; without torch, for the scheduler."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """A bounded, evenly thinned sequence of numbered rows, in order of arrival.

    Beyond `most` rows, only rows with even numbers stay, then only every fourth number,
    then every eighth, and so on. Rows with equal numbers stay or go together; the rows
    of the last remaining number stay, even if they exceed `most`.

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
        """Add a row if its number is wanted."""
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
