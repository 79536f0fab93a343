import numpy as np
import pytest

from daskdl.codec import Stamp
from daskdl.codec.dense8 import BLOCK, MOST
from daskdl.errors import CodecError
from daskdl.training.tree_reduce import Key, ReduceOp, from_blob, to_blob

STAMP = Stamp(run=7, origin=2, sequence=5, step=40)
KEY = Key(ReduceOp.SUM, "parameters")
NOTHING = np.zeros(())


def rounded(array):
    """A blob, and what rounding leaves."""
    blob, left = to_blob({KEY: array}, STAMP)
    return blob, left.get(KEY, NOTHING)


def read(blob):
    return from_blob(blob)[KEY]


def is_frame(blob, array):
    return blob["0"].dtype == np.uint8 != array.dtype


def normal(size, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1000,), (30, 7, 3)])
def test_what_is_read_and_what_is_left_are_what_there_was(shape, dtype):
    array = normal(shape, dtype)

    sent, left = rounded(array)

    got = read(sent)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert 0 < np.abs(left).max() < np.abs(array).max() / MOST
    np.testing.assert_array_equal(got + left, array)


def test_each_block_is_rounded_by_its_own_largest_number():
    array = normal(3 * BLOCK)
    array[BLOCK : 2 * BLOCK] *= 1e-4

    _, left = rounded(array)

    for block, rest in zip(array.reshape(3, -1), left.reshape(3, -1), strict=True):
        assert np.abs(rest).max() <= 0.51 * np.abs(block).max() / MOST


@pytest.mark.parametrize(
    ("dtype", "most"), [(np.float32, 0.255), (np.float64, 0.128)], ids=["4", "8"]
)
def test_a_frame_takes_a_byte_for_each_number(dtype, most):
    array = normal(100_000, dtype)

    sent, _ = rounded(array)

    assert sent["0"].nbytes < most * array.nbytes


def with_one(value, dtype=np.float32):
    array = normal(1000, dtype)
    array[17] = value
    return array


@pytest.mark.parametrize(
    "array",
    [
        with_one(np.nan),
        with_one(-np.inf),
        with_one(2.0**126, np.float32),  # might be rounded up to infinity
        with_one(1e300, np.float64),  # the grid would not be exact in float32
        normal(20),  # a frame is larger
        np.empty(0, np.float32),
    ],
    ids=["nan", "infinite", "large", "huge", "small", "empty"],
)
def test_what_a_frame_does_not_suit_goes_as_it_is(array):
    sent, left = rounded(array)

    assert left is NOTHING
    np.testing.assert_array_equal(read(sent), array)
    assert not is_frame(sent, array)


@pytest.mark.parametrize(
    "array",
    [
        np.full(1000, -0.75, np.float32),
        with_one(0.99 * 2.0**126, np.float32),
        np.full(1000, 2.0**-130, np.float64),
        with_one(2.0**-149),
    ],
    ids=["equal", "largest", "tiny", "subnormal"],
)
def test_nothing_is_lost_at_the_ends_of_the_range(array):
    sent, left = rounded(array)

    assert is_frame(sent, array)
    np.testing.assert_array_equal(read(sent) + left, array)


def test_what_is_exact_leaves_nothing():
    array = np.arange(1000) % 127 / 127.0
    array = read(rounded(array)[0])

    sent, left = rounded(array)

    assert left is NOTHING
    np.testing.assert_array_equal(read(sent), array)


def test_zeros_leave_nothing():
    sent, left = rounded(np.zeros(1000, np.float32))

    assert left is NOTHING
    np.testing.assert_array_equal(read(sent), np.zeros(1000, np.float32))


def test_numbers_below_the_finest_grid_are_left_whole():
    array = np.full(1000, 1e-300)

    sent, left = rounded(array)

    assert not read(sent).any()
    np.testing.assert_array_equal(left, array)


def test_a_frame_is_read_where_it_came_from_another_process():
    sent, _ = rounded(normal(1000))
    arrived = {n: np.frombuffer(a.tobytes(), np.uint8) for n, a in sent.items()}

    np.testing.assert_array_equal(read(arrived), read(sent))  # they are read-only


def test_a_damaged_frame_is_refused():
    sent, _ = rounded(normal(1000))
    sent["0"][200] ^= 1

    with pytest.raises(CodecError, match="checksum"):
        read(sent)


@pytest.mark.parametrize("keys", [b"", b"[1]", b'[["sum"]]', b"{", b"[[]]"], ids=repr)
def test_damaged_names_are_refused(keys):
    sent, _ = rounded(normal(1000))
    damaged = {**sent, "keys": np.frombuffer(keys, np.uint8)}

    with pytest.raises(CodecError, match="of another replica are damaged"):
        read(damaged)
