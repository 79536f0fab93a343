"""Outputs as ``dask.array``, in the blocks of the rows.

Keys of examples: what is one, and how it is written without pickle.

A bag of pairs may be of (key, x) or of (x, y). What a pair is, is seen from its first
member: text, bytes, a UUID or a date is no input for a model.

Single examples, as bags have them and lists of Delayed objects may have them.

They may have several shapes: those of one shape are asked about together, and what
comes out is put back into the order of the examples.

Notes on errors of the user's code: where it was, beside its own traceback.

Rows to rehearse with, of data that show none before they are computed.

Parts are looked at one after the other until one has rows: what is lazy is not gone
through as a whole for that.

What all tasks of a lazy result need, where each worker gets it once.

It is a task of its own, so that Dask sends its result to each worker that needs it,
once, lets go of it after its last use, and makes it again if the worker that has it
dies. Data that are scattered cannot be made again: Dask keeps one copy of them.

Outputs as tables of pandas and ``dask.dataframe``, with the index of the rows.

What is asked about a lazy collection: a lazy one of the same kind.

One task for each partition, computed when it is asked for by whoever does that.
"""

import base64
import copy
import dataclasses
import datetime
import json
import math
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.dask_collections import (
    Collections,
    Finish,
    is_bag,
    pair,
    pairs,
    stacked,
    tasks_of,
)
from daskdl.data.distribute import each_part, new_key, workers_of
from daskdl.data.source import STREAMED_ROWS, Facts, Source
from daskdl.data.tables import is_dask_array
from daskdl.errors import DataError, ModelError
from daskdl.serialization import Packed


def lazy_array(
    parts: Sequence[Delayed], number: int, empty: np.ndarray, rows: Sequence[float]
) -> Any:
    """One array; an empty block stays one, which concatenate drops.

    Args:
        parts: The outputs of each block, as a list of all.
        number: Which of these.
        empty: The same of no rows.
        rows: Of each block; NaN if it is not known.
    """
    import dask.array  # takes half a second, and scipy

    name = new_key("outputs")
    inner = (0,) * (empty.ndim - 1)
    take = delayed(list.__getitem__, pure=False)
    taken = [
        take(part, number, dask_key_name=f"{name}-{i}") for i, part in enumerate(parts)
    ]
    layer: dict[Any, Any] = {
        (name, i, *inner): part.key for i, part in enumerate(taken)
    }
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=taken),
        name,
        chunks=(tuple(rows), *((size,) for size in empty.shape[1:])),
        meta=empty,
    )


_NAMES = (str, bytes, uuid.UUID, datetime.date, np.datetime64)
_NUMBERS = (int, np.integer)
_ALLOWED = "str, bytes, int, UUID, date, datetime or a tuple of these"


def is_keyed(example: Any) -> bool:
    """Whether an example is (key, x), or (key, (x, y)), rather than (x, y) or x.

    Args:
        example: Of a bag. It is if it is a pair whose first member is text, bytes, a
            UUID or a date; or a whole number, if arrays follow; or a tuple of such.

    Example:
        >>> is_keyed(("cat-7", np.zeros(3))), is_keyed((7, np.zeros(3)))
        (True, True)
        >>> is_keyed((np.zeros(3), 7)), is_keyed((7, 1)), is_keyed(np.zeros(3))
        (False, False, False)
    """
    if not _is_pair(example):
        return False
    key, rest = example
    if not _is_key(key):
        return False
    x, _ = pair(rest)
    arrays = all(isinstance(leaf, np.ndarray | Tensor) for leaf in batching.leaves(x))
    return arrays or _is_name(key)


