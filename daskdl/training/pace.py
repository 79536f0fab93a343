"""When a replica waits for others, and when and how it shares."""

from typing import NamedTuple


class Pace(NamedTuple):
    """When a replica waits, when it shares, and until when it does so densely."""

    max_staleness: int | None  # steps it may be ahead of the slowest; None: any
    exchange_every: int  # steps between exchanges
    warmup_steps: int  # what was made in these is sent whole

    @property
    def in_step(self) -> bool:
        """Whether everybody makes each step together."""
        return self.max_staleness == 0
