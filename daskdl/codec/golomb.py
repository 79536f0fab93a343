"""GAPS bodies without their signs: positions as Golomb-Rice coded gaps.

A gap is the number of parameters without an entry before the next entry. Its code with
Rice parameter r is ``gap >> r`` zero bits, a one bit, and the low r bits of the gap.
There is one Rice parameter for all gaps, or one for each block of 4,096 model
parameters, whichever takes fewer bits. The layout is in ``docs/wire-format.md``.

Blocks are of parameters, not of entries: real updates cluster in whole rows of a weight
matrix, where blocks of 4,096 entries took 4 to 5 times the bits (7.1 against 1.6 per
entry on 2,048-wide rows), since they can encode a stretch without entries only as one
long gap. ``benchmarks/wire_size.py`` measures the sizes.

Codes are read in :mod:`daskdl.codec.reading`.

Shape suffixes: K = entries of one update, B = blocks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from daskdl.errors import CodecError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 4096  # parameters that share a Rice parameter
WHOLE = 2**31  # block size for one Rice parameter: beyond any position
PER_BLOCK = 255  # first byte of a body; other values are the one Rice parameter
MAX_RICE = 30  # gaps have at most 31 bits; a larger parameter only adds bits
COUNT_BITS = 12  # number of a block's entries, minus one
RICE_BITS = 4
MAX_BLOCK_RICE = 12  # a gap within a block is at most 4,095
HEADER_BITS = COUNT_BITS + RICE_BITS  # after a block's bit "has entries"
HEADER_MASK = 2 ** (1 + HEADER_BITS) - 1
NOTHING = np.empty(0, np.uint8)


def compiled(function: F) -> F:
    """Compile with numba, cached on disk, releasing the GIL.

    Compiling all functions took 3 s, loading them from the cache 0.4 s.
    """
    return cast(F, numba.njit(cache=True, nogil=True)(function))


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_: Any, word: Any) -> Any:
    """Count the zero bits below the lowest one bit; 64 if no bit is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


@compiled
def lowest_bit(word: np.uint64) -> int:
    """Return the index of the lowest set bit; 64 if no bit is set."""
    return int(trailing_zeros(word))


@compiled
def ascending(entries_K: npt.NDArray[np.int32], size: int) -> bool:
    """Say whether entries are strictly ascending positions of ``size`` parameters."""
    # Unsigned: the minimum of int32 has no absolute value, and must be the largest.
    falling = False
    for k in range(1, len(entries_K)):
        falling |= bool(
            np.uint32(abs(entries_K[k])) <= np.uint32(abs(entries_K[k - 1]))
        )
    if falling or not len(entries_K):
        return not falling
    return bool(entries_K[0] != 0 and np.uint32(abs(entries_K[-1])) <= size)


def entries_refusal(entries_K: npt.NDArray[np.int32], size: int) -> CodecError:
    """Return the error of entries that are not ascending positions."""
    # Zero, and int32's minimum, which has no absolute value, become negative.
    positions_K = np.abs(entries_K) - np.int32(1)
    # Negative numbers are the largest as unsigned ones: one comparison suffices.
    outside_K = positions_K.view(np.uint32) >= size
    if outside_K.any():
        i = int(outside_K.argmax())
        return CodecError(
            f"entries of {size} parameters must be in 1 .. {size} or negative, "
            f"got {entries_K[i]} at {i}"
        )
    i = int((positions_K[1:] <= positions_K[:-1]).argmax())
    return CodecError(
        "entries must be strictly ascending in position, "
        f"got {entries_K[i]} and then {entries_K[i + 1]} at {i + 1}"
    )


