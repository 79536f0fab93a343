"""One part of Dask collections: the tasks that make it, run in the calling thread.

A part is computed by whoever trains on it, in its own process: nobody waits for the
scheduler, and nothing of it is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dask.local import get_sync

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
        graph = dict(self.graph) | {key: (_Held(held[key]),) for key in self.needs}
        # Not the scheduler of whatever client there may be.
        values = get_sync(graph, list(self.keys))
        return self.finish(list(values))
