"""Lazy outputs of Dask collections: one task per partition.

This module distinguishes examples from rows and keys from labels, sends a model to each
worker once, and converts outputs to arrays, dataframes, bags and lists.
"""

import copy
import dataclasses
import datetime
import functools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching, dask_collections
from daskdl.data.batching import Rows, Tree
from daskdl.data.dask_collections import Collections, ExampleCollection, Finish
from daskdl.data.distribute import (
    InBlocks,
    in_blocks,
    joined,
    map_parts,
    new_key,
    workers_of,
)
from daskdl.data.named_columns import Columns, NamedRows
from daskdl.data.source import STREAMED_ROWS, Facts, Source, facts_of
from daskdl.errors import DataError, ModelError
from daskdl.serialization import Packed

# Computes the outputs for blocks of rows: numpy arrays with one row per input row.
Apply = Callable[[Iterator[Rows]], Tree]
ColumnNames = tuple[Any, ...] | None  # of a dataframe


class error_context(AbstractContextManager[None]):
    """Adds a note such as "in part 3" to any error raised inside."""

    def __init__(self, note: str) -> None:
        self._note = note

    @override
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self._note)


# ---- examples and their keys


_NAMES = (str, bytes, uuid.UUID, datetime.date, np.datetime64)  # types of names


def is_keyed(example: Any) -> bool:
    """Whether an example is (key, x) or (key, (x, y)), rather than (x, y) or x.

    Strings, bytes, UUIDs and dates are keys, and so are integers before arrays, and
    tuples of these.

    Example:
        >>> is_keyed(("cat-7", np.zeros(3))), is_keyed((7, np.zeros(3)))
        (True, True)
        >>> is_keyed((np.zeros(3), 7)), is_keyed((7, 1)), is_keyed(np.zeros(3))
        (False, False, False)
    """
    if not dask_collections.is_pair(example) or not _is_key(example[0]):
        return False
    x, _ = dask_collections.pair(example[1])
    arrays = all(isinstance(leaf, np.ndarray | Tensor) for leaf in batching.leaves(x))
    return arrays or _is_name(example[0])


def split_keys(examples: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
    """Return the keys and the inputs of pairs (key, x); `name` is that of the part."""
    for number, example in enumerate(examples):
        if not dask_collections.is_pair(example):
            raise DataError(
                f"example {number} of {name} must be a pair (key, x), as the first "
                f"example is, got a {type(example).__name__}; if examples have no "
                "keys, pass keyed=False"
            )
    return [key for key, _ in examples], [x for _, x in examples]


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_key, value))
    return isinstance(value, (*_NAMES, int, np.integer)) and not isinstance(value, bool)


def _is_name(key: Any) -> bool:
    return (
        any(map(_is_name, key)) if isinstance(key, tuple) else isinstance(key, _NAMES)
    )


@dataclass(frozen=True)
class ExampleReader:
    """Picklable: reads parts that are lists of examples, or rows."""

    rows: Finish  # converts a value that is not a list of examples to rows
    bag: bool  # whether every value is a list of examples
    keyed: bool | None  # whether examples are pairs (key, x); None: unknown

    def outputs(self, apply: Apply, value: Any, part: int) -> Any:
        """Return a tree of outputs for rows; for examples a list, or pairs if keyed."""
        if not (self.bag or isinstance(value, list)):
            return apply(iter([self.rows([value], part)]))
        name, examples, keys = f"part {part}", list(value), None
        if self.keyed:
            keys, examples = split_keys(examples, name)
        # Only examples of the same shapes can be stacked.
        by_shapes: defaultdict[Any, list[int]] = defaultdict(list)
        for position, example in enumerate(examples):
            by_shapes[_shapes_of_example(example)].append(position)
        outputs: list[Tree] = [None] * len(examples)
        for positions in by_shapes.values():
            blocks = (
                [examples[i] for i in positions[start : start + STREAMED_ROWS]]
                for start in range(0, len(positions), STREAMED_ROWS)
            )
            rows = apply(dask_collections.stacked(block, name) for block in blocks)
            for row, position in enumerate(positions):
                outputs[position] = batching.rows(rows, row)
        return outputs if keys is None else list(zip(keys, outputs, strict=True))

    def first_rows(self, value: Any, part: int) -> tuple[Facts | None, bool]:
        """Return facts for a dry run, None without rows, and whether rows have keys."""
        if not (self.bag or isinstance(value, list)):
            if self.keyed:
                raise DataError(
                    f"part {part} must be a list of pairs (key, x), got a "
                    f"{type(value).__name__}"
                )
            facts = facts_of(self.rows([value], part))
            return (facts if facts.rows else None), False
        examples = list(value)[:1]
        if not examples:
            return None, False
        keyed = is_keyed(examples[0]) if self.keyed is None else self.keyed
        if keyed:
            _, examples = split_keys(examples, f"part {part}")
        return facts_of(dask_collections.stacked(examples, f"part {part}")), keyed


