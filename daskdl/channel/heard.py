"""How far the other replicas are, as far as one replica has heard. No I/O.

What a replica says of itself may overtake the updates it speaks of, where these go
by several ways. It is then kept until they are here.
"""

import time
from collections.abc import Callable, Collection
from typing import NamedTuple


class Word(NamedTuple):
    """What a replica said of itself."""

    sequence: int  # of its last update by then
    step: int  # completed
    done: int = -1  # the last lap it is done with

    def joined(self, other: "Word") -> "Word":
        """What is known from both."""
        return Word(*map(max, self, other))


NOTHING = Word(0, 0)


class Heard:
    """The last word of each other replica that trains.

    Args:
        clock: Seconds, by which it is kept when there was news of somebody.

    Attributes:
        lost: Replicas that are gone: nobody waits for them, whoever still names them.
    """

    lost: set[int]

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lost = set()
        self._clock = clock
        self._news_at: dict[int, float] = {}
        self._said: dict[int, Word] = {}
        self._known: dict[int, Word] = {}

    def hear(self, origin: int, word: Word, complete: int | None = None) -> bool:
        """Take note of a word.

        Args:
            origin: Who said it of itself.
            word: What.
            complete: All updates of the origin up to this one are here, and the
                word counts once those are that it speaks of. None: it counts now.

        Returns:
            Whether it says more than any word before.
        """
        if origin in self.lost:
            return False
        former = self._said.get(origin)
        latest = word if former is None else former.joined(word)
        if latest != former:
            self._news_at[origin] = self._clock()
        self._said[origin] = latest
        if complete is None or word.sequence <= complete:
            self._learn(origin, word)
        return latest != former

    def catch_up(self, origin: int, complete: int) -> None:
        """More updates of an origin are here: what it said of them counts now."""
        said = self._said.get(origin)
        if said is not None and said.sequence <= complete:
            self._learn(origin, said)

    def _learn(self, origin: int, word: Word) -> None:
        self._known[origin] = self._known.get(origin, NOTHING).joined(word)

    def lose(self, origin: int) -> None:
        """A replica is gone."""
        self.lost.add(origin)
        self._said.pop(origin, None)
        self._known.pop(origin, None)

    def described(self) -> list[str]:
        """The last word of each in words, and when it came."""
        now = self._clock()
        return [
            f"replica {origin} at step {word.step}, update {word.sequence}, "
            f"{now - self._news_at[origin]:.1f} s ago"
            for origin, word in sorted(self._said.items())
        ]

    def others(self) -> list[int]:
        """The other replicas that train, ascending."""
        return sorted(self._known)

    def last(self) -> dict[int, int]:
        """The last update each has published, as far as it said."""
        return {origin: word.sequence for origin, word in self._said.items()}

    def steps(self) -> dict[int, int]:
        """Steps completed by each."""
        return {origin: word.step for origin, word in self._known.items()}

    def slowest(self, lap: int) -> int | None:
        """Steps completed by the slowest that is not done with a lap."""
        words: Collection[Word] = self._known.values()
        return min((w.step for w in words if w.done < lap), default=None)
