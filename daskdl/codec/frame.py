"""An update as one frame and back: a header of 64 bytes and a body.

The header has the stamp, the sizes and the kind of packing; the body is compressed with
lz4 if that is smaller. Encoding chooses the kind that carries most for its bytes;
decoding checks every byte, and later code does not check again. The layout is in
``docs/wire-format.md``. numpy in, numpy out; no torch, no Dask, no state.

Shape suffixes: N = parameters of the model, K = entries of one update.
"""

import enum
import functools
import math
import struct
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from daskdl.codec import dense8, golomb, levels, reading
from daskdl.codec.dense8 import Quantized
from daskdl.codec.golomb import started
from daskdl.codec.levels import MAX_LEVEL
from daskdl.codec.reading import LEVELS_OFFSET, SparseBody
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
LZ4_MAX_BYTES = 0x7E000000  # bytes, LZ4_MAX_INPUT_SIZE of the library
LZ4_RATIO = 255  # most bytes that a byte of an lz4 block expands to
# From here on, threads save more than their start takes (0.2 ms).
PARALLEL_ENTRIES = 2**20


class Kind(enum.IntEnum):
    """Packing of the body of a frame."""

    RAW32 = 1  # an int32 per entry
    GAPS = 2  # Golomb-Rice coded gaps, then signs
    BITMAP = 3  # a bit per parameter, then signs
    DENSE8 = 4  # eight bits per parameter, a scale in grid steps per block
    DENSE32 = 5  # an int32 count of grid steps per parameter
    LEVELS = 6  # quanta of each entry, then the body of GAPS
    SUM = 7  # several updates, see `daskdl.codec.sums`


SPARSE = (Kind.RAW32, Kind.GAPS, Kind.BITMAP, Kind.LEVELS)
ONE_QUANTUM = SPARSE[:3]  # kinds whose entries move by one quantum each
KINDS = {int(kind): kind for kind in Kind}
NO_ENTRIES = np.empty(0, np.int32)
FORMS = {  # of positions in the body
    Kind.RAW32: reading.NUMBERS,
    Kind.GAPS: reading.CODES,
    Kind.BITMAP: reading.MAP,
    Kind.LEVELS: reading.CODES,
}


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
    levels_K: Bytes | None = None  # quanta of each entry, 1 to 15; None: one each

    @property
    def quanta_K(self) -> Integers:
        """Signed number of quanta of each entry, int32."""
        signs_K: Integers = np.sign(self.entries_K)
        return signs_K if self.levels_K is None else signs_K * self.levels_K


class Body(NamedTuple):
    """Packed entries: a frame without its header."""

    kind: Kind
    size: int  # N
    entries: int  # K
    levels_K: Bytes | None  # that the body holds; None: one quantum each
    length: int  # bytes before lz4
    payload: Bytes
    flags: int


class DenseUpdate(NamedTuple):
    """A count of grid steps for every parameter."""

    stamp: Stamp
    size: int  # N
    grid: float  # one step, parameter units
    counts_N: Integers


Update = SparseUpdate | DenseUpdate


