"""One file of predictions: what came out for one part of the data."""

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from daskdl.data.stores.store import Store
from daskdl.errors import DataError


@dataclass(frozen=True)
class PartFile:
    """What is known of one file.

    Attributes:
        name: Below the folder.
        rows: How many are in it; there may be none.
        size_bytes: Of the file.
        crc32: Checksum of its bytes: finds damage, not forgery.
    """

    name: str
    rows: int
    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, content: bytes, rows: int, part: int, suffix: str) -> "PartFile":
        """The file of some bytes, of a name that no other bytes have.

        Two workers may have made the same part, if one was believed to be dead.
        """
        crc32 = zlib.crc32(content)
        name = f"part-{part:06d}-{crc32:08x}.{suffix}"
        return cls(name, rows, len(content), crc32)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PartFile":
        """Read what `to_json` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        numbers = (int(content[key]) for key in ("rows", "size_bytes", "crc32"))
        file = cls(str(content["name"]), *numbers)
        if file.rows < 0 or not file.name or "/" in file.name:
            raise ValueError(f"there cannot be a {file}")
        return file

    def to_json(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def is_there(self, store: Store) -> bool:
        """Whether there is a file of this size; files are written at once."""
        return store.exists(self.name) and store.size(self.name) == self.size_bytes

    def read(self, store: Store) -> bytes:
        """The bytes that were written.

        Raises:
            DataError: If they are not there, or are others; names its URL.
        """
        content = store.read(self.name)
        if len(content) != self.size_bytes or zlib.crc32(content) != self.crc32:
            raise DataError(
                f"{store.url_of(self.name)} is damaged: it has {len(content)} bytes "
                f"with the checksum {zlib.crc32(content):08x}, {self.size_bytes} with "
                f"{self.crc32:08x} were written; predict to another URL"
            )
        return content
