"""Sums of updates as frames: exact in any order and grouping; damage is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.codec import (
    Kind,
    SparseUpdate,
    Stamp,
    SumEncoder,
    Summand,
    decode,
    decode_sum,
    encode,
    encode_sum,
)
from daskdl.errors import CodecError
from tests.support.updates import repaired

RUN = 7
QUANTA = [2.0**-10, 1.5 * 2.0**-10, 2.0**-8, 3 * 2.0**-24, (2**22 - 1) * 2.0**-24]


@st.composite
def updates(draw):
    """Updates of some replicas, of one size; some blocks dense, with high levels."""
    size = draw(st.sampled_from([1, 255, 256, 257, 1000]))
    quanta = draw(st.sampled_from([QUANTA[:1], QUANTA[:3], QUANTA]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    drawn = []
    for origin in range(draw(st.integers(1, 12))):
        density = generator.choice([0.0, 0.02, 0.3, 1.0])
        positions = np.flatnonzero(generator.random(size) < density)
        signs = generator.choice([-1, 1], len(positions))
        levels = np.minimum(generator.geometric(0.5, len(positions)), 15)
        drawn.append(
            SparseUpdate(
                Stamp(RUN, origin, int(generator.integers(1, 2**40)), 3),
                Kind.LEVELS,
                size,
                float(generator.choice(quanta)),
                ((positions + 1) * signs).astype(np.int32),
                levels.astype(np.uint8) if generator.random() < 0.8 else None,
            )
        )
    return drawn


def summand_of(update):
    return Summand(*update.stamp[1:])


def moves(update):
    """How far a sparse update moves each parameter, exact."""
    moved_N = np.zeros(update.size)
    moved_N[np.abs(update.entries_K) - 1] = update.quanta_K * update.threshold
    return moved_N


def moves_of_sum(frame, size):
    total = decode_sum(frame, run=RUN, size=size)
    counts_N = np.zeros(size, np.int32)
    total.add_(counts_N, 1)
    return counts_N * total.threshold


def grouped(items, generator):
    """Cut a list at random places."""
    cuts = sorted(generator.integers(0, len(items) + 1, 3))
    parts = [items[a:b] for a, b in itertools.pairwise([0, *cuts, len(items)])]
    return [part for part in parts if part]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(drawn=updates(), seed=st.integers(0, 2**32 - 1))
def test_a_sum_is_that_of_its_updates_in_any_order_and_grouping(drawn, seed):
    generator = np.random.default_rng(seed)
    size, expected_N = drawn[0].size, sum(map(moves, drawn))
    names = sorted(map(summand_of, drawn))

    at_once = encode_sum(RUN, drawn)
    shuffled = [drawn[i] for i in generator.permutation(len(drawn))]
    in_groups = [
        decode_sum(encode_sum(RUN, group)) for group in grouped(shuffled, generator)
    ]
    of_sums = encode_sum(RUN, in_groups)

    for frame in (at_once, of_sums):
        assert list(decode_sum(frame).summands) == names
        np.testing.assert_array_equal(moves_of_sum(frame, size), expected_N)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(drawn=updates())
def test_an_update_is_subtracted_from_a_sum(drawn):
    *earlier, last = drawn
    total = decode_sum(encode_sum(RUN, drawn))
    left_N = np.zeros(last.size, np.int32)
    grid = 2.0**-24

    total.add_(left_N, int(total.threshold / grid))
    latest = decode_sum(encode_sum(RUN, [last]))
    latest.add_(left_N, -int(latest.threshold / grid))

    expected_N = sum(map(moves, earlier), np.zeros(last.size))
    np.testing.assert_array_equal(left_N * grid, expected_N)


def frame_of(size=600, count=5):
    generator = np.random.default_rng(3)
    drawn = [
        SparseUpdate(
            Stamp(RUN, origin, 1, 1),
            Kind.LEVELS,
            size,
            0.5,
            np.sort(generator.choice(size, size // 3, False) + 1).astype(np.int32),
            generator.integers(1, 16, size // 3).astype(np.uint8),
        )
        for origin in range(count)
    ]
    return encode_sum(RUN, drawn)


def test_damaged_sums_are_refused_or_have_no_effect_outside():
    sound = frame_of().tobytes()
    generator = np.random.default_rng(0)
    refused = 0

    for _ in range(3000):
        changed = bytearray(sound)
        for _ in range(generator.integers(1, 4)):
            # Mostly in what says how long other things are.
            at = generator.integers(8, 64 + 20 * 5 + 12)
            changed[at] ^= 1 << int(generator.integers(8))
        frame = repaired(bytes(changed))
        guarded_N = np.zeros(600 + 2 * 600, np.int32)
        try:
            decode_sum(frame, run=RUN, size=600).add_(guarded_N[600:1200], 1)
        except CodecError:
            refused += 1
        assert not guarded_N[:600].any()
        assert not guarded_N[1200:].any()

    assert 1000 < refused < 3000


def changed_at(offset, value):
    """A frame with another byte in its body, and a checksum that fits."""
    frame = bytearray(frame_of().tobytes())
    frame[64 + offset] = value
    return repaired(bytes(frame))


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (frame_of().tobytes()[:-1], "checksum"),
        (repaired(frame_of().tobytes()[:-1]), "bytes or more"),
        (changed_at(20, 0), "ascending"),  # the second origin is the first
        (changed_at(100, 9), "widths"),
        (changed_at(100, 3), "blocks of a sum"),
        (encode(Stamp(RUN, 1, 1, 1), 600, 0.5, np.array([1], np.int32)), "kind SUM"),
    ],
)
def test_a_reader_says_what_is_wrong_with_a_sum(frame, why):
    with pytest.raises(CodecError, match=why):
        decode_sum(frame, run=RUN, size=600)


def test_values_beyond_the_last_parameter_are_refused():
    frame = bytearray(frame_of(470, 5))
    widths, exceptions = frame[164:166], frame[166:168]  # of two blocks
    assert 0 < widths[1] <= 8
    frame[len(frame) - 3 * sum(exceptions) - 1] ^= 0x80  # of value 255 of its block

    with pytest.raises(CodecError, match="after 470 parameters"):
        decode_sum(repaired(bytes(frame)))


def test_a_sum_of_another_run_or_model_is_refused():
    with pytest.raises(CodecError, match="this is run"):
        decode_sum(frame_of(), run=RUN + 1)
    with pytest.raises(CodecError, match="this model has"):
        decode_sum(frame_of(), size=601)


def test_a_sum_is_not_taken_for_an_update():
    with pytest.raises(CodecError, match="decode_sum"):
        decode(frame_of())


def test_what_may_exceed_int32_is_not_summed():
    far = [
        SparseUpdate(
            Stamp(RUN, origin, 1, 1), Kind.RAW32, 3, threshold, np.array([1], np.int32)
        )
        for origin, threshold in enumerate([2.0**-24, *[0.25] * 40])
    ]

    with pytest.raises(CodecError, match="must fit int32"):
        encode_sum(RUN, far)
    with pytest.raises(CodecError, match="must fit int32"):
        decode_sum(encode_sum(RUN, far[1:])).add_(np.zeros(3, np.int32), 2**28)


def test_an_update_that_cannot_be_added_changes_nothing():
    near, far = (
        SparseUpdate(
            Stamp(RUN, origin, 1, 1), Kind.RAW32, 3, threshold, np.array([1], np.int32)
        )
        for origin, threshold in ((1, 2.0**-24), (2, 2.0**4))
    )
    encoder = SumEncoder(RUN, 3)
    encoder.add(near, step=8)

    for update, why in (
        (far, "must fit int32"),
        (near, "once"),
        (far._replace(size=4), "must have 3 parameters, got 4"),
    ):
        with pytest.raises(CodecError, match=why):
            encoder.add(update)

    total = decode_sum(encoder.encode())
    assert total.threshold == 2.0**-24
    assert total.summands == (Summand(1, 1, 8),)
    assert moves_of_sum(encoder.encode(), 3).tolist() == [2.0**-24, 0, 0]


@pytest.mark.parametrize("in_reverse", [False, True], ids=["zeros first", "last"])
def test_updates_that_cancel_out_can_be_added_to_any(in_reverse):
    def update(origin, threshold, entry):
        stamp, entries = Stamp(RUN, origin, 1, 1), np.array([entry], np.int32)
        return SparseUpdate(stamp, Kind.RAW32, 3, threshold, entries)

    zeros = decode_sum(encode_sum(RUN, [update(1, 1.0, 1), update(2, 1.0, -1)]))
    parts = [zeros, update(3, 2.0**-40, 2)]

    frame = encode_sum(RUN, parts[::-1] if in_reverse else parts)

    assert len(decode_sum(frame).summands) == 3
    assert moves_of_sum(frame, 3).tolist() == [0, 2.0**-40, 0]
