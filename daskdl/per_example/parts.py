"""Parts of data scored example by example, wherever they are; all here pickles."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daskdl.data.batching import Rows
from daskdl.data.faults import UNREADABLE, is_left_out
from daskdl.data.labels import LabelCheck
from daskdl.data.source import Source, rows_of_part
from daskdl.per_example.scorer import ExampleScorer
from daskdl.per_example.worst import Found, example_of, worst_of, worst_rows

NOTHING = np.zeros(0)  # scores of no rows


@dataclass(frozen=True)
class Reading:
    """How parts come to be scored.

    Attributes:
        labels: What labels are held to; None: they are not looked at.
        skips: Whether what cannot be read is left out.
    """

    labels: LabelCheck | None
    skips: bool

    def rows(self, source: Source, part: int, rows: int) -> Iterator[Rows]:
        """Yield a part, bit by bit where it cannot be had otherwise.

        Raises:
            DataError: If it has a label that the loss does not accept. What loading
                it raises comes out.
        """
        try:
            for some in rows_of_part(source, part, rows):
                if self.labels is not None:
                    self.labels.check(some[1], source.name(part))
                yield some
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise


@dataclass(frozen=True)
class PartScores:
    """Scores one part.

    Attributes:
        scorer: Scores its rows.
        reading: How it comes.
    """

    scorer: ExampleScorer
    reading: Reading

    def __call__(self, source: Source, part: int) -> np.ndarray:
        """The score of each of its rows, float64."""
        some = self.reading.rows(source, part, self.scorer.batch_size)
        return self.of_rows(some)

    def of_rows(self, some: Iterator[Rows]) -> np.ndarray:
        """Those of rows, one after the other."""
        return np.concatenate([NOTHING, *(self.scorer.scored(r).scores for r in some)])

    def of_lazy(self, some: Iterator[Rows]) -> np.ndarray:
        """Those of rows that somebody else has loaded; their labels are looked at.

        Raises:
            DataError: If the loss does not accept one.
        """
        return self.of_rows(map(self._checked, some))

    def _checked(self, rows: Rows) -> Rows:
        if self.reading.labels is not None:
            self.reading.labels.check(rows[1])
        return rows


class PartWorst(NamedTuple):
    """What is left of a part."""

    rows: int  # that it has
    found: list[Found]


@dataclass(frozen=True)
class WorstOfPart:
    """Finds the worst examples of one part.

    Attributes:
        scorer: Scores them.
        reading: How parts come.
        top: How many are kept, of each part too.
        wrong_only: Whether those that were predicted right are left out.
    """

    scorer: ExampleScorer
    reading: Reading
    top: int
    wrong_only: bool

    def __call__(self, source: Source, part: int) -> PartWorst:
        """Those of a part, worst first."""
        count, found = 0, list[Found]()
        name = source.name(part)
        for rows in self.reading.rows(source, part, self.scorer.batch_size):
            scored = self.scorer.scored(rows)
            more = [
                Found(
                    part, example_of(int(row), (name, count + int(row)), scored, rows)
                )
                for row in worst_rows(scored, self.top, self.wrong_only)
            ]
            found = worst_of([*found, *more], self.top)
            count += len(scored.scores)
        return PartWorst(count, found)
