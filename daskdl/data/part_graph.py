"""One part of Dask collections: the tasks that make it, run in the calling thread.

A part is computed by whoever trains on it, in its own process: nobody waits for the
scheduler, and nothing of it is kept.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from dask._task_spec import convert_legacy_graph

from daskdl.data import batching
from daskdl.data.batching import Rows


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