def _shapes_of_example(example: Any) -> tuple[Any, ...]:
    named = batching.leaves_by_name(dask_collections.pair(example))
    return tuple((name, *np.shape(leaf)) for name, leaf in named.items())


def _unread(values: list[Any], part: int) -> Rows:
    """Return the value of a part unchanged; an `ExampleReader` reads it later."""
    (value,) = values
    return value, None


class Examples(Collections):
    """A bag, or a list of Delayed objects and futures, with examples not yet stacked.

    Args:
        pairs: The source, which would stack its examples.
        keyed: Whether examples are pairs (key, x). None: the first example decides.
    """

    keyable = True

    def __init__(self, pairs: ExampleCollection, keyed: bool | None) -> None:
        super().__init__(pairs.partitions, _unread)
        self.columns, self.training_columns = pairs.columns, pairs.training_columns
        self.reader = ExampleReader(pairs.finish, pairs.bag, keyed)

    @override
    def _arrange_(
        self, known: Columns, columns: Columns, classes: Sequence[str] | None
    ) -> None:
        rows = dask_collections.Arranged(self.reader.rows, columns, classes)
        self.reader = dataclasses.replace(self.reader, rows=rows)


def with_first_rows(
    source: Source, client: Client | Literal[False], keyed: bool | None = None
) -> Source:
    """Return the source with rows for a dry run.

    This computes one part after another until a part has rows, which also determine the
    order of columns, unless the source expects an order.

    Args:
        source: Not changed.
        client: Computes the parts; False: this process.
        keyed: Whether examples are pairs (key, x). None: the first example decides.
    """
    if isinstance(source, ExampleCollection):
        source = Examples(source, keyed)
    reader = source.reader if isinstance(source, Examples) else None
    if source.first_rows is not None and reader is None:
        return source
    for part in range(source.parts):
        first_rows = functools.partial(_first_rows, reader)
        [(_, (facts, has_keys))] = map_parts(source, first_rows, client, parts=[part])
        if facts is not None and facts.first_rows is not None:
            known = copy.copy(source)
            known.first_rows = facts.first_rows
            if isinstance(known, Examples):
                known.reader = dataclasses.replace(known.reader, keyed=has_keys)
            named_rows = NamedRows.of(facts.first_rows)
            columns = {**named_rows.columns, **(source.columns or {})}
            if source.first_rows is None:
                named_rows.warn_of_positions(
                    columns, source.training_columns, source.name(part)
                )
            return known.arranged(columns, named_rows.classes)
    raise DataError(f"X must not be empty, got no rows in {source.parts} parts")


def _first_rows(
    reader: ExampleReader | None, source: Source, part: int
) -> tuple[Facts | None, bool]:
    with error_context(f"in {source.name(part)}"):
        if reader is not None:
            return reader.first_rows(source.load(part)[0], part)
        facts = source.facts(part)
        return (facts if facts.rows else None), False


# ---- tasks


# Dask warns about graphs above 10 MB, and reading a message of a gigabyte would block
# the scheduler.
PIECE_BYTES = 4 * 2**20
MAX_BLOCKS = 8  # that the task of each partition depends on


def broadcast(
    packed: Sequence[Packed[Any]], client: Client | Literal[False]
) -> list[Any]:
    """Return tasks whose results are packed objects in blocks, see `InBlocks`.

    Dask sends the blocks to the workers that need them, releases them after the last
    use, and computes them again if their worker dies; scattered data would be lost.
    Each block is made on another worker, so that no worker sends all of them. The
    scheduler keeps the bytes as long as a result depends on them.
    """
    name = new_key("model")
    if client is False:
        counts, blocks = in_blocks(packed, places=1)
        return [
            delayed(value, name=f"{name}-{number}", traverse=False)
            for number, value in enumerate([InBlocks(counts, blocks[0]), *blocks[1:]])
        ]
    workers = workers_of(client)
    counts, blocks = in_blocks(packed, min(len(workers), MAX_BLOCKS))
    tasks = []
    for number, block in enumerate(blocks):
        submit = functools.partial(
            client.submit,
            workers=[workers[number % len(workers)]],
            allow_other_workers=True,
            pure=False,
        )
        pieces = [
            submit(
                np.asarray,
                block[start : start + PIECE_BYTES],
                key=new_key("model-block"),
            )
            for start in range(0, block.nbytes, PIECE_BYTES)
        ]
        # Dask releases the pieces once they have been joined.
        of_first = None if number else counts
        tasks.append(submit(_block_of, pieces, of_first, key=f"{name}-{number}"))
    return tasks


