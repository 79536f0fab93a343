"""Curves over every threshold and the areas below them, in float64. No torch, no state.

Everything follows from two counts at each threshold, the highest first: how many
examples of the class, and how many others, have a score at least that high. Counting
is what takes time, so that it is done once for all curves. The definitions are those
of torchmetrics and scikit-learn.

N examples, T thresholds.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POINTS = 101  # of a curve that is kept: more than a picture shows

Numbers = NDArray[np.float64]


class Steps(NamedTuple):
    """Counts at falling thresholds, from 0 to all.

    Attributes:
        others_T: Examples of other classes with a score at least as high.
        hits_T: Examples of the class with such a score.
    """

    others_T: NDArray[np.int64]
    hits_T: NDArray[np.int64]

    @property
    def has_both(self) -> bool:
        """Whether there are examples of the class, and others."""
        return bool(self.hits_T[-1] and self.others_T[-1])


def steps_of(scores_N: Numbers, hit_N: NDArray[np.bool_]) -> Steps:
    """Count at the scores there are; equal scores are one step.

    Where no example of the class is gained, neither before nor after, a step is left
    out: it is on a straight line of the ROC curve, and adds nothing to any area.

    Args:
        scores_N: Higher for the class; not NaN.
        hit_N: Whether the example is of the class.

    Example:
        >>> steps_of(np.array([0.1, 0.9, 0.9]), np.array([False, True, False]))
        Steps(others_T=array([0, 1, 2]), hits_T=array([0, 1, 1]))
    """
    if not len(scores_N):
        return Steps(
            _from_zero(np.zeros(0, np.int64)), _from_zero(np.zeros(0, np.int64))
        )
    order = np.argsort(-scores_N)
    falling = scores_N[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)
    hits = np.cumsum(hit_N[order], dtype=np.int64)[last]
    gained = np.append(hits[0] > 0, hits[1:] > hits[:-1])
    corner = gained | np.append(gained[1:], True)
    last, hits = last[corner], hits[corner]
    return Steps(_from_zero(last + 1 - hits), _from_zero(hits))


def binned_steps(others_T: NDArray[np.int64], hits_T: NDArray[np.int64]) -> Steps:
    """Count at thresholds, from what is in the bins between them.

    Args:
        others_T: Examples of other classes from this threshold up to the next.
        hits_T: Examples of the class there.
    """
    return Steps(*(_from_zero(np.cumsum(n[::-1])) for n in (others_T, hits_T)))


def roc_area(steps: Steps) -> float:
    """The area below the ROC curve; NaN if there is one class only.

    Example:
        >>> roc_area(steps_of(np.array([0.1, 0.9]), np.array([False, True])))
        1.0
    """
    if not steps.has_both:
        return math.nan
    others, hits = steps  # whole numbers: exact, whatever the number of steps
    twice = np.sum(np.diff(others) * (hits[1:] + hits[:-1]))
    return float(twice / 2 / (float(others[-1]) * float(hits[-1])))


def average_precision(steps: Steps) -> float:
    """Precision at each threshold, weighted by what recall gains; NaN without a hit.

    Example:
        >>> average_precision(steps_of(np.array([0.1, 0.9]), np.array([True, False])))
        0.5
    """
    if not steps.hits_T[-1]:
        return math.nan
    precision, recall = _precision_and_recall(steps)
    return float(np.sum(np.diff(recall) * precision[1:]))


def roc_curve(steps: Steps) -> Numbers:
    """False and true positive rate, (2, POINTS); NaN if there is one class only."""
    if not steps.has_both:
        return np.full((2, POINTS), np.nan)
    others, hits = steps
    return thinned(np.stack([others / others[-1], hits / hits[-1]]))


def precision_recall_curve(steps: Steps) -> Numbers:
    """Recall and precision, (2, POINTS); NaN without an example of the class."""
    if not steps.hits_T[-1]:
        return np.full((2, POINTS), np.nan)
    precision, recall = _precision_and_recall(steps)
    return thinned(np.stack([recall, precision]))


def thinned(curve_2T: Numbers) -> Numbers:
    """As many points as are kept, evenly along the curve; the last one repeats.

    Example:
        >>> thinned(np.array([[0.0, 1.0], [0.0, 1.0]]))[:, :3]
        array([[0., 1., 1.],
               [0., 1., 1.]])
    """
    count = curve_2T.shape[1]
    if count <= POINTS:
        return np.pad(curve_2T, ((0, 0), (0, POINTS - count)), mode="edge")
    along = np.append(0.0, np.cumsum(np.abs(np.diff(curve_2T)).sum(axis=0)))
    wanted = np.linspace(0, along[-1], POINTS)
    return curve_2T[:, np.minimum(np.searchsorted(along, wanted), count - 1)]


def _precision_and_recall(steps: Steps) -> tuple[Numbers, Numbers]:
    """At each threshold; precision of nothing is 1."""
    others, hits = steps
    found = others + hits
    precision = np.divide(hits, found, out=np.ones(len(hits)), where=found > 0)
    return precision, hits / hits[-1]


def _from_zero(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.append(np.int64(0), counts)
