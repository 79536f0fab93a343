"""The parts of a checkpoint: plain values with tensors among them, a file or two each.

One part is common to all replicas, the others are of one replica each, and each is
written by another process. So a checkpoint is whole when the common part is there,
which names the replicas, and the part of each of these with the same stamp.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daskdl.data.stores.store import Store
from daskdl.errors import SaveError
from daskdl.saving.folder import Folder
from daskdl.saving.index import Kind
from daskdl.saving.plain import Plain
from daskdl.saving.tensors import laid_out
from daskdl.version import VERSION

COMMON = "common"
FORM, FORMAT = "daskdl checkpoint", 1


class Stamp(NamedTuple):
    """What belongs together has the same."""

    origin: str  # the fit that began it all, however often it was resumed
    run: str  # the one that wrote it
    number: int  # in its folder


def of_replica(replica: int) -> str:
    """The name of a replica's part.

    Example:
        >>> of_replica(3)
        'replica-3'
    """
    return f"replica-{replica}"


class Copy(NamedTuple):
    """What is to be written, with memory of its own."""

    content: dict[str, Any]  # JSON
    tensors: Tensor | None  # laid out as in their file; None: there are none


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        store: The folder of the checkpoint.
        name: `COMMON`, or what `of_replica` says.
    """

    store: Store
    name: str

    @property
    def index(self) -> str:
        """The name of the file that is written last."""
        return f"{self.name}.json"

    def copied(
        self,
        stamp: Stamp,
        said: Mapping[str, Any],
        state: Mapping[str, Any],
        used: Copy | None = None,
    ) -> Copy:
        """Copy what is to be written.

        Args:
            stamp: Of the checkpoint.
            said: Plain values that `said` reads without the rest.
            state: Plain values and tensors, by other names.
            used: Another one, which is written: its memory may be used again.

        Raises:
            OptionError: Naming what cannot be written without code.
        """
        plain = Plain()
        content = {
            "stamp": list(stamp),
            "said": plain.encode(dict(said), "said"),
            "state": plain.encode(dict(state), "state"),
        }
        if not plain.tensors:
            return Copy(content, None)
        memory = None if used is None else used.tensors
        return Copy(content, laid_out(plain.tensors, memory))

    def write(self, copy: Copy) -> None:
        """Write it; it is there at once.

        Raises:
            SaveError: If nothing can be written there.
        """
        made_by = {"daskdl": VERSION, "torch": torch.__version__}
        files = {} if copy.tensors is None else {self.name: copy.tensors}
        self._folder.write_files(copy.content, files, made_by)

    def said(self) -> tuple[Stamp, dict[str, Any]]:
        """Read what is known without its tensors.

        Raises:
            SaveError: If it is not there, damaged, or too new.
        """
        with self._named():
            content = self._folder.content()
        return self._stamp(content), self._mapping(content, "said", {})

    def read(self) -> tuple[Stamp, dict[str, Any]]:
        """Read all that it was written with, what it says and its state together.

        Raises:
            SaveError: If it is not there, damaged, or too new.
        """
        with self._named():
            content, tensors = self._folder.read()
        stamp, own = self._stamp(content), dict(tensors.get(self.name, {}))
        said = self._mapping(content, "said", {})
        return stamp, {**said, **self._mapping(content, "state", own)}

    @property
    def _folder(self) -> Folder:
        return Folder(self.store, Kind(FORM, FORMAT, self.index, (self.name,)))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors say which of the parts in the folder it is."""
        try:
            yield
        except SaveError as error:
            raise SaveError(f"{self.index}: {error}") from error

    def _stamp(self, content: Any) -> Stamp:
        stamp = content.get("stamp") if isinstance(content, dict) else None
        match stamp:
            case [str(), str(), int()]:
                return Stamp(*stamp)
        raise SaveError(f"{self.store.url_of(self.index)} is damaged: {stamp!r:.80}")

    def _mapping(
        self, content: Any, name: str, tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        try:
            found = Plain(tensors=tensors).decode(content.get(name))
        except SaveError as error:
            where = self.store.url_of(self.index)
            raise SaveError(f"{where} is damaged: {error}") from error
        if not isinstance(found, dict):
            where = self.store.url_of(self.index)
            raise SaveError(f"{where} is damaged: its {name} is {found!r:.80}")
        return found
