"""Checks that data, model, loss and optimizer fit together, before training.

This module contains the dry run on two rows and the checks of labels and shapes. It
runs no Dask task and does not change user objects.
"""

import contextlib
import copy
import difflib
import functools
import inspect
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

# Private in torch 2.7 to 2.13: nothing public observes all operations.
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from daskdl.config import is_number
from daskdl.data import batching
from daskdl.data.batching import (
    Batch,
    Rows,
    RowSpec,
    Transform,
    Tree,
    Weighted,
    floating_dtype,
    inputs_to_device,
    to_device,
)
from daskdl.data.named_columns import few
from daskdl.data.source import SHOWN_ROWS, Source, shown_rows
from daskdl.data.tables import as_numpy
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.losses import ROUNDING, aligned, labels_and_scale, scale_of
from daskdl.objective import (
    Logs,
    ModelLoss,
    Objective,
    OwnStep,
    call,
    is_sum,
    loss_and_logs,
    model_loss,
    scored,
    takes,
    way_of,
)
from daskdl.serialization import Packed

# ---- labels


@dataclass(frozen=True)
class LabelCheck:
    """Refuses labels that a loss cannot use."""

    classes: int | None = None  # integer labels must be in [0, classes); None: any
    ignore_index: int | None = None  # a label outside that range that the loss ignores

    def check(self, y: Tree, of: str = "") -> None:
        """Raise a DataError with the first wrong label, its index and the part."""
        y = batching.labels_of(y)
        for name, leaf in () if y is None else batching.named_leaves(y, "y"):
            labels = as_numpy(leaf)
            if labels.dtype.kind == "f":
                wrong = np.isnan(labels)
                remedy = "; remove such examples, or fill them in"
            elif labels.dtype.kind in "iu" and self.classes is not None:
                wrong = (labels < 0) | (labels >= self.classes)
                if self.ignore_index is not None:
                    wrong &= labels != self.ignore_index
                remedy = (
                    f", but the model gives {self.classes} outputs: labels must be in "
                    f"[0, {self.classes})"
                )
            else:
                continue
            if wrong.any():
                index = np.unravel_index(np.argmax(wrong), wrong.shape)
                where = f"{name} of {of}" if of else name
                shown = ", ".join(map(str, index))
                raise DataError(f"{where}[{shown}] is {labels[index]}{remedy}")

    def check_source(self, source: Source) -> None:
        """Check labels in memory; all other labels are checked when they are loaded."""
        if source.rows_in_memory is not None:
            self.check(source.rows_in_memory[1])


def check_same_classes(source: Source, classes: Sequence[str] | None) -> None:
    """Refuse labels that are numbered differently from those of the training data.

    Example:
        >>> from daskdl.data.tables import InMemory
        >>> source = InMemory(np.zeros((1, 1)), np.zeros(1), 1)
        >>> source.classes = ["dog", "cat"]
        >>> check_same_classes(source, ["cat", "dog"])
        Traceback (most recent call last):
        daskdl.errors.DataError: labels must be numbered as those that the model was \
trained with, 'cat', 'dog', got the names 'dog', 'cat': give them these categories, \
with pandas' cat.set_categories for one
    """
    names = source.classes
    if names is None or classes is None:
        return
    if list(names) == list(classes)[: len(names)]:
        return
    raise DataError(
        "labels must be numbered as those that the model was trained with, "
        f"{few(classes)}, got the names {few(names)}: give them these categories, with "
        "pandas' cat.set_categories for one"
    )


def ignored_label(loss: Any) -> int | None:
    """The label that a loss ignores; None if the loss does not take class indices."""
    if isinstance(loss, ModelLoss):  # ignores the same label as torch's losses
        return -100
    loss = unweighted(loss)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index
    settings: dict[str, Any] = {}
    if isinstance(loss, functools.partial):
        loss, settings = loss.func, loss.keywords
    if loss in (functional.cross_entropy, functional.nll_loss):
        return int(settings.get("ignore_index", -100))  # torch's default
    return None


