"""Metrics at work: live ones on a part, and what all parts come to. No Dask."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import DaskDLError, DataError, ModelError
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.states import States, restored, states_of, update_

logger = logging.getLogger(__name__)

# An update costs as much as hundreds of rows, so batches wait for each other: rows, or
# bytes where rows are large, until their metrics are told.
GATHERED_ROWS = 4096
GATHERED_BYTES = 16 * 2**20


class Measure(NamedTuple):
    """A set of metrics, ready to be measured; picklable.

    Attributes:
        metrics: The set.
        shown: What it is measured on.
        collection: Its metrics in their beginning; copied, never changed.
    """

    metrics: MetricSet
    shown: Shown
    collection: MetricCollection


def measure_of(metrics: MetricSet, shown: Shown) -> Measure:
    """Make a set ready, and try it on the rows that are shown.

    Raises:
        DataError: If the labels are not such as it needs.
        ModelError: If the outputs are not, or a metric fails on them.
    """
    with _told_to_the_log():
        try:
            measure = Measure(metrics, shown, metrics.collection(shown))
            rehearsal = copy.deepcopy(measure.collection)
            update_(rehearsal, *metrics.prepared(shown, shown.output, shown.y))
        except MISFITS as error:
            if isinstance(error, DaskDLError):
                raise
            raise ModelError(
                f"metrics failed on {batching.length(shown.y)} rows, the output being "
                f"{_outline(shown.output)} and the labels {_outline(shown.y)}: {error}"
            ) from error
    return measure


class Meter:
    """Live metrics of one part, on the CPU.

    Args:
        measures: What is measured.
        name: Of the part, for messages.
    """

    def __init__(self, measures: Sequence[Measure], name: str) -> None:
        self._measures = measures
        self._name = name
        self._live = [copy.deepcopy(measure.collection) for measure in measures]
        self._waiting: list[tuple[Tree, Tree]] = []
        self._shapes: Any = None  # of a row of those waiting
        self._rows = self._most = 0  # that wait, and may
        self._told = 0  # rows that the metrics have been told

    def add(self, output: Tree, y: Tree) -> None:
        """Measure some rows, now or when there are more.

        Args:
            output: Of the model, on any device; kept until then.
            y: Their labels, likewise.

        Raises:
            DataError: If the metrics cannot be measured on these rows.
            ModelError: If outputs are no numbers.
        """
        shapes = _shapes(output, y)
        if shapes != self._shapes:
            if self._waiting:
                self._tell()
            self._shapes = shapes
            row_bytes = batching.nbytes((output, y)) // max(batching.length(y), 1)
            self._most = min(GATHERED_ROWS, GATHERED_BYTES // max(row_bytes, 1))
        self._waiting.append((output, y))
        self._rows += batching.length(y)
        if self._rows >= self._most:
            self._tell()

    def states(self, part: int) -> tuple[States, ...]:
        """What each set of metrics has seen; the meter is of no more use.

        Args:
            part: Number of the part.
        """
        if self._waiting:
            self._tell()
        return tuple(states_of(live, max(self._told, 1), part) for live in self._live)

    def _tell(self) -> None:
        output, y = (joined(each) for each in zip(*self._waiting, strict=True))
        rows, self._rows, self._waiting = self._rows, 0, []
        last = self._told + rows - 1
        try:
            for measure, live in zip(self._measures, self._live, strict=True):
                prepared = measure.metrics.prepared(measure.shown, output, y)
                update_(live, *prepared)
        except MISFITS as error:
            where = f"rows {self._told} to {last} of {self._name}"
            if isinstance(error, DaskDLError):
                error.add_note(f"in {where}")
                raise
            raise DataError(f"metrics failed on {where}: {error}") from error
        self._told += rows


def computed(measure: Measure, states: States) -> dict[str, Any]:
    """What a set comes to; of warnings about it the log tells.

    Args:
        measure: The set.
        states: Of all parts.

    Raises:
        DataError: If nothing can be computed of these rows.
    """
    with _told_to_the_log():
        try:
            told: Mapping[str, Any] = restored(measure.collection, states).compute()
        except MISFITS as error:
            raise DataError(
                f"metrics could not be computed of the rows there are: {error}"
            ) from error
    return measure.metrics.values(measure.shown, told)


@contextmanager
def _told_to_the_log() -> Iterator[None]:
    """Warnings, of classes that are missing for one: reports show it, people need not.

    On the client only: filters belong to the whole process.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        logger.info("%s", warning.message)


def joined(parts: Sequence[Tree]) -> Tree:
    """Rows of batches together, as metrics take them: on the CPU, in long floats.

    Many metrics have no code for short ones on a CPU, and none for other orders of
    memory.

    Args:
        parts: Trees of tensors, at least one.
    """
    return batching.mapped(_together, *parts)


def _together(*leaves: Tensor) -> Tensor:
    rows = torch.cat(leaves) if len(leaves) > 1 else leaves[0]
    rows = rows.cpu().contiguous()
    short = rows.dtype in (torch.bfloat16, torch.float16)
    return rows.float() if short else rows


def _shapes(output: Tree, y: Tree) -> Any:
    if isinstance(output, Tensor) and isinstance(y, Tensor):  # nearly always
        return output.shape[1:], y.shape[1:]
    return [leaf.shape[1:] for leaf in batching.named_both((output, y)).values()]


def _outline(tree: Tree) -> str:
    named = batching.named(tree, "")
    return ", ".join(f"{name} {tuple(leaf.shape)} {leaf.dtype}" for name, leaf in named)
