"""Arrays in eight bits for each number, as frames of the codec, and back.

What rounding leaves is for the sender to keep. numpy in, numpy out; no torch, no state.

Shape suffix: N = numbers of one array.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl import codec
from daskdl.channel.parcel import Arrays
from daskdl.codec import Stamp, quantize

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
        frame = _frame(array, stamp)
        if frame is None:
            sent[name] = array
            continue
        full = f"{FRAME}{array.dtype.str} {','.join(map(str, array.shape))} {name}"
        sent[full] = frame
        rest = array - _values(full, frame)
        if rest.any():
            left[name] = rest
    return Rounded(sent, left)


def read(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Arrays as others have sent them, each under its own name.

    Raises:
        CodecError: If a frame is damaged.
    """
    whole = {name: a for name, a in arrays.items() if not name.startswith(FRAME)}
    frames = {name: a for name, a in arrays.items() if name.startswith(FRAME)}
    return whole | {n.split(" ", 3)[3]: _values(n, a) for n, a in frames.items()}


def _frame(array: NDArray[Any], stamp: Stamp) -> NDArray[np.uint8] | None:
    largest = float(np.abs(array).max(initial=0.0))
    exponent = max(LEAST, math.frexp(largest)[1] - COUNT_BITS)
    if not array.size or not math.isfinite(largest) or exponent > MOST:
        return None
    grid = math.ldexp(1.0, exponent)
    counts_N = np.rint(array.reshape(-1) / grid).astype(np.int32)
    frame = codec.encode_dense8(stamp, grid, quantize(counts_N))
    return frame if frame.nbytes < array.nbytes else None


def _values(full: str, frame: NDArray[np.uint8]) -> NDArray[Any]:
    _, kind, shape, _ = full.split(" ", 3)
    update = codec.decode(frame.data)
    assert isinstance(update, codec.DenseUpdate)
    dtype = np.dtype(kind)
    values_N: NDArray[Any] = update.counts_N.astype(dtype)
    values_N *= update.grid
    return values_N.reshape([int(length) for length in shape.split(",")])
