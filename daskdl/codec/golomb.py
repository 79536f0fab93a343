"""GAPS bodies without their signs: positions as Golomb-Rice coded gaps.

A gap is the number of parameters without an entry before the next entry. Its code with
Rice parameter r is ``gap >> r`` zero bits, a one bit, and the low r bits of the gap.
There is one Rice parameter for all gaps, or one for each block of 4,096 model
parameters, whichever takes fewer bits. The layout is in ``docs/wire-format.md``.

Blocks are of parameters, not of entries: real updates cluster in whole rows of a weight
matrix, where blocks of 4,096 entries took 4 to 5 times the bits (7.1 against 1.6 per
entry on 2,048-wide rows), since they can encode a stretch without entries only as one
long gap. ``benchmarks/wire_size.py`` measures the sizes.

The reader trusts no input: every bit is checked against the end of the stream before it
is read, and every position against the end of its block before it is written, since
numba checks neither.

Shape suffixes: K = entries of one update, B = blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from daskdl.errors import CodecError

F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 4096  # parameters that share a Rice parameter
WHOLE = 2**31  # block size for one Rice parameter: beyond any position
PER_BLOCK = 255  # first byte of a body; other values are the one Rice parameter
MAX_RICE = 30  # gaps have at most 31 bits; a larger parameter only adds bits
COUNT_BITS = 12  # number of a block's entries, minus one
RICE_BITS = 4
MAX_BLOCK_RICE = 12  # a gap within a block is at most 4,095
HEADER_BITS = COUNT_BITS + RICE_BITS  # after a block's bit "has entries"


def compiled(function: F) -> F:
    """Compile with numba, cached on disk, releasing the GIL.

    Compiling all functions took 3 s, loading them from the cache 0.4 s.
    """
    return cast(F, numba.njit(cache=True, nogil=True)(function))


@compiled
def rice_bits(gaps_K: npt.NDArray[np.int32], rice: int) -> int:
    """Return the number of bits of the codes of gaps."""
    zeros, shift = np.uint64(0), np.uint64(rice)
    # Unsigned: without AVX-512 there is no signed vector shift of 64 bits.
    for k in range(len(gaps_K)):  # over the array itself, numba does not vectorise
        zeros += np.uint64(gaps_K[k]) >> shift
    return len(gaps_K) * (1 + rice) + int(np.int64(zeros))


@compiled
def best_rice(gaps_K: npt.NDArray[np.int32], silent: int) -> tuple[int, int]:
    """Return the Rice parameter with the fewest bits, and their number.

    The number of bits is convex in the parameter, so a parameter that is no worse than
    its neighbors is the best. The search starts at the mean gap and usually tries
    three parameters. ``silent`` is the sum of the gaps.
    """
    mean = silent // len(gaps_K)
    rice = 0
    while (mean >> rice) > 1:
        rice += 1
    bits = rice_bits(gaps_K, rice)
    step = 1
    while True:
        neighbor = rice + step
        neighbor_bits = (
            rice_bits(gaps_K, neighbor) if 0 <= neighbor <= MAX_RICE else bits
        )
        if neighbor_bits < bits:
            rice, bits = neighbor, neighbor_bits
        elif step == 1:
            step = -1
        else:
            return rice, bits


@compiled
def plan_blocks(
    positions_K: npt.NDArray[np.int32],
    block: int,
    gaps_K: npt.NDArray[np.int32],
    counts_B: npt.NDArray[np.int32],
    rices_B: npt.NDArray[np.int32],
) -> int:
    """Fill the last three arrays of a `Packing`; return the bits of the codes."""
    bits = 0
    begin = 0
    for b in range(len(counts_B)):
        last = begin
        following = b * block
        stop = following + block
        while last < len(positions_K) and positions_K[last] < stop:
            gaps_K[last] = positions_K[last] - following
            following = positions_K[last] + 1
            last += 1
        count = last - begin
        counts_B[b] = count
        if count:
            silent = following - b * block - count
            rice, block_bits = best_rice(gaps_K[begin:last], silent)
            rices_B[b] = rice
            bits += block_bits
        begin = last
    return bits


@compiled
def write_bits(
    words: npt.NDArray[np.uint32], at: int, held: int, value: int, width: int
) -> tuple[int, int]:
    """Append up to 31 bits at bit ``at``; return the next ``at`` and ``held``.

    The word is stored even if it is not full, to avoid an unpredictable branch.
    """
    word, following = at >> 5, at + width
    if following >> 5 >= len(words):
        raise IndexError
    held |= value << (at & 31)
    words[word] = held & 0xFFFFFFFF
    return following, held >> (((following >> 5) - word) << 5)


@compiled
def write_stream(
    words: npt.NDArray[np.uint32],
    gaps_K: npt.NDArray[np.int32],
    counts_B: npt.NDArray[np.int32],
    rices_B: npt.NDArray[np.int32],
    headers: bool,
) -> int:
    """Write all codes, with a header before each block; return the number of bits.

    ``words`` are zeros, one more than the bits fill. ``held`` has the bits before
    ``at`` in the word of ``at``.
    """
    at = held = begin = 0
    for b in range(len(counts_B)):
        last = begin + counts_B[b]
        rice = int(rices_B[b])
        if headers:
            # One call: numba would compile it for each constant width.
            header = 1 | (last - begin - 1) << 1 | rice << (1 + COUNT_BITS)
            full = last > begin
            width = 1 + HEADER_BITS if full else 1
            at, held = write_bits(words, at, held, header if full else 0, width)
        for i in range(begin, last):
            gap = int(gaps_K[i])
            one_at = at + (gap >> rice)  # the words are zero already
            words[at >> 5] = held
            held = held if one_at >> 5 == at >> 5 else 0
            value = 1 | (gap & ((1 << rice) - 1)) << 1
            at, held = write_bits(words, one_at, held, value, 1 + rice)
        begin = last
    words[at >> 5] = held
    return at


class Packing(NamedTuple):
    """Gaps, Rice parameters and length of a body to pack."""

    block: int  # parameters of a block, BLOCK or WHOLE
    gaps_K: npt.NDArray[np.int32]  # the first gap of a block starts with the block
    counts_B: npt.NDArray[np.int32]  # entries of each block
    rices_B: npt.NDArray[np.int32]  # Rice parameter of each block
    length: int  # bytes of the body, its first byte included


def plan(size: int, positions_K: npt.NDArray[np.int32]) -> Packing:
    """Choose the Rice parameters and count the bytes of the body.

    Args:
        size: N.
        positions_K: Zero-based positions, int32, strictly ascending.

    Returns:
        The plan with the fewest bytes; of equals, one Rice parameter for all gaps.
    """
    undivided = plan_with(WHOLE, size, positions_K)
    in_blocks = plan_with(BLOCK, size, positions_K)
    return undivided if undivided.length <= in_blocks.length else in_blocks


def plan_with(block: int, size: int, positions_K: npt.NDArray[np.int32]) -> Packing:
    """Count the bytes with one Rice parameter per ``block`` parameters."""
    blocks = -(-size // block)
    counts_B, rices_B = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    gaps_K = np.empty(len(positions_K), np.int32)
    bits = plan_blocks(positions_K, block, gaps_K, counts_B, rices_B)
    if block == BLOCK:
        bits += blocks + HEADER_BITS * int(np.count_nonzero(counts_B))
    return Packing(block, gaps_K, counts_B, rices_B, 1 + (bits + 7) // 8)


def pack(packing: Packing) -> npt.NDArray[np.uint8]:
    """Write the body of a plan with one entry or more.

    Example:
        >>> import numpy as np
        >>> pack(plan(10, np.array([0, 3, 9], np.int32))).tobytes().hex(" ")
        '01 89 01'
    """
    words = np.zeros((packing.length - 1) // 4 + 1, np.uint32)
    per_block = packing.block == BLOCK
    write_stream(words, packing.gaps_K, packing.counts_B, packing.rices_B, per_block)
    body = np.empty(packing.length, np.uint8)
    body[0] = PER_BLOCK if per_block else packing.rices_B[0]
    body[1:] = words.astype("<u4", copy=False).view(np.uint8)[: packing.length - 1]
    return body


# Readers return the next bit, or -(8 * got + fault).
PAST_END, OUTSIDE, BAD_RICE, BAD_COUNT = 1, 2, 3, 4
# Lowest set bit of each byte; 0 for byte 0.
LOWEST_ONE = np.array([0, *((i & -i).bit_length() - 1 for i in range(1, 256))])
FAULTS = {
    PAST_END: "codes run past the {bits} bits there are, at parameter {got}",
    OUTSIDE: "a gap from parameter {got} leaves its block or the {size} parameters",
    BAD_RICE: f"a block's Rice parameter must be in 0 .. {MAX_BLOCK_RICE}, got {{got}}",
    BAD_COUNT: "the blocks' counts must add up to {count} entries, got {got}",
}


def length_range(size: int, count: int) -> tuple[int, int]:
    """Return the least and the greatest length of a body, for one entry or more.

    A gap takes one bit at least. Since packing chooses the shorter plan, the greatest
    length is that of one Rice parameter for all gaps, the bit length of N.
    """
    longest = count * (1 + min(size.bit_length(), MAX_RICE)) + 1
    return 1 + (count + 7) // 8, 1 + (longest + 7) // 8


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
    """Fill ``positions_K`` from codes; return the next bit, or a fault.

    Each code is read at its own bit: a window with occasional refills is slower,
    because its refills are unpredictable branches.
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
        # Compared before the shift, whose result may not fit 64 bits.
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
    """Fill ``positions_K`` block by block; return the next bit, or a fault."""
    at = 0
    begin = 0
    for start in range(0, size, BLOCK):
        if at + 1 > bits:
            return -(8 * start + PAST_END)
        at += 1
        if not read_bits(words, at - 1, 1):
            continue
        if at + HEADER_BITS > bits:
            return -(8 * start + PAST_END)
        last = begin + read_bits(words, at, COUNT_BITS) + 1
        rice = read_bits(words, at + COUNT_BITS, HEADER_BITS - COUNT_BITS)
        if rice > MAX_BLOCK_RICE:
            return -(8 * rice + BAD_RICE)
        stop = min(start + BLOCK, size)
        block_K = positions_K[begin:last]  # cut off at the end of positions_K
        at = read_block(words, bits, at + HEADER_BITS, rice, block_K, (start, stop))
        if at < 0:
            return at
        begin = last
    return at if begin == len(positions_K) else -(8 * begin + BAD_COUNT)


def unpack(body: npt.NDArray[np.uint8], size: int, count: int) -> npt.NDArray[np.int32]:
    """Read a body written by :func:`daskdl.codec.golomb.pack`."""
    stream = body[1:]
    # Whole words, and one more of zeros.
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
    return positions_K