@compiled
def sums_of_zeros(
    entries_K: npt.NDArray[np.int32], start: int, rice: int
) -> tuple[int, int, int]:
    """Return the number of zero bits with the last, this, and the next parameter.

    The gaps add up to less than 2**31, so that 32 bits suffice.
    """
    lower, same = np.uint32(max(rice - 1, 0)), np.uint32(rice)
    gap = np.uint32(np.int64(abs(entries_K[0])) - 1 - start)
    lower_zeros = np.uint32(gap >> lower)
    zeros = np.uint32(gap >> same)
    higher_zeros = np.uint32(zeros >> np.uint32(1))
    for k in range(1, len(entries_K)):
        gap = np.uint32(abs(entries_K[k]) - abs(entries_K[k - 1]) - 1)
        shifted = np.uint32(gap >> same)
        lower_zeros = np.uint32(lower_zeros + np.uint32(gap >> lower))
        zeros = np.uint32(zeros + shifted)
        higher_zeros = np.uint32(higher_zeros + np.uint32(shifted >> np.uint32(1)))
    return int(lower_zeros), int(zeros), int(higher_zeros)


@compiled
def best_rice(entries_K: npt.NDArray[np.int32], start: int) -> tuple[int, int]:
    """Return the Rice parameter with the fewest bits, and their number.

    The number of bits is convex in the parameter, so a parameter that is no worse than
    its neighbors is the best. The search starts at the mean gap; most often one pass,
    which tries three parameters, ends it.

    Args:
        entries_K: One entry or more, sound.
        start: Position at which the first gap starts.
    """
    count = len(entries_K)
    mean = (np.int64(abs(entries_K[-1])) - start - count) // count
    rice = 0
    while (mean >> rice) > 1:
        rice += 1
    lower, zeros, higher = sums_of_zeros(entries_K, start, rice)
    bits = count * (1 + rice) + zeros
    step, neighbor_bits = 1, count * (2 + rice) + higher
    if neighbor_bits >= bits:
        step, neighbor_bits = -1, count * rice + lower
    while neighbor_bits < bits and 0 <= rice + step <= MAX_RICE:
        rice, bits = rice + step, neighbor_bits
        lower, zeros, higher = sums_of_zeros(entries_K, start, rice)
        neighbor_bits = count * (1 + rice + step) + (higher if step > 0 else lower)
    return rice, bits


@compiled
def plan_blocks(
    entries_K: npt.NDArray[np.int32],
    block: int,
    counts_B: npt.NDArray[np.int32],
    rices_B: npt.NDArray[np.int32],
) -> int:
    """Fill the last two arrays of a `Packing`; return the bits of the codes."""
    bits = 0
    begin = 0
    for b in range(len(counts_B)):
        last = begin
        start = b * block
        stop = start + block
        while last + 16 <= len(entries_K) and abs(entries_K[last + 15]) <= stop:
            last += 16
        while last < len(entries_K) and abs(entries_K[last]) <= stop:
            last += 1
        counts_B[b] = last - begin
        if last > begin:
            rices_B[b], block_bits = best_rice(entries_K[begin:last], start)
            bits += block_bits
        begin = last
    return bits


@compiled
def write_bits(
    words: npt.NDArray[np.uint64],
    at: int,
    held: np.uint64,
    value: np.uint64,
    width: int,
) -> tuple[int, np.uint64]:
    """Append up to 64 bits at bit ``at``; return the next ``at`` and ``held``.

    The word is stored even if it is not full, to avoid an unpredictable branch.
    """
    word, shift, following = at >> 6, np.uint64(at & 63), at + width
    if following >> 6 >= len(words):
        raise IndexError
    held |= value << shift
    words[np.uint64(word)] = held
    # Twice: a shift by 64 bits is undefined.
    carried = (value >> np.uint64(1)) >> (np.uint64(63) - shift)
    return following, carried if following >> 6 != word else held


