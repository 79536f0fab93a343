"""The learning rate of one replica, as the user's scheduler changes it.

Every replica has a scheduler of its own, over its own optimizer. At the end of each
epoch all go on from whoever is farthest, so that they begin the next one alike. No
channel: what the others say is passed in. What multiplies the rate for one step,
`update_scale`, is not here, and no scheduler sees it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from daskdl.data.models import trainable
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import OptionError
from daskdl.packed import Packed, copied
from daskdl.training.rows import training_loss, validation
from daskdl.training.states import check_like

Every = Literal["epoch", "step"]
Position = tuple[int, dict[str, Any]]  # steps of the scheduler, and its state dict
# With the optimizer's groups, and the steps before this run.
State = tuple[int, dict[str, Any], list[dict[str, Any]], int]


@dataclass(frozen=True)
class Scheduling:
    """The options `scheduler` and `scheduler_every` of a trainer.

    Args:
        make: Makes a scheduler from an optimizer; None: the rate stays.
        every: When it is stepped.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> Scheduling(None, "batch")
        Traceback (most recent call last):
        daskdl.errors.OptionError: scheduler_every must be 'epoch' or 'step', got \
'batch'
    """

    make: Callable[[Optimizer], LRScheduler] | None = None
    every: Every = "epoch"

    def __post_init__(self) -> None:
        if self.make is not None and not callable(self.make):
            raise OptionError(
                "scheduler must be a function that makes one from an optimizer, such "
                "as lambda optimizer: StepLR(optimizer, step_size=10), or None; got "
                f"{self.make!r}"
            )
        if self.every not in ("epoch", "step"):
            raise OptionError(
                f"scheduler_every must be 'epoch' or 'step', got {self.every!r}"
            )
        if self.make is None and self.every == "step":
            raise OptionError("scheduler_every='step' needs a scheduler, got None")

    def of(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of an optimizer.

        Raises:
            OptionError: If what comes is none, or one that cannot be used here.
        """
        if self.make is None:
            return None
        try:
            made = self.make(optimizer)
        except MISFITS as error:
            kind = type(optimizer).__name__
            raise OptionError(f"scheduler failed on a {kind}: {error}") from error
        if not isinstance(made, LRScheduler):
            raise OptionError(
                "scheduler must return a torch.optim.lr_scheduler.LRScheduler, got "
                f"{made!r}"
            )
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise OptionError(
                "scheduler works on an optimizer it was not given, so the learning "
                "rate would stay; make it from its argument"
            )
        if self.every == "step" and isinstance(made, ReduceLROnPlateau):
            raise OptionError(
                "scheduler_every must be 'epoch' for ReduceLROnPlateau, which needs "
                "the loss of an epoch, got 'step'"
            )
        # torch warns, once per process, of steps before the optimizer's; a replica that
        # found no data in an epoch has made none.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return made

    def check(self, optimizer: Callable[[Any], Optimizer], model: nn.Module) -> None:
        """Rehearse it on a copy of a model, so that what does not fit is found here.

        Args:
            optimizer: Makes one; `check_step` has accepted it.
            model: Not changed.

        Raises:
            OptionError: As `of`; a ModelError if its state cannot travel.
        """
        if self.make is not None:
            copy = copied(model)
            LearningRate(optimizer(trainable(copy)), self).state()