def _block_of(
    pieces: Sequence[np.ndarray], counts: dict[str, int] | None
) -> InBlocks | np.ndarray:
    """Join the pieces of a block; `counts` are given for the first block."""
    block = joined(pieces)
    return block if counts is None else InBlocks(counts, block)


def partition_outputs(
    source: Collections, apply: Apply, client: Client | Literal[False]
) -> list[Delayed]:
    """Return the outputs of each partition as Delayed objects; see `lazy_outputs`.

    The outputs of a partition are a list of all output arrays; for `Examples`, see
    `ExampleReader.outputs`.
    """
    model, name = broadcast([Packed(apply, "model")], client), new_key("predict")
    reader = source.reader if isinstance(source, Examples) else source.finish
    task = delayed(_outputs_of_part, pure=False)
    return [
        task(reader, part, values, *model, dask_key_name=(name, part))
        for part, values in enumerate(source.partitions.delayed(client))
    ]


def _outputs_of_part(
    reader: ExampleReader | Finish,
    part: int,
    values: list[Any],
    model: InBlocks,
    *blocks: np.ndarray,
) -> Any:
    with error_context(f"in part {part}"):
        (apply,) = model.unpacked(blocks)
        if isinstance(reader, ExampleReader):
            return reader.outputs(apply, values[0], part)
        rows = reader(values, part)
        return batching.leaves(apply(iter([rows])))


# ---- collections of outputs


def lazy_outputs(
    source: Collections,
    apply: Apply,
    empty: Tree,
    client: Client | Literal[False],
    names: Sequence[Any] | None = None,
) -> Any:
    """Apply a function to a collection lazily.

    The cluster keeps `apply` as long as the result exists.

    Args:
        source: The rows or examples.
        apply: The function, sent to each worker once.
        empty: Outputs for zero rows, numpy arrays.
        client: Keeps `apply`; False: the graph contains it.
        names: Names of the columns, if the outputs are one table with as many columns.
    """
    parts = partition_outputs(source, apply, client)
    if isinstance(source, Examples):
        return _bag(parts) if source.reader.bag else parts
    if (chunks := source.block_lengths) is not None:
        leaves = enumerate(batching.leaves(empty))
        return batching.with_leaves(
            empty, [_array(parts, i, leaf, chunks) for i, leaf in leaves]
        )
    frame, *_ = source.partitions.collections
    values = source.partitions.delayed(client)
    return _tables(parts, empty, frame, values, names)


def _bag(parts: list[Delayed]) -> Any:
    from dask.bag import from_delayed

    return from_delayed(parts)


def keyed_by_file(source: Source, apply: Apply, client: Client | Literal[False]) -> Any:
    """Return a lazy bag of pairs (key, output) for a source whose parts are files.

    The key is the path or URL of the file if each file is one example; otherwise it is
    a pair of the path or URL and the row in the file, counted from 0.
    """
    source.prepare(client)
    shared = broadcast([Packed(source, "X"), Packed(apply, "model")], client)
    task, name = delayed(_pairs_of_files, pure=False), new_key("predict")
    return _bag(
        [
            task(part, *shared, dask_key_name=(name, part))
            for part in range(source.parts)
        ]
    )


def _pairs_of_files(
    part: int, shared: InBlocks, *blocks: np.ndarray
) -> list[tuple[Any, Any]]:
    source, apply = shared.unpacked(blocks)
    files = source.pieces(part)
    urls = [url for url, _ in files] or [source.name(part)]
    keys: list[Any] = []

    def rows_of_files() -> Iterator[Rows]:
        if source.one_example:
            keys.extend(urls)
            yield from source.stream(part, STREAMED_ROWS)  # loads files in parallel
            return
        load_part = functools.partial(source.load_counted, part)
        loads = [load for _, load in files] or [load_part]
        for url, load in zip(urls, loads, strict=True):
            rows = load()
            keys.extend((url, row) for row in range(batching.length(rows)))
            yield rows

    with error_context(f"in {source.name(part)}"):
        outputs = apply(rows_of_files())
    return [(key, batching.rows(outputs, row)) for row, key in enumerate(keys)]


