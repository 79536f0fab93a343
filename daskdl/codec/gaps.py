"""GAPS bodies: positions as Golomb-Rice coded gaps, then one sign bit per entry.

A gap is the number of parameters without an entry before the next one. Its
code with Rice parameter r is ``gap >> r`` zero bits, a one bit, and the low r
bits of the gap. There is one parameter for all gaps, or one for each block of
4,096 parameters, whichever makes fewer bits. The layout is in
``docs/wire-format.md``.

Blocks of parameters, not of entries: of whole rows of a weight matrix, which
is how real updates cluster, blocks of 4,096 entries took 4 to 5 times the bits
(7.1 against 1.6 per entry on 2,048-wide rows), since a block of entries has no
word for a silent stretch but one long gap. ``benchmarks/wire_size.py`` has the
sizes.

Shape suffixes: K = entries of one update, B = blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from daskdl.codec.entries import pack_signs

F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 4096  # parameters with a Rice parameter of their own
WHOLE = 2**31  # "block" of the one parameter for all: beyond any position
PER_BLOCK = 255  # first byte of a body; any other value is the one parameter
MAX_RICE = 30  # a gap has at most 31 bits, and more only adds bits
COUNT_BITS = 12  # of a block's entries, less one
RICE_BITS = 4
MAX_BLOCK_RICE = 12  # a gap within a block is at most 4,095
HEADER_BITS = COUNT_BITS + RICE_BITS  # after a block's bit "has entries"


def compiled(function: F) -> F:
    """Compile with numba, kept on disk.

    The first encode and decode ever took 3 s for all functions together, the
    first of a process 0.4 s.
    """
    return cast(F, numba.njit(cache=True, nogil=True)(function))


@compiled
def rice_bits(gaps_K: npt.NDArray[np.int32], rice: int) -> int:
    """Count the bits of the codes of gaps."""
    zeros, shift = np.uint64(0), np.uint64(rice)
    # Unsigned: processors without AVX-512 have no signed shift of 64 bits.
    for gap in gaps_K:
        zeros += np.uint64(gap) >> shift
    return len(gaps_K) * (1 + rice) + int(np.int64(zeros))


@compiled
def best_rice(gaps_K: npt.NDArray[np.int32], silent: int) -> tuple[int, int]:
    """Find the Rice parameter with the fewest bits, and count them.

    The bits are convex in the parameter (what a further bit of it saves only
    falls), so the first one that is no better than its neighbours is the best.
    The search starts at the mean gap and looks at three of them as a rule.
    ``silent`` is the sum of the gaps.
    """
    mean = silent // len(gaps_K)
    rice = 0
    while (mean >> rice) > 1:
        rice += 1
    bits = rice_bits(gaps_K, rice)
    step = 1
    while True:
        other = rice + step
        found = rice_bits(gaps_K, other) if 0 <= other <= MAX_RICE else bits
        if found < bits:
            rice, bits = other, found
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
    """Fill the last three, which are as in :class:`Plan`; return the codes' bits."""
    bits = 0
    first = 0
    for b in range(len(counts_B)):
        last = first
        following = b * block
        stop = following + block
        while last < len(positions_K) and positions_K[last] < stop:
            gaps_K[last] = positions_K[last] - following
            following = positions_K[last] + 1
            last += 1
        count = last - first
        counts_B[b] = count
        if count:
            silent = following - b * block - count
            rice, more = best_rice(gaps_K[first:last], silent)
            rices_B[b] = rice
            bits += more
        first = last
    return bits


@compiled
def write_bits(
    words: npt.NDArray[np.uint32], at: int, held: int, value: int, width: int
) -> tuple[int, int]:
    """Append up to 31 bits; return the bit after them and those of its word.

    Stored every time, full or not: no processor can foresee which it is.
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
    """Write all codes, each block's after its header; return the bits.

    ``words`` are zeros, one more than the bits fill. ``held`` are the bits
    before ``at`` of the word that ``at`` is in.
    """
    at = held = first = 0
    for b in range(len(counts_B)):
        last = first + counts_B[b]
        rice = int(rices_B[b])
        if headers:
            # One call: numba would compile it again for each constant width.
            header = 1 | (last - first - 1) << 1 | rice << (1 + COUNT_BITS)
            full = last > first
            width = 1 + HEADER_BITS if full else 1
            at, held = write_bits(words, at, held, header if full else 0, width)
        for i in range(first, last):
            gap = int(gaps_K[i])
            one = at + (gap >> rice)  # the words are zero already
            words[at >> 5] = held
            held = held if one >> 5 == at >> 5 else 0
            value = 1 | (gap & ((1 << rice) - 1)) << 1
            at, held = write_bits(words, one, held, value, 1 + rice)
        first = last
    words[at >> 5] = held
    return at


class Plan(NamedTuple):
    """How gaps will be coded, counted before anything is packed."""

    block: int  # parameters, BLOCK or WHOLE
    gaps_K: npt.NDArray[np.int32]  # the first of a block counts from its start
    counts_B: npt.NDArray[np.int32]  # entries of each block
    rices_B: npt.NDArray[np.int32]  # Rice parameter of each block
    stream_length: int  # bytes of the codes
    length: int  # bytes of the body


def plan(size: int, positions_K: npt.NDArray[np.int32]) -> Plan:
    """Choose the Rice parameters and count the bytes they lead to.

    Args:
        size: N.
        positions_K: Zero-based positions, int32, strictly ascending.

    Returns:
        The plan with the fewest bytes; of equals, one parameter for all.
    """
    return min(
        (plan_with(block, size, positions_K) for block in (WHOLE, BLOCK)),
        key=lambda found: found.length,
    )


def plan_with(block: int, size: int, positions_K: npt.NDArray[np.int32]) -> Plan:
    """Count the bytes with one Rice parameter per ``block`` parameters."""
    blocks = -(-size // block)
    counts_B, rices_B = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    gaps_K = np.empty(len(positions_K), np.int32)
    bits = plan_blocks(positions_K, block, gaps_K, counts_B, rices_B)
    if block == BLOCK:
        bits += blocks + HEADER_BITS * int(np.count_nonzero(counts_B))
    stream_length = (bits + 7) // 8
    count = len(positions_K)
    length = 1 + stream_length + (count + 7) // 8 if count else 0
    return Plan(block, gaps_K, counts_B, rices_B, stream_length, length)


def pack(found: Plan, entries_K: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """Write a body as planned from the positions of these entries.

    Example:
        >>> import numpy as np
        >>> entries = np.array([1, -4, 10], np.int32)
        >>> pack(plan(10, np.abs(entries) - 1), entries).tobytes().hex(" ")
        '01 89 01 02'
    """
    if not len(entries_K):
        return np.empty(0, np.uint8)
    words = np.zeros(found.stream_length // 4 + 1, np.uint32)
    per_block = found.block == BLOCK
    write_stream(words, found.gaps_K, found.counts_B, found.rices_B, per_block)
    stream = words.astype("<u4", copy=False).view(np.uint8)[: found.stream_length]
    mode = np.uint8(PER_BLOCK if per_block else found.rices_B[0])
    return np.concatenate([[mode], stream, pack_signs(entries_K)])
