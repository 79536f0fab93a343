"""Torchmetrics that are updated with a part of the data, and the merge of their states.

The merge of torchmetrics would weight processes equally in a "mean" and include the
defaults of processes without data. This one weights means by rows, carries the rounding
errors of float sums, and keeps lists in the order of the parts, so the result does not
depend on the order of arrival. Metrics never share states; torchmetrics would decide
that from the first update alone.
"""

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)
from torchmetrics.wrappers.abstract import WrapperMetric

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.checks import described
from daskdl.data.tables import as_numpy
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import DaskDLError, DataError, ModelError
from daskdl.evaluation.metric_names import Gathered, check_gathered
from daskdl.evaluation.presets import MetricSet, SampleBatch
from daskdl.evaluation.report import Evaluation, Section
from daskdl.losses import aligned
from daskdl.objective import Objective
from daskdl.serialization import Packed

logger = logging.getLogger(__name__)

# An update costs as much as hundreds of rows, so batches are joined up to this size.
GATHERED_ROWS = 4096
GATHERED_BYTES = 16 * 2**20


class PartState(NamedTuple):
    """The state of one metric after one part."""

    updates: int  # > 0
    rows: int  # the weight of means
    values: Mapping[str, Any]  # by name of the state


# By name in the collection; "name.inner" for a metric within a metric.
PartStates = Mapping[str, PartState]


def update_(collection: MetricCollection, *rows: Any) -> None:
    """Update each metric with rows; skip zero rows, which some metrics refuse."""
    if batching.length(rows[-1]):
        for metric in collection.values(copy_state=False):
            metric.update(*rows)


def states_of(collection: MetricCollection, rows: int) -> PartStates:
    """Return the states of live metrics after `rows` rows, valid until an update."""
    # `_reductions` and `_computed` are private in torchmetrics 1.x, which has no public
    # way to list the states of a metric, or to set them.
    return {
        place: PartState(
            metric.update_count,
            rows,
            {
                name: _as_numpy(getattr(metric, name), reduction)
                for name, reduction in metric._reductions.items()
            },
        )
        for place, metric in _metrics(collection)
        if metric.update_count
    }


class StateMerger:
    """Merges the states of parts, in any order."""

    def __init__(self, collection: MetricCollection) -> None:
        self._collection = collection
        self._metrics = dict(_metrics(collection))
        self._gathered_bytes = 0
        self._updates: Counter[str] = Counter()
        self._states: dict[str, dict[str, _MergedState]] = {
            place: {
                name: _MergedState(reduction)
                for name, reduction in metric._reductions.items()
            }
            for place, metric in self._metrics.items()
        }

    def add_(self, part: int, states: PartStates) -> None:
        """Add the states of a part; call this once for each part."""
        for place, (updates, rows, values) in states.items():
            self._updates[place] += updates
            for name, value in values.items():
                self._states[place][name].add_(value, rows, part)
                if isinstance(self._metrics[place], Gathered):
                    self._gathered_bytes += sum(array.nbytes for array in value)
                    check_gathered(self._gathered_bytes)

    def merged(self) -> MetricCollection:
        """Return new metrics with the merged states."""
        collection = copy.deepcopy(self._collection)
        for place, metric in _metrics(collection):
            if self._updates[place]:
                for name, state in self._states[place].items():
                    setattr(metric, name, state.value())
                metric._update_count = self._updates[place]
                metric._computed = None
        return collection