def is_classification(output: Any, y: Tree) -> bool:
    """Whether y holds class indices, and dimension 1 of the output their scores."""
    y = batching.labels_of(y)
    return (
        isinstance(y, Tensor)
        and y.dtype == torch.int64  # as `to_device` makes every integer label
        and isinstance(output, Tensor)
        and output.ndim == y.ndim + 1
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def label_weights(loss: Any, y: Tree) -> Tensor | None:
    """Return the weight of each label in a mean loss; None: all rows are equal.

    For class indices, it is 0 for ignored labels, and the weight of the class for
    others.
    """
    if isinstance(loss, ModelLoss) or not isinstance(y, Tensor):
        return None
    keras = hasattr(loss, "aligned")  # takes indices as floats, and one-hot rows
    if not keras and (y.is_floating_point() or y.dtype == torch.bool):
        return None  # numbers, or probabilities of classes
    ignored = ignored_label(loss)
    if ignored is None or (keras and ignored < 0):  # one-hot rows: none is ignored
        return None
    counted: Tensor = y != ignored
    if isinstance(loss, functools.partial):
        weights_C = loss.keywords.get("weight")
    else:
        weights_C = getattr(loss, "weight", None)
    if weights_C is None:
        return counted
    weights: Tensor = weights_C.to(y.device).double()[y.where(counted, 0)] * counted
    return weights


def batch_weight(loss: Any, y: Tree, rows: int) -> float:
    """Return the weight of a batch in a mean over batches.

    For a mean of class indices, it is the sum of the weights of the labels that count,
    by which the mean divides. For other losses, it is the number of rows, since a mean
    over the rows of all batches does not depend on the batch size then.

    Example:
        >>> y = torch.tensor([2, -100, -100])
        >>> batch_weight(nn.CrossEntropyLoss(), y, 3), batch_weight(nn.MSELoss(), y, 3)
        (1, 3)
    """
    weighted = isinstance(y, Weighted)
    loss, labels = unweighted(loss), batching.labels_of(y)
    weights = None if is_sum(loss) else label_weights(loss, labels)
    if weighted:
        weight: Tensor = y.weight
        if weights is not None:
            weight = weight.reshape(-1, *[1] * (weights.ndim - 1)) * weights
        return float(weight.sum())
    return rows if weights is None else weights.sum().item()


def unweighted(loss: Any) -> Any:
    """Return the loss itself of one whose rows have weights."""
    return loss.loss if isinstance(loss, WeightedLoss) else loss


class WeightedLoss(nn.Module):
    """A loss of an output and `Weighted` labels, in which each row has a weight.

    A mean becomes the weighted mean, the sum of weight * loss divided by the sum of the
    weights; a sum becomes the weighted sum. If all weights of a batch are 0, the loss
    is 0. For labels without weights, the loss is unchanged. The wrapped loss needs an
    attribute or argument ``reduction``, as torch's losses have.

    Example:
        >>> loss = WeightedLoss(nn.MSELoss())
        >>> y = Weighted(torch.zeros(2), torch.tensor([3.0, 1.0]))
        >>> loss(torch.tensor([1.0, 3.0]), y)
        tensor(3.)
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        if isinstance(loss, OwnStep):
            raise OptionError(
                "sample_weight needs loss=, such as torch.nn.CrossEntropyLoss(); a "
                "step weighs rows itself: give it the weights as a part of X or y"
            )
        check_loss(loss)
        function = loss.func if isinstance(loss, functools.partial) else loss
        takes = hasattr(loss, "reduction")
        if not takes and not isinstance(function, nn.Module):
            with contextlib.suppress(TypeError, ValueError):  # not callable, or of C
                takes = "reduction" in inspect.signature(function).parameters
        if not takes:
            raise OptionError(
                "sample_weight needs the loss of each row: a loss of torch.nn, or a "
                "function with an argument reduction that takes 'none', got "
                f"{loss!r}; or give the weights as a part of X or y, and weigh the "
                "rows in the loss"
            )
        self.loss = loss

    @property
    def reduction(self) -> str:
        """``"mean"`` or ``"sum"``."""
        return "sum" if is_sum(self.loss) else "mean"

    def sums(self, output: Any, y: Weighted) -> tuple[Tensor, Tensor]:
        """Return the sum of weight * loss over the rows, and that of the weights.

        Where labels are class indices, each of them counts.
        """
        if hasattr(self.loss, "reduction"):
            unreduced = copy.copy(self.loss)  # replicas of a process share it
            unreduced.reduction = "none"
        else:
            unreduced = functools.partial(self.loss, reduction="none")
        losses, rows = unreduced(output, y.labels), len(y.weight)
        if not isinstance(losses, Tensor) or losses.shape[:1] != (rows,):
            raise ModelError(
                "sample_weight needs the loss of each row, and with reduction='none' "
                f"the loss returns {described(losses)} for {rows} rows"
            )
        weight = y.weight.reshape(-1, *[1] * (losses.ndim - 1)).expand_as(losses)
        total = (losses * weight).sum()
        if self.reduction == "sum":
            return total, y.weight.sum()
        labels = label_weights(self.loss, y.labels)
        if labels is not None:
            return total, (weight * labels.reshape(losses.shape)).sum()
        each = losses.numel() / max(rows, 1)  # losses of a row
        return total / each, y.weight.sum()

    def forward(self, output: Any, y: Any) -> Tensor:
        """Return the weighted mean or sum."""
        if not isinstance(y, Weighted):
            plain: Tensor = self.loss(output, y)
            return plain
        total, weight = self.sums(output, y)
        if self.reduction == "sum":
            return total
        return total / weight.clamp_min(torch.finfo(weight.dtype).tiny)


# ---- model, loss and optimizer


def check_module(model: Any) -> None:
    """Refuse anything but a module whose parameters all have shapes."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model must be a torch.nn.Module or a function that returns one, got "
            f"{model!r}"
            + (f"; {SEVERAL}" if isinstance(model, list | tuple | dict) else "")
        )
    for path, part in model.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            name = f"model.{path}" if path else "model"
            raise ModelError(
                f"{name} is a DistributedDataParallel, which needs a process group; "
                f"daskdl combines the updates of its replicas itself: use {name}.module"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"the shape of model.{name} is not known yet; run the model on one "
                "batch before handing it over"
            )


