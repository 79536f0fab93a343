"""An update as one frame and back: a header of 64 bytes and a body.

The header has the stamp, the sizes and the kind of packing; the body is compressed with
lz4 if that is smaller. Encoding chooses the smallest kind; decoding checks every byte,
and later code does not check again. The layout is in ``docs/wire-format.md``. numpy in,
numpy out; no torch, no Dask, no state.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

import enum
import math
import struct
import zlib
from typing import NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from daskdl.codec import dense8, golomb
from daskdl.codec.dense8 import Quantized
from daskdl.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]

MAGIC = b"DKDL"
VERSION = 1
# magic, version, kind, flags, reserved | run, sequence, step |
# origin, N, K, threshold | body length | reserved, checksum
LAYOUT = struct.Struct("<4sBBBBQQQIIIfQII")
CHECKSUM_OFFSET = 60
FLAG_LZ4 = 1
MAX_SIZE = 2**31 - 1  # an entry is a signed one-based int32 position
LZ4_MOST = 0x7E000000  # bytes, LZ4_MAX_INPUT_SIZE of the library
LZ4_RATIO = 255  # most bytes that a byte of an lz4 block expands to


class Kind(enum.IntEnum):
    """Packing of the body of a frame."""

    RAW32 = 1  # an int32 per entry
    GAPS = 2  # Golomb-Rice coded gaps, then signs
    BITMAP = 3  # a bit per parameter, then signs
    DENSE8 = 4  # eight bits per parameter, a scale in grid steps per block
    DENSE32 = 5  # an int32 count of grid steps per parameter


SPARSE = (Kind.RAW32, Kind.GAPS, Kind.BITMAP)


class Stamp(NamedTuple):
    """Identity of the update in a frame."""

    run: int  # u64, one per fit
    origin: int  # u32, the replica that made the update
    sequence: int  # u64, counts the origin's updates
    step: int  # u64, the origin's step when it made the update


STAMP_BITS = Stamp(run=64, origin=32, sequence=64, step=64)


class SparseUpdate(NamedTuple):
    """Quanta at some of the positions."""

    stamp: Stamp
    kind: Kind
    size: int  # N
    threshold: float  # one quantum, parameter units
    entries_K: Integers  # signed one-based positions, ascending


class DenseUpdate(NamedTuple):
    """A count of grid steps for every parameter."""

    stamp: Stamp
    size: int  # N
    grid: float  # one step, parameter units
    counts_N: Integers


Update = SparseUpdate | DenseUpdate


def encode(
    stamp: Stamp,
    size: int,
    threshold: float,
    entries_K: Integers,
    kind: Kind | None = None,
) -> Bytes:
    """Write entries as a frame, by default of the smallest kind.

    Args:
        stamp: Which update this is.
        size: N, at most 2**31 - 1.
        threshold: One quantum, parameter units, > 0 and exact in float32.
        entries_K: ``+(i + 1)`` for ``+threshold`` at position ``i``,
            ``-(i + 1)`` for ``-threshold``; int32, strictly ascending in
            position. Without entries the frame is only a header.
        kind: RAW32, GAPS or BITMAP; None: the kind with the fewest bytes by
            :func:`payload_sizes`, or the first of equals in this order.

    Returns:
        The frame, uint8, one-dimensional, a new array.

    Example:
        >>> import numpy as np
        >>> stamp = Stamp(run=7, origin=1, sequence=12, step=40)
        >>> frame = encode(stamp, 10, 0.5, np.array([1, -4], np.int32))
        >>> decode(frame).entries_K
        array([ 1, -4], dtype=int32)

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015, for the entries; a signed int32 replaces
        Strom's 31-bit position and sign bit.
    """
    if kind is not None and kind not in SPARSE:
        raise CodecError(f"kind must be one of {SPARSE}, got {kind!r}")
    _check_given(stamp, size, threshold)
    positions_K = _positions(entries_K, size)
    plan = golomb.plan(size, positions_K)
    if kind is None:
        sizes = _sizes(size, plan)
        kind = min(sizes, key=sizes.__getitem__)  # the first of equals
    if kind is Kind.RAW32:
        body = _bytes(entries_K)
    elif not len(entries_K):
        body = np.empty(0, np.uint8)
    else:
        if kind is Kind.GAPS:
            where = golomb.pack(plan)
        else:
            present_N = np.zeros(size, bool)
            present_N[positions_K] = True
            where = np.packbits(present_N, bitorder="little")
        body = np.concatenate([where, np.packbits(entries_K < 0, bitorder="little")])
    return _framed(stamp, kind, size, len(entries_K), threshold, body)


def encode_dense(stamp: Stamp, grid: float, counts_N: Integers | Quantized) -> Bytes:
    """Write a count of grid steps for every parameter as a frame.

    Args:
        stamp: Which update this is.
        grid: One step, parameter units, > 0 and exact in float32.
        counts_N: Steps, int32, any value, one-dimensional and not empty, written as
            DENSE32; or the result of :func:`quantize`, written as DENSE8 and decoded to
            its :func:`counts_of`.

    Returns:
        The frame, uint8, one-dimensional, a new array.

    Example:
        >>> import numpy as np
        >>> stamp, counts = Stamp(7, 1, 12, 40), np.array([300, -1], np.int32)
        >>> decode(encode_dense(stamp, 0.25, counts)).counts_N
        array([300,  -1], dtype=int32)
        >>> decode(encode_dense(stamp, 0.25, dense8.quantize(counts))).counts_N
        array([300,   0], dtype=int32)
    """
    if isinstance(counts_N, Quantized):
        kind, size, body = Kind.DENSE8, len(counts_N.values_N), dense8.pack(counts_N)
    else:
        dense8.check_counts(counts_N)
        kind, size, body = Kind.DENSE32, len(counts_N), _bytes(counts_N)
    _check_given(stamp, size, grid)
    return _framed(stamp, kind, size, 0, grid, body)


def _check_given(stamp: Stamp, size: int, threshold: float) -> None:
    """Check that a stamp, N and a threshold survive encoding unchanged."""
    for name, value, bits in zip(Stamp._fields, stamp, STAMP_BITS, strict=True):
        if not 0 <= value < 2**bits:
            raise CodecError(f"{name} must be in 0 .. 2**{bits} - 1, got {value}")
    _check_numbers(size, threshold)
    # With a rounded threshold, receivers would move by another quantum than the
    # sender, and no residual would contain the difference.
    with np.errstate(over="ignore"):
        nearest = float(np.float32(threshold))
    if nearest != threshold:
        raise CodecError(
            f"threshold must be exact in float32, got {threshold!r}, "
            f"the nearest is {nearest!r}"
        )


def _check_numbers(size: int, threshold: float) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise CodecError(f"parameters must be in 1 .. 2**31 - 1, got {size}")
    if not (math.isfinite(threshold) and threshold > 0):
        raise CodecError(f"threshold must be finite and > 0, got {threshold}")


def _positions(entries_K: Integers, size: int) -> Integers:
    """Return the zero-based positions of entries, a new array."""
    if entries_K.ndim != 1 or entries_K.dtype != np.int32:
        raise CodecError(
            "entries must be one-dimensional int32, "
            f"got {entries_K.dtype} of shape {entries_K.shape}"
        )
    # Zero, and int32's minimum, which has no absolute value, become negative.
    positions_K: Integers = np.abs(entries_K) - np.int32(1)
    # Negative numbers are the largest as unsigned ones: one comparison suffices.
    outside_K = positions_K.view(np.uint32) >= size
    if outside_K.any():
        i = int(outside_K.argmax())
        raise CodecError(
            f"entries of {size} parameters must be in 1 .. {size} or negative, "
            f"got {entries_K[i]} at {i}"
        )
    falling_K = positions_K[1:] <= positions_K[:-1]
    if falling_K.any():
        i = int(falling_K.argmax())
        raise CodecError(
            "entries must be strictly ascending in position, "
            f"got {entries_K[i]} and then {entries_K[i + 1]} at {i + 1}"
        )
    return positions_K


def _sizes(size: int, plan: golomb.Plan) -> dict[Kind, int]:
    count = len(plan.gaps_K)
    if not count:
        return dict.fromkeys(SPARSE, 0)
    signs = (count + 7) // 8
    bitmap = (size + 7) // 8
    return {
        Kind.RAW32: 4 * count,
        Kind.GAPS: plan.length + signs,
        Kind.BITMAP: bitmap + signs,
    }


def _bytes(values: Integers) -> Bytes:
    return np.ascontiguousarray(values, "<i4").view(np.uint8)


def _framed(
    stamp: Stamp, kind: Kind, size: int, count: int, threshold: float, body: Bytes
) -> Bytes:
    """Compress a body with lz4 if that is smaller, and prepend the header.

    lz4 is not tried on RAW32: repetitions in ascending positions never pay. On GAPS of
    independent positions it saves nothing, but costs only 1 % of the packing time; on
    clustered positions it saves another 4 to 60 % (``benchmarks/wire_size.py``).
    """
    payload, flags = body, 0
    if kind is not Kind.RAW32 and 0 < len(body) <= LZ4_MOST:
        packed = lz4.block.compress(body.data, store_size=False)
        if len(packed) < len(body):
            payload, flags = np.frombuffer(packed, np.uint8), FLAG_LZ4
    frame = np.empty(LAYOUT.size + len(payload), np.uint8)
    LAYOUT.pack_into(
        frame.data,
        0,
        *(MAGIC, VERSION, kind, flags, 0),
        *(stamp.run, stamp.sequence, stamp.step, stamp.origin),
        *(size, count, threshold, len(body)),
        *(0, 0),
    )
    frame[LAYOUT.size :] = payload
    struct.pack_into("<I", frame.data, CHECKSUM_OFFSET, _checksum(frame.data))
    return frame


def _checksum(frame: memoryview) -> int:
    """Return the CRC-32 of a frame, with zeros in its checksum field."""
    opening = bytes(frame[:CHECKSUM_OFFSET]) + bytes(4)
    return zlib.crc32(frame[LAYOUT.size :], zlib.crc32(opening))


def payload_sizes(size: int, entries_K: Integers) -> dict[Kind, int]:
    """Return the length of the body for each sparse kind, without packing it.

    Example:
        >>> import numpy as np
        >>> payload_sizes(1000, np.arange(1, 1001, 10, dtype=np.int32))
        {<Kind.RAW32: 1>: 400, <Kind.GAPS: 2>: 77, <Kind.BITMAP: 3>: 138}
    """
    _check_numbers(size, threshold=1.0)
    return _sizes(size, golomb.plan(size, _positions(entries_K, size)))


def decode(frame: Buffer, *, run: int | None = None, size: int | None = None) -> Update:
    """Read a frame, checking every byte of it.

    The update can be applied without further checks: positions are in range and
    strictly ascending.

    Args:
        frame: A frame of :func:`encode` or :func:`encode_dense`, in any contiguous
            buffer. Never changed.
        run: Refuse updates of other runs.
        size: Refuse updates for another number of parameters.

    Returns:
        The update, with a new array, so that the frame may be freed.

    Raises:
        CodecError: If the frame violates ``docs/wire-format.md``, or is for another run
            or model.

    Example:
        >>> import numpy as np
        >>> frame = encode(Stamp(7, 1, 12, 40), 10, 0.5, np.array([3], np.int32))
        >>> decode(frame, run=8)
        Traceback (most recent call last):
        daskdl.errors.CodecError: frame of run 7, this is run 8
    """
    view, header = _open(frame)
    found = _checksum(view)
    if found != header.checksum:
        raise CodecError(
            f"checksum is {found:#010x}, the header says {header.checksum:#010x}"
        )
    kind = _kind_of(header)
    reserved = header.reserved_byte, header.reserved_word
    if any(reserved):
        raise CodecError(f"reserved bytes must be 0, got {reserved}")
    count, threshold = header.entries, header.threshold
    _check_numbers(header.size, threshold)
    most = header.size if kind in SPARSE else 0
    if count > most:
        raise CodecError(
            f"entries of a {kind.name} frame of {header.size} parameters "
            f"must be in 0 .. {most}, got {count}"
        )
    if run is not None and header.run != run:
        raise CodecError(f"frame of run {header.run}, this is run {run}")
    if size is not None and header.size != size:
        raise CodecError(f"frame for {header.size} parameters, this model has {size}")
    stamp = Stamp(header.run, header.origin, header.sequence, header.step)
    body = _body_of(kind, header, view[LAYOUT.size :])
    if kind in (Kind.GAPS, Kind.BITMAP) and count:
        values = _signed_entries(kind, body, header.size, count)
    elif kind is Kind.DENSE8:
        values = dense8.unpack(body, header.size)
    else:
        values = body.view("<i4").astype(np.int32)
    if kind not in SPARSE:
        return DenseUpdate(stamp, header.size, threshold, values)
    if kind is Kind.RAW32:
        _positions(values, header.size)
    return SparseUpdate(stamp, kind, header.size, threshold, values)


def read_kind(frame: Buffer) -> Kind:
    """Read the kind of a frame for statistics, without checking the rest."""
    return _kind_of(_open(frame)[1])


class Header(NamedTuple):
    """The fields of a header, in byte order."""

    magic: bytes
    version: int
    kind: int
    flags: int
    reserved_byte: int
    run: int
    sequence: int
    step: int
    origin: int
    size: int  # N
    entries: int  # K; 0 for the dense kinds
    threshold: float  # parameter units; the grid for the dense kinds
    body_length: int  # bytes, before lz4
    reserved_word: int
    checksum: int


def _open(frame: Buffer) -> tuple[memoryview, Header]:
    """View a frame as read-only bytes, and read its header."""
    view = memoryview(frame)
    if not view.c_contiguous:
        raise CodecError(
            f"a frame must be contiguous, got strides {view.strides} of {view.shape}"
        )
    view = memoryview(b"") if view.nbytes == 0 else view.cast("B").toreadonly()
    if len(view) < LAYOUT.size:
        raise CodecError(f"got {len(view)} bytes, the header alone has {LAYOUT.size}")
    header = Header._make(LAYOUT.unpack_from(view))
    if header.magic != MAGIC:
        raise CodecError(f"magic must be {MAGIC!r}, got {header.magic!r}")
    if header.version != VERSION:
        raise CodecError(
            f"this is format version {VERSION}, got version {header.version}"
        )
    return view, header


def _kind_of(header: Header) -> Kind:
    known = [member.value for member in Kind]
    if header.kind not in known:
        raise CodecError(f"kind must be one of {known}, got {header.kind}")
    if header.flags & ~FLAG_LZ4:
        raise CodecError(
            f"flags must be 0 or {FLAG_LZ4} (lz4), got {header.flags:#04x}"
        )
    return Kind(header.kind)


def _body_of(kind: Kind, header: Header, payload: memoryview) -> Bytes:
    """Return the body, decompressed if the lz4 flag is set.

    Lengths are checked against N, K and the payload before memory is allocated, so a
    short frame cannot cause a large allocation.
    """
    length = header.body_length
    least, most = _length_range(kind, header.size, header.entries)
    if not least <= length <= most:
        raise CodecError(
            f"body of a {kind.name} frame of {header.entries} entries and "
            f"{header.size} parameters must have {least} .. {most} "
            f"bytes, got {length}"
        )
    if not header.flags & FLAG_LZ4:
        if len(payload) != length:
            raise CodecError(f"payload must have {length} bytes, got {len(payload)}")
        return np.frombuffer(payload, np.uint8)
    most = min(LZ4_RATIO * len(payload), LZ4_MOST)
    if not len(payload) < length <= most:
        raise CodecError(
            f"lz4 must make {len(payload) + 1} .. {most} bytes "
            f"of {len(payload)}, the header says {length}"
        )
    try:
        body = lz4.block.decompress(payload, uncompressed_size=length)
    except lz4.block.LZ4BlockError as error:
        raise CodecError(
            f"lz4 block of {len(payload)} bytes is damaged: {error}"
        ) from error
    if len(body) != length:
        raise CodecError(f"lz4 made {len(body)} bytes, the header says {length}")
    return np.frombuffer(body, np.uint8)


def _length_range(kind: Kind, size: int, count: int) -> tuple[int, int]:
    """Return the least and the greatest length of a body in bytes."""
    signs = (count + 7) // 8
    if kind is Kind.GAPS and count:
        least, most = golomb.length_range(size, count)
        return least + signs, most + signs
    length = {
        Kind.RAW32: 4 * count,
        Kind.GAPS: 0,
        Kind.BITMAP: (size + 7) // 8 + signs if count else 0,
        Kind.DENSE8: dense8.length(size),
        Kind.DENSE32: 4 * size,
    }[kind]
    return length, length


def _signed_entries(kind: Kind, body: Bytes, size: int, count: int) -> Integers:
    """Read positions, followed by one sign bit for each."""
    signs_at = len(body) - (count + 7) // 8
    if kind is Kind.GAPS:
        entries_K = golomb.unpack(body[:signs_at], size, count)
    else:
        # As bool: np.flatnonzero is 7 times as fast on bool arrays.
        present = np.unpackbits(body[:signs_at], bitorder="little").view(bool)
        positions = np.flatnonzero(present)
        if len(positions) and positions[-1] >= size:
            raise CodecError(
                f"padding after {size} bits of the map must be 0, "
                f"got a bit at {positions[-1]}"
            )
        if len(positions) != count:
            raise CodecError(f"the map has {len(positions)} bits for {count} entries")
        entries_K = positions.astype(np.int32)
    negative = np.unpackbits(body[signs_at:], bitorder="little")
    if negative[count:].any():
        raise CodecError(
            f"padding after {count} sign bits must be 0, "
            f"got {negative[count:].tolist()}"
        )
    entries_K += 1
    # A product takes a third of the time of np.negative(where=...).
    entries_K *= 1 - 2 * negative[:count].view(np.int8)
    return entries_K
