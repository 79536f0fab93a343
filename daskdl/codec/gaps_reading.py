"""Reads GAPS bodies, and believes nothing in them.

Every bit is checked against the end of the stream before it is read and every
position against the end of its block before it is written: numba checks
neither. The other direction is :mod:`daskdl.codec.gaps`.

Shape suffixes: K = entries of one update.
"""

import numpy as np
import numpy.typing as npt

from daskdl.codec.entries import signed
from daskdl.codec.gaps import (
    BLOCK,
    COUNT_BITS,
    HEADER_BITS,
    MAX_BLOCK_RICE,
    MAX_RICE,
    PER_BLOCK,
    compiled,
)
from daskdl.errors import CodecError

# A reading function returns the next bit, or -(8 * got + one of these).
PAST_END, OUTSIDE, BAD_RICE, BAD_COUNT = 1, 2, 3, 4
# Of a byte, 0 apart.
LOWEST_ONE = np.array([0, *((i & -i).bit_length() - 1 for i in range(1, 256))])
FAULTS = {
    PAST_END: "codes run past the {bits} bits there are, at parameter {got}",
    OUTSIDE: "a gap from parameter {got} leaves its block or the {size} parameters",
    BAD_RICE: f"a block's Rice parameter must be in 0 .. {MAX_BLOCK_RICE}, got {{got}}",
    BAD_COUNT: "the blocks' counts must add up to {count} entries, got {got}",
}


def length_range(size: int, count: int) -> tuple[int, int]:
    """Return the fewest and the most bytes a body can have.

    At least one bit for each gap. At most what one Rice parameter as long as
    N makes, since packing takes the shorter way.
    """
    if not count:
        return 0, 0
    sign_length = (count + 7) // 8
    longest = count * (1 + min(size.bit_length(), MAX_RICE)) + 1
    return 1 + 2 * sign_length, 1 + (longest + 7) // 8 + sign_length


@compiled
def read_bits(words: npt.NDArray[np.uint32], at: int, width: int) -> int:
    """Read up to 31 bits; the word after their first one must exist."""
    i = at >> 5
    pair = np.int64(words[np.uint64(i)]) | np.int64(words[np.uint64(i + 1)]) << 32
    return int(pair >> (at & 31)) & ((1 << width) - 1)


@compiled
def read_block(
    words: npt.NDArray[np.uint32],
    bits: int,
    at: int,
    rice: int,
    positions_K: npt.NDArray[np.int32],
    limits: tuple[int, int],
) -> int:
    """Fill ``positions_K`` from codes; return the bit after them, or a fault.

    Every code is looked up afresh at its bit: a window that is refilled now
    and then costs more, since no processor can foresee when.
    """
    following, stop = limits
    for i in range(len(positions_K)):
        zeros = 0
        eight = read_bits(words, at, 8)
        while not eight:
            zeros, at = zeros + 8, at + 8
            if at >= bits:
                return -(8 * following + PAST_END)
            eight = read_bits(words, at, 8)
        low = int(LOWEST_ONE[np.uint64(eight)])
        zeros, at = zeros + low, at + low + 1 + rice
        if at > bits:
            return -(8 * following + PAST_END)
        # Compared before it is shifted: the product need not fit 64 bits.
        if zeros > (stop - following) >> rice:
            return -(8 * following + OUTSIDE)
        position = following + (zeros << rice) + read_bits(words, at - rice, rice)
        if position >= stop:
            return -(8 * following + OUTSIDE)
        positions_K[i] = position
        following = position + 1
    return at


@compiled
def read_blocks(
    words: npt.NDArray[np.uint32],
    bits: int,
    positions_K: npt.NDArray[np.int32],
    size: int,
) -> int:
    """Fill ``positions_K`` block by block; return the bit after, or a fault."""
    at = 0
    first = 0
    for start in range(0, size, BLOCK):
        if at + 1 > bits:
            return -(8 * start + PAST_END)
        at += 1
        if not read_bits(words, at - 1, 1):
            continue
        if at + HEADER_BITS > bits:
            return -(8 * start + PAST_END)
        last = first + read_bits(words, at, COUNT_BITS) + 1
        rice = read_bits(words, at + COUNT_BITS, HEADER_BITS - COUNT_BITS)
        if rice > MAX_BLOCK_RICE:
            return -(8 * rice + BAD_RICE)
        stop = min(start + BLOCK, size)
        block_K = positions_K[first:last]  # no longer than there is room for
        at = read_block(words, bits, at + HEADER_BITS, rice, block_K, (start, stop))
        if at < 0:
            return at
        first = last
    return at if first == len(positions_K) else -(8 * first + BAD_COUNT)


def unpack(body: npt.NDArray[np.uint8], size: int, count: int) -> npt.NDArray[np.int32]:
    """Read what :func:`daskdl.codec.gaps.pack` wrote.

    Args:
        body: Bytes, as many as ``length_range`` allows.
        size: N.
        count: K.

    Returns:
        Entries, int32, shape (K,), an array of their own.

    Raises:
        CodecError: If the codes run past their end or leave the vector, leave
            bytes over, or padding is not zero.
    """
    if not count:
        return np.empty(0, np.int32)
    signs_at = len(body) - (count + 7) // 8
    stream = body[1:signs_at]
    # Whole words, and one more that only zeros are read from.
    padded = np.zeros(4 * (len(stream) // 4 + 2), np.uint8)
    padded[: len(stream)] = stream
    words = padded.view("<u4").astype(np.uint32, copy=False)
    positions_K = np.empty(count, np.int32)
    mode = int(body[0])
    if mode == PER_BLOCK:
        end = read_blocks(words, 8 * len(stream), positions_K, size)
    elif mode <= MAX_RICE:
        end = read_block(words, 8 * len(stream), 0, mode, positions_K, (0, size))
    else:
        raise CodecError(
            f"Rice parameter must be in 0 .. {MAX_RICE} "
            f"or {PER_BLOCK} (one per block), got {mode}"
        )
    check_end(end, stream, size, count)
    return signed(positions_K, body[signs_at:])


def check_end(end: int, stream: npt.NDArray[np.uint8], size: int, count: int) -> None:
    """Refuse codes that did not end where their bytes end.

    Raises:
        CodecError: If there was a fault, bytes are left or padding is set.
    """
    if end < 0:
        got, fault = divmod(-end, 8)
        raise CodecError(
            FAULTS[fault].format(got=got, size=size, count=count, bits=8 * len(stream))
        )
    if len(stream) != (end + 7) // 8:
        raise CodecError(
            f"codes of {count} gaps end after {end} bits, got {len(stream)} bytes"
        )
    if end & 7 and stream[-1] >> (end & 7):
        raise CodecError(
            f"padding after {end} bits of codes must be 0, "
            f"got the last byte {int(stream[-1]):#04x}"
        )
