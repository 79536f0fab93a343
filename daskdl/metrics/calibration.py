"""Whether what is said with a confidence is as often right. No Dask.

N labels that count, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.errors import OptionError
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.class_scores import check_classes, class_rows, is_per_class
from daskdl.metrics.classification import check_names, class_names
from daskdl.metrics.groups import collected
from daskdl.metrics.label_scores import binary_rows, check_binary
from daskdl.metrics.number_sections import CalibrationSection
from daskdl.metrics.reliability import ReliabilityBins


@dataclass(frozen=True)
class CalibrationMetrics(MetricSet):
    """What ``metrics="calibration"`` measures of one score per class, or of one score.

    Of classes, a prediction is the best one, and its confidence is its probability; of
    one score, (B,) or (B, 1) with labels 0 and 1, it is 1, with the probability of 1.
    The expected calibration error (ECE) is the mean over predictions of how far the
    accuracy of their bin is from its mean confidence, and the largest one (MCE) that of
    the worst bin. The same errors are there for each class against the others.

    Args:
        bins: Of the same width, from 0 to 1. A confidence on an edge is in the upper
            bin, 1 in the last.
        ignore: A label that does not count, besides that which the loss passes over.
        classes: Their names, for tables; None: those of the data, or numbers.

    Raises:
        OptionError: If there is no bin.

    Example:
        >>> CalibrationMetrics(bins=10)
        CalibrationMetrics(bins=10, ignore=None, classes=None)
    """

    bins: int = 15
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise OptionError(f"bins must be 1 or more, got {self.bins}")

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        kinds = 1
        if is_per_class(shown.output, shown.y):
            kinds += check_classes(shown)
            check_names(self.classes, kinds - 1, "classes")
        else:
            check_binary(shown)
        return collected({"bins": ReliabilityBins(kinds, self.bins)})

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        if not is_per_class(output, y):
            scores, labels = binary_rows(shown, output, y, self.ignore)
            return scores[:, None], labels[:, None] == 1
        scores_NC, labels = class_rows(shown, output, y, self.ignore)
        confidence, best = scores_NC.max(dim=1, keepdim=True)
        right = best == labels[:, None]
        each = labels[:, None] == torch.arange(scores_NC.shape[1], device=labels.device)
        return torch.cat([confidence, scores_NC], 1), torch.cat([right, each], 1)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        bins = computed["bins"]
        values = {
            "ece": float(bins.expected_error[0]),
            "mce": float(bins.largest_error[0]),
            "bin_edges": np.linspace(0, 1, self.bins + 1),
            "bin_count": bins.count_KM[0],
            "bin_confidence": bins.mean_confidence[0],
            "bin_accuracy": bins.accuracy[0],
        }
        if len(bins.count_KM) > 1:
            values |= {
                "ece_per_class": bins.expected_error[1:],
                "mce_per_class": bins.largest_error[1:],
                "bin_count_per_class": bins.count_KM[1:],
                "bin_confidence_per_class": bins.mean_confidence[1:],
                "bin_accuracy_per_class": bins.accuracy[1:],
            }
        return values

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> CalibrationSection:
        names = class_names(self.classes, shown, len(values.get("ece_per_class", ())))
        return CalibrationSection(values, names)
