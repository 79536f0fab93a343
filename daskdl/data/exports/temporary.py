"""Batch files for one run: written before it, deleted after it."""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config

from daskdl.config import Timeouts
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.progress import Progress
from daskdl.data.exports.source import BatchFiles
from daskdl.data.exports.writing import export_source
from daskdl.data.futures import answers_of, workers_of
from daskdl.data.source import Source
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import OptionError

_PREFIX = "daskdl-export-"


@contextlib.contextmanager
def temporary_batches(
    source: Source, options: ExportOptions, client: Any
) -> Iterator[BatchFiles]:
    """Export a source into a new folder, which is deleted at the end in any case.

    The folder is made below the URL that ``daskdl.export.url`` says in Dask's
    configuration, with ``daskdl.export.storage_options``. Without one it is a temporary
    folder of this machine, which all workers must see.

    Args:
        source: What to export.
        options: Sizes, order and contents.
        client: Of the workers that write and read them; False: only this process.

    Yields:
        The batch files.

    Raises:
        OptionError: If no URL is configured, and a worker is on another machine.
        OSError: If one is gone, or does not say whether it is; the latter is a
            WaitTimeoutError.
    """
    url = dask.config.get("daskdl.export.url", None)
    with contextlib.ExitStack() as ending:
        if url is None:
            store = Store(str(ending.enter_context(_folder_here(client))))
        else:
            storage = dask.config.get("daskdl.export.storage_options", None) or {}
            below = store_of(url).url.rstrip("/")
            store = Store(f"{below}/{_PREFIX}{uuid.uuid4().hex}", dict(storage))
        ending.callback(_give_up, store)
        export_source(source, store, options, client)
        yield BatchFiles(store.url, store.options)


def _give_up(store: Store) -> None:
    """Delete everything; a task that still writes sees it, and cleans up itself."""
    Progress(store).end()
    store.delete_all()


@contextlib.contextmanager
def _folder_here(client: Any) -> Iterator[Path]:
    """A temporary folder that all workers see."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        _check_seen(folder, client)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_seen(folder: Path, client: Any) -> None:
    if client is False:
        return
    bound = Timeouts.from_config().bound("request")
    what = f"whether they see {folder}"
    seen = answers_of(client, workers_of(client), folder.exists, bound, what)
    blind = sorted(worker for worker, sees in seen.items() if not sees)
    if blind:
        raise OptionError(
            f'approach="export" needs a place that all workers see, but {folder} of '
            f"this machine is not seen by {', '.join(blind)}; set daskdl.export.url in "
            "Dask's configuration to a URL of an object store or a network folder"
        )
