"""What the fits of a trainer leave to the next one, and the model of the first.

A :class:`FitState` is all that goes on from fit to fit beside the model.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.data.models import check_module
from daskdl.data.rehearsal import random_state_left_alone
from daskdl.keras.module import as_module
from daskdl.serialization import copied, made
from daskdl.training.base import CompressionState, KeptResidual, described
from daskdl.training.epoch_control import LearningRate, Scheduling

logger = logging.getLogger(__name__)

# Options of torch's optimizers that change how a step is made, and not the state.
STATELESS = frozenset(
    {
        "capturable",
        "decoupled_weight_decay",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    }
)


class TrainedOptimizer(NamedTuple):
    """An optimizer with the state that a fit gave it, and its learning rate schedule.

    Attributes:
        optimizer: With state.
        rate: Its learning rate.
        scheduling: How the rate changes.
        made: Hyperparameters of each group as the trainer's function set them.
        parameters: The parameters of each group, as `parameters_of` names them.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling
    made: list[dict[str, Any]]
    parameters: list[list[str]]

    @classmethod
    def new(
        cls, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> Self:
        """Describe an optimizer over a model's parameters that was just made."""
        made = hyperparameters(optimizer)  # before a scheduler changes the rate
        rate = LearningRate(optimizer, scheduling)
        return cls(optimizer, rate, scheduling, made, parameters_of(optimizer, model))

    def schedule(self, scheduling: Scheduling) -> bytes:
        """The state of the scheduler; empty if the next fit has another one."""
        return self.rate.state() if scheduling == self.scheduling else b""

    def continued(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "TrainedOptimizer | None":
        """Carry the state over to the next fit; None: its optimizer begins anew.

        The state stays; hyperparameters that the user has changed take effect.

        Args:
            optimizer: Just made for the next fit, over the model's parameters.
            scheduling: Of the next fit.
            model: The next fit starts from it.
        """
        if type(optimizer) is not type(self.optimizer):
            _log_anew(f"optimizer makes a {type(optimizer).__name__} now")
            return None
        if parameters_of(optimizer, model) != self.parameters:
            _log_anew("optimizer has other parameters or groups now")
            return None
        made = hyperparameters(optimizer)
        changed = [
            {n: v for n, v in new.items() if n not in old or not _same(v, old[n])}
            for new, old in zip(made, self.made, strict=True)
        ]
        if not any(changed):
            return self
        if any(map(_needs_other_state, changed, self.made)):
            _log_anew(f"optimizer needs another state for {changed}")
            return None
        logger.info("optimizer goes on with its state and %s", changed)
        state: dict[str, Any] = self.optimizer.state_dict()
        for group, new in zip(state["param_groups"], changed, strict=True):
            group.update(new)
        position = self.rate.position() if scheduling == self.scheduling else None
        if any("lr" in group for group in changed):
            if position is not None:
                logger.warning(
                    "the learning rate is a new one: its schedule begins anew"
                )
            position = None
            for group, new in zip(state["param_groups"], made, strict=True):
                group.pop("initial_lr", None)  # or a scheduler would start from it
                group["lr"] = new["lr"]
        if position is None:
            optimizer.load_state_dict(state)
            rate = LearningRate(optimizer, scheduling)
        else:
            rate = LearningRate(optimizer, scheduling)
            optimizer.load_state_dict(state)
            rate.go_on_(*position)
        return TrainedOptimizer(optimizer, rate, scheduling, made, self.parameters)


@dataclass(frozen=True)
class FitState:
    """What the fits of a trainer so far leave to the next one, beside the model.

    Attributes:
        optimizer: Of the last fit, or None.
        compression: State of thresholds after the last fit that had any.
        epochs: Of all fits.
        class_count: Of the labels of the last fit, if they are classes; else None.
        residual: What the replicas of the last fit have not sent; None: nothing.
    """

    optimizer: TrainedOptimizer | None = None
    compression: CompressionState | None = None
    epochs: int = 0
    class_count: int | None = None
    residual: KeptResidual | None = None

    def continued(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "FitState":
        """Drop, with a line in the log, what does not fit the next fit.

        Args:
            model: The next fit starts from it; not changed.
            optimizer: Just made for it.
            scheduling: Of its learning rate.
        """
        trained = self.optimizer
        if trained is not None:
            trained = trained.continued(optimizer, scheduling, model)
        residual = self.residual
        if residual is not None and not residual.fits(model):
            logger.warning(
                "model_ has other trainable parameters, or other values in them, than "
                "at the end of the fit before: what its replicas had not sent yet is "
                "dropped"
            )
            residual = None
        return replace(self, optimizer=trained, residual=residual)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what each group has beside its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Name, dtype and shape of the parameters of each group.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameters_of(torch.optim.SGD([layer.bias]), layer)
        [['bias float32 (1,)']]
    """
    named = {id(p): f"{n} {described(p)}" for n, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    return [[named.get(id(p), described(p)) for p in group] for group in groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _needs_other_state(changed: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether the state may lack something now, or have too much.

    A momentum that was zero needs a buffer, and so does an option that was off.
    """
    return any(
        bool(new) != bool(old.get(name))
        for name, new in changed.items()
        if name == "momentum" or (type(new) is bool and name not in STATELESS)
    )


def _log_anew(why: str) -> None:
    logger.warning("%s: its state, and the schedule of its rate, begin anew", why)


def starting_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Copy the user's module, or make it; a Keras model becomes a module of torch.

    Args:
        model: Not changed.
        seed: For the generators of torch and Python, which are left as they were.

    Raises:
        ModelError: If it is no module, or cannot be copied.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    function = model

    def seeded() -> Any:
        with random_state_left_alone():
            torch.manual_seed(seed)
            random.seed(seed)  # from it Keras draws a seed for each initialiser
            return as_module(function())

    return made(seeded)