def pack(
    size: int,
    entries_K: Integers,
    levels_K: Bytes | None = None,
    kind: Kind | None = None,
    threads: int = 1,
) -> Body:
    """Pack entries, by default in the kind that carries most for its bytes.

    LEVELS is chosen if its frame, with lz4 and header, carries more quanta per byte
    than one with one quantum per entry; otherwise the other quanta stay in the
    residual. Where the entropy of the levels already forbids it, LEVELS is not tried.

    Args:
        size: N, at most 2**31 - 1.
        entries_K: ``+(i + 1)`` for a positive entry at position ``i``, ``-(i + 1)`` for
            a negative one; int32, strictly ascending in position. Without entries the
            body is empty.
        levels_K: Quanta of each entry, 1 to 15, uint8; None: one each.
        kind: RAW32, GAPS, BITMAP, or LEVELS; None: the best, or the first of equals in
            this order.
        threads: Most threads that may work at the same time, 1 or more. With fewer than
            2**20 entries, one thread does it all. The bytes are the same.

    Returns:
        The body; its ``levels_K`` are None if it holds one quantum per entry.

    Example:
        >>> import numpy as np
        >>> entries = np.arange(1, 2001, 10, dtype=np.int32)
        >>> pack(2000, entries, np.full(200, 3, np.uint8)).kind.name
        'LEVELS'
        >>> pack(2000, entries, np.full(200, 1, np.uint8)).kind.name
        'GAPS'
    """
    if kind is not None and kind not in SPARSE:
        raise CodecError(f"kind must be one of {SPARSE}, got {kind!r}")
    _check_numbers(size, threshold=1.0)
    _check_entries(entries_K, size)
    if kind is Kind.LEVELS and levels_K is None:
        raise CodecError("a LEVELS frame needs the levels of its entries")
    if levels_K is not None:
        _check_levels(levels_K, len(entries_K))
    if threads < 2 or len(entries_K) < PARALLEL_ENTRIES:
        return _pack(size, entries_K, levels_K, kind)
    with ThreadPoolExecutor(threads - 1, "daskdl-pack") as pool:
        return _pack(size, entries_K, levels_K, kind, pool, threads)


def _pack(
    size: int,
    entries_K: Integers,
    levels_K: Bytes | None,
    kind: Kind | None,
    pool: ThreadPoolExecutor | None = None,
    threads: int = 1,
) -> Body:
    """Pack sound entries; ``pool`` are the threads beside this one."""
    count = len(entries_K)
    levels_K = np.empty(0, np.uint8) if levels_K is None else levels_K
    counting = started(pool, levels.counted, levels_K)
    reading_signs = started(pool, _signs, entries_K)
    gaps = golomb.plan(size, entries_K, pool)
    sizes = _sizes(size, gaps)
    smallest = min(sizes, key=sizes.__getitem__)  # the first of equals
    counts_L, signs = counting(), reading_signs()
    # Without lz4; with it, levels may pay although they do not seem to.
    promising = kind is Kind.LEVELS or (
        kind is None
        and smallest is Kind.GAPS
        and _levels_pay(counts_L, sizes[smallest], _least_leveled(sizes, counts_L))
    )
    busy = promising and pool is not None
    packing_levels = started(pool if busy else None, levels.pack, levels_K, counts_L)

    @functools.cache
    def gaps_and_signs() -> Bytes:
        return golomb.pack(gaps, signs, pool, max(threads - busy, 1))

    def packed(kind: Kind) -> Body:
        if not count:
            body = np.empty(0, np.uint8)
        elif kind is Kind.RAW32:
            body = _bytes(entries_K)
        elif kind is Kind.BITMAP:
            present_N = np.zeros(size, bool)
            present_N[np.abs(entries_K) - 1] = True
            body = np.concatenate([np.packbits(present_N, bitorder="little"), signs])
        else:
            body = gaps_and_signs()
        if kind is Kind.LEVELS and count:
            leveled = packing_levels()
            length = np.array([len(leveled)], "<u4").view(np.uint8)
            body = np.concatenate([length, leveled, body])
        payload, flags = _compressed(kind, body)
        leveled_K = levels_K if kind is Kind.LEVELS else None
        return Body(kind, size, count, leveled_K, len(body), payload, flags)

    if kind is not None:
        return packed(kind)
    alone = packed(smallest)
    if alone.kind is Kind.GAPS and not alone.flags and not promising:
        return alone  # lz4 makes no fewer bytes of these gaps, nor of them with levels
    if int(counts_L.sum()) == int(counts_L[0]):
        return alone  # no levels, or one quantum each
    leveled = packed(Kind.LEVELS)
    pay = _levels_pay(counts_L, len(alone.payload), len(leveled.payload))
    return leveled if pay else alone


def _signs(entries_K: Integers) -> Bytes:
    return np.packbits(entries_K < 0, bitorder="little")


