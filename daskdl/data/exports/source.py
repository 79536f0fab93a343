"""Batch files as data to train on; a part is a file."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.exports import manifest
from daskdl.data.exports.manifest import Manifest
from daskdl.data.exports.progress import Progress
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError


class BatchFiles(Source):
    """What ``daskdl.data.export`` has written.

    Args:
        url: The folder.
        storage_options: For fsspec, such as credentials.

    Attributes:
        store: The folder.
        manifest: What is in it.

    Raises:
        DataError: If the export has not been finished, or there is none, or its
            manifest cannot be used.
    """

    store: Store
    manifest: Manifest

    given = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = Store(store_of(url).url, dict(storage_options or {}))
        _check_finished(self.store)
        self.manifest = Manifest.read(self.store)
        self.parts = len(self.manifest.files)
        self.lengths = [file.rows for file in self.manifest.files]
        schema = self.manifest.schema
        self.first = schema.rows(np.zeros(SHOWN_ROWS, schema.dtype))
        self.classes = self.manifest.classes

    @override
    def load(self, part: int) -> Rows:
        return self.manifest.files[part].read(self.store, self.manifest.schema)

    @override
    def name(self, part: int) -> str:
        return self.store.url_of(self.manifest.files[part].name)


def is_export(value: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether it is the URL or path of an export, finished or not.

    Args:
        value: Of any type.
        storage_options: For fsspec, such as credentials.

    Example:
        >>> is_export([1, 2]), is_export("memory://nothing-here")
        (False, False)
    """
    if not isinstance(value, str | os.PathLike):
        return False
    store = Store(store_of(value).url, dict(storage_options or {}))
    return store.exists(manifest.NAME) or Progress(store).origin() is not None


def _check_finished(store: Store) -> None:
    if store.exists(manifest.NAME):
        return
    if Progress(store).origin() is not None:
        raise DataError(
            f"the export to {store.url} has not been finished; run it again, and it "
            "goes on where it stopped"
        )
    raise DataError(
        f"there is no {manifest.NAME} in {store.url}; make batch files with "
        "daskdl.data.export"
    )
