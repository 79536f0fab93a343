"""The term of the loss that an optimizer's weight decay stands for. No Dask."""

import torch
from torch import nn, optim
from torch.optim import Optimizer

from daskdl.errors import OptionError
from daskdl.objective import Penalised
from daskdl.serialization import copied

# Those that add ``weight_decay * parameter`` to the gradient, which is what a term
# ``0.5 * weight_decay * parameter ** 2`` of the loss does.
_ADD_TO_GRADIENT = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.SGD,
)


def penalty_of(model: nn.Module, optimizer: Optimizer) -> float:
    """What is added to the loss of each step, whatever the examples.

    Args:
        model: Of Keras it may have regularisers of its weights.
        optimizer: Of its parameters.

    Raises:
        OptionError: If the optimizer is that of another model, or see below.
    """
    own = {id(parameter) for parameter in model.parameters()}
    groups = optimizer.param_groups
    if any(id(p) not in own for group in groups for p in group["params"]):
        raise OptionError(
            "regularization=True needs the optimizer of the model, got an optimizer_ "
            "with parameters that are not those of model_"
        )
    return penalty_of_weights(optimizer) + _of_regularisers(model)


def penalty_of_weights(optimizer: Optimizer) -> float:
    """Compute ``0.5 * weight_decay`` times the sum of squares, over all groups.

    Args:
        optimizer: Of the model; its parameters are read only.

    Raises:
        OptionError: If it decays the weights in another way than by the gradient, as
            AdamW does: that is no term of any loss.

    Example:
        >>> import torch
        >>> weights = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> penalty_of_weights(torch.optim.SGD([weights], weight_decay=0.5))
        6.25
    """
    total = 0.0
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0))
        if not decay:
            continue
        decoupled = group.get("decoupled_weight_decay", False)
        if decoupled or not isinstance(optimizer, _ADD_TO_GRADIENT):
            raise OptionError(
                "regularization=True needs an optimizer whose weight decay is a term "
                f"of the loss, such as SGD's or Adam's, got {type(optimizer).__name__} "
                f"with weight_decay={decay:g}, which is taken off the weights apart "
                "from the gradient; use regularization=False"
            )
        squares = [p.detach().double().square().sum().item() for p in group["params"]]
        total += 0.5 * decay * sum(squares)
    return total


def _of_regularisers(model: nn.Module) -> float:
    """Of the weights: on a copy that has not looked at any rows."""
    fresh = copied(model)
    if not isinstance(fresh, Penalised):
        return 0.0
    with torch.no_grad():
        penalty = fresh.penalty()
    return 0.0 if penalty is None else penalty.item()
