"""Levels as bytes and back, near their entropy; what is chosen, and what is refused."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl import codec
from daskdl.codec import Kind, Stamp, decode, encode
from daskdl.codec.levels import MAX_LEVEL
from daskdl.errors import CodecError
from tests.support.updates import patched, rebodied

STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
SIZE = 2_000_000


def entries_of(count, size=SIZE, seed=0):
    generator = np.random.default_rng(seed)
    positions = np.sort(generator.choice(size, count, replace=False))
    signs = generator.choice([-1, 1], count)
    return ((positions + 1) * signs).astype(np.int32)


def geometric(count, share_of_one, seed=0):
    generator = np.random.default_rng(seed)
    levels = np.minimum(generator.geometric(share_of_one, count), MAX_LEVEL)
    return levels.astype(np.uint8)


# Whole rows of a matrix: lz4 packs their positions well, and levels hardly.
ROWS = np.concatenate([2048 * row + np.arange(1, 2049) for row in range(30)])
ROWS = ROWS.astype(np.int32)


@settings(max_examples=150, derandomize=True)
@given(
    levels=st.lists(st.integers(1, MAX_LEVEL), min_size=1, max_size=60),
    repeat=st.sampled_from([1, 37, 900]),
)
def test_levels_come_back(levels, repeat):
    levels = np.repeat(np.array(levels, np.uint8), repeat)
    entries = np.arange(1, len(levels) + 1, dtype=np.int32)

    decoded = decode(encode(STAMP, SIZE, 0.5, entries, Kind.LEVELS, levels))

    np.testing.assert_array_equal(decoded.levels_K, levels)
    np.testing.assert_array_equal(decoded.entries_K, entries)


@pytest.mark.parametrize("share_of_one", [0.1, 0.5, 0.9, 0.99])
def test_levels_take_at_most_five_per_cent_more_than_their_entropy(share_of_one):
    levels = geometric(200_000, share_of_one)
    entries = entries_of(200_000)
    counts = np.unique(levels, return_counts=True)[1]
    entropy_bytes = (counts * np.log2(200_000 / counts)).sum() / 8

    body = codec.pack(SIZE, entries, levels, Kind.LEVELS)

    positions_and_signs = codec.payload_sizes(SIZE, entries)[Kind.GAPS]
    assert entropy_bytes < body.length - positions_and_signs < 1.05 * entropy_bytes


@pytest.mark.parametrize("share_of_one", [0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("count", [3, 200, 20_000, "rows"])
def test_the_frame_carries_the_most_quanta_per_byte(count, share_of_one):
    entries = ROWS if count == "rows" else entries_of(count)
    levels = geometric(len(entries), share_of_one)
    bodies = [
        codec.pack(SIZE, entries, kind=kind)
        for kind in (Kind.RAW32, Kind.GAPS, Kind.BITMAP)
    ]
    alone = 64 + len(min(bodies, key=lambda body: body.length).payload)
    leveled = 64 + len(codec.pack(SIZE, entries, levels, Kind.LEVELS).payload)

    chosen = codec.pack(SIZE, entries, levels)

    pays = int(levels.sum()) / leveled > len(entries) / alone
    assert (chosen.kind is Kind.LEVELS) is pays
    assert (chosen.levels_K is not None) is pays
    assert 64 + len(chosen.payload) == (leveled if pays else alone)


def test_both_choices_are_tried():
    entries = entries_of(20_000)

    kinds = {
        codec.pack(SIZE, entries, geometric(20_000, share)).kind
        for share in (0.5, 0.99999)
    }

    assert kinds == {Kind.LEVELS, Kind.GAPS}


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param(None, id="none"),
        pytest.param(np.ones(1, np.uint8), id="too few"),
        pytest.param(np.ones(2, np.int32), id="dtype"),
        pytest.param(np.zeros(2, np.uint8), id="zero"),
        pytest.param(np.full(2, 16, np.uint8), id="sixteen"),
    ],
)
def test_levels_that_no_frame_can_hold_are_refused(levels):
    with pytest.raises(CodecError, match="levels"):
        encode(STAMP, 10, 0.5, np.array([1, 2], np.int32), Kind.LEVELS, levels)


# Entries 1, -4, 10 with levels 1, 3, 1: 13 bytes of levels, then GAPS.
FRAME = encode(
    STAMP,
    10,
    0.5,
    np.array([1, -4, 10], np.int32),
    Kind.LEVELS,
    np.array([1, 3, 1], np.uint8),
).tobytes()
GAPS = bytes.fromhex("01 89 01 02")
TABLE = b"\x03\xab\x0a\0\0"
STATES = FRAME[73:81]


def leveled(levels, length=None):
    length = len(levels) if length is None else length
    return rebodied(FRAME, length.to_bytes(4, "little") + levels + GAPS)


REFUSED = {
    "highest 1": (leveled(b"\x01\0\0" + STATES), "must be in 2 .. 15, got 1"),
    "highest 16": (leveled(b"\x10" + bytes(12)), "must be in 2 .. 15, got 16"),
    "table cut": (leveled(b"\x05\xab\x0a" + STATES), "up to 5 must have 17 bytes"),
    "odd": (leveled(TABLE + STATES + b"\0"), "even number more, got 14"),
    "no slot for the highest": (
        leveled(b"\x03\xff\x0f\x01\0" + STATES),
        "must leave 1 of 4096 slots, got 4096 in all",
    ),
    "table above all slots": (
        leveled(b"\x03\xff\xff\xff\xff" + STATES),
        "must leave 1 of 4096 slots, got 65535 in all",
    ),
    "first state": (
        leveled(TABLE + b"\xff\xff\0\0" + STATES[4:]),
        "must be >= 65536, got 65535",
    ),
    "second state": (
        leveled(TABLE + STATES[:4] + b"\xff\xff\0\0"),
        "must be >= 65536, got 65535",
    ),
    **{
        f"another {name} state": (
            leveled(TABLE + STATES[:i] + bytes([STATES[i] ^ 1]) + STATES[i + 1 :]),
            "levels of 3 entries",
        )
        for i, name in ((0, "first"), (4, "second"))
    },
    "word left over": (
        leveled(TABLE + STATES + b"\0\0"),
        "end in the state 65536, got 1 words more",
    ),
    "words missing": (
        leveled(TABLE + b"\x00\x00\x01\x00" * 2),
        "run past the 13 bytes there are",
    ),
    "length long": (
        leveled(TABLE + STATES, length=16),
        "positions and signs 3 .. 4, got 16 and 1",
    ),
    "length beyond": (leveled(TABLE + STATES, 2**32 - 1), "got 4294967295"),
    "length short": (leveled(TABLE + STATES, 3), "got 3 and 14"),
    "body": (patched(FRAME, 48, "Q", 17), "must have 18 .. 51 bytes, got 17"),
}


@pytest.mark.parametrize(("frame", "message"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_frame_is_refused(frame, message):
    with pytest.raises(CodecError, match=re.escape(message)):
        decode(frame)


def test_frames_of_no_entries_need_no_levels():
    none = np.empty(0, np.int32)

    frame = encode(STAMP, 10, 0.5, none, Kind.LEVELS, np.empty(0, np.uint8))

    assert decode(frame).entries_K.size == 0
    assert len(frame) == 64