def _array(
    parts: Sequence[Delayed], number: int, empty: np.ndarray, rows: Sequence[float]
) -> Any:
    """Return the output with this number as a ``dask.array``."""
    import dask.array  # takes half a second, and imports scipy

    # from_delayed and concatenate would drop empty blocks.
    name = new_key("outputs")
    select = delayed(list.__getitem__, pure=False)
    blocks = [
        select(part, number, dask_key_name=f"{name}-{i}")
        for i, part in enumerate(parts)
    ]
    inner = (0,) * (empty.ndim - 1)
    layer: Any = {(name, i, *inner): block.key for i, block in enumerate(blocks)}
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=blocks),
        name,
        chunks=(tuple(rows), *((size,) for size in empty.shape[1:])),
        meta=empty,
    )


def _tables(
    parts: Sequence[Delayed],
    empty: Tree,
    frame: Any,
    values: Sequence[Any],
    names: Sequence[Any] | None,
) -> Tree:
    """Return a tree of Dask dataframes and series, see `tables_of`.

    Args:
        parts: The outputs of each partition.
        empty: Outputs for zero rows.
        frame: Determines the index and the divisions.
        values: For each partition, a list of the partitions from which its outputs are
            computed; that of `frame` is the first.
        names: See `lazy_outputs`.
    """
    check_tabular(empty, "dask.dataframe; use X.to_dask_array(lengths=True)")
    leaves = batching.leaves(empty)

    def lazy_table(outputs: Sequence[int], columns: ColumnNames) -> Any:
        import dask.dataframe

        table = functools.partial(_table, outputs, columns)
        table_of_part = delayed(_table_of_part, pure=False)
        return dask.dataframe.from_delayed(
            [table_of_part(table, *part) for part in zip(parts, values, strict=True)],
            meta=table(leaves, frame._meta),
            divisions=frame.divisions,
            verify_meta=False,
        )

    return tables_of(empty, names, lazy_table)


def pandas_of(outputs: Tree, frame: Any, names: Sequence[Any] | None) -> Tree:
    """Return outputs as dataframes and series with the index of a frame."""
    leaves = batching.leaves(outputs)

    def table(numbers: Sequence[int], columns: ColumnNames) -> Any:
        return _table(numbers, columns, leaves, frame)

    return tables_of(outputs, names, table)


def check_tabular(outputs: Tree, target: str) -> None:
    """Raise a ModelError for outputs with more than two axes.

    `target` names the kind of table, followed by a remedy.
    """
    for leaf in batching.leaves(outputs):
        if leaf.ndim > 2:
            raise ModelError(
                f"the output has shape {leaf.shape[1:]} for each row, which does not "
                f"fit into a {target}, or pass a postprocess that returns one or two "
                "axes"
            )


def tables_of(
    outputs: Tree,
    names: Sequence[Any] | None,
    table: Callable[[Sequence[int], ColumnNames], Any],
) -> Tree:
    """Return a tree of tables.

    A dict of outputs with one number per row becomes one dataframe, with a column for
    each output. Any other output becomes a series if it has one number per row, else a
    dataframe.

    Args:
        outputs: Numpy arrays with one or two axes.
        names: Names of the columns, if `outputs` is an array with as many columns.
        table: Creates a table from the numbers of its outputs and its column names.
    """
    count = len(batching.leaves(outputs))
    if isinstance(outputs, dict) and all(
        isinstance(leaf, np.ndarray) and leaf.ndim == 1 for leaf in outputs.values()
    ):
        return table(range(count), tuple(outputs))
    if isinstance(outputs, np.ndarray):
        matches = names is not None and outputs.shape[1:] == (len(names),)
        return table([0], tuple(names or ()) if matches else None)
    return batching.with_leaves(outputs, [table([i], None) for i in range(count)])


def _table_of_part(
    table: Callable[[Sequence[np.ndarray], Any], Any],
    leaves: Sequence[np.ndarray],
    values: list[Any],
) -> Any:
    return table(leaves, values[0])


def _table(
    outputs: Sequence[int],
    columns: ColumnNames,
    leaves: Sequence[np.ndarray],
    frame: Any,
) -> Any:
    """Return some outputs of a partition as a pandas object with the frame's index."""
    import pandas

    arrays = [leaves[number] for number in outputs]
    if arrays[0].ndim == 2:
        return pandas.DataFrame(arrays[0], index=frame.index, columns=columns)
    if columns is None:
        return pandas.Series(arrays[0], index=frame.index)
    by_name = dict(zip(columns, arrays, strict=True))
    return pandas.DataFrame(by_name, index=frame.index)