def check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be called; it is not run."""
    if isinstance(loss, type):
        name = loss.__name__
        raise ModelError(f"loss is the class {name}; create one, {name}()")
    if not isinstance(loss, OwnStep) and not callable(loss):
        raise ModelError(
            "loss must be a function of (output, labels), such as MSELoss(); got "
            f"{loss!r}"
        )


SEVERAL = (
    "to train several models, such as generator and discriminator, put them into one "
    "nn.Module, return the sum of their losses from one step, and give one optimizer a "
    "parameter group for each; the page of options has an example"
)


def optimizer_function(optimizer: Any, lr: Any = None) -> Callable[..., Optimizer]:
    """Return the function that makes an optimizer, for a trainer's arguments.

    Example:
        >>> optimizer_function("adamw", 1e-3)
        functools.partial(<class 'torch.optim.adamw.AdamW'>, lr=0.001)
    """
    if isinstance(optimizer, str):
        optimizer = _optimizer_class(optimizer)
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    is_class = isinstance(kind, type) and issubclass(kind, Optimizer)
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise OptionError(
            f"optimizer must be made by each replica, got a {name}; give the class and "
            f"the rate, optimizer=torch.optim.{name}, lr=..."
        )
    if not callable(optimizer):
        several = isinstance(optimizer, Iterable)
        raise OptionError(
            "optimizer must be a class of torch.optim or its name, with lr=..., or a "
            "function that makes one from parameters, such as lambda params: "
            f"torch.optim.SGD(params, lr=0.1), got {optimizer!r}"
            + (f"; {SEVERAL}" if several else "")
        )
    if lr is None:
        function: Callable[..., Optimizer] = optimizer
        return function
    if not is_number(lr) or not 0 < lr < math.inf:
        raise OptionError(f"lr must be a number > 0 or None, got {lr!r}")
    if not is_class:
        raise OptionError(
            f"lr={lr!r} is for an optimizer that is a class or its name, got the "
            f"function {optimizer!r}; set the rate in the function"
        )
    if isinstance(optimizer, functools.partial) and "lr" in optimizer.keywords:
        raise OptionError(
            f"lr is given twice, as lr={lr!r} and in {optimizer!r}; leave one out"
        )
    return functools.partial(optimizer, lr=lr)


def _optimizer_class(name: str) -> type[Optimizer]:
    kinds = {
        class_name.lower(): kind
        for class_name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, Optimizer)
        and kind is not Optimizer
    }
    if name.lower() in kinds:
        return kinds[name.lower()]
    close = difflib.get_close_matches(name.lower(), kinds, 1)
    remedy = f"did you mean {close[0]!r}?" if close else f"choose of {', '.join(kinds)}"
    raise OptionError(
        "optimizer must be the name of a class of torch.optim, such as 'adamw', got "
        f"{name!r}; {remedy}"
    )


def optimizer_of(function: Callable[..., Optimizer], module: nn.Module) -> Optimizer:
    """Make the optimizer of a module.

    The function gets the list of its trainable parameters; or the module itself, if its
    first argument is called ``module`` or ``model``.
    """
    return function(module if _takes_module(function) else trainable(module))


def _takes_module(function: Callable[..., Any]) -> bool:
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # written in C
        return False
    return names[:1] in (["module"], ["model"])


def check_training(model: Any, loss: Any, optimizer: Callable[..., Optimizer]) -> None:
    """Refuse a model, loss or optimizer that cannot be trained with, whatever the data.

    The optimizer is made once, from the parameters of the model, which is a copy; the
    loss is not run.
    """
    check_module(model)
    parameters = trainable(model)
    if not parameters:
        raise ModelError(
            f"model has no trainable parameters: {type(model).__name__} has none "
            "with requires_grad=True"
        )
    check_loss(loss)
    try:
        with preserved_random_state():
            built: Any = optimizer_of(optimizer, model)
    except USER_ERRORS as error:
        raise ModelError(optimizer_failed(optimizer, model, error)) from error
    several = built.values() if isinstance(built, dict) else built
    if isinstance(several, Iterable):
        kinds = ", ".join(type(item).__name__ for item in several)
        raise ModelError(
            f"optimizer must return one torch.optim.Optimizer, got several ({kinds}); "
            "make one of parameter groups, as in torch.optim.SGD([{'params': a, "
            f"'lr': 0.1}}, {{'params': b, 'lr': 0.01}}]); {SEVERAL}"
        )
    if not isinstance(built, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer must return a torch.optim.Optimizer, got {built!r}"
        )
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in known for group in built.param_groups for p in group["params"]):
        raise ModelError(
            "optimizer works on parameters it was not given, so the replicas would "
            "not be trained; make it from its argument, as in "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    closure = inspect.signature(built.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"optimizer {type(built).__name__} needs a closure that evaluates the "
            "model several times per step; choose one that does without"
        )


def optimizer_failed(
    optimizer: Callable[..., Optimizer], module: nn.Module, error: BaseException
) -> str:
    """Explain that an optimizer could not be made."""
    if _takes_module(optimizer):
        return (
            f"optimizer failed on the {type(module).__name__}: {error}; its first "
            "argument is called module or model, so it gets the model"
        )
    remedy = ""
    if isinstance(error, AttributeError) and "'list' object" in str(error):
        remedy = "; to get the model, call its argument module: lambda module: ..."
    count = len(trainable(module))
    return f"optimizer failed on a list of {count} parameters: {error}{remedy}"


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer is made from."""
    return [p for p in module.parameters() if p.requires_grad]


