"""Labels of which a row may have any number: rates, areas below curves. No Dask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MultilabelConfusionMatrix
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.class_section import LabelSection
from daskdl.metrics.classification import check_names, class_names, macro
from daskdl.metrics.groups import collected
from daskdl.metrics.label_scores import (
    check_multilabel,
    check_threshold,
    multilabel_rows,
)
from daskdl.metrics.ranking import MASKED, check_thresholds, ranked, ranking
from daskdl.metrics.rates import divided, rates, share
from daskdl.metrics.right_counts import AllRight


@dataclass(frozen=True)
class MultilabelMetrics(MetricSet):
    """What ``metrics="multilabel"`` measures of one score for each label.

    Outputs are (B, L), or (B, L, T), and labels are 0 and 1 of the same shape, as
    integers, bools or floats. Accuracy is the share of right labels, exact match that
    of rows in which all are. Other numbers are those of each label, and their means,
    by the rules of `ClassificationMetrics`.

    Args:
        threshold: A label is predicted if its probability is above, in [0, 1).
        thresholds: Of areas and curves, as of `ClassificationMetrics`.
        ignore: A label that does not count, besides that which the loss passes over;
            NaN is one too. Others of its row do.
        classes: Names of the labels, for the report; None: those of the data, or
            numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> MultilabelMetrics(ignore=-1)
        MultilabelMetrics(threshold=0.5, thresholds=None, ignore=-1, classes=None)
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
        labels = check_multilabel(shown)
        check_names(self.classes, labels, "classes")
        metrics = {
            "confusion": MultilabelConfusionMatrix(
                labels, self.threshold, ignore_index=MASKED, validate_args=False
            ),
            "ranking": ranking(labels, self.thresholds),
            "exact": AllRight(self.threshold),
        }
        return collected(metrics)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        return multilabel_rows(shown, output, y, self.ignore)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy().reshape(-1, 2, 2)
        tn, fp, fn, tp = confusion.reshape(-1, 4).T
        all_, predicted, support = tn + fp + fn + tp, tp + fp, tp + fn
        each = {"accuracy_per_class": divided(tp + tn, all_)}
        each |= {f"{k}_per_class": v for k, v in rates(tp, predicted, support).items()}
        each |= ranked(computed["ranking"])
        return {
            **macro(each, support + predicted > 0),
            "accuracy": share((tp + tn).sum(), all_.sum()),
            "exact_match": computed["exact"].share,
            "rows": computed["exact"].rows,
            "support": support,
            "predicted": predicted,
            "confusion_matrices": confusion,
            **each,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> LabelSection:
        return LabelSection(
            values, class_names(self.classes, shown, len(values["support"]))
        )
