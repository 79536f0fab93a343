"""Whether data, model, loss and optimizer go together, before a worker is touched.

No Dask. One array by itself is checked in :mod:`daskdl.data.arrays`; what model and
loss make of two rows of it, in :mod:`daskdl.data.rehearsal`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from daskdl.data import trees
from daskdl.data.arrays import check_array, check_structure
from daskdl.data.batches import Transform
from daskdl.data.in_memory import InMemory
from daskdl.data.labels import ClassRange, LabelCheck
from daskdl.data.rehearsal import (
    MISFITS,
    random_state_left_alone,
    rehearse,
)
from daskdl.data.source import Source
from daskdl.data.trees import Rows, Tree
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.objective import Objective, OwnStep
from daskdl.packed import PackedModel

__all__ = [
    "check_arrays",
    "check_loss",
    "check_model",
    "check_module",
    "check_rows",
    "check_step",
    "check_whole",
    "of_validation",
    "rows_like",
    "trainable",
]


def check_arrays(X: Tree, y: Tree) -> int:
    """Refuse arrays in memory that do not make a data set.

    Args:
        X: Tree of arrays and tensors, examples along the first axis.
        y: Their labels, in the same order, or None.

    Returns:
        Number of examples, > 0.

    Raises:
        DataError: If one cannot be used (see `check_array`), if they differ in
            length.

    Example:
        >>> check_arrays(torch.zeros(3, 2), torch.zeros(4))
        Traceback (most recent call last):
        daskdl.errors.DataError: X and y must have the same length, got 3 and 4
    """
    check_structure(X, y)
    named = trees.named_both((X, y))
    lengths = {name: int(check_array(leaf, name)) for name, leaf in named.items()}
    if len(set(lengths.values())) > 1:
        shown = " and ".join(map(str, lengths.values()))
        raise DataError(
            f"{' and '.join(lengths)} must have the same length, got {shown}"
        )
    return next(iter(lengths.values()))


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


def check_step(
    model: nn.Module,
    loss: Objective,
    optimizer: Any,
    X: Tree,
    y: Tree,
    transform: Transform | None = None,
) -> ClassRange | None:
    """Rehearse one step on two rows, so that what does not fit is found here.

    It runs on a copy that has been through the same packing as on the way to the
    workers, in evaluation mode, without gradients; the random state of Python, numpy
    and torch is left as it was.

    Args:
        model: The module to train; not changed.
        loss: ``loss(output, labels)``, a mean over the examples; or a step of the
            user's own.
        optimizer: Makes a ``torch.optim.Optimizer`` from a list of parameters.
        X: Examples, of which two are looked at.
        y: Labels, likewise, or None.
        transform: What is made of each batch before, or None.

    Returns:
        The labels the loss accepts, if it takes class indices: what
        `LabelCheck` should hold parts to that are loaded later. Else None.

    Raises:
        ModelError: If model, loss and optimizer cannot do a step on these data.
        DataError: If a label in memory is a class that the model does not have.
    """
    check_model(model, loss, optimizer)
    with random_state_left_alone():
        copy = PackedModel(model).unpack().eval()
        _check_optimizer(optimizer, copy)
        return rehearse(copy, loss, X, y, transform)


def check_rows(
    model: nn.Module,
    loss: Objective,
    X: Tree,
    y: Tree,
    transform: Transform | None = None,
) -> ClassRange | None:
    """Refuse data that model and loss cannot be scored on; as `check_step`."""
    with random_state_left_alone():
        return rehearse(PackedModel(model).unpack().eval(), loss, X, y, transform)


def rows_like(source: Source) -> Rows:
    """Rows like all those of a source, to rehearse with.

    Raises:
        DataError: If it has none.
    """
    if source.first is None:
        raise DataError("X must not be empty, got no rows in any part")
    return source.first


def check_whole(source: Source, labels: LabelCheck) -> None:
    """Refuse labels in memory that a loss does not accept.

    Args:
        source: Any; what is not in memory is looked at when it is loaded.
        labels: What they are held to.
    """
    if isinstance(source, InMemory):
        labels.check(source.whole[1])


@contextlib.contextmanager
def of_validation() -> Iterator[None]:
    """Errors from here, which speak of X and y, are about the validation data.

    Example:
        >>> with of_validation():
        ...     check_arrays(torch.zeros(3, 2), torch.zeros(4))
        Traceback (most recent call last):
        daskdl.errors.DataError: validation: X and y must have the same length, got \
3 and 4
    """
    try:
        yield
    except OptionError as error:
        raise type(error)(f"validation: {error}") from error


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is made from: rehearsed, on replicas and on the client alike.

    A list, because the user's function may go over it more than once.

    Example:
        >>> [tuple(p.shape) for p in trainable(nn.Linear(2, 1))]
        [(1, 2), (1,)]
    """
    return [p for p in module.parameters() if p.requires_grad]


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


def _check_callable(value: Any, argument: str, expected: str) -> None:
    if not callable(value):
        raise ModelError(f"{argument} must be {expected}; got {value!r}")


def _check_optimizer(optimizer: Callable[..., Any], module: nn.Module) -> None:
    """Make one for the trainable parameters of a copy, and look at what comes."""
    parameters = trainable(module)
    try:
        made = optimizer(list(parameters))
    except MISFITS as error:
        raise ModelError(
            f"optimizer failed on a list of {len(parameters)} parameters: {error}"
        ) from error
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
