"""States of torchmetrics as values that can be added up, in any order.

A state of a metric says how its parts become one: as a sum, a mean, the largest, the
smallest, or all of them, one after the other, for a function or the metric itself.
Sums are kept with what their rounding lost, so that it makes no difference in which
order parts come; what is kept whole knows its part, and is put in order in the end.
Arrays are numpy's, which Dask sends without a copy.

States of metrics: taken from those of one part, added up, and put into new ones.

Nothing is computed before all parts are there. What was never updated has nothing to
say: its defaults are not those of data. Nested metrics are found by their place in the
collection.

Metrics at work: live ones on a part, and what all parts come to. No Dask.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeVar

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
from daskdl.data.checks import USER_ERRORS
from daskdl.errors import DaskDLError, DataError, ModelError
from daskdl.evaluation.base import MetricSet, Shown
from daskdl.evaluation.metric_sets import groups

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Reduction = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Total:
    """A sum: of integers exact, of floats to about twice their digits.

    Attributes:
        sum: Rounded, float64 if it is of floats.
        lost: What rounding took from it (Knuth's two-sum); 0 for integers.
        dtype: Of the state.
    """

    sum: Array
    lost: Array
    dtype: torch.dtype

    @classmethod
    def of(cls, state: Tensor, weight: int = 1) -> Self:
        """One part's term, weighted."""
        wide = _wide(state.dtype)
        product = array_of(state.to(wide) * weight)
        return cls(product, np.zeros_like(product), state.dtype)

    def __add__(self, other: "Total") -> "Total":
        _check_alike(self.sum, other.sum)
        with np.errstate(invalid="ignore"):  # of inf nothing is lost
            total = self.sum + other.sum
            ours = total - other.sum
            lost = (self.sum - ours) + (other.sum - (total - ours))
            lost = self.lost + other.lost + np.where(np.isfinite(total), lost, 0)
        return Total(np.asarray(total), lost, self.dtype)

    def value(self, divisor: int = 1) -> Tensor:
        """The state again."""
        total = np.asarray(self.sum + self.lost)
        return tensor_of(total if divisor == 1 else total / divisor, self.dtype)


@dataclass(frozen=True)
class Mean:
    """A mean over rows: parts weigh by theirs, not each the same.

    Attributes:
        total: Of means times rows.
        rows: Of all parts.
    """

    total: Total
    rows: int

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.rows + other.rows)

    def value(self) -> Tensor:
        """The state again."""
        return self.total.value(self.rows)


@dataclass(frozen=True)
class Extreme:
    """The largest, or the smallest.

    Attributes:
        array: Of the parts so far.
        largest: Which of both.
        dtype: Of the state.
    """

    array: Array
    largest: bool
    dtype: torch.dtype

    def __add__(self, other: "Extreme") -> "Extreme":
        _check_alike(self.array, other.array)
        chosen = np.maximum if self.largest else np.minimum  # both keep NaN, as torch
        return Extreme(chosen(self.array, other.array), self.largest, self.dtype)

    def value(self) -> Tensor:
        """The state again."""
        return tensor_of(self.array, self.dtype)


@dataclass(frozen=True)
class Whole(Generic[T]):
    """What is kept whole, in the order of the parts.

    Attributes:
        parts: What each has, by its number.
        listed: Whether the state is a list, else it is a tensor.
    """

    parts: Mapping[int, list[T]]
    listed: bool

    def __add__(self, other: "Whole[T]") -> "Whole[T]":
        return Whole({**self.parts, **other.parts}, self.listed)

    def value(self, reduction: Reduction | None) -> Any:
        """The state again; of one part as it was, for there is nothing to reduce."""
        flat = [_unpacked(one) for n in sorted(self.parts) for one in self.parts[n]]
        if reduction is dim_zero_cat:
            return dim_zero_cat(flat) if flat else []
        if len(self.parts) == 1:
            return flat if self.listed else flat[0]
        both = flat if self.listed else torch.stack(flat)
        return both if reduction is None else reduction(both)


Value = Total | Mean | Extreme | Whole[Any]


@dataclass(frozen=True)
class _Packed:
    """A tensor on its way."""

    array: Array
    dtype: torch.dtype


def value_of(
    state: Tensor | list[Any],
    reduction: Reduction | None,
    rows: int,
    part: int,
) -> Value:
    """What a state of one part adds.

    Args:
        state: Of a metric that has been updated with that part.
        reduction: What torchmetrics has for it.
        rows: Of the part, > 0.
        part: Its number.
    """
    if isinstance(state, list):
        whole = state
        if reduction is dim_zero_cat and state:
            whole = [dim_zero_cat(state)]
        return Whole({part: [_packed(one) for one in whole]}, listed=True)
    if reduction is dim_zero_sum:
        return Total.of(state)
    if reduction is dim_zero_mean:
        return Mean(Total.of(state, rows), rows)
    if reduction in (dim_zero_max, dim_zero_min):
        return Extreme(array_of(state), reduction is dim_zero_max, state.dtype)
    return Whole({part: [_packed(state)]}, listed=False)