class _MergedState:
    """One state of a metric over all parts so far."""

    def __init__(self, reduction: Any) -> None:
        self._reduction = reduction
        self._rows = 0
        self._total: Any = None  # sum, maximum or minimum
        self._lost: Any = 0  # rounding errors of the sum, by Knuth's two-sum
        self._dtype: np.dtype[Any] | None = None
        self._parts: dict[int, Any] = {}  # other states, by part

    def add_(self, state: Any, rows: int, part: int) -> None:
        merges = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
        if not isinstance(state, np.ndarray) or self._reduction not in merges:
            self._parts[part] = state
            return
        array, self._dtype = state, state.dtype
        if self._reduction in (dim_zero_sum, dim_zero_mean):
            wide = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind, np.int64)
            array = array.astype(wide)
            if self._reduction is dim_zero_mean:
                array, self._rows = array * rows, self._rows + rows
        if self._total is None:
            self._total = array
            return
        if self._total.shape != array.shape:
            raise DataError(
                f"the state of a metric has the shape {self._total.shape} in one part "
                f"of the data and {array.shape} in another, so they cannot be merged"
            )
        if self._reduction in (dim_zero_max, dim_zero_min):
            extreme = np.maximum if self._reduction is dim_zero_max else np.minimum
            self._total = extreme(self._total, array)  # keeps NaN, like torch
            return
        with np.errstate(invalid="ignore"):  # inf - inf
            total = self._total + array
            ours = total - array
            lost = (self._total - ours) + (array - (total - ours))
        self._lost = self._lost + np.where(np.isfinite(total), lost, 0)
        self._total = np.asarray(total)

    def value(self) -> Any:
        if self._dtype is not None:
            total = np.asarray(self._total + self._lost)
            array = total / self._rows if self._rows else total
            return _as_tensor(array.astype(self._dtype))
        states = [self._parts[part] for part in sorted(self._parts)]
        listed = isinstance(states[0], list)
        flat = [_as_tensor(part) for s in states for part in (s if listed else [s])]
        if self._reduction is dim_zero_cat:
            return dim_zero_cat(flat) if flat else []
        if len(states) == 1:  # there is nothing to reduce
            return flat if listed else flat[0]
        stacked = flat if listed else torch.stack(flat)
        return stacked if self._reduction is None else self._reduction(stacked)


def _as_numpy(state: Any, reduction: Any) -> Any:
    """Replace tensors by arrays, which Dask sends without a copy."""
    if isinstance(state, list):
        parts = [dim_zero_cat(state)] if reduction is dim_zero_cat and state else state
        return [_as_numpy(part, None) for part in parts]
    return as_numpy(state) if isinstance(state, Tensor) else state


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def _metrics(collection: MetricCollection) -> Iterator[tuple[str, Metric]]:
    """Yield metrics and nested metrics by name; wrappers only delegate to them."""
    for name, metric in collection.items(keep_base=True, copy_state=False):
        for inner, module in metric.named_modules():
            if isinstance(module, Metric) and not isinstance(module, WrapperMetric):
                yield f"{name}.{inner}" if inner else str(name), module


class MetricSpec(NamedTuple):
    """A set of metrics for data like a sample; picklable."""

    metrics: MetricSet
    sample: SampleBatch
    collection: MetricCollection  # before any update; copied, never changed

    def merger(self) -> StateMerger:
        """Return a new merger of the states of parts."""
        return StateMerger(self.collection)

    def section(self, merger: StateMerger) -> Section:
        """Compute and report the metrics from the states of all parts."""
        with _warnings_logged():
            try:
                computed: Mapping[str, Any] = merger.merged().compute()
            except USER_ERRORS as error:
                raise DataError(
                    f"metrics could not be computed from all rows: {error}"
                ) from error
        return self.metrics.section(self.sample, computed)


def metric_specs(
    sets: Sequence[MetricSet],
    objective: Objective | None,
    output: Tree,
    y: Tree,
    classes: Sequence[str] | None,
) -> tuple[MetricSpec, ...]:
    """Prepare sets of metrics for these outputs and labels, and try an update."""
    if y is None:
        raise DataError("metrics need labels: pass y, or data that contain labels")
    for name, leaf in batching.named_leaves(output, "output"):
        if not isinstance(leaf, Tensor):
            raise ModelError(
                "metrics need a model that returns tensors, or tuples and dicts of "
                f"tensors; {name} is a {type(leaf).__name__}"
            )
    output, y = aligned(objective, on_cpu([output]), on_cpu([y]))
    with _warnings_logged(), torch.no_grad():
        samples = [metrics.sample(objective, output, y, classes) for metrics in sets]
        specs = [
            MetricSpec(metrics, sample, metrics.collection(sample))
            for metrics, sample in zip(sets, samples, strict=True)
        ]
        try:
            for spec in specs:
                trial = copy.deepcopy(spec.collection)
                update_(trial, *spec.metrics.prepared(spec.sample, output, y))
        except USER_ERRORS as error:
            if isinstance(error, DaskDLError):
                raise
            raise ModelError(
                f"metrics failed on {batching.length(y)} rows with the output "
                f"{described(output)} and the labels {described(y)}: {error}"
            ) from error
    return tuple(specs)


