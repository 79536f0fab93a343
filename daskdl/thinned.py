"""A bounded list: what comes to it is thinned out evenly, not cut off. No I/O."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """At most so many of numbered things, in the order in which they came.

    When there are more, those with odd numbers go; then only every fourth number is
    kept, then every eighth, and so on. What is numbered alike is thinned alike.

    Args:
        most: Things, >= 1.

    Example:
        >>> thinned = Thinned(most=3)
        >>> for number in range(1, 10):
        ...     thinned.add(number, f"row {number}")
        >>> list(thinned)
        ['row 4', 'row 8']
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._numbered: list[tuple[int, T]] = []

    def __len__(self) -> int:
        return len(self._numbered)

    def __getitem__(self, index: int) -> T:
        return self._numbered[index][1]

    def __iter__(self) -> Iterator[T]:
        return (thing for _, thing in self._numbered)

    def wants(self, number: int) -> bool:
        """Whether a thing of this number would be kept now."""
        return number % self._stride == 0

    def add(self, number: int, thing: T) -> None:
        """Keep it, if its number is one of those that are kept."""
        if not self.wants(number):
            return
        self._numbered.append((number, thing))
        while len(self._numbered) > self._most:
            self._stride *= 2
            self._numbered = [kept for kept in self._numbered if self.wants(kept[0])]

    def numbered(self) -> list[tuple[int, T]]:
        """What is there, with its numbers."""
        return list(self._numbered)

    def take(self) -> list[tuple[int, T]]:
        """Empty it; return what was there with its numbers. It goes on as sparsely."""
        taken, self._numbered = self._numbered, []
        return taken
