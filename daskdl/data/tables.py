"""Arrays and tables in memory: checks, and conversion to numpy arrays.

This module does not import dask.array, pandas and pyarrow at the top: their objects
exist only if other code has imported these libraries.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree, Weighted
from daskdl.data.named_columns import (
    NO_COLUMNS,
    SHOWN_NAMES,
    Columns,
    NamedRows,
    few,
    is_pyarrow,
    names_of,
)
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.errors import DataError, OptionError

TEXT = "convert text to numbers first, for example with a tokenizer"

_ROW_EACH = "give an array with one row for each example"
_CONVERTED = "convert it with numpy.asarray({X})"


def _is(*kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _has(name: str) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, name)


# Remedies by kind of object; the first match applies.
_REMEDIES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda x: _is_of(x, "distributed", "Client"), "pass it as client="),
    (
        lambda x: _is_of(x, "dask.delayed", "Delayed") or is_future(x),
        "Delayed objects and futures hold pairs (x, y): give them as X",
    ),
    (_is(type), _ROW_EACH),
    (_has("to_dask_array"), "convert it with {X}.to_dask_array(lengths=True)"),
    (_has("to_numpy"), "convert it with {X}.to_numpy()"),
    (_has("toarray"), "make it dense with {X}.toarray()"),
    (_is(int, float, complex, np.generic, type(None)), _ROW_EACH),
    (_is(str, PathLike), f"pass paths and URLs of files as X, without y; {TEXT}"),
    (_is(bytes, bytearray), "read it with numpy.frombuffer({X}, dtype=...)"),
    (
        _is(Dataset, DataLoader),
        "a dataset has inputs and labels together: give it as X, without y",
    ),
    (_is(list), _CONVERTED),
    (_has("__array__"), _CONVERTED),
    (_is(memoryview, range), _CONVERTED),
    (
        _is(Iterable),
        "stack them, numpy.stack(list({X})), or stream them with daskdl.data.Stream or "
        "a torch IterableDataset",
    ),
    (callable, "give what it returns"),
)


def _remedy_for_dtype(array: Any, argument: str) -> str:
    """How to convert the values of an array to real numbers."""
    remedy = "convert it, for example with {X}.astype(numpy.float32)"
    item = None
    if isinstance(array, np.ndarray) and array.dtype.kind == "O" and array.size:
        item = array.flat[0]
    if isinstance(array, Tensor):
        remedy = "convert it, for example with {X}.to(torch.float32)"
    elif array.dtype.kind in "UST" or isinstance(item, str | bytes):
        if not argument.startswith("y"):
            remedy = "encode them as numbers"
        elif not is_dask_array(array):
            remedy = "number the classes, numpy.unique({X}, return_inverse=True)[1]"
            if " of " in argument:  # of a part, which may lack some classes
                remedy = "number the classes, alike in all parts"
        else:
            remedy = (
                "number the classes, {X}.map_blocks(lambda block: "
                "numpy.searchsorted(names, block), dtype='int64') with sorted names"
            )
    elif isinstance(item, np.ndarray | Tensor | list | tuple):
        remedy = "pad its arrays to one shape, then numpy.stack({X})"
    return remedy.replace("{X}", _variable(argument))


def _variable(argument: str) -> str:
    """The name in the user's code: "X['a']" of "X['a'] of part 3"."""
    return argument.partition(" of ")[0]


# Dtypes that torch.from_numpy accepts; longdouble is the exception.
_NUMBER_KINDS = "biuf"
_MAX_ITEM_BYTES = 8
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def _is_of(value: Any, module: str, kind: str) -> bool:
    """Whether a value is of a class, without importing the module of the class."""
    imported = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, kind))


def is_dask_array(value: Any) -> bool:
    """Whether a value is a ``dask.array``."""
    return _is_of(value, "dask.array", "Array")


def is_future(value: Any) -> bool:
    """Whether a value is a future of a Dask client."""
    return _is_of(value, "distributed", "Future")


def is_data_array(value: Any) -> bool:
    """Whether a value is an ``xarray.DataArray``."""
    return _is_of(value, "xarray", "DataArray")


def plain_array(value: Any) -> Any:
    """Return the array in an ``xarray.DataArray``; return other values unchanged."""
    return value.data if is_data_array(value) else value