def _levels_pay(
    counts_L: npt.NDArray[np.int64], alone: float, with_levels: float
) -> bool:
    """Say whether a frame with levels has more quanta per byte than one without.

    Args:
        counts_L: Entries of each level.
        alone: Bytes of the payload without levels.
        with_levels: Bytes of the payload with levels.
    """
    quanta = int(counts_L @ np.arange(1, MAX_LEVEL + 1))
    count = int(counts_L.sum())
    return quanta * (LAYOUT.size + alone) > count * (LAYOUT.size + with_levels)


def _least_leveled(sizes: dict[Kind, int], counts_L: npt.NDArray[np.int64]) -> float:
    """Return the fewest bytes that a body with levels may have before lz4."""
    return sizes[Kind.GAPS] + LEVELS_OFFSET + levels.entropy_bytes(counts_L)


def encode(
    stamp: Stamp,
    size: int,
    threshold: float,
    entries_K: Integers,
    kind: Kind | None = None,
    levels_K: Bytes | None = None,
) -> Bytes:
    """Write entries as a frame in one call; the counterpart of :func:`decode`.

    The arguments are those of :func:`pack` and :func:`framed`. A replica calls these
    two, since it packs a pending update once, and stamps it when the channel takes it.
    This function is for tests, golden files and other programs that write frames.

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
    return framed(stamp, threshold, pack(size, entries_K, levels_K, kind))


def framed(stamp: Stamp, threshold: float, body: Body) -> Bytes:
    """Put the header of a frame before packed entries.

    Args:
        stamp: Which update this is.
        threshold: One quantum, parameter units, > 0 and exact in float32.
        body: Result of :func:`pack`.

    Returns:
        The frame, uint8, one-dimensional, a new array.
    """
    _check_given(stamp, body.size, threshold)
    return _framed(stamp, threshold, body)


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
        kind, size, values = Kind.DENSE8, len(counts_N.values_N), dense8.pack(counts_N)
    else:
        dense8.check_counts(counts_N)
        kind, size, values = Kind.DENSE32, len(counts_N), _bytes(counts_N)
    _check_given(stamp, size, grid)
    payload, flags = _compressed(kind, values)
    body = Body(kind, size, 0, None, len(values), payload, flags)
    return _framed(stamp, grid, body)


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


def _check_levels(levels_K: Bytes, count: int) -> None:
    """Refuse levels that are not one for each entry, 1 to 15."""
    if levels_K.dtype != np.uint8 or levels_K.shape != (count,):
        raise CodecError(
            f"levels must be uint8, one for each of {count} entries, got "
            f"{levels_K.dtype} of shape {levels_K.shape}"
        )
    if count and not 1 <= levels_K.min() <= levels_K.max() <= MAX_LEVEL:
        raise CodecError(
            f"levels must be in 1 .. {MAX_LEVEL}, got {levels_K.min()} .. "
            f"{levels_K.max()}"
        )


def _check_entries(entries_K: Integers, size: int) -> None:
    """Refuse entries that are not strictly ascending positions of N parameters."""
    if entries_K.ndim != 1 or entries_K.dtype != np.int32:
        raise CodecError(
            "entries must be one-dimensional int32, "
            f"got {entries_K.dtype} of shape {entries_K.shape}"
        )
    if not golomb.ascending(entries_K, size):
        raise golomb.entries_refusal(entries_K, size)


def _sizes(size: int, plan: golomb.Packing) -> dict[Kind, int]:
    count = len(plan.entries_K)
    if not count:
        return dict.fromkeys(ONE_QUANTUM, 0)
    signs = (count + 7) // 8
    bitmap = (size + 7) // 8
    return {
        Kind.RAW32: 4 * count,
        Kind.GAPS: plan.length + signs,
        Kind.BITMAP: bitmap + signs,
    }


def _bytes(values: Integers) -> Bytes:
    return np.ascontiguousarray(values, "<i4").view(np.uint8)


def _compressed(kind: Kind, body: Bytes) -> tuple[Bytes, int]:
    """Compress a body with lz4 if that is smaller; return the payload and the flags.

    lz4 is not tried on RAW32: repetitions in ascending positions never pay. On GAPS of
    independent positions it saves nothing, but costs only 1 % of the packing time; on
    clustered positions it saves another 4 to 60 % (``benchmarks/wire_size.py``).
    """
    if kind is not Kind.RAW32 and 0 < len(body) <= LZ4_MAX_BYTES:
        packed = lz4.block.compress(body.data, store_size=False)
        if len(packed) < len(body):
            return np.frombuffer(packed, np.uint8), FLAG_LZ4
    return body, 0


def _framed(stamp: Stamp, threshold: float, body: Body) -> Bytes:
    frame = np.empty(LAYOUT.size + len(body.payload), np.uint8)
    LAYOUT.pack_into(
        frame.data,
        0,
        *(MAGIC, VERSION, body.kind, body.flags, 0),
        *(stamp.run, stamp.sequence, stamp.step, stamp.origin),
        *(body.size, body.entries, threshold, body.length),
        *(0, 0),
    )
    frame[LAYOUT.size :] = body.payload
    struct.pack_into("<I", frame.data, CHECKSUM_OFFSET, _checksum(frame.data))
    return frame


def _checksum(frame: memoryview) -> int:
    """Return the CRC-32 of a frame, with zeros in its checksum field."""
    opening = bytes(frame[:CHECKSUM_OFFSET]) + bytes(4)
    return zlib.crc32(frame[LAYOUT.size :], zlib.crc32(opening))


def payload_sizes(size: int, entries_K: Integers) -> dict[Kind, int]:
    """Return the length of the body for each kind of one quantum per entry.

    Example:
        >>> import numpy as np
        >>> payload_sizes(1000, np.arange(1, 1001, 10, dtype=np.int32))
        {<Kind.RAW32: 1>: 400, <Kind.GAPS: 2>: 77, <Kind.BITMAP: 3>: 138}
    """
    _check_numbers(size, threshold=1.0)
    _check_entries(entries_K, size)
    return _sizes(size, golomb.plan(size, entries_K))


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
        daskdl.errors.CodecError: frame of run 00000007, this is run 00000008
    """
    [update] = decode_all([frame], run=run, size=size)
    if isinstance(update, CodecError):
        raise update
    return update


