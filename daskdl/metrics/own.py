"""Metrics of torchmetrics that the user brings. No Dask."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.errors import OptionError
from daskdl.metrics.base import MetricSet, Shown, probabilities
from daskdl.metrics.class_scores import checked
from daskdl.metrics.label_scores import likelihoods


@dataclass(frozen=True, eq=False)
class OwnMetrics(MetricSet):
    """Metrics of torchmetrics, by name.

    Attributes:
        metrics: In the order in which they are told; not changed.
        scored: Whether they get probabilities: torchmetrics makes these of scores that
            it takes for logits, which it does if one of those at hand is outside
            [0, 1], so that the answer would depend on which rows come together. Else
            they get outputs as they are.
    """

    metrics: Mapping[str, Metric]
    scored: bool

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        made: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            made[name] = metric.clone().cpu()
            made[name].reset()
        return MetricCollection(made)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Any, Any]:
        if not self.scored or not isinstance(output, Tensor):
            return output, y
        if not output.is_floating_point() or not isinstance(y, Tensor):
            return output, y
        classes = output.ndim == y.ndim + 1
        likely = probabilities if classes else likelihoods
        return checked(likely(output, shown.scale), shown.scale), y

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        order = {name: i for i, name in enumerate(self.metrics)}
        names = sorted(computed, key=lambda name: order.get(name, len(order)))
        return {name: _plain(computed[name]) for name in names}


def own_sets(metrics: Mapping[str, Metric]) -> tuple[OwnMetrics, ...]:
    """Those that need probabilities, and the others.

    Raises:
        OptionError: If one of them cannot be merged.
    """
    for name, metric in metrics.items():
        if any(isinstance(module, Running) for module in metric.modules()):
            raise OptionError(
                f"metrics[{name!r}] is of the last updates, of which there are none "
                "where parts are measured apart; give the metric without Running"
            )
    both = (
        OwnMetrics({n: m for n, m in metrics.items() if is_scored(m) is scored}, scored)
        for scored in (True, False)
    )
    return tuple(own for own in both if own.metrics)


def is_scored(metric: Metric) -> bool:
    """Whether it, or one that it is made of, is for classification.

    Example:
        >>> import torchmetrics
        >>> is_scored(torchmetrics.AUROC(task="binary"))
        True
        >>> is_scored(torchmetrics.MeanSquaredError())
        False
    """
    return any(
        base.__module__.startswith("torchmetrics.classification.")
        for module in metric.modules()
        for base in type(module).__mro__
    )


def _plain(value: Any) -> Any:
    """Numbers, and numpy arrays, in the place of tensors."""
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
