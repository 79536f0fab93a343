"""Eight bits for each parameter: rounded, as bytes, there and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from daskdl.codec import (
    Stamp,
    counts_of,
    decode,
    encode_dense,
    quantize,
)
from daskdl.codec.dense8 import BLOCK, MAX_SCALE

STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
INT32 = np.iinfo(np.int32)


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
def test_each_count_is_decoded_within_half_a_scale(counts):
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
def test_a_body_has_a_byte_per_parameter_and_four_per_block(size):
    generator = np.random.default_rng(0)
    counts = generator.integers(-(2**30), 2**30, size).astype(np.int32)

    frame = encode_dense(STAMP, 0.5, quantize(counts))

    blocks = (size + BLOCK - 1) // BLOCK
    assert frame[48:56].view("<u8").item() == size + 4 * blocks
