"""The 64 bytes before every payload: who sent what, how much, how packed.

No payload is read or written here. The layout is in ``docs/wire-format.md``.

Shape suffixes: N = parameters of the model, K = entries of one update.

Bodies as they travel: lz4 where it is smaller, and lengths that are possible.

What a body means is not looked at here.

An update as one frame and back: choose the smallest kind, check everything.

numpy in, numpy out; no torch, no Dask, no state.

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

from daskdl.codec import dense8, golomb, sparse
from daskdl.codec.dense8 import Quantized, check_counts
from daskdl.codec.sparse import positions_of
from daskdl.errors import CodecError

MAGIC = b"DKDL"
VERSION = 1
# magic, version, kind, flags, reserved | run, sequence, step |
# origin, N, K, threshold | body length | reserved, checksum
LAYOUT = struct.Struct("<4sBBBBQQQIIIfQII")
CHECKSUM_OFFSET = 60
FLAG_LZ4 = 1
MAX_SIZE = 2**31 - 1  # an entry is a signed one-based int32 position


class Kind(enum.IntEnum):
    """How the body of a frame is packed."""

    RAW32 = 1  # an int32 per entry
    GAPS = 2  # Golomb-Rice coded gaps, signs apart
    BITMAP = 3  # a bit per parameter, signs apart
    DENSE8 = 4  # eight bits per parameter, a scale in grid steps per block
    DENSE32 = 5  # an int32 count of grid steps per parameter


DENSE_KINDS = (Kind.DENSE8, Kind.DENSE32)


class Stamp(NamedTuple):
    """Which update a frame carries."""

    run: int  # u64, one per fit
    origin: int  # u32, the replica that made the update
    sequence: int  # u64, counts the origin's updates
    step: int  # u64, the origin's step when it was made


STAMP_BITS = Stamp(run=64, origin=32, sequence=64, step=64)


class Header(NamedTuple):
    """Every field of a header but the constant ones and the checksum."""

    stamp: Stamp
    kind: Kind
    compressed: bool  # the payload is an lz4 block
    size: int  # N
    entries: int  # K; 0 for the dense kinds
    threshold: float  # parameter units; the grid for the dense kinds
    body_length: int  # bytes, before lz4


def pack_frame(header: Header, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Join a header and its payload and seal them with a checksum.

    Args:
        header: What the payload is; :func:`check_fields` has seen it.
        payload: Bytes as they travel, after lz4 where ``compressed``.

    Returns:
        The frame, ``64 + len(payload)`` bytes.
    """
    stamp = header.stamp
    frame = np.empty(LAYOUT.size + len(payload), np.uint8)
    flags = FLAG_LZ4 if header.compressed else 0
    LAYOUT.pack_into(
        frame.data,
        0,
        *(MAGIC, VERSION, header.kind, flags, 0),
        *(stamp.run, stamp.sequence, stamp.step, stamp.origin),
        *(header.size, header.entries, header.threshold, header.body_length),
        *(0, 0),
    )
    frame[LAYOUT.size :] = payload
    struct.pack_into("<I", frame.data, CHECKSUM_OFFSET, checksum(frame.data))
    return frame


def check_fields(header: Header) -> None:
    """Refuse what would not come back from the wire as it was given.

    Raises:
        CodecError: If a number of the stamp does not fit its field, N is
            outside ``1 .. 2**31 - 1``, or the threshold is not a positive,
            finite float32.
    """
    for name, value, bits in zip(Stamp._fields, header.stamp, STAMP_BITS, strict=True):
        if not 0 <= value < 2**bits:
            raise CodecError(f"{name} must be in 0 .. 2**{bits} - 1, got {value}")
    check_numbers(header)
    # A rounded threshold would move the receivers by another quantum than the
    # sender, and what is lost that way no residual remembers.
    with np.errstate(over="ignore"):
        nearest = float(np.float32(header.threshold))
    if nearest != header.threshold:
        raise CodecError(
            f"threshold must be exact in float32, got {header.threshold!r}, "
            f"the nearest is {nearest!r}"
        )


