"""When a replica waits for others, and when and how it shares."""

from typing import NamedTuple


class Pace(NamedTuple):
    """When a replica waits, when it shares, and until when it does so densely."""

    max_staleness: int | None  # steps it may be ahead of the slowest; None: any
    exchange_every: int  # steps between exchanges
    warmup_steps: int  # what was made in these is sent whole

    def says(self, step: int) -> bool:
        """Tell whether others are told when a step is made: they may wait for it.

        They do so only when they begin an interval, for what was made
        ``max_staleness`` steps before.

        Example:
            >>> [step for step in range(1, 33) if Pace(4, 16, 0).says(step)]
            [12, 16, 28, 32]
        """
        return any((step + ahead) % self.exchange_every == 0 for ahead in self._ahead)

    def lead(self, step: int, known: int) -> int:
        """Steps ahead of another at least: what it may not have said counts as made.

        Args:
            step: Steps made here.
            known: How many more these are than the other has said it made.

        Example:
            >>> Pace(4, 16, 0).lead(16, 4), Pace(4, 16, 0).lead(16, 16)
            (1, 5)
            >>> Pace(8, 1, 0).lead(7, 3)
            3
        """
        said, every = step - known, self.exchange_every
        unsaid = min(every - 1 - (said + ahead) % every for ahead in self._ahead)
        return max(0, known - unsaid)

    @property
    def _ahead(self) -> tuple[int, ...]:
        """How far others are from beginning an interval when a step matters to them."""
        return (0,) if self.max_staleness is None else (0, self.max_staleness)

    @property
    def in_step(self) -> bool:
        """Whether everybody makes each step together."""
        return self.max_staleness == 0
