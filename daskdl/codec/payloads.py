"""Bodies as they travel: lz4 where it is smaller, and lengths that are possible.

What a body means is not looked at here.
"""

import lz4.block
import numpy as np
import numpy.typing as npt

from daskdl.codec import bitmap, dense8, gaps_reading
from daskdl.codec.header import Header, Kind, pack_frame
from daskdl.errors import CodecError

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
        return gaps_reading.length_range(size, count)
    exact = {
        Kind.RAW32: 4 * count,
        Kind.BITMAP: bitmap.length(size, count),
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
