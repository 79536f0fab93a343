"""Where one exchange is to work, and what it begins with.

A value within a run; on which worker a replica is, :mod:`daskdl.training.seats` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from daskdl.channel.base import Channel
from daskdl.compression.flat import Frozen
from daskdl.training.outcome import KeptResidual, Outcome
from daskdl.training.states import Resumed


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
        frozen: What the model changes itself, since the start of the run.
        residual: That an earlier fit has kept for all founders together, or None.
    """

    module: nn.Module
    channel: Channel
    replica: int
    members: Sequence[int] = field(default_factory=list)
    last: Outcome | None = None
    snapshot: Mapping[str, Any] | None = None
    optimizer: Optimizer | None = None
    resumed: Resumed | None = None
    residual: KeptResidual | None = None
    frozen: Frozen = None  # type: ignore[assignment]  # as the module is now

    def __post_init__(self) -> None:
        if self.frozen is None:
            object.__setattr__(self, "frozen", Frozen(self.module))
