"""The interface of all kinds of data: a `Source`, divided into parts.

A part is a range of rows in memory, a partition of a Dask collection, a file or a group
of files, a range of the items of a dataset, or a share of a stream. The tasks of a
partition are computed in the thread that loads the part.
"""

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

# Private in dask 2025.5 to 2026.8: nothing public executes a graph without a scheduler.
from dask._task_spec import convert_legacy_graph, execute_graph
from dask.optimization import cull
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, RowSpec
from daskdl.data.named_columns import NO_COLUMNS, Columns, NamedRows
from daskdl.errors import DataError, count_of

SHOWN_ROWS = 2  # for a dry run

# Rows read at a time from a part that may not fit into memory.
STREAMED_ROWS = 1024

Piece = tuple[str, Callable[[], Rows]]  # see `Source.pieces`
Pieces = Sequence[Piece]


class GraphPart(NamedTuple):
    """One of the parts of a `PartGraph`."""

    name: str
    keys: tuple[Any, ...]
    finish: Callable[[list[Any]], Rows]  # makes rows from the values of the keys
    rows: int | None = None  # counted when the part was computed before

    def of(self, values: Mapping[Any, Any]) -> Rows:
        """Make the rows of the part; refuse a part whose length has changed."""
        rows = self.finish([values[key] for key in self.keys])
        check_counted(self.name, rows, self.rows)
        return rows


@dataclass(frozen=True)
class PartGraph:
    """The tasks that compute one part, or several together; picklable."""

    name: str  # of the whole, for messages
    graph: Mapping[Any, Any]  # tasks by key, of these parts alone
    needs: tuple[Any, ...]  # keys of results that the tasks depend on
    members: tuple[GraphPart, ...]  # the parts, whose rows are joined

    def rows(self, held: Mapping[Any, Any]) -> Rows:
        """Compute the part in this thread; `held` has the values of `needs` by key."""
        keys = {key for member in self.members for key in member.keys}
        graph = convert_legacy_graph(self.graph, {*self.graph, *self.needs})
        values = execute_graph(graph, {key: held[key] for key in self.needs}, keys)
        return batching.joined([member.of(values) for member in self.members])

    def pieces(self, held: Mapping[Any, Any]) -> Pieces:
        """See `Source.pieces`."""
        if len(self.members) == 1:
            return []
        pieces = []
        for member in self.members:
            graph = culled(self.graph, member.keys)
            alone = PartGraph(member.name, graph, self.needs, (member,))
            pieces.append((member.name, functools.partial(alone.rows, held)))
        return pieces


def culled(graph: Mapping[Any, Any], keys: Sequence[Any]) -> dict[Any, Any]:
    """Return the tasks that the keys depend on."""
    tasks: dict[Any, Any] = cull(graph, [key for key in keys if key in graph])[0]
    return tasks


class Facts(NamedTuple):
    """Length and first rows of a part."""

    rows: int
    # At most `SHOWN_ROWS` rows, `NamedRows` of a part that has tables; None: no row can
    # be read.
    first_rows: Rows | None