def check_array(value: Any, argument: str) -> float:
    """Accept only a non-empty array of examples, named as in the user's call.

    Returns:
        Length of the first axis, > 0; NaN if unknown to Dask.

    Example:
        >>> check_array([1.0, 2.0], "X")
        Traceback (most recent call last):
        daskdl.errors.DataError: X must be a numpy array, a torch tensor or a \
dask.array, got a list; convert it with numpy.asarray(X)
    """
    check_values(value, argument)
    if is_dask_array(value):
        _check_chunks(value, argument)
    if 0 in value.shape:
        raise DataError(
            f"{argument} must not be empty, got the shape {tuple(value.shape)}"
        )
    return value.shape[0] if is_dask_array(value) else len(value)


def check_structure(X: Tree, y: Tree) -> None:
    """Refuse trees without arrays."""
    for name, tree in (("X", X), ("y", y)):
        if not batching.leaves(tree):
            raise DataError(f"{name} must not be empty, got no array at all")


def check_arrays(X: Tree, y: Tree) -> int:
    """Refuse unusable arrays and unequal lengths; return the number of examples."""
    check_structure(X, y)
    named = batching.leaves_by_name((X, y))
    lengths = {name: int(check_array(leaf, name)) for name, leaf in named.items()}
    check_lengths(lengths)
    return next(iter(lengths.values()))


def check_lengths(lengths: Mapping[str, int]) -> None:
    """Raise a DataError if the named arguments have different lengths."""
    if len(set(lengths.values())) > 1:
        got = " and ".join(map(str, lengths.values()))
        raise DataError(f"{' and '.join(lengths)} must have the same length, got {got}")


def as_numpy(value: np.ndarray | Tensor) -> np.ndarray:
    """Return the same numbers as a plain numpy array in native byte order.

    Tensors of bfloat16 and float8, which numpy lacks, become float32, which represents
    each of their values exactly. The result is a view of the same memory if possible,
    otherwise a copy.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dtype not in _NUMPY_FLOATS:
            value = value.float()
        return value.numpy(force=True)
    plain = np.asarray(value)
    return plain.astype(plain.dtype.newbyteorder("="), copy=False)


def check_values(value: Any, argument: str) -> None:
    """Accept only arrays of real numbers with at least one axis; they may be empty."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{argument} is a masked array, whose mask would be ignored; "
            f"fill it with {argument}.filled(...)"
        )
    if not (isinstance(value, np.ndarray | Tensor) or is_dask_array(value)):
        name = "None" if value is None else with_article(_type_name(value))
        matches = (remedy for applies, remedy in _REMEDIES if applies(value))
        remedy = next(matches, _ROW_EACH)
        raise DataError(
            f"{argument} must be a numpy array, a torch tensor or a dask.array, got "
            f"{name}; {remedy.replace('{X}', _variable(argument))}"
        )
    if value.ndim == 0:
        raise DataError(
            f"{argument} must have examples along its first axis, got 0 dimensions"
        )
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
            and value.dtype.itemsize <= _MAX_ITEM_BYTES
        )
    if not usable:
        raise DataError(
            f"{argument} must hold real numbers of at most 64 bits, got dtype "
            f"{value.dtype}; {_remedy_for_dtype(value, argument)}"
        )


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def _type_name(value: Any) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"


def _check_chunks(value: Any, argument: str) -> None:
    split = {axis: -1 for axis, n in enumerate(value.numblocks) if axis and n > 1}
    if split:
        raise DataError(
            f"{argument} must be chunked along its first axis only, got the blocks "
            f"{value.numblocks}; use {argument}.rechunk({split})"
        )
    # Dask has no public name for the type of the blocks. A masked array is an ndarray.
    if type(value._meta) is not np.ndarray:
        raise DataError(
            f"{argument} must consist of numpy blocks, got {_type_name(value._meta)}; "
            f"convert them with {argument}.map_blocks(...)"
        )


# Enough parts for several replicas, and few enough that each is worth a message. The
# order of rows must not depend on the number of replicas, so neither does this number.
PARTS = 64
PART_BYTES = 32 * 2**20  # approximate maximum, so that no part takes long to send


