"""How one file becomes rows: the seam for new formats, and for a user's own function.

Who gets what is fixed, whatever a function's arguments are called: a plain function
gets the local path, or the URL of what is not local; one in :class:`FromBytes` the
bytes; a :class:`Format` the bytes and the URL.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fsspec.core import strip_protocol
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.formats.results import reading, row_of, rows_of
from daskdl.data.source import Facts, facts_of
from daskdl.data.stores.store import Store
from daskdl.errors import OptionError


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
