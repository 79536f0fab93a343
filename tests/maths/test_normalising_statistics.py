import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data import normalize
from daskdl.data.normalize import check_per, statistics_of
from daskdl.errors import DataError, OptionError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 3, 4, 5), dtype=np.uint8)


def merged(parts, per="feature"):
    found = [statistics_of(part, per) for part in parts]
    return functools.reduce(lambda one, two: one.merged(two), found)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_parts_of_any_length_merge_to_what_numpy_says_of_all_rows(lengths, seed):
    X = np.random.default_rng(seed).normal(3, 2, (sum(lengths), 2))

    found = merged(np.split(X, np.cumsum(lengths)[:-1]))

    assert found.count == len(X)
    np.testing.assert_allclose(found.mean, X.mean(0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.deviation, X.std(0), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(found.low, X.min(0))
    np.testing.assert_array_equal(found.high, X.max(0))


def test_a_large_offset_costs_no_digits():
    noise = RNG.normal(size=(10_000, 3))
    X = noise + 1e8
    exact = X - 1e8  # without rounding, so close to 1e8

    found = merged(np.array_split(X, 7))

    # The mean of float64 near 1e8 is known to 1.5e-8; the deviation to all digits.
    np.testing.assert_allclose(found.mean - 1e8, exact.mean(0), atol=1.6e-8)
    np.testing.assert_allclose(found.deviation, exact.std(0), rtol=1e-13)


def test_slices_of_a_part_merge_to_the_part(monkeypatch):
    monkeypatch.setattr(normalize, "_SLICE_BYTES", 3 * 8 * 60)  # three images

    found = statistics_of(IMAGES, "feature")

    assert found.count == 7
    np.testing.assert_allclose(found.mean, IMAGES.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.deviation, IMAGES.std(0), rtol=1e-13)


@pytest.mark.parametrize(
    ("per", "axes", "shape", "count"),
    [
        ("feature", (0,), (3, 4, 5), 7),
        ("channel", (0, 2, 3), (3, 1, 1), 140),
        ("all", None, (1, 1, 1), 420),
    ],
)
def test_what_is_counted_together_is_said_by_per(per, axes, shape, count):
    found = statistics_of(IMAGES, per)

    assert found.mean.shape == found.deviation.shape == shape
    assert found.low.shape == found.high.shape == shape
    assert found.count == count
    np.testing.assert_allclose(found.mean.ravel(), IMAGES.mean(axes).ravel())
    np.testing.assert_allclose(found.deviation.ravel(), IMAGES.std(axes).ravel())


def test_channels_are_the_second_axis_of_a_table_too():
    X = RNG.normal(size=(6, 2))

    found = statistics_of(X, "channel")

    np.testing.assert_allclose(found.mean, X.mean(0))


def test_what_is_constant_deviates_by_exactly_nothing():
    parts = [np.full((n, 1), 0.1, np.float32) for n in (3, 10, 7)]

    found = merged(parts)

    assert found.deviation == 0
    assert found.mean == np.float64(np.float32(0.1))


def test_what_is_given_is_not_changed():
    X = np.array([[1.0], [2.0]])

    statistics_of(X, "feature")

    np.testing.assert_array_equal(X, [[1.0], [2.0]])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_finite_number_is_refused_with_its_place(value):
    X = np.zeros((3, 2), np.float32)
    X[2, 1] = value

    with pytest.raises(DataError, match=rf"^\[2, 1\] is {value}$"):
        statistics_of(X, "feature")


def test_another_way_to_count_is_refused():
    with pytest.raises(
        OptionError,
        match="per must be one of 'feature', 'channel', 'all', got 'row'",
    ):
        check_per("row")
