"""Whether a model, a loss and an optimizer can be used at all; no data are needed.

No Dask. Whether they go with the data is seen in :mod:`daskdl.data.checks`.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from daskdl.data.rehearsal import MISFITS
from daskdl.errors import ModelError
from daskdl.objective import OwnStep


def check_model(model: Any, loss: Any, optimizer: Any) -> None:
    """Refuse a model, a loss or an optimizer of the wrong kind; nothing is run.

    Raises:
        ModelError: Naming the argument, what was given and what is expected.

    Example:
        >>> check_model(nn.ReLU(), nn.MSELoss(), torch.optim.SGD)
        Traceback (most recent call last):
        daskdl.errors.ModelError: model has no trainable parameters: ReLU has none \
with requires_grad=True
    """
    check_module(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"model has no trainable parameters: {type(model).__name__} has none "
            "with requires_grad=True"
        )
    check_loss(loss)
    _check_callable(
        optimizer,
        "optimizer",
        "a function that makes one from parameters, such as "
        "lambda params: torch.optim.SGD(params, lr=0.1)",
    )


def check_module(model: Any) -> None:
    """Refuse what is not a module with its shapes known.

    Raises:
        ModelError: If it is not an ``nn.Module``, or a lazy one that never ran.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model must be a torch.nn.Module or a function that returns one, got "
            f"{model!r}"
        )
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if nn.parameter.is_lazy(tensor)
    ]
    if lazy:
        raise ModelError(
            f"the shape of model.{lazy[0]} is not known yet; run the model on one "
            "batch before handing it over"
        )


def check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be called; it is not run.

    Raises:
        ModelError: If it is no function of outputs and labels.

    Example:
        >>> check_loss(nn.MSELoss)
        Traceback (most recent call last):
        daskdl.errors.ModelError: loss is the class MSELoss; create one, MSELoss()
    """
    if isinstance(loss, OwnStep):
        return  # it was looked at when it was made
    if isinstance(loss, type):
        name = loss.__name__
        raise ModelError(f"loss is the class {name}; create one, {name}()")
    _check_callable(loss, "loss", "a function of (output, labels), such as MSELoss()")


def check_optimizer(optimizer: Callable[..., Any], module: nn.Module) -> None:
    """Make one for the trainable parameters of a module, and look at what comes.

    Args:
        optimizer: The user's function; it gets the module's own parameters.
        module: A copy.

    Raises:
        ModelError: If the function fails, or makes what cannot be used.
    """
    parameters = trainable(module)
    try:
        made = optimizer(list(parameters))
    except MISFITS as error:
        raise ModelError(
            f"optimizer failed on a list of {len(parameters)} parameters: {error}"
        ) from error
    several = made.values() if isinstance(made, dict) else made
    if isinstance(several, Iterable):
        kinds = ", ".join(type(one).__name__ for one in several)
        raise ModelError(
            f"optimizer must return one torch.optim.Optimizer, got several ({kinds}); "
            "make one of parameter groups, as in torch.optim.SGD([{'params': a, "
            "'lr': 0.1}, {'params': b, 'lr': 0.01}])"
        )
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(f"optimizer must return a torch.optim.Optimizer, got {made!r}")
    known = {id(parameter) for parameter in parameters}
    if any(id(p) not in known for group in made.param_groups for p in group["params"]):
        raise ModelError(
            "optimizer works on parameters it was not given, so the replicas would "
            "not be trained; make it from its argument, as in "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"optimizer {type(made).__name__} needs a closure that evaluates the "
            "model several times per step; choose one that does without"
        )


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is made from: rehearsed, on replicas and on the client alike.

    A list, because the user's function may go over it more than once.

    Example:
        >>> [tuple(p.shape) for p in trainable(nn.Linear(2, 1))]
        [(1, 2), (1,)]
    """
    return [p for p in module.parameters() if p.requires_grad]


def _check_callable(value: Any, argument: str, expected: str) -> None:
    if not callable(value):
        raise ModelError(f"{argument} must be {expected}; got {value!r}")