class Source(ABC):
    """Data in parts, which are loaded one at a time, on a worker or in this process.

    A source is pickled to each worker once, unless it is `sent_by_part`.

    Attributes:
        parts: Number of parts, >= 1.
        lengths: Number of rows of each part; None: unknown, and counted in a pass over
            the parts unless the source is sequential.
        first_rows: One or more rows with the shapes and dtypes of all rows, for the dry
            run; the values may be zeros. None: unknown.
        sequential: Whether a part can only be read from its beginning, with `stream`
            instead of `load`, and may exceed the memory. The rows of such a part are
            not shuffled, and one replica reads the whole part.
        classes: Names of the labels 0, 1, ..., or None.
        columns: Names of the columns of the arrays that `load` makes of tables; None:
            not known before a part is loaded.
        training_columns: Column names of the training data, if the column names of this
            source have not been compared with them yet; None: nothing to compare.
        scaled_by: Digests of the normalizers that the rows went through when they were
            written, in order.
        in_memory: Whether the rows are in this process's memory.
        rows_in_memory: All rows in their original order, if they are arrays in this
            process's memory; otherwise None.
        block_lengths: Number of rows of each block, NaN if unknown, if the parts are
            the blocks of a ``dask.array``; otherwise None.
        left_out: Number of unreadable examples that are in no part; in a part of
            unknown length, each file counts as one example.
        part_specs: Names, shapes and dtypes of the arrays of each part, see
            `daskdl.data.batching.row_spec`; None: equal in all parts.
        mergeable: Whether small parts may be merged.
        lazy: Whether the data are a Dask collection; outputs are then lazy, too.
        has_part_names: Whether the names of the parts mean something to users, as the
            URLs of files do.
        keyable: Whether the examples may be pairs (key, x).
        one_example: Whether each piece of a part, see `pieces`, has exactly one row.
        sent_by_part: Whether each part is sent separately, as `content` returns it, to
            the worker that loads it; otherwise each worker gets the whole source once.
    """

    parts: int
    lengths: Sequence[int] | None
    first_rows: Rows | None
    sequential: bool = False
    classes: Sequence[str] | None = None
    columns: Columns | None = NO_COLUMNS
    training_columns: Columns | None = None
    scaled_by: Sequence[str] = ()
    in_memory: bool = False
    rows_in_memory: Rows | None = None
    block_lengths: Sequence[float] | None = None
    left_out: int = 0
    part_specs: Sequence[RowSpec] | None = None
    mergeable: bool = False
    lazy: bool = False
    has_part_names: bool = True
    keyable: bool = False
    one_example: bool = False
    sent_by_part: bool = False

    @abstractmethod
    def load(self, part: int) -> Rows:
        """Load a part; threads may load several at a time.

        Args:
            part: Its number, from 0.

        Returns:
            Trees (x, y) of numpy arrays of equal length, read only; y is None without
            labels.

        Raises:
            DataError: If the part, which is named, cannot be used. Errors of the user's
                own loading are passed on.
        """

    def load_counted(self, part: int) -> Rows:
        """Load a part; a DataError if its length differs from `lengths`."""
        rows = self.load(part)
        counted = None if self.lengths is None else self.lengths[part]
        check_counted(self.name(part), rows, counted)
        return rows

    def stream(self, part: int, rows: int) -> Iterator[Rows]:
        """Yield a part; a sequential one in pieces of about `rows` rows."""
        if self.sequential:
            raise NotImplementedError(f"{type(self).__name__} needs stream")
        yield self.load_counted(part)

    def prepare(self, client: Any) -> None:  # noqa: B027
        """Prepare to load parts on the cluster of a client; False: in this process.

        Called before the first part is loaded or sent, and maybe again.
        """

    def content(self, part: int) -> Rows | PartGraph:
        """Return the content to send for a part of a source that is `sent_by_part`."""
        return self.load_counted(part)

    def needs(self, part: int) -> tuple[Any, ...]:
        """Return the Dask keys of the results that a part depends on."""
        return ()

    def pieces(self, part: int) -> Pieces:
        """Return the pieces of a part: names, and functions that load each one.

        Empty if the part can only be loaded as a whole.
        """
        return ()

    def merged(self, groups: Sequence[Sequence[int]]) -> "Source":
        """Return a source with one part for each group; no group has empty parts."""
        return MergedParts(self, groups)

    def divided(self, parts: int) -> Self:
        """Return a stream in `parts` parts, unless the user chose the number of parts.

        Other sources are returned unchanged.

        Warns:
            UserWarning: If every part of the stream seems to have all items.
        """
        return self

    def in_parts(self, parts: int) -> Self:
        """Return rows in memory in at most `parts` parts, or more if they are large.

        Other sources are returned unchanged.
        """
        return self

    def in_one_part(self) -> Self:
        """Return rows in memory as one part; other sources are returned unchanged."""
        return self

    def weighted(self, weight: Any) -> Self:
        """Return the same rows with `Weighted` labels.

        Args:
            weight: (rows,), a finite number >= 0 for each row.

        Raises:
            DataError: If the rows are not arrays or tables, have no labels, or do not
                match the weights.
        """
        raise DataError(
            "sample_weight is for X and y that are arrays or tables, in memory or of "
            "Dask; for other data, make the weights a part of X, X=(X, weight), and "
            "weigh the rows in a step"
        )

    def arranged(self, columns: Columns, classes: Sequence[str] | None = None) -> Self:
        """Return the same rows, with the columns of tables in this order.

        Labels that name other classes than `classes` are refused when a part is loaded.

        Raises:
            DataError: If a table has other columns. Of parts that are not loaded yet,
                `load` raises it.
        """
        known = columns if self.columns is None else self.columns
        wanted = {**known, **columns}
        if classes is None and wanted == (self.columns or NO_COLUMNS):
            return self
        arranged = copy.copy(self)
        if not self.sequential and self.first_rows is not None:
            x, y = NamedRows.of(self.first_rows, known).arranged(columns)
            arranged.first_rows = x, y
        arranged.columns = wanted
        arranged._arrange_(known, columns, classes)
        return arranged

    def _arrange_(  # noqa: B027
        self, known: Columns, columns: Columns, classes: Sequence[str] | None
    ) -> None:
        """Let `load` return the columns of tables in the wanted order.

        A source that makes arrays of tables overrides it.
        """

    def name(self, part: int) -> str:
        """Return the name of a part for messages; for a file, its URL."""
        return f"part {part}"

    def facts(self, part: int) -> Facts:
        """Return length and first rows of a part; loads it if need be."""
        return facts_of(self.load_counted(part))

    def with_facts(self, facts: Sequence[Facts]) -> Self:
        """Return the same source with the lengths of its parts.

        Args:
            facts: Those of each part, in order; a source of files drops its empty
                parts.
        """
        counted = copy.copy(self)
        counted.lengths = [fact.rows for fact in facts]
        return counted


