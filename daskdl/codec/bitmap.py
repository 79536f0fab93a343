"""BITMAP bodies: one bit per parameter, then one sign bit per entry.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

import numpy as np
import numpy.typing as npt

from daskdl.codec.entries import pack_signs, signed
from daskdl.errors import CodecError


def length(size: int, count: int) -> int:
    """Return the bytes of a body; without entries there is none."""
    return (size + 7) // 8 + (count + 7) // 8 if count else 0


def pack(
    size: int, positions_K: npt.NDArray[np.int32], entries_K: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """Write the map of the entries and their signs.

    Example:
        >>> import numpy as np
        >>> entries = np.array([1, -4], np.int32)
        >>> pack(10, np.abs(entries) - 1, entries).tobytes().hex(" ")
        '09 00 02'
    """
    if not len(entries_K):
        return np.empty(0, np.uint8)
    present_N = np.zeros(size, bool)
    present_N[positions_K] = True
    bits = np.packbits(present_N, bitorder="little")
    return np.concatenate([bits, pack_signs(entries_K)])


def unpack(body: npt.NDArray[np.uint8], size: int, count: int) -> npt.NDArray[np.int32]:
    """Read what :func:`pack` wrote.

    Args:
        body: ``length(size, count)`` bytes.
        size: N.
        count: K.

    Returns:
        Entries, int32, shape (K,), an array of their own.

    Raises:
        CodecError: If the map does not have K bits, or padding is not zero.
    """
    if not count:
        return np.empty(0, np.int32)
    cut = (size + 7) // 8
    # As bool: numpy looks for what is set in those 7 times as fast.
    present = np.unpackbits(body[:cut], bitorder="little").view(bool)
    positions = np.flatnonzero(present)
    if len(positions) and positions[-1] >= size:
        raise CodecError(
            f"padding after {size} bits of the map must be 0, "
            f"got a bit at {positions[-1]}"
        )
    if len(positions) != count:
        raise CodecError(f"the map has {len(positions)} bits for {count} entries")
    return signed(positions.astype(np.int32), body[cut:])
