"""One refused frame per check of ``decode``; all but two have a valid checksum."""

import itertools
import re
import tracemalloc

import lz4.block
import numpy as np
import pytest

from daskdl.codec import (
    Kind,
    Quantized,
    Stamp,
    decode,
    decode_all,
    encode,
    encode_dense,
    quantize,
    read_kind,
    reading,
)
from daskdl.errors import CodecError
from tests.support.updates import patched, rebodied, repaired


def integers(*values):
    return np.array(values, "<i4").tobytes()


STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
ENTRIES = np.array([1, -4, 10], np.int32)
RAW32, GAPS, BITMAP = (
    encode(STAMP, 10, 0.5, ENTRIES, kind).tobytes()
    for kind in (Kind.RAW32, Kind.GAPS, Kind.BITMAP)
)
DENSE32 = encode_dense(STAMP, 0.5, np.array([1, 2], np.int32)).tobytes()
EMPTY = encode(STAMP, 10, 0.5, ENTRIES[:0]).tobytes()
ROW = encode(STAMP, 8_000, 0.5, np.arange(1, 4_001, dtype=np.int32), Kind.BITMAP)
ROW = ROW.tobytes()  # 1,500 bytes of body, lz4


def bits(text):
    """Bytes of a stream of bits, written in the order they are read."""
    text = text.replace(" ", "").replace("|", "")
    values = np.array([int(bit) for bit in text], np.uint8)
    return np.packbits(values, bitorder="little").tobytes()


def number(value, width):
    return "".join(str(value >> i & 1) for i in range(width))


def header(count, rice):
    """A block's header as bits."""
    return "1" + number(count - 1, 12) + number(rice, 4)


