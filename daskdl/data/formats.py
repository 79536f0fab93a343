"""What came out of one file: checked, and named by the file where it is wrong.

How one file becomes rows: the seam for new formats, and for a user's own function.

Who gets what is fixed, whatever a function's arguments are called: a plain function
gets the local path, or the URL of what is not local; one in :class:`FromBytes` the
bytes; a :class:`Format` the bytes and the URL.

One array in each file, as ``numpy.save`` writes it.

Several arrays with names in each file, as ``numpy.savez`` writes them.

Several tensors with names in each file, in the safetensors format.
"""

import contextlib
import io
import json
import struct
import sys
import threading
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from fsspec.core import strip_protocol
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import SHOWN_ROWS, Facts, facts_of
from daskdl.data.storage import Store
from daskdl.data.tables import as_numpy, check_array
from daskdl.errors import DataError, OptionError

# What a damaged file makes readers raise; Pillow even a SyntaxError. All else is a
# mistake in a program, and comes out as it is.
_DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    SyntaxError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)

# Python 3.11 counts how deep its parser is for all threads together, and raises a
# SystemError if two parse at a time, as numpy does with the header of each array.
one_parses: contextlib.AbstractContextManager[Any] = (
    threading.Lock() if sys.version_info < (3, 12) else contextlib.nullcontext()
)


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Name a file in what is raised because of its content.

    Args:
        url: Of the file.

    Raises:
        DataError: Instead of what a damaged file makes readers raise.

    Example:
        >>> with reading("memory://x/a.npy"):
        ...     int("7b")
        Traceback (most recent call last):
        daskdl.errors.DataError: cannot read memory://x/a.npy: ValueError: invalid \
literal for int() with base 10: '7b'
    """
    try:
        yield
    except OptionError:  # a ValueError too, and its message says all
        raise
    except _DAMAGED as error:
        shown = f"{type(error).__name__}: {error}"
        raise DataError(f"cannot read {url}: {shown}") from error


def rows_of(result: Any, url: str) -> Rows:
    """Take over what a reader returned.

    Args:
        result: A tuple of two is (x, y); anything else is x alone. Both are arrays or
            tensors with rows along the first axis, or trees of them; y may be None.
        url: Of the file, for messages.

    Returns:
        Trees of numpy arrays of the same length, which may be 0.

    Raises:
        DataError: If it is anything else, or if lengths differ.

    Example:
        >>> rows_of((np.zeros((2, 3)), np.array([0, 1])), "a.npz")[1]
        array([0, 1])
    """
    x, y = _pair(result)
    leaves = [*_named("x", x, url), *(() if y is None else _named("y", y, url))]
    lengths = {name: _checked(leaf, f"{name} of {url}") for name, leaf in leaves}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise DataError(f"all arrays of {url} must have as many rows, but {shown}")
    return batching.mapped(as_numpy, x), None if y is None else batching.mapped(
        as_numpy, y
    )


def row_of(result: Any, url: str) -> Rows:
    """The same for one example: all arrays get a first axis, and y may be a number.

    Example:
        >>> row_of((np.zeros(3), 7), "a.png")
        (array([[0., 0., 0.]]), array([7]))
    """
    x, y = _pair(result)
    return rows_of((_as_row(x), None if y is None else _as_row(y)), url)


def header_facts(rows: int, x: Tree, y: Tree) -> Facts:
    """What is known when only the header of a file was read.

    Args:
        rows: How many the file has.
        x: Arrays of any length; their shapes of a row and their dtypes count.
        y: Also; or None.

    Example:
        >>> header_facts(9, np.empty((0, 2)), None).first[0].shape
        (2, 2)
    """
    shown = min(rows, SHOWN_ROWS)

    def zeros(leaf: np.ndarray) -> np.ndarray:
        return np.zeros((shown, *leaf.shape[1:]), leaf.dtype)

    labels = None if y is None else batching.mapped(zeros, y)
    return Facts(rows, (batching.mapped(zeros, x), labels))


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    return result, None


def _named(argument: str, tree: Tree, url: str) -> list[tuple[str, Any]]:
    found = list(batching.named(tree, argument))
    if not found:
        raise DataError(f"{argument} of {url} must not be empty, got {tree!r}")
    return found


def _checked(leaf: Any, name: str) -> int:
    """Its length. No rows are fine: collections in files have such parts."""
    if isinstance(leaf, np.ndarray | Tensor) and leaf.ndim and len(leaf) == 0:
        return 0
    return len(leaf) if check_array(leaf, name) else 0


def _as_row(tree: Tree) -> Tree:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | np.generic):
            leaf = np.asarray(leaf)
        # What is no array is refused when it is checked.
        return leaf[None] if isinstance(leaf, np.ndarray | Tensor) else leaf

    return batching.mapped(one, tree)


class Loader(ABC):
    """Makes rows of one file; a value that travels to the workers.

    Attributes:
        single: Whether each file is one example.
        classes: Names of the labels 0, 1, ... where there are names; else None.
    """

    single: bool = False
    classes: Sequence[str] | None = None

    @abstractmethod
    def load(self, store: Store, name: str) -> Rows:
        """Read a file.

        Args:
            store: The folder it is in.
            name: Of the file in it.

        Returns:
            Trees of numpy arrays of equal length; y is None without labels.

        Raises:
            DataError: Naming its URL if it cannot be read, or is not as expected.
        """

    def look(self, store: Store, name: str) -> Facts:
        """Learn how many rows a file has; cheaper than `load` where that can be."""
        return facts_of(self.load(store, name))


class Format(Loader):
    """A loader that needs nothing but the bytes of the file."""

    @abstractmethod
    def __call__(self, content: bytes, name: str) -> Rows:
        """Make rows of the bytes.

        Args:
            content: Of the whole file.
            name: Its URL, for messages.

        Returns:
            As `load`.

        Raises:
            DataError: Naming the file.
        """

    @override
    def load(self, store: Store, name: str) -> Rows:
        url = store.url_of(name)
        content = store.read(name)
        with reading(url):
            return self(content, url)


class _Function(Loader):
    """A loader that calls a function of the user's."""

    @abstractmethod
    def result(self, store: Store, name: str) -> Any:
        """What the function returns."""

    @override
    def load(self, store: Store, name: str) -> Rows:
        return rows_of(self.result(store, name), store.url_of(name))


