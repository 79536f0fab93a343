"""The 64 bytes before every payload: who sent what, how much, how packed.

No payload is read or written here. The layout is in ``docs/wire-format.md``.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

import enum
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

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
