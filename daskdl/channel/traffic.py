"""What a replica's channel has carried."""

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What a channel has carried since the epoch began.

    Attributes:
        sent_bytes: Of frames published, and of arrays in notes; each is counted once.
        received_bytes: Of those that came from others.
        frames: Published.
        withheld: Exchanges skipped because the outbox was full.
        refused: Frames that could not be read.
        folds: How often the inbox was folded.
        repaired: Updates that came only when they were asked for.
        waits_s: Seconds waited, by cause.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    frames: int = 0
    withheld: int = 0
    refused: int = 0
    folds: int = 0
    repaired: int = 0
    waits_s: dict[str, float] = field(default_factory=dict)
