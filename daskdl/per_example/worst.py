"""The worst examples of a data set: which they are, and where they came from. No Dask.

An example is worse than another if its loss is larger, and worst if it is NaN; of
equal losses the one that comes first in the data is the worse one. That is a total
order, so the worst of some parts' worst are the worst of all, whoever comes first.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.errors import OptionError
from daskdl.per_example.scorer import Guessed, Scored

COLUMNS = (
    *("loss", "label", "predicted", "probability"),
    *("part", "row", "number", "key"),
)


@dataclass(frozen=True)
class WorstExample:
    """One example, and what a model did on it.

    Attributes:
        loss: Of a batch that has only it.
        part: Where it came from: the URL of a file, or the name of a partition.
        row: Its row there, from 0.
        number: Its row in the whole data, from 0; None if they have no order.
        key: That was given for it, or None.
        label: A class index; None if the labels are no such, one for each row.
        predicted: The class with the largest output; None likewise.
        probability: Of the label; None if the loss does not say what outputs are.
        x: The row itself, arrays without the axis of rows, before any transform.
        y: Its labels, likewise, or None.
    """

    loss: float
    part: str
    row: int
    number: int | None = None
    key: Any = None
    label: int | None = None
    predicted: int | None = None
    probability: float | None = None
    x: Tree = field(default=None, repr=False, compare=False)
    y: Tree = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class WorstExamples(Sequence[WorstExample]):
    """The worst examples, worst first; a sequence of `WorstExample`.

    Attributes:
        examples: All of them.
        rows: Of the data that were looked at.
        classes: Names of the labels 0, 1, ... if there are names.

    Example:
        >>> found = WorstExample(2.5, "part 0", 3, number=3, label=1, predicted=0)
        >>> print(WorstExamples((found,), rows=10))
        the worst 1 of 10 examples
              loss  label     predicted       p  where
            2.5000  1         0               -  row 3 (part 0, row 3)
    """

    examples: tuple[WorstExample, ...]
    rows: int
    classes: Sequence[str] | None = None

    @overload
    def __getitem__(self, index: int) -> WorstExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorstExample]: ...
    @override
    def __getitem__(self, index: int | slice) -> WorstExample | Sequence[WorstExample]:
        return self.examples[index]

    @override
    def __len__(self) -> int:
        return len(self.examples)

    @override
    def __iter__(self) -> Iterator[WorstExample]:
        return iter(self.examples)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, a row for each without x and y; needs pandas.

        Raises:
            OptionError: If pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise OptionError(
                "to_pandas needs pandas; pip install daskdl[dataframe]"
            ) from error
        rows = [[getattr(one, name) for name in COLUMNS] for one in self.examples]
        return pandas.DataFrame(rows, columns=list(COLUMNS))

    @override
    def __repr__(self) -> str:
        return f"<WorstExamples: {len(self)} of {self.rows}>"

    @override
    def __str__(self) -> str:
        guessed = any(one.predicted is not None for one in self.examples)
        names = f"  {'label':8}  {'predicted':9}  {'p':>6}" if guessed else ""
        lines = [
            f"the worst {len(self)} of {self.rows} examples",
            f"{'loss':>10}{names}  where",
            *(self._line(one, guessed) for one in self.examples),
        ]
        return "\n".join(lines)

    def _line(self, one: WorstExample, guessed: bool) -> str:
        middle = ""
        if guessed:
            label, predicted = self._name(one.label), self._name(one.predicted)
            chance = "-" if one.probability is None else f"{one.probability:.4f}"
            middle = f"  {label:8}  {predicted:9}  {chance:>6}"
        where = f"{one.part}, row {one.row}"
        if one.number is not None:
            where = f"row {one.number} ({where})"
        key = "" if one.key is None else f", key {one.key!r}"
        return f"{one.loss:10.4f}{middle}  {where}{key}"

    def _name(self, number: int | None) -> str:
        if number is None:
            return "-"
        known = self.classes is not None and 0 <= number < len(self.classes)
        return str(self.classes[number]) if self.classes and known else str(number)


class Found(NamedTuple):
    """An example in the order of the data."""

    part: int
    example: WorstExample


def worst_of(found: Iterable[Found], top: int) -> list[Found]:
    """The so many worst ones, worst first.

    Example:
        >>> losses = [1.0, math.nan, 3.0, 3.0]
        >>> found = [Found(0, WorstExample(x, "", i)) for i, x in enumerate(losses)]
        >>> [one.example.row for one in worst_of(found, 3)]
        [1, 2, 3]
    """
    return heapq.nsmallest(top, found, key=_rank)


def _rank(found: Found) -> tuple[bool, float, int, int]:
    """Smaller is worse."""
    loss = found.example.loss
    finite = not math.isnan(loss)
    return finite, -loss if finite else 0.0, found.part, found.example.row


def worst_rows(scored: Scored, top: int, wrong_only: bool) -> np.ndarray:
    """Which of some rows are the worst.

    Args:
        scored: Of the rows; those that the loss ignores are passed over.
        top: At most so many.
        wrong_only: Leave out what was predicted right, where that is known.
    """
    chosen = ~scored.ignored
    if wrong_only and scored.guessed is not None:
        chosen &= scored.guessed.predicted != scored.guessed.labels
    rows = np.flatnonzero(chosen)
    scores = scored.scores[rows]
    missing = np.isnan(scores)
    order = np.lexsort((rows, -np.where(missing, 0, scores), ~missing))
    return rows[order[:top]]


def example_of(
    row: int, where: tuple[str, int], scored: Scored, rows: Rows
) -> WorstExample:
    """One of some rows as a record of its own, with copies of what is in it.

    Args:
        row: Its number among these rows.
        where: The name of the part, and its row there.
        scored: Of all these rows.
        rows: That were loaded.
    """

    def copied(tree: Tree) -> Tree:
        return batching.mapped(lambda leaf: np.array(leaf[row]), tree)

    x, y = batching.of_both(copied, rows)
    loss = float(scored.scores[row])
    guess = _guess(scored.guessed, row)
    return WorstExample(loss, *where, **guess, x=x, y=y)


def _guess(guessed: Guessed | None, row: int) -> dict[str, Any]:
    if guessed is None:
        return {}
    chances = guessed.probabilities
    return {
        "label": int(guessed.labels[row]),
        "predicted": int(guessed.predicted[row]),
        "probability": None if chances is None else float(chances[row]),
    }
