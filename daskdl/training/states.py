"""What an exchange goes on from: between two epochs, and in another run.

Plain values and tensors, no files; :mod:`daskdl.training.resuming` reads them from
those of a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from daskdl.thresholds import Sent
from daskdl.training.outcome import Outcome

# Kinds of the states of exchanges.
ALONE, SHARER, AVERAGER = "alone", "sharer", "averager"
PARAMETERS = "parameters"  # in what is common, where a module has them as they are


class State(NamedTuple):
    """What an exchange goes on from, between two epochs: plain values and tensors.

    The tensors may be those that go on changing.
    """

    kind: str  # of the exchange
    common: Mapping[str, Any]  # the same for all replicas
    own: Mapping[str, Any]


class Resumed(NamedTuple):
    """What one replica goes on from, of the states of another run."""

    kind: str  # of the exchanges
    common: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # of replicas whose part it takes, maybe of none

    @property
    def last(self) -> Outcome | None:
        """What one that was alone leaves to any other exchange; None of others."""
        if self.kind != ALONE:
            return None
        sent = {p: Sent(*numbers) for p, numbers in self.common["sent"].items()}
        return Outcome(sent, self.common["made"])
