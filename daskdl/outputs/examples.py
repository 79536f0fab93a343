"""Single examples, as bags have them and lists of Delayed objects may have them.

They may have several shapes: those of one shape are asked about together, and what
comes out is put back into the order of the examples.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.collections import Collections, Finish, is_bag
from daskdl.data.graphs import tasks_of
from daskdl.data.pairs import pair, pairs, stacked
from daskdl.data.source import STREAMED_ROWS
from daskdl.outputs import keys

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
        own, examples = keys.split(examples, name)
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
        keyed = keys.is_keyed(examples[0]) if self.keyed is None else self.keyed
        if keyed:
            _, examples = keys.split(examples, f"part {part}")
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
