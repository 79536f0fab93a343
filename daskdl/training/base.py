"""What a way of training must provide: a frozen plan, and its live end.

A :class:`TrainingMaster` is chosen by the user and travels; the
:class:`Exchange` it makes lives in one replica and moves its parameters.
"""

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl.buffers import Buffers, load_buffers_
from daskdl.channel.base import Channel
from daskdl.channel.routes import FAN_OUT
from daskdl.thresholds import Sent
from daskdl.timeouts import Timeouts
from daskdl.vectors import FlatParameters, load_counts_


class Outcome(NamedTuple):
    """What one run leaves to the next: how far it came with compression."""

    sent: Mapping[str, Sent]  # what the last exchange of each pattern did
    steps: int  # made in all, by whoever made most of them


class Statistics(NamedTuple):
    """What an exchange did in one epoch."""

    exchanges: int
    density_sum: float  # entries sent / parameters, summed over exchanges
    threshold: float  # the last one, parameter units; of several the mean; or NaN
    clipped: float  # mass removed by clipping
    lead_sum: int  # steps ahead of the slowest, summed over steps
    steps: int


class Exchanged(NamedTuple):
    """What an exchange did in one step, and what it left; see `steps.STEP_COLUMNS`."""

    threshold: float = math.nan
    density: float = math.nan
    sent_bytes: int = 0
    kind: str | None = None
    residual_norm: float = math.nan
    residual_p50: float = math.nan
    residual_p90: float = math.nan
    residual_p99: float = math.nan
    staleness: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    apply_s: float = 0.0


@dataclass
class Parameters:
    """A replica's parameters and buffers as they leave it; one of the two forms.

    Attributes:
        exact: State dict of one replica's own module, on the CPU; else None.
        shared_N: Steps of `grid` that all replicas agree on, int32, else None.
        residual_N: Steps of `grid` that only this replica has, int32, else None.
        grid: Parameter units per step.
        buffers: Averaged buffers, where the parameters are not `exact`.
    """

    exact: Mapping[str, Any] | None = None
    shared_N: NDArray[np.int32] | None = None
    residual_N: NDArray[np.int32] | None = None
    grid: float = 0.0
    buffers: Buffers | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """A module's own, copied to the CPU; tied ones stay tied on loading."""
        state = {name: value.cpu() for name, value in module.state_dict().items()}
        return cls(exact=copy.deepcopy(state))

    def values(self) -> dict[str, Any]:
        """The same as plain values and tensors."""
        if self.shared_N is None or self.buffers is None:
            return {"exact": None if self.exact is None else dict(self.exact)}
        arrays = (self.shared_N, *self.buffers)
        shared, floating, integer = (torch.from_numpy(array) for array in arrays)
        return {"shared": shared, "grid": self.grid, "buffers": [floating, integer]}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Parameters":
        """Read what `values` made."""
        if "shared" not in values:
            return cls(exact=values["exact"])
        buffers = Buffers(*(tensor.numpy() for tensor in values["buffers"]))
        return cls(None, values["shared"].numpy(), None, values["grid"], buffers)

    def load_into(self, module: nn.Module) -> None:
        """Give a module these parameters and buffers; without any it stays as it is."""
        if self.exact is not None:
            module.load_state_dict(self.exact)
        elif self.shared_N is not None and self.buffers is not None:
            load_counts_(module, self.shared_N, self.grid)
            load_buffers_(module, self.buffers)


@dataclass(frozen=True)
class Seat:
    """Where an exchange is to work.

    Attributes:
        module: The replica's model, on its device; its parameters are the start.
        channel: The replica's end of the run.
        replica: Its number.
        members: All replicas of the run, ascending.
        last: What an earlier fit left, or None.
        snapshot: Of another replica, which a newcomer begins with; else None.
        optimizer: Of the module; the exchange may change its state.
        resumed: What a checkpoint says of it, or None.
    """

    module: nn.Module
    channel: Channel
    replica: int
    members: Sequence[int] = field(default_factory=list)
    last: Outcome | None = None
    snapshot: Mapping[str, Any] | None = None
    optimizer: Optimizer | None = None
    resumed: "Resumed | None" = None


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


class Exchange(ABC):
    """One replica's part in training together. One thread uses it."""

    learning_rate_scale: float  # factor on the optimizer's learning rate, this step
    scale: float  # how much an update of this replica counts for the group
    exchange_tried: bool = True  # in the last step; or there never is one
    averages_optimizer: bool = False  # so that all have the same after `end_epoch`

    @abstractmethod
    def before_step(self, epoch: int) -> None:
        """Wait if too far ahead, and take in what others have sent."""

    @abstractmethod
    def after_step(self, epoch: int, examples: int) -> None:
        """The optimizer has moved the parameters; share what is due.

        Args:
            epoch: Counted from 0.
            examples: Of this step.
        """

    @abstractmethod
    def rest(self, epoch: int) -> None:
        """There is nothing to train on at present; share what has not been shared."""

    @abstractmethod
    def end_epoch(self, epoch: int, examples: int) -> None:
        """Agree with all others; returns when every replica has the same state.

        Args:
            epoch: Counted from 0.
            examples: This replica trained on in this epoch.
        """

    @abstractmethod
    def showing_agreed(self) -> AbstractContextManager[None]:
        """Context manager: the module shows the agreed parameters meanwhile."""

    @abstractmethod
    def digest(self) -> int:
        """Checksum of what must be equal on all replicas after `end_epoch`."""

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
        """All that another run needs to go on from here, between two epochs.

        What the module shows, trainable parameters excepted, and the optimizer are
        not in it.
        """

    @abstractmethod
    def hand_over(self) -> None:
        """This replica leaves before the end: deliver what only it has."""

    @abstractmethod
    def final(self) -> Parameters:
        """This replica's contribution to the final parameters."""

    @abstractmethod
    def agreed(self) -> Parameters:
        """The parameters at the last `end_epoch`, or at the start."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What this replica leaves to the next fit."""


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

    def routing_for(self, replicas: int) -> str:
        """``"plain"`` or ``"mesh"``, for a run that begins with so many replicas."""
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
