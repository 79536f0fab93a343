"""What a trainer goes on from: the start of a fit, and the end of the one before."""

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
from daskdl.packed import PackedModel
from daskdl.training.learning_rate import LearningRate, Scheduling
from daskdl.training.merge import Final
from daskdl.training.optimizer_state import restore_
from daskdl.training.outcome import KeptResidual, Outcome, layout_of

logger = logging.getLogger(__name__)


class Moved(NamedTuple):
    """What a run changes beside the parameters.

    Attributes:
        optimizer: With state.
        rate: Of the optimizer.
        scheduling: That the rate follows.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling

    def schedule(self, scheduling: Scheduling) -> bytes:
        """Where the scheduler stands; empty if another one is to begin."""
        return self.rate.state() if scheduling == self.scheduling else b""


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

    def going_on(self, model: nn.Module) -> "Standing":
        """Drop, with a line in the log, what is not of a model any more.

        Args:
            model: That the next fit starts from; not changed.
        """
        if self.residual is None or self.residual.fits(model):
            return self
        logger.warning(
            "model_ has other trainable parameters than at the end of the fit before: "
            "what its replicas had not sent yet is dropped"
        )
        return replace(self, residual=None)


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
        # Not a deep copy: what cannot travel is then named here.
        return PackedModel(model).unpack()
    with random_state_left_alone():
        torch.manual_seed(seed)
        random.seed(seed)  # from it Keras draws a seed for each of its initialisers
        return as_module(model())  # type: ignore[no-any-return]


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
    return None if counts_N is None else KeptResidual(counts_N, grid, layout_of(model))


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
    rate = LearningRate(optimizer, scheduling)
    if final.optimizer is not None:
        restore_(optimizer, final.optimizer)
        rate.load_(final.schedule)
    elif former is not None:
        state: dict[str, Any] = former.optimizer.state_dict()
        optimizer.load_state_dict(state)
        rate.load_(former.schedule(scheduling))
    return Moved(optimizer, rate, scheduling)