def split(examples: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
    """Keys and what they belong to, of pairs.

    Args:
        examples: Pairs (key, x).
        name: Of the part, for messages.

    Raises:
        DataError: If one is no pair.
    """
    for number, example in enumerate(examples):
        if not _is_pair(example):
            raise DataError(
                f"example {number} of {name} must be a pair (key, x), as the others "
                f"are, got a {type(example).__name__}; without keys give keyed=False"
            )
    return [key for key, _ in examples], [rest for _, rest in examples]


def written(keys: Sequence[Any]) -> bytes:
    """Keys as JSON, to be had back exactly.

    Raises:
        DataError: If one is of another kind.

    Example:
        >>> written(["a", (1, b"b")])
        b'["a", {"tuple": [1, {"bytes": "Yg=="}]}]'
        >>> read(written(["a", (1, b"b")]))
        ['a', (1, b'b')]
    """
    return json.dumps([_plain(key) for key in keys]).encode()


def read(content: bytes) -> list[Any]:
    """What `written` has written."""
    return [_key(plain) for plain in json.loads(content)]


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields")
    )


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_key, value))
    return isinstance(value, _NAMES + _NUMBERS) and not isinstance(value, bool)


def _is_name(key: Any) -> bool:
    """Whether a key is no number, nor only numbers."""
    if isinstance(key, tuple):
        return any(map(_is_name, key))
    return isinstance(key, _NAMES)


def _plain(key: Any) -> Any:
    if isinstance(key, np.generic):
        return {"numpy": [key.dtype.str, base64.b64encode(key.tobytes()).decode()]}
    if type(key) in (str, int, bool, float):
        return key
    if isinstance(key, tuple) and not hasattr(key, "_fields"):
        return {"tuple": [_plain(part) for part in key]}
    for kind, (cls, write, _) in _KINDS.items():
        if type(key) is cls:
            return {kind: write(key)}
    raise DataError(
        f"keys must be {_ALLOWED} to be written, got {key!r}, a {type(key).__name__}"
    )


def _key(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_key(part) for part in content)
    if kind == "numpy":
        dtype, encoded = np.dtype(content[0]), base64.b64decode(content[1])
        # Empty text has no bytes to look at.
        return np.frombuffer(encoded, dtype)[0] if dtype.itemsize else dtype.type()
    _, _, read_one = _KINDS[kind]
    return read_one(content)


_KINDS: dict[str, tuple[type, Any, Any]] = {
    "bytes": (bytes, lambda key: base64.b64encode(key).decode(), base64.b64decode),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "datetime": (
        datetime.datetime,
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}


Ask = Callable[[Iterator[Rows]], Tree]  # of parts; the outputs of all their rows


@dataclass(frozen=True)
class _AsIs(Finish):
    """The one value, in the place of x."""

    @override
    def __call__(self, values: list[Any], part: int) -> Rows:
        (value,) = values
        return value, None


class Examples(Collections):
    """Parts of single examples, or of rows, which nobody has put together yet.

    Args:
        collection: A bag, whose partitions are examples; or a list of Delayed objects
            and futures, of which each is a list of examples, or else (X, y) or X of
            several rows.
        keyed: Whether examples are pairs (key, x); None: it is seen from the first.

    Attributes:
        reading: How parts are read.
    """

    reading: "Reading"

    def __init__(self, collection: Any, keyed: bool | None) -> None:
        tasks, found = tasks_of(collection)
        super().__init__(tasks, [(key,) for key in found], _AsIs())
        rows = pairs(collection).finish
        self.reading = Reading(rows, is_bag(collection), keyed)


@dataclass(frozen=True)
class Reading:
    """How a part of `Examples` is read; picklable.

    Attributes:
        rows: Makes rows of a value that is no list of examples.
        bag: Whether every value is one.
        keyed: Whether examples have keys; None: not known yet.
    """

    rows: Finish
    bag: bool
    keyed: bool | None

    def is_list(self, value: Any) -> bool:
        """Whether the value of a part is a list of examples."""
        return self.bag or isinstance(value, list)

    def answers(self, ask: Ask, value: Any, part: int) -> Any:
        """What comes out for a part, in its order.

        Args:
            ask: Called once for each shape.
            value: Of the part.
            part: Its number.

        Returns:
            Of a list of examples, or a partition of a bag, a list of outputs or of
            pairs (key, output); else a tree of arrays.
        """
        if not self.is_list(value):
            return ask(iter([self.rows([value], part)]))
        name = f"part {part}"
        examples = list(value)
        if not self.keyed:
            return _answers(ask, examples, name)
        own, examples = split(examples, name)
        return list(zip(own, _answers(ask, examples, name), strict=True))

    def first(self, value: Any, part: int) -> tuple[Rows | None, bool]:
        """Rows to rehearse with, or None if there are none; and whether it has keys."""
        if not self.is_list(value):
            rows = self.rows([value], part)
            few = batching.of_both(lambda tree: batching.rows(tree, slice(2)), rows)
            return (few if batching.length(rows[0]) else None), False
        examples = list(value)[:1]
        if not examples:
            return None, False
        keyed = is_keyed(examples[0]) if self.keyed is None else self.keyed
        if keyed:
            _, examples = split(examples, f"part {part}")
        return stacked(examples, f"part {part}"), keyed


def _answers(ask: Ask, examples: Sequence[Any], name: str) -> list[Tree]:
    """The output of each example, asked for shape by shape."""
    answers: list[Tree] = [None] * len(examples)
    for places in _by_shape(examples):
        cuts = range(0, len(places), STREAMED_ROWS)
        some = ([examples[i] for i in places[c : c + STREAMED_ROWS]] for c in cuts)
        outputs = ask(stacked(together, name) for together in some)
        for row, place in enumerate(places):
            answers[place] = batching.rows(outputs, row)
    return answers


def _by_shape(examples: Sequence[Any]) -> list[list[int]]:
    """Places of the examples that have one shape, for each of the shapes.

    Example:
        >>> _by_shape([np.zeros(2), np.zeros(3), np.ones(2)])
        [[0, 2], [1]]
    """
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, example in enumerate(examples):
        named = batching.named_both(pair(example))
        shapes = tuple((name, *np.shape(leaf)) for name, leaf in named.items())
        places[shapes].append(place)
    return list(places.values())


class Noted(AbstractContextManager[None]):
    """Whatever is raised inside gets a note, and is raised.

    Args:
        note: Such as "in part 3".

    Example:
        >>> with Noted("in part 3"):
        ...     raise ValueError("no")
        Traceback (most recent call last):
        ValueError: no
        in part 3
    """

    def __init__(self, note: str) -> None:
        self._note = note

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self._note)


