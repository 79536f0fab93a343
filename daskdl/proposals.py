"""What a replica would send now, as numbers and as a frame. No state.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from daskdl import codec
from daskdl.codec import Quantized, Stamp

Counts = npt.NDArray[np.int32]
Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Proposal:
    """Quanta at some positions, of the parameters that one algorithm decides on."""

    pattern: str  # whose algorithm it was
    size: int  # N
    threshold: float  # the quantum: on the grid, exact in float32, parameter units
    rule: float  # what the rule said, within what the grid can express
    count: int  # the quantum in steps of the grid, in [1, 2**22]
    entries_K: Counts  # +(i + 1) or -(i + 1), ascending in i

    @property
    def entries(self) -> int:
        """K; without any there is nothing to send."""
        return len(self.entries_K)

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a frame of the smallest kind."""
        return codec.encode(stamp, self.size, self.threshold, self.entries_K)


@dataclass(frozen=True, eq=False)
class DenseProposal:
    """The whole residual, rounded to eight bits in each block."""

    grid: float  # one step, parameter units
    quantized: Quantized  # steps of the grid
    rules: Mapping[str, float]  # threshold to go on from, by pattern

    @property
    def entries(self) -> int:
        """N; 0 if nothing would move, so that there is nothing to send."""
        values_N = self.quantized.values_N
        return len(values_N) if values_N.any() else 0

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a DENSE8 frame."""
        return codec.encode_dense8(stamp, self.grid, self.quantized)
