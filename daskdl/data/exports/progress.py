"""An export that has not been finished: what has been done, on disk beside the files.

In the folder ``.unfinished``: what the export is made from, the rows dealt out of each
part, and a record for each part and bucket that is done, written after its files. So
who runs the export again goes on where it stopped, and what was half done is done
again, into files of the same names.

Whoever ends an export deletes ``origin.json`` first. A task that outlives its export,
because its client was interrupted, looks for it after each file, and takes the file
away again: nothing comes back after the clean-up.
"""

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskdl.data.exports import manifest
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

FOLDER = ".unfinished"
_READ_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Progress:
    """The state of the export to a store; any process may look and add to it.

    Attributes:
        store: Where to.
        what: It is, for messages.
        folder: In the store, of this state.
    """

    store: Store
    what: str = "export"
    folder: str = FOLDER

    def begin(self, origin: Mapping[str, Any]) -> None:
        """Say what the export is made from."""
        self.store.write(self._origin, json.dumps(origin).encode())

    def origin(self) -> dict[str, Any] | None:
        """What the export is made from; None: there is no unfinished one."""
        if not self.store.exists(self._origin):
            return None
        return _parsed(self.store, self._origin)

    def done(self, kind: str) -> dict[int, dict[str, Any]]:
        """The records of this kind, by number."""
        names = self.store.names(f"{self.folder}/{kind}-*.json")
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            records = pool.map(partial(_parsed, self.store), names)
            numbers = (name.rpartition("-")[2].removesuffix(".json") for name in names)
            return dict(zip(map(int, numbers), records, strict=True))

    def add(self, kind: str, number: int, record: Mapping[str, Any]) -> None:
        """Say that something is done; all its files must be there."""
        name = f"{self.folder}/{kind}-{number:06d}.json"
        self.write(name, json.dumps(record).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the folder ``.unfinished``.

        Raises:
            DataError: If the export has been given up meanwhile.
        """
        self.check()
        self.store.write(name, content)
        if not self.store.exists(self._origin):
            self.store.delete([name])
            self.check()

    def keep(self, name: str) -> None:
        """Take a batch file that was just written away again, if it came too late.

        Raises:
            DataError: If the export has been given up meanwhile.
        """
        # Of a finished export, this is one that another task has written as well.
        if not self.store.exists(self._origin) and not self.store.exists(manifest.NAME):
            self.store.delete([name])
            self.check()

    @property
    def _origin(self) -> str:
        return f"{self.folder}/origin.json"

    def check(self) -> None:
        """Refuse to go on with an export that is not there.

        Raises:
            DataError: If it was given up, or is not seen from this machine.
        """
        if not self.store.exists(self._origin):
            raise DataError(
                f"there is no unfinished {self.what} in {self.store.url} on "
                f"{socket.gethostname()}: either it was given up, or the URL is not "
                "the same place on all machines; use an object store or a network "
                "folder"
            )

    def end(self) -> None:
        """Delete all that is only needed until the export is finished."""
        self.store.delete([self._origin])
        self.store.delete(self.store.names(f"{self.folder}/*"))


def _parsed(store: Store, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(store.read(name))
    except ValueError as error:
        raise DataError(
            f"{store.url_of(name)} is damaged: {error}; export with overwrite=True"
        ) from error
    return content
