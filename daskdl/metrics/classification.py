"""Classes of which each row has one: rates, top N, areas below curves. No Dask.

N labels that count, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.errors import OptionError
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.class_scores import check_classes, class_rows
from daskdl.metrics.class_section import ClassSection
from daskdl.metrics.groups import collected
from daskdl.metrics.ranking import check_thresholds, ranked, ranking
from daskdl.metrics.rates import matthews, mean_of, rates, share
from daskdl.metrics.right_counts import TopRight

_TOP = 5


@dataclass(frozen=True)
class ClassificationMetrics(MetricSet):
    """What ``metrics="classification"`` measures of one score per class.

    Outputs are (B, C), or (B, C, T) with a label for each step, and labels are class
    indices. Precision, recall and F1 of a class are 0 where they would be 0/0; their
    means ("macro") leave out classes that are neither labelled nor predicted. ROC AUC
    and average precision are of each class against the others, NaN without examples of
    both, and their means leave these out.

    Args:
        top: A prediction is right in top-N accuracy if the label is among this many
            best scores; of equal scores, those that `torch.topk` takes. None: 5 of 6
            classes or more, 2 of 3 to 5, and with 2 classes there is none.
        thresholds: None: areas and curves are exact, and 8 bytes are kept for each
            class of each row. A number: they are those of that many thresholds, evenly
            from 0 to 1, and memory does not grow with the data.
        ignore: A label that does not count, besides that which the loss passes over.
        classes: Their names, for the report; None: those of the data, or numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> ClassificationMetrics(top=3)
        ClassificationMetrics(top=3, thresholds=None, ignore=None, classes=None)
    """

    top: int | None = None
    thresholds: int | None = None
    ignore: int | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 2:
            raise OptionError(f"top must be 2 or more, got {self.top}: 1 is accuracy")
        check_thresholds(self.thresholds)

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        classes = check_classes(shown)
        check_names(self.classes, classes, "classes")
        top = self._top(classes)
        metrics: dict[str, Metric] = {
            "confusion": MulticlassConfusionMatrix(classes, validate_args=False),
            "ranking": ranking(classes, self.thresholds),
        }
        if top is not None:
            metrics["top"] = TopRight(top)
        return collected(metrics)

    def _top(self, classes: int) -> int | None:
        if self.top is None:
            return (_TOP if classes > _TOP else 2) if classes > 2 else None
        if self.top >= classes:
            raise OptionError(
                f"top must be below the number of classes, got {self.top} of {classes}"
            )
        return self.top

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        return class_rows(shown, output, y, self.ignore)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy()
        support, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
        hits, seen = np.diag(confusion), support + predicted > 0
        each = {f"{k}_per_class": v for k, v in rates(hits, predicted, support).items()}
        each |= ranked(computed["ranking"])
        values = {"accuracy": share(hits.sum(), support.sum())}
        if "top" in computed:
            name = f"top_{self._top(len(support))}_accuracy"
            values[name] = computed["top"].share
        return {
            **values,
            **macro(each, seen),
            "mcc": matthews(confusion),
            "support": support,
            "predicted": predicted,
            "confusion_matrix": confusion,
            **each,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> ClassSection:
        names = class_names(self.classes, shown, len(values["support"]))
        return ClassSection(values, names)


def macro(each: Mapping[str, Any], seen: Any) -> dict[str, float]:
    """Means over classes, of all that there is of each.

    Args:
        each: By names that end in ``_per_class``.
        seen: Which classes count.
    """
    return {
        name.removesuffix("_per_class"): mean_of(values, seen)
        for name, values in each.items()
        if name.endswith("_per_class")
    }


def check_names(names: Sequence[str] | None, count: int, what: str) -> None:
    """Check that there are as many names as things.

    Raises:
        OptionError: If there are more, or fewer.
    """
    if names is not None and len(names) != count:
        raise OptionError(f"{what} must be {count} names, got {len(names)}: {names!r}")


def class_names(
    names: Sequence[str] | None, shown: Shown, count: int
) -> tuple[str, ...]:
    """A name for each class: its number, if there is no better one."""
    given = list(names or shown.classes or ())[:count]
    return (*map(str, given), *(str(k) for k in range(len(given), count)))
