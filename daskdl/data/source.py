"""One part of Dask collections: the tasks that make it, run in the calling thread.

A part is computed by whoever trains on it, in its own process: nobody waits for the
scheduler, and nothing of it is kept.

What the user gave, in parts that are loaded one at a time.

A part is what comes in one go: a chunk, a partition, a file, a range of a dataset. How
an epoch goes through the rows of the parts is decided in :mod:`daskdl.channel`. A new
kind of data is a subclass of :class:`Source` in a file of its own, and a line in
:func:`daskdl.data.inputs.source_of`. No cluster here: who has one passes results in.
"""

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

from dask._task_spec import convert_legacy_graph
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Kinds, Rows


@dataclass(frozen=True)
class PartGraph:
    """What is needed to compute one part; pickles with cloudpickle.

    Attributes:
        graph: Tasks by key, of this part alone.
        keys: Of the values that `finish` gets.
        needs: Keys of results that are not in the graph.
        finish: Makes rows of the values.
        name: What the part is called in messages; "" if only its number is known.
    """

    graph: Mapping[Any, Any]
    keys: tuple[Any, ...]
    needs: tuple[Any, ...]
    finish: Callable[[list[Any]], Rows]
    name: str = ""

    def rows(self, held: Mapping[Any, Any]) -> Rows:
        """Compute the part here and now.

        Args:
            held: The values of what it needs, by key.

        Raises:
            DataError: If what comes out cannot be used; what a task raises comes out
                as it is.
        """
        return self.finish(self._values(self.keys, held))

    def separate(self, held: Mapping[Any, Any]) -> list[tuple[str, Callable[[], Rows]]]:
        """See `Source.separate`; arguments as of `rows`."""
        if not isinstance(self.finish, Joined):
            return []
        found: list[tuple[str, Callable[[], Rows]]] = []
        start = 0
        for name, width, finish in self.finish.members:
            own = PartGraph(
                self.graph, self.keys[start : start + width], self.needs, finish, name
            )
            found.append((name, partial(own.rows, held)))
            start += width
        return found

    def _values(self, keys: Sequence[Any], held: Mapping[Any, Any]) -> list[Any]:
        # By itself: a scheduler does more for each task than a small one does.
        graph = convert_legacy_graph(self.graph, {*self.graph, *self.needs})
        order = _depth_first(graph, keys)
        asked = Counter(need for key in order for need in graph[key].dependencies)
        asked.update(keys)
        values = {key: held[key] for key in self.needs}
        for key in order:
            values[key] = graph[key](values)
            for need in graph[key].dependencies:
                asked[need] -= 1
                if not asked[need]:
                    del values[need]
        return [values[key] for key in keys]


def _depth_first(graph: Mapping[Any, Any], keys: Sequence[Any]) -> list[Any]:
    """All keys of tasks that these ask for, each after those that it asks for."""
    found: dict[Any, None] = {}
    stack = list(reversed(keys))
    while stack:
        key = stack[-1]
        needs = graph[key].dependencies if key in graph and key not in found else ()
        missing = [need for need in needs if need in graph and need not in found]
        if missing:
            stack += sorted(missing, key=str, reverse=True)
            continue
        stack.pop()
        if key in graph:
            found[key] = None
    return list(found)


class Member(NamedTuple):
    """One of several parts that are computed together."""

    name: str
    values: int  # that it is made of
    finish: Callable[[list[Any]], Rows]


@dataclass(frozen=True)
class Joined:
    """Makes rows of the values of several parts, one part after the other.

    Attributes:
        members: The parts.
    """

    members: Sequence[Member]

    def __call__(self, values: list[Any]) -> Rows:
        """Make rows of all values, which are in the order of the parts."""
        following = iter(values)
        loaded = [
            member.finish(list(islice(following, member.values)))
            for member in self.members
        ]
        return batching.joined_rows(loaded)


SHOWN_ROWS = 2  # of the first part, to rehearse a step with

# At a time in a pass, of a part that may not fit into memory.
STREAMED_ROWS = 1024


class Facts(NamedTuple):
    """What is known of a part that has been loaded once."""

    rows: int
    first: Rows  # its first rows, at most `SHOWN_ROWS`


