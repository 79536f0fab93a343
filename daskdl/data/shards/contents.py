"""Files in memory that loaders read like those of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from daskdl.data.stores.store import Store
from daskdl.errors import DataError


@dataclass(frozen=True)
class Contents(Store):
    """The files of one archive.

    Attributes:
        archive: "zip" or "tar".
        files: Their contents by their paths in it.
    """

    archive: str = "zip"
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @override
    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> bytes:
        if name not in self.files:
            raise DataError(f"cannot read {self.url_of(name)}: there is no such file")
        return self.files[name][start:stop]

    @override
    def exists(self, name: str) -> bool:
        return name in self.files

    @override
    def size(self, name: str) -> int:
        return len(self.read(name))

    @override
    def url_of(self, name: str) -> str:
        """The URL by which fsspec finds it in the archive."""
        return f"{self.archive}://{name}::{self.url}"

    @property
    @override
    def is_local(self) -> bool:
        return False