S = TypeVar("S", bound=Source)


def with_first_rows(source: Source, client: Client | Literal[False]) -> Source:
    """The same source, with rows to rehearse with.

    Args:
        source: Of any kind; of `Examples` it is then known whether they have keys.
        client: Of the cluster that computes parts; False: this process does.

    Raises:
        DataError: If there are no rows at all. What loading raises comes out.
    """
    if isinstance(source, Examples):
        return _examples(source, client)
    if source.first is not None:
        return source
    for part in range(source.parts):
        for _, facts in each_part(source, _facts, client, parts=[part]):
            if facts.rows:
                return _showing(source, facts.first)
    raise _empty(source)


def _examples(source: Examples, client: Client | Literal[False]) -> Examples:
    look = _Look(source.reading)
    for part in range(source.parts):
        for _, (first, keyed) in each_part(source, look, client, parts=[part]):
            if first is not None:
                shown = _showing(source, first)
                shown.reading = dataclasses.replace(source.reading, keyed=keyed)
                return shown
    raise _empty(source)


@dataclasses.dataclass(frozen=True)
class _Look:
    """Looks at the first example of a part; picklable."""

    reading: Reading

    def __call__(self, source: Source, part: int) -> tuple[Rows | None, bool]:
        with Noted(f"in {source.name(part)}"):
            value, _ = source.load(part)
            return self.reading.first(value, part)


def _facts(source: Source, part: int) -> Facts:
    with Noted(f"in {source.name(part)}"):
        return source.look(part)


def _showing(source: S, first: Rows) -> S:
    other = copy.copy(source)
    other.first = first
    return other


def _empty(source: Source) -> DataError:
    return DataError(f"X must not be empty, got no rows in {source.parts} parts")


# Dask warns of graphs above 10 MB; and a scheduler that reads a gigabyte in one message
# does nothing else meanwhile.
BLOCK_BYTES = 4 * 2**20


