"""Metrics of torchmetrics that are updated by part, and the merge of their states.

torchmetrics' own merge would weight processes equally in a "mean" and would include the
defaults of processes without data. The merge here weights means by rows, compensates
rounding errors of float sums, and keeps lists in the order of the parts, so the result
does not depend on the order of arrival. Metrics never share states, because
torchmetrics decides from the first update alone which metrics may share them.
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

# An update costs as much as hundreds of rows, so batches are joined up to these limits.
UPDATE_ROWS = 4096
UPDATE_BYTES = 16 * 2**20


class PartState(NamedTuple):
    """State of one metric after one part."""

    updates: int  # > 0
    rows: int  # the weight of means
    values: Mapping[str, Any]  # by name of the state


# By name in the collection; "name.inner" for a nested metric.
PartStates = Mapping[str, PartState]
# As a context manager: metrics create tensors, which belong on the CPU, whatever
# `torch.set_default_device` says.
CPU = torch.device("cpu")


def update_(collection: MetricCollection, *rows: Any) -> None:
    """Update each metric, unless there are no rows, which some metrics refuse."""
    if batching.length(rows[-1]):
        for metric in collection.values(copy_state=False):
            metric.update(*rows)


def states_of(collection: MetricCollection, rows: int) -> PartStates:
    """Return the states of live metrics after `rows` rows, valid until an update."""
    # `_reductions`, `_computed` and `_update_count` are private in torchmetrics 1.x,
    # which has no public way to list or to set the states of a metric.
    return {
        path: PartState(
            metric.update_count,
            rows,
            {
                name: _as_numpy(getattr(metric, name), reduction)
                for name, reduction in metric._reductions.items()
            },
        )
        for path, metric in _metrics(collection)
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
            path: {
                name: _MergedState(reduction)
                for name, reduction in metric._reductions.items()
            }
            for path, metric in self._metrics.items()
        }

    def add_(self, part: int, states: PartStates) -> None:
        """Add the states of a part; call this once for each part."""
        for path, (updates, rows, values) in states.items():
            self._updates[path] += updates
            for name, value in values.items():
                self._states[path][name].add_(value, rows, part)
                if isinstance(self._metrics[path], Gathered):
                    self._gathered_bytes += sum(array.nbytes for array in value)
                    check_gathered(self._gathered_bytes)

    def merged(self) -> MetricCollection:
        """Return new metrics with the merged states."""
        collection = copy.deepcopy(self._collection)
        for path, metric in _metrics(collection):
            if self._updates[path]:
                for name, state in self._states[path].items():
                    setattr(metric, name, state.value())
                metric._update_count = self._updates[path]
                metric._computed = None
        return collection


class _MergedState:
    """One state of a metric, merged over the parts added so far."""

    def __init__(self, reduction: Any) -> None:
        self._reduction = reduction
        self._rows = 0
        self._total: Any = None  # sum, maximum or minimum
        self._lost: Any = 0  # rounding errors of the sum, by Knuth's two-sum
        self._dtype: np.dtype[Any] | None = None
        self._parts: dict[int, Any] = {}  # states with another reduction, by part

    def add_(self, state: Any, rows: int, part: int) -> None:
        merged = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
        if not isinstance(state, np.ndarray) or self._reduction not in merged:
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
                f"the state of a metric has shape {self._total.shape} in one part of "
                f"the data and {array.shape} in another, so it cannot be merged"
            )
        if self._reduction in (dim_zero_max, dim_zero_min):
            extreme = np.maximum if self._reduction is dim_zero_max else np.minimum
            self._total = extreme(self._total, array)  # NaN propagates, as in torch
            return
        with np.errstate(invalid="ignore"):  # inf - inf
            total = self._total + array
            previous = total - array
            lost = (self._total - previous) + (array - (total - previous))
        self._lost = self._lost + np.where(np.isfinite(total), lost, 0)
        self._total = np.asarray(total)

    def value(self) -> Any:
        if self._dtype is not None:
            total = np.asarray(self._total + self._lost)
            array = total / self._rows if self._rows else total
            return _as_tensor(array.astype(self._dtype))
        states = [self._parts[part] for part in sorted(self._parts)]
        is_list = isinstance(states[0], list)
        lists = states if is_list else [states]
        values = [_as_tensor(item) for items in lists for item in items]
        if self._reduction is dim_zero_cat:
            return dim_zero_cat(values) if values else []
        if len(states) == 1:  # there is nothing to reduce
            return values if is_list else values[0]
        stacked = values if is_list else torch.stack(values)
        return stacked if self._reduction is None else self._reduction(stacked)


def _as_numpy(state: Any, reduction: Any) -> Any:
    """Replace tensors by arrays, which Dask sends without a copy."""
    if isinstance(state, list):
        items = [dim_zero_cat(state)] if reduction is dim_zero_cat and state else state
        return [_as_numpy(item, None) for item in items]
    return as_numpy(state) if isinstance(state, Tensor) else state


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def _metrics(collection: MetricCollection) -> Iterator[tuple[str, Metric]]:
    """Yield metrics and nested metrics by name, without wrappers, which delegate."""
    for name, metric in collection.items(keep_base=True, copy_state=False):
        for inner, module in metric.named_modules():
            if isinstance(module, Metric) and not isinstance(module, WrapperMetric):
                yield f"{name}.{inner}" if inner else str(name), module


class MetricSpec(NamedTuple):
    """Picklable: a metric set, and what it needs to know of the data."""

    metrics: MetricSet
    sample: SampleBatch
    collection: MetricCollection  # never updated; users copy it

    def merger(self) -> StateMerger:
        """Return a new merger for the states of parts."""
        return StateMerger(self.collection)

    def section(self, merger: StateMerger) -> Section:
        """Compute the metrics from the states of all parts, and report them."""
        with _warnings_logged(), CPU:
            try:
                computed: Mapping[str, Any] = merger.merged().compute()
            except USER_ERRORS as error:
                raise DataError(
                    f"metrics failed when computed from all rows: {error}"
                ) from error
        return self.metrics.section(self.sample, computed)


def metric_specs(
    sets: Sequence[MetricSet],
    objective: Objective | None,
    output: Tree,
    y: Tree,
    classes: Sequence[str] | None,
) -> tuple[MetricSpec, ...]:
    """Prepare metric sets for these outputs and labels, and try an update of each."""
    if y is None:
        raise DataError("metrics need labels; pass y, or data that contain labels")
    for name, leaf in batching.named_leaves(output, "output"):
        if not isinstance(leaf, Tensor):
            raise ModelError(
                "metrics need a model that returns tensors, or tuples and dicts of "
                f"tensors; {name} is a {type(leaf).__name__}"
            )
    output, y = aligned(objective, on_cpu([output]), on_cpu([y]))
    with _warnings_logged(), torch.no_grad(), CPU:
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
    """Updates metrics on the CPU with the rows of one part, many rows at a time."""

    def __init__(self, specs: Sequence[MetricSpec], name: str) -> None:
        self._specs = specs
        self._name = name  # of the part
        self._collections = [copy.deepcopy(spec.collection) for spec in specs]
        self._waiting: list[tuple[Tree, Tree]] = []  # outputs and labels of batches
        self._shapes: Any = None  # of the waiting rows
        self._waiting_rows = 0
        self._row_limit = 0  # number of waiting rows that causes an update
        self._measured_rows = 0

    def add_(self, output: Tree, y: Tree) -> None:
        """Add the outputs and labels of a batch."""
        shapes = [
            leaf.shape[1:] for leaf in batching.leaves_by_name((output, y)).values()
        ]
        if shapes != self._shapes:
            self._measure()
            self._shapes = shapes
            row_bytes = batching.nbytes((output, y)) // max(batching.length(y), 1)
            self._row_limit = min(UPDATE_ROWS, UPDATE_BYTES // max(row_bytes, 1))
        self._waiting.append((output, y))
        self._waiting_rows += batching.length(y)
        if self._waiting_rows >= self._row_limit:
            self._measure()

    def states(self) -> tuple[PartStates, ...]:
        """Return the states of each set, valid until rows are added."""
        self._measure()
        return tuple(states_of(live, self._measured_rows) for live in self._collections)

    def _measure(self) -> None:
        if not self._waiting:
            return
        output, y = (on_cpu(trees) for trees in zip(*self._waiting, strict=True))
        start, stop = self._measured_rows, self._measured_rows + self._waiting_rows
        self._waiting, self._waiting_rows = [], 0
        try:
            with CPU:
                for spec, live in zip(self._specs, self._collections, strict=True):
                    update_(live, *spec.metrics.prepared(spec.sample, output, y))
        except USER_ERRORS as error:
            where = f"rows {start} to {stop - 1} of {self._name}"
            if isinstance(error, DaskDLError):
                error.add_note(f"in {where}")
                raise
            raise DataError(f"metrics failed on {where}: {error}") from error
        self._measured_rows = stop


# Most bytes of states that a replica sends to each other replica after an epoch.
MAX_SENT_BYTES = 4 * 2**20
SpecsAndStates = tuple[tuple[MetricSpec, ...], tuple[PartStates, ...]]


def numbers_of(specs: Sequence[MetricSpec]) -> tuple[str, ...]:
    """Return the names of all measured values that are single numbers."""
    with _warnings_logged(), torch.no_grad(), CPU:
        return tuple(n for spec in specs for n in spec.metrics.numbers(spec.sample))


def sent_states(specs: tuple[MetricSpec, ...], states: tuple[PartStates, ...]) -> bytes:
    """Pack the states of a replica's share of the data for `measured`."""
    payload = Packed[SpecsAndStates]((specs, states), "metrics").payload.tobytes()
    if len(payload) > MAX_SENT_BYTES:
        raise DataError(
            f"the metrics of the validation data take {len(payload) / 2**20:.1f} MiB "
            f"on a replica, which may send at most {MAX_SENT_BYTES / 2**20:g} MiB; "
            "functions, areas under curves and some metrics of torchmetrics keep all "
            "rows, so measure them with trainer.evaluate(metrics=...) after the fit"
        )
    return payload


