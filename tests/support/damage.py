"""Frames changed on purpose, for the tests of the codec."""

import struct
import zlib


def repaired(frame):
    """The frame with the checksum its other bytes ask for."""
    opening = bytes(frame[:60]) + bytes(4)
    total = zlib.crc32(opening + bytes(frame[64:]))
    return bytes(frame[:60]) + struct.pack("<I", total) + bytes(frame[64:])


def patched(frame, offset, layout, *values):
    """The frame with other values at an offset, and a checksum that fits."""
    changed = bytearray(frame)
    struct.pack_into("<" + layout, changed, offset, *values)
    return repaired(changed)


def rebodied(frame, body, compressed=None):
    """The frame with another body, or an lz4 payload said to make its length."""
    header = bytearray(frame[:64])
    header[6] = compressed is not None
    struct.pack_into("<Q", header, 48, len(body))
    return repaired(bytes(header) + (body if compressed is None else compressed))