# ---- the dry run


class DryRun(NamedTuple):
    """Result of a dry run on two rows."""

    rows: Rows  # arrays, before the transform
    batch: Batch  # transformed, in the dtype of the model, on the CPU
    output: Any  # of the model, as the loss gets it; None: a step runs the model
    y: Tree  # labels of the output; a model with its own loss may take them from x
    classes: int | None  # number of classes that the loss accepts; None: any labels
    labels: LabelCheck | None  # for labels loaded later; None: a transform changes them
    logs: Sequence[str] = ()  # names of what a step logs


def dry_run(
    module: nn.Module,
    rows: Rows | None,
    transform: Transform | None = None,
    loss: Objective | None = None,
) -> DryRun:
    """Run transform, model and loss on two rows, with the random states preserved.

    Args:
        module: A copy on the CPU; set to evaluation mode.
        rows: Repeated if there are fewer than two; None: the data have no rows.
        transform: Applied to the batch.
        loss: None: only the model is run.

    Raises:
        ModelError: If transform, model, loss or step fails, or the loss is not one
            number.
        DataError: If there are no rows, no labels for a loss, or a label of these rows
            is not a class of the model.
    """
    if rows is None:
        raise DataError("X must not be empty, got no rows in any part")
    shown = shown_rows(rows)
    with preserved_random_state(), _repeating(batching.length(rows)):
        module.eval()
        x, y = transformed_batch(shown, transform)
        x, y = batch = to_device(x, y, "cpu", floating_dtype(module))
        unchanged = LabelCheck() if transform is None else None
        if isinstance(loss, OwnStep):
            step = Packed(loss, "step").unpack()
            shapes = f"x being {described(x)} and y {described(y)}"
            if isinstance(loss, ModelLoss):
                outcome: list[Any] = []  # loss, output, labels

                def own_loss() -> Any:
                    outcome[:] = model_loss(module, batch)
                    return outcome[0]

                _run_loss("the model's loss", own_loss, shapes, x, y)
                _, output, labels = outcome
                return DryRun(shown, batch, output, labels, None, unchanged)
            logs = _run_loss("step", lambda: step.function(module, batch), shapes, x, y)
            return DryRun(shown, batch, None, y, None, unchanged, logs)
        if y is None and loss is not None:
            raise DataError(
                "y must be given, or data of pairs (x, y), or label= with a column of "
                "X: the loss needs labels; a model that returns its own loss, and a "
                "step, need neither y nor loss="
            )
        output = _forward(module, x)
        _warn_of_squeezing(module, x, output)
        if loss is None:
            return DryRun(shown, batch, output, y, None, unchanged)
        output = scored(output)
        labels = batching.labels_of(y)
        accepted = _accepted_labels(loss, *aligned(unweighted(loss), output, labels))
        if accepted.classes is not None and transform is None:
            accepted.check(shown[1])
        copied_loss = Packed(loss, "loss").unpack()
        shapes = f"the output being {described(output)} and the labels {described(y)}"
        remedy = functools.partial(_label_remedy, loss, output, labels)
        _run_loss(
            "loss", lambda: copied_loss(output, y), shapes, output, labels, remedy
        )
        _check_scores(unweighted(loss), output)
        labels = accepted if transform is None else None
        return DryRun(shown, batch, output, y, accepted.classes, labels)