def check_size(size: int) -> None:
    """Refuse numbers of parameters that int32 positions do not reach.

    Raises:
        CodecError: If ``size`` is outside ``1 .. 2**31 - 1``.
    """
    if not 1 <= size <= MAX_SIZE:
        raise CodecError(f"parameters must be in 1 .. 2**31 - 1, got {size}")


def check_numbers(header: Header) -> None:
    """Refuse N, K and thresholds that no update can have.

    Raises:
        CodecError: If one of them is out of range.
    """
    size, count, threshold = header.size, header.entries, header.threshold
    check_size(size)
    most = 0 if header.kind in DENSE_KINDS else size
    if not 0 <= count <= most:
        raise CodecError(
            f"entries of a {header.kind.name} frame of {size} parameters "
            f"must be in 0 .. {most}, got {count}"
        )
    if not (math.isfinite(threshold) and threshold > 0):
        raise CodecError(f"threshold must be finite and > 0, got {threshold}")


def bytes_of(frame: Buffer) -> memoryview:
    """View a buffer as read-only bytes.

    Raises:
        CodecError: If it is not contiguous.
    """
    view = memoryview(frame)
    if not view.c_contiguous:
        raise CodecError(
            f"a frame must be contiguous, got strides {view.strides} of {view.shape}"
        )
    return memoryview(b"") if view.nbytes == 0 else view.cast("B").toreadonly()


def read_stamp(frame: Buffer) -> Stamp:
    """Read which update a frame carries, without looking at the rest.

    For logs and routing: the checksum is not checked, see
    :func:`~daskdl.codec.decode`.

    Args:
        frame: A whole frame or its beginning, 64 bytes or more.

    Raises:
        CodecError: If the frame is too short or its magic or version is wrong.
    """
    view = bytes_of(frame)
    check_opening(view)
    run, sequence, step, origin = LAYOUT.unpack_from(view)[5:9]
    return Stamp(run, origin, sequence, step)


def read_kind(frame: Buffer) -> Kind:
    """Read how a frame is packed, without looking at the rest.

    Args:
        frame: A whole frame or its beginning, 64 bytes or more.

    Raises:
        CodecError: If the frame is too short, its magic or version is wrong, or its
            kind is unknown.
    """
    view = bytes_of(frame)
    check_opening(view)
    kind, flags = LAYOUT.unpack_from(view)[2:4]
    check_constant_fields(kind, flags, reserved=(0, 0))
    return Kind(kind)


