"""Something that is there or not: rates at a threshold, areas below curves. No Dask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryConfusionMatrix
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.class_section import BinarySection
from daskdl.metrics.classification import check_names, class_names
from daskdl.metrics.groups import collected
from daskdl.metrics.label_scores import binary_rows, check_binary, check_threshold
from daskdl.metrics.ranking import check_thresholds, ranked, ranking
from daskdl.metrics.rates import divided, matthews, rates, share


@dataclass(frozen=True)
class BinaryMetrics(MetricSet):
    """What ``metrics="binary"`` measures of one score, or of two classes.

    Outputs are (B,), (B, 1), or (B, 2) with the score of 1 second; labels are 0 and 1,
    as integers, bools or floats. Rates are those of 1, and 0 where they would be 0/0.
    ROC AUC is NaN without labels of both kinds, average precision without a 1.

    Args:
        threshold: 1 is predicted if its probability is above, in [0, 1).
        thresholds: Of areas and curves, as of `ClassificationMetrics`.
        ignore: A label that does not count, besides that which the loss passes over;
            NaN is one too.
        classes: Names of 0 and 1, for the report; None: those of the data, or 0 and 1.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> BinaryMetrics(threshold=0.3)
        BinaryMetrics(threshold=0.3, thresholds=None, ignore=None, classes=None)
    """

    threshold: float = 0.5
    thresholds: int | None = None
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_thresholds(self.thresholds)

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        check_binary(shown)
        check_names(self.classes, 2, "classes")
        confusion = BinaryConfusionMatrix(self.threshold, validate_args=False)
        metrics = {"confusion": confusion, "ranking": ranking(1, self.thresholds)}
        return collected(metrics)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        scores, labels = binary_rows(shown, output, y, self.ignore)
        return scores[:, None], labels[:, None]

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy()
        (tn, fp), (fn, tp) = confusion
        at = {k: float(v) for k, v in rates(tp, tp + fp, tp + fn).items()}
        curves = ranked(computed["ranking"])
        return {
            "accuracy": share(tp + tn, confusion.sum()),
            **at,
            "specificity": float(divided(tn, tn + fp)),
            "mcc": matthews(confusion),
            "roc_auc": float(curves["roc_auc_per_class"][0]),
            "average_precision": float(curves["average_precision_per_class"][0]),
            "confusion_matrix": confusion,
            "roc_curves": curves["roc_curves"],
            "precision_recall_curves": curves["precision_recall_curves"],
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> BinarySection:
        return BinarySection(values, class_names(self.classes, shown, 2))
