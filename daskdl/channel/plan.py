"""What a client asks for when it opens a run."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RunPlan:
    """Plain values, sent as a dict.

    Attributes:
        run: Identity of the run, a random unsigned 64-bit integer.
        replicas: Worker address of each replica.
        pieces: For each phase ("train", "validation"), the Dask keys of its pieces.
        seed: Of the order of the training pieces; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        synchronous: Fixed shares instead of first come, first served.
        relay_bytes: Bound of the relay's queue for each replica.
        min_replicas: With fewer active ones nobody gets a piece.
        timeouts: Bounds on waiting, seconds, by name.
        routing: ``"plain"``, or ``"mesh"``: then no updates come here.
    """

    run: int
    replicas: Mapping[int, str]
    pieces: Mapping[str, tuple[str, ...]]
    seed: int | None
    epochs_before: int
    synchronous: bool
    relay_bytes: int
    min_replicas: int
    timeouts: Mapping[str, float]
    routing: str = "plain"