@contextlib.contextmanager
def _repeating(rows: int) -> Iterator[None]:
    """Say in errors that the dry run repeats the first row, if there is only one."""
    try:
        yield
    except ModelError as error:
        if rows >= SHOWN_ROWS:
            raise
        raise ModelError(
            f"{error} (the dry run repeats the first row of X, to have {SHOWN_ROWS})"
        ) from error


def _warn_of_squeezing(module: nn.Module, x: Tree, output: Any) -> None:
    """Warn of a model whose output for one row has no axis of rows."""
    try:
        alone = _forward(module, batching.rows(x, slice(0, 1)))
        dropped = batching.tree_map(
            lambda row, rows: isinstance(rows, Tensor) and row.ndim < rows.ndim,
            scored(alone),
            scored(output),
        )
    except USER_ERRORS:  # the model needs several rows
        return
    if any(batching.leaves(dropped)):
        warnings.warn(
            f"model returns {described(scored(output))} for {batching.length(x)} rows, "
            f"but {described(scored(alone))} for one row, so predict fails on a single "
            "row: squeeze() drops the axis of rows; write squeeze(-1)",
            stacklevel=2,
        )


def _check_scores(loss: Any, output: Any) -> None:
    """Refuse scores of another scale, which a loss may take without an error."""
    kind = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(kind, "__name__", type(kind).__name__)
    # A subclass may convert its scores first.
    known = hasattr(loss, "scale") or str(kind.__module__).startswith("torch.")
    if not known or not isinstance(output, Tensor) or not output.numel():
        return
    scale = labels_and_scale(loss)[1]
    if scale == "probabilities" and bool((output < 0).any()):
        raise ModelError(
            f"loss {name} expects probabilities, got outputs down to "
            f"{output.min().item():.3g}: end the model in a softmax or a sigmoid, or "
            "take a loss of logits, such as CrossEntropyLoss, or from_logits=True"
        )
    if scale == "log_probabilities" and bool((output > ROUNDING).any()):
        raise ModelError(
            f"loss {name} expects log probabilities, got outputs up to "
            f"{output.max().item():.3g}: end the model in nn.LogSoftmax(dim=1), or "
            "take nn.CrossEntropyLoss()"
        )
    if scale == "logits" and scale_of(None, output) == "probabilities":
        warnings.warn(
            f"loss {name} expects logits, but the model's outputs add up to 1 in each "
            "row: end it before its softmax",
            stacklevel=2,
        )


_OUTPUTS, _LABELS = frozenset({"outputs"}), frozenset({"labels"})