def checked_weights(weight: Any, rows: int | None, where: str = "") -> np.ndarray:
    """Return the weights of rows as float64.

    Args:
        weight: Array, tensor, series or list.
        rows: Number of rows; None: unknown.
        where: The part of the rows, whose weights may all be zero; empty: these are all
            rows.

    Raises:
        DataError: If there is not one finite number >= 0 for each row.
    """
    weights = np.zeros(())
    if getattr(weight, "ndim", 1) == 1:  # without computing what is wrong anyway
        with contextlib.suppress(TypeError, ValueError):
            weights = np.asarray(weight, dtype=np.float64)
    if weights.ndim != 1 or rows not in (None, len(weights)):
        shape = getattr(weight, "shape", None) or type(weight).__name__
        each = "each row" if rows is None else f"each of {rows} rows"
        raise DataError(
            f"sample_weight{where} must have one number for {each}, got {shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong) or not (where or weights.any()):
        at = wrong[0] if len(wrong) else 0
        raise DataError(
            f"sample_weight{where} must be finite numbers >= 0, not all zero, got "
            f"sample_weight[{at}] = {weights[at]}"
        )
    return weights


class InMemory(Source):
    """Rows in memory; the rows of a part are copied when it is loaded or sent.

    Args:
        x: Tree of numpy arrays and torch tensors of equal length.
        y: The same, or None.
        batch_size: Rows per step, >= 1; a part is a whole number of steps.
        shuffle_seed: Seed of the random assignment of rows to parts, so that the data
            may be sorted by label; None: in order.
        columns: Column names of the arrays that were tables.
        classes: Names of the labels 0, 1, ..., or None.
    """

    lengths: Sequence[int]
    first_rows: Rows
    rows_in_memory: Rows
    in_memory = True
    sent_by_part = True
    has_part_names = False

    def __init__(
        self,
        x: Tree,
        y: Tree,
        batch_size: int,
        shuffle_seed: int | None = None,
        columns: Columns = NO_COLUMNS,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.columns = columns
        self.classes = classes
        self._batch_size = batch_size
        self._order: np.ndarray | None = None
        if shuffle_seed is not None:
            rows = batching.length(x)
            self._order = np.random.default_rng(shuffle_seed).permutation(rows)
        self._set(batching.tree_map(as_numpy, (x, y)))

    def _set(self, rows: Rows) -> None:
        self.rows_in_memory = rows
        self.first_rows = batching.rows(rows, slice(SHOWN_ROWS))
        self._cut(PARTS)

    def _cut(self, parts: int) -> None:
        rows = batching.length(self.rows_in_memory)
        most = max(parts, -(-batching.nbytes(self.rows_in_memory) // PART_BYTES))
        self._bounds = cut(rows, self._batch_size, most)
        self.parts = len(self._bounds)
        self.lengths = [stop - start for start, stop in self._bounds]

    @override
    def in_parts(self, parts: int) -> Self:
        source = copy.copy(self)
        source._cut(parts)
        return source

    @override
    def in_one_part(self) -> Self:
        source = copy.copy(self)
        rows = batching.length(self.rows_in_memory)
        source.parts, source.lengths = 1, [rows]
        source._order, source._bounds = None, [(0, rows)]
        return source

    @override
    def weighted(self, weight: Any) -> Self:
        x, labels = self.rows_in_memory
        if labels is None:
            return super().weighted(weight)
        weights = checked_weights(weight, batching.length(x))
        source = copy.copy(self)
        source._set((x, Weighted(labels, weights)))
        return source

    @override
    def _arrange_(
        self, known: Columns, columns: Columns, classes: Sequence[str] | None
    ) -> None:
        x, y = NamedRows.of(self.rows_in_memory, known).arranged(columns)
        self.rows_in_memory = x, y

    @override
    def load(self, part: int) -> Rows:
        rows = slice(*self._bounds[part])
        if self._order is not None:
            return batching.rows(self.rows_in_memory, self._order[rows])
        # Contiguous, because Dask pickles other arrays.
        return batching.tree_map(
            lambda leaf: np.ascontiguousarray(leaf[rows]), self.rows_in_memory
        )


def cut(examples: int, batch_size: int, parts: int) -> list[tuple[int, int]]:
    """Return bounds of at most ``parts`` parts, each a whole number of batches.

    No part is empty; only the last one may end with a smaller batch.

    Example:
        >>> cut(10, batch_size=2, parts=2)
        [(0, 4), (4, 10)]
    """
    batches = -(-examples // batch_size)
    count = min(batches, parts)
    edges = [batches * i // count * batch_size for i in range(count)]
    return list(zip(edges, [*edges[1:], examples], strict=True))


# ---- columns of pandas and pyarrow

_UNKNOWN = "__UNKNOWN_CATEGORIES__"  # Dask's placeholder for unknown categories


def _is_table(value: Any) -> bool:
    """Whether a value is a pandas dataframe or series, or a pyarrow table or array."""
    pandas, pyarrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series):
        return True
    return pyarrow is not None and isinstance(
        value,
        pyarrow.Table | pyarrow.RecordBatch | pyarrow.ChunkedArray | pyarrow.Array,
    )


def array_of(
    value: Any, argument: str, classes: Sequence[str] | None = None, label: bool = False
) -> Any:
    """Convert a frame, see `columns_of`, or a DataArray; return other values as is."""
    if _is_table(value):
        return columns_of(value, argument, classes, label)
    return plain_array(value)


def label_classes(y: Any, argument: str) -> tuple[str, ...] | None:
    """Return the categories of categorical labels; None for other labels."""
    return check_columns(y, argument, label=True) if _is_table(y) else None


def check_no_tables(examples: Iterable[Tree]) -> None:
    """Refuse examples that are tables, whose names would be lost."""
    if any(
        _is_table(leaf) for example in examples for leaf in batching.leaves(example)
    ):
        raise DataError(
            "an example must consist of arrays and numbers, got a table or a series, "
            "whose names would be lost: give row[names].to_numpy(), with the same "
            "names for all examples, or tables of many rows in a list of Delayed"
        )


def row_count(value: Any) -> int | None:
    """Return the number of rows of an array, a table or a list.

    NaN if it is unknown to Dask; None for other values.
    """
    value = plain_array(value)
    if isinstance(value, np.ndarray | Tensor) or is_dask_array(value):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, list) or _is_table(value) else None


def take(value: Any, rows: np.ndarray) -> Any:
    """Return some rows of an array, a table or a list, as the same type."""
    if isinstance(value, list):
        return [value[i] for i in rows]
    if _is_table(value):
        return value.iloc[rows] if hasattr(value, "iloc") else value.take(rows)
    return value[rows]


def check_columns(
    frame: Any, argument: str, label: bool = False
) -> tuple[str, ...] | None:
    """Refuse columns that are not numbers, by their dtypes alone.

    Args:
        frame: A frame of pandas or pyarrow, or the empty ``_meta`` of a
            ``dask.dataframe``.
        argument: Name of the frame in the user's call.
        label: Whether the frame holds labels; a single column may then be categorical.

    Returns:
        The categories of categorical labels, which become 0, 1, ...; otherwise None.
    """
    frame = _as_pandas(frame)
    if frame.ndim == 2 and not len(frame.columns):
        raise DataError(f"{argument} must have columns, got a frame without any")
    label = label and frame.ndim == 1
    wrong = [
        reason
        for words, code, column in _columns(frame, argument)
        if (reason := _refusal(column.dtype, words, code, label)) is not None
    ]
    if wrong:
        message = "; ".join(wrong[:SHOWN_NAMES])
        if len(wrong) > SHOWN_NAMES:
            message = f"{message}; and {len(wrong) - SHOWN_NAMES} more columns"
        raise DataError(message)
    if label and _is_categorical(frame.dtype) and not _are_numbers(frame.dtype):
        return tuple(map(str, frame.dtype.categories))
    return None


def _is_categorical(dtype: Any) -> bool:
    return hasattr(dtype, "categories")


def _are_numbers(dtype: Any) -> bool:
    """Whether a column holds real numbers of at most 64 bits, or categories of such."""
    if _is_categorical(dtype):
        return _UNKNOWN not in dtype.categories and _are_numbers(dtype.categories.dtype)
    real = dtype.kind in _NUMBER_KINDS
    return real and np.dtype(_numpy_dtype(dtype)).itemsize <= _MAX_ITEM_BYTES


def _numpy_dtype(dtype: Any) -> Any:
    """The numpy dtype of the numbers in a column of pandas."""
    return getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype))


def _refusal(dtype: Any, words: str, code: str, label: bool) -> str | None:
    """The reason why a column cannot be used, with a remedy; None if it can."""
    from pandas.api import types

    if _are_numbers(dtype):
        return None
    if _is_categorical(dtype):
        if _UNKNOWN in dtype.categories:
            return (
                f"{words} is categorical with categories that are not known yet; "
                f"use {code}.cat.as_known(), which computes them"
            )
        if label:
            return None
        return (
            f"{words} is categorical with the categories {few(dtype.categories)}; "
            f"encode it as numbers, with {_codes(code)}"
        )
    held = "other values"
    remedy = (
        "convert them to real numbers of at most 64 bits, for example with "
        f"{code}.astype('float32')"
    )
    encode = f"encode them as numbers, with {_codes(code)}"
    if label and " of " in words:  # of a part, which may lack some classes
        encode = f"make them categories, the same in all parts: {_shared(code)}"
    elif label:  # of a dask.dataframe; labels in memory are numbered
        encode = f"make them categories, with {code}.astype('category').cat.as_known()"
    if dtype.type is str:
        held, remedy = "strings", encode
    elif types.is_object_dtype(dtype):  # in pandas 2, strings too
        held, remedy = "objects", f"if they are strings, {encode}; otherwise {remedy}"
    elif types.is_datetime64_any_dtype(dtype) or str(dtype).startswith("period"):
        held = "dates"
        remedy = (
            "turn them into numbers, for example with "
            f"({code} - {code}.min()).dt.total_seconds()"
        )
    elif dtype.kind == "m":
        held = "durations"
        remedy = f"turn them into numbers with {code}.dt.total_seconds()"
    return f"{words} holds {held} ({dtype}); {remedy}"


def _shared(code: str) -> str:
    return f"{code}.astype(pandas.CategoricalDtype([...]))"


def _codes(code: str) -> str:
    # Categories that follow from the values of a part or a call give other codes.
    return f"{_shared(code)}.cat.codes and the same categories for all data"


def split_label(value: Any, label: Any) -> tuple[Any, Any]:
    """Separate the inputs of a table or a dict from the column or key of the labels.

    Example:
        >>> split_label({"age": [31], "price": [7.5]}, "price")
        ({'age': [31]}, [7.5])
    """
    names = list(value) if isinstance(value, Mapping) else names_of(value)
    if names is None:
        raise DataError(
            f"label={label!r} names a column of a table or a key of dicts, got a "
            f"{_type_name(value)}; give the labels as y"
        )
    inputs = [name for name in names if name != label]
    if not inputs or len(inputs) == len(names):
        problem = "is the only column" if label in names else "is not a column"
        raise DataError(f"label={label!r} {problem} of X, which has {few(names)}")
    if isinstance(value, Mapping):
        return {name: value[name] for name in inputs}, value[label]
    if is_pyarrow(value):
        return value.select(inputs), value.column(label)
    return value[inputs], value[label]


def number_labels(
    y: Any, argument: str, classes: Sequence[str] | None = None
) -> tuple[Any, Sequence[str] | None]:
    """Replace labels that are text by class numbers.

    Args:
        y: Labels of any kind; only arrays and columns of text change.
        argument: Name of the labels in the user's call.
        classes: Names of the classes 0, 1, ...; None: the distinct labels, sorted.

    Returns:
        Class numbers, int64, and the names; or `y` and None.

    Example:
        >>> number_labels(np.array(["dog", "cat", "dog"]), "y")
        (array([1, 0, 1]), ('cat', 'dog'))
    """
    texts = _texts(y, argument)
    if texts is None:
        return y, None
    distinct, indices = np.unique(texts, return_inverse=True)
    names = tuple(map(str, distinct))
    if classes is None:
        return indices, names
    number = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in names if name not in number]
    if unknown:
        raise DataError(
            f"{argument} has labels that are none of the classes, {few(classes)}: "
            f"{few(unknown)}; leave such rows out, or train a new Trainer on them"
        )
    return np.array([number[name] for name in names])[indices], tuple(classes)


def _texts(y: Any, argument: str) -> np.ndarray | None:
    """Labels as an array of str; None if they are not text."""
    y = plain_array(y)
    if _is_table(y):
        y = _as_pandas(y)
        if y.ndim > 1 or not (y.dtype == object or y.dtype.type is str):
            return None
        if y.isna().any():
            raise DataError(
                f"{argument} has {int(y.isna().sum())} missing labels; drop the rows"
            )
        y = y.to_numpy(dtype=object)
    if not isinstance(y, np.ndarray):
        return None
    if y.dtype.kind == "S":
        return np.char.decode(y, "utf-8")
    has_objects = y.dtype.kind == "O" and y.size > 0
    if y.dtype.kind in "UT" or (
        has_objects and all(isinstance(t, str) for t in y.flat)
    ):
        return np.array(y.tolist(), str)
    return None


def check_classes(
    categories: Sequence[str] | None, classes: Sequence[str], argument: str
) -> None:
    """Refuse labels whose categories differ from those of earlier parts."""
    if categories is None or list(categories) != list(classes):
        raise DataError(
            f"{argument} has the categories {few(categories)}, and the labels before "
            f"it {few(classes)}; give all parts one dtype, with "
            f"{_shared(_variable(argument))}"
        )


def columns_of(
    frame: Any, argument: str, classes: Sequence[str] | None = None, label: bool = False
) -> np.ndarray:
    """Convert a frame to an array; a series or a single array has one axis.

    Several dtypes are promoted by numpy's rules: integers and booleans with floats
    become floats.

    Args:
        frame: A frame or series of pandas, or a table or array of pyarrow.
        argument: Name of the frame in the user's call.
        classes: Result of `check_columns`; categories become class numbers.
        label: Whether the frame holds labels; missing labels become NaN.

    Returns:
        Numbers of shape (rows, columns) or (rows,), read-only.
    """
    frame = _as_pandas(frame)
    categories = check_columns(frame, argument, label=classes is not None)
    if classes is not None:
        check_classes(categories, classes, argument)
    arrays = []
    for words, _, column in _columns(frame, argument):
        numbers = _numbers(column)
        if not label and numbers.dtype.kind == "f":
            missing = int(np.isnan(numbers).sum())
            if missing:
                raise DataError(
                    f"{words} has {missing} missing values; fill them in or drop the "
                    "rows"
                )
        arrays.append(numbers)
    if frame.ndim == 1:
        return arrays[0]
    return np.ascontiguousarray(np.column_stack(arrays))


def _numbers(column: Any) -> np.ndarray:
    """The numbers of a column; floats with NaN if some are missing."""
    missing = column.isna().to_numpy()
    if _is_categorical(column.dtype):
        if not _are_numbers(column.dtype):
            codes = column.cat.codes.to_numpy()
            return np.where(missing, np.nan, codes) if missing.any() else codes
        column = column.astype(
            "float64" if missing.any() else column.dtype.categories.dtype
        )
    dtype = np.dtype(_numpy_dtype(column.dtype))
    if not missing.any():
        return as_numpy(column.to_numpy(dtype=dtype))
    if dtype.kind != "f":
        dtype = np.dtype(np.float64)
    return as_numpy(column.to_numpy(dtype=dtype, na_value=np.nan))


def _as_pandas(frame: Any) -> Any:
    """Convert tables of pyarrow to pandas with pyarrow dtypes; keep other frames."""
    if not type(frame).__module__.startswith("pyarrow"):
        return frame
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        raise OptionError(
            "pyarrow's tables need pandas too; pip install 'daskdl[dataframe]'"
        ) from error

    def pandas_dtype(dtype: Any) -> Any:
        if pyarrow.types.is_dictionary(dtype):
            return None  # becomes categorical
        return pandas.ArrowDtype(dtype)

    is_table = isinstance(frame, pyarrow.Table | pyarrow.RecordBatch)
    options = {"ignore_metadata": True} if is_table else {}
    return frame.to_pandas(types_mapper=pandas_dtype, **options)


def _columns(frame: Any, argument: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the description, code and values of each column; names may repeat."""
    if frame.ndim == 1:
        yield argument, _variable(argument), frame
        return
    for i, name in enumerate(frame.columns):
        code = f"{_variable(argument)}[{name!r}]"
        yield f"column {name!r} of {argument}", code, frame.iloc[:, i]
