"""Predictions counted by their confidence, of any number of kinds. No Dask.

K kinds of predictions, M bins of confidence, N rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class Bins(NamedTuple):
    """What is in the bins of each kind.

    Attributes:
        count_KM: Predictions.
        confidence_KM: The sum of their confidences.
        right_KM: Those that are right.
    """

    count_KM: NDArray[np.int64]
    confidence_KM: NDArray[np.float64]
    right_KM: NDArray[np.int64]

    @property
    def mean_confidence(self) -> NDArray[np.float64]:
        """Of each bin; NaN of an empty one."""
        return self.confidence_KM / np.where(self.count_KM, self.count_KM, np.nan)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """The share of right ones of each bin; NaN of an empty one."""
        return self.right_KM / np.where(self.count_KM, self.count_KM, np.nan)

    @property
    def expected_error(self) -> NDArray[np.float64]:
        """Mean over the predictions of how far their bin's confidence is off."""
        off = np.abs(self.right_KM - self.confidence_KM).sum(axis=1)
        count = self.count_KM.sum(axis=1)
        return np.asarray(off / np.where(count, count, np.nan))

    @property
    def largest_error(self) -> NDArray[np.float64]:
        """Of any bin that is not empty; NaN if all are."""
        off = np.abs(self.accuracy - self.mean_confidence)
        largest = np.where(np.isnan(off), -1.0, off).max(axis=1)
        return np.where(largest < 0, np.nan, largest)


class ReliabilityBins(Metric):
    """Counts predictions by their confidence, in bins of the same width.

    A confidence on the edge of two bins is in the upper one, and 1 is in the last one.

    Args:
        kinds: How many are counted apart.
        bins: From 0 to 1.
    """

    full_state_update = False
    counts: Tensor
    confidences: Tensor
    rights: Tensor

    def __init__(self, kinds: int, bins: int) -> None:
        super().__init__()
        self.kinds, self.bins = kinds, bins
        none = torch.zeros(kinds, bins, dtype=torch.int64)
        self.add_state("counts", none, dist_reduce_fx="sum")
        self.add_state("confidences", none.double(), dist_reduce_fx="sum")
        self.add_state("rights", none.clone(), dist_reduce_fx="sum")

    @override
    def update(self, confidence_NK: Tensor, right_NK: Tensor) -> None:
        """Count some predictions.

        Args:
            confidence_NK: From 0 to 1, float64.
            right_NK: Whether they are right.
        """
        edges = edges_of(self.bins, confidence_NK)[1:-1]
        bins = torch.bucketize(confidence_NK.contiguous(), edges, right=True)
        kinds = torch.arange(self.kinds, device=bins.device)
        place = (bins + kinds * self.bins).flatten()
        weights = (None, confidence_NK.flatten(), right_NK.flatten().double())
        counts, confidences, rights = (self._sum(place, w) for w in weights)
        self.counts += counts
        self.confidences += confidences
        self.rights += rights.long()

    def _sum(self, place: Tensor, weight: Tensor | None) -> Tensor:
        sums = torch.bincount(place, weight, minlength=self.kinds * self.bins)
        return sums.reshape(self.kinds, self.bins)

    @override
    def compute(self) -> Bins:
        """The bins, as arrays."""
        states = (self.counts, self.confidences, self.rights)
        return Bins(*(s.reshape(self.kinds, -1).cpu().numpy() for s in states))


def edges_of(bins: int, like: Tensor) -> Tensor:
    """Edges of bins of the same width from 0 to 1.

    Args:
        bins: How many.
        like: Says where, and of which dtype.
    """
    return torch.linspace(0, 1, bins + 1, dtype=like.dtype, device=like.device)
