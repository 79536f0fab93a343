"""Moving files away: copied first, deleted where they were only when that is done."""

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import fsspec

from daskdl.data.checking.files import OfFiles
from daskdl.data.checking.report import Moved
from daskdl.data.source import Source
from daskdl.data.stores.store import Store, store_of
from daskdl.data.stores.urls import common_folder, parted
from daskdl.errors import DataError, OptionError


@dataclass(frozen=True)
class Quarantine:
    """A folder that files are moved to, by their paths below a root.

    Attributes:
        store: The folder.
        root: The deepest folder that has all files of a source.
    """

    store: Store
    root: Store

    @classmethod
    def of(
        cls, url: str | os.PathLike[str], source: Source, options: Mapping[str, Any]
    ) -> Self:
        """Check that files of a source can be moved to a folder.

        Args:
            url: Of the folder; it need not be there.
            source: Whose files they are.
            options: Of the file systems of both.

        Raises:
            OptionError: If the source is not made of files, or has some in there.
        """
        if not isinstance(source, OfFiles):
            raise OptionError(
                "quarantine is for data that are files, which can be moved; got "
                f"{type(source).__name__}"
            )
        urls = [u for part in range(source.parts) for u in source.file_urls(part)]
        store = Store(store_of(url).url, options)
        inside = posixpath.join(store.place, "")
        folders = {parted(url).folder for url in urls if not _is_packed(url)}
        for one in folders:
            if posixpath.join(Store(one, options).place, "").startswith(inside):
                raise OptionError(
                    f"quarantine must be outside of the data, got {store.url}, "
                    f"which has {one}"
                )
        root = common_folder(folders) if folders else store.url
        return cls(store, Store(root, options))

    def take(
        self, source: Source, part: int, files: Mapping[int, Sequence[int]]
    ) -> list[Moved]:
        """Move some files of a part; it may be done twice.

        Args:
            source: Made of files.
            part: Its number.
            files: Which of its files, for each part.

        Returns:
            What became of each.
        """
        assert isinstance(source, OfFiles)
        urls = source.file_urls(part)
        return [self._move(urls[file]) for file in files[part]]

    def _move(self, url: str) -> Moved:
        if _is_packed(url):
            return Moved(url, None, "it is packed with others")
        options = self.root.options
        root = _path(self.root.url, options)
        name = _path(url, options).removeprefix(root).lstrip("/")
        to = self.store.url_of(name)
        try:
            if not self.root.exists(name) and self.store.exists(name):
                return Moved(url, to)  # by a task that was lost after it
            content = self.root.read(name)
            if self.store.exists(name):
                reason = self._reason_against(url, name, content)
                if reason:
                    return Moved(url, None, reason)
            else:
                self.store.write(name, content)
            self.root.delete([name])
        except DataError as error:
            return Moved(url, None, str(error))
        return Moved(url, to)

    def _reason_against(self, url: str, name: str, content: bytes) -> str:
        """Why a file may not take the place of one that is there; "": it may."""
        to = self.store.url_of(name)
        if self.store.is_local and self.root.is_local:
            paths = (_path(url, self.root.options), _path(to, self.store.options))
            if os.path.samefile(*paths):  # over a link
                return f"{to} is the same file"
        return "" if self.store.read(name) == content else f"{to} is another file"


def _is_packed(url: str) -> bool:
    return "::" in url


def _path(url: str, options: Mapping[str, Any]) -> str:
    _, path = fsspec.core.url_to_fs(url, **options)
    return str(path)