def decode_all(
    frames: Iterable[Buffer], *, run: int | None = None, size: int | None = None
) -> list[Update | CodecError]:
    """Read several frames as :func:`decode` does, the sparse ones in one compiled call.

    Returns:
        For each frame its update, or the error that :func:`decode` would raise. Arrays
        of sparse updates may be parts of common ones.

    Example:
        >>> import numpy as np
        >>> stamp, entries = Stamp(7, 1, 12, 40), np.array([3], np.int32)
        >>> frames = [encode(stamp, size, 0.5, entries) for size in (10, 11)]
        >>> update, error = decode_all(frames, size=10)
        >>> update.entries_K, str(error)
        (array([3], dtype=int32), 'frame for 11 parameters, this model has 10')
    """
    updates: list[Update | CodecError] = []
    places, bodies = list[int](), list[SparseBody]()
    for frame in frames:
        try:
            opened_update, body = _without_entries(frame, run, size)
        except CodecError as error:
            updates.append(error)
            continue
        if body is not None:
            places.append(len(updates))
            bodies.append(body)
        updates.append(opened_update)
    if bodies:
        for place, result in zip(places, reading.read(bodies), strict=True):
            update = updates[place]
            if isinstance(result, CodecError):
                updates[place] = result
            elif isinstance(update, SparseUpdate):
                updates[place] = SparseUpdate(*update[:4], *result)
    return updates