class _RowPairs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that pair each row of one tensor with all rows of another.

    Outputs (n, 1) and labels (n,) are broadcast to (n, n): an operation of a tensor
    that is computed from the outputs alone and one that is computed from the labels
    alone, of different numbers of axes, has a result larger than both.
    """

    def __init__(self, outputs: Tree, labels: Tree) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: tuple[torch.Size, torch.Size] | None = None  # of the first such
        # By id; the tensors are kept, so that no other tensor gets their id.
        self._computed_from: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._rows = batching.length(outputs)
        self._note(_tensors(batching.leaves(outputs)), _OUTPUTS)
        self._note(_tensors(batching.leaves(labels)), _LABELS)

    def _note(self, tensors: Iterable[Tensor], sources: frozenset[str]) -> None:
        for tensor in tensors:
            self._computed_from[id(tensor)] = tensor, sources

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [
            self._computed_from[id(value)]
            for value in _tensors(args, kwargs)
            if id(value) in self._computed_from
        ]
        sources = frozenset[str]().union(*(origin for _, origin in operands))
        self._note(_tensors(result), sources)
        if isinstance(result, Tensor) and self.shapes is None:
            for (left, of_left), (right, of_right) in combinations(operands, 2):
                if {of_left, of_right} == {_OUTPUTS, _LABELS} and self._paired(
                    left, right, result
                ):
                    pair = (left, right) if of_left == _OUTPUTS else (right, left)
                    self.shapes = pair[0].shape, pair[1].shape
        return result

    def _paired(self, left: Tensor, right: Tensor, result: Tensor) -> bool:
        return (
            left.ndim != right.ndim
            and all(side.ndim and len(side) == self._rows for side in (left, right))
            and result.numel() > max(left.numel(), right.numel())
        )


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Return the tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _without_pairs(
    argument: str, run: Callable[[], Any], outputs: Tree, labels: Tree
) -> Any:
    """Run a loss or a step, and warn if it pairs each row with the labels of others."""
    pairs = _RowPairs(outputs, labels)
    try:
        with pairs:
            value = run()
    except USER_ERRORS:  # also where a function, such as a compiled one, refuses a mode
        return run()
    if pairs.shapes is not None:
        of_outputs, of_labels = map(_shape_of_rows, pairs.shapes)
        warnings.warn(
            f"{argument} pairs the output of each row with the labels of all rows, as "
            f"outputs of shape {of_outputs} and labels of shape {of_labels} are "
            "broadcast; give the labels the shape of the outputs, as y.reshape(-1, 1) "
            "does for (n, 1), or end forward with squeeze(-1)",
            stacklevel=2,
        )
    return value


def _shape_of_rows(shape: Sequence[int]) -> str:
    """Describe a shape, with n for the number of rows.

    Example:
        >>> _shape_of_rows((2, 1)), _shape_of_rows((2,))
        ('(n, 1)', '(n,)')
    """
    return f"({', '.join(['n', *map(str, shape[1:])])}{',' * (len(shape) == 1)})"


def transformed_batch(rows: Rows, transform: Transform | None) -> Batch:
    """Return two rows as transformed tensors; a failing transform is a ModelError."""
    batch = batching.tensors(rows)
    if transform is None:
        return batch
    shown = f"x being {described(batch[0])} and y {described(batch[1])}"
    try:
        transformed = transform(batch)
    except USER_ERRORS as error:
        raise ModelError(f"transform failed on two rows, {shown}: {error}") from error
    if not isinstance(transformed, tuple) or len(transformed) != 2:
        raise ModelError(
            f"transform must return a pair (x, y), got a {type(transformed).__name__}; "
            "y is None where there are no labels"
        )
    return transformed


def _forward(module: nn.Module, x: Tree) -> Any:
    try:
        with torch.no_grad():
            # Clones: the first layer may work in place.
            return call(module, batching.tree_map(torch.clone, x))
    except ModelError:
        raise
    except USER_ERRORS as error:
        remedy = _input_remedy(module, x, error)
        raise ModelError(
            f"model failed on {batching.length(x)} rows of X, {described(x)}: {error}"
            f"{'; ' if remedy else ''}{remedy}"
        ) from error


def _run_loss(
    argument: str,
    run: Callable[[], Any],
    shapes: str,
    inputs: Tree,
    labels: Tree,
    remedy_of: Callable[[], str] = str,
) -> Sequence[str]:
    """Check a loss, or what a step returns; return the names of what it logs."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # For (n,) and (n, 1) torch only warns, and then trains on n * n pairs.
            warnings.filterwarnings("error", "Using a target size")
            value = _without_pairs(argument, run, inputs, labels)
    except ModelError:
        raise
    except USER_ERRORS as error:
        remedy = remedy_of()
        raise ModelError(
            f"{argument} failed on two rows, {shapes}: {error}"
            f"{'; ' if remedy else ''}{remedy}"
        ) from error
    logs: Logs = {}
    if argument == "step":
        value, logs = loss_and_logs(value)
    if not isinstance(value, Tensor):
        raise ModelError(f"{argument} must return a tensor, got {value!r}")
    if value.numel() != 1 or not value.is_floating_point():
        raise ModelError(
            f"{argument} must return one floating number for a batch, got "
            f'{described(value)} for two rows; use reduction="mean", or take the mean()'
        )
    return list(logs)