def check_opening(frame: memoryview) -> None:
    """Refuse what is not a frame of this version at all.

    Raises:
        CodecError: If the frame is too short or its magic or version is wrong.
    """
    if len(frame) < LAYOUT.size:
        raise CodecError(f"got {len(frame)} bytes, the header alone has {LAYOUT.size}")
    magic, version = bytes(frame[:4]), frame[4]
    if magic != MAGIC:
        raise CodecError(f"magic must be {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise CodecError(f"this is format version {VERSION}, got version {version}")


def checksum(frame: memoryview) -> int:
    """Return the CRC-32 of a frame, its checksum field taken as zero."""
    opening = bytes(frame[:CHECKSUM_OFFSET]) + bytes(4)
    return zlib.crc32(frame[LAYOUT.size :], zlib.crc32(opening))


def unpack_header(frame: memoryview) -> Header:
    """Read and check every field of a header.

    Raises:
        CodecError: If a field or the checksum is wrong.
    """
    check_opening(frame)
    fields = LAYOUT.unpack_from(frame)
    kind, flags, *_ = fields[2:4]
    run, sequence, step, origin = fields[5:9]
    found = checksum(frame)
    if found != fields[14]:
        raise CodecError(
            f"checksum is {found:#010x}, the header says {fields[14]:#010x}"
        )
    check_constant_fields(kind, flags, reserved=(fields[4], fields[13]))
    header = Header(
        Stamp(run, origin, sequence, step),
        Kind(kind),
        bool(flags & FLAG_LZ4),
        *fields[9:13],
    )
    check_numbers(header)
    return header


def check_constant_fields(kind: int, flags: int, reserved: tuple[int, int]) -> None:
    """Refuse kinds, flags and reserved bytes that this version does not know.

    Raises:
        CodecError: If one of them is unknown or not zero.
    """
    known = [member.value for member in Kind]
    if kind not in known:
        raise CodecError(f"kind must be one of {known}, got {kind}")
    if flags & ~FLAG_LZ4:
        raise CodecError(f"flags must be 0 or {FLAG_LZ4} (lz4), got {flags:#04x}")
    if any(reserved):
        raise CodecError(f"reserved bytes must be 0, got {reserved}")


LZ4_MOST = 0x7E000000  # bytes, LZ4_MAX_INPUT_SIZE of the library
LZ4_RATIO = 255  # a byte of an lz4 block stands for at most as many


def seal(header: Header, body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Make the frame, with lz4 where that is smaller.

    RAW32 is not tried: ascending positions hold no four bytes twice in a way
    that pays, not even when built to. On GAPS of independent positions the try
    is in vain but takes a hundredth of the packing; of clustered ones it takes
    another 4 to 60 % off (``benchmarks/wire_size.py``).
    """
    payload, compressed = body, False
    if header.kind is not Kind.RAW32 and 0 < len(body) <= LZ4_MOST:
        packed = lz4.block.compress(body.data, store_size=False)
        if len(packed) < len(body):
            payload, compressed = np.frombuffer(packed, np.uint8), True
    sealed = header._replace(compressed=compressed, body_length=len(body))
    return pack_frame(sealed, payload)


def body_range(header: Header) -> tuple[int, int]:
    """Return the fewest and the most bytes that a body can have."""
    size, count = header.size, header.entries
    if header.kind is Kind.GAPS:
        return golomb.length_range(size, count)
    exact = {
        Kind.RAW32: 4 * count,
        Kind.BITMAP: sparse.bitmap_length(size, count),
        Kind.DENSE8: dense8.length(size),
        Kind.DENSE32: 4 * size,
    }[header.kind]
    return exact, exact


def open_payload(header: Header, payload: memoryview) -> npt.NDArray[np.uint8]:
    """Return the body, decompressed where the header says so.

    Nothing is allocated before the lengths have been compared with what N and
    K allow and with what the payload can hold: a short frame cannot ask for
    much memory.

    Raises:
        CodecError: If a length is impossible or the lz4 block is damaged.
    """
    length, least_most = header.body_length, body_range(header)
    if not least_most[0] <= length <= least_most[1]:
        raise CodecError(
            f"body of a {header.kind.name} frame of {header.entries} entries and "
            f"{header.size} parameters must have {least_most[0]} .. {least_most[1]} "
            f"bytes, got {length}"
        )
    if header.compressed:
        return decompress(payload, length)
    if len(payload) != length:
        raise CodecError(f"payload must have {length} bytes, got {len(payload)}")
    return np.frombuffer(payload, np.uint8)


def decompress(payload: memoryview, length: int) -> npt.NDArray[np.uint8]:
    """Read an lz4 block that must make exactly ``length`` bytes.

    Raises:
        CodecError: If it does not.
    """
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


SPARSE_KINDS = (Kind.RAW32, Kind.GAPS, Kind.BITMAP)


class SparseUpdate(NamedTuple):
    """Quanta at some of the positions."""

    stamp: Stamp
    kind: Kind
    size: int  # N
    threshold: float  # one quantum, parameter units
    entries_K: npt.NDArray[np.int32]  # signed one-based positions, ascending


class DenseUpdate(NamedTuple):
    """A count of grid steps for every parameter."""

    stamp: Stamp
    size: int  # N
    grid: float  # one step, parameter units
    counts_N: npt.NDArray[np.int32]


Update = SparseUpdate | DenseUpdate


def encode(
    stamp: Stamp,
    size: int,
    threshold: float,
    entries_K: npt.NDArray[np.int32],
    kind: Kind | None = None,
) -> npt.NDArray[np.uint8]:
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
    if kind is not None and kind not in SPARSE_KINDS:
        raise CodecError(f"kind must be one of {SPARSE_KINDS}, got {kind!r}")
    header = Header(stamp, Kind.RAW32, False, size, 0, threshold, 0)
    check_fields(header)
    positions_K = positions_of(entries_K, size)
    plan = golomb.plan(size, positions_K)
    if kind is None:
        sizes = sizes_with(plan, size, len(entries_K))
        kind = min(sizes, key=lambda candidate: sizes[candidate])
    if kind is Kind.RAW32:
        body = bytes_of_integers(entries_K)
    elif kind is Kind.GAPS:
        body = golomb.pack(plan, entries_K)
    else:
        body = sparse.pack_bitmap(size, positions_K, entries_K)
    return seal(header._replace(kind=kind, entries=len(entries_K)), body)


def encode_dense(
    stamp: Stamp, grid: float, counts_N: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
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
    check_counts(counts_N)
    header = Header(stamp, Kind.DENSE32, False, len(counts_N), 0, grid, 0)
    check_fields(header)
    return seal(header, bytes_of_integers(counts_N))


def encode_dense8(
    stamp: Stamp, grid: float, quantized: Quantized
) -> npt.NDArray[np.uint8]:
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
    header = Header(stamp, Kind.DENSE8, False, len(quantized.values_N), 0, grid, 0)
    check_fields(header)
    return seal(header, dense8.pack(quantized))


def payload_sizes(size: int, entries_K: npt.NDArray[np.int32]) -> dict[Kind, int]:
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
    check_size(size)
    plan = golomb.plan(size, positions_of(entries_K, size))
    return sizes_with(plan, size, len(entries_K))


def sizes_with(plan: golomb.Plan, size: int, count: int) -> dict[Kind, int]:
    """Return :func:`payload_sizes` where the gaps are planned already."""
    return {
        Kind.RAW32: 4 * count,
        Kind.GAPS: plan.length,
        Kind.BITMAP: sparse.bitmap_length(size, count),
    }


def bytes_of_integers(values: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """View or copy int32 values as little-endian bytes."""
    return np.ascontiguousarray(values, "<i4").view(np.uint8)


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
    view = bytes_of(frame)
    header = unpack_header(view)
    if run is not None and header.stamp.run != run:
        raise CodecError(f"frame of run {header.stamp.run}, this is run {run}")
    if size is not None and header.size != size:
        raise CodecError(f"frame for {header.size} parameters, this model has {size}")
    body = open_payload(header, view[LAYOUT.size :])
    if header.kind in DENSE_KINDS:
        counts_N = unpack_counts(header, body)
        return DenseUpdate(header.stamp, header.size, header.threshold, counts_N)
    entries_K = unpack_entries(header, body)
    return SparseUpdate(
        header.stamp, header.kind, header.size, header.threshold, entries_K
    )


def unpack_entries(
    header: Header, body: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int32]:
    """Read the body of a sparse kind.

    Raises:
        CodecError: If it is not what K entries of N parameters make.
    """
    if header.kind is Kind.GAPS:
        return golomb.unpack(body, header.size, header.entries)
    if header.kind is Kind.BITMAP:
        return sparse.unpack_bitmap(body, header.size, header.entries)
    entries_K = body.view("<i4").astype(np.int32)
    positions_of(entries_K, header.size)
    return entries_K


def unpack_counts(header: Header, body: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Read the body of a dense kind.

    Raises:
        CodecError: If eight bits and scales are not as documented.
    """
    if header.kind is Kind.DENSE8:
        return dense8.unpack(body, header.size)
    return body.view("<i4").astype(np.int32)