class MetricAccumulator:
    """Metrics of one part, on the CPU, updated with many rows at a time."""

    def __init__(self, specs: Sequence[MetricSpec], name: str) -> None:
        self._specs = specs
        self._name = name
        self._live = [copy.deepcopy(spec.collection) for spec in specs]
        self._waiting: list[tuple[Tree, Tree]] = []
        self._shapes: Any = None  # of the waiting rows
        self._waiting_rows = self._most = 0
        self._measured = 0  # rows

    def add_(self, output: Tree, y: Tree) -> None:
        """Add rows."""
        shapes = [
            leaf.shape[1:] for leaf in batching.leaves_by_name((output, y)).values()
        ]
        if shapes != self._shapes:
            self._measure()
            self._shapes = shapes
            row_bytes = batching.nbytes((output, y)) // max(batching.length(y), 1)
            self._most = min(GATHERED_ROWS, GATHERED_BYTES // max(row_bytes, 1))
        self._waiting.append((output, y))
        self._waiting_rows += batching.length(y)
        if self._waiting_rows >= self._most:
            self._measure()

    def states(self) -> tuple[PartStates, ...]:
        """Return the states of each set; they are valid until rows are added."""
        self._measure()
        return tuple(states_of(live, self._measured) for live in self._live)

    def _measure(self) -> None:
        if not self._waiting:
            return
        output, y = (on_cpu(each) for each in zip(*self._waiting, strict=True))
        rows, self._waiting_rows, self._waiting = self._waiting_rows, 0, []
        try:
            for spec, live in zip(self._specs, self._live, strict=True):
                update_(live, *spec.metrics.prepared(spec.sample, output, y))
        except USER_ERRORS as error:
            last = self._measured + rows - 1
            where = f"rows {self._measured} to {last} of {self._name}"
            if isinstance(error, DaskDLError):
                error.add_note(f"in {where}")
                raise
            raise DataError(f"metrics failed on {where}: {error}") from error
        self._measured += rows


# Limit of the states that a replica sends to each other replica after an epoch.
MOST_SENT_BYTES = 4 * 2**20
SpecsAndStates = tuple[tuple[MetricSpec, ...], tuple[PartStates, ...]]


def numbers_of(specs: Sequence[MetricSpec]) -> tuple[str, ...]:
    """Return the names of all measured values that are single numbers."""
    with _warnings_logged(), torch.no_grad():
        return tuple(n for spec in specs for n in spec.metrics.numbers(spec.sample))


def sent_states(specs: tuple[MetricSpec, ...], states: tuple[PartStates, ...]) -> bytes:
    """Pack the states of a replica's share of the data for `measured`."""
    payload = Packed[SpecsAndStates]((specs, states), "metrics").payload.tobytes()
    if len(payload) > MOST_SENT_BYTES:
        raise DataError(
            f"metrics of the validation data take {len(payload) / 2**20:.1f} MiB on a "
            f"replica, which sends at most {MOST_SENT_BYTES / 2**20:g} MiB: functions, "
            "areas under curves and some metrics of torchmetrics keep all rows; "
            "measure them with trainer.evaluate(metrics=...) after the fit"
        )
    return payload


def measured(payloads: Sequence[bytes]) -> dict[str, float]:
    """Compute the values that are single numbers from the states of all replicas.

    They are rounded to 9 digits, so that replicas on different machines agree on them.
    """
    opened = [
        Packed[SpecsAndStates].of(np.frombuffer(payload, np.uint8), "metrics").unpack()
        for payload in payloads
    ]
    sections = []
    for i, spec in enumerate(opened[0][0]):
        merger = spec.merger()
        for part, (_, states) in enumerate(opened):
            merger.add_(part, states[i])
        sections.append(spec.section(merger))
    values = Evaluation({}, sections)
    numbers = {n: v for n, v in values.items() if isinstance(v, float | int)}
    return {name: float(f"{value:.9g}") for name, value in numbers.items()}


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Log warnings, such as about classes without rows, which the report has as well.

    Use it on the client alone: warning filters are global.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        logger.info("%s", warning.message)


def on_cpu(parts: Sequence[Tree]) -> Tree:
    """Join rows on the CPU, contiguous, floats in float32 or wider."""

    def joined(*leaves: Tensor) -> Tensor:
        rows = torch.cat(leaves) if len(leaves) > 1 else leaves[0]
        rows = rows.cpu().contiguous()
        short = rows.dtype in (torch.bfloat16, torch.float16)
        return rows.float() if short else rows

    return batching.tree_map(joined, *parts)
