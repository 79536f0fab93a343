"""Arrays in eight bits for each number, as frames of the codec, and back.

What rounding leaves is for the sender to keep. numpy in, numpy out; no torch, no state.

Shape suffix: N = numbers of one array.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl import codec
from daskdl.channel.protocol import Arrays
from daskdl.codec import Stamp, counts_of, quantize

FRAME = "dense8 "  # before dtype, shape and name of an array that is a frame
# Counts stay within int32, and a block whose largest number is 2**-23 of that of the
# array still has eight bits.
COUNT_BITS = 30
# Exponents of a grid: it has to be exact in float32, as 2**31 times it must be.
LEAST, MOST = -126, 96


class Rounded(NamedTuple):
    """Arrays as they travel, and what that leaves."""

    sent: Arrays  # frames, or the arrays themselves
    left: Arrays  # array - what is read of its frame, where that is not 0


def rounded(arrays: Arrays, stamp: Stamp) -> Rounded:
    """Write arrays as DENSE8 frames.

    An array stays as it is if a frame would not be smaller, or could not hold it: NaN
    and infinities arrive as such.

    Args:
        arrays: Floating ones, not changed.
        stamp: Of all frames.

    Example:
        >>> array = np.linspace(-1, 1, 256, dtype=np.float32)
        >>> sent, left = rounded({"a": array}, Stamp(7, 0, 1, 5))
        >>> [(name, frame.nbytes) for name, frame in sent.items()]
        [('dense8 <f4 256 a', 324)]
        >>> bool(np.all(read(sent)["a"] + left["a"] == array))
        True
    """
    sent: dict[str, NDArray[Any]] = {}
    left: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        written = _written(array, stamp)
        if written is None:
            sent[name] = array
            continue
        frame, values_N = written
        shape = ",".join(map(str, array.shape))
        sent[f"{FRAME}{array.dtype.str} {shape} {name}"] = frame
        rest = array - values_N.reshape(array.shape)
        if rest.any():
            left[name] = rest
    return Rounded(sent, left)


def _written(
    array: NDArray[Any], stamp: Stamp
) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """A frame and what is read of it; None: it would be of no use."""
    grid = _grid(array)
    if grid is None:
        return None
    steps_N = array.reshape(-1) / grid
    quantized = quantize(np.rint(steps_N, out=steps_N).astype(np.int32))
    frame = codec.encode_dense8(stamp, grid, quantized)
    if frame.nbytes >= array.nbytes:
        return None
    return frame, _values(counts_of(quantized), grid, array.dtype)


def read(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Arrays as others have sent them, each under its own name.

    Raises:
        CodecError: If a frame is damaged.
    """
    return dict(_read(name, array) for name, array in arrays.items())


def _read(full: str, array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    if not full.startswith(FRAME):
        return full, array
    _, kind, shape, name = full.split(" ", 3)
    update = codec.decode(array.data)
    assert isinstance(update, codec.DenseUpdate)
    values_N = _values(update.counts_N, update.grid, np.dtype(kind))
    return name, values_N.reshape([int(length) for length in shape.split(",")])


def _grid(array: NDArray[Any]) -> float | None:
    """The step that suits an array; None: there is none."""
    largest = float(np.abs(array).max(initial=0.0))
    exponent = max(LEAST, math.frexp(largest)[1] - COUNT_BITS)
    if not array.size or not math.isfinite(largest) or exponent > MOST:
        return None
    return math.ldexp(1.0, exponent)


def _values(
    counts_N: NDArray[np.int32], grid: float, dtype: np.dtype[Any]
) -> NDArray[Any]:
    values_N: NDArray[Any] = counts_N.astype(dtype)
    values_N *= grid
    return values_N