def _without_entries(
    frame: Buffer, run: int | None, size: int | None
) -> tuple[Update, SparseBody | None]:
    """Read a frame up to its entries; return the body that has them, if there are any.

    Dense updates are complete.
    """
    kind, header, payload = opened(frame, run, size)
    if kind is Kind.SUM:
        raise CodecError("a SUM frame has several updates; decode_sum reads it")
    body = _body_of(kind, header, payload)
    stamp = Stamp(header.run, header.origin, header.sequence, header.step)
    if kind is Kind.DENSE8:
        counts_N = dense8.unpack(body, header.size)
        return DenseUpdate(stamp, header.size, header.threshold, counts_N), None
    if kind is Kind.DENSE32:
        counts_N = body.view("<i4").astype(np.int32)
        return DenseUpdate(stamp, header.size, header.threshold, counts_N), None
    update = SparseUpdate(stamp, kind, header.size, header.threshold, NO_ENTRIES)
    return update, _sparse_body(kind, header, body) if header.entries else None


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
    kind = KINDS.get(header.kind)
    if kind is None:
        raise CodecError(f"kind must be one of {[*KINDS]}, got {header.kind}")
    if header.flags & ~FLAG_LZ4:
        raise CodecError(
            f"flags must be 0 or {FLAG_LZ4} (lz4), got {header.flags:#04x}"
        )
    return kind


def opened(
    frame: Buffer, run: int | None, size: int | None
) -> tuple[Kind, Header, memoryview]:
    """Check the checksum and the header of a frame.

    Returns:
        The kind, the header, of which K and the body's length are not checked, and the
        payload.
    """
    view, header = _open(frame)
    checksum = _checksum(view)
    if checksum != header.checksum:
        raise CodecError(
            f"checksum is {checksum:#010x}, the header says {header.checksum:#010x}"
        )
    kind = _kind_of(header)
    if header.reserved_byte or header.reserved_word:
        reserved = header.reserved_byte, header.reserved_word
        raise CodecError(f"reserved bytes must be 0, got {reserved}")
    _check_numbers(header.size, header.threshold)
    if run is not None and header.run != run:
        raise CodecError(f"frame of run {header.run:08x}, this is run {run:08x}")
    if size is not None and header.size != size:
        raise CodecError(f"frame for {header.size} parameters, this model has {size}")
    return kind, header, view[LAYOUT.size :]


def _body_of(kind: Kind, header: Header, payload: memoryview) -> Bytes:
    """Return the body, decompressed if the lz4 flag is set.

    Lengths are checked against N, K and the payload before memory is allocated, so a
    short frame cannot cause a large allocation.
    """
    length, most = header.body_length, header.size if kind in SPARSE else 0
    if header.entries > most:
        raise CodecError(
            f"entries of a {kind.name} frame of {header.size} parameters "
            f"must be in 0 .. {most}, got {header.entries}"
        )
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
    most = min(LZ4_RATIO * len(payload), LZ4_MAX_BYTES)
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
    if not count and kind in SPARSE:
        return 0, 0
    signs = (count + 7) // 8
    if kind is Kind.GAPS or kind is Kind.LEVELS:
        least, most = golomb.length_range(size, count)
        if kind is Kind.LEVELS:
            fewest, highest = levels.length_range(count)
            least, most = least + fewest, most + highest
            signs += LEVELS_OFFSET
        return least + signs, most + signs
    if kind is Kind.BITMAP:
        length = (size + 7) // 8 + signs
    elif kind is Kind.DENSE8:
        length = dense8.length(size)
    else:
        length = 4 * (count if kind is Kind.RAW32 else size)
    return length, length


def _sparse_body(kind: Kind, header: Header, body: Bytes) -> SparseBody:
    """Return a body to read; check the length of its levels."""
    size, count, levels_bytes = header.size, header.entries, 0
    if kind is Kind.LEVELS:
        levels_bytes = int.from_bytes(body[:LEVELS_OFFSET].tobytes(), "little")
        gaps_bytes = len(body) - LEVELS_OFFSET - levels_bytes
        signs = (count + 7) // 8
        least, most = (bytes_ + signs for bytes_ in golomb.length_range(size, count))
        fewest, highest = levels.length_range(count)
        if not (fewest <= levels_bytes <= highest and least <= gaps_bytes <= most):
            raise CodecError(
                f"levels of {count} entries must have {fewest} .. {highest} bytes, and "
                f"positions and signs {least} .. {most}, got {levels_bytes} and "
                f"{gaps_bytes}"
            )
    return SparseBody(FORMS[kind], size, count, levels_bytes, body)