class MergedParts(Source):
    """Groups of parts of another source, with known lengths, as its parts."""

    def __init__(self, source: Source, groups: Sequence[Sequence[int]]) -> None:
        lengths = source.lengths
        assert lengths is not None
        self._source, self._groups = source, groups
        self.parts = len(groups)
        self.lengths = [sum(lengths[part] for part in group) for group in groups]
        self.first_rows, self.classes = source.first_rows, source.classes
        self.columns = source.columns
        self.left_out, self.sent_by_part = source.left_out, source.sent_by_part

    @override
    def load(self, part: int) -> Rows:
        return batching.joined(list(map(self._source.load_counted, self._groups[part])))

    @override
    def prepare(self, client: Any) -> None:
        self._source.prepare(client)

    @override
    def content(self, part: int) -> Rows | PartGraph:
        contents = [self._source.content(member) for member in self._groups[part]]
        graphs = [content for content in contents if isinstance(content, PartGraph)]
        if len(graphs) < len(contents):
            return self.load_counted(part)
        tasks = {key: task for graph in graphs for key, task in graph.graph.items()}
        needs = tuple(dict.fromkeys(key for graph in graphs for key in graph.needs))
        members = tuple(member for graph in graphs for member in graph.members)
        return PartGraph(self.name(part), tasks, needs, members)

    @override
    def needs(self, part: int) -> tuple[Any, ...]:
        needs_of_members = map(self._source.needs, self._groups[part])
        return tuple(dict.fromkeys(itertools.chain.from_iterable(needs_of_members)))

    @override
    def pieces(self, part: int) -> Pieces:
        pieces: list[Piece] = []
        for member in self._groups[part]:
            load = functools.partial(self._source.load_counted, member)
            pieces += self._source.pieces(member) or [(self._source.name(member), load)]
        return pieces

    @override
    def name(self, part: int) -> str:
        leader, *others = self._groups[part]
        name = self._source.name(leader)
        return f"{name} and {len(others)} more" if others else name


def check_counted(name: str, rows: Rows, counted: int | None) -> None:
    """Refuse rows of a part that are more or fewer than were counted, if any were."""
    if counted is not None and (length := batching.length(rows)) != counted:
        raise DataError(
            f"{name} has {count_of(length, 'row')}, but {counted} were counted "
            "before; a part must have the same rows each time it is loaded: do not "
            "change the data during a run, and persist() or pack computed data"
        )


def is_known(source: Source) -> bool:
    """Whether the first rows are known, and the lengths unless sequential."""
    lengths = source.sequential or source.lengths is not None
    return lengths and source.first_rows is not None


def rows_in(source: Source) -> int | None:
    """Total number of rows; None if unknown."""
    return None if source.lengths is None else sum(source.lengths)


def facts_of(rows: Rows) -> Facts:
    """Return the facts of loaded rows, which hold copies."""
    few = batching.tree_map(lambda leaf: leaf[:SHOWN_ROWS].copy(), rows)
    if isinstance(rows, NamedRows):
        few = NamedRows.of(few, rows.columns, rows.classes)
    return Facts(batching.length(rows), few)


def shown_rows(rows: Rows) -> Rows:
    """A copy of the first `SHOWN_ROWS` rows, repeated if there are fewer."""
    which = [i % batching.length(rows) for i in range(SHOWN_ROWS)]
    return batching.rows(rows, which)