class LearningRate:
    """The learning rate of one optimizer, with or without a scheduler.

    Args:
        optimizer: Its parameter groups are changed in place.
        scheduling: Makes the scheduler.
        before: The state of an earlier fit; empty: at its start.
        epochs: Of the run.

    Attributes:
        scheduler: That was made, or None.
    """

    scheduler: LRScheduler | None

    def __init__(
        self,
        optimizer: Optimizer,
        scheduling: Scheduling,
        before: bytes = b"",
        epochs: int = 1,
    ) -> None:
        self._optimizer = optimizer
        self._every = scheduling.every
        self.scheduler = scheduling.of(optimizer)
        self._count = self._count_before = 0  # how often it was stepped, over all fits
        self.load_(before)
        self._count_before = self._count  # this run
        self._epochs = epochs

    def state(self) -> bytes:
        """Where it stands, for other replicas and fits; empty without a scheduler."""
        if self.scheduler is None:
            return b""
        # Some compute the next rate from the last one, and some change momentum too.
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        state = (*self._position(self.scheduler), groups, self._count_before)
        return Packed(state, "scheduler").payload.tobytes()

    def load_(self, state: bytes) -> None:
        """Go on from where another one stands; stay if its state is empty."""
        if self.scheduler is None or not state:
            return
        packed: Packed[State] = Packed.of(np.frombuffer(state, np.uint8), "scheduler")
        count, own, groups, self._count_before = packed.unpack()
        self.go_on_(count, own)
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(saved)

    def values(self) -> dict[str, Any] | None:
        """Where it stands in its fit, as plain values; None without a scheduler."""
        if self.scheduler is None:
            return None
        count, own = self._position(self.scheduler)
        return {"count": count, "before": self._count_before, "state": own}

    def restore_(self, values: Mapping[str, Any] | None) -> None:
        """Go on from what `values` made; the optimizer has its groups already."""
        if self.scheduler is not None and values is not None:
            check_like(self.values(), values, "it", loose=True)
            self.go_on_(values["count"], values["state"])
            self._count_before = values["before"]

    def position(self) -> Position | None:
        """Where it stands, without the optimizer; None without a scheduler."""
        return None if self.scheduler is None else self._position(self.scheduler)

    def _position(self, scheduler: LRScheduler) -> Position:
        return self._count, scheduler.state_dict()

    def go_on_(self, count: int, own: dict[str, Any]) -> None:
        """Go on from a position; the optimizer has its groups already.

        Args:
            count: How often it was stepped.
            own: The scheduler's state dict.
        """
        assert self.scheduler is not None, "a position is of a scheduler"
        self._count = count
        self.scheduler.load_state_dict(own)

    @property
    def value(self) -> float:
        """That of the first group of parameters; NaN if it has none."""
        return float(self._optimizer.param_groups[0].get("lr", math.nan))

    def note(self) -> dict[str, Any]:
        """What the others are told at the end of an epoch; plain values."""
        return {
            "scheduled": self._count,
            "learning_rate": self.value,
            "schedule": self.state(),
        }

    def after_step(self) -> None:
        """The optimizer has made a step."""
        if self._every == "step":
            self._step()

    def end_epoch(
        self, notes: Sequence[Mapping[str, Any]], *, judged: bool = True
    ) -> None:
        """All have met: go on from whoever is farthest, and step if it is time.

        Args:
            notes: What all replicas reported, this one included, in an order that is
                the same for all.
            judged: Whether the loss that counts is among it; ReduceLROnPlateau waits
                for one.
        """
        if self.scheduler is None:
            return
        farthest = max(notes, key=lambda note: int(note["scheduled"]))
        if farthest["scheduled"] > self._count:
            self.load_(farthest["schedule"])
        if self._every == "epoch" and (judged or not self._judges):
            self._step(validation(notes).get("val_loss", training_loss(notes)))

    def catch_up_(self, epoch: int) -> None:
        """A newcomer begins with an epoch; the state it took over may be older.

        That of ReduceLROnPlateau stays: the losses in between are not known here. At
        the end of the epoch it goes on from the others.
        """
        if self.scheduler is None or self._every == "step":
            return
        while not self._judges and self._count < self._count_before + epoch:
            self._step()

    @property
    def _judges(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def _step(self, loss: float = math.nan) -> None:
        self._count += 1
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif isinstance(self.scheduler, OneCycleLR):
            self._step_of_cycle(self.scheduler)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _step_of_cycle(self, scheduler: OneCycleLR) -> None:
        try:
            scheduler.step()
        except ValueError as error:
            total = self._count - 1
            if self._every == "epoch":
                needed = (
                    f"{self._count_before + self._epochs} or more, one for each epoch"
                )
            else:
                needed = (
                    "at least as many as one replica makes steps in all epochs, which "
                    "is about epochs * rows / (batch_size * accumulate * replicas), "
                    f"and more for a fast one ({total - self._count_before} were not "
                    f"enough for these {self._epochs} epochs); or step it by epoch, "
                    "with scheduler_every='epoch' and total_steps=epochs"
                )
            raise OptionError(
                f"OneCycleLR has come to its end, total_steps={total}, before the fit; "
                f"give it total_steps={needed}"
            ) from error
