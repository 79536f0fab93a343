"""One step rehearsed on two rows: whether a model and a loss fit the data.

No Dask, and nothing of the user's is changed: it works on copies, on the CPU.
"""

import contextlib
import functools
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.data.arrays import check_labels, first_rows, is_dask_array
from daskdl.data.batches import floating_dtype, inputs_to_device, to_device
from daskdl.errors import ModelError
from daskdl.objective import Objective, OwnStep
from daskdl.packed import Packed

# What user code raises when it does not fit the data. Not Exception: what is none of
# these is no misfit, and should be seen under its own name with its own traceback.
MISFITS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    UserWarning,
)

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
# They belong to the whole process: two fits in two threads go one after the other.
_random_states = threading.RLock()

_IGNORED_BY_DEFAULT = -100  # torch's own default for ignore_index


class ClassRange(NamedTuple):
    """The labels that a classification loss accepts."""

    classes: int  # labels are in [0, classes)
    ignore_index: int  # the one label outside that is accepted


def rehearse(module: nn.Module, loss: Objective, X: Any, y: Any) -> ClassRange | None:
    """Run model and loss on two rows; raise if they do not fit them.

    Args:
        module: A copy on the CPU in evaluation mode.
        loss: ``loss(output, labels)``, a mean over the examples; or a step of the
            user's own, which runs the model itself.
        X: Examples that `check_data` has accepted; a ``dask.array`` counts as zeros.
        y: Their labels, likewise.

    Returns:
        The labels the loss accepts if it takes class indices, else None.

    Raises:
        ModelError: If the model, the loss or the step fails, or the loss is not one
            number.
        DataError: If a label in memory is a class that the model does not have.
    """
    x, labels = to_device(
        torch.from_numpy(first_rows(X, 2).copy()),
        torch.from_numpy(first_rows(y, 2).copy()),
        "cpu",
        floating_dtype(module),
    )
    if isinstance(loss, OwnStep):
        _rehearse_step(Packed(loss, "step").unpack(), module, x, labels)
        return None
    output = forward(module, x)
    accepted = _class_range(loss, output, labels)
    if accepted is not None and not is_dask_array(y):
        check_labels(y, accepted.classes, "y", accepted.ignore_index)
    loss = Packed(loss, "loss").unpack()
    try:
        with _strictly():
            value = loss(output, labels)
    except MISFITS as error:
        raise ModelError(
            f"loss failed on two rows, the output being {_shown(output)} and the "
            f"labels {_shown(labels)}: {error}"
        ) from error
    _check_loss_value("loss", value)
    return accepted


def _rehearse_step(step: OwnStep, module: nn.Module, x: Tensor, y: Tensor) -> None:
    shapes = f"x being {_shown(x)} and y {_shown(y)}"
    try:
        with _strictly():
            value = step.function(module, (x, y))
    except MISFITS as error:
        raise ModelError(f"step failed on two rows, {shapes}: {error}") from error
    _check_loss_value("step", value)


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        # torch only warns when (n,) meets (n, 1), and then trains on n * n pairs.
        warnings.filterwarnings("error", "Using a target size")
        yield


def forward(module: nn.Module, x: Tensor) -> Any:
    """Run the model on rows of X, with an error that names their shape and dtype.

    Raises:
        ModelError: If the model raises what a wrong shape or dtype raises.
    """
    try:
        with torch.no_grad():
            return module(x.clone())  # the first layer may work in place
    except MISFITS as error:
        hint = ""
        if not x.is_floating_point():
            hint = "; if these are quantities, not indices, use X.astype('float32')"
        raise ModelError(
            f"model failed on {len(x)} rows of X, {_shown(x)}: {error}{hint}"
        ) from error


def prepared_rows(module: nn.Module, X: Any, count: int) -> Tensor:
    """``count`` rows of X as the model will get them, on the CPU; see `first_rows`."""
    rows = torch.from_numpy(first_rows(X, count).copy())
    return inputs_to_device(rows, "cpu", floating_dtype(module))


@contextlib.contextmanager
def random_state_left_alone() -> Iterator[None]:
    """Put the random states of Python, numpy and torch's CPU back on the way out."""
    with _random_states:
        python, legacy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def ignored_label(loss: Any) -> int | None:
    """The label that a loss passes over; None if it does not take class indices.

    Example:
        >>> ignored_label(nn.CrossEntropyLoss(ignore_index=7))
        7
        >>> ignored_label(nn.MSELoss()) is None
        True
    """
    if isinstance(loss, _CLASS_LOSSES):
        return loss.ignore_index
    settings: dict[str, Any] = {}
    if isinstance(loss, functools.partial):
        loss, settings = loss.func, loss.keywords
    if loss in _CLASS_FUNCTIONS:
        return int(settings.get("ignore_index", _IGNORED_BY_DEFAULT))
    return None


def _class_range(loss: Any, output: Any, labels: Tensor) -> ClassRange | None:
    ignored = ignored_label(loss)
    if ignored is None or labels.is_floating_point() or not isinstance(output, Tensor):
        return None
    if output.ndim != labels.ndim + 1:
        return None  # the loss itself will say what it thinks of these shapes
    return ClassRange(output.shape[1], ignored)


def _check_loss_value(argument: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ModelError(f"{argument} must return a tensor, got {value!r}")
    if value.numel() != 1 or not value.is_floating_point():
        raise ModelError(
            f"{argument} must return one floating number for a batch, got "
            f'{_shown(value)} for two rows; use reduction="mean", or take the mean()'
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
