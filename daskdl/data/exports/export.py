"""Data of any kind into batch files, once, for many runs to train from."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskdl.data.batching import Rows
from daskdl.data.exports import manifest
from daskdl.data.exports.manifest import Manifest
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.origin import differences, origin_of
from daskdl.data.exports.progress import Progress
from daskdl.data.exports.writing import export_source
from daskdl.data.options import SourceOptions
from daskdl.data.sources import source_of
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import OptionError

logger = logging.getLogger(__name__)


def export(
    X: Any,
    url: str | os.PathLike[str],
    batch_size: int,
    *,
    y: Any = None,
    shuffle: bool = True,
    seed: int = 0,
    transform: Callable[[Rows], Rows] | None = None,
    batches_per_file: int = 1,
    classes: Sequence[str] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write data into shuffled batch files, from which ``trainer.fit(url)`` trains.

    It is done on the cluster, and within the memory that a part of the data takes. A
    folder can be trained from once the export is finished; one that was interrupted
    goes on where it stopped when it is run again, and one that is finished is returned
    as it is.

    Args:
        X: Inputs, or inputs and labels: all that ``trainer.fit`` takes. A tuple is
            several inputs, as there.
        url: Folder to write into, any that fsspec knows; the same place for this
            process and all workers. Other files in it are left alone.
        batch_size: Rows of a batch, >= 1. The last batch may be smaller.
        y: Labels, or None.
        shuffle: Whether rows of all parts are mixed; otherwise they keep their order.
        seed: Of the shuffling: the same files whatever the number of workers.
        transform: What to do with each batch before it is written, as in
            ``trainer.fit``; it keeps the number of rows.
        batches_per_file: >= 1; more, where batches are small.
        classes: Names of the labels 0, 1, ...; None: those that the data have.
        client: Of the cluster; None: the default client, if there is one, else this
            process. False: this process, where data in memory are exported anyway.
        storage_options: For fsspec, such as credentials.
        overwrite: Whether an export of other data or options is deleted first.

    Returns:
        The manifest: what has been written.

    Raises:
        OptionError: If there is an export of other data or options.
        DataError: If the data cannot be exported, or a file not be read or written.

    Example:
        >>> import numpy as np
        >>> X, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> made = export(X, "memory://daskdl-export", 4, y=y)
        >>> [file.rows for file in made.files]
        [4, 4, 2]
    """
    options = ExportOptions(
        batch_size, batches_per_file, seed if shuffle else None, transform, classes
    )
    source = source_of(X, y, SourceOptions(batch_size, labelled=False))
    store = Store(store_of(url).url, dict(storage_options or {}))
    made_from = origin_of(source, (X, y), options.to_json())
    if overwrite:
        clear(store)
    found = _found(store, made_from)
    return found or export_source(source, store, options, client, made_from)


def clear(store: Store) -> None:
    """Delete an export, finished or not; other files stay."""
    store.delete([manifest.NAME])  # so that nobody begins to read
    Progress(store).end()
    store.delete(store.names("batch-*.safetensors"))


def _found(store: Store, made_from: Mapping[str, Any]) -> Manifest | None:
    """The finished export that is there, if there is one; None: it is to be made."""
    progress = Progress(store)
    finished = Manifest.read(store) if store.exists(manifest.NAME) else None
    before = progress.origin() if finished is None else finished.made_from
    differing = "" if before is None else differences(before, made_from)
    if differing:
        what = "an unfinished export" if finished is None else "an export"
        raise OptionError(
            f"there is {what} of other data or options in {store.url}: {differing}; "
            "export to another URL, or with overwrite=True"
        )
    if finished is not None:
        progress.end()  # the last run may not have come to it
        logger.info("%s has been exported before: %d rows", store.url, finished.rows)
    return finished
