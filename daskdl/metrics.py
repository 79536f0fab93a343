"""The sets of metrics for `evaluate` and `Evaluate`.

Torchmetrics brings SciPy and matplotlib with it, some 90 MB in each process: it is
imported by whoever measures something, and not by ``import daskdl``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskdl.evaluation.metric_sets import (
        BinaryMetrics,
        CalibrationMetrics,
        ClassificationMetrics,
        MultilabelMetrics,
        RegressionMetrics,
    )

__all__ = [
    "BinaryMetrics",
    "CalibrationMetrics",
    "ClassificationMetrics",
    "MultilabelMetrics",
    "RegressionMetrics",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("daskdl.evaluation.metric_sets"), name)
