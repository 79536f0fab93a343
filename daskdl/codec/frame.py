"""An update as one frame and back: 64 bytes of header and a body.

The header says who sent what, how much and how it is packed; the body is packed in the
way of one `Kind`, and compressed by lz4 where that is smaller. Encoding chooses the
smallest kind; decoding checks every byte, and nothing after it checks again. The layout
is in ``docs/wire-format.md``. numpy in, numpy out; no torch, no Dask, no state.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

import enum
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from daskdl.codec import dense8, golomb, sparse
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
LZ4_RATIO = 255  # a byte of an lz4 block stands for at most as many


class Kind(enum.IntEnum):
    """How the body of a frame is packed."""

    RAW32 = 1  # an int32 per entry
    GAPS = 2  # Golomb-Rice coded gaps, signs apart
    BITMAP = 3  # a bit per parameter, signs apart
    DENSE8 = 4  # eight bits per parameter, a scale in grid steps per block
    DENSE32 = 5  # an int32 count of grid steps per parameter


class Packing(NamedTuple):
    """How the body of one kind is written and read."""

    pack: Callable[[Any], Bytes]  # of `Entries`, or what a dense kind is made of
    unpack: Callable[[Bytes, int, int], Integers]  # of N and K
    lengths: Callable[[int, int], tuple[int, int]]  # of N and K: fewest and most bytes


class Entries(NamedTuple):
    """What sparse kinds pack."""

    size: int  # N
    positions_K: Integers  # zero-based
    entries_K: Integers  # signed, one-based
    plan: golomb.Plan

    @classmethod
    def of(cls, size: int, entries_K: Integers) -> "Entries":
        """Check entries and count the bits of their gaps.

        Raises:
            CodecError: If an entry is impossible.
        """
        positions_K = sparse.positions_of(entries_K, size)
        return cls(size, positions_K, entries_K, golomb.plan(size, positions_K))

    def sizes(self) -> dict[Kind, int]:
        """Count the bytes each sparse kind would take."""
        count = len(self.entries_K)
        return {
            Kind.RAW32: 4 * count,
            Kind.GAPS: self.plan.length,
            Kind.BITMAP: sparse.bitmap_length(self.size, count),
        }


def _integers_packed(values: Integers) -> Bytes:
    return np.ascontiguousarray(values, "<i4").view(np.uint8)


def _integers_unpacked(body: Bytes) -> Integers:
    return body.view("<i4").astype(np.int32)


def _entries_unpacked(body: Bytes, size: int, _: int) -> Integers:
    entries_K = _integers_unpacked(body)
    sparse.positions_of(entries_K, size)
    return entries_K


SPARSE = {
    Kind.RAW32: Packing(
        lambda entries: _integers_packed(entries.entries_K),
        _entries_unpacked,
        lambda _, count: (4 * count, 4 * count),
    ),
    Kind.GAPS: Packing(
        lambda entries: golomb.pack(entries.plan, entries.entries_K),
        golomb.unpack,
        golomb.length_range,
    ),
    Kind.BITMAP: Packing(
        lambda entries: sparse.pack_bitmap(*entries[:3]),
        sparse.unpack_bitmap,
        lambda size, count: (sparse.bitmap_length(size, count),) * 2,
    ),
}
DENSE = {
    Kind.DENSE8: Packing(
        dense8.pack,
        lambda body, size, _: dense8.unpack(body, size),
        lambda size, _: (dense8.length(size),) * 2,
    ),
    Kind.DENSE32: Packing(
        _integers_packed,
        lambda body, _size, _count: _integers_unpacked(body),
        lambda size, _: (4 * size, 4 * size),
    ),
}
PACKINGS = {**SPARSE, **DENSE}


class Stamp(NamedTuple):
    """Which update a frame carries."""

    run: int  # u64, one per fit
    origin: int  # u32, the replica that made the update
    sequence: int  # u64, counts the origin's updates
    step: int  # u64, the origin's step when it was made


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
            position. None at all make a frame of a header only.
        kind: RAW32, GAPS or BITMAP; None takes the one with the fewest bytes
            by :func:`payload_sizes`, of equals the first in this order.

    Returns:
        The frame, uint8, one-dimensional, an array of its own.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> stamp = Stamp(run=7, origin=1, sequence=12, step=40)
        >>> frame = encode(stamp, 10, 0.5, np.array([1, -4], np.int32))
        >>> decode(frame).entries_K
        array([ 1, -4], dtype=int32)

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015, for the entries. His 31-bit position and
        sign bit are our signed int32.
    """
    if kind is not None and kind not in SPARSE:
        raise CodecError(f"kind must be one of {tuple(SPARSE)}, got {kind!r}")
    _check_given(stamp, Kind.RAW32, size, threshold)
    entries = Entries.of(size, entries_K)
    if kind is None:
        sizes = entries.sizes()
        kind = min(sizes, key=sizes.__getitem__)  # of equals the first
    return _seal(stamp, kind, size, len(entries_K), threshold, entries)


