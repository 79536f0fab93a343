"""Frames there and back, the smallest kind, fresh memory; bytes are golden files."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.codec import (
    DenseUpdate,
    Kind,
    Stamp,
    decode,
    encode,
    encode_dense,
    pack,
    payload_sizes,
)

SPARSE = [Kind.RAW32, Kind.GAPS, Kind.BITMAP]
INT32_MAX = 2**31 - 1
STAMP = Stamp(run=0x1122334455667788, origin=0xAABBCCDD, sequence=3, step=4)
ENTRIES = np.array([1, -4, 10], np.int32)


def test_the_largest_stamp_is_decoded():
    stamp = Stamp(2**64 - 1, 2**32 - 1, 2**64 - 1, 2**64 - 1)

    assert decode(encode(stamp, 3, 0.5, ENTRIES[:1])).stamp == stamp


@st.composite
def updates(draw):
    """(N, entries): any density, the first and last position often among them."""
    size = draw(st.sampled_from([1, 2, 7, 8, 9, 64, 4095, 4096, 4097, 12_289]))
    density = draw(st.sampled_from([0.0, 1e-3, 0.05, 0.3, 0.9, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    present = generator.random(size) < density
    # Part of the vector silent: clustered positions take other ways.
    if draw(st.booleans()):
        present[draw(st.integers(0, size - 1)) :] = False
    present[0] |= draw(st.booleans())
    present[-1] |= draw(st.booleans())
    positions = np.flatnonzero(present)
    signs = generator.choice([-1, 1], len(positions))
    return size, ((positions + 1) * signs).astype(np.int32)


@pytest.mark.parametrize("kind", [None, *SPARSE], ids=str)
@settings(max_examples=150, derandomize=True)
@given(update=updates())
def test_entries_are_decoded_as_encoded(kind, update):
    size, entries = update

    decoded = decode(encode(STAMP, size, 2.0**-10, entries, kind))

    assert decoded.size == size
    assert kind is None or decoded.kind == kind
    np.testing.assert_array_equal(decoded.entries_K, entries)


@pytest.mark.parametrize("kind", [None, Kind.RAW32, Kind.GAPS], ids=str)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_entries_anywhere_in_the_largest_model_are_decoded_as_encoded(kind, data):
    size = data.draw(st.integers(2**24 + 1, INT32_MAX))
    ends = st.sampled_from([0, 2**24, size - 1])
    positions = data.draw(st.sets(ends | st.integers(0, size - 1), max_size=9))
    signs = data.draw(st.lists(st.sampled_from([-1, 1]), min_size=9, max_size=9))
    entries = np.array(
        [(i + 1) * sign for i, sign in zip(sorted(positions), signs, strict=False)],
        np.int32,
    )

    decoded = decode(encode(STAMP, size, 2.0**-24, entries, kind))

    np.testing.assert_array_equal(decoded.entries_K, entries)


@settings(max_examples=100, derandomize=True)
@given(
    counts=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    repeat=st.sampled_from([1, 100]),
)
def test_counts_are_decoded_as_encoded(counts, repeat):
    counts = np.repeat(np.array(counts, np.int32), repeat)

    decoded = decode(encode_dense(STAMP, 2.0**-24, counts))

    assert isinstance(decoded, DenseUpdate)
    np.testing.assert_array_equal(decoded.counts_N, counts)


@settings(max_examples=150, derandomize=True)
@given(update=updates())
def test_the_counted_sizes_are_exact_and_the_smallest_kind_is_chosen(update):
    size, entries = update

    counted = payload_sizes(size, entries)

    lengths = {
        kind: encode(STAMP, size, 0.5, entries, kind)[48:56].view("<u8").item()
        for kind in SPARSE
    }
    assert counted == lengths
    chosen = decode(encode(STAMP, size, 0.5, entries)).kind
    assert counted[chosen] == min(counted.values())


@pytest.fixture(scope="module")
def _threads_for_few_entries():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskdl.codec.frame.PARALLEL_ENTRIES", 1)
        yield


@pytest.mark.usefixtures("_threads_for_few_entries")
@pytest.mark.parametrize("kind", [None, Kind.LEVELS, *SPARSE], ids=str)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(update=updates(), share_of_one=st.sampled_from([0.5, 0.99, 1.0]))
def test_threads_pack_the_same_bytes(kind, update, share_of_one):
    size, entries = update
    generator = np.random.default_rng(size)
    levels = generator.geometric(share_of_one, len(entries)).clip(1, 15)
    levels = levels.astype(np.uint8)

    bodies = [
        pack(size, entries, levels, kind, threads=threads) for threads in (1, 2, 5)
    ]

    payloads = {(body.kind, body.flags, body.payload.tobytes()) for body in bodies}
    assert len(payloads) == 1


@pytest.mark.parametrize("kind", [Kind.GAPS, Kind.BITMAP], ids=lambda kind: kind.name)
def test_lz4_is_kept_where_it_is_smaller(kind):
    row = np.arange(1, 3_001, dtype=np.int32)

    frame = encode(STAMP, 100_000, 0.5, row, kind)

    assert frame[6] == 1
    assert len(frame) < 64 + payload_sizes(100_000, row)[kind] / 3
    np.testing.assert_array_equal(decode(frame).entries_K, row)


def buffers():
    frame = encode(STAMP, 10, 0.5, ENTRIES, Kind.RAW32)
    read_only = frame.copy()
    read_only.flags.writeable = False
    odd = np.concatenate([[np.uint8(0)], frame])[1:]
    yield from (frame, read_only, odd, frame.tobytes(), bytearray(frame.tobytes()))
    yield memoryview(frame.tobytes())


@pytest.mark.parametrize(
    "frame",
    list(buffers()),
    ids=["array", "read-only", "odd", "bytes", "bytearray", "view"],
)
def test_any_buffer_is_read_into_memory_of_its_own(frame):
    before = bytes(frame)

    entries = decode(frame).entries_K
    entries += 1

    assert bytes(frame) == before
    assert (entries.flags.aligned, entries.flags.writeable) == (True, True)


@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.name)
def test_a_frame_is_not_a_view_of_the_entries(kind):
    entries = ENTRIES.copy()
    entries.flags.writeable = False

    frame = encode(STAMP, 10, 0.5, entries, kind)
    frame[:] = 0

    np.testing.assert_array_equal(entries, ENTRIES)
