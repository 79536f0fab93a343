"""The state that a trainer carries from fit to fit, and its initial model.

A :class:`FitState` holds this state: optimizer, schedule, thresholds and residuals. It
decides which parts still apply when the user changes options between fits.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.data.checks import check_module, preserved_random_state
from daskdl.keras.module import as_module
from daskdl.serialization import copied, made
from daskdl.training.base import CompressionState, KeptResidual, described
from daskdl.training.epoch_control import LearningRate, Scheduling

logger = logging.getLogger(__name__)

# Options of torch's optimizers that change the step computation, not the state.
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
    """An optimizer after a fit, with its state and learning rate schedule.

    Attributes:
        optimizer: The optimizer, with state.
        rate: Its learning rate.
        scheduling: Options of the schedule.
        made: Hyperparameters of each group as the trainer's function set them.
        parameters: The parameters of each group, from `parameters_of`.
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
        """Wrap a new optimizer over a model's parameters."""
        made = hyperparameters(optimizer)  # before a scheduler changes the rate
        rate = LearningRate(optimizer, scheduling)
        return cls(optimizer, rate, scheduling, made, parameters_of(optimizer, model))

    def schedule(self, scheduling: Scheduling) -> bytes:
        """Return the scheduler's state; empty if the next fit has other scheduling."""
        return self.rate.state() if scheduling == self.scheduling else b""

    def continued(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "TrainedOptimizer | None":
        """Carry the state over to the next fit; None if the state does not apply.

        The state is kept; hyperparameters that the user has changed take effect.
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
                group.pop("initial_lr", None)  # a new scheduler would start from it
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
    """The state that the fits of a trainer leave to the next one, beside the model.

    Attributes:
        optimizer: Optimizer of the last fit, or None.
        compression: State of thresholds after the last fit that used any.
        epochs: Number of epochs of all fits.
        class_count: Number of classes in the last fit; None without class labels.
        residual: Unsent residuals of the last fit; None: there are none.
    """

    optimizer: TrainedOptimizer | None = None
    compression: CompressionState | None = None
    epochs: int = 0
    class_count: int | None = None
    residual: KeptResidual | None = None

    def continued(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "FitState":
        """Drop state that does not apply to the next fit, with a log message."""
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
    """Return the options of each parameter group, without its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return name, dtype and shape of the parameters of each group.

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
    """Whether the changed options may need another set of state tensors.

    Momentum that becomes nonzero needs a buffer; boolean options may need one, too.
    """
    return any(
        bool(new) != bool(old.get(name))
        for name, new in changed.items()
        if name == "momentum" or (type(new) is bool and name not in STATELESS)
    )


def _log_anew(why: str) -> None:
    logger.warning("%s: its state, and the schedule of its rate, begin anew", why)


def starting_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Copy the user's module or create it; a Keras model becomes a torch module.

    Args:
        model: A module, which is not changed, or a function that returns one.
        seed: Seeds torch's and Python's generators while the function runs; their
            state is restored afterwards.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    function = model

    def seeded() -> Any:
        with preserved_random_state():
            torch.manual_seed(seed)
            random.seed(seed)  # Keras draws the seeds of initialisers from it
            return as_module(function())

    return made(seeded)