def encode_dense(stamp: Stamp, grid: float, counts_N: Integers) -> Bytes:
    """Write a count of grid steps for every parameter as a DENSE32 frame.

    Args:
        stamp: Which update this is.
        grid: One step, parameter units, > 0 and exact in float32.
        counts_N: Steps, int32, any value; one-dimensional and not empty.

    Returns:
        The frame, uint8, one-dimensional, an array of its own.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> frame = encode_dense(Stamp(7, 1, 12, 40), 0.25, np.array([3, -1], np.int32))
        >>> decode(frame).counts_N
        array([ 3, -1], dtype=int32)
    """
    dense8.check_counts(counts_N)
    _check_given(stamp, Kind.DENSE32, len(counts_N), grid)
    return _seal(stamp, Kind.DENSE32, len(counts_N), 0, grid, counts_N)


def encode_dense8(stamp: Stamp, grid: float, quantized: Quantized) -> Bytes:
    """Write counts rounded to eight bits as a DENSE8 frame.

    Args:
        stamp: Which update this is.
        grid: One step, parameter units, > 0 and exact in float32.
        quantized: What :func:`quantize` returned; not empty.

    Returns:
        The frame, uint8, one-dimensional, an array of its own. It is read as
        :func:`counts_of` the same.

    Raises:
        CodecError: If an argument is not as above.

    Example:
        >>> import numpy as np
        >>> quantized = dense8.quantize(np.array([300, -1], np.int32))
        >>> decode(encode_dense8(Stamp(7, 1, 12, 40), 0.25, quantized)).counts_N
        array([300,   0], dtype=int32)
    """
    size = len(quantized.values_N)
    _check_given(stamp, Kind.DENSE8, size, grid)
    return _seal(stamp, Kind.DENSE8, size, 0, grid, quantized)


def _check_given(stamp: Stamp, kind: Kind, size: int, threshold: float) -> None:
    """Refuse what would not come back from the wire as it was given.

    Raises:
        CodecError: If a number of the stamp does not fit its field, N is outside
            ``1 .. 2**31 - 1``, or the threshold is not a positive, finite float32.
    """
    for name, value, bits in zip(Stamp._fields, stamp, STAMP_BITS, strict=True):
        if not 0 <= value < 2**bits:
            raise CodecError(f"{name} must be in 0 .. 2**{bits} - 1, got {value}")
    _check_numbers(kind, size, 0, threshold)
    # A rounded threshold would move the receivers by another quantum than the
    # sender, and what is lost that way no residual remembers.
    with np.errstate(over="ignore"):
        nearest = float(np.float32(threshold))
    if nearest != threshold:
        raise CodecError(
            f"threshold must be exact in float32, got {threshold!r}, "
            f"the nearest is {nearest!r}"
        )


def _check_numbers(kind: Kind, size: int, count: int, threshold: float) -> None:
    """Refuse N, K and thresholds that no update can have.

    Raises:
        CodecError: If one of them is out of range.
    """
    if not 1 <= size <= MAX_SIZE:
        raise CodecError(f"parameters must be in 1 .. 2**31 - 1, got {size}")
    most = size if kind in SPARSE else 0
    if not 0 <= count <= most:
        raise CodecError(
            f"entries of a {kind.name} frame of {size} parameters "
            f"must be in 0 .. {most}, got {count}"
        )
    if not (math.isfinite(threshold) and threshold > 0):
        raise CodecError(f"threshold must be finite and > 0, got {threshold}")


