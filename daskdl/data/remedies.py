"""What to do with data that cannot be used: the ends of messages.

Nothing is refused here. Each function is asked when it is known that something does not
fit, may look at all of it, and says what fits in code that the user can copy.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from daskdl.data import batching
from daskdl.data.batching import Tree

TEXT = "text must be numbers first, as a tokenizer makes them"

_NUMBERS = int | float | complex | np.generic | None
_BYTES = bytes | bytearray
_INPUTS = "; several inputs are a tuple, tuple({X})"
_ARRAYS = f"make one array of it, numpy.stack({{X}}){_INPUTS}"
_TENSORS = f"make one tensor of it, torch.stack({{X}}){_INPUTS}"
_PADDED = (
    "its arrays have different shapes: pad them to one, then make one array with "
    f"numpy.stack{_INPUTS}"
)
_EXAMPLES = (
    "examples by themselves are a torch Dataset or a bag, dask.bag.from_sequence({X})"
)
_ITERATED = (
    "stack them, numpy.stack(list({X})), or stream them with daskdl.data.Sharded or a "
    "torch IterableDataset"
)
_NAMES = "number the classes, numpy.unique({X}, return_inverse=True)[1]"
_CONVERTED = "convert it with numpy.asarray({X})"
_ROW_EACH = "give an array with one row for each example"

_BCE_LOSSES = (nn.BCELoss, nn.BCEWithLogitsLoss)
_BCE_FUNCTIONS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)


def _has(name: str) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, name)


def _is(kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_delayed(value: Any) -> bool:
    return type(value).__module__ in ("dask.delayed", "distributed.client")


# The first that holds. What has `__array__` may be iterated, too.
_KINDS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_is_delayed, "put it into a list, [{X}]"),
    (_is(type), _ROW_EACH),
    (_has("to_dask_array"), "convert it with {X}.to_dask_array(lengths=True)"),
    (_has("to_numpy"), "convert it with {X}.to_numpy()"),
    (_has("toarray"), "make it dense with {X}.toarray()"),
    (_is(_NUMBERS), _ROW_EACH),
    (
        _is(str | PathLike),
        f"paths and URLs of files are given as X, without y; {TEXT}",
    ),
    (_is(_BYTES), "read it with numpy.frombuffer({X}, dtype=...)"),
    (
        _is(Dataset | DataLoader),
        "a dataset has inputs and labels together: give it as X, without y",
    ),
    (_is(Mapping), "make it a dict of arrays, dict({X})"),
    (_has("__array__"), _CONVERTED),
    (_is(memoryview | range), _CONVERTED),
    (_is(Iterable), _ITERATED),
    (callable, "give what it returns"),
)


def of_kind(value: Any, argument: str) -> str:
    """What makes an array of something that is none.

    Args:
        value: Of any type.
        argument: Its name in the user's call.

    Example:
        >>> of_kind([1.0, 2.0], "X")
        'convert it with numpy.asarray(X)'
        >>> of_kind({1, 2}, "y of part 3")
        'stack them, numpy.stack(list(y)), or stream them with daskdl.data.Sharded or \
a torch IterableDataset'
    """
    if isinstance(value, list):
        remedy = _of_list(value, argument)
    else:
        remedy = next((then for holds, then in _KINDS if holds(value)), _ROW_EACH)
    return remedy.replace("{X}", _variable(argument))


def _of_list(value: list[Any], argument: str) -> str:
    first = value[0] if value else None
    if isinstance(first, dict | tuple):
        return _EXAMPLES
    arrays = isinstance(first, Tensor) or getattr(first, "ndim", 0) > 0
    if arrays and len({getattr(item, "shape", None) for item in value}) > 1:
        return _PADDED
    if arrays:
        return _TENSORS if isinstance(first, Tensor) else _ARRAYS
    try:
        made = np.asarray(value)
    except ValueError:
        return "its items have different lengths: pad them to one length"
    return _of_strings(argument) if made.dtype.kind in "US" else _CONVERTED


def of_dtype(array: Any, argument: str) -> str:
    """What makes real numbers of an array that has none.

    Args:
        array: Of numpy, of torch or of Dask.
        argument: Its name in the user's call.

    Example:
        >>> of_dtype(np.array(["ant", "bee"]), "y")
        'number the classes, numpy.unique(y, return_inverse=True)[1]'
    """
    variable = _variable(argument)
    call = "astype(numpy.float32)"
    if isinstance(array, Tensor):
        call = "to(torch.float32)"
    elif array.dtype.kind in "UST":
        return _of_strings(argument).replace("{X}", variable)
    elif isinstance(array, np.ndarray) and array.dtype.kind == "O" and array.size:
        first = array.flat[0]
        if isinstance(first, str | bytes):
            return _of_strings(argument).replace("{X}", variable)
        if isinstance(first, np.ndarray | Tensor | list | tuple):
            return f"pad its arrays to one shape, then numpy.stack({variable})"
    return f"convert it, for example with {variable}.{call}"


def _of_strings(argument: str) -> str:
    if not argument.startswith("y"):
        return "encode them as numbers"
    if " of " in argument:  # of some rows only, which may not have all classes
        return "number the classes, alike in all parts"
    return _NAMES


def _variable(argument: str) -> str:
    """What the user has written, without where it was found.

    Example:
        >>> _variable("X['a'] of part 3")
        "X['a']"
    """
    return argument.partition(" of ")[0]


def of_labels(loss: Any, takes_classes: bool, output: Any, labels: Tree) -> str:
    """What makes labels fit one of torch's own losses; "" if nothing is known to.

    Args:
        loss: Which has failed.
        takes_classes: Whether it takes class indices.
        output: Of the model.
        labels: As the loss got them.

    Example:
        >>> of_labels(nn.BCELoss(), False, torch.ones(2, 1), torch.tensor([True] * 2))
        "use y.astype('float32').reshape(-1, 1)"
    """
    if not isinstance(output, Tensor) or not isinstance(labels, Tensor):
        return ""
    if takes_classes:
        return _of_classes(output, labels)
    function = loss.func if isinstance(loss, functools.partial) else loss
    binary = isinstance(function, _BCE_LOSSES) or function in _BCE_FUNCTIONS
    own = function if hasattr(function, "__name__") else type(function)
    if not str(own.__module__).startswith("torch.nn."):
        return ""
    calls = ""
    if binary and not labels.is_floating_point():
        calls = ".astype('float32')"
    if output.shape == (*labels.shape, 1):
        calls += ".reshape(-1, 1)"
    elif labels.shape == (*output.shape, 1):
        calls += ".ravel()"
    elif output.shape != labels.shape:
        one_each = binary and labels.ndim == 1 and not labels.is_floating_point()
        return "for class indices use CrossEntropyLoss" if one_each else ""
    return f"use y{calls}" if calls else ""


def _of_classes(output: Tensor, labels: Tensor) -> str:
    whole = not labels.is_floating_point()
    calls = ""
    if labels.ndim == 2 and labels.shape[1] == 1:
        calls = ".ravel()"
    elif labels.shape == output.shape and whole:
        return "take class indices, y.argmax(1)"
    elif labels.ndim != output.ndim - 1:
        return ""
    if not whole or labels.dtype == torch.bool:
        calls += ".astype('int64')"
    return f"use y{calls}" if calls else ""


def of_inputs(x: Tree, error: BaseException) -> str:
    """What makes inputs fit a model that has failed on them; "" if nothing is known to.

    Args:
        x: What the model was given.
        error: What it has raised.

    Example:
        >>> of_inputs(torch.tensor([[1]]), RuntimeError())
        "if these are quantities, not indices, use X.astype('float32')"
    """
    several = isinstance(x, dict | tuple)
    if several and isinstance(error, TypeError | AttributeError):
        return (
            f"the model gets the {'dict' if isinstance(x, dict) else 'tuple'} of X as "
            "one argument: take it apart in forward(self, batch), wrap the model in a "
            "module that does, or give step= instead of loss="
        )
    if any(leaf.is_floating_point() for leaf in batching.leaves(x)):
        return ""
    names = [f"{name}.astype('float32')" for name, _ in batching.named(x, "X")]
    return f"if these are quantities, not indices, use {', '.join(names)}"
