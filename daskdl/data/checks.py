"""What labels are held to, wherever they are loaded.

One step rehearsed on two rows: whether a model and a loss fit the data.

No Dask, and nothing of the user's is changed: it works on copies, on the CPU.

Whether a model, a loss and an optimizer can be used at all; no data are needed.

No Dask. Whether they go with the data is seen in :mod:`daskdl.data.checks`.

Whether data, model, loss and optimizer go together, before a worker is touched.

No Dask. One array by itself is checked in :mod:`daskdl.data.tables`; model, loss and
optimizer by themselves in :mod:`daskdl.data.checks`; what they make of two rows, in
:mod:`daskdl.data.checks`.

Whether there is an accuracy: class indices, and one score for each class.

Parts that cannot be read: which errors say so, and what is done about such a part.

Whoever loads parts asks here, so that all leave out the same ones.
"""

import contextlib
import csv
import functools
import inspect
import logging
import lzma
import pickle
import random
import struct
import tarfile
import threading
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.data import batching, tables
from daskdl.data.batching import (
    Batch,
    Kinds,
    Rows,
    Transform,
    Tree,
    floating_dtype,
    to_device,
)
from daskdl.data.source import Source
from daskdl.data.tables import (
    InMemory,
    as_numpy,
    check_array,
    check_structure,
    few,
    first_rows,
)
from daskdl.errors import (
    DaskDLError,
    DataError,
    LostPieceError,
    ModelError,
    OptionError,
)
from daskdl.objective import Objective, OwnStep
from daskdl.serialization import Packed, copied

logger = logging.getLogger(__name__)


class ClassRange(NamedTuple):
    """The labels that a classification loss accepts."""

    classes: int  # labels are in [0, classes)
    ignore_index: int  # the one label outside that is accepted


@dataclass(frozen=True)
class LabelCheck:
    """Refuses labels that a loss cannot use.

    Attributes:
        accepted: Of class indices; None: anything but NaN.
    """

    accepted: ClassRange | None = None

    def check(self, y: Tree, of: str = "") -> None:
        """Look at all labels of some rows.

        Args:
            y: Tree of arrays, or None: then there is nothing to look at.
            of: What they are of, for the message; "": all of them.

        Raises:
            DataError: With the first wrong one, and where it is.

        Example:
            >>> import numpy as np
            >>> LabelCheck().check({"a": np.array([0.5, np.nan])}, "part 3")
            Traceback (most recent call last):
            daskdl.errors.DataError: y['a'] of part 3[1] is nan; remove such \
examples, or fill them in
        """
        classes, ignored = self.accepted or (None, None)
        for name, leaf in () if y is None else batching.named(y, "y"):
            check_labels(leaf, classes, f"{name} of {of}" if of else name, ignored)


def check_labels(
    y: np.ndarray | Tensor,
    classes: int | None,
    where: str,
    ignore_index: int | None = None,
) -> None:
    """Refuse labels that no loss can use: NaN, or a class the model does not have.

    Args:
        y: Labels of a data set or of one piece of it.
        classes: Integer labels must be in [0, classes); None if they need not.
        where: What ``y`` is, for the message: an argument or a piece.
        ignore_index: A label that is accepted although it is outside.

    Raises:
        DataError: With the first such label and its index.

    Example:
        >>> check_labels(np.array([0, 1, 2]), 2, "y")
        Traceback (most recent call last):
        daskdl.errors.DataError: y[2] is 2, but the model gives 2 outputs: labels \
must be in [0, 2)
    """
    labels = as_numpy(y)
    if labels.dtype.kind == "f":
        wrong = np.isnan(labels)
        remedy = "; remove such examples, or fill them in"
    elif labels.dtype.kind in "iu" and classes is not None:
        wrong = (labels < 0) | (labels >= classes)
        if ignore_index is not None:
            wrong &= labels != ignore_index
        remedy = f", but the model gives {classes} outputs: labels must be in "
        remedy += f"[0, {classes})"
    else:
        return
    if wrong.any():
        index = np.unravel_index(np.argmax(wrong), wrong.shape)
        shown = ", ".join(str(i) for i in index)
        raise DataError(f"{where}[{shown}] is {labels[index]}{remedy}")


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
            f"{_then(tables.of_labels(loss, takes_classes, output, labels))}"
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
            f"{_then(tables.of_inputs(x, error))}"
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