class Source(ABC):
    """One kind of data. It travels to each worker once, and parts are loaded there.

    Attributes:
        parts: How many there are, >= 1.
        lengths: Rows of each part; None: not known before each was looked at.
        first: Rows like all others, at least one, to rehearse a step with; None: not
            known before. Their values may be zeros.
        sequential: Whether a part can only be gone through from its beginning, and may
            not fit into memory: `stream` is then used instead of `load`, and neither
            are rows shuffled nor is a part shared.
        classes: Names of the labels 0, 1, ... where there are names; else None.
        here: Whether the rows are in this process's memory.
        left_out: Examples that cannot be read and are in no part any more; a part of
            which nobody knows how many it has counts as one for each of its files.
        unlike: What the rows of each part are like, see `daskdl.data.batching.kinds`;
            None: all are alike.
        given: Whether the user has said what a part is, which then may be small.
        apart: Whether each part is sent by itself, as `packed` has it, to the one who
            is to load it; else the whole source goes to each worker once.
    """

    parts: int
    lengths: Sequence[int] | None
    first: Rows | None
    sequential: bool = False
    classes: Sequence[str] | None = None
    here: bool = False
    left_out: int = 0
    unlike: Sequence[Kinds] | None = None
    given: bool = False
    apart: bool = False

    @abstractmethod
    def load(self, part: int) -> Rows:
        """Load a part, here and now; any thread may, and several at a time.

        Args:
            part: Its number, from 0.

        Returns:
            Trees (x, y) of numpy arrays of equal length, to be read only; y is None if
            there are no labels.

        Raises:
            DataError: Naming the part if it cannot be used. What the user's own
                loading raises comes out as it is.
        """

    def stream(self, part: int, rows: int) -> Iterator[Rows]:
        """Yield a part bit by bit.

        Args:
            part: Its number, from 0.
            rows: About so many at a time.
        """
        raise NotImplementedError(f"{type(self).__name__} is not sequential")

    def packed(self, part: int) -> Rows | PartGraph:
        """What is sent of a part; of sources only whose parts are sent `apart`."""
        raise NotImplementedError(f"{type(self).__name__} is sent as a whole")

    def needs(self, part: int) -> tuple[str, ...]:
        """Dask keys of the results that a part is made from."""
        return ()

    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        """What a part is made of, by name, and what loads it alone.

        Args:
            part: Its number, from 0.

        Returns:
            Nothing if it can only be had as a whole.
        """
        return ()

    def together(self, groups: Sequence[Sequence[int]]) -> "Source":
        """The same rows in fewer parts, each of some parts of this source.

        Args:
            groups: Their numbers, in order. Those in none have no rows.
        """
        return Together(self, groups)

    def name(self, part: int) -> str:
        """What a part is called in messages; of a file its URL."""
        return f"part {part}"

    def look(self, part: int) -> Facts:
        """Learn how many rows a part has, by loading it; cheaper where that can be.

        Args:
            part: Its number, from 0.
        """
        return facts_of(self.load(part))

    def known(self, facts: Sequence[Facts]) -> Self:
        """The same source, now that each part has been looked at.

        Args:
            facts: Of each part, in order.
        """
        raise NotImplementedError(f"{type(self).__name__} knows its lengths")


class Together(Source):
    """Several parts of a source in each part, loaded one after the other.

    Args:
        source: Whose lengths and first rows are known.
        groups: Numbers of parts, which have the same shapes.
    """

    lengths: Sequence[int]

    def __init__(self, source: Source, groups: Sequence[Sequence[int]]) -> None:
        assert source.lengths is not None, "small parts are known ones"
        lengths = source.lengths
        self._source, self._groups = source, groups
        self.parts = len(groups)
        self.lengths = [sum(lengths[part] for part in group) for group in groups]
        self.first, self.classes = source.first, source.classes
        self.left_out = source.left_out

    @override
    def load(self, part: int) -> Rows:
        loaded = [self._source.load(own) for own in self._groups[part]]
        return batching.joined_rows(loaded)

    @override
    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        source = self._source
        found: list[tuple[str, Callable[[], Rows]]] = []
        for own in self._groups[part]:
            alone = (source.name(own), functools.partial(source.load, own))
            found += source.separate(own) or [alone]
        return found

    @override
    def name(self, part: int) -> str:
        first, *others = self._groups[part]
        name = self._source.name(first)
        return f"{name} and {len(others)} more" if others else name


def rows_of_part(source: Source, part: int, rows: int) -> Iterator[Rows]:
    """A part as a whole, or bit by bit where it cannot be had otherwise.

    Args:
        source: Any.
        part: Its number.
        rows: About so many of a sequential one at a time.
    """
    if source.sequential:
        yield from source.stream(part, rows)
    else:
        yield source.load(part)


def is_known(source: Source) -> bool:
    """Whether as much is known of it as is needed to begin."""
    lengths = source.sequential or source.lengths is not None
    return lengths and source.first is not None


def rows_in(source: Source) -> int | None:
    """Rows of all parts together; None if that is not known."""
    return None if source.lengths is None else sum(source.lengths)


def facts_of(rows: Rows) -> Facts:
    """What is to be known of a part that is here; nothing of it is kept."""

    def few(tree: batching.Tree) -> batching.Tree:
        return batching.mapped(lambda leaf: leaf[:SHOWN_ROWS].copy(), tree)

    return Facts(batching.length(rows[0]), batching.of_both(few, rows))


def shown_rows(rows: Rows) -> Rows:
    """A copy of the first `SHOWN_ROWS` rows, repeated if there are fewer.

    Example:
        >>> import numpy as np
        >>> shown_rows(({"a": np.array([7])}, None))
        ({'a': array([7, 7])}, None)
    """
    which = [i % batching.length(rows[0]) for i in range(SHOWN_ROWS)]
    return batching.of_both(lambda tree: batching.rows(tree, which), rows)
