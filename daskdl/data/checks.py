"""Whether data, model, loss and optimizer go together, before a worker is touched.

No Dask. One array by itself is checked in :mod:`daskdl.data.arrays`; model, loss and
optimizer by themselves in :mod:`daskdl.data.models`; what they make of two rows, in
:mod:`daskdl.data.rehearsal`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from daskdl.data import batching
from daskdl.data.arrays import check_array, check_structure
from daskdl.data.batching import Batch, Rows, Transform, Tree
from daskdl.data.frames.kinds import few
from daskdl.data.in_memory import InMemory
from daskdl.data.labels import ClassRange, LabelCheck
from daskdl.data.models import check_model, check_optimizer
from daskdl.data.rehearsal import (
    forward,
    random_state_left_alone,
    rehearse,
    rehearsed_batch,
)
from daskdl.data.source import Source
from daskdl.errors import DataError, OptionError
from daskdl.objective import Objective
from daskdl.serialization import copied


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
        >>> import numpy as np
        >>> check_arrays(np.zeros((3, 2)), np.zeros(4))
        Traceback (most recent call last):
        daskdl.errors.DataError: X and y must have the same length, got 3 and 4
    """
    check_structure(X, y)
    named = batching.named_both((X, y))
    lengths = {name: int(check_array(leaf, name)) for name, leaf in named.items()}
    if len(set(lengths.values())) > 1:
        shown = " and ".join(map(str, lengths.values()))
        raise DataError(
            f"{' and '.join(lengths)} must have the same length, got {shown}"
        )
    return next(iter(lengths.values()))


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
        copy = copied(model).eval()
        check_optimizer(optimizer, copy)
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
        return rehearse(copied(model).eval(), loss, X, y, transform)


def output_rows(
    model: nn.Module, X: Tree, y: Tree, transform: Transform | None = None
) -> Batch:
    """The output of a model for two rows, and their labels, on the CPU.

    Args:
        model: Not changed, like the random states.
        X: Examples, of which two are looked at.
        y: Labels, likewise, or None.
        transform: What is made of each batch before, or None.

    Raises:
        ModelError: If the transform or the model fails on them.
    """
    with random_state_left_alone():
        module = copied(model).eval()
        x, labels = rehearsed_batch(module, X, y, transform)
        return forward(module, x), labels


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


def check_same_classes(source: Source, classes: Sequence[str] | None) -> None:
    """Refuse labels whose names have other numbers than a model was trained with.

    Args:
        source: With names of its labels, or without.
        classes: Names of those that the model knows, or None.

    Raises:
        DataError: With both.

    Example:
        >>> import numpy as np
        >>> source = InMemory(np.zeros((1, 1)), np.zeros(1), 1)
        >>> source.classes = ["dog", "cat"]
        >>> check_same_classes(source, ["cat", "dog"])
        Traceback (most recent call last):
        daskdl.errors.DataError: labels must be numbered as those that the model was \
trained with, 'cat', 'dog', got the names 'dog', 'cat': give them these categories, \
with pandas' cat.set_categories for one
    """
    own = source.classes
    if own is None or classes is None or list(own) == list(classes)[: len(own)]:
        return
    raise DataError(
        "labels must be numbered as those that the model was trained with, "
        f"{few(classes)}, got the names {few(own)}: give them these categories, with "
        "pandas' cat.set_categories for one"
    )


@contextlib.contextmanager
def of_validation() -> Iterator[None]:
    """Errors from here, which speak of X and y, are about the validation data.

    Example:
        >>> import numpy as np
        >>> with of_validation():
        ...     check_arrays(np.zeros((3, 2)), np.zeros(4))
        Traceback (most recent call last):
        daskdl.errors.DataError: validation: X and y must have the same length, got \
3 and 4
    """
    try:
        yield
    except OptionError as error:
        raise type(error)(f"validation: {error}") from error
