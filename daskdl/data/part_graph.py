"""One part of Dask collections: the tasks that make it, run in the calling thread.

A part is computed by whoever trains on it, in its own process: nobody waits for the
scheduler, and nothing of it is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from dask.local import get_sync
from dask.optimization import cull

from daskdl.data import trees
from daskdl.data.trees import Rows


class _Held:
    """A task that returns a value as it is; Dask looks into lists and tuples."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


@dataclass(frozen=True)
class PartGraph:
    """What is needed to compute one part; pickles with cloudpickle.

    Attributes:
        graph: Tasks by key, of this part alone.
        keys: Of the values that `finish` gets.
        needs: Keys of results that are not in the graph.
        finish: Makes rows of the values.
    """

    graph: Mapping[Any, Any]
    keys: tuple[Any, ...]
    needs: tuple[Any, ...]
    finish: Callable[[list[Any]], Rows]

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
                self.graph, self.keys[start : start + width], self.needs, finish
            )
            found.append((name, partial(own.rows, held)))
            start += width
        return found

    def _values(self, keys: Sequence[Any], held: Mapping[Any, Any]) -> list[Any]:
        graph = dict(self.graph) | {key: (_Held(held[key]),) for key in self.needs}
        own, _ = cull(graph, list(keys))
        # Not the scheduler of whatever client there may be.
        return list(get_sync(own, list(keys)))


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
        return trees.joined_rows(loaded)
