"""Sums of several updates as one frame and back: whole quanta of a common unit.

A sum of updates of many replicas has few zeros, so it lists no positions: each block of
256 parameters has a value of a few bits for each parameter, of as many bits as take the
fewest bytes, and apart from them the values that do not fit. The unit is the largest of
which all quanta are multiples. The frame names the updates that it holds. Its layout is
in ``docs/wire-format.md``.

Sums of whole units do not depend on their order or grouping: a sum of sums has the same
values as the sum of their updates, and an update can be subtracted again.

Shape suffixes: N = parameters of the model, K = entries of one update, B = blocks,
E = exceptions, M = summands.
"""

import itertools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from daskdl.codec.frame import (
    Body,
    Bytes,
    DenseUpdate,
    Integers,
    Kind,
    SparseUpdate,
    Stamp,
    framed,
    opened,
)
from daskdl.codec.golomb import compiled
from daskdl.codec.levels import MAX_LEVEL
from daskdl.errors import CodecError

BLOCK = 256  # parameters whose values have the same width
LANES = 32  # bytes of a row; eight rows of values are a block
MAX_WIDTH = 8  # bits; wider values have 16 or 32
WIDTHS = (*range(MAX_WIDTH + 1), 16, 32)
SUMMAND = struct.Struct("<IQQ")
INT32_MAX = 2**31 - 1
MANTISSA_BITS = 24  # of float32


class Summand(NamedTuple):
    """One of the updates that a sum holds."""

    origin: int  # u32, the replica that made the update
    sequence: int  # u64, counts the origin's updates
    step: int  # u64, steps that the origin has completed with the update


class SumBlocks(NamedTuple):
    """Values of a sum in blocks; see the module."""

    widths_B: Bytes  # bits of each value
    exceptions_B: Bytes  # number of exceptions
    words: npt.NDArray[np.uint64]  # values of all blocks with a width, end to end
    places_E: Bytes  # of exceptions, within their block, ascending
    extras_E: npt.NDArray[np.int16]  # what exceptions add to the values at their places


class SumUpdate(NamedTuple):
    """The sum of several updates."""

    run: int
    size: int  # N
    threshold: float  # one unit, parameter units
    summands: tuple[Summand, ...]  # ascending, each once
    largest: int  # bound on the absolute values, in units
    packed: SumBlocks

    @property
    def is_wide(self) -> bool:
        """Whether values have more than eight bits, as sums of dense updates have."""
        return bool(self.packed.widths_B.max() > MAX_WIDTH)

    def add_(self, total_N: Integers, steps: int) -> None:
        """Add the sum to a vector.

        Args:
            total_N: Int32, contiguous.
            steps: What a unit adds, positive or negative.

        Example:
            >>> from daskdl.codec import SparseUpdate, Stamp, encode_sum, decode_sum
            >>> entries, total = np.array([1, -3], np.int32), np.zeros(3, np.int32)
            >>> parts = [
            ...     SparseUpdate(Stamp(7, o, 1, 1), Kind.GAPS, 3, threshold, entries)
            ...     for o, threshold in ((1, 0.5), (2, 0.75))
            ... ]
            >>> frame = encode_sum(7, parts)
            >>> decode_sum(frame).add_(total, steps=2)
            >>> decode_sum(frame).threshold, total
            (0.25, array([ 10,   0, -10], dtype=int32))
        """
        if self.largest * abs(steps) > INT32_MAX:
            raise CodecError(
                f"a sum must fit int32, got up to {self.largest} times {steps}"
            )
        _add_blocks(*self.packed, total_N, steps)


@compiled
def add_entries_(
    total_N: npt.NDArray[np.int32],
    entries_K: npt.NDArray[np.int32],
    levels_K: npt.NDArray[np.uint8],
    steps: int,
) -> None:
    """Add a quantum of ``steps``, times a level if there are levels, at entries."""
    leveled = len(levels_K) > 0
    for k in range(len(entries_K)):
        entry = entries_K[k]
        moved = steps * levels_K[k] if leveled else steps
        position = abs(entry) - 1
        total_N[position] += moved if entry > 0 else -moved


@compiled
def _repeated(byte: int) -> np.uint64:
    return np.uint64(byte) * np.uint64(0x0101010101010101)