@compiled
def write_codes(
    words: npt.NDArray[np.uint64],
    at: int,
    held: np.uint64,
    entries_K: npt.NDArray[np.int32],
    start: int,
    rice: int,
) -> tuple[int, np.uint64]:
    """Append the codes of a block; return the next ``at`` and ``held``."""
    rice_bits = np.uint64(rice)
    mask = (np.uint64(1) << rice_bits) - np.uint64(1)
    following = start + 1
    for k in range(len(entries_K)):
        entry = int(abs(entries_K[k]))
        gap = np.uint64(entry - following)
        following = entry + 1
        zeros = int(np.int64(gap >> rice_bits))
        code = np.uint64(1) | (gap & mask) << np.uint64(1)
        width = 1 + rice
        if zeros + width <= 64:
            code <<= np.uint64(zeros)
            width += zeros
        else:  # the words are zero already
            words[at >> 6] = held
            one_at = at + zeros
            held = held if one_at >> 6 == at >> 6 else np.uint64(0)
            at = one_at
        at, held = write_bits(words, at, held, code, width)
    return at, held


@compiled
def write_stream(
    words: npt.NDArray[np.uint64],
    at: int,
    held: np.uint64,
    entries_K: npt.NDArray[np.int32],
    start: int,
    block: int,
    counts_B: npt.NDArray[np.int32],
    rices_B: npt.NDArray[np.int32],
) -> int:
    """Write codes from bit ``at`` on, with headers of blocks; return the end.

    The first block starts at position ``start``.
    ``words`` are zeros, with at least one more bit than the codes fill. ``held`` has
    the bits before ``at`` in the word of ``at``.
    """
    begin = 0
    for b in range(len(counts_B)):
        last = begin + counts_B[b]
        rice = int(rices_B[b])
        if block == BLOCK:
            # One call: numba would compile it for each constant width.
            header = np.uint64(1 | (last - begin - 1) << 1 | rice << (1 + COUNT_BITS))
            full = last > begin
            width = 1 + HEADER_BITS if full else 1
            header = header if full else np.uint64(0)
            at, held = write_bits(words, at, held, header, width)
        at, held = write_codes(
            words, at, held, entries_K[begin:last], start + b * block, rice
        )
        begin = last
    words[at >> 6] = held
    return at


@compiled
def append_bits(
    words: npt.NDArray[np.uint64], at: int, part: npt.NDArray[np.uint64], bits: int
) -> int:
    """Copy bits to bit ``at`` of words that are zero from there on; return the end."""
    if (at + bits) >> 6 >= len(words) or bits > 64 * len(part):
        raise IndexError
    word, shift = at >> 6, np.uint64(at & 63)
    for i in range((bits + 63) >> 6):
        words[word + i] |= part[i] << shift
        # Twice: a shift by 64 bits is undefined.
        carried = (part[i] >> np.uint64(1)) >> (np.uint64(63) - shift)
        if carried:  # within the bits, as those after them are zero
            words[word + i + 1] = carried
    return at + bits


def started(
    pool: ThreadPoolExecutor | None, function: Callable[..., T], *arguments: Any
) -> Callable[[], T]:
    """Start a function in a thread, or without threads when its result is asked."""
    if pool is None:
        return functools.partial(function, *arguments)
    return pool.submit(function, *arguments).result


class Packing(NamedTuple):
    """Entries, Rice parameters and length of a body to pack."""

    block: int  # parameters of a block, BLOCK or WHOLE
    entries_K: npt.NDArray[np.int32]
    counts_B: npt.NDArray[np.int32]  # entries of each block
    rices_B: npt.NDArray[np.int32]  # Rice parameter of each block
    length: int  # bytes of the body, its first byte included


def plan(
    size: int,
    entries_K: npt.NDArray[np.int32],
    pool: ThreadPoolExecutor | None = None,
) -> Packing:
    """Choose the Rice parameters and count the bytes of the body.

    Args:
        size: N.
        entries_K: Signed one-based positions, int32, strictly ascending.
        pool: Another thread that may work at the same time.

    Returns:
        The plan with the fewest bytes; of equals, one Rice parameter for all gaps.
    """
    planned = started(pool, plan_with, WHOLE, size, entries_K)
    in_blocks = plan_with(BLOCK, size, entries_K)
    undivided = planned()
    return undivided if undivided.length <= in_blocks.length else in_blocks


