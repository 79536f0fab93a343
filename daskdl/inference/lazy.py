"""Lazy outputs of Dask collections: one task per partition.

Hides how examples and rows, keys and labels are distinguished, how a model is sent to
each worker once, and how outputs become arrays, dataframes, bags and lists.
"""

import copy
import dataclasses
import datetime
import functools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from daskdl.data.distribute import map_parts, new_key, workers_of
from daskdl.data.named_columns import Columns as Names
from daskdl.data.named_columns import NamedRows
from daskdl.data.source import STREAMED_ROWS, Facts, Source, facts_of
from daskdl.errors import DataError, ModelError
from daskdl.serialization import Packed

# Maps blocks of rows to the outputs of all blocks, numpy arrays with a row for each.
Ask = Callable[[Iterator[Rows]], Tree]
Columns = tuple[Any, ...] | None  # names of a dataframe's columns


class error_context(AbstractContextManager[None]):
    """Adds a note such as "in part 3" to any error raised inside."""

    def __init__(self, note: str) -> None:
        self._note = note

    @override
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self._note)


# ---- examples and their keys


_NAMES = (str, bytes, uuid.UUID, datetime.date, np.datetime64)


def is_keyed(example: Any) -> bool:
    """Whether an example is (key, x) or (key, (x, y)), rather than (x, y) or x.

    Text, bytes, UUIDs and dates are keys; so are integers that arrays follow, and
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
    """Return the first and the second members of pairs (key, x) of a part."""
    for number, example in enumerate(examples):
        if not dask_collections.is_pair(example):
            raise DataError(
                f"example {number} of {name} must be a pair (key, x) like the first "
                f"example, got a {type(example).__name__}; if the examples have no "
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
    """Reads parts that are lists of examples, or rows; picklable."""

    rows: Finish  # makes rows of a value that is not a list of examples
    bag: bool  # every value is a list of examples
    keyed: bool | None  # None: not known yet

    def outputs(self, ask: Ask, value: Any, part: int) -> Any:
        """Return a tree of outputs for rows; for examples a list, or pairs if keyed."""
        if not (self.bag or isinstance(value, list)):
            return ask(iter([self.rows([value], part)]))
        name, examples, keys = f"part {part}", list(value), None
        if self.keyed:
            keys, examples = split_keys(examples, name)
        outputs: list[Tree] = [None] * len(examples)
        for places in _grouped(map(_shapes_of_example, examples)):
            cuts = range(0, len(places), STREAMED_ROWS)
            some = ([examples[i] for i in places[c : c + STREAMED_ROWS]] for c in cuts)
            rows = ask(dask_collections.stacked(together, name) for together in some)
            for row, place in enumerate(places):
                outputs[place] = batching.rows(rows, row)
        return outputs if keys is None else list(zip(keys, outputs, strict=True))

    def first_rows(self, value: Any, part: int) -> tuple[Facts | None, bool]:
        """Return rows for a dry run, None without rows, and whether they have keys."""
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


def _grouped(kinds: Iterable[Any]) -> list[list[int]]:
    """Group examples by kind: return the positions of the examples of each kind."""
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    return list(places.values())


def _unread(values: list[Any], part: int) -> Rows:
    """Return the value of a part unchanged; an `ExampleReader` reads it later."""
    (value,) = values
    return value, None


class Examples(Collections):
    """A bag, or a list of Delayed objects and futures, whose parts are not stacked yet.

    `keyed` says whether examples are pairs (key, x); None: the first example decides.
    """

    keyable = True

    def __init__(self, pairs: ExampleCollection, keyed: bool | None) -> None:
        super().__init__(pairs.partitions, _unread)
        self.columns, self.training_columns = pairs.columns, pairs.training_columns
        self.reader = ExampleReader(pairs.finish, pairs.bag, keyed)

    @override
    def _arrange_(
        self, known: Names, columns: Names, classes: Sequence[str] | None
    ) -> None:
        rows = dask_collections.Arranged(self.reader.rows, columns, classes)
        self.reader = dataclasses.replace(self.reader, rows=rows)


def with_first_rows(
    source: Source, client: Client | Literal[False], keyed: bool | None = None
) -> Source:
    """Return the source with rows for a dry run, `ExampleCollection` as `Examples`.

    Computes one part after the other until one has rows. If no order of columns is
    expected, the first part determines it. `keyed` says whether examples are pairs
    (key, x); None: the first example decides.
    """
    if isinstance(source, ExampleCollection):
        source = Examples(source, keyed)
    reader = source.reader if isinstance(source, Examples) else None
    if source.first_rows is not None and reader is None:
        return source
    for part in range(source.parts):
        first_rows = functools.partial(_first_rows, reader)
        look = map_parts(source, first_rows, client, parts=[part])
        for _, (facts, has_keys) in look:
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


# Dask warns about graphs above 10 MB, and a message of a gigabyte would block the
# scheduler while it is read.
BLOCK_BYTES = 4 * 2**20


def broadcast_model(packed: Packed[Any], client: Client | Literal[False]) -> Any:
    """Return a task that sends the same object to each worker once.

    Dask sends the result of the task to the workers that need it, releases it after the
    last use, and computes it again if its worker dies; scattered data would be lost.
    The scheduler keeps the bytes as long as a result depends on them.
    """
    name = new_key("model")
    if client is False:
        return delayed(packed, name=name, traverse=False)
    workers_of(client)  # raises if there are none
    starts = range(0, packed.payload.nbytes, BLOCK_BYTES)
    blocks = [
        client.submit(
            _block,
            packed.payload[start : start + BLOCK_BYTES],
            key=new_key("model-block"),
            pure=False,
        )
        for start in starts
    ]
    # Dask releases the blocks once they have been joined.
    kind = type(packed)
    return client.submit(_joined, kind, blocks, packed.argument, key=name, pure=False)


def _block(block: np.ndarray) -> np.ndarray:
    return block


def _joined(
    kind: type[Packed[Any]], blocks: Sequence[np.ndarray], argument: str
) -> Packed[Any]:
    payload = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return kind.of(payload, argument)


def partition_outputs(
    source: Collections, ask: Ask, client: Client | Literal[False]
) -> list[Delayed]:
    """Return the outputs of each partition, Delayed; see `lazy_outputs`.

    The outputs are lists of all output arrays; for `Examples`, see
    `ExampleReader.outputs`.
    """
    shared, name = broadcast_model(Packed(ask, "model"), client), new_key("predict")
    reader = source.reader if isinstance(source, Examples) else None
    task = delayed(_outputs_of_part, pure=False)
    return [
        task(shared, reader or source.finish, part, values, dask_key_name=(name, part))
        for part, values in enumerate(source.partitions.delayed(client))
    ]


def _outputs_of_part(
    ask: Packed[Ask], reader: ExampleReader | Finish, part: int, values: list[Any]
) -> Any:
    with error_context(f"in part {part}"):
        if isinstance(reader, ExampleReader):
            return reader.outputs(ask.shared(), values[0], part)
        rows = reader(values, part)
        return batching.leaves(ask.shared()(iter([rows])))


# ---- collections of outputs


def lazy_outputs(
    source: Collections,
    ask: Ask,
    empty: Tree,
    client: Client | Literal[False],
    names: Sequence[Any] | None = None,
) -> Any:
    """Apply a function to a collection, lazily.

    The cluster keeps `ask` as long as the result exists. If the outputs are a single
    table with as many columns as `names`, the columns get these names.
    """
    parts = partition_outputs(source, ask, client)
    if isinstance(source, Examples):
        return _bag(parts) if source.reader.bag else parts
    if (chunks := source.block_lengths) is not None:
        leaves = enumerate(batching.leaves(empty))
        return batching.with_leaves(
            empty, [_array(parts, i, x, chunks) for i, x in leaves]
        )
    frame, *_ = source.partitions.collections
    values = source.partitions.delayed(client)
    return collection_of_tables(parts, empty, frame, values, names)


def _bag(parts: list[Delayed]) -> Any:
    from dask.bag import from_delayed

    return from_delayed(parts)


def keyed_by_file(source: Source, ask: Ask, client: Client | Literal[False]) -> Any:
    """Return a bag of pairs (key, output), lazily, for a source whose parts are files.

    The key is the path or URL of the file if each file is one example; otherwise it is
    a pair of that and the row in the file, from 0.
    """
    source.prepare(client)
    packed_source = broadcast_model(Packed(source, "X"), client)
    packed_ask = broadcast_model(Packed(ask, "model"), client)
    task, name = delayed(_pairs_of_files, pure=False), new_key("predict")
    return _bag(
        [
            task(packed_source, packed_ask, part, dask_key_name=(name, part))
            for part in range(source.parts)
        ]
    )


def _pairs_of_files(
    packed_source: Packed[Source], packed_ask: Packed[Ask], part: int
) -> list[tuple[Any, Any]]:
    source, ask = packed_source.shared(), packed_ask.shared()
    files = source.pieces(part)
    urls = [url for url, _ in files] or [source.name(part)]
    keys: list[Any] = []

    def rows_of_files() -> Iterator[Rows]:
        if source.one_example:
            keys.extend(urls)
            yield from source.stream(part, STREAMED_ROWS)  # loads several at a time
            return
        load_part = functools.partial(source.load_counted, part)
        loads = [load for _, load in files] or [load_part]
        for url, load in zip(urls, loads, strict=True):
            rows = load()
            keys.extend((url, row) for row in range(batching.length(rows)))
            yield rows

    with error_context(f"in {source.name(part)}"):
        outputs = ask(rows_of_files())
    pairs = ((key, batching.rows(outputs, row)) for row, key in enumerate(keys))
    return list(pairs)


def _array(
    parts: Sequence[Delayed], number: int, empty: np.ndarray, rows: Sequence[float]
) -> Any:
    import dask.array  # takes half a second, and scipy

    # from_delayed and concatenate would drop empty blocks.
    name = new_key("outputs")
    take = delayed(list.__getitem__, pure=False)
    taken = [
        take(part, number, dask_key_name=f"{name}-{i}") for i, part in enumerate(parts)
    ]
    inner = (0,) * (empty.ndim - 1)
    layer: Any = {(name, i, *inner): part.key for i, part in enumerate(taken)}
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=taken),
        name,
        chunks=(tuple(rows), *((size,) for size in empty.shape[1:])),
        meta=empty,
    )


def collection_of_tables(
    parts: Sequence[Delayed],
    empty: Tree,
    frame: Any,
    values: Sequence[Any],
    names: Sequence[Any] | None,
) -> Tree:
    """Return a tree of dataframes and series with the index and divisions of a frame.

    `values` has a list for each part: the partitions that its outputs are computed
    from, that of the frame first. See `tables_of`.
    """
    check_tabular(empty, "dask.dataframe; use X.to_dask_array(lengths=True)")
    leaves = batching.leaves(empty)

    def lazy_table(outputs: Sequence[int], columns: Columns) -> Any:
        import dask.dataframe

        table = functools.partial(_table, outputs, columns)
        make = delayed(_table_of_part, pure=False)
        return dask.dataframe.from_delayed(
            [make(table, *part) for part in zip(parts, values, strict=True)],
            meta=table(leaves, frame._meta),
            divisions=frame.divisions,
            verify_meta=False,
        )

    return tables_of(empty, names, lazy_table)


def pandas_of(outputs: Tree, frame: Any, names: Sequence[Any] | None) -> Tree:
    """Return outputs as dataframes and series with the index of a frame."""
    leaves = batching.leaves(outputs)

    def table(numbers: Sequence[int], columns: Columns) -> Any:
        return _table(numbers, columns, leaves, frame)

    return tables_of(outputs, names, table)


def check_tabular(outputs: Tree, kind: str) -> None:
    """Refuse outputs with more than two axes; `kind` names the table and a remedy."""
    for leaf in batching.leaves(outputs):
        if leaf.ndim > 2:
            raise ModelError(
                f"the output has the shape {leaf.shape[1:]} for each row, which does "
                f"not fit into a {kind}, or pass a postprocess that returns one or two "
                "axes"
            )


def tables_of(
    outputs: Tree,
    names: Sequence[Any] | None,
    table: Callable[[Sequence[int], Columns], Any],
) -> Tree:
    """Return a tree of tables; `table` creates one from the positions of its outputs.

    A dict of outputs with one number per row becomes one dataframe with these columns.
    Each other output becomes a table: a series if it has one number per row.
    """
    count = len(batching.leaves(outputs))
    if isinstance(outputs, dict) and all(
        isinstance(leaf, np.ndarray) and leaf.ndim == 1 for leaf in outputs.values()
    ):
        return table(range(count), tuple(outputs))
    if isinstance(outputs, np.ndarray):
        fit = names is not None and outputs.shape[1:] == (len(names),)
        return table([0], tuple(names or ()) if fit else None)
    return batching.with_leaves(outputs, [table([i], None) for i in range(count)])


def _table_of_part(
    table: Callable[[Sequence[np.ndarray], Any], Any],
    leaves: Sequence[np.ndarray],
    values: list[Any],
) -> Any:
    return table(leaves, values[0])


def _table(
    outputs: Sequence[int],
    columns: Columns,
    leaves: Sequence[np.ndarray],
    like: Any,
) -> Any:
    """Return some outputs of a partition as a pandas object with its index."""
    import pandas

    arrays = [leaves[number] for number in outputs]
    if arrays[0].ndim == 2:
        return pandas.DataFrame(arrays[0], index=like.index, columns=columns)
    if columns is None:
        return pandas.Series(arrays[0], index=like.index)
    named = dict(zip(columns, arrays, strict=True))
    return pandas.DataFrame(named, index=like.index)
