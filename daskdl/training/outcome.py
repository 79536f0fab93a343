"""What one run leaves to the next: how far compression came, and what is not sent."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from daskdl.compression.flat import add_counts_
from daskdl.thresholds import Sent
from daskdl.training.tensors import described, trained_in


class Outcome(NamedTuple):
    """What one run leaves to the next: how far it came with compression."""

    sent: Mapping[str, Sent]  # what the last exchange of each pattern did
    steps: int  # made in all, by whoever made most of them


@dataclass(frozen=True, eq=False)
class KeptResidual:
    """The residuals of all replicas at the end of a fit, for the next one.

    Attributes:
        counts_N: Their sum, int32, steps of `grid`, in the order of FlatParameters.
        grid: Parameter units per step, a power of two.
        layout: Of the trainable parameters that it is beside, as `layout_of` says it.
        checksum: Of their values, as `checksum_of` says it.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> counts_N = np.array([5, -5], np.int32)
        >>> kept = KeptResidual.beside(layer, counts_N, 0.5)
        >>> [kept.share_N(place, founders=2).tolist() for place in (0, 1)]
        [[3, -2], [2, -3]]
    """

    counts_N: NDArray[np.int32]
    grid: float
    layout: Mapping[str, str]
    checksum: int

    @classmethod
    def beside(
        cls, module: nn.Module, counts_N: NDArray[np.int32], grid: float
    ) -> "KeptResidual":
        """What is not sent of a fit that ended with a module's parameters."""
        return cls(counts_N, grid, layout_of(module), checksum_of(module))

    def fits(self, module: nn.Module) -> bool:
        """Whether a module has the same trainable parameters, with the same values."""
        same = list(self.layout.items()) == list(layout_of(module).items())
        return same and self.checksum == checksum_of(module)

    def share_N(self, place: int, founders: int) -> NDArray[np.int32]:
        """Return what a founder of a run begins with; the shares add up exactly.

        Args:
            place: Of the founder among all, from 0. What cannot be divided goes to
                the first ones.
            founders: How many there are.
        """
        whole_N, left_N = np.divmod(self.counts_N, np.int32(founders))
        return whole_N + (left_N > place)

    def deliver_(self, module: nn.Module) -> None:
        """Add all of it to a module's parameters."""
        add_counts_(module, self.counts_N, self.grid)


def layout_of(module: nn.Module) -> dict[str, str]:
    """Name, dtype and shape of the trainable parameters, in their order.

    Example:
        >>> layout_of(nn.Linear(2, 1))
        {'weight': 'float32 (1, 2)', 'bias': 'float32 (1,)'}
    """
    return {name: described(tensor) for name, tensor in trained_in(module).items()}


def checksum_of(module: nn.Module) -> int:
    """A CRC-32 of the values of the trainable parameters, on whatever device."""
    checksum = 0
    for tensor in trained_in(module).values():
        octets = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(octets.numpy().data, checksum)
    return checksum
