"""Synchronous training: each replica makes some steps, then all take the mean.

What is averaged: parameters, floating buffers and, unless told otherwise, the
optimizer's state, weighted by the examples that each replica has trained on since.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.channel.protocol import FAN_OUT
from daskdl.codec import Stamp
from daskdl.errors import OptionError
from daskdl.training.alone import Alone, may_be_alone
from daskdl.training.averager import Averager
from daskdl.training.base import TrainingMaster
from daskdl.training.exchange import Exchange
from daskdl.training.options import check_places, check_whole
from daskdl.training.replica_state import ReplicaState
from daskdl.training.rounding import read, rounded
from daskdl.training.seat import Seat
from daskdl.training.states import ALONE, AVERAGER


@dataclass(frozen=True)
class ParameterAveraging(TrainingMaster):
    """Average the replicas' models every few steps.

    With `frequency` 1 and plain SGD, k replicas with batches of b rows make the steps
    of one process with batches of k x b. A replica that is lost costs at most what it
    had trained since the last mean; the others average without it.

    Args:
        frequency: Steps of each replica between two averagings, >= 1.
        average_optimizer: Average the optimizer's state too; else each replica keeps
            its own, and the trainer gets their weighted mean at the end.
        outer: Makes a `torch.optim.Optimizer` from a list of parameters; it takes the
            way from the last common parameters to their mean for a gradient. With
            SGD, learning rate 0.7 and Nesterov momentum 0.9, this is DiLoCo. None: the
            mean itself is taken.
        compression: "dense8": what travels are differences to the last common
            parameters, in eight bits for each; what rounding leaves is sent with the
            next mean, and whole at the end of an epoch. None: 32 bits.
        replicas_per_worker: See `GradientSharing`.
        min_replicas: Likewise.
        rejoin_timeout: Likewise.
        fan_out: Most replicas whose models one adds up, >= 1. Means are made along a
            tree from worker to worker.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> ParameterAveraging(frequency=0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: frequency must be a whole number >= 1, got 0

    Source:
        Deeplearning4j, ParameterAveragingTrainingMaster.java, whose mean is not
        weighted; Douillard and others, "DiLoCo", 2023.
    """

    frequency: int = 5
    average_optimizer: bool = True
    outer: Callable[[Any], Optimizer] | None = None
    compression: Literal["dense8"] | None = None
    replicas_per_worker: int | Literal["auto"] = 1
    min_replicas: int = 1
    rejoin_timeout: float | None = None
    fan_out: int = FAN_OUT
    resumes: ClassVar = (ALONE, AVERAGER)

    def __post_init__(self) -> None:
        check_whole("frequency", self.frequency, 1)
        if not isinstance(self.average_optimizer, bool):
            raise OptionError(
                f"average_optimizer must be True or False, got "
                f"{self.average_optimizer!r}"
            )
        if self.outer is not None and not callable(self.outer):
            raise OptionError(
                "outer must be a function that makes an optimizer from parameters, "
                f"such as lambda params: torch.optim.SGD(params, lr=0.7), or None; got "
                f"{self.outer!r}"
            )
        if self.compression is not None and self.compression != "dense8":
            raise OptionError(
                f"compression must be 'dense8' or None, got {self.compression!r}"
            )
        check_places(self)

    @property
    @override
    def synchronous(self) -> bool:
        return True

    @override
    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.compression is not None:
            read(rounded({"": np.ones(512, np.float32)}, Stamp(0, 0, 1, 1)).sent)

    @override
    def attach(self, seat: Seat) -> Exchange:
        if may_be_alone(seat) and self.outer is None:
            later = dataclasses.replace(seat, residual=None)  # it is delivered by then
            return Alone(seat, 1.0, lambda made: self._average(later, made))
        return self._average(seat, 0 if seat.last is None else seat.last.steps)

    def _average(self, seat: Seat, made: int) -> Exchange:
        optimizer = seat.optimizer if self.average_optimizer else None
        compressed = self.compression is not None
        state = ReplicaState(
            seat.module,
            optimizer,
            self.outer,
            compressed=compressed,
            frozen=seat.frozen,
        )
        return Averager(seat, state, self.frequency, self.fan_out, made)
