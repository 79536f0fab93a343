"""Rates of counts, in float64. No torch, no state.

The counts are those of torchmetrics' confusion matrices, and the rates are what
torchmetrics makes of them; but it divides in float32, which shows 0.9 as 0.89999998,
and of data with one class only its MCC is 1 or -1 where scikit-learn's is 0.

C classes or labels. A rate of nothing at all, 0/0, is 0, as scikit-learn's is with
``zero_division=0``.
"""

import math

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


def divided(part: Counts, whole: Counts) -> Numbers:
    """Divide; 0/0 is 0.

    Example:
        >>> divided(np.array([1, 0]), np.array([2, 0]))
        array([0.5, 0. ])
    """
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=whole != 0)


def rates(hits_C: Counts, predicted_C: Counts, support_C: Counts) -> dict[str, Numbers]:
    """Precision, recall and F1 of each class.

    Args:
        hits_C: Examples of the class that were predicted as such.
        predicted_C: Examples predicted as such.
        support_C: Examples of the class.

    Example:
        >>> rates(np.array([1]), np.array([2]), np.array([1]))["f1"]
        array([0.66666667])
    """
    return {
        "precision": divided(hits_C, predicted_C),
        "recall": divided(hits_C, support_C),
        "f1": divided(2 * hits_C, predicted_C + support_C),
    }


def share(part: int, whole: int) -> float:
    """A share of counted things; of none it is NaN.

    Example:
        >>> share(1, 4), share(0, 0)
        (0.25, nan)
    """
    return int(part) / int(whole) if whole else math.nan


def mean_of(values: Numbers, counted: NDArray[np.bool_]) -> float:
    """The mean of those that are counted and are numbers; NaN if there are none.

    Example:
        >>> mean_of(np.array([1.0, 0.5, np.nan]), np.array([True, False, True]))
        1.0
    """
    counted = counted & ~np.isnan(values)
    return float(values[counted].mean()) if counted.any() else math.nan


def matthews(confusion_CC: Counts) -> float:
    """Matthews' correlation coefficient; 0 if labels or predictions are all the same.

    Args:
        confusion_CC: Rows are the labels, columns the predictions.

    Example:
        >>> matthews(np.array([[2, 0], [0, 3]])), matthews(np.array([[2, 0], [0, 0]]))
        (1.0, 0.0)
    """
    # Python's integers: the products below pass 2**63 at three thousand million rows.
    support = [int(n) for n in confusion_CC.sum(axis=1)]
    predicted = [int(n) for n in confusion_CC.sum(axis=0)]
    total, right = sum(support), int(np.trace(confusion_CC))
    both = sum(a * b for a, b in zip(support, predicted, strict=True))
    spread = (total**2 - sum(n * n for n in support)) * (
        total**2 - sum(n * n for n in predicted)
    )
    return (right * total - both) / math.sqrt(spread) if spread else 0.0
