"""A save: files of tensors in a folder, and an index that makes them one.

The index is written last, and at once. Who reads before that sees what was there
before; only after it are the files deleted that no index names any more. So there is
always a whole save, the old one or the new one, whenever a writer dies.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from daskdl.data.stores.listing import is_path
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError, OptionError, SaveError
from daskdl.saving import tensors
from daskdl.saving.index import (
    DIGITS,
    MOST_BYTES,
    SUFFIX,
    File,
    Kind,
    decode_index,
    encode_index,
    file_of,
)

READS = 3  # of a save in whose place others are put meanwhile


class Saved(NamedTuple):
    """What is in a save."""

    content: Any  # JSON
    tensors: Mapping[str, Mapping[str, Tensor]]  # by role and name


@dataclass(frozen=True)
class Folder:
    """Where a save is, or is to be; one process at a time may write there.

    Attributes:
        store: The folder.
        kind: Of what is saved.
    """

    store: Store
    kind: Kind

    @classmethod
    def at(cls, url: Any, kind: Kind) -> "Folder":
        """The folder at a URL or a path.

        Raises:
            OptionError: If it is neither.
        """
        if not is_path(url):
            raise OptionError(f"url must be a URL or a path of a folder, got {url!r}")
        return cls(store_of(url), kind)

    def write(
        self,
        content: Any,
        contents: Mapping[str, Mapping[str, Tensor]],
        made_by: Mapping[str, str],
    ) -> None:
        """Save; in place of what was there before, if there was something.

        Args:
            content: JSON.
            contents: Tensors by role and name; roles without tensors get no file.
            made_by: Versions of the libraries.

        Raises:
            OptionError: Naming a tensor that cannot be written.
            SaveError: If nothing can be written there.
        """
        with self._named("write"):
            filled = {role: own for role, own in contents.items() if own}
            files = {role: tensors.laid_out(own) for role, own in filled.items()}
        self.write_files(content, files, made_by)

    def write_files(
        self, content: Any, contents: Mapping[str, Tensor], made_by: Mapping[str, str]
    ) -> None:
        """Save what is laid out already.

        Args:
            content: JSON.
            contents: By role, see `tensors.laid_out`.
            made_by: Versions of the libraries.

        Raises:
            SaveError: If nothing can be written there.
        """
        with self._named("write"):
            files = {role: self._put(role, own) for role, own in contents.items()}
            index = encode_index(self.kind, made_by, files, content)
            self.store.write(self.kind.index, index)
            self.store.delete(self._stale(files))

    def read(self) -> Saved:
        """Load what is there.

        Raises:
            SaveError: If there is nothing, or it is damaged, of something else, or too
                new.
        """
        with self._named("read"):
            index = self._index()
            for _ in range(READS - 1):
                try:
                    return self._contents(index)
                except (SaveError, DataError):
                    before, index = index, self._index()
                    if index == before:  # else somebody has saved here meanwhile
                        raise
            return self._contents(index)

    def content(self) -> Any:
        """Read the JSON alone; of its files nothing is looked at.

        Raises:
            SaveError: As `read`.
        """
        with self._named("read"):
            return decode_index(self.kind, self._index())[1]

    def _put(self, role: str, own: Tensor) -> File:
        content = tensors.view(own)
        file = file_of(role, content)
        self.store.write(file.name, content)
        return file

    def _stale(self, files: Mapping[str, File]) -> list[str]:
        """Files of older saves, and of those that were broken off."""
        roles = "|".join(self.kind.roles)
        form = re.compile(rf"({roles})-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
        named = {file.name for file in files.values()}
        return [
            name
            for name in self.store.names("*")
            if form.fullmatch(name) and name not in named
        ]

    def _index(self) -> bytes:
        size = self.store.size(self.kind.index)
        if size > MOST_BYTES:
            raise SaveError(f"its {self.kind.index} has {size} bytes")
        return self.store.read(self.kind.index)

    def _contents(self, index: bytes) -> Saved:
        files, content = decode_index(self.kind, index)
        return Saved(content, {role: self._got(file) for role, file in files.items()})

    def _got(self, file: File) -> Mapping[str, Tensor]:
        size = self.store.size(file.name)
        if size != file.nbytes:
            raise SaveError(f"{file.name} has {size} bytes instead of {file.nbytes}")
        content = self.store.read(file.name)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise SaveError(f"{file.name} is damaged: its checksum is wrong")
        try:
            return tensors.from_bytes(content)
        except SaveError as error:
            raise SaveError(f"{file.name} cannot be read: {error}") from error

    @contextmanager
    def _named(self, verb: str) -> Iterator[None]:
        """Errors from here get the URL, and those of the store become ours."""
        try:
            yield
        except (SaveError, DataError) as error:
            raise SaveError(f"cannot {verb} {self.store.url}: {error}") from error
