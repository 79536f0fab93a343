"""The second pass of an export: each bucket of rows into batch files."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.exports.batch_file import BatchFile
from daskdl.data.exports.dealing import Deal, Stretch
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.pieces import Pieces
from daskdl.data.exports.progress import Progress
from daskdl.data.exports.schema import Schema, as_rows, joined
from daskdl.data.source import Source
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

KIND = "bucket"  # of a record of progress
_READ_AT_A_TIME = 8  # each is a request that mostly waits


class Buckets(Source):
    """The rows of all pieces, dealt out; a part is a bucket.

    Args:
        store: Where the pieces are.
        pieces: All of them.
        deal: Of their lengths.
        here: Whether to stay in this process.
    """

    def __init__(self, store: Store, pieces: Pieces, deal: Deal, here: bool) -> None:
        self.store, self.pieces, self.deal, self.here = store, pieces, deal, here
        self.parts, self.lengths, self.first = deal.buckets, None, None

    @override
    def load(self, part: int) -> Rows:
        schema = self.pieces.schema
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            found = list(pool.map(self._read, self.deal.stretches(part)))
        return schema.rows(np.concatenate(found))

    def _read(self, stretch: Stretch) -> np.ndarray:
        dtype = self.pieces.schema.dtype
        name = self.pieces.names[stretch.piece]
        start, stop = (edge * dtype.itemsize for edge in stretch[1:])
        content = self.store.read(name, start, stop)
        if len(content) != stop - start:
            raise DataError(
                f"{self.store.url_of(name)} is damaged: bytes {start} to {stop} are "
                "not all there; export with overwrite=True"
            )
        return np.frombuffer(content, dtype)


def write_bucket(
    buckets: Buckets,
    bucket: int,
    options: ExportOptions,
    done: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """Write one bucket into batch files, here and now, or find that it was done.

    Args:
        buckets: All of them.
        bucket: Its number.
        options: Of the export.
        done: Records of what was done before the export was interrupted.

    Returns:
        The record of the bucket: its ``files``, the ``schema`` of the rows in them,
        and the ``deal`` it is part of.

    Raises:
        DataError: If it cannot be read or written, or if ``transform`` returns what
            cannot be exported.
    """
    before = done.get(bucket)
    if before is not None and _is_there(before, buckets):
        return dict(before)
    progress = Progress(buckets.store)
    progress.check()
    rows = buckets.load(bucket)
    schema: Schema | None = None
    files = []
    for number, indices in buckets.deal.cuts(bucket):
        batches = _transformed(_taken(rows, indices), options)
        schema = schema or Schema.of(batches)
        schema.check(Schema.of(batches), f"batch file {number}")
        name = f"batch-{number:06d}.safetensors"
        files.append(BatchFile.written(buckets.store, name, batches))
        progress.keep(name)
    assert schema is not None  # a bucket has at least one file
    record = {
        "deal": buckets.deal.checksum,
        "schema": schema.to_json(),
        "files": [asdict(file) for file in files],
    }
    progress.add(KIND, bucket, record)
    return record


def _is_there(record: Mapping[str, Any], buckets: Buckets) -> bool:
    files = map(BatchFile.from_json, record["files"])
    same = record["deal"] == buckets.deal.checksum
    return same and all(file.is_there(buckets.store) for file in files)


def _taken(rows: Rows, indices: np.ndarray) -> Rows:
    return batching.of_both(lambda tree: batching.rows(tree, indices), rows)


def _transformed(rows: Rows, options: ExportOptions) -> Rows:
    if options.transform is None:
        return rows
    size, count = options.batch_size, batching.length(rows[0])
    done = []
    for start in range(0, count, size):
        few = _taken(rows, np.arange(start, min(start + size, count)))
        batch = as_rows(options.transform(batching.of_both(_tensors, few)))
        got, want = batching.length(batch[0]), batching.length(few[0])
        if got != want:
            raise DataError(
                f"transform must keep the rows of a batch, got {got} of {want}"
            )
        done.append(batch)
    return joined(done)


def _tensors(tree: Any) -> Any:
    return batching.mapped(torch.from_numpy, tree)