def check_held_tensors(module: nn.Module, batch: Batch, objective: Objective) -> None:
    """Refuse a loss or a step that has trainable tensors of its own.

    The optimizer gets the parameters of the model alone. Tensors that do not take part
    in the gradient, such as those of a teacher under `no_grad`, are accepted, as well
    as tensors that the step makes anew in each call.

    Args:
        module: A copy on the CPU, in evaluation mode.
        batch: Rows for which `dry_run` has succeeded.
        objective: Copied, not run itself.

    Raises:
        ModelError: The message names the tensors.
    """
    argument = "step" if isinstance(objective, OwnStep) else "loss"
    copied = Packed(objective, argument).unpack()
    of_model = set(map(id, module.parameters()))

    def held() -> dict[int, Tensor]:
        x, y = batching.tree_map(torch.clone, batch)
        if isinstance(copied, OwnStep):
            value = loss_and_logs(copied.function(module, (x, y)))[0]
        else:
            value = copied(scored(_forward(module, x)), y)
        leaves = _graph_leaves(value)
        return {id(leaf): leaf for leaf in leaves if id(leaf) not in of_model}

    with preserved_random_state():
        tensors = held()
        lasting = tensors.keys() & held().keys() if tensors else set()
    if not lasting:
        return
    function = copied.function if isinstance(copied, OwnStep) else unweighted(copied)
    names = _names_of_tensors(function)
    shown = [
        f"{names.get(key, 'a tensor')} of shape {tuple(tensors[key].shape)}"
        for key in tensors
        if key in lasting
    ]
    listed = ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" * (len(shown) > 3))
    raise ModelError(
        f"{argument} has trainable tensors that are not parameters of the model, so "
        f"the optimizer would not train them: {listed}; make the module that holds "
        "them a submodule of the model, and compute the loss in a step: "
        "step=lambda model, batch: model.criterion(model(batch[0]), batch[1]); or "
        "freeze them with requires_grad_(False)"
    )


def _graph_leaves(value: Tensor) -> list[Tensor]:
    """Return the tensors that `backward` would compute the gradients of."""
    if value.grad_fn is None:
        return [value] if value.requires_grad else []
    nodes: dict[Any, None] = {value.grad_fn: None}  # in the order of their discovery
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        inputs = [node for node, _ in waiting.pop().next_functions if node is not None]
        waiting.extend(node for node in inputs if node not in nodes)
        nodes |= dict.fromkeys(inputs)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _names_of_tensors(function: Any) -> dict[int, str]:
    """Return the names, by id, of tensors in a module, or in what a function uses."""
    holders = {"": function}
    if isinstance(function, functools.partial):
        function = function.func
        holders |= {"": function, **holders[""].keywords}
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        holders |= {**used.globals, **used.nonlocals}
    names = {}
    for path, value in holders.items():
        if isinstance(value, Tensor):
            names[id(value)] = repr(path)
        elif isinstance(value, nn.Module):
            for name, parameter in value.named_parameters(path):
                names[id(parameter)] = repr(name)
    return names


def _accepted_labels(loss: Any, output: Any, labels: Tree) -> LabelCheck:
    ignored = ignored_label(loss)
    if ignored is None or not is_classification(output, labels):
        return LabelCheck()  # the loss itself refuses other shapes
    return LabelCheck(output.shape[1], ignored)


def described(value: Any) -> str:
    """Describe shapes and dtypes, for messages."""
    if not batching.is_leaf(value):
        named = batching.named_leaves(value, "")
        return ", ".join(f"{name}: {described(leaf)}" for name, leaf in named)
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def _class_remedy(ignored: int, output: Tensor, labels: Tensor) -> str:
    """How to make labels class indices; "" if unknown."""
    floating, calls = labels.is_floating_point(), ""
    if labels.ndim == 2 and labels.shape[1] == 1:
        calls = ".ravel()"
    elif labels.shape == output.shape and not floating:
        return "take class indices, y.argmax(1)"
    elif labels.ndim != output.ndim - 1:
        return ""
    if labels.dtype == torch.bool:
        calls += ".astype('int64')"
    if floating:
        calls += (
            ".astype('int64'); drop rows whose label is missing (NaN), or fill in "
            f"{ignored} before, which the loss ignores"
        )
    return f"use y{calls}" if calls else ""


