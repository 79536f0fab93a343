"""Presets of metrics for `evaluate` and `Evaluate`.

Importing this module loads torchmetrics, with SciPy and matplotlib: about 90 MB per
process. `import daskdl` does not.
"""

from daskdl.evaluation.presets import (
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
