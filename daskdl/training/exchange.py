"""One replica's part in training together: the live end of a way of training.

A :class:`daskdl.training.base.TrainingMaster` makes one for each replica, whose
parameters it moves.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from daskdl.training.outcome import Outcome
from daskdl.training.parameters import Parameters
from daskdl.training.states import State
from daskdl.training.statistics import Exchanged, Statistics


class Excess(NamedTuple):
    """Progress that no update can say, parameter units."""

    far: float  # from what all know; or NaN or infinity
    quantum: float  # the largest; NaN: nothing is sent in quanta


class Exchange(ABC):
    """One replica's part in training together. One thread uses it."""

    learning_rate_scale: float  # factor on the optimizer's learning rate, this step
    scale: float  # how much an update of this replica counts for the group
    exchange_tried: bool = True  # in the last step; or there never is one
    averages_optimizer: bool = False  # so that all have the same after `end_lap`

    @abstractmethod
    def before_step(self, lap: int) -> None:
        """Wait if too far ahead, and take in what others have sent."""

    @abstractmethod
    def after_step(self, lap: int, examples: int) -> None:
        """The optimizer has moved the parameters; share what is due.

        Args:
            lap: Counted from 0 over all epochs.
            examples: Of this step.
        """

    @abstractmethod
    def rest(self, lap: int) -> None:
        """There is nothing to train on at present; share what has not been shared."""

    @abstractmethod
    def end_lap(self, lap: int, examples: int) -> None:
        """Agree with all others; returns when every replica has the same state.

        Args:
            lap: Counted from 0 over all epochs.
            examples: This replica trained on so far in this epoch.
        """

    @abstractmethod
    def excess(self, *, whole: bool) -> Excess | None:
        """What has moved farther than can be sent, or is not finite; None: nothing.

        Args:
            whole: Look at all parameters, which is a pass; else at what the last
                exchange has seen anyway.
        """

    @abstractmethod
    def showing_agreed(self) -> AbstractContextManager[None]:
        """Context manager: the module shows the agreed parameters meanwhile."""

    @abstractmethod
    def digest(self) -> int:
        """Checksum of what must be equal on all replicas after `end_lap`."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """What was done since the last call."""

    def exchanged(self) -> Exchanged:
        """What was done in the last step; looks at the residual, or a part of it."""
        return Exchanged()

    @abstractmethod
    def opened(self) -> "Exchange":
        """This one, or another in its place, from which a newcomer can begin."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """All that a newcomer needs; plain values and arrays.

        Contains ``"received"``, what is in it of each replica's updates, and
        ``"grid"`` and ``"step"``.
        """

    @abstractmethod
    def state(self) -> State:
        """All that another run needs to go on from here, between two laps.

        What the module shows, trainable parameters excepted, and the optimizer are
        not in it.
        """

    @abstractmethod
    def hand_over(self) -> None:
        """This replica leaves before the end: deliver what only it has."""

    @abstractmethod
    def final(self) -> Parameters:
        """The parameters at the last `end_lap`, and what has not been sent by then."""

    @abstractmethod
    def agreed(self) -> Parameters:
        """The parameters at the last `end_lap`, or at the start."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What this replica leaves to the next fit."""
