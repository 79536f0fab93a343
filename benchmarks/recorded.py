"""Updates of a real run, to be sent again where nothing is trained."""

import itertools
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation import Member, Offer, Rules, Simulation
from benchmarks.work import WORKS
from daskdl import AdaptiveThreshold, codec

STEPS = 80
LEFT_OUT = 20  # of these, while the threshold finds its place

Entries = tuple[
    float, np.ndarray
]  # the threshold, and int32 signed one-based positions


@dataclass(frozen=True)
class Recorded:
    """What two replicas sent, each step one update.

    Attributes:
        size: Parameters of the model.
        updates: In the order in which they were sent.
        nbytes: Of an encoded update, the median.
    """

    size: int
    updates: tuple[Entries, ...]
    nbytes: float

    def of(self, replica: int, number: int) -> Entries:
        """What a replica sends: each begins at another place."""
        return self.updates[(7 * replica + number) % len(self.updates)]


def recorded(work: str = "mlp", optimizer: str = "SGD") -> Recorded:
    """Train two replicas for some steps, and keep what they sent."""
    task = WORKS[work]
    kept: list[Entries] = []
    sizes: list[int] = []

    def keep(_member: Member, offers: "list[Offer]") -> None:
        for made in offers:
            frame = made.encode(codec.Stamp(0, 0, 1, 1))
            update = codec.decode(frame)
            assert isinstance(update, codec.SparseUpdate)
            kept.append((update.threshold, update.entries_K))
            sizes.append(frame.nbytes)

    rules = Rules(AdaptiveThreshold(initial=None), after=keep)
    simulation = Simulation(task, task.split(), optimizer, 2, rules, seed=0)
    simulation.train(STEPS)
    own = slice(2 * LEFT_OUT, None)
    return Recorded(
        simulation.size,
        tuple(itertools.islice(kept, own.start, None)),
        float(np.median(sizes[own])),
    )