@dataclass(frozen=True)
class FromPath(_Function):
    """A function of the local path, or of the URL of what is not local.

    Attributes:
        function: ``load(path) -> (x, y)``, or x alone: arrays or tensors with rows
            first, or tuples and dicts of them.
    """

    function: Callable[[str], Any]

    @override
    def result(self, store: Store, name: str) -> Any:
        url = store.url_of(name)
        with reading(url):
            return self.function(str(strip_protocol(url)) if store.is_local else url)


@dataclass(frozen=True)
class FromBytes(_Function):
    """A function of the bytes of the file, wherever it is.

    Attributes:
        function: ``load(content) -> (x, y)``, or x alone: arrays or tensors with rows
            first, or tuples and dicts of them.

    Example:
        >>> import numpy as np
        >>> store = Store("memory://daskdl-bytes")
        >>> store.write("a.bin", b"ab")
        >>> FromBytes(lambda content: np.frombuffer(content, "u1")).load(store, "a.bin")
        (array([97, 98], dtype=uint8), None)
    """

    function: Callable[[bytes], Any]

    @override
    def result(self, store: Store, name: str) -> Any:
        content = store.read(name)
        with reading(store.url_of(name)):
            return self.function(content)


@dataclass(frozen=True)
class OneExample(Loader):
    """A function that makes one example of each file, as of an image.

    Attributes:
        function: A function of the path, or one in `FromBytes`; the arrays it returns
            are without rows, and y may be a number.
        classes: Names of the labels 0, 1, ... where there are names; else None.

    Raises:
        OptionError: If it is neither.

    Example:
        >>> import numpy as np
        >>> store = Store("memory://daskdl-one")
        >>> store.write("a.bin", b"ab")
        >>> load = FromBytes(lambda content: (np.frombuffer(content, "u1"), 7))
        >>> OneExample(load).load(store, "a.bin")
        (array([[97, 98]], dtype=uint8), array([7]))
    """

    function: Callable[[str], Any] | FromPath | FromBytes
    classes: Sequence[str] | None = None
    single = True

    def __post_init__(self) -> None:
        if not isinstance(loader_of(self.function), _Function):
            raise OptionError(
                "OneExample needs a function of a path, or one in FromBytes, got "
                f"{self.function!r}"
            )

    @override
    def load(self, store: Store, name: str) -> Rows:
        function = cast("_Function", loader_of(self.function))
        return row_of(function.result(store, name), store.url_of(name))


def loader_of(given: Any) -> Loader:
    """The loader that a user means: one of ours, or a function of a path.

    Raises:
        OptionError: If it is neither.

    Example:
        >>> loader_of(len)
        FromPath(function=<built-in function len>)
        >>> loader_of(FromBytes)
        Traceback (most recent call last):
        daskdl.errors.OptionError: loader must be an object, got the class FromBytes; \
write FromBytes(...)
    """
    if isinstance(given, Loader):
        return given
    if isinstance(given, type) and issubclass(given, Loader):
        name = given.__name__
        raise OptionError(
            f"loader must be an object, got the class {name}; write {name}(...)"
        )
    if not callable(given):
        raise OptionError(
            "loader must be a function load(path) -> (x, y), or one of Csv, Npy, Npz, "
            f"Parquet, Safetensors, FromBytes and OneExample, got {given!r}"
        )
    return FromPath(given)


