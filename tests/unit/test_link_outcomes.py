"""What is made of measured outcomes, before anything is decided."""

import math

import numpy as np
import pytest

from daskdl import codec
from daskdl.thresholds import (
    HEADER_BYTES,
    WINDOW,
    Aim,
    Drained,
    Link,
    Measured,
    Request,
    plain_bytes,
)

NOTHING = Drained()


def link_after(*drained, size=1000, step_s=1.0, density=0.01, nbytes=90, dense=False):
    link = Link(size, Aim(0.01))
    for one in drained:
        link = link.after(Measured(size, density, nbytes, dense, step_s, one))
    return link


def carried(nbytes, busy_s, frames=1, requests=1, copies=1):
    return Drained(nbytes, frames, requests, busy_s, copies)


@pytest.mark.parametrize("density", [1e-3, 1e-2, 0.1, 0.3])
def test_a_frame_of_independent_positions_is_as_large_as_foreseen(density):
    size = 100_000
    random = np.random.default_rng(0)
    positions = np.sort(random.choice(size, round(size * density), replace=False))
    sizes = codec.payload_sizes(size, (positions + 1).astype(np.int32))

    actual = min(sizes.values()) + HEADER_BYTES

    # BITMAP spends 12 % more than the entropy at 0.3.
    assert actual == pytest.approx(plain_bytes(size, density), rel=0.15)


def test_all_entries_have_signs_only():
    assert plain_bytes(800, 1.0) == HEADER_BYTES + 100


@pytest.mark.parametrize("size", [1, 256, 257, 10_000])
def test_a_dense_frame_is_as_large_as_foreseen(size):
    # Random, so that lz4 does not make it smaller.
    counts_N = np.random.default_rng(0).integers(-(10**6), 10**6, size, np.int32)

    frame = codec.encode_dense(
        codec.Stamp(1, 0, 1, 1), 2.0**-24, codec.quantize(counts_N)
    )

    assert Link(size, Aim(1.0)).dense_bytes() == frame.nbytes


class TestAfter:
    def test_the_median_of_the_steps_bears_two_outliers(self):
        link = Link(10, Aim(0.01))
        for step_s in (1.0, 100.0, 1.1, 0.9, 100.0):
            link = link.after(Measured(10, 0.1, 70, False, step_s, NOTHING))

        assert link.step_s == 1.1

    def test_only_the_last_few_outcomes_count(self):
        link = link_after(*[carried(100 * i, i) for i in range(1, WINDOW + 3)])

        assert [c.nbytes for c in link.carried] == [300, 400, 500, 600, 700]
        assert len(link.steps_s) == WINDOW
        assert link.arrivals == WINDOW + 2

    def test_time_by_which_nothing_arrived_goes_to_what_arrives_next(self):
        refused = Drained(busy_s=2.0)

        link = link_after(refused, refused, carried(50, 1.0), carried(50, 1.0))

        assert [c.busy_s for c in link.carried] == [5.0, 1.0]
        assert link.arrivals == 2

    def test_frames_are_as_much_larger_than_foreseen_as_the_last_one_was(self):
        link = link_after(NOTHING, nbytes=round(0.5 * plain_bytes(1000, 0.01)))

        assert link.frame_bytes(0.01) == pytest.approx(
            0.5 * plain_bytes(1000, 0.01), rel=0.02
        )

    @pytest.mark.parametrize(
        "frame",
        [{"density": 0.0, "nbytes": 0}, {"density": 1.0, "dense": True, "nbytes": 999}],
        ids=["none", "dense"],
    )
    def test_a_frame_without_entries_says_nothing_of_their_bytes(self, frame):
        assert link_after(NOTHING, **frame).packing == 1.0

    def test_the_former_link_is_unchanged(self):
        former = link_after(carried(100, 1.0))
        copy = Link(*former)

        former.after(Measured(1000, 0.5, 9, False, 9.0, carried(1, 2.0, copies=3)))

        assert former == copy


class TestPrice:
    def test_it_is_what_a_byte_takes_beyond_a_smallest_request(self):
        assert Request(0.3, 2100).price_s(Request(0.1, 100)) == pytest.approx(1e-4)

    def test_times_that_bytes_do_not_explain_make_it_negative(self):
        assert Request(0.9, 1100).price_s(Request(1.0, 100)) == pytest.approx(-1e-4)

    def test_the_request_of_the_median_byte_tells_it(self):
        link = link_after(
            carried(1200, 9.0),
            carried(140, 9.0),
            carried(1100, 3.0),
            carried(1000, 2.0),
        )

        assert link.telling(Request(1.0, 100)) == Request(3.0, 1100)

    def test_what_goes_in_several_requests_tells_of_one(self):
        link = link_after(carried(6200, 0.8, 2, requests=2))

        assert link.telling(Request(0.1, 100)) == Request(0.4, 3100)

    def test_nothing_tells_it_where_no_request_is_larger(self):
        assert link_after(carried(149, 9.0)).telling(Request(1.0, 100)) is None

    def test_the_largest_frame_is_not_the_largest_request(self):
        link = link_after(carried(1000, 1.0, frames=10), carried(300, 1.0))

        assert link.largest_frame() == 300


def test_nothing_is_known_at_the_beginning():
    link = Link(10, Aim(0.01))

    assert (link.copies, link.packing, link.arrivals) == (1, 1.0, 0)
    assert link.aim.floor == (math.inf, math.inf)
    assert link.aim.price_s is None
