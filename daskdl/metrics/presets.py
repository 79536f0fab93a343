"""Sets of metrics by their names."""

from typing import Literal

from daskdl.errors import OptionError
from daskdl.metrics.base import MetricSet
from daskdl.metrics.binary import BinaryMetrics
from daskdl.metrics.calibration import CalibrationMetrics
from daskdl.metrics.classification import ClassificationMetrics
from daskdl.metrics.multilabel import MultilabelMetrics
from daskdl.metrics.regression import RegressionMetrics

Preset = Literal["classification", "binary", "multilabel", "regression", "calibration"]

_SETS: dict[str, type[MetricSet]] = {
    "classification": ClassificationMetrics,
    "binary": BinaryMetrics,
    "multilabel": MultilabelMetrics,
    "regression": RegressionMetrics,
    "calibration": CalibrationMetrics,
}


def metric_set_of(name: str) -> MetricSet:
    """The set of this name, with its defaults.

    Args:
        name: One of those that `Preset` lists.

    Raises:
        OptionError: If it is none.

    Example:
        >>> metric_set_of("calibration")
        CalibrationMetrics(bins=15, ignore=None, classes=None)
    """
    if name not in _SETS:
        raise OptionError(
            f"metrics by name are {', '.join(map(repr, _SETS))}, got {name!r}: give "
            "one of these, an object of daskdl.metrics, or metrics of torchmetrics"
        )
    return _SETS[name]()