# More than the header of any array of numbers: those are of 128 bytes, unless there
# are very many axes.
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Npy(Format):
    """The array of an ``.npy`` file is x; a column of it may be y.

    Attributes:
        label_column: The index of the column of a table, from 0 or from the end as -1,
            that is y and not in x. Its dtype stays: classes must be whole numbers.
            None: there are no labels.
    """

    label_column: int | None = None

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        with reading(name), one_parses:
            array = np.load(io.BytesIO(content), allow_pickle=False)
            return rows_of(self._split(array, name), name)

    @override
    def look(self, store: Store, name: str) -> Facts:
        url = store.url_of(name)
        with reading(url), one_parses:
            empty, rows = _header(store.read(name, 0, _HEADER_BYTES))
            x, y = rows_of(self._split(empty, url), url)
        return header_facts(rows, x, y)

    def _split(
        self, array: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        column = self.label_column
        if column is None:
            return array, None
        if array.ndim != 2 or not -array.shape[1] <= column < array.shape[1]:
            raise DataError(
                f"{name} must be a table with the column {column} for "
                f"Npy(label_column={column}), got the shape {array.shape}"
            )
        return np.delete(array, column, axis=1), array[:, column]


def _header(beginning: bytes) -> tuple[np.ndarray, int]:
    """An array without rows, else like that of the file, and how many rows that has."""
    file = io.BytesIO(beginning)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:  # 3.0 differs in the names of fields only, which arrays of numbers have not
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if not shape:
        return np.empty((), dtype), 1
    return np.empty((0, *shape[1:]), dtype), shape[0]


@dataclass(frozen=True)
class Npz(Format):
    """The arrays of an ``.npz`` file that have these names.

    Attributes:
        x: A name; or a tuple or dict of names for several inputs.
        y: Also; None: there are no labels.
    """

    x: Tree = "x"
    y: Tree = "y"

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        with reading(name), one_parses:
            loaded = np.load(io.BytesIO(content), allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise DataError(f"{name} must be an .npz file, got one array; use Npy")
            with loaded as arrays:
                return named_rows(self.x, self.y, arrays, name)


def named_rows(x: Tree, y: Tree, arrays: Mapping[str, Any], url: str) -> Rows:
    """The rows of a file that has arrays with names.

    Args:
        x: Names, as a tree.
        y: Likewise; None: there are no labels.
        arrays: What the file has.
        url: Of the file.

    Raises:
        DataError: If a name is not there, or what it has cannot be used.

    Example:
        >>> named_rows("a", None, {"a": np.zeros(2)}, "x.npz")
        (array([0., 0.]), None)
    """
    check_names((x, y), arrays, url)
    return rows_of((picked(x, arrays), picked(y, arrays)), url)


def check_names(wanted: tuple[Tree, Tree], there: Collection[str], url: str) -> None:
    """Refuse names of arrays that a file has not.

    Args:
        wanted: Names for x and for y, as trees; y may be None.
        there: What the file has.
        url: Of the file.

    Raises:
        DataError: With the name and those that are there.
    """
    missing = [name for name in wanted_names(wanted) if name not in there]
    if missing:
        raise DataError(
            f"{url} must have an array named {missing[0]!r}, but has "
            f"{sorted(there)}; name them with x=... and y=..., y=None without labels"
        )


def wanted_names(wanted: tuple[Tree, Tree]) -> list[str]:
    """All names of x and y; y may be None.

    Example:
        >>> wanted_names((("a", "b"), None))
        ['a', 'b']
    """
    return list(batching.named_both(wanted).values())


def picked(names: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Arrays in the places of their names; None stays.

    Example:
        >>> picked({"image": "a", "size": "b"}, {"a": 1, "b": 2})
        {'image': 1, 'size': 2}
    """
    if names is None:
        return None
    return batching.mapped(lambda name: arrays[name], names)


_LENGTH_BYTES = 8  # the file begins with the length of its header
_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
# What `as_numpy` makes of the tensors; others are learnt by loading them.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BF16": "float32",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}


@dataclass(frozen=True)
class Safetensors(Format):
    """The tensors of a safetensors file that have these names.

    Attributes:
        x: A name; or a tuple or dict of names for several inputs.
        y: Also; None: there are no labels.
    """

    x: Tree = "x"
    y: Tree = "y"

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise DataError(f"cannot read {name}: {error}") from error
        return named_rows(self.x, self.y, tensors, name)

    @override
    def look(self, store: Store, name: str) -> Facts:
        url = store.url_of(name)
        with reading(url):
            header = _header_safetensors(store, name)
        check_names((self.x, self.y), header, url)
        entries = [header[key] for key in wanted_names((self.x, self.y))]
        usable = all(e["dtype"] in _DTYPES and e["shape"] for e in entries)
        if not usable or len({e["shape"][0] for e in entries}) != 1:
            return super().look(store, name)  # which says what is wrong, if it is
        empty = {key: _without_rows(header[key]) for key in header}
        x, y = picked(self.x, empty), picked(self.y, empty)
        return header_facts(entries[0]["shape"][0], x, y)


def _without_rows(entry: dict[str, Any]) -> np.ndarray:
    return np.empty((0, *entry["shape"][1:]), _DTYPES.get(entry["dtype"]))


def _header_safetensors(store: Store, name: str) -> dict[str, Any]:
    """What the file says of each of its tensors."""
    length = int.from_bytes(store.read(name, 0, _LENGTH_BYTES), "little")
    if length > _LARGEST_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    content = store.read(name, _LENGTH_BYTES, _LENGTH_BYTES + length)
    header: dict[str, Any] = json.loads(content)
    header.pop("__metadata__", None)
    return header
