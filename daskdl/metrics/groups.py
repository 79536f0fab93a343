"""Which metrics of a collection have the same state, so that one is updated for all.

Torchmetrics decides it by the numbers that the first update happens to give: two
metrics that only agree there, such as two top-k accuracies on rows that are all right,
would share one state for ever. Here it is decided by what they are made of.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

# Of a metric, what has no part in its updates; of a class, likewise.
_LIVE = {"update", "compute", "_update_signature", "_computed", "_forward_cache"}
_COUNTED = {"_update_count", "_from_collection", "prefix", "postfix"}
_PLAIN = (str, int, float, set, torch.dtype, torch.device)
_TOLD = {
    "compute",
    "plot",
    "higher_is_better",
    "is_differentiable",
    "full_state_update",
}


def groups(collection: MetricCollection) -> list[list[str]]:
    """Names of metrics that share their state, each group headed by its first.

    Args:
        collection: Groups that it was given as lists are taken as they are.

    Example:
        >>> from torchmetrics import classification
        >>> kinds = classification.MulticlassPrecision, classification.MulticlassRecall
        >>> groups(MetricCollection([kind(3) for kind in kinds]))
        [['MulticlassPrecision', 'MulticlassRecall']]
        >>> tops = {f"top {k}": classification.MulticlassRecall(3, k) for k in (1, 2)}
        >>> groups(MetricCollection(tops))
        [['top 1'], ['top 2']]
    """
    if isinstance(collection._enable_compute_groups, list):
        return [list(names) for names in collection.compute_groups.values()]
    found: list[tuple[Metric, list[str]]] = []
    for name, metric in collection.items(keep_base=True, copy_state=False):
        for head, names in found:
            if _share(head, metric):
                names.append(name)
                break
        else:
            found.append((metric, [name]))
    return [names for _, names in found]


def _share(one: Metric, two: Metric) -> bool:
    if any(True for _ in one.children()) or any(True for _ in two.children()):
        return False
    if not one._defaults or _made_of(type(one)) != _made_of(type(two)):
        return False
    ours, theirs = _settings(one), _settings(two)
    return ours.keys() == theirs.keys() and all(
        _same(ours[name], theirs[name]) for name in ours
    )


@functools.cache
def _made_of(kind: type) -> dict[str, Any]:
    """All that its updates may call or look at, where it was defined."""
    return {
        name: getattr(kind, name)
        for name in dir(kind)
        if not name.startswith(("__", "plot_", "_abc")) and name not in _TOLD
    }


def _settings(metric: Metric) -> dict[str, Any]:
    left_out = _LIVE | _COUNTED | metric._defaults.keys()
    return {k: v for k, v in vars(metric).items() if k not in left_out}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[k], two[k]) for k in one)
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return one is two or (isinstance(one, _PLAIN) and bool(one == two))


def collected(metrics: Mapping[str, Metric]) -> MetricCollection:
    """Metrics of which each has its own state.

    Torchmetrics would guess from the first rows which have the same one.
    """
    groups = [[name] for name in metrics]
    return MetricCollection(dict(metrics), compute_groups=groups)
