"""Predictions that have been written, to be read back."""

import os
from collections.abc import Mapping
from typing import Any

from dask.delayed import delayed
from typing_extensions import override

from daskdl.data.futures import new_key
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError
from daskdl.predictions import manifest
from daskdl.predictions.base import Format
from daskdl.predictions.manifest import Manifest
from daskdl.predictions.part_file import PartFile


class Predictions:
    """What `predict` has written to a URL, a file for each part of the data.

    Predictions for a ``dask.dataframe`` are Parquet files, which others can read too;
    all else are files of safetensors.

    Args:
        url: The folder that was given as ``output``.
        storage_options: For fsspec, such as credentials.

    Attributes:
        url: The folder.
        rows: In each part.

    Raises:
        DataError: If they have not been finished, or there are none, or the manifest
            cannot be used.

    Example:
        >>> import numpy, tempfile, torch
        >>> from daskdl import predict
        >>> X, url = numpy.ones((2, 3), numpy.float32), tempfile.mkdtemp()
        >>> written = predict(torch.nn.Identity(), X, False, output=url)
        >>> written.load().shape, Predictions(url).to_dask().shape
        ((2, 3), (2, 3))
    """

    url: str
    rows: tuple[int, ...]

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = Store(store_of(url).url, dict(storage_options or {}))
        self.url = self._store.url
        if not self._store.exists(manifest.NAME):
            raise DataError(
                f"there are no finished predictions in {self.url}; run predict again "
                "with this output, and it goes on where it stopped"
            )
        self._manifest = Manifest.read(self._store)
        self.rows = tuple(file.rows for file in self._manifest.files)

    def load(self) -> Any:
        """Read all of them into memory, in the order of the data.

        Returns:
            Of tables a pandas frame or series; of a bag a list of the outputs of its
            examples, or of pairs (key, output); of a list one of what each part has;
            else numpy arrays, in a tree if there are several outputs.

        Raises:
            DataError: If a file is missing or damaged.
        """
        form = self._manifest.format
        files = self._manifest.files
        return form.whole([_read(self._store, form, file) for file in files])

    def to_dask(self) -> Any:
        """Read them lazily, where they are needed, in the parts of the data.

        Returns:
            What `predict` would return without a URL; of what is not lazy, a
            ``dask.array``.
        """
        form, name = self._manifest.format, new_key("predictions")
        read = delayed(_read, pure=False)
        parts = [
            read(self._store, form, file, dask_key_name=(name, part))
            for part, file in enumerate(self._manifest.files)
        ]
        return form.lazy(parts, self.rows)

    @override
    def __repr__(self) -> str:
        count = f"{sum(self.rows)} rows in {len(self.rows)} parts"
        return f"Predictions({self.url!r}: {count})"


def _read(store: Store, form: Format, file: PartFile) -> Any:
    return form.decoded(file.read(store))
