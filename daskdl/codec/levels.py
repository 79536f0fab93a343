"""The levels of a LEVELS body: how many quanta each entry has, 1 to 15.

Levels are coded with a static range coder (rANS), within 2 % of their entropy and the
table of frequencies. After some steps without an exchange most entries have one quantum
and a few have many, which a code of whole bits per level packs badly. The layout is in
``docs/wire-format.md``.

The reader trusts no input: frequencies are checked before they are used, every word
against the end of the stream, and the final state against the writer's first one.

Shape suffixes: K = entries of one update, L = 15 levels, M = levels from 1
to the highest, S = slots.

Source:
    J. Duda, "Asymmetric numeral systems", 2013; with 32 bits of state and words of 16
    bits, so that a level takes at most one word.
"""

import numpy as np
import numpy.typing as npt

from daskdl.codec.golomb import compiled
from daskdl.errors import CodecError

Bytes = npt.NDArray[np.uint8]

MAX_LEVEL = 15
SLOT_BITS = 12
SLOTS = 2**SLOT_BITS  # what the frequencies of the levels add up to
WORD_BITS = 16
MIN_STATE = 2**16  # the state is in 2**16 .. 2**32 - 1 between two levels
STATE_BYTES = 4
# A state below 2**20 times a frequency f, times 2**44 / f rounded up, fits 64 bits, and
# its bits above 44 are the quotient for each f up to 2**12.
RECIPROCAL_BITS = 44


def header_length(highest: int) -> int:
    """Bytes before the words: the highest level, the frequencies, the state."""
    return 1 + 2 * (highest - 1) + STATE_BYTES


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
) -> tuple[int, int]:
    """Fill words from the end; return the state and the index of the first word.

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
    state, at = np.uint64(MIN_STATE), len(words)
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
    return int(state), at


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
        >>> levels = np.array([1, 1, 3, 1, 2, 1], np.uint8)
        >>> unpack(pack(levels, counted(levels)), 6)
        array([1, 1, 3, 1, 2, 1], dtype=uint8)
    """
    frequencies_M = frequencies(counts_L)
    highest = len(frequencies_M)
    words = np.empty(most_words(len(levels_K)) + 1, np.uint16)
    state, at = _write_words(levels_K, frequencies_M, words)
    opening = np.array([highest], np.uint8)
    table = frequencies_M[:-1].astype("<u2").view(np.uint8)
    state_bytes = np.array([state], "<u4").view(np.uint8)
    stream = words[at:].astype("<u2", copy=False).view(np.uint8)
    return np.concatenate([opening, table, state_bytes, stream])


# What the reader returns instead of the number of words it has read.
PAST_END, BAD_END = -1, -2


@compiled
def _read_words(
    levels_K: npt.NDArray[np.uint8],
    frequencies_M: npt.NDArray[np.uint16],
    words: npt.NDArray[np.uint16],
    state: int,
) -> int:
    """Fill levels; return the number of words read, or a fault.

    The last of ``words`` is no word of the stream.
    """
    level_S = np.empty(SLOTS, np.uint8)
    # By slot too: a look-up by level would wait for the level.
    frequency_S, offset_S = np.empty(SLOTS, np.uint16), np.empty(SLOTS, np.uint16)
    slot = 0
    for m in range(len(frequencies_M)):
        for offset in range(frequencies_M[m]):
            level_S[slot] = m + 1
            frequency_S[slot] = frequencies_M[m]
            offset_S[slot] = offset
            slot += 1
    current, at = np.uint64(state), 0
    for k in range(len(levels_K)):
        low = current & np.uint64(SLOTS - 1)
        levels_K[k] = level_S[low]
        high = current >> np.uint64(SLOT_BITS)
        current = np.uint64(frequency_S[low]) * high + np.uint64(offset_S[low])
        # Loaded even if it is not needed, to avoid an unpredictable branch.
        needed = int(current < MIN_STATE)
        grown = current << np.uint64(WORD_BITS) | np.uint64(words[at])
        current = grown if needed else current
        at += needed
        if at == len(words):
            return PAST_END
    return at if current == MIN_STATE else BAD_END


def unpack(packed: Bytes, count: int) -> Bytes:
    """Read levels written by :func:`daskdl.codec.levels.pack`, checking every byte.

    Args:
        packed: Uint8, of a length in :func:`length_range`.
        count: K, 1 or more.
    """
    highest = int(packed[0])
    if not 2 <= highest <= MAX_LEVEL:
        raise CodecError(f"highest level must be in 2 .. {MAX_LEVEL}, got {highest}")
    opening = header_length(highest)
    if len(packed) < opening or (len(packed) - opening) % 2:
        raise CodecError(
            f"levels up to {highest} must have {opening} bytes, and an even number "
            f"more, got {len(packed)}"
        )
    table = packed[1 : opening - STATE_BYTES].copy().view("<u2").astype(np.int64)
    last = SLOTS - int(table.sum())
    if last < 1:
        raise CodecError(
            f"frequencies of the levels below {highest} must leave 1 of {SLOTS} slots, "
            f"got {table.tolist()}"
        )
    frequencies_M = np.append(table, last).astype(np.uint16)
    state = int(packed[opening - STATE_BYTES : opening].copy().view("<u4")[0])
    if state < MIN_STATE:
        raise CodecError(f"state of the levels must be >= {MIN_STATE}, got {state}")
    words = packed[opening:].copy().view("<u2").astype(np.uint16, copy=False)
    levels_K = np.empty(count, np.uint8)
    read = _read_words(levels_K, frequencies_M, np.append(words, np.uint16(0)), state)
    if read == PAST_END:
        raise CodecError(f"levels of {count} entries run past their {len(words)} words")
    if read == BAD_END or read != len(words):
        raise CodecError(
            f"levels of {count} entries must use {len(words)} words and end in the "
            f"state {MIN_STATE}"
        )
    return levels_K