def held(packed: Packed[Any], client: Client | Literal[False]) -> Any:
    """What tasks can depend on, to get the same as one object per worker.

    Args:
        packed: Its bytes go to the scheduler, which keeps them as long as what is
            returned, or something made of it, is there.
        client: Of the cluster that computes; False: whoever does.

    Returns:
        A future, or without a client a Delayed object.
    """
    name = new_key("model")
    if client is False:
        return delayed(packed, name=name, traverse=False)
    workers_of(client)  # there must be some
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
    # The blocks are let go of: Dask drops them when they have been put together.
    kind = type(packed)
    return client.submit(_joined, kind, blocks, packed.argument, key=name, pure=False)


def _block(block: np.ndarray) -> np.ndarray:
    return block


def _joined(
    kind: type[Packed[Any]], blocks: Sequence[np.ndarray], argument: str
) -> Packed[Any]:
    whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return kind.of(whole, argument)


@dataclass(frozen=True)
class Table:
    """How some of the outputs make a table; picklable.

    Attributes:
        leaves: Numbers of the outputs in it.
        columns: Their names: one for each output, or for each column of the only one;
            None: 0, 1, ...
        series: Whether it is a series rather than a frame.
    """

    leaves: tuple[int, ...]
    columns: tuple[Any, ...] | None
    series: bool

    def made(self, leaves: Sequence[np.ndarray], index: Any) -> Any:
        """The pandas object of one partition.

        Args:
            leaves: All outputs.
            index: Of the rows.
        """
        import pandas

        own = [leaves[number] for number in self.leaves]
        if self.series:
            return pandas.Series(own[0], index=index)
        if len(own) == 1 and own[0].ndim == 2:
            return pandas.DataFrame(own[0], index=index, columns=self.columns)
        named = dict(zip(self.columns or (), own, strict=True))
        return pandas.DataFrame(named, index=index)


def tables_of(empty: Tree, names: Sequence[Any] | None) -> Tree:
    """How outputs make tables: a tree of lists of one `Table`.

    A dict of outputs with one number for each row is one table with these columns. Else
    each output is a table of its own: a series if it has one number for each row.

    Args:
        empty: The outputs of no rows.
        names: For the columns of the only output, if there are as many.

    Raises:
        ModelError: If an output has more than one axis for each row.

    Example:
        >>> zero = np.zeros(0)
        >>> tables_of({"a": zero, "b": zero}, None)
        [Table(leaves=(0, 1), columns=('a', 'b'), series=False)]
    """
    leaves = batching.leaves(empty)
    for leaf in leaves:
        if leaf.ndim > 2:
            raise ModelError(
                f"model gives the shape {leaf.shape[1:]} for each row, which does not "
                "fit into a dask.dataframe; use X.to_dask_array(lengths=True), or give "
                "a postprocess that returns fewer numbers"
            )
    if isinstance(empty, dict) and all(
        isinstance(leaf, np.ndarray) and leaf.ndim == 1 for leaf in empty.values()
    ):
        return [Table(tuple(range(len(leaves))), tuple(empty), series=False)]
    if isinstance(empty, np.ndarray) and empty.ndim == 2 and names is not None:
        fit = len(names) == empty.shape[1]
        return [Table((0,), tuple(names) if fit else None, series=False)]
    made = [[Table((i,), None, leaf.ndim == 1)] for i, leaf in enumerate(leaves)]
    return batching.filled(empty, made)


def lazy_table(
    table: Table,
    parts: Sequence[Delayed],
    empty: Tree,
    frame: Any,
    partitions: Sequence[Delayed],
) -> Any:
    """A dataframe or a series with the index and the divisions of another.

    Args:
        table: What it is of.
        parts: The outputs of each partition, as a list of all.
        empty: The outputs of no rows.
        frame: The other one.
        partitions: Of that.
    """
    import dask.dataframe

    make = delayed(_made, pure=False)
    made = [make(table, *both) for both in zip(parts, partitions, strict=True)]
    return dask.dataframe.from_delayed(
        made,
        meta=table.made(batching.leaves(empty), frame._meta.index),
        divisions=frame.divisions,
        verify_meta=False,
    )


def _made(table: Table, leaves: Sequence[np.ndarray], partition: Any) -> Any:
    return table.made(leaves, partition.index)


