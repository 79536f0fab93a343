"""What a trainer goes on from: the start of a fit, and the end of the one before."""

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.data.models import check_module
from daskdl.data.rehearsal import random_state_left_alone
from daskdl.keras.module import as_module
from daskdl.packed import copied, made
from daskdl.training.learning_rate import LearningRate, Scheduling
from daskdl.training.merge import Final
from daskdl.training.optimizer_state import restore_
from daskdl.training.outcome import KeptResidual, Outcome
from daskdl.training.tensors import described

logger = logging.getLogger(__name__)

# Of torch's optimizers: they change how a step is made, and no state that it needs.
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


class Moved(NamedTuple):
    """What a run changes beside the parameters.

    Attributes:
        optimizer: With state.
        rate: Of the optimizer.
        scheduling: That the rate follows.
        made: Hyperparameters of each group as the trainer's function made them; None:
            not known.
        parameters: Of each group, as `parameters_of` says; None: not known.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling
    made: list[dict[str, Any]] | None = None
    parameters: list[list[str]] | None = None

    def schedule(self, scheduling: Scheduling) -> bytes:
        """Where the scheduler stands; empty if another one is to begin."""
        return self.rate.state() if scheduling == self.scheduling else b""

    def going_on(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "Moved | None":
        """Go on with what a trainer's function makes now; None: begin anew.

        The state stays, with the hyperparameters that have become other ones.

        Args:
            optimizer: Just made, over the model's parameters.
            scheduling: Of the next fit.
            model: That it starts from.
        """
        parameters = parameters_of(optimizer, model)
        if type(optimizer) is not type(self.optimizer):
            _log_anew(f"optimizer makes a {type(optimizer).__name__} now")
            return None
        if self.parameters is not None and parameters != self.parameters:
            _log_anew("optimizer has other parameters or groups now")
            return None
        made = hyperparameters(optimizer)
        former = made if self.made is None else self.made
        pairs = zip(made, former, strict=True)
        changed = [_changed(new, old) for new, old in pairs]
        if not any(changed):
            return self
        if any(_switched(*pair) for pair in zip(changed, former, strict=True)):
            _log_anew(f"optimizer needs another state for {changed}")
            return None
        return self._changed(optimizer, scheduling, made, changed)

    def _changed(
        self,
        optimizer: Optimizer,
        scheduling: Scheduling,
        made: list[dict[str, Any]],
        changed: list[dict[str, Any]],
    ) -> "Moved":
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
        return Moved(optimizer, rate, scheduling, made, self.parameters)


@dataclass(frozen=True)
class Standing:
    """What the fits of a trainer so far leave to the next one, beside the model.

    Attributes:
        moved: By the last one, or None.
        sent: How far the last one that left anything came with compression.
        epochs: Of all of them.
        class_count: Of the labels of the last one, if they are classes; else None.
        residual: That the replicas of the last one have not sent; None: nothing.
    """

    moved: Moved | None = None
    sent: Outcome | None = None
    epochs: int = 0
    class_count: int | None = None
    residual: KeptResidual | None = None

    def going_on(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "Standing":
        """Drop, with a line in the log, what is not of the next fit any more.

        Args:
            model: That it starts from; not changed.
            optimizer: Of it, just made.
            scheduling: Of its learning rate.
        """
        moved = self.moved
        if moved is not None:
            moved = moved.going_on(optimizer, scheduling, model)
        kept = replace(self, moved=moved)
        if self.residual is None or self.residual.fits(model):
            return kept
        logger.warning(
            "model_ has other trainable parameters, or other values in them, than at "
            "the end of the fit before: what its replicas had not sent yet is dropped"
        )
        return replace(kept, residual=None)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, what is not its parameters."""
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


def _changed(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in new.items()
        if name not in old or not _same(value, old[name])
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _switched(changed: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a state may lack what is needed, or have what is not.

    So it is with a momentum that there was not, and an option that is on and was off.
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
        seed: Of torch's generator and Python's, which are left as they were.

    Raises:
        ModelError: If it is no module, or cannot be copied.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    return made(functools.partial(_made_from, model, seed))


def _made_from(function: Callable[[], Any], seed: int) -> Any:
    with random_state_left_alone():
        torch.manual_seed(seed)
        random.seed(seed)  # from it Keras draws a seed for each of its initialisers
        return as_module(function())


def kept_residual(
    final: Final, model: nn.Module, former: KeptResidual | None
) -> KeptResidual | None:
    """What a run has not delivered.

    Args:
        final: What it ended with.
        model: That has its parameters.
        former: That it began with. If it ended before its replicas had met, `model` is
            that of its start, to which this still belongs.
    """
    if not final.met:
        return former
    counts_N, grid = final.parameters.residual_N, final.parameters.grid
    return None if counts_N is None else KeptResidual.beside(model, counts_N, grid)


def adopt(
    optimizer: Optimizer, scheduling: Scheduling, final: Final, former: Moved | None
) -> Moved:
    """Give a new optimizer, and its scheduler, the state that a run ended with.

    Args:
        optimizer: Over the model's parameters; changed in place.
        scheduling: Of the run.
        final: What the run ended with. If it ended early there is no state in it:
            then the last there is counts.
        former: Of the fit before, if there was one.
    """
    made = hyperparameters(optimizer)
    rate = LearningRate(optimizer, scheduling)
    if final.optimizer is not None:
        restore_(optimizer, final.optimizer)
        rate.load_(final.schedule)
    elif former is not None:
        state: dict[str, Any] = former.optimizer.state_dict()
        optimizer.load_state_dict(state)
        rate.load_(former.schedule(scheduling))
    return Moved(optimizer, rate, scheduling, made)
