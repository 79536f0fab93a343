"""What the user asks for as ``metrics``, as sets of metrics. No Dask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchmetrics import Metric, MetricCollection

from daskdl.errors import OptionError
from daskdl.metrics.base import MetricSet
from daskdl.metrics.own import own_sets
from daskdl.metrics.presets import metric_set_of

_KINDS = (
    "the name of a preset, an object of daskdl.metrics, a Metric or MetricCollection "
    "of torchmetrics, a mapping of names to such metrics, or a sequence of all these"
)


def metric_sets(metrics: Any) -> tuple[MetricSet, ...]:
    """Sets of metrics, which are measured together.

    Args:
        metrics: See :meth:`daskdl.Trainer.evaluate`; not None.

    Raises:
        OptionError: If it is none of what is allowed, or two have the same name.

    Example:
        >>> from torchmetrics import MeanAbsoluteError
        >>> [type(one).__name__ for one in metric_sets(MeanAbsoluteError())]
        ['OwnMetrics']
    """
    sets: list[MetricSet] = []
    own: dict[str, Metric] = {}
    for one in _flat(metrics):
        if isinstance(one, str):
            sets.append(metric_set_of(one))
        elif isinstance(one, MetricSet):
            sets.append(one)
        else:
            _add_(own, _named(one))
    sets += own_sets(own)
    if not sets:
        raise OptionError(f"metrics must be {_KINDS}, got {metrics!r}")
    return tuple(sets)


def _flat(metrics: Any) -> Iterator[Any]:
    """What is in a sequence, however deep."""
    if isinstance(metrics, Sequence) and not isinstance(metrics, str):
        for one in metrics:
            yield from _flat(one)
    else:
        yield metrics


def _add_(own: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    for name, metric in more.items():
        if name == "loss":
            raise OptionError("metrics must not have one named 'loss', which is there")
        if name in own:
            raise OptionError(
                f"metrics has two named {name!r}; name them: metrics={{'one': "
                f"{type(metric).__name__}(...), 'other': ...}}"
            )
        own[name] = metric


def _named(metrics: Any) -> dict[str, Metric]:
    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, MetricCollection):
        return {str(name): one for name, one in metrics.items(keep_base=False)}
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must be {_KINDS}, got {_shown(metrics)}")
    found: dict[str, Metric] = {}
    for name, metric in metrics.items():
        found |= _under(name, metric)
    return found


def _under(name: Any, metric: Any) -> dict[str, Metric]:
    if isinstance(metric, MetricCollection):
        return {f"{name}_{inner}": one for inner, one in _named(metric).items()}
    if not isinstance(name, str) or not isinstance(metric, Metric):
        raise OptionError(
            f"metrics[{name!r}] must be a Metric or MetricCollection of torchmetrics, "
            f"by a name, got {_shown(metric)}"
        )
    return {name: metric}


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; create one, {value.__name__}(...)"
    return repr(value)
