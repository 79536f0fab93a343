"""Eight bits for each parameter: rounded, as bytes, there and back, and refused."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from daskdl.codec import (
    DenseUpdate,
    Stamp,
    counts_of,
    decode,
    encode_dense,
    quantize,
)
from daskdl.codec.dense8 import BLOCK, MAX_SCALE
from daskdl.errors import CodecError
from tests.support.updates import patched, rebodied, repaired

STAMP = Stamp(run=0x1122334455667788, origin=0xAABBCCDD, sequence=3, step=4)
LITERAL = bytes.fromhex(
    "44 4b 44 4c 01 04 00 00"
    "88 77 66 55 44 33 22 11  03 00 00 00 00 00 00 00  04 00 00 00 00 00 00 00"
    "dd cc bb aa  04 00 00 00"
    "00 00 00 00  00 00 80 33  08 00 00 00 00 00 00 00  00 00 00 00  b0 d9 a9 8b"
    "03 00 00 00  7f 81 00 2a"
)
ROUNDED = [381, -381, 0, 126]
INT32 = np.iinfo(np.int32)


def test_a_frame_is_exactly_the_documented_layout():
    counts = np.array([381, -381, 1, 127], np.int32)

    frame = encode_dense(STAMP, 2.0**-24, quantize(counts))

    assert frame.tobytes().hex(" ") == LITERAL.hex(" ")


def test_a_frame_is_read_back():
    update = decode(LITERAL)

    assert isinstance(update, DenseUpdate)
    assert update[:3] == (STAMP, 4, 2.0**-24)
    assert update.counts_N.tolist() == ROUNDED
    assert update.counts_N.dtype == np.int32


@st.composite
def vectors(draw):
    """Counts of all magnitudes, in blocks of their own magnitude each."""
    size = draw(st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.sampled_from([0, 1, 127, 128, 10**4, 2**24, INT32.max]))
    counts = generator.integers(-most, most, size, np.int64, endpoint=True)
    counts[: draw(st.integers(0, size))] //= draw(st.sampled_from([1, 1000, 2**31]))
    return counts.astype(np.int32)


@settings(max_examples=200, derandomize=True)
@given(counts=vectors() | arrays.arrays(np.int32, st.integers(1, 20)))
def test_each_count_comes_back_within_half_a_scale(counts):
    quantized = quantize(counts)

    back = decode(encode_dense(STAMP, 2.0**-24, quantized)).counts_N

    np.testing.assert_array_equal(back, counts_of(quantized))
    scales = np.repeat(quantized.scales_B.astype(np.int64), BLOCK)[: len(counts)]
    off = np.abs(back.astype(np.int64) - counts)
    # At the ends of int32 the scale is cut, by which up to 8 steps are missing.
    assert (2 * off <= np.maximum(scales, 16 * (scales == MAX_SCALE))).all()


@settings(max_examples=100, derandomize=True)
@given(counts=vectors())
def test_the_scale_of_a_block_is_the_smallest_that_reaches_its_largest(counts):
    scales = quantize(counts).scales_B

    for b, scale in enumerate(scales.tolist()):
        block = counts[b * BLOCK : (b + 1) * BLOCK].astype(np.int64)
        largest = int(np.abs(block).max())
        assert scale == min(-(-largest // 127), MAX_SCALE)


@pytest.mark.parametrize("end", [INT32.min, -INT32.max, INT32.max], ids=str)
def test_the_ends_of_int32_do_not_wrap(end):
    counts = np.array([end, 0], np.int32)

    assert counts_of(quantize(counts)).tolist() == [np.sign(end) * 2_147_483_640, 0]


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1], ids=str)
def test_the_body_takes_a_byte_for_each_and_four_for_each_block(size):
    generator = np.random.default_rng(0)
    counts = generator.integers(-(2**30), 2**30, size).astype(np.int32)

    frame = encode_dense(STAMP, 0.5, quantize(counts))

    blocks = (size + BLOCK - 1) // BLOCK
    assert frame[48:56].view("<u8").item() == size + 4 * blocks


def integers(*values):
    return np.array(values, "<i4").tobytes()


# Blocks of 256 and of 4 parameters: scales 3 and 2, then the values.
DENSE8 = encode_dense(
    STAMP, 0.5, quantize(np.array([381, *[0] * 255, 2, 0, -254, 0], np.int32))
).tobytes()
DENSE8_BODY = integers(3, 2) + b"\x7f" + bytes(255) + b"\x01\x00\x81\x00"
REFUSED = {
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


@pytest.mark.parametrize(("frame", "message"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_frame_is_refused(frame, message):
    with pytest.raises(CodecError, match=re.escape(message)):
        decode(frame)