def _seal(
    stamp: Stamp, kind: Kind, size: int, count: int, threshold: float, content: Any
) -> Bytes:
    """Pack a body, with lz4 where that is smaller, and put the header before it.

    lz4 is not tried on RAW32: ascending positions hold no four bytes twice in a way
    that pays, not even when built to. On GAPS of independent positions it saves nothing
    but takes a hundredth of the packing; of clustered ones it takes another 4 to 60 %
    off (``benchmarks/wire_size.py``).
    """
    body = PACKINGS[kind].pack(content)
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
    """Return the CRC-32 of a frame, its checksum field taken as zero."""
    opening = bytes(frame[:CHECKSUM_OFFSET]) + bytes(4)
    return zlib.crc32(frame[LAYOUT.size :], zlib.crc32(opening))


def payload_sizes(size: int, entries_K: Integers) -> dict[Kind, int]:
    """Count the bytes each sparse kind would take; nothing is packed.

    Args:
        size: N.
        entries_K: As for :func:`encode`.

    Returns:
        Exact bytes of the body, before lz4 and without the 64 of the header.

    Raises:
        CodecError: If N or an entry is impossible.

    Example:
        >>> import numpy as np
        >>> payload_sizes(1000, np.arange(1, 1001, 10, dtype=np.int32))
        {<Kind.RAW32: 1>: 400, <Kind.GAPS: 2>: 77, <Kind.BITMAP: 3>: 138}
    """
    _check_numbers(Kind.RAW32, size, 0, threshold=1.0)
    return Entries.of(size, entries_K).sizes()


def decode(frame: Buffer, *, run: int | None = None, size: int | None = None) -> Update:
    """Read a frame, checking every byte of it.

    What comes back can be applied without a further look: positions are in
    range and strictly ascending.

    Args:
        frame: What one of the functions above wrote, in any contiguous buffer.
            Never changed.
        run: Refuse updates of any other run.
        size: Refuse updates for any other number of parameters.

    Returns:
        The update. Its array has memory of its own, so that the frame may be
        freed and compiled consumers see one kind of array only.

    Raises:
        CodecError: If anything about the frame is not as documented in
            ``docs/wire-format.md``, or it is for another run or model.

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
    kind = _kind_of(header, reserved=(header.reserved_byte, header.reserved_word))
    _check_numbers(kind, header.size, header.entries, header.threshold)
    if run is not None and header.run != run:
        raise CodecError(f"frame of run {header.run}, this is run {run}")
    if size is not None and header.size != size:
        raise CodecError(f"frame for {header.size} parameters, this model has {size}")
    body = _body_of(kind, header, view[LAYOUT.size :])
    values = PACKINGS[kind].unpack(body, header.size, header.entries)
    stamp = Stamp(header.run, header.origin, header.sequence, header.step)
    if kind in DENSE:
        return DenseUpdate(stamp, header.size, header.threshold, values)
    return SparseUpdate(stamp, kind, header.size, header.threshold, values)


def read_kind(frame: Buffer) -> Kind:
    """Read how a frame is packed, without looking at the rest, for statistics.

    Args:
        frame: A whole frame or its beginning, 64 bytes or more.

    Raises:
        CodecError: If the frame is too short, its magic or version is wrong, or its
            kind is unknown.
    """
    _, header = _open(frame)
    return _kind_of(header, reserved=(0, 0))


class Header(NamedTuple):
    """The fields of a header, in the order of their bytes."""

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
    """View a frame as read-only bytes, and read its header.

    Raises:
        CodecError: If it is not contiguous or too short, or its magic or version is
            wrong.
    """
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


def _kind_of(header: Header, reserved: tuple[int, int]) -> Kind:
    """Refuse kinds, flags and reserved bytes that this version does not know.

    Raises:
        CodecError: If one of them is unknown or not zero.
    """
    known = [member.value for member in Kind]
    if header.kind not in known:
        raise CodecError(f"kind must be one of {known}, got {header.kind}")
    if header.flags & ~FLAG_LZ4:
        raise CodecError(
            f"flags must be 0 or {FLAG_LZ4} (lz4), got {header.flags:#04x}"
        )
    if any(reserved):
        raise CodecError(f"reserved bytes must be 0, got {reserved}")
    return Kind(header.kind)


def _body_of(kind: Kind, header: Header, payload: memoryview) -> Bytes:
    """Return the body, decompressed where the header says so.

    Nothing is allocated before the lengths have been compared with what N and K allow
    and with what the payload can hold: a short frame cannot ask for much memory.

    Raises:
        CodecError: If a length is impossible or the lz4 block is damaged.
    """
    length = header.body_length
    least, most = PACKINGS[kind].lengths(header.size, header.entries)
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
