"""Columns of pandas and pyarrow as arrays of numbers, or a refusal by name.

One partition, or a whole frame in memory. The same rules hold for the empty frame that
a ``dask.dataframe`` has as ``_meta``, so columns are refused before anything is
computed. What one column may be is decided in :mod:`daskdl.data.frames.kinds`.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from daskdl.data.arrays import as_numpy
from daskdl.data.frames.kinds import Kind, Place, few, kind_of, plain, refusal
from daskdl.errors import DataError, OptionError

SHOWN_COLUMNS = 5  # in a message

_ARROW = ("Table", "RecordBatch", "ChunkedArray", "Array")


def is_frame(value: Any) -> bool:
    """Whether it has columns that can be used here; imports neither library.

    That is a ``pandas.DataFrame`` or ``Series``, a ``pyarrow.Table``, ``RecordBatch``,
    ``Array`` or ``ChunkedArray``.

    Example:
        >>> is_frame([1, 2])
        False
    """
    pandas, arrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series):
        return True
    return arrow is not None and isinstance(
        value, tuple(getattr(arrow, name) for name in _ARROW)
    )


def check_columns(
    frame: Any, argument: str, label: bool = False
) -> tuple[str, ...] | None:
    """Refuse columns that are not numbers; no value is looked at.

    Args:
        frame: See `is_frame`; it may have no rows.
        argument: Its name in the user's call, for the message.
        label: Whether it holds labels: a single column may then be categorical with
            names, which become 0, 1, ... in the order of the categories.

    Returns:
        Those names; None if there are none.

    Raises:
        DataError: Naming each column that cannot be used, and the remedy.

    Example:
        >>> import pandas
        >>> check_columns(pandas.DataFrame({"a": [1.5], "b": ["x"]}), "X")
        Traceback (most recent call last):
        daskdl.errors.DataError: column 'b' of X holds strings (str); encode them as \
numbers, for example with X['b'].astype('category').cat.codes
        >>> check_columns(pandas.Series(["b", "a"], dtype="category"), "y", label=True)
        ('a', 'b')
    """
    frame = _as_pandas(frame)
    if frame.ndim == 2 and not len(frame.columns):
        raise DataError(f"{argument} must have columns, got a frame without any")
    label = label and frame.ndim == 1
    refused = [
        refusal(column.dtype, place, label)
        for place, column in _columns(frame, argument)
    ]
    wrong = [reason for reason in refused if reason is not None]
    if wrong:
        more = len(wrong) - SHOWN_COLUMNS
        shown = "; ".join(wrong[:SHOWN_COLUMNS])
        raise DataError(f"{shown}; and {more} more columns" if more > 0 else shown)
    if label and kind_of(frame.dtype) is Kind.NAMES:
        return tuple(str(name) for name in frame.dtype.categories)
    return None


def columns_of(
    frame: Any,
    argument: str,
    classes: Sequence[str] | None = None,
    label: bool = False,
) -> np.ndarray:
    """Turn a frame into an array; what holds one column only has one axis.

    Columns of several dtypes take the one that numpy finds for them together: float32
    alone stays, integers with floats become floats, and so do booleans.

    Args:
        frame: See `is_frame`.
        argument: Its name in the user's call, for the message.
        classes: What `check_columns` found in the labels: names become their numbers.
        label: Whether it holds labels: missing ones are then NaN, and not refused.

    Returns:
        Numbers of shape (rows, columns), or (rows,) of a series; to be read only.

    Raises:
        DataError: Naming a column that has missing values, NaN among them, or that
            cannot be used (see `check_columns`), or whose categories are others.

    Example:
        >>> import pandas
        >>> columns_of(pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}), "X")
        array([[1. , 0.5],
               [2. , 1.5]])
    """
    frame = _as_pandas(frame)
    found = check_columns(frame, argument, label=classes is not None)
    if found != (None if classes is None else tuple(classes)):
        raise DataError(
            f"{argument} has the categories {few(found)} in one part and "
            f"{few(classes)} in another; give all parts the same ones, with "
            "categorize() or a pandas.CategoricalDtype"
        )
    arrays = [
        _labels(column) if label else _numbers(column, place)
        for place, column in _columns(frame, argument)
    ]
    if frame.ndim == 1:
        return arrays[0]
    dtype = np.result_type(*(array.dtype for array in arrays))
    whole = np.empty((len(frame), len(arrays)), dtype)
    for i, array in enumerate(arrays):
        whole[:, i] = array
    return whole


def _as_pandas(frame: Any) -> Any:
    """Columns of pyarrow as pandas would keep them in pyarrow; pandas as it is."""
    if not type(frame).__module__.startswith("pyarrow"):
        return frame
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        raise OptionError(
            "pyarrow's tables need pandas too; pip install daskdl[dataframe]"
        ) from error

    def kept(dtype: Any) -> Any:
        if pyarrow.types.is_dictionary(dtype):
            return None  # which makes it categorical
        return pandas.ArrowDtype(dtype)

    if isinstance(frame, pyarrow.Table | pyarrow.RecordBatch):
        return frame.to_pandas(types_mapper=kept, ignore_metadata=True)
    return frame.to_pandas(types_mapper=kept)


def _columns(frame: Any, argument: str) -> Iterator[tuple[Place, Any]]:
    """Each with its place: names need not be unique."""
    if frame.ndim == 1:
        yield Place(argument, argument), frame
        return
    for i, name in enumerate(frame.columns):
        place = Place(f"column {name!r} of {argument}", f"{argument}[{name!r}]")
        yield place, frame.iloc[:, i]


def _labels(column: Any) -> np.ndarray:
    """Where some are missing, as floats, with NaN in their places."""
    gaps = column.isna().to_numpy()
    if not gaps.any():
        return _whole(column)
    if kind_of(column.dtype) is Kind.NAMES:
        return np.where(gaps, np.nan, column.cat.codes.to_numpy())
    numbers = column.astype("float64") if _is_categorical(column) else column
    dtype = np.dtype(plain(numbers.dtype))
    floats = dtype if dtype.kind == "f" else np.dtype(np.float64)
    return as_numpy(numbers.to_numpy(dtype=floats, na_value=np.nan))


def _whole(column: Any) -> np.ndarray:
    """A column without missing values."""
    if kind_of(column.dtype) is Kind.NAMES:
        return as_numpy(column.cat.codes.to_numpy())
    if _is_categorical(column):
        column = column.astype(column.dtype.categories.dtype)
    # The dtype is said because pandas before 2.2 would make objects of some.
    return as_numpy(column.to_numpy(dtype=plain(column.dtype)))


def _is_categorical(column: Any) -> bool:
    return hasattr(column.dtype, "categories")


def _numbers(column: Any, place: Place) -> np.ndarray:
    missing = int(column.isna().sum())
    if not missing:
        numbers = _whole(column)
        if numbers.dtype.kind != "f":
            return numbers
        missing = int(np.isnan(numbers).sum())  # which pyarrow tells from a null
    if missing:
        raise DataError(
            f"{place.words} has {missing} missing values; fill them in or drop the rows"
        )
    return numbers
