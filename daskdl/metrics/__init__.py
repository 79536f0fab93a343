"""What is measured of a model's outputs and labels, in one pass and exactly merged.

The numbers are those of torchmetrics; what is here says which, and how they are put
together from parts. No Dask.
"""

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
