"""What a way of training must provide: a frozen plan.

A :class:`TrainingMaster` is chosen by the user and travels; the
:class:`daskdl.training.exchange.Exchange` it makes lives in one replica and moves its
parameters.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import torch

from daskdl.channel.protocol import FAN_OUT
from daskdl.compression.flat import FlatParameters
from daskdl.timeouts import Timeouts
from daskdl.training.exchange import Exchange
from daskdl.training.seat import Seat


class TrainingMaster(ABC):
    """A way of training: frozen, picklable, without state."""

    replicas_per_worker: int | str
    min_replicas: int = 1  # with fewer, training waits for more
    rejoin_timeout: float | None = None  # how long, seconds; None: as configured
    fan_out: int = FAN_OUT  # most replicas that one passes an update on to, in a mesh
    resumes: ClassVar[Collection[str]] = ()  # kinds of states to go on from

    @property
    @abstractmethod
    def synchronous(self) -> bool:
        """Whether replicas go in step, so that a run is repeatable from its seed."""

    @property
    def averages(self) -> bool:
        """Whether the mean of the replicas' updates counts, as of one large batch."""
        return False

    def routing_for(self, workers: int) -> str:
        """``"plain"`` or ``"mesh"``, for a run that begins on so many workers."""
        return "plain"

    def timeouts(self) -> Timeouts:
        """The configured bounds on waiting, with this one's own.

        Raises:
            OptionError: If one that is configured is not allowed.
        """
        timeouts = Timeouts.from_config()
        if self.rejoin_timeout is None:
            return timeouts
        return dataclasses.replace(timeouts, rejoin=self.rejoin_timeout)

    def check(  # noqa: B027 - most take any
        self, parameters: FlatParameters
    ) -> None:
        """Refuse a model that its options are not for; on the client.

        Raises:
            OptionError: Naming the option and the parameter.
        """

    def warm_up(  # noqa: B027 - most need not
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Do once what happens between steps, on something small."""

    @abstractmethod
    def attach(self, seat: Seat) -> Exchange:
        """Make the exchange of one replica."""