def _label_remedy(loss: Any, output: Any, labels: Tree) -> str:
    """How to make labels fit one of torch's losses; "" if unknown."""
    if not isinstance(output, Tensor) or not isinstance(labels, Tensor):
        return ""
    ignored = ignored_label(loss)
    if ignored is not None:
        return _class_remedy(ignored, output, labels)
    floating, calls = labels.is_floating_point(), ""
    function = loss.func if isinstance(loss, functools.partial) else loss
    named = function if hasattr(function, "__name__") else type(function)
    if not str(named.__module__).startswith("torch.nn."):
        return ""
    binary = isinstance(function, nn.BCELoss | nn.BCEWithLogitsLoss) or function in (
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
    )
    if binary and not floating:
        calls = ".astype('float32')"
    if output.shape == (*labels.shape, 1):
        calls += ".reshape(-1, 1)"
    elif labels.shape == (*output.shape, 1):
        calls += ".ravel()"
    elif output.shape != labels.shape:
        one_each = binary and labels.ndim == 1 and not floating
        return "for class indices use CrossEntropyLoss" if one_each else ""
    return f"use y{calls}" if calls else ""


def _input_remedy(module: nn.Module, x: Tree, error: BaseException) -> str:
    """How to make inputs fit a model; "" if unknown."""
    if way_of(module, x) == "one" and isinstance(error, TypeError | AttributeError):
        if not batching.is_leaf(x):
            return (
                f"{takes(module)}, but X, {batching.outline(x)}, is passed as one "
                "argument: rename the keys of a dict to the names of the arguments, "
                "pass a tuple with one array for each, or unpack X in "
                "forward(self, batch)"
            )
        if "required positional argument" in str(error):
            return f"{takes(module)}: give X as a dict with these keys, or as a tuple"
    if any(leaf.is_floating_point() for leaf in batching.leaves(x)):
        return ""
    names = [f"{name}.astype('float32')" for name, _ in batching.named_leaves(x, "X")]
    return f"if these are quantities, not indices, use {', '.join(names)}"


class ShapeCheck:
    """Refuses rows whose shapes make the model fail; each new shape is tried once.

    `tried` is the spec of the rows of the dry run.
    """

    def __init__(self, tried: RowSpec | None, transform: Transform | None) -> None:
        self._tried = tried
        self._fit = {tried}
        self._transform = transform

    def check(
        self, module: nn.Module, device: torch.device, rows: Rows, name: str
    ) -> None:
        """Check the rows of a part; buffers and mode of the module are restored."""
        spec = batching.row_spec(rows)
        if spec in self._fit or not batching.length(rows):
            return
        try:
            with preserved_random_state(device), _unchanged(module):
                x, _ = transformed_batch(shown_rows(rows), self._transform)
                _forward(module, inputs_to_device(x, device, floating_dtype(module)))
        except ModelError as error:
            others = ""
            if self._tried is not None:
                others = f", and others {_shown_spec(self._tried)}"
            raise DataError(
                f"{name} has rows of {_shown_spec(spec)}{others}: {error}"
            ) from error
        self._fit.add(spec)


def _shown_spec(spec: RowSpec) -> str:
    return ", ".join(f"{name} of shape {shape}" for name, shape, _ in spec)


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Evaluate a module; restore modes and buffers on exit."""
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


# The states belong to the whole process: fits in two threads take turns.
_random_states = threading.RLock()


@contextlib.contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random states of Python, numpy, torch's CPU and a device on exit.

    With None, those of all CUDA devices that this process uses.
    """
    others: Sequence[int | torch.device] = []
    if device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        others = range(torch.cuda.device_count())
    elif device is not None and device.type == "cuda":
        others = [device]
    with _random_states:
        python, legacy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=others):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


@contextlib.contextmanager
def of_validation() -> Iterator[None]:
    """Mark errors about X and y as errors about the validation data."""
    try:
        yield
    except OptionError as error:
        raise type(error)(f"validation: {error}") from error
