"""States of metrics: taken from those of one part, added up, and put into new ones.

Nothing is computed before all parts are there. What was never updated has nothing to
say: its defaults are not those of data. Nested metrics are found by their place in the
collection.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from daskdl.metrics.groups import groups
from daskdl.metrics.reductions import Value, state_of, value_of


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