def plan_with(block: int, size: int, entries_K: npt.NDArray[np.int32]) -> Packing:
    """Count the bytes with one Rice parameter per ``block`` parameters."""
    blocks = -(-size // block)
    counts_B, rices_B = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    bits = plan_blocks(entries_K, block, counts_B, rices_B)
    if block == BLOCK:
        bits += blocks + HEADER_BITS * int(np.count_nonzero(counts_B))
    return Packing(block, entries_K, counts_B, rices_B, 1 + (bits + 7) // 8)


class Segment(NamedTuple):
    """Neighboring blocks, or neighboring entries of a plan without blocks."""

    entries_K: npt.NDArray[np.int32]
    start: int  # position at which the first gap starts
    block: int
    counts_B: npt.NDArray[np.int32]
    rices_B: npt.NDArray[np.int32]

    def written(self, length: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Return up to ``length`` words of codes, and the number of their bits."""
        words = np.zeros(length, np.uint64)  # memory is only used where it is written
        return words, write_stream(words, 0, np.uint64(0), *self)


def segments(packing: Packing, most: int) -> Iterator[Segment]:
    """Cut a plan into segments of similar numbers of entries."""
    block, entries_K, counts_B, rices_B, _ = packing
    cuts = [len(entries_K) * i // most for i in range(most + 1)]
    if block == WHOLE:
        for begin, end in itertools.pairwise(cuts):
            start = abs(int(entries_K[begin - 1])) if begin else 0
            counts = np.array([end - begin], np.int32)
            yield Segment(entries_K[begin:end], start, block, counts, rices_B)
        return
    ends_B = np.append(0, np.cumsum(counts_B))
    borders = [0, *np.searchsorted(ends_B, cuts[1:-1]).tolist(), len(counts_B)]
    for left, right in itertools.pairwise(borders):
        entries = entries_K[ends_B[left] : ends_B[right]]
        blocks = slice(left, right)
        yield Segment(entries, left * block, block, counts_B[blocks], rices_B[blocks])


def pack(
    packing: Packing,
    appended: Bytes = NOTHING,
    pool: ThreadPoolExecutor | None = None,
    parts: int = 1,
) -> Bytes:
    """Write the body of a plan with one entry or more, and bytes after it.

    Args:
        packing: Result of :func:`plan`.
        appended: Bytes after the body.
        pool: Other threads, which write all parts but the first.
        parts: Number of parts that may be written at the same time.

    Example:
        >>> import numpy as np
        >>> pack(plan(10, np.array([1, -4, 10], np.int32))).tobytes().hex(" ")
        '01 89 01'
    """
    length = packing.length
    words = np.zeros((length + len(appended)) // 8 + 1, np.uint64)
    mode = np.uint64(PER_BLOCK if packing.block == BLOCK else packing.rices_B[0])
    first_segment, *others = segments(packing, parts)
    written = [started(pool, segment.written, len(words)) for segment in others]
    # The first byte is the first bits of the stream.
    at = write_stream(words, 8, mode, *first_segment)
    for part in written:
        at = append_bits(words, at, *part())
    body = words.astype("<u8", copy=False).view(np.uint8)[: length + len(appended)]
    body[length:] = appended
    return body


def length_range(size: int, count: int) -> tuple[int, int]:
    """Return the least and the greatest length of a body, for one entry or more.

    A gap takes one bit at least. Since packing chooses the shorter plan, the greatest
    length is that of one Rice parameter for all gaps, the bit length of N.
    """
    longest = count * (1 + min(size.bit_length(), MAX_RICE)) + 1
    return 1 + (count + 7) // 8, 1 + (longest + 7) // 8
