"""What is measured of a model's outputs and labels, in one pass and exactly merged.

The numbers are those of torchmetrics; what is here says which, and how they are put
together from parts. No Dask.

Torchmetrics brings SciPy and matplotlib with it, some 90 MB in each process: it is
imported by whoever measures something, and not by ``import daskdl``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskdl.metrics.binary import BinaryMetrics
    from daskdl.metrics.calibration import CalibrationMetrics
    from daskdl.metrics.classification import ClassificationMetrics
    from daskdl.metrics.multilabel import MultilabelMetrics
    from daskdl.metrics.regression import RegressionMetrics

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
    presets = importlib.import_module("daskdl.metrics.presets")
    return getattr(presets, name)
