"""The first pass of an export: each part of the data into files of rows, shuffled.

A part becomes one *piece* or several, so that no more than a part and twice
`PIECE_BYTES` are in memory. A piece is the records of its rows (see
:mod:`daskdl.data.exports.schema`) and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.exports.dealing import row_order
from daskdl.data.exports.progress import FOLDER, Progress
from daskdl.data.exports.schema import Schema, as_rows, joined, named_arrays
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.errors import DataError

KIND = "part"  # of a record of progress

# Large enough that a request costs little beside it, small beside a worker's memory.
PIECE_BYTES = 64 * 2**20


class Pieces(NamedTuple):
    """What has been made of the parts, all together.

    Attributes:
        names: Of the files, in the order of the parts.
        lengths: Rows of each.
        schema: What the rows look like.
    """

    names: list[str]
    lengths: list[int]
    schema: Schema


def write_pieces(
    source: Source, part: int, progress: Progress, seed: int | None
) -> dict[str, Any]:
    """Write one part into pieces, here and now.

    Args:
        source: What it is a part of.
        part: Its number.
        progress: Of the export.
        seed: Of the shuffling; None: rows keep their order.

    Returns:
        The record of the part: ``rows`` of each piece, and their ``schema``; None if
        there are no rows.

    Raises:
        DataError: Naming the part, if it cannot be exported.
    """
    progress.check()
    rows: list[int] = []
    schema: Schema | None = None
    for index, block in enumerate(_blocks(source, part)):
        try:
            found = Schema.of(block)
            (schema or found).check(found, "later rows")
        except DataError as error:
            raise DataError(f"{source.name(part)}: {error}") from error
        schema = found
        order = row_order(batching.length(block[0]), seed, part, index)
        step = max(PIECE_BYTES // schema.dtype.itemsize, 1)
        for start in range(0, len(order), step):
            records = schema.records(block, order[start : start + step])
            progress.write(piece_name(part, len(rows)), records.tobytes())
            rows.append(len(records))
    record = {"rows": rows, "schema": None if schema is None else schema.to_json()}
    progress.add(KIND, part, record)
    return record


def piece_name(part: int, index: int) -> str:
    """The file of one piece of a part."""
    return f"{FOLDER}/{KIND}-{part:06d}-{index:04d}.rows"


def pieces_of(
    records: Iterable[tuple[int, Mapping[str, Any]]], source: Source
) -> Pieces:
    """Put the records of all parts together, as they come.

    Args:
        records: Pairs of a part's number and its record, in any order.
        source: Names the parts in messages.

    Raises:
        DataError: If the rows of two parts do not look alike, or there are none.
    """
    rows: dict[int, list[int]] = {}
    schema: Schema | None = None
    for part, record in records:
        rows[part] = record["rows"]
        if record["schema"] is not None:
            found = Schema.from_json(record["schema"])
            schema = schema or found
            schema.check(found, source.name(part))
    if schema is None:
        raise DataError("there is nothing to export: X has no rows")
    found_at = [(part, i) for part in sorted(rows) for i in range(len(rows[part]))]
    return Pieces(
        [piece_name(*place) for place in found_at],
        [rows[part][i] for part, i in found_at],
        schema,
    )


def _blocks(source: Source, part: int) -> Iterator[Rows]:
    """What is shuffled at a time: a part, or some of it if it comes as a stream."""
    waiting: list[Rows] = []
    size = 0
    for rows in map(as_rows, rows_of_part(source, part, STREAMED_ROWS)):
        if any(len(array) for _, array in named_arrays(rows)):
            waiting.append(rows)
            size += batching.nbytes(rows)
        if size >= PIECE_BYTES:
            yield joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield joined(waiting)
