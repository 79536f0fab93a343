"""The levels of a LEVELS body: how many quanta each entry has, 1 to 15.

Levels are coded with a static range coder (rANS), within 2 % of their entropy and the
table of frequencies. After some steps without an exchange most entries have one quantum
and a few have many, which a code of whole bits per level packs badly. The layout is in
``docs/wire-format.md``.

Entries use two states by turns, which take words from one stream: so the next level
does not wait for the one before it. Levels are read in :mod:`daskdl.codec.reading`.

Shape suffixes: K = entries of one update, L = 15 levels, M = levels from 1
to the highest.

Source:
    J. Duda, "Asymmetric numeral systems", 2013; with 32 bits of state and words of 16
    bits, so that a level takes at most one word.
"""

import numpy as np
import numpy.typing as npt

from daskdl.codec.golomb import compiled

Bytes = npt.NDArray[np.uint8]

MAX_LEVEL = 15
SLOT_BITS = 12
SLOTS = 2**SLOT_BITS  # what the frequencies of the levels add up to
WORD_BITS = 16
MIN_STATE = 2**16  # the state is in 2**16 .. 2**32 - 1 between two levels
STATES_BYTES = 8  # of both states
# A state below 2**20 times a frequency f, times 2**44 / f rounded up, fits 64 bits, and
# its bits above 44 are the quotient for each f up to 2**12.
RECIPROCAL_BITS = 44


def header_length(highest: int) -> int:
    """Bytes before the words: the highest level, the frequencies, the states."""
    return 1 + 2 * (highest - 1) + STATES_BYTES


def length_range(count: int) -> tuple[int, int]:
    """Return the least and the greatest length of the levels of some entries."""
    return header_length(2), header_length(MAX_LEVEL) + 2 * most_words(count)


def most_words(count: int) -> int:
    """A level takes at most 12 bits: that of one slot, and then exactly so many."""
    return -(-SLOT_BITS * count // WORD_BITS)


@compiled
def _write_words(
    levels_K: npt.NDArray[np.uint8],
    frequencies_M: npt.NDArray[np.uint16],
    words: npt.NDArray[np.uint16],
) -> tuple[int, int, int]:
    """Fill words from the end; return both states and the index of the first word.

    Levels are written last to first, as the reader undoes the writer's steps.
    """
    starts_M = np.zeros(len(frequencies_M), np.uint64)
    reciprocals_M = np.zeros(len(frequencies_M), np.uint64)
    start = 0
    for m in range(len(frequencies_M)):
        starts_M[m] = start
        start += frequencies_M[m]
        if frequencies_M[m]:
            reciprocals_M[m] = -(-(2**RECIPROCAL_BITS) // np.int64(frequencies_M[m]))
    state, following, at = np.uint64(MIN_STATE), np.uint64(MIN_STATE), len(words)
    for k in range(len(levels_K) - 1, -1, -1):
        m = levels_K[k] - 1
        frequency = np.uint64(frequencies_M[m])
        if at < 1:
            raise IndexError
        # Stored even if it is not full, to avoid an unpredictable branch.
        words[at - 1] = state & np.uint64(0xFFFF)
        full = int(state >= frequency << np.uint64(32 - SLOT_BITS))
        at -= full
        state >>= np.uint64(WORD_BITS * full)
        # state // frequency, in half the time of a division
        quotient = state * reciprocals_M[m] >> np.uint64(RECIPROCAL_BITS)
        state += quotient * (np.uint64(SLOTS) - frequency) + starts_M[m]
        state, following = following, state
    return int(following), int(state), at


@compiled
def _count_levels(
    levels_K: npt.NDArray[np.uint8], counts_L: npt.NDArray[np.int64]
) -> None:
    """Add the number of entries of each level, 1 to 15."""
    for start in range(0, len(levels_K), 8192):
        part_K = levels_K[start : start + 8192]
        uncounted = len(part_K)
        for i in range(len(counts_L)):
            equal = np.uint32(0)
            for k in range(len(part_K)):
                equal = np.uint32(equal + np.uint32(part_K[k] == np.uint8(i + 1)))
            counts_L[i] += equal
            uncounted -= int(equal)
            if not uncounted:  # most often after a few levels
                break


def counted(levels_K: Bytes) -> npt.NDArray[np.int64]:
    """Return the number of entries of levels 1, 2, ..., 15.

    Example:
        >>> counted(np.array([1, 1, 3, 1, 2, 1], np.uint8))[:4]
        array([4, 1, 1, 0])
    """
    counts_L = np.zeros(MAX_LEVEL, np.int64)
    _count_levels(levels_K, counts_L)
    return counts_L


def entropy_bytes(counts_L: npt.NDArray[np.int64]) -> float:
    """Return the fewest bytes for levels that occur so often, in any order."""
    counts = counts_L[counts_L > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum()) / 8


def frequencies(counts_L: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Return the frequencies of levels 1, 2, ..., which add up to `SLOTS`."""
    highest = max(int(np.flatnonzero(counts_L)[-1]) + 1, 2)
    counts_M = counts_L[:highest]
    slots_M = np.rint(counts_M * (SLOTS / counts_M.sum())).astype(np.int64)
    needed = counts_M > 0
    needed[-1] = True  # the reader computes the last one from the others
    slots_M[needed & (slots_M == 0)] = 1
    # Rounding leaves a few slots at most; the most frequent level takes them.
    slots_M[slots_M.argmax()] += SLOTS - slots_M.sum()
    frequencies_M: npt.NDArray[np.uint16] = slots_M.astype(np.uint16)
    return frequencies_M


def pack(levels_K: Bytes, counts_L: npt.NDArray[np.int64]) -> Bytes:
    """Write the levels of one entry or more; 1 to 15 each, uint8.

    Args:
        levels_K: Levels, 1 to 15 each, uint8, one or more.
        counts_L: Result of :func:`counted`.

    Example:
        >>> levels = np.array([1, 3, 1], np.uint8)
        >>> pack(levels, counted(levels)).tobytes().hex(" ")
        '03 ab 0a 00 00 42 35 02 00 bb 0a 03 00'
    """
    frequencies_M = frequencies(counts_L)
    highest = len(frequencies_M)
    words = np.empty(most_words(len(levels_K)) + 1, np.uint16)
    *states, at = _write_words(levels_K, frequencies_M, words)
    opening = np.array([highest], np.uint8)
    table = frequencies_M[:-1].astype("<u2").view(np.uint8)
    state_bytes = np.array(states, "<u4").view(np.uint8)
    stream = words[at:].astype("<u2", copy=False).view(np.uint8)
    return np.concatenate([opening, table, state_bytes, stream])