def is_classification(output: Any, y: Tree) -> bool:
    """Class indices, and one score per class along dimension 1 of the output.

    Args:
        output: Of a model.
        y: The labels, as `to_device` makes them.
    """
    return (
        isinstance(y, Tensor)
        and y.dtype == torch.int64  # as `to_device` makes every integer label
        and isinstance(output, Tensor)
        and output.ndim == y.ndim + 1
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def has_accuracy(
    model: nn.Module,
    objective: Objective | None,
    X: Tree,
    y: Tree,
    transform: Transform | None = None,
) -> bool:
    """Whether a model is scored by accuracy on data like these.

    Args:
        model: Not changed.
        objective: With the model it has been rehearsed on these data; or None.
        X: Examples, of which two are looked at.
        y: Labels, likewise, or None.
        transform: What is made of each batch before, or None.

    Example:
        >>> X = torch.zeros(3, 2)
        >>> has_accuracy(nn.Linear(2, 4), nn.CrossEntropyLoss(), X, torch.arange(3))
        True
        >>> has_accuracy(nn.Linear(2, 4), nn.MSELoss(), X, torch.zeros(3, 4))
        False
    """
    if isinstance(objective, OwnStep):
        return False  # it shows no outputs
    return is_classification(*output_rows(model, X, y, transform))


# What reading raises, whoever does it. Not Exception: what is none of these says
# nothing about the data, and should be seen under its own name.
UNREADABLE = (
    *MISFITS,
    OSError,
    EOFError,
    SyntaxError,  # Pillow's, of a damaged PNG
    csv.Error,
    lzma.LZMAError,
    pickle.UnpicklingError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def blames_data(error: BaseException) -> bool:
    """Whether it says that the data are bad, rather than what else is to be changed.

    Example:
        >>> blames_data(ValueError("torn")), blames_data(DataError("torn"))
        (True, True)
        >>> from daskdl.errors import OptionError
        >>> blames_data(OptionError("images are decoded with Pillow; install it"))
        False
    """
    if isinstance(error, DaskDLError):
        return isinstance(error, DataError) and not isinstance(error, LostPieceError)
    return True


def is_left_out(error: BaseException, name: str, skips: bool) -> bool:
    """Whether a part is done without; the log says so, else the error names it.

    Args:
        error: One of `UNREADABLE`; gets a note if it is to be raised again.
        name: Of the part.
        skips: Whether parts that cannot be read are left out.
    """
    if not skips or not blames_data(error):
        if not getattr(error, "__notes__", None):  # else it is in a part of this part
            error.add_note(f"in {name}")
        return False
    logger.warning("%s is left out: %s", name, error)
    return True


def separated(
    separate: Sequence[tuple[str, Callable[[], Rows]]], skips: bool
) -> Iterator[tuple[str, Rows]]:
    """Yield name and rows of each of the things that a part is made of.

    Args:
        separate: See `Source.separate`.
        skips: Whether those that cannot be read are left out; else the error names it.
    """
    for name, load in separate:
        try:
            rows = load()
        except UNREADABLE as error:
            if not is_left_out(error, name, skips):
                raise
            continue
        yield name, rows


def joined_files(
    files: Iterator[tuple[str, Rows]], check: Callable[[Rows, str], None] | None = None
) -> tuple[Rows | None, int]:
    """Put what is left of a part together.

    Args:
        files: Name and rows of each thing in it that can be read.
        check: Raises one of `UNREADABLE` if rows cannot be used.

    Returns:
        The rows, None if there are none, and of how many things. All have the shapes
        that most of them have; the log has the others, too.
    """
    good: list[tuple[str, Rows]] = []
    for url, rows in files:
        try:
            if check is not None:
                check(rows, url)
        except UNREADABLE as error:
            if not is_left_out(error, url, skips=True):
                raise
            continue
        good.append((url, rows))
    if not good:
        return None, 0
    ((most, _),) = Counter(batching.kinds(rows) for _, rows in good).most_common(1)
    for url, rows in good:
        if batching.kinds(rows) != most:
            logger.warning("%s is left out: its rows have other shapes", url)
    alike = [rows for _, rows in good if batching.kinds(rows) == most]
    return batching.joined_rows(alike), len(alike)
