"""One step rehearsed on two rows: whether a model and a loss fit the data.

No Dask, and nothing of the user's is changed: it works on copies, on the CPU.
"""

import contextlib
import functools
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.data import batching, remedies
from daskdl.data.arrays import first_rows
from daskdl.data.batching import (
    Batch,
    Kinds,
    Rows,
    Transform,
    Tree,
    floating_dtype,
    to_device,
)
from daskdl.data.labels import ClassRange, check_labels
from daskdl.errors import DataError, ModelError
from daskdl.objective import Objective, OwnStep
from daskdl.serialization import Packed

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


def rehearse(
    module: nn.Module,
    loss: Objective,
    X: Any,
    y: Any,
    transform: Transform | None = None,
) -> ClassRange | None:
    """Run model and loss on two rows; raise if they do not fit them.

    Args:
        module: A copy on the CPU in evaluation mode.
        loss: ``loss(output, labels)``, a mean over the examples; or a step of the
            user's own, which runs the model itself.
        X: Tree of arrays, of which two rows are taken, repeated if there are fewer.
        y: Their labels, likewise; None if there are none.
        transform: What is made of each batch before, or None.

    Returns:
        The labels the loss accepts if it takes class indices, else None.

    Raises:
        ModelError: If the transform, the model, the loss or the step fails, or the
            loss is not one number.
        DataError: If there are no labels for a loss, or one of these is a class that
            the model does not have.
    """
    x, labels = rehearsed_batch(module, X, y, transform)
    if isinstance(loss, OwnStep):
        _rehearse_step(Packed(loss, "step").unpack(), module, x, labels)
        return None
    if labels is None:
        raise DataError(
            "y must be given, or data of pairs (x, y): the loss needs labels; to train "
            "without, give a step instead of a loss"
        )
    output = forward(module, x)
    accepted = _class_range(loss, output, labels)
    if accepted is not None and transform is None:
        check_labels(y, accepted.classes, "y", accepted.ignore_index)
    takes_classes = ignored_label(loss) is not None
    loss = Packed(loss, "loss").unpack()
    try:
        with _strictly():
            value = loss(output, labels)
    except MISFITS as error:
        raise ModelError(
            f"loss failed on two rows, the output being {_shown(output)} and the "
            f"labels {_shown(labels)}: {error}"
            f"{_then(remedies.of_labels(loss, takes_classes, output, labels))}"
        ) from error
    _check_loss_value("loss", value)
    return accepted


def rehearsed_batch(
    module: nn.Module, X: Tree, y: Tree, transform: Transform | None = None
) -> Batch:
    """Two rows as the model will get them, on the CPU.

    Raises:
        ModelError: If the transform fails.
    """
    rows = batching.of_both(lambda tree: batching.mapped(_two, tree), (X, y))
    return to_device(*transformed(rows, transform), "cpu", floating_dtype(module))


def _two(leaf: Any) -> Tensor:
    return torch.from_numpy(first_rows(leaf, 2).copy())


def transformed(batch: Batch, transform: Transform | None) -> Batch:
    """What a transform of the user's makes of two rows.

    Raises:
        ModelError: If it fails, or makes no pair.
    """
    if transform is None:
        return batch
    shown = f"x being {_shown(batch[0])} and y {_shown(batch[1])}"
    try:
        made = transform(batch)
    except MISFITS as error:
        raise ModelError(f"transform failed on two rows, {shown}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise ModelError(
            f"transform must return a pair (x, y), got a {type(made).__name__}; y is "
            "None where there are no labels"
        )
    return made


def _rehearse_step(step: OwnStep, module: nn.Module, x: Tree, y: Tree) -> None:
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


def forward(module: nn.Module, x: Tree) -> Any:
    """Run the model on rows of X, with an error that names their shape and dtype.

    Raises:
        ModelError: If the model raises what a wrong shape or dtype raises.
    """
    try:
        with torch.no_grad():
            # Clones, because the first layer may work in place.
            return module(batching.mapped(torch.clone, x))
    except MISFITS as error:
        raise ModelError(
            f"model failed on {batching.length(x)} rows of X, {_shown(x)}: {error}"
            f"{_then(remedies.of_inputs(x, error))}"
        ) from error


def _then(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


class ShapeCheck:
    """Refuses rows with which the model fails, though it did not with the first ones.

    Rows of shapes that are new are tried once; of the others nothing is computed.

    Args:
        first: Of rows with which a step was rehearsed; None: none was.
        transform: What is made of each batch before, or None.
    """

    def __init__(self, first: Kinds | None, transform: Transform | None) -> None:
        self._first = first
        self._fit = {self._first}
        self._transform = transform

    def check(
        self, module: nn.Module, device: torch.device, rows: Rows, name: str
    ) -> None:
        """Look at the rows of a part.

        Args:
            module: On its device; its buffers, its mode and the random states are put
                back.
            device: That is.
            rows: All of one shape.
            name: Of the part, for the message.

        Raises:
            DataError: Naming it.
        """
        kinds = batching.kinds(rows)
        if kinds in self._fit or not batching.length(rows[0]):
            return
        try:
            with random_state_left_alone(), _left_alone(module):
                x, _ = rehearsed_batch(module, *rows, self._transform)
                forward(module, batching.mapped(lambda leaf: leaf.to(device), x))
        except ModelError as error:
            first = ""
            if self._first is not None:
                first = f", and others {_shown_kinds(self._first)}"
            raise DataError(
                f"{name} has rows of {_shown_kinds(kinds)}{first}: {error}"
            ) from error
        self._fit.add(kinds)


def _shown_kinds(kinds: Kinds) -> str:
    return ", ".join(f"{name} of shape {shape}" for name, shape, _ in kinds)


@contextlib.contextmanager
def _left_alone(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode; whatever that changes is put back."""
    training = {part: part.training for part in module.modules()}
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in training.items():
            part.training = mode
        with torch.no_grad():
            for buffer, former in buffers.items():
                buffer.copy_(former)


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


def _class_range(loss: Any, output: Any, labels: Tree) -> ClassRange | None:
    ignored = ignored_label(loss)
    if not isinstance(output, Tensor) or not isinstance(labels, Tensor):
        return None
    if ignored is None or labels.is_floating_point():
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
    if isinstance(value, tuple | dict):
        named = batching.named(value, "")
        return ", ".join(f"{name}: {_shown(leaf)}" for name, leaf in named)
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