def frame_of_blocks(size, count, text, signs=None):
    """A GAPS frame with these bits as its codes, one Rice parameter per block."""
    frame = patched(GAPS, 36, "II", size, count)
    signs = signs or bytes((count + 7) // 8)
    return rebodied(frame, b"\xff" + bits(text) + signs)


HEADERS = {
    "nothing": (b"", "got 0 bytes, the header alone has 64"),
    "short": (RAW32[:63], "got 63 bytes, the header alone has 64"),
    "magic": (b"XKDL" + RAW32[4:], "magic must be b'DKDL', got b'XKDL'"),
    "version": (patched(RAW32, 4, "B", 2), "format version 1, got version 2"),
    "checksum": (RAW32[:60] + bytes(4) + RAW32[64:], "the header says 0x00000000"),
    "payload checksum": (RAW32[:-1] + b"\xfe", "checksum is 0x"),
    "kind": (patched(RAW32, 5, "B", 8), "one of [1, 2, 3, 4, 5, 6, 7], got 8"),
    "no kind": (patched(RAW32, 5, "B", 0), "one of [1, 2, 3, 4, 5, 6, 7], got 0"),
    "flags": (patched(RAW32, 6, "B", 2), "flags must be 0 or 1 (lz4), got 0x02"),
    "reserved byte": (patched(RAW32, 7, "B", 1), "bytes must be 0, got (1, 0)"),
    "reserved word": (patched(RAW32, 56, "I", 1), "bytes must be 0, got (0, 1)"),
    "no parameters": (patched(EMPTY, 36, "I", 0), "in 1 .. 2**31 - 1, got 0"),
    "too many parameters": (patched(EMPTY, 36, "I", 2**31), "got 2147483648"),
    "too many entries": (patched(RAW32, 40, "I", 11), "must be in 0 .. 10, got 11"),
    "dense entries": (patched(DENSE32, 40, "I", 1), "must be in 0 .. 0, got 1"),
    "threshold zero": (patched(RAW32, 44, "f", 0), "finite and > 0, got 0.0"),
    "threshold negative": (patched(RAW32, 44, "f", -1), "finite and > 0, got -1.0"),
    "threshold nan": (patched(RAW32, 44, "f", np.nan), "finite and > 0, got nan"),
    "threshold inf": (patched(RAW32, 44, "f", np.inf), "finite and > 0, got inf"),
}
LENGTHS = {
    "raw32 body": (patched(RAW32, 48, "Q", 16), "must have 12 .. 12 bytes, got 16"),
    "bitmap body": (patched(BITMAP, 48, "Q", 4), "must have 3 .. 3 bytes, got 4"),
    "dense32 body": (patched(DENSE32, 48, "Q", 4), "must have 8 .. 8 bytes, got 4"),
    "gaps body short": (patched(GAPS, 48, "Q", 2), "must have 3 .. 4 bytes, got 2"),
    "gaps body long": (patched(GAPS, 48, "Q", 5), "must have 3 .. 4 bytes, got 5"),
    "body without entries": (patched(EMPTY, 48, "Q", 1), "must have 0 .. 0 bytes"),
    "truncated": (repaired(RAW32[:-1]), "payload must have 12 bytes, got 11"),
    "trailing": (repaired(RAW32 + b"\0"), "payload must have 12 bytes, got 13"),
    "trailing nothing": (repaired(EMPTY + b"\0"), "payload must have 0 bytes, got 1"),
}
LZ4_BODY = lz4.block.decompress(ROW[64:], uncompressed_size=1_500)
BODIES = {
    "lz4 garbage": (rebodied(ROW, LZ4_BODY, b"\xff" * 20), "of 20 bytes is damaged"),
    "lz4 trailing": (repaired(ROW + b"\0"), "is damaged"),
    "lz4 makes less": (
        rebodied(ROW, LZ4_BODY, lz4.block.compress(LZ4_BODY[:-1], store_size=False)),
        "lz4 made 1499 bytes, the header says 1500",
    ),
    "lz4 makes more": (
        rebodied(ROW, LZ4_BODY, lz4.block.compress(LZ4_BODY + b"0", store_size=False)),
        "is damaged",
    ),
    "lz4 not smaller": (patched(RAW32, 6, "B", 1), "make 13 .. 3060 bytes of 12"),
    "lz4 bomb": (
        rebodied(ROW, LZ4_BODY, b"\x1f\x00\x01\x00\xff"),
        "lz4 must make 6 .. 1275 bytes of 5, the header says 1500",
    ),
    "zero": (rebodied(RAW32, integers(1, 0, 10)), "or negative, got 0 at 1"),
    "beyond": (rebodied(RAW32, integers(1, 2, -11)), "got -11 at 2"),
    "int32 min": (rebodied(RAW32, integers(-(2**31), 2, 3)), "got -2147483648 at 0"),
    "repeated": (rebodied(RAW32, integers(1, 2, -2)), "got 2 and then -2 at 2"),
    "descending": (rebodied(RAW32, integers(2, 1, 3)), "got 2 and then 1 at 1"),
    "map count": (rebodied(BITMAP, b"\x0b\x02\x02"), "has 4 bits for 3 entries"),
    "map padding": (rebodied(BITMAP, b"\x09\x04\x02"), "must be 0, got a bit at 10"),
    "bitmap sign padding": (rebodied(BITMAP, b"\x09\x02\x0a"), "after 3 sign bits"),
}
# RAW32's example in GAPS is 01, then bits 1 0 | 0 1 0 | 0 0 1 1 in 2 bytes, then 02.
CODES = {
    "mode": (rebodied(GAPS, b"\x1f\x89\x01\x02"), "0 .. 30 or 255 (one per block)"),
    "codes end": (
        rebodied(GAPS, b"\x01" + bits("10 010 00") + b"\x02"),
        "codes run past the 8 bits there are, at parameter 4",
    ),
    "remainder cut": (
        rebodied(GAPS, b"\x05" + bits("1 00000 0 1") + b"\x02"),
        "codes run past the 8 bits there are, at parameter 1",
    ),
    "gap beyond": (
        rebodied(GAPS, b"\x01" + bits("10 010 00010") + b"\x02"),
        "a gap from parameter 4 leaves its block or the 10 parameters",
    ),
    "remainder beyond": (
        rebodied(GAPS, b"\x03" + bits("1100 1000 1111") + b"\x02"),
        "a gap from parameter 3 leaves",
    ),
    "codes left over": (
        rebodied(GAPS, b"\x01" + bits("10 10 10") + b"\x00\x02"),
        "codes of 3 gaps end after 6 bits, got 2 bytes",
    ),
    "codes padding": (
        rebodied(GAPS, b"\x01\x89\x03\x02"),
        "padding after 9 bits of codes must be 0, got the last byte 0x03",
    ),
    "gaps sign padding": (rebodied(GAPS, b"\x01\x89\x01\x82"), "after 3 sign bits"),
    "no block": (
        frame_of_blocks(2**15 + 1, 1, "0" * 8),
        "codes run past the 8 bits there are, at parameter 32768",
    ),
    "block header cut": (
        frame_of_blocks(10, 3, "1 00000000"),
        "codes run past the 16 bits there are, at parameter 0",
    ),
    "block counts beyond": (
        frame_of_blocks(12, 9, header(10, 0) + "1" * 10),
        "blocks' counts must add up to 9 entries, got 10",
    ),
    "block counts short": (
        frame_of_blocks(12, 9, header(8, 0) + "1" * 8),
        "blocks' counts must add up to 9 entries, got 8",
    ),
    "block rice": (
        frame_of_blocks(12, 9, header(9, 13) + "1"),
        "a block's Rice parameter must be in 0 .. 12, got 13",
    ),
    "block left": (
        frame_of_blocks(
            4_100, 9, header(3, 11) + ("1" + number(2_047, 11)) * 2 + "1" + "0" * 12
        ),
        "a gap from parameter 4096 leaves its block or the 4100 parameters",
    ),
    "last block left": (
        frame_of_blocks(4_100, 9, "0" + header(1, 0) + "00001"),
        "a gap from parameter 4096 leaves its block or the 4100 parameters",
    ),
    "block codes end": (
        frame_of_blocks(12, 9, header(9, 0) + "11"),
        "codes run past the 24 bits there are, at parameter 2",
    ),
}


# Blocks of 256 and of 4 parameters: scales 3 and 2, then the values.
DENSE8 = encode_dense(
    STAMP, 0.5, quantize(np.array([381, *[0] * 255, 2, 0, -254, 0], np.int32))
).tobytes()
DENSE8_BODY = integers(3, 2) + b"\x7f" + bytes(255) + b"\x01\x00\x81\x00"
EIGHT = {
    "entries": (patched(DENSE8, 40, "I", 1), "must be in 0 .. 0, got 1"),
    "body": (patched(DENSE8, 48, "Q", 264), "have 268 .. 268 bytes, got 264"),
    "truncated": (repaired(DENSE8[:-1]), "of "),
    "minus 128": (
        rebodied(DENSE8, DENSE8_BODY[:-1] + b"\x80"),
        "values must be in -127 .. 127, got -128 in block 1",
    ),
    "scale without values": (
        rebodied(DENSE8, DENSE8_BODY[:-4] + bytes(4)),
        "block 1 must have the scale 0 if, and only if, all of it is 0",
    ),
    "values without scale": (
        rebodied(DENSE8, integers(0) + DENSE8_BODY[4:]),
        "block 0 must have the scale 0 if",
    ),
    "product beyond int32": (
        rebodied(DENSE8, integers(3, 16_909_321) + DENSE8_BODY[8:]),
        "scales must be in 0 .. 16909320, got 16909321 of block 1",
    ),
    "scale negative": (
        rebodied(DENSE8, integers(3, -1) + DENSE8_BODY[8:]),
        "scales must be in 0 .. 16909320, got 4294967295 of block 1",
    ),
}


REFUSED = (HEADERS, LENGTHS, BODIES, CODES, EIGHT)


@pytest.mark.parametrize(
    ("frame", "message"),
    [case for cases in REFUSED for case in cases.values()],
    ids=[name for cases in REFUSED for name in cases],
)
def test_a_damaged_frame_is_refused(frame, message):
    with pytest.raises(CodecError, match=re.escape(message)):
        decode(frame)


@pytest.mark.parametrize("frame", [RAW32, GAPS, BITMAP, DENSE32, DENSE8, EMPTY, ROW])
def test_the_frames_are_valid_before_they_are_damaged(frame):
    assert decode(frame, run=1).stamp == STAMP


def test_damaged_frames_leave_the_others_of_a_call_readable():
    damaged = [frame for cases in REFUSED for frame, _ in cases.values()]
    readable = itertools.cycle([RAW32, GAPS, BITMAP, DENSE32, DENSE8, EMPTY, ROW])
    frames = [frame for pair in zip(damaged, readable, strict=False) for frame in pair]

    results = decode_all(frames, run=1)

    messages = [message for cases in REFUSED for _, message in cases.values()]
    for error, message in zip(results[::2], messages, strict=True):
        assert isinstance(error, CodecError)
        assert message in str(error)
    for update, frame in zip(results[1::2], frames[1::2], strict=True):
        for value, expected in zip(update, decode(frame), strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("frame", [RAW32, DENSE32], ids=["sparse", "dense"])
def test_a_frame_of_another_run_or_model_is_refused(frame):
    with pytest.raises(
        CodecError, match=r"frame of run 00000001, this is run 00000007"
    ):
        decode(frame, run=7)
    for size in (1, 11):
        with pytest.raises(CodecError, match=f"parameters, this model has {size}"):
            decode(frame, size=size)


@pytest.mark.parametrize("name", ["nothing", "short", "magic", "version"])
def test_the_kind_of_an_invalid_header_is_refused(name):
    frame, message = HEADERS[name]

    with pytest.raises(CodecError, match=re.escape(message)):
        read_kind(frame)


def test_a_frame_that_is_not_contiguous_is_refused():
    frame = np.frombuffer(RAW32 + RAW32, np.uint8)[::2]

    with pytest.raises(CodecError, match=re.escape("contiguous, got strides (2,)")):
        decode(frame)


def test_a_short_frame_cannot_claim_much_memory():
    """2 GiB announced in 94 bytes, within what N allows."""
    size = 2**29
    frame = patched(DENSE32, 36, "I", size)
    frame = patched(frame, 48, "Q", 4 * size)
    frame = patched(frame[:64] + b"\x1f" + b"\xff" * 29, 6, "B", 1)

    tracemalloc.start()
    with pytest.raises(CodecError, match=r"lz4 must make 31 .. 7650 bytes of 30"):
        decode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 1_000_000


def test_a_gap_beyond_64_bits_does_not_wrap_into_the_vector():
    """16 * 2**60 is 0 in 64 bits; in frames it takes a gigabyte of zeros."""
    words = np.zeros(6, np.uint64)
    words[0] = 1 << 16

    fault, _, _ = reading.read_long_code(words, 200, 0, 60, 10)

    assert fault == reading.OUTSIDE


# ---- what could not be read back is not written: one case per check of an argument


DENSE = np.array([1, -1, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stamp": STAMP._replace(run=2**64)}, "run must be in 0 .. 2**64 - 1"),
        ({"stamp": STAMP._replace(origin=2**32)}, "origin must be in 0 .. 2**32 - 1"),
        ({"stamp": STAMP._replace(sequence=-1)}, "2**64 - 1, got -1"),
        ({"size": 0}, "parameters must be in 1 .. 2**31 - 1, got 0"),
        ({"size": 2**31}, "parameters must be in 1 .. 2**31 - 1, got 2147483648"),
        ({"threshold": 0.0}, "threshold must be finite and > 0, got 0.0"),
        ({"threshold": float("inf")}, "threshold must be finite and > 0, got inf"),
        ({"threshold": 1e-3}, "exact in float32, got 0.001, the nearest is 0.00100000"),
        ({"threshold": 1e39}, "exact in float32, got 1e+39, the nearest is inf"),
        ({"size": 9}, "entries of 9 parameters must be in 1 .. 9 or negative, got 10"),
        (
            {"entries_K": ENTRIES[::-1]},
            "ascending in position, got 10 and then -4 at 1",
        ),
        ({"entries_K": np.array([0], np.int32)}, "or negative, got 0 at 0"),
        ({"entries_K": np.array([1, -(2**31)], np.int32)}, "got -2147483648 at 1"),
        ({"entries_K": ENTRIES.astype(np.int64)}, "int32, got int64 of shape (3,)"),
        ({"entries_K": ENTRIES[None]}, "int32, got int32 of shape (1, 3)"),
        ({"kind": Kind.DENSE32}, "got <Kind.DENSE32: 5>"),
    ],
    ids=str,
)
def test_invalid_arguments_are_not_encoded(changes, message):
    arguments = {"stamp": STAMP, "size": 10, "threshold": 0.5, "entries_K": ENTRIES}

    with pytest.raises(CodecError, match=re.escape(message)):
        encode(**(arguments | changes))


def eight(scales, values):
    return Quantized(np.array(scales, np.int32), np.array(values, np.int8))


@pytest.mark.parametrize(
    ("grid", "counts", "message"),
    [
        (0.1, DENSE, "threshold must be exact in float32, got 0.1"),
        (0.5, DENSE[:0], "parameters must be in 1 .. 2**31 - 1, got 0"),
        (0.5, DENSE.astype(np.int64), "got int64 of shape (4,)"),
        (0.5, DENSE[None], "got int32 of shape (1, 4)"),
        (0.1, eight([1], [1]), "threshold must be exact in float32, got 0.1"),
        (0.5, eight([], []), "parameters must be in 1 .. 2**31 - 1, got 0"),
        (0.5, eight([1, 1], [1]), "got (2,) scales for (1,)"),
        (0.5, eight([[1]], [1]), "got (1, 1) scales for (1,)"),
        (0.5, eight([1], [[1]]), "got (1,) scales for (1, 1)"),
        (0.5, eight([1], [-128]), "got -128 in block 0"),
        (0.5, eight([0], [1]), "block 0 must have the scale 0 if"),
        (0.5, eight([-1], [1]), "got 4294967295 of block 0"),
        (0.5, Quantized(DENSE[:1].astype(np.int64), DENSE.astype(np.int8)), "int64"),
        (0.5, Quantized(DENSE[:1], DENSE), "and values of int8, got int32 and int32"),
    ],
    ids=str,
)
def test_invalid_counts_are_not_encoded(grid, counts, message):
    with pytest.raises(CodecError, match=re.escape(message)):
        encode_dense(STAMP, grid, counts)
