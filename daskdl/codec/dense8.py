"""DENSE8 bodies: a scale for each block of parameters, then eight bits per parameter.

As in all updates, counts are whole steps of the grid: a parameter moves by its
eight-bit value times the scale of its block, and sums of these counts do not depend on
their order. The sender keeps the rounding errors.

Shape suffixes: N = parameters of the model, B = blocks.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daskdl.codec.golomb import compiled
from daskdl.errors import CodecError

# A scale of 4 bytes for 256 parameters of one byte is 1.6 % of the body. A larger block
# would save 1.2 % at most, and round more parameters to the scale of the largest.
BLOCK = 256
MAX_VALUE = 127  # largest eight-bit value; -128 is refused, for a symmetric range
MAX_SCALE = (2**31 - 1) // MAX_VALUE  # so that products stay within int32

ZERO, LOW, SCALE = range(3)
FAULTS = {
    ZERO: "block {block} must have the scale 0 if, and only if, all of it is 0",
    LOW: f"values must be in -{MAX_VALUE} .. {MAX_VALUE}, got -128 in block {{block}}",
    SCALE: f"scales must be in 0 .. {MAX_SCALE}, got {{scale}} of block {{block}}",
}


class Quantized(NamedTuple):
    """Counts of grid steps, rounded to eight bits in each block of 256."""

    scales_B: npt.NDArray[np.int32]  # steps of the grid, >= 0
    values_N: npt.NDArray[np.int8]  # -127 .. 127


def length(size: int) -> int:
    """Return the length of a body in bytes.

    Example:
        >>> length(256), length(257)
        (260, 265)
    """
    return 4 * blocks(size) + size


def blocks(size: int) -> int:
    """Return the number of blocks of a vector; the last block may be shorter."""
    return -(-size // BLOCK)


@compiled
def _quantize_blocks(
    counts_N: npt.NDArray[np.int32],
    scales_B: npt.NDArray[np.int32],
    values_N: npt.NDArray[np.int8],
) -> None:
    for b in range(scales_B.size):
        start = b * BLOCK
        part = counts_N[start : start + BLOCK]
        out = values_N[start : start + BLOCK]
        least = most = np.int32(0)
        for i in range(part.size):
            least = min(least, part[i])
            most = max(most, part[i])
        largest = -np.int64(least)  # int64, since -(-2**31) overflows int32
        if most > largest:
            largest = np.int64(most)
        scale = (largest + MAX_VALUE - 1) // MAX_VALUE
        if scale > MAX_SCALE:
            scale = np.int64(MAX_SCALE)
        scales_B[b] = scale
        # float64, so that the largest value cannot be rounded to more than 127.
        factor = 1.0 / scale if scale else 0.0
        for i in range(part.size):
            out[i] = np.int8(np.rint(np.float64(part[i]) * factor))


@compiled
def _expand_blocks(
    scales_B: npt.NDArray[np.int32],
    values_N: npt.NDArray[np.int8],
    counts_N: npt.NDArray[np.int32],
) -> tuple[int, int]:
    for b in range(scales_B.size):
        start = b * BLOCK
        part = values_N[start : start + BLOCK]
        out = counts_N[start : start + BLOCK]
        scale = scales_B[b]
        if not 0 <= scale <= MAX_SCALE:
            return b, SCALE
        least = most = np.int8(0)
        for i in range(part.size):
            least = min(least, part[i])
            most = max(most, part[i])
            out[i] = np.int32(part[i]) * scale
        if least < -MAX_VALUE:
            return b, LOW
        if (scale == 0) != (least == most):
            return b, ZERO
    return -1, 0


def quantize(counts_N: npt.NDArray[np.int32]) -> Quantized:
    """Round counts of grid steps to eight bits in each block.

    The scale of a block is its largest absolute count divided by 127, rounded up; a
    value is the count divided by the scale, rounded to nearest. Thus rounding changes a
    count by half a scale at most, and blocks with counts up to 127 are exact.

    Example:
        >>> import numpy as np
        >>> quantized = quantize(np.array([0, 127, -300], np.int32))
        >>> quantized.scales_B.tolist(), quantized.values_N.tolist()
        ([3], [0, 42, -100])
        >>> counts_of(quantized).tolist()
        [0, 126, -300]

    Source:
        Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016,
        for eight bits and the largest value as scale. Blocks and whole steps are ours.
    """
    check_counts(counts_N)
    scales_B = np.empty(blocks(len(counts_N)), np.int32)
    values_N = np.empty(len(counts_N), np.int8)
    _quantize_blocks(np.ascontiguousarray(counts_N), scales_B, values_N)
    return Quantized(scales_B, values_N)


def check_counts(counts_N: npt.NDArray[np.int32]) -> None:
    """Check the shape and dtype of counts."""
    if counts_N.ndim != 1 or counts_N.dtype != np.int32:
        raise CodecError(
            "counts must be one-dimensional int32, "
            f"got {counts_N.dtype} of shape {counts_N.shape}"
        )


def counts_of(quantized: Quantized) -> npt.NDArray[np.int32]:
    """Return the counts that receivers compute."""
    scales_B, values_N = quantized
    if scales_B.dtype != np.int32 or values_N.dtype != np.int8:
        raise CodecError(
            f"need scales of int32 and values of int8, got {scales_B.dtype} and "
            f"{values_N.dtype}"
        )
    if values_N.ndim != 1 or scales_B.shape != (blocks(len(values_N)),):
        raise CodecError(
            f"need a scale for each {BLOCK} values, got {scales_B.shape} scales "
            f"for {values_N.shape}"
        )
    counts_N = np.empty(len(values_N), np.int32)
    block, fault = _expand_blocks(scales_B, values_N, counts_N)
    if block >= 0:
        scale = int(scales_B.view(np.uint32)[block])
        raise CodecError(FAULTS[fault].format(block=block, scale=scale))
    return counts_N


def pack(quantized: Quantized) -> npt.NDArray[np.uint8]:
    """Write a body.

    Example:
        >>> import numpy as np
        >>> pack(quantize(np.array([0, 1, -300], np.int32))).tobytes().hex(" ")
        '03 00 00 00 00 00 9c'
    """
    counts_of(quantized)
    scales_B, values_N = quantized
    scales = np.ascontiguousarray(scales_B, "<i4").view(np.uint8)
    return np.concatenate([scales, values_N.view(np.uint8)])


def unpack(body: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.int32]:
    """Read a body written by :func:`pack`."""
    cut = 4 * blocks(size)
    scales_B = body[:cut].view("<i4").astype(np.int32)
    # Copied, so that numba compiles the reader once: frames may be read-only.
    return counts_of(Quantized(scales_B, body[cut:].view(np.int8).copy()))
