"""Batch files of a source, made in two passes over the cluster.

First each part is written into pieces, then each bucket of rows, some from every
piece, into batch files, see :mod:`daskdl.data.exports.dealing`; nobody holds more than
a part or a bucket. The manifest comes last.
"""

import logging
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from daskdl.data.exports import buckets, pieces
from daskdl.data.exports.batch_file import BatchFile
from daskdl.data.exports.buckets import Buckets, write_bucket
from daskdl.data.exports.dealing import Deal
from daskdl.data.exports.manifest import Manifest
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.pieces import Pieces, pieces_of, write_pieces
from daskdl.data.exports.progress import Progress
from daskdl.data.exports.schema import Schema
from daskdl.data.passes import each_part
from daskdl.data.source import Source
from daskdl.data.stores.store import Store

logger = logging.getLogger(__name__)

# Rows of one task of the second pass; it needs twice as much memory.
BUCKET_BYTES = 64 * 2**20


def export_source(
    source: Source,
    store: Store,
    options: ExportOptions,
    client: Any = None,
    made_from: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write batch files of a source into a store, or go on where that was interrupted.

    Args:
        source: What to export.
        store: Where to; the client and all workers must see the same files in it.
        options: Sizes, order and contents.
        client: As of `each_part`.
        made_from: What tells this export from others; None: there are no others.

    Returns:
        What is there then.
    """
    progress = Progress(store)
    origin = dict(made_from or {})
    if progress.origin() is None:
        progress.begin(origin)
    written = _write_pieces(source, progress, options, client)
    itemsize = written.schema.dtype.itemsize
    deal = Deal(
        written.lengths, options.file_rows, BUCKET_BYTES // itemsize, options.seed
    )
    dealt = Buckets(store, written, deal, source.here)
    schema, files = _write_buckets(dealt, options, client)
    classes = source.classes if options.classes is None else options.classes
    made = Manifest(
        options.batch_size,
        tuple(files),
        schema,
        None if classes is None else tuple(classes),
        origin,
    )
    made.write(store)
    progress.end()
    logger.info("exported %d rows in %d files to %s", made.rows, deal.files, store.url)
    return made


def _write_pieces(
    source: Source, progress: Progress, options: ExportOptions, client: Any
) -> Pieces:
    done = progress.done(pieces.KIND)
    left = [part for part in range(source.parts) if part not in done]
    logger.info("export to %s: %d parts to read", progress.store.url, len(left))
    write = partial(write_pieces, progress=progress, seed=options.seed)
    records = each_part(source, write, client, parts=left) if left else ()
    return pieces_of(chain(done.items(), records), source)


def _write_buckets(
    dealt: Buckets, options: ExportOptions, client: Any
) -> tuple[Schema, list[BatchFile]]:
    done = Progress(dealt.store).done(buckets.KIND)
    write = partial(write_bucket, options=options, done=done)
    schema: Schema | None = None
    files: dict[int, list[BatchFile]] = {}
    for bucket, record in each_part(dealt, write, client):
        found = Schema.from_json(record["schema"])
        schema = schema or found
        schema.check(found, f"bucket {bucket}")
        files[bucket] = [BatchFile.from_json(file) for file in record["files"]]
    assert schema is not None  # there is at least one bucket
    return schema, [file for bucket in sorted(files) for file in files[bucket]]