@compiled
def _read_rows(
    words: npt.NDArray[np.uint64],
    at: int,
    width: int,
    values: npt.NDArray[np.uint64],
) -> None:
    """Unpack a block: each byte of ``values`` gets the ``width`` bits of a value.

    Byte ``j`` of all rows together is a stream of bits, of eight values.
    """
    for k in range(8):
        bit = k * width
        row, shift = at + (bit >> 3) * 4, np.uint64(bit & 7)
        above = (bit & 7) + width - 8  # bits in the next row
        mask = _repeated((1 << min(width, 8 - (bit & 7))) - 1)
        for i in range(4):
            values[4 * k + i] = words[row + i] >> shift & mask
        if above > 0:
            mask = _repeated((1 << above) - 1)
            back = np.uint64(width - above)
            for i in range(4):
                values[4 * k + i] |= (words[row + 4 + i] & mask) << back


@compiled
def _write_rows(
    words: npt.NDArray[np.uint64],
    at: int,
    width: int,
    values: npt.NDArray[np.uint64],
) -> None:
    """Undo :func:`_read_rows`; the words are 0 before."""
    for k in range(8):
        bit = k * width
        row, shift = at + (bit >> 3) * 4, np.uint64(bit & 7)
        above = (bit & 7) + width - 8
        mask = _repeated((1 << min(width, 8 - (bit & 7))) - 1)
        for i in range(4):
            words[row + i] |= (values[4 * k + i] & mask) << shift
        if above > 0:
            mask = _repeated((1 << above) - 1)
            back = np.uint64(width - above)
            for i in range(4):
                words[row + 4 + i] |= values[4 * k + i] >> back & mask


