"""Files by their relative paths, wherever they are: loose in a folder here.

Packed ones are in :mod:`daskdl.data.shards.sharded_files`. Nothing is decoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from typing_extensions import override

from daskdl.data.stores.store import Store

# Requests to an object store mostly wait; more than this many fill no link faster.
READERS = 8


class Folder(ABC):
    """Files which are read by their paths, relative to a root. It pickles."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Relative paths, sorted; only those inside a folder if one is given."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders that are directly in the root or in a folder of it."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file.

        Raises:
            DataError: If it is not there, or cannot be read.
        """

    @abstractmethod
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Read some files that :meth:`groups` has put together, in order.

        Raises:
            DataError: If one is not there, or cannot be read.
        """

    @abstractmethod
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        """Put files together that are best read together.

        Args:
            names: Of the files.
            at_most: How many files a group may have, where that is open.
        """

    @abstractmethod
    def url_of(self, name: str) -> str:
        """The full URL of a file or folder, for messages and for fsspec."""


@dataclass(frozen=True)
class LooseFiles(Folder):
    """The files in a folder.

    Attributes:
        store: The folder.
    """

    store: Store

    @override
    def names(self, folder: str = "") -> list[str]:
        return self.store.names(f"{folder}/**" if folder else "**")

    @override
    def folders(self, folder: str = "") -> list[str]:
        return Store(self.store.url_of(folder), self.store.options).folders()

    @override
    def exists(self, name: str) -> bool:
        return self.store.exists(name)

    @override
    def read(self, name: str) -> bytes:
        return self.store.read(name)

    @override
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        if self.store.is_local:
            yield from map(self.read, names)
            return
        with ThreadPoolExecutor(min(READERS, len(names))) as pool:
            yield from pool.map(self.read, names)

    @override
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        return [list(names[i : i + at_most]) for i in range(0, len(names), at_most)]

    @override
    def url_of(self, name: str) -> str:
        return self.store.url_of(name)
