"""One array at a time: which kinds are accepted, what may be wrong, rows as numpy.

Accepted are numpy arrays, torch tensors and ``dask.array``. No Dask import: a
``dask.array`` can only exist if somebody else has imported it. Pairs of arrays,
models and losses are checked in :mod:`daskdl.data.checks`.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daskdl.data import batching, remedies
from daskdl.data.batching import Tree
from daskdl.errors import DataError

# What torch.from_numpy can take over as it is; longdouble is the one it cannot.
_NUMBER_KINDS = "biuf"
_LARGEST_ITEM_BYTES = 8
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def is_dask_array(value: Any) -> bool:
    """Whether ``value`` is a ``dask.array``, without importing Dask.

    Example:
        >>> is_dask_array([1, 2])
        False
    """
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(value, module.Array)


def check_array(value: Any, argument: str) -> float:
    """Refuse what cannot be cut into examples; return their number.

    Args:
        value: What the user gave, of any type.
        argument: Its name in the user's call, for the message.

    Returns:
        Number of examples: the length of the first axis, > 0; NaN if Dask does not
        know it.

    Raises:
        DataError: If the kind, the number of dimensions, the dtype or the chunks
            cannot be used, or if there is nothing in it.

    Example:
        >>> check_array(np.zeros((3, 2)), "X")
        3
        >>> check_array([1.0, 2.0], "X")
        Traceback (most recent call last):
        daskdl.errors.DataError: X must be a numpy array, a torch tensor or a \
dask.array, got a list; convert it with numpy.asarray(X)
    """
    check_kind(value, argument)
    if value.ndim == 0:
        raise DataError(
            f"{argument} must have examples along its first axis, got 0 dimensions"
        )
    check_dtype(value, argument)
    if is_dask_array(value):
        _check_chunks(value, argument)
    if 0 in value.shape:
        raise DataError(
            f"{argument} must not be empty, got the shape {tuple(value.shape)}"
        )
    return value.shape[0] if is_dask_array(value) else len(value)


def check_structure(X: Tree, y: Tree) -> None:
    """Refuse trees without any array.

    Raises:
        DataError: Naming the argument.

    Example:
        >>> check_structure({}, None)
        Traceback (most recent call last):
        daskdl.errors.DataError: X must not be empty, got no array at all
    """
    for name, tree in (("X", X), ("y", y)):
        if not batching.leaves(tree):
            raise DataError(f"{name} must not be empty, got no array at all")


def as_numpy(value: np.ndarray | Tensor) -> np.ndarray:
    """Return the same numbers as a plain numpy array in native byte order.

    Numpy has no bfloat16 (nor float8): such tensors become float32, which holds
    every one of their values exactly.

    Args:
        value: An array or a tensor on any device; read only.

    Returns:
        A view of ``value`` where its memory can be used as it is, else a copy.

    Example:
        >>> as_numpy(torch.tensor([0.1], dtype=torch.bfloat16)).dtype
        dtype('float32')
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dtype not in _NUMPY_FLOATS:
            value = value.float()
        return value.numpy(force=True)
    plain = np.asarray(value)
    return plain.astype(plain.dtype.newbyteorder("="), copy=False)


def first_rows(value: Any, count: int) -> np.ndarray:
    """Return ``count`` rows of the right shape and dtype without computing anything.

    In memory these are the first rows, repeated if there are fewer. Of a
    ``dask.array`` they are zeros: its first block may take hours to load.

    Example:
        >>> first_rows(np.array([7, 8, 9]), 2)
        array([7, 8])
        >>> first_rows(np.array([7]), 2)
        array([7, 7])
    """
    if is_dask_array(value):
        return np.zeros((count, *value.shape[1:]), value.dtype)
    rows = as_numpy(value[:count])
    return rows[np.arange(count) % len(rows)]


def check_kind(value: Any, argument: str) -> None:
    """Refuse what is no array.

    Raises:
        DataError: Naming its type, and how to convert it.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{argument} is a masked array, whose mask would be ignored; "
            f"fill it with {argument}.filled(...)"
        )
    if isinstance(value, np.ndarray | Tensor) or is_dask_array(value):
        return
    raise DataError(
        f"{argument} must be a numpy array, a torch tensor or a dask.array, got "
        f"{_shown_type(value)}; {remedies.of_kind(value, argument)}"
    )


def _shown_type(value: Any) -> str:
    if value is None:
        return "None"
    name = _type_name(value)
    return f"an {name}" if name[0] in "aeio" else f"a {name}"


def _type_name(value: Any) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"


def check_dtype(value: Any, argument: str) -> None:
    """Refuse an array whose values are no real numbers.

    Raises:
        DataError: Naming the dtype, and how to convert it.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise DataError(
                f"{argument} must be a dense tensor, got layout {value.layout} and "
                f"dtype {value.dtype}; convert it with to_dense() or dequantize()"
            )
        usable = not value.dtype.is_complex
    else:
        usable = (
            value.dtype.kind in _NUMBER_KINDS
            and value.dtype.itemsize <= _LARGEST_ITEM_BYTES
        )
    if not usable:
        raise DataError(
            f"{argument} must hold real numbers of at most 64 bits, got dtype "
            f"{value.dtype}; {remedies.of_dtype(value, argument)}"
        )


def _check_chunks(value: Any, argument: str) -> None:
    split = {axis: -1 for axis, n in enumerate(value.numblocks) if axis and n > 1}
    if split:
        raise DataError(
            f"{argument} must be chunked along its first axis only, got the blocks "
            f"{value.numblocks}; use {argument}.rechunk({split})"
        )
    if type(value._meta) is not np.ndarray:  # a masked array is an ndarray too
        raise DataError(
            f"{argument} must be made of numpy blocks, got {_type_name(value._meta)}; "
            f"convert them with {argument}.map_blocks(...)"
        )
