"""Files in shards, read by their relative paths as if they were loose."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from typing_extensions import override

from daskdl.data.shards.archives import Member
from daskdl.data.shards.folder import Folder
from daskdl.data.shards.index import Index, Shard
from daskdl.data.stores.store import Store
from daskdl.errors import DataError


@dataclass(frozen=True)
class ShardedFiles(Folder):
    """The files in the shards of a folder, each checked when it is read.

    Attributes:
        store: The folder.
        index: What is in it.
    """

    store: Store
    index: Index

    @override
    def names(self, folder: str = "") -> list[str]:
        inside = f"{folder}/" if folder else ""
        return sorted(name for name in self._places if name.startswith(inside))

    @override
    def folders(self, folder: str = "") -> list[str]:
        start = len(folder) + 1 if folder else 0
        inner = [name[start:].partition("/") for name in self.names(folder)]
        return sorted({first for first, slash, _ in inner if slash})

    @override
    def exists(self, name: str) -> bool:
        return name in self._places

    @override
    def read(self, name: str) -> bytes:
        return next(self.read_all([name]))

    @override
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        for number, together in groupby(names, self._shard_of):
            shard = self.index.shards[number]
            members = [self._places[name][1] for name in together]
            yield from self._contents(shard, members)

    def read_shard(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Read all files of one shard, with their relative paths.

        Raises:
            DataError: If the shard cannot be read, or is damaged.
        """
        shard = self.index.shards[number]
        names = [member.name for member in shard.members]
        return zip(names, self._contents(shard, shard.members), strict=True)

    @override
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        """Files of the same shard are together, in its order, however many."""
        wanted = set(names)
        found = [
            [member.name for member in shard.members if member.name in wanted]
            for shard in self.index.shards
        ]
        return [group for group in found if group]

    @override
    def url_of(self, name: str) -> str:
        if name not in self._places:
            return self.store.url_of(name)
        return self._inner_url(self.index.shards[self._shard_of(name)], name)

    @cached_property
    def _places(self) -> dict[str, tuple[int, Member]]:
        return {
            member.name: (number, member)
            for number, shard in enumerate(self.index.shards)
            for member in shard.members
        }

    def _shard_of(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            raise DataError(f"cannot read {name}: no shard at {self.store.url} has it")
        return place[0]

    def _contents(self, shard: Shard, members: Sequence[Member]) -> Iterator[bytes]:
        """One request for all: what is between them is seldom much."""
        start = min(member.start for member in members)
        stop = max(member.start + member.size for member in members)
        read = memoryview(self._range(shard, start, stop))
        for member in members:
            first = member.start - start
            content = bytes(read[first : first + member.size])
            if len(content) != member.size or zlib.crc32(content) != member.crc32:
                raise DataError(
                    f"cannot read {self._inner_url(shard, member.name)}: it is damaged "
                    "(its CRC-32 is not that in the index); pack the files again"
                )
            yield content

    def _range(self, shard: Shard, start: int, stop: int) -> bytes:
        # Object stores refuse a range without bytes: of files which are all empty.
        return self.store.read(shard.name, start, stop) if stop > start else b""

    def _inner_url(self, shard: Shard, name: str) -> str:
        return f"{self.index.archive}://{name}::{self.store.url_of(shard.name)}"
