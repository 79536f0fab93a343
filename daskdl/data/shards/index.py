"""What is in the shards of a folder: a file that is written when all of them are there.

Its JSON:

========= ==================================================================
field     meaning
========= ==================================================================
format    "daskdl-shards"
version   1
archive   "zip" or "tar"
plan      what was to be packed, as a digest
shards    a list; of each shard its `name`, its `size` in bytes and `members`
members   a list of [relative path, first byte, size in bytes, CRC-32]
========= ==================================================================
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from daskdl.data.shards.archives import ARCHIVES, Member
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

INDEX = "index.json"
FORMAT = "daskdl-shards"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One archive.

    Attributes:
        name: Relative to the index.
        size: In bytes.
        members: The files in it.
    """

    name: str
    size: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Index:
    """The shards of a folder.

    Attributes:
        archive: "zip" or "tar".
        plan: A digest of what was to be packed, and how.
        shards: In order.
    """

    archive: str
    plan: str
    shards: tuple[Shard, ...]

    @property
    def files(self) -> int:
        """How many files are in all shards."""
        return sum(len(shard.members) for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    def write(self, store: Store) -> None:
        """Write it beside the shards, at once.

        Raises:
            DataError: If it cannot be written.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        store.write(INDEX, json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def found(cls, store: Store) -> Self | None:
        """Read the index of a folder; None if it has none, or another kind of file.

        Raises:
            DataError: If this version cannot read it.
        """
        if not store.exists(INDEX):
            return None
        return cls.read(store) if FORMAT.encode() in store.read(INDEX) else None

    @classmethod
    def read(cls, store: Store) -> Self:
        """Read the index of a folder.

        Raises:
            DataError: If there is none, or if it is not one that this version reads.
        """
        url, content = store.url_of(INDEX), store.read(INDEX)
        try:
            found = json.loads(content)
            _check_kind(found, url)
            return cls(found["archive"], found["plan"], _shards(found["shards"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"cannot read {url}: not an index of shards ({error})"
            ) from error


def _check_kind(found: Any, url: str) -> None:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(
            f"cannot read {url}: not an index of shards; "
            "daskdl.data.file_batches writes one"
        )
    if found["version"] != VERSION or found["archive"] not in ARCHIVES:
        raise DataError(
            f"cannot read {url}: version {found['version']!r} of {found['archive']!r} "
            f"shards; this daskdl reads version {VERSION} of {' and '.join(ARCHIVES)}"
        )


def _shards(found: Any) -> tuple[Shard, ...]:
    return tuple(
        Shard(shard["name"], shard["size"], tuple(Member(*m) for m in shard["members"]))
        for shard in found
    )