def state_of(value: Value, reduction: Reduction | None) -> Any:
    """What a state is after all parts, as `value_of` was given it for one."""
    return value.value(reduction) if isinstance(value, Whole) else value.value()


def array_of(tensor: Tensor) -> Array:
    """The numbers of a tensor, wherever it is; bfloat16, which numpy lacks, wider."""
    tensor = tensor.detach().cpu()
    array: Array = (
        tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def tensor_of(array: Array, dtype: torch.dtype) -> Tensor:
    """A tensor of its own."""
    return torch.from_numpy(np.array(array)).to(dtype)


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Packed(array_of(value), value.dtype)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Packed):
        return tensor_of(value.array, value.dtype)
    return value


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _check_alike(one: Array, two: Array) -> None:
    if one.shape != two.shape:
        raise DataError(
            f"a metric has a state of shape {one.shape} in one part of the data and "
            f"{two.shape} in another, and they cannot be added up"
        )


@dataclass(frozen=True)
class MetricState:
    """Of one metric, without those in it.

    Attributes:
        updates: How often it was updated, > 0.
        values: By the names of its states.
    """

    updates: int
    values: Mapping[str, Value]

    def __add__(self, other: "MetricState") -> "MetricState":
        both: dict[str, Any] = dict(self.values)
        values = {name: both[name] + value for name, value in other.values.items()}
        return MetricState(self.updates + other.updates, values)


@dataclass(frozen=True)
class States:
    """Of a collection, on some parts; they are added up in any order.

    Attributes:
        metrics: By place in the collection: ``"name"``, or ``"name.inner"``.

    Example:
        >>> import torch
        >>> from torchmetrics import MaxMetric
        >>> def part(number, rows):
        ...     live = MetricCollection([MaxMetric()])
        ...     update_(live, rows)
        ...     return states_of(live, len(rows), number)
        >>> both = part(0, torch.tensor([1.0])) + part(1, torch.tensor([-2.0, -1.0]))
        >>> restored(MetricCollection([MaxMetric()]), both).compute()
        {'MaxMetric': tensor(1.)}
    """

    metrics: Mapping[str, MetricState] = field(default_factory=dict)

    def __add__(self, other: "States") -> "States":
        both = dict(self.metrics)
        for place, state in other.metrics.items():
            both[place] = both[place] + state if place in both else state
        return States(both)


def update_(collection: MetricCollection, *given: Any) -> None:
    """Update metrics; of those that have the same state, the first.

    Args:
        collection: Its states change.
        given: What the metrics take, of at least one row.
    """
    top = _top(collection)
    for head, *_ in groups(collection):
        top[head].update(*given)


def states_of(collection: MetricCollection, rows: int, part: int = 0) -> States:
    """What live metrics have seen of one part.

    Args:
        collection: Not changed, and of no more use: tensors may be shared with it.
        rows: That it was updated with.
        part: Number of the part: each only once.
    """
    top = _top(collection)
    return States(
        {
            place: MetricState(metric.update_count, _values(metric, rows, part))
            for head, *_ in groups(collection)
            for place, metric in _metrics_in(head, top[head])
            if metric.update_count
        }
    )


def _values(metric: Metric, rows: int, part: int) -> dict[str, Value]:
    return {
        name: value_of(getattr(metric, name), reduction, rows, part)
        for name, reduction in _reductions(metric).items()
    }


def _reductions(metric: Metric) -> dict[str, Any]:
    # What was a name when the state was declared is a function by now.
    return metric._reductions


def restored(collection: MetricCollection, states: States) -> MetricCollection:
    """Metrics that have seen all parts.

    Args:
        collection: Live ones as the parts had them, in their beginning; not changed.
        states: Of all parts.

    Returns:
        A collection of copies, by the same names.
    """
    top: dict[str, Any] = copy.deepcopy(_top(collection))
    for head, *others in groups(collection):
        for place, metric in _metrics_in(head, top[head]):
            if place not in states.metrics:
                continue
            state = states.metrics[place]
            values = {
                name: state_of(value, _reductions(metric)[name])
                for name, value in state.values.items()
            }
            inner = place.removeprefix(head)
            for name in (head, *others):
                _put_(dict(_metrics_in("", top[name]))[inner], state.updates, values)
    prefix, postfix = collection.prefix, collection.postfix
    return MetricCollection(top, prefix=prefix, postfix=postfix, compute_groups=False)


def _put_(metric: Metric, updates: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(metric, name, value)
    metric._update_count = updates
    metric._computed = None


def _top(collection: MetricCollection) -> dict[str, Metric]:
    return dict(collection.items(keep_base=True, copy_state=False))


def _metrics_in(name: str, metric: Metric) -> Iterable[tuple[str, Metric]]:
    """Itself and those in it, by place, but those that only pass on to them."""
    for inner, module in metric.named_modules():
        if isinstance(module, Metric) and not isinstance(module, WrapperMetric):
            yield f"{name}.{inner}" if inner else name, module


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
        except USER_ERRORS as error:
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
        except USER_ERRORS as error:
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
        except USER_ERRORS as error:
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