@compiled
def _add_blocks(
    widths_B: npt.NDArray[np.uint8],
    exceptions_B: npt.NDArray[np.uint8],
    words: npt.NDArray[np.uint64],
    places_E: npt.NDArray[np.uint8],
    extras_E: npt.NDArray[np.int16],
    total_N: npt.NDArray[np.int32],
    steps: int,
) -> None:
    halves, integers = words.view(np.int16), words.view(np.int32)
    values = np.empty(BLOCK // 8, np.uint64)
    value_bytes = values.view(np.uint8)
    factor = np.int32(steps)
    at = begin = 0
    for b in range(len(widths_B)):
        out = total_N[b * BLOCK : (b + 1) * BLOCK]
        width = int(widths_B[b])
        if 0 < width <= MAX_WIDTH:
            _read_rows(words, at, width, values)
            middle = np.int32(1 << (width - 1))
            for i in range(len(out)):
                out[i] += np.int32(np.int32(value_bytes[i]) - middle) * factor
        elif width == 16:
            part = halves[4 * at : 4 * at + len(out)]
            for i in range(len(out)):
                out[i] += np.int32(part[i]) * factor
        elif width == 32:
            wide = integers[2 * at : 2 * at + len(out)]
            for i in range(len(out)):
                out[i] += wide[i] * factor
        at += 4 * width
        for e in range(begin, begin + exceptions_B[b]):
            out[places_E[e]] += np.int32(extras_E[e]) * factor
        begin += exceptions_B[b]


@compiled
def _choose_widths(
    values_N: npt.NDArray[np.int32],
    widths_B: npt.NDArray[np.uint8],
    exceptions_B: npt.NDArray[np.uint8],
) -> None:
    """Choose the width of each block with the fewest bytes, exceptions included."""
    for b in range(len(widths_B)):
        part = values_N[b * BLOCK : (b + 1) * BLOCK]
        least = most = np.int32(0)
        for i in range(len(part)):
            least = min(least, part[i])
            most = max(most, part[i])
        largest = max(np.int64(most), -np.int64(least) - 1)
        needed = 0
        if least or most:
            needed = 1
            while largest >= 1 << (needed - 1):
                needed += 1
        width, outside = needed, 0
        if needed > 16:
            widths_B[b], exceptions_B[b] = 32, 0
            continue
        if needed > MAX_WIDTH:
            width = 16
        fewest = LANES * width
        for narrow in range(min(needed - 1, MAX_WIDTH), -1, -1):
            middle = np.uint32(1 << narrow >> 1)
            beyond = np.uint32(1 << narrow) if narrow else np.uint32(1)
            count = np.uint32(0)
            for i in range(len(part)):
                shifted = np.uint32(np.uint32(part[i]) + middle)
                count = np.uint32(count + np.uint32(shifted >= beyond))
            beside = int(np.int64(count))
            nbytes = LANES * narrow + 3 * beside
            if nbytes < fewest and beside < 256:
                width, outside, fewest = narrow, beside, nbytes
            elif 3 * beside > fewest:
                break  # narrower ones have more exceptions
        widths_B[b], exceptions_B[b] = width, outside


@compiled
def _write_blocks(
    values_N: npt.NDArray[np.int32],
    widths_B: npt.NDArray[np.uint8],
    exceptions_B: npt.NDArray[np.uint8],
    words: npt.NDArray[np.uint64],
    places_E: npt.NDArray[np.uint8],
    extras_E: npt.NDArray[np.int16],
) -> None:
    halves, integers = words.view(np.int16), words.view(np.int32)
    values = np.empty(BLOCK // 8, np.uint64)
    value_bytes = values.view(np.uint8)
    at = e = 0
    for b in range(len(widths_B)):
        part = values_N[b * BLOCK : (b + 1) * BLOCK]
        width = int(widths_B[b])
        middle = np.int32(1 << width >> 1) if width <= MAX_WIDTH else np.int32(0)
        if exceptions_B[b]:
            for i in range(len(part)):
                if not -middle <= part[i] < max(middle, 1):
                    places_E[e], extras_E[e] = i, part[i]
                    e += 1
        if 0 < width <= MAX_WIDTH:
            value_bytes[:] = np.uint8(middle)
            beyond = np.uint32(1 << width)
            for i in range(len(part)):
                shifted = np.uint32(part[i] + middle)
                kept = shifted if shifted < beyond else np.uint32(middle)
                value_bytes[i] = np.uint8(kept)
            _write_rows(words, at, width, values)
        elif width == 16:
            for i in range(len(part)):
                halves[4 * at + i] = part[i]
        elif width == 32:
            for i in range(len(part)):
                integers[2 * at + i] = part[i]
        at += 4 * width


@compiled
def _places_ascend(
    exceptions_B: npt.NDArray[np.uint8], places_E: npt.NDArray[np.uint8], size: int
) -> bool:
    begin = 0
    for b in range(len(exceptions_B)):
        last = -1
        for e in range(begin, begin + exceptions_B[b]):
            if places_E[e] <= last or b * BLOCK + places_E[e] >= size:
                return False
            last = int(places_E[e])
        begin += exceptions_B[b]
    return True


def common_unit(thresholds: Sequence[float]) -> tuple[float, list[int]]:
    """Return the largest number of which all thresholds are multiples, and how often.

    Args:
        thresholds: Exact in float32, > 0.

    Returns:
        The unit, exact in float32, and each threshold in units.

    Example:
        >>> common_unit([0.75, 1.5, 2.0])
        (0.25, [3, 6, 8])
    """
    pairs = [math.frexp(threshold) for threshold in thresholds]
    lowest = min(exponent for _, exponent in pairs)
    mantissas = [
        int(math.ldexp(mantissa, MANTISSA_BITS)) << (exponent - lowest)
        for mantissa, exponent in pairs
    ]
    divisor = math.gcd(*mantissas)
    unit = math.ldexp(divisor, lowest - MANTISSA_BITS)
    return unit, [number // divisor for number in mantissas]


class SumEncoder:
    """Adds updates, one after another, and writes their sum as a frame.

    It keeps one vector and the names of the updates, however many there are. The unit
    is the largest number of which all quanta added so far are multiples.

    Args:
        run: Id of the run.
        size: Number of parameters.

    Example:
        >>> encoder = SumEncoder(7, 3)
        >>> for origin, threshold in ((1, 0.5), (2, 0.75)):
        ...     stamp, entries = Stamp(7, origin, 1, 1), np.array([1, -3], np.int32)
        ...     encoder.add(SparseUpdate(stamp, Kind.GAPS, 3, threshold, entries))
        >>> total = decode_sum(encoder.encode())
        >>> total.threshold, len(total.summands)
        (0.25, 2)
    """

    def __init__(self, run: int, size: int) -> None:
        self._run = run
        self._summands: dict[tuple[int, int], Summand] = {}  # by origin and sequence
        self._unit = 0.0  # until an update is added
        self._largest = 0  # bound on the absolute values, in units
        self._values_N = np.zeros(size, np.int32)

    def __len__(self) -> int:
        """The number of updates in the sum."""
        return len(self._summands)

    def add(
        self, update: SparseUpdate | DenseUpdate | SumUpdate, step: int | None = None
    ) -> None:
        """Add an update, or a sum of updates.

        Args:
            update: The update, or the sum.
            step: Steps that the origin has completed with the update; None: those of
                its stamp. No effect with a sum.

        Raises:
            CodecError: If the sum might not fit int32 in the common unit, if it already
                has one of the updates, or if sizes differ. Nothing is added then.
        """
        size = len(self._values_N)
        if update.size != size:
            raise CodecError(f"updates must have {size} parameters, got {update.size}")
        unit, (factor, steps) = (
            update.grid if isinstance(update, DenseUpdate) else update.threshold,
            (1, 1),
        )
        if self._unit:
            unit, (factor, steps) = common_unit([self._unit, unit])
        if isinstance(update, SumUpdate):
            summands, level = update.summands, update.largest
        else:
            _, origin, sequence, stamped = update.stamp
            completed = stamped if step is None else step
            summands, level = (Summand(origin, sequence, completed),), MAX_LEVEL
            if isinstance(update, DenseUpdate):
                level = max(-int(update.counts_N.min()), int(update.counts_N.max()))
        named = {summand[:2]: summand for summand in summands}
        if not self._summands.keys().isdisjoint(named):
            raise CodecError(f"each update must be in a sum once, got {summands} again")
        largest = factor * self._largest + steps * level
        if largest > INT32_MAX:
            raise CodecError(
                f"a sum must fit int32, got up to {largest} units of {unit}"
            )
        if factor > 1 and self._largest:  # else all values are 0
            self._values_N *= np.int32(factor)
        if isinstance(update, SumUpdate):
            update.add_(self._values_N, steps)
        elif isinstance(update, DenseUpdate):
            self._values_N += np.int32(steps) * update.counts_N
        else:
            levels_K = update.levels_K
            levels_K = np.empty(0, np.uint8) if levels_K is None else levels_K
            add_entries_(self._values_N, update.entries_K, levels_K, steps)
        self._unit, self._largest = unit, largest
        self._summands |= named

    def encode(self) -> Bytes:
        """Write the sum of one or more updates as a frame.

        Returns:
            The frame, uint8, one-dimensional, a new array.
        """
        summands = sorted(self._summands.values())
        names = b"".join(SUMMAND.pack(*summand) for summand in summands)
        blocks = _packed_blocks(self._values_N)
        body = np.concatenate([np.frombuffer(names, np.uint8), *blocks])
        size, count = len(self._values_N), len(summands)
        packed = Body(Kind.SUM, size, count, None, len(body), body, 0)
        return framed(Stamp(self._run, 0, 0, 0), self._unit, packed)


def encode_sum(
    run: int, updates: Sequence[SparseUpdate | DenseUpdate | SumUpdate]
) -> Bytes:
    """Write the sum of one or more updates as a frame; see :class:`SumEncoder`.

    Raises:
        CodecError: If they cannot be added.
    """
    encoder = SumEncoder(run, updates[0].size)
    for update in updates:
        encoder.add(update)
    return encoder.encode()


def _packed_blocks(values_N: Integers) -> list[Bytes]:
    blocks = -(-len(values_N) // BLOCK)
    widths_B, exceptions_B = np.empty((2, blocks), np.uint8)
    _choose_widths(values_N, widths_B, exceptions_B)
    words = np.zeros(4 * int(widths_B.sum(dtype=np.int64)), np.uint64)
    exceptions = int(exceptions_B.sum(dtype=np.int64))
    places_E, extras_E = np.empty(exceptions, np.uint8), np.empty(exceptions, np.int16)
    _write_blocks(values_N, widths_B, exceptions_B, words, places_E, extras_E)
    stream = words.astype("<u8", copy=False).view(np.uint8)
    extras = extras_E.astype("<i2", copy=False).view(np.uint8)
    return [widths_B, exceptions_B, stream, places_E, extras]


def decode_sum(
    frame: Buffer, *, run: int | None = None, size: int | None = None
) -> SumUpdate:
    """Read a frame of :class:`SumEncoder`, checking every byte of it.

    Args:
        frame: In any contiguous buffer. Never changed.
        run: Refuse sums of other runs.
        size: Refuse sums for another number of parameters.

    Raises:
        CodecError: If the frame violates ``docs/wire-format.md``, or is for another run
            or model.
    """
    kind, header, payload = opened(frame, run, size)
    if kind is not Kind.SUM:
        raise CodecError(f"a frame of a sum has the kind SUM, got {kind.name}")
    if header.flags or header.origin or header.sequence or header.step:
        raise CodecError("flags, origin, sequence and step of a sum must be 0")
    body = np.frombuffer(payload, np.uint8)
    blocks, names_end = -(-header.size // BLOCK), SUMMAND.size * header.entries
    opening = names_end + 2 * blocks
    if len(body) != header.body_length or len(body) < opening:
        raise CodecError(
            f"a sum of {header.entries} updates of {header.size} parameters must have "
            f"{opening} bytes or more, got {len(body)} of {header.body_length}"
        )
    summands = tuple(map(Summand._make, SUMMAND.iter_unpack(payload[:names_end])))
    named = [summand[:2] for summand in summands]
    if any(a >= b for a, b in itertools.pairwise(named)) or not named:
        raise CodecError("the updates of a sum must be ascending, one or more")
    widths_B, exceptions_B = body[names_end:opening].reshape(2, blocks).copy()
    if not np.isin(widths_B, WIDTHS).all():
        raise CodecError(f"widths must be one of {WIDTHS}, got {widths_B.max()}")
    if exceptions_B[widths_B > MAX_WIDTH].any():
        raise CodecError(f"a block of more than {MAX_WIDTH} bits has no exceptions")
    stream_end = opening + LANES * int(widths_B.sum(dtype=np.int64))
    exceptions = int(exceptions_B.sum(dtype=np.int64))
    if len(body) != stream_end + 3 * exceptions:
        raise CodecError(
            f"blocks of a sum must have {stream_end + 3 * exceptions - opening} bytes, "
            f"got {len(body) - opening}"
        )
    # Copied for their alignment, and since numba compiles for writable arrays alone.
    words = body[opening:stream_end].copy().view("<u8").astype(np.uint64, copy=False)
    places_E = body[stream_end : stream_end + exceptions].copy()
    extras = body[stream_end + exceptions :].copy().view("<i2")
    packed = SumBlocks(
        widths_B, exceptions_B, words, places_E, extras.astype(np.int16, copy=False)
    )
    if not _places_ascend(exceptions_B, places_E, header.size):
        raise CodecError("places of exceptions must be ascending, and in their block")
    _check_padding(packed, header.size)
    largest = _largest(packed)
    return SumUpdate(
        header.run, header.size, header.threshold, summands, largest, packed
    )


def _check_padding(packed: SumBlocks, size: int) -> None:
    """Refuse values beyond the last parameter."""
    inside = size % BLOCK
    width = int(packed.widths_B[-1])
    if not inside or not width:
        return
    nothing = np.zeros(0, np.uint8)
    last_N = np.zeros(BLOCK, np.int32)
    last = packed.words[len(packed.words) - 4 * width :]
    widths, none = packed.widths_B[-1:], np.zeros(1, np.uint8)
    _add_blocks(widths, none, last, nothing, np.zeros(0, np.int16), last_N, 1)
    if last_N[inside:].any():
        raise CodecError(f"values after {size} parameters must be 0")


def _largest(packed: SumBlocks) -> int:
    """Return a bound on the absolute values."""
    widths_B, narrow = packed.widths_B, int(packed.widths_B.max())
    if narrow == 32:
        ends = np.cumsum(4 * widths_B.astype(np.int64))
        wide = [
            packed.words[end - 128 : end].view(np.int32).astype(np.int64)
            for end in ends[widths_B == 32]
        ]
        return max(int(np.abs(values).max()) for values in wide)
    extras = np.abs(packed.extras_E.astype(np.int64)).max(initial=0)
    return (1 << narrow >> 1) + int(extras)
