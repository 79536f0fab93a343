"""Numbers that are predicted: errors, R2 and correlation of each column. No Dask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from typing_extensions import override

from daskdl.data.batching import Tree
from daskdl.errors import DataError, ModelError
from daskdl.metrics.base import MetricSet, Shown
from daskdl.metrics.class_scores import is_counted, one_tensor
from daskdl.metrics.classification import check_names
from daskdl.metrics.error_sums import ErrorSums, errors_of
from daskdl.metrics.groups import collected
from daskdl.metrics.number_sections import RegressionSection
from daskdl.metrics.rates import mean_of


@dataclass(frozen=True)
class RegressionMetrics(MetricSet):
    """What ``metrics="regression"`` measures of numbers.

    Outputs and labels are (B,), one column, or (B, n), or (B, T, n) where each step
    counts as a row; (B, 1) and (B,) go together. The numbers of all columns are the
    means of those of each, RMSE and R2 too, as scikit-learn's "uniform_average".

    Args:
        ignore: A label that does not count; NaN is one too. Other columns of its row
            do.
        columns: Their names, for the report; None: numbers.

    Example:
        >>> RegressionMetrics(ignore=float("nan"))
        RegressionMetrics(ignore=nan, columns=None)
    """

    ignore: float | None = None
    columns: Sequence[str] | None = None

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
        if not _go_together(output, y):
            raise ModelError(
                "outputs and labels must have the same shape, (B,), (B, n) or "
                f"(B, T, n), got outputs {tuple(output.shape)} for labels "
                f'{tuple(y.shape)}: for class indices use "classification"'
            )
        predictions, labels = _columns(output), _columns(y)
        check_names(self.columns, labels.shape[1], "columns")
        kept = is_counted(labels, (self.ignore, float("nan")))
        near = (_near(predictions, kept), _near(labels, kept))
        return collected({"errors": ErrorSums(*near)})

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        predictions, labels = _columns(output), _columns(y)
        counted = is_counted(labels, (self.ignore,))
        _check_numbers(labels[counted], predictions[counted])
        return predictions, torch.where(counted, labels, torch.nan)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        sums = computed["errors"]
        each = errors_of(sums)
        every = np.ones(len(sums.values), dtype=bool)
        return {
            **{name: mean_of(values, every) for name, values in each.items()},
            **{f"{name}_per_column": values for name, values in each.items()},
            "count": sums.values,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> RegressionSection:
        numbered = range(len(values["count"]))
        names = tuple(self.columns or map(str, numbered))
        return RegressionSection(values, names)


def _go_together(output: Tensor, y: Tensor) -> bool:
    squeezed = {
        tuple(t.shape[:1]) if t.shape[1:] == (1,) else t.shape for t in (output, y)
    }
    return len(squeezed) == 1 and output.ndim > 0


def _columns(values: Tensor) -> Tensor:
    values = values.double()
    return values[:, None] if values.ndim == 1 else values.flatten(0, -2)


def _near(values_Nn: Tensor, kept_Nn: Tensor) -> Tensor:
    """The mean of what counts of each column, where that is a number, else 0."""
    near = torch.where(kept_Nn, values_Nn, torch.nan).nanmean(dim=0)
    return torch.where(near.isfinite(), near, 0).cpu()


def _check_numbers(labels: Tensor, predictions: Tensor) -> None:
    if not bool(labels.isfinite().all()):
        raise DataError(
            f"{int((~labels.isfinite()).sum())} labels are NaN or infinite: leave "
            'these rows out, or mask NaN by RegressionMetrics(ignore=float("nan"))'
        )
    if not bool(predictions.isfinite().all()):
        raise ModelError(
            f"{int((~predictions.isfinite()).sum())} of {predictions.numel()} outputs "
            "are NaN or infinite, of which nothing can be measured: look at the rows, "
            "and whether training diverged"
        )
