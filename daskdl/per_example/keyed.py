"""Keys of examples, taken off the data before these are scored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from daskdl.data import batching
from daskdl.data.arrays import as_numpy, is_dask_array
from daskdl.data.collections import is_bag, is_dask_frame, is_lazy
from daskdl.data.frames.columns import is_frame
from daskdl.errors import DataError, OptionError
from daskdl.per_example.keys import Keys, Lazy, Listed


class Keyed(NamedTuple):
    """Data without their keys, and the keys."""

    X: Any
    keys: Keys | None


def keyed(X: Any, key: Any) -> Keyed:
    """Take the keys off some data.

    Args:
        X: The data.
        key: None; the name of a column of X; a sequence, or for a ``dask.array`` one,
            with a value per row. Of a bag, whether it has pairs (key, example): these
            stay in it.

    Raises:
        OptionError: If such a key does not go with such data.

    Example:
        >>> keyed(np.zeros((2, 3)), "id")
        Traceback (most recent call last):
        daskdl.errors.OptionError: key='id' must name a column of a table, and X is a \
ndarray; give one value for each row
    """
    if key is None:
        return Keyed(X, None)
    if isinstance(key, bool):
        _check_bag(X, key)
        return Keyed(X, None)
    if isinstance(key, str):
        return _of_column(X, key)
    if is_dask_array(key):
        return Keyed(X, Lazy(_cut_alike(X, key)))
    if is_lazy(X):
        raise OptionError(
            "key must be lazy where X is: the name of a column, a dask.array of one "
            f"axis, or True for a bag of pairs (key, example); got a {_kind(key)}"
        )
    return Keyed(X, Listed(_values(key)))


def apart(bag: Any) -> Keyed:
    """A bag of pairs (key, example) as a bag of examples, and the keys."""
    return Keyed(bag.map(_second), Lazy(bag.map(_first)))


def _check_bag(X: Any, key: bool) -> None:
    if not is_bag(X):
        raise OptionError(
            f"key={key} says whether a bag has pairs (key, example), and X is a "
            f"{_kind(X)}"
        )


def _of_column(X: Any, key: str) -> Keyed:
    pandas_frame = is_frame(X) and hasattr(X, "iloc")
    if not (is_dask_frame(X) or pandas_frame) or X.ndim != 2:
        raise OptionError(
            f"key={key!r} must name a column of a table, and X is a {_kind(X)}; give "
            "one value for each row"
        )
    if key not in X.columns:
        raise OptionError(
            f"key={key!r} must name a column of X, which has {list(X.columns)}"
        )
    column, others = X[key], X.drop(columns=[key])
    keys = Lazy(column) if is_dask_frame(X) else Listed(column.tolist(), key)
    return Keyed(others, keys)


def _cut_alike(X: Any, key: Any) -> Any:
    """A ``dask.array`` of keys in the blocks of the first array of X."""
    first = batching.leaves(X)[0] if isinstance(X, tuple | dict) else X
    if not is_dask_array(first) or key.ndim != 1:
        raise OptionError(
            "key must be a dask.array of one axis only where X is a dask.array, got "
            f"{key.ndim} axes for a {_kind(first)}"
        )
    if not np.isnan([*first.chunks[0], *key.chunks[0]]).any():
        if len(first) != len(key):
            raise DataError(
                f"key must have one value for each row, got {len(key)} for "
                f"{len(first)} rows"
            )
        return key.rechunk({0: first.chunks[0]})
    if key.numblocks[0] != first.numblocks[0]:
        raise DataError(
            "key must have the blocks of X where their lengths are not known, got "
            f"{key.numblocks[0]} for {first.numblocks[0]}"
        )
    return key


def _values(key: Any) -> Sequence[Any]:
    if isinstance(key, Tensor):
        key = as_numpy(key)
    if np.ndim(key) != 1 and not isinstance(key, list | tuple):
        raise OptionError(
            "key must be the name of a column, or have one value for each row along "
            f"one axis, got a {_kind(key)}"
        )
    values: Sequence[Any] = key.tolist() if hasattr(key, "tolist") else list(key)
    return values


def _first(pair: Any) -> Any:
    return pair[0]


def _second(pair: Any) -> Any:
    return pair[1]


def _kind(value: Any) -> str:
    return type(value).__name__