class LazyParts(NamedTuple):
    """What comes out, partition by partition.

    Attributes:
        kind: What they are put together to: ``"array"``, ``"table"``, ``"bag"`` or
            ``"list"``.
        values: Of arrays and tables Delayed lists of all outputs; of bags and lists
            Delayed outputs of the examples.
    """

    kind: Literal["array", "table", "bag", "list"]
    values: list[Delayed]


def lazy_outputs(
    X: Any,
    source: Collections,
    ask: Ask,
    empty: Tree,
    client: Client | Literal[False],
    y: Any = None,
    names: Sequence[Any] | None = None,
) -> Any:
    """Make the outputs of a collection.

    Args:
        X: The collection, a tree of ``dask.array`` and ``dask.dataframe``, a bag, or a
            list of Delayed objects and futures.
        source: The same, as it is cut; of bags and lists `Examples`.
        ask: What comes out for rows, a row for each; travels once to each worker.
        empty: The outputs of no rows.
        client: Its cluster holds what is asked as long as the result lives, wherever
            that is; False: it goes with the tasks.
        y: Labels, if they are collections of their own; in `source`, too.
        names: For the columns of a single table, if there are as many.

    Returns:
        For a bag a bag of the outputs of each example, or of pairs (key, output); for a
        list one of Delayed objects; else by the kind of the first collection, a
        ``dask.array`` or a ``dask.dataframe`` with its index, in a tree if there are
        several outputs.

    Raises:
        ModelError: If outputs do not fit into a ``dask.dataframe``.
    """
    kind, values = lazy_parts(X, source, ask, client, y)
    if kind == "list":
        return values
    if kind == "bag":
        from dask.bag import from_delayed

        return from_delayed(values)
    first = batching.leaves(X)[0]
    if kind == "array":
        rows = first.chunks[0]
        leaves = enumerate(batching.leaves(empty))
        return batching.filled(
            empty, [lazy_array(values, i, x, rows) for i, x in leaves]
        )
    partitions = first.to_delayed()

    def frame(boxed: list[Table]) -> Any:
        return lazy_table(boxed[0], values, empty, first, partitions)

    return batching.mapped(frame, tables_of(empty, names))


def lazy_parts(
    X: Any,
    source: Collections,
    ask: Ask,
    client: Client | Literal[False],
    y: Any = None,
) -> LazyParts:
    """The outputs of a collection in parts, see `lazy_outputs`."""
    shared, name = held(Packed(ask, "model"), client), new_key("predict")
    values = zip(*_partitions(X, y), strict=True)
    if isinstance(source, Examples):
        answer = delayed(answers_of, pure=False)
        made = [
            answer(shared, source.reading, part, value, dask_key_name=(name, part))
            for part, (value,) in enumerate(values)
        ]
        return LazyParts("bag" if is_bag(X) else "list", made)
    task = delayed(outputs_of, pure=False)
    made = [
        task(shared, source.finish, part, *own, dask_key_name=(name, part))
        for part, own in enumerate(values)
    ]
    return LazyParts("array" if is_dask_array(batching.leaves(X)[0]) else "table", made)


def outputs_of(
    ask: Packed[Ask], finish: Finish, part: int, *values: Any
) -> list[np.ndarray]:
    """The outputs of one partition, leaf by leaf; the task behind it."""
    with Noted(f"in part {part}"):
        rows = finish(list(values), part)
        return batching.leaves(ask.shared()(iter([rows])))


def answers_of(ask: Packed[Ask], reading: Reading, part: int, value: Any) -> Any:
    """The outputs of a partition of a bag, or of one of a list."""
    with Noted(f"in part {part}"):
        return reading.answers(ask.shared(), value, part)


def _partitions(X: Any, y: Any) -> list[Sequence[Any]]:
    """Of each collection its partitions, Delayed or futures."""
    if isinstance(X, list):
        return [X]
    if is_bag(X):
        return [X.to_delayed()]
    leaves = list(batching.named_both((X, y)).values())
    first = leaves[0]
    if is_dask_array(first) and not math.isnan(first.shape[0]):
        rows = {0: first.chunks[0]}
        leaves = [own.rechunk(rows) if is_dask_array(own) else own for own in leaves]
    return [list(np.ravel(own.to_delayed())) for own in leaves]