def measured(payloads: Sequence[bytes]) -> dict[str, float]:
    """Compute the values that are single numbers from the states of all replicas.

    The values are rounded to 9 digits, so that replicas on different machines agree.
    """
    replicas = [
        Packed[SpecsAndStates].of(np.frombuffer(payload, np.uint8), "metrics").unpack()
        for payload in payloads
    ]
    sections = []
    for i, spec in enumerate(replicas[0][0]):
        merger = spec.merger()
        for part, (_, states) in enumerate(replicas):
            merger.add_(part, states[i])
        sections.append(spec.section(merger))
    values = Evaluation({}, sections)
    numbers = {n: v for n, v in values.items() if isinstance(v, float | int)}
    return {name: float(f"{value:.9g}") for name, value in numbers.items()}


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Log warnings, for example about classes without rows, which the report repeats.

    Use this on the client only, because warning filters are global.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        logger.info("%s", warning.message)


def on_cpu(parts: Sequence[Tree]) -> Tree:
    """Join rows on the CPU as contiguous tensors, with floats of 32 bits or more."""

    def joined(*leaves: Tensor) -> Tensor:
        rows = torch.cat(leaves) if len(leaves) > 1 else leaves[0]
        rows = rows.cpu().contiguous()
        half = rows.dtype in (torch.bfloat16, torch.float16)
        return rows.float() if half else rows

    return batching.tree_map(joined, *parts)
