"""Bodies of sparse frames as entries: those of many frames in one compiled call.

One loop reads the position, the sign and the level of an entry together. Each of them
waits for the same of the entry before, so the processor works at all three at a time.

The reader trusts no input. It compares each bit and each word with the end of their
stream before they count, and each position with the end of its block before it writes
the entry, since numba checks neither.

Shape suffixes: K = entries of one update, or of several one after the other,
F = frames, S = slots of levels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daskdl.codec.golomb import (
    BLOCK,
    COUNT_BITS,
    HEADER_BITS,
    HEADER_MASK,
    MAX_BLOCK_RICE,
    MAX_RICE,
    PER_BLOCK,
    ascending,
    compiled,
    entries_refusal,
    lowest_bit,
)
from daskdl.codec.levels import (
    MAX_LEVEL,
    MIN_STATE,
    SLOT_BITS,
    SLOTS,
    STATES_BYTES,
    WORD_BITS,
)
from daskdl.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int32]

# Positions are written as int32 numbers, as a bit map, or as codes of gaps.
NUMBERS, MAP, CODES = range(3)
LEVELS_OFFSET = 4  # bytes that hold the length of the levels

# A slot of levels in one number: the frequency of its level, the slot's place within
# the level, and the level.
PLACE_SHIFT = SLOT_BITS + 1  # one level may have all slots
LEVEL_SHIFT = PLACE_SHIFT + SLOT_BITS
FREQUENCY_MASK, PLACE_MASK = 2**PLACE_SHIFT - 1, SLOTS - 1

(
    SOUND,
    UNORDERED,
    MAP_PADDING,
    MAP_COUNT,
    SIGN_PADDING,
    MODE,
    PAST_END,
    OUTSIDE,
    BAD_RICE,
    BAD_COUNT,
    LEFT_OVER,
    CODE_PADDING,
    HIGHEST,
    LEVELS_LENGTH,
    FREQUENCIES,
    STATE,
    WORDS_MISSING,
    WORDS_LEFT,
) = range(18)
FAULTS = {  # each with a number, ``got``
    MAP_PADDING: "padding after {size} bits of the map must be 0, got a bit at {got}",
    MAP_COUNT: "the map has {got} bits for {count} entries",
    SIGN_PADDING: "padding after {count} sign bits must be 0, got {got:#x} there",
    MODE: (
        f"Rice parameter must be in 0 .. {MAX_RICE} or {PER_BLOCK} (one per block), "
        "got {got}"
    ),
    PAST_END: "codes run past the {bits} bits there are, at parameter {got}",
    OUTSIDE: "a gap from parameter {got} leaves its block or the {size} parameters",
    BAD_RICE: f"a block's Rice parameter must be in 0 .. {MAX_BLOCK_RICE}, got {{got}}",
    BAD_COUNT: "the blocks' counts must add up to {count} entries, got {got}",
    LEFT_OVER: "codes of {count} gaps end after {got} bits, got {code_bytes} bytes",
    CODE_PADDING: (
        "padding after {got} bits of codes must be 0, got the last byte "
        "{last_code:#04x}"
    ),
    HIGHEST: f"highest level must be in 2 .. {MAX_LEVEL}, got {{got}}",
    LEVELS_LENGTH: (
        "levels up to {highest} must have {got} bytes, and an even number more, got "
        "{levels_bytes}"
    ),
    FREQUENCIES: (
        f"frequencies of the levels below the highest must leave 1 of {SLOTS} slots, "
        "got {got} in all"
    ),
    STATE: f"states of the levels must be >= {MIN_STATE}, got {{got}}",
    WORDS_MISSING: (
        "levels of {count} entries run past the {levels_bytes} bytes there are"
    ),
    WORDS_LEFT: (
        "levels of {count} entries must use all of their words and end in the state "
        f"{MIN_STATE}, got {{got}} words more"
    ),
}


class SparseBody(NamedTuple):
    """A body of one entry or more, of a length that N and K allow."""

    form: int  # NUMBERS, MAP or CODES
    size: int  # N
    entries: int  # K
    levels_bytes: int  # length of the levels, after `LEVELS_OFFSET` bytes; 0: none
    octets: Bytes

    def refusal(self, fault: int, got: int) -> CodecError:
        """Return the error of a fault."""
        signs = (self.entries + 7) // 8
        begin = self.levels_bytes and LEVELS_OFFSET + self.levels_bytes
        codes = self.octets[begin + 1 : len(self.octets) - signs]
        return CodecError(
            FAULTS[fault].format(
                got=got,
                size=self.size,
                count=self.entries,
                bits=8 * len(codes),
                code_bytes=len(codes),
                last_code=int(codes[-1]) if len(codes) else 0,
                highest=int(self.octets[min(LEVELS_OFFSET, len(self.octets) - 1)]),
                levels_bytes=self.levels_bytes,
            )
        )


@compiled
def read_word(words: Words, at: int) -> np.uint64:
    """Read the 64 bits from bit ``at`` on; the word after their first must exist."""
    # Unsigned: numba would look whether an index is negative.
    word, shift = np.uint64(at >> 6), np.uint64(at & 63)
    # Twice: a shift by 64 bits is undefined.
    above = (words[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - shift)
    return np.uint64(words[word] >> shift | above)


@compiled
def signed(position: int, k: int, signs: Bytes) -> int:
    """Return the entry at a position; a one bit stands for a negative entry."""
    negative = int(np.int64(signs[np.uint64(k >> 3)])) >> (k & 7) & 1
    return (position + 1) * (1 - 2 * negative)


@compiled
def read_levels_header(
    octets: Bytes, levels_bytes: int, slots_S: Integers
) -> tuple[int, int, int, int, int]:
    """Fill the slots of levels; return a fault and what it got, or the opening.

    Returns:
        The fault, the number that it got, the bytes before the words, and both states.
    """
    highest = int(np.int64(octets[LEVELS_OFFSET]))
    if not 2 <= highest <= MAX_LEVEL:
        return HIGHEST, highest, 0, 0, 0
    opening = 2 * highest - 1 + STATES_BYTES
    if levels_bytes < opening or (levels_bytes - opening) % 2:
        return LEVELS_LENGTH, opening, 0, 0, 0
    total = 0
    for m in range(highest):
        place = LEVELS_OFFSET + 1 + 2 * m
        frequency = int(np.int64(octets[place])) | int(np.int64(octets[place + 1])) << 8
        if m == highest - 1:
            frequency = SLOTS - total
        if total + frequency > SLOTS - int(m < highest - 1):
            return FREQUENCIES, total + frequency, 0, 0, 0
        for slot in range(frequency):
            number = frequency | slot << PLACE_SHIFT | (m + 1) << LEVEL_SHIFT
            slots_S[total + slot] = number
        total += frequency
    place = LEVELS_OFFSET + opening - STATES_BYTES
    even = odd = 0
    for i in range(4):
        even |= int(np.int64(octets[place + i])) << 8 * i
        odd |= int(np.int64(octets[place + 4 + i])) << 8 * i
    least = min(even, odd)
    return (SOUND if least >= MIN_STATE else STATE), least, opening, even, odd


class Streams(NamedTuple):
    """What the entries of a body are read from, and written to."""

    words: Words  # the body from its byte -1 on
    halves: Halves  # the same
    signs: Bytes  # a bit per entry
    slots_S: Integers  # see `read_levels_header`
    entries_K: Integers
    levels_K: Bytes  # empty: entries have no levels


@compiled
def read_level(streams: Streams, k: int, state: int, half: int) -> tuple[int, int]:
    """Read the level of entry k; return the next state and the next word."""
    slot = int(np.int64(streams.slots_S[np.uint64(state & PLACE_MASK)]))
    streams.levels_K[np.uint64(k)] = slot >> LEVEL_SHIFT
    place = slot >> PLACE_SHIFT & PLACE_MASK
    state = (slot & FREQUENCY_MASK) * (state >> SLOT_BITS) + place
    # Loaded even if it is not needed, to avoid an unpredictable branch.
    grown = state << WORD_BITS | int(np.int64(streams.halves[np.uint64(half)]))
    needed = state < MIN_STATE
    return grown if needed else state, half + int(needed)


@compiled
def read_long_code(
    words: Words, bits: int, at: int, rice: int, limit: int
) -> tuple[int, int, int]:
    """Read a code of any length; return a fault, the next bit and the gap."""
    zeros = low = int(lowest_bit(read_word(words, at)))
    while low == 64:
        at += 64
        if at >= bits:
            return PAST_END, at, 0
        low = int(lowest_bit(read_word(words, at)))
        zeros += low
    at += low + 1 + rice
    if at > bits:
        return PAST_END, at, 0
    # Compared before the shift, whose result may not fit 64 bits.
    if zeros > limit >> rice:
        return OUTSIDE, at, 0
    mask = (np.uint64(1) << np.uint64(rice)) - np.uint64(1)
    remainder = int(np.int64(read_word(words, at - rice) & mask))
    return SOUND, at, (zeros << rice) + remainder


@compiled
def read_block(
    streams: Streams,
    bits: int,
    at: int,
    rice: int,
    limits: tuple[int, int],
    span: tuple[int, int],
    coder: tuple[int, int, int, int],
) -> tuple[int, int, tuple[int, int, int, int]]:
    """Read the entries of a block, and their levels.

    Four codes are read from each word of 64 bits, if it has them: as many as it has
    would be an unpredictable branch, and one would wait for memory each time.

    Args:
        streams: Entries and levels are changed in place.
        bits: End of the codes.
        at: First bit of the block's codes.
        rice: Rice parameter.
        limits: First position of the block, and its end.
        span: Entries to read: the first, and the end.
        coder: State of the next level and of the one after it, the next word of 16
            bits, and the end of the words.

    Returns:
        A fault, or `SOUND`; what it got, or the next bit; and the next ``coder``.
    """
    words = streams.words
    following, stop = limits
    k, end = span
    state, next_state, half, last_half = coder
    with_levels = streams.levels_K.size > 0
    rice_bits = np.uint64(rice)
    mask = (np.uint64(1) << rice_bits) - np.uint64(1)
    while k < end:
        word = read_word(words, at)
        word_end = at + 64
        last = min(k + 4, end)
        while k < last:
            zeros = int(lowest_bit(word))
            if at + zeros + 1 + rice <= word_end:
                at += zeros + 1 + rice
                word = (word >> np.uint64(zeros)) >> np.uint64(1)
                offset = (zeros << rice) + int(np.int64(word & mask))
                word >>= rice_bits
                if at > bits:
                    return PAST_END, following, coder
            elif at + 64 > word_end:
                break  # a word from here on has more of this code
            else:
                fault, at, offset = read_long_code(
                    words, bits, at, rice, stop - following
                )
                if fault:
                    return fault, following, coder
                last = k  # another word
            position = following + offset
            if position >= stop:
                return OUTSIDE, following, coder
            streams.entries_K[np.uint64(k)] = signed(position, k, streams.signs)
            following = position + 1
            if with_levels:
                updated, half = read_level(streams, k, state, half)
                state, next_state = next_state, updated
                if half > last_half:
                    return WORDS_MISSING, half, coder
            k += 1
    return SOUND, at, (state, next_state, half, last_half)


@compiled
def read_blocks(
    streams: Streams,
    bits: int,
    at: int,
    size: int,
    coder: tuple[int, int, int, int],
) -> tuple[int, int, tuple[int, int, int, int]]:
    """Read all blocks with one Rice parameter per block; see `read_block`."""
    count, k = len(streams.entries_K), 0
    for start in range(0, size, BLOCK):
        if at + 1 > bits:
            return PAST_END, start, coder
        header = int(np.int64(read_word(streams.words, at) & np.uint64(HEADER_MASK)))
        at += 1
        if not header & 1:
            continue
        if at + HEADER_BITS > bits:
            return PAST_END, start, coder
        last = k + (header >> 1 & (2**COUNT_BITS - 1)) + 1
        rice = header >> (1 + COUNT_BITS)
        if rice > MAX_BLOCK_RICE:
            return BAD_RICE, rice, coder
        if last > count:
            return BAD_COUNT, last, coder
        limits = (start, min(start + BLOCK, size))
        at += HEADER_BITS
        fault, at, coder = read_block(streams, bits, at, rice, limits, (k, last), coder)
        if fault:
            return fault, at, coder
        k = last
    return (SOUND, at, coder) if k == count else (BAD_COUNT, k, coder)


@compiled
def read_codes(
    octets: Bytes, size: int, levels_bytes: int, streams: Streams
) -> tuple[int, int]:
    """Read a body of codes, with levels or without; return a fault and what it got."""
    count = len(streams.entries_K)
    mode_at, coder = 0, (MIN_STATE, MIN_STATE, 0, 0)
    if levels_bytes:
        mode_at = LEVELS_OFFSET + levels_bytes
        fault, got, opening, even, odd = read_levels_header(
            octets, levels_bytes, streams.slots_S
        )
        if fault:
            return fault, got
        first_half = (1 + LEVELS_OFFSET + opening) // 2
        coder = (even, odd, first_half, (1 + mode_at) // 2)
    signs_at = len(octets) - (count + 7) // 8
    begin, bits = 8 * (mode_at + 2), 8 * (signs_at + 1)
    mode = int(np.int64(octets[mode_at]))
    if mode == PER_BLOCK:
        fault, at, coder = read_blocks(streams, bits, begin, size, coder)
    elif mode <= MAX_RICE:
        fault, at, coder = read_block(
            streams, bits, begin, mode, (0, size), (0, count), coder
        )
    else:
        return MODE, mode
    if fault:
        return fault, at
    if bits != begin + (at - begin + 7) // 8 * 8:
        return LEFT_OVER, at - begin
    if at & 7 and octets[signs_at - 1] >> (at & 7):
        return CODE_PADDING, at - begin
    state, next_state, half, last_half = coder
    if half != last_half or state != MIN_STATE or next_state != MIN_STATE:
        return WORDS_LEFT, last_half - half
    return SOUND, 0


@compiled
def read_map(size: int, streams: Streams) -> tuple[int, int]:
    """Read a bit map; return a fault and what it got."""
    words, entries_K = streams.words, streams.entries_K
    count, k = len(entries_K), 0
    map_bytes = (size + 7) // 8
    for start in range(0, 8 * map_bytes, 64):
        word = read_word(words, 8 + start)
        if start + 64 > 8 * map_bytes:  # the signs follow
            word &= (np.uint64(1) << np.uint64(8 * map_bytes - start)) - np.uint64(1)
        while word:
            position = start + int(lowest_bit(word))
            word &= word - np.uint64(1)
            if position >= size:
                return MAP_PADDING, position
            if k < count:
                entries_K[k] = signed(position, k, streams.signs)
            k += 1
    return (SOUND, 0) if k == count else (MAP_COUNT, k)


@compiled
def read_numbers(streams: Streams) -> None:
    """Read int32 numbers, which may be no positions."""
    for k in range(len(streams.entries_K)):
        number = read_word(streams.words, 8 + 32 * k) & np.uint64(0xFFFFFFFF)
        streams.entries_K[k] = np.int32(np.int64(number))


@compiled
def _read_all(
    words: Words,
    octets: Bytes,
    halves: Halves,
    bodies_F: npt.NDArray[np.int64],
    entries_K: Integers,
    levels_K: Bytes,
    faults_F: npt.NDArray[np.int64],
) -> None:
    """Fill entries and levels body by body, and the fault of each body."""
    slots_S = np.empty(SLOTS, np.int32)
    for f in range(len(bodies_F)):
        form, size, count = bodies_F[f, 0], bodies_F[f, 1], bodies_F[f, 2]
        nbytes, levels_bytes = bodies_F[f, 3], bodies_F[f, 4]
        word, entry, level = bodies_F[f, 5], bodies_F[f, 6], bodies_F[f, 7]
        body = octets[8 * word + 1 : 8 * word + 1 + nbytes]
        streams = Streams(
            words[word:],
            halves[4 * word :],
            body[nbytes - (count + 7) // 8 :],
            slots_S,
            entries_K[entry : entry + count],
            levels_K[level : level + (count if levels_bytes else 0)],
        )
        fault, got = SOUND, 0
        if form == NUMBERS:
            read_numbers(streams)
            if not ascending(streams.entries_K, size):
                fault = UNORDERED
        elif form == MAP:
            fault, got = read_map(size, streams)
        else:
            fault, got = read_codes(body, size, levels_bytes, streams)
        if not fault and form != NUMBERS and count & 7 and body[-1] >> (count & 7):
            fault, got = SIGN_PADDING, int(np.int64(body[-1])) >> (count & 7)
        faults_F[f, 0], faults_F[f, 1] = fault, got


class Entries(NamedTuple):
    """What a body holds."""

    entries_K: Integers  # signed one-based positions
    levels_K: Bytes | None  # quanta of each entry; None: one each


def read(bodies: Sequence[SparseBody]) -> list[Entries | CodecError]:
    """Read bodies; return the entries of each, or the error of a damaged one."""
    rows, word, entry, level = [], 0, 0, 0
    for body in bodies:
        nbytes, levels_bytes = len(body.octets), body.levels_bytes
        rows.append((*body[:3], nbytes, levels_bytes, word, entry, level))
        word += (nbytes + 1) // 8 + 2  # a byte before the body, 8 bytes after it
        entry += body.entries
        level += body.entries if levels_bytes else 0
    octets = np.empty(8 * word, np.uint8)
    for body, (*_, start, _, _) in zip(bodies, rows, strict=True):
        begin = 8 * start + 1
        end = begin + len(body.octets)
        octets[begin:end] = body.octets
        octets[end : end + 16] = 0
    entries_K, levels_K = np.empty(entry, np.int32), np.empty(level, np.uint8)
    faults_F = np.empty((len(bodies), 2), np.int64)
    words = octets.view("<u8").astype(np.uint64, copy=False)
    halves = octets.view("<u2").astype(np.uint16, copy=False)
    bodies_F = np.array(rows, np.int64)
    _read_all(words, octets, halves, bodies_F, entries_K, levels_K, faults_F)
    if len(bodies) == 1 and not faults_F[0, 0]:  # arrays rather than views of them
        return [Entries(entries_K, levels_K if level else None)]
    results: list[Entries | CodecError] = []
    for body, row, fault in zip(bodies, rows, faults_F.tolist(), strict=True):
        *_, entry, level = row
        part_K = entries_K[entry : entry + body.entries]
        if fault[0] == UNORDERED:
            results.append(entries_refusal(part_K, body.size))
        elif fault[0]:
            results.append(body.refusal(*fault))
        else:
            leveled_K = levels_K[level : level + body.entries]
            results.append(Entries(part_K, leveled_K if body.levels_bytes else None))
    return results
