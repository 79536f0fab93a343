"""What a trainer is after a fit: the one value that is saved and loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from daskdl.data.models import trainable
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import OptionError
from daskdl.history import History
from daskdl.training.fit_state import FitState


@dataclass(frozen=True, eq=False)
class TrainerState:
    """A trainer without its client.

    Attributes:
        arguments: What it was made with, by name; the client is not among them.
        model: Trained.
        fit_state: What the next fit goes on from, beside the model.
        history: Of the last fit.
        classes: Names of the labels, if the data had such.
    """

    arguments: Mapping[str, Any]
    model: nn.Module
    fit_state: FitState
    history: History
    classes: Sequence[str] | None


def new_optimizer(arguments: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """An optimizer over a model, as a trainer of such arguments makes it now.

    Raises:
        OptionError: If it makes none.
    """
    parameters = trainable(model)
    try:
        made: Any = arguments["optimizer"](list(parameters))
    except MISFITS as error:
        raise OptionError(
            f"optimizer failed on a list of {len(parameters)} parameters: {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"optimizer must return a torch.optim.Optimizer, got {made!r}"
        )
    return made
