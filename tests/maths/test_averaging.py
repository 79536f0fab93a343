"""Blobs of rounded arrays, and decisions of averaging rounds."""

import numpy as np
import pytest

from daskdl.codec import Stamp
from daskdl.codec.dense8 import MAX_VALUE
from daskdl.errors import CodecError
from daskdl.training.parameter_averaging import RoundDecision, Vote
from daskdl.training.tree_reduce import Key, ReduceOp, from_blob, to_blob

STAMP = Stamp(run=7, origin=2, sequence=5, step=40)
KEY = Key(ReduceOp.SUM, "parameters")
NOTHING = np.zeros(())


def rounded(array):
    """Return a blob and the residual."""
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
def test_decoded_values_plus_residual_are_the_array(shape, dtype):
    array = normal(shape, dtype)

    sent, left = rounded(array)

    got = read(sent)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert 0 < np.abs(left).max() < np.abs(array).max() / MAX_VALUE
    np.testing.assert_array_equal(got + left, array)


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
def test_arrays_that_do_not_fit_a_frame_are_sent_exactly(array):
    sent, left = rounded(array)

    assert left is NOTHING
    np.testing.assert_array_equal(read(sent), array)
    assert not is_frame(sent, array)


def test_a_damaged_frame_is_refused():
    sent, _ = rounded(normal(1000))
    sent["0"][200] ^= 1

    with pytest.raises(CodecError, match="checksum"):
        read(sent)


def vote(mean=4, examples=10, seen=4, **more):
    return Vote(seen, mean, examples, **more)


def test_means_are_weighted_by_examples():
    decided = RoundDecision.of({0: vote(examples=30), 1: vote(examples=10)}, gone=[])

    assert decided.weights == {0: 0.75, 1: 0.25}
    assert decided.members == decided.current == (0, 1)


def test_a_replica_that_waits_for_a_lease_is_no_member_but_may_donate():
    notes = {0: vote(mean=3, examples=0), 1: vote(examples=0, parked=True)}

    decided = RoundDecision.of(notes, gone=[])

    assert (decided.weights, decided.members) == ({}, (0,))
    assert decided.current == decided.donors == (1,)


def test_a_replica_that_waits_for_a_lease_has_no_weight():
    notes = {0: vote(examples=30), 1: vote(examples=10, parked=True)}

    assert RoundDecision.of(notes, gone=[]).weights == {0: 1.0}


def test_votes_of_gone_replicas_do_not_count():
    notes = {0: vote(examples=30), 1: vote(mean=9, seen=9, examples=10)}

    decided = RoundDecision.of(notes, gone=[1])

    assert (decided.number, decided.latest, decided.weights) == (5, 4, {0: 1.0})


def test_only_replicas_with_the_same_parameters_end_together():
    notes = {0: ended(digest=7), 1: ended(digest=8), 2: ended(digest=7)}

    decided = RoundDecision.of(notes, gone=[])

    assert decided.current == (0, 2)
    assert not decided.over
    assert RoundDecision.of({0: notes[0], 2: notes[2]}, gone=[]).over


def test_a_replica_that_has_trained_since_does_not_donate_the_mean():
    notes = {0: vote(examples=30), 1: vote(examples=0), 2: vote(mean=3)}

    assert RoundDecision.of(notes, gone=[]).donors == (1,)


def test_the_root_has_the_latest_mean():
    notes = {0: vote(mean=3), 1: vote(), 2: vote(), 3: vote(parked=True, examples=0)}

    roots = {
        RoundDecision.of({**notes, 1: vote(seen=n)}, []).root for n in range(4, 12)
    }

    assert roots == {1, 2}


def ended(**more):
    return vote(examples=0, ended=True, **more)


@pytest.mark.parametrize(
    ("notes", "exact"),
    [
        ([vote(), vote()], False),
        ([vote(), vote(examples=0)], False),
        ([vote(), vote(), vote(mean=3, examples=0, parked=True)], False),
        ([vote()], True),  # there is nobody to send to
        ([vote(), vote(mean=3)], True),
        ([vote(), vote(mean=-1, examples=0)], True),
        ([vote(mean=-1, seen=0), vote(mean=-1, seen=0)], True),
        ([ended(), ended(owes=True)], True),
        ([vote(rests=True), vote(rests=True)], True),
        ([vote(rests=True), vote()], False),
        ([vote(rests=True), vote(), vote(examples=0, parked=True, rests=True)], False),
    ],
    ids=[
        *("all", "idle", "parked", "alone", "late", "new", "no mean", "ended"),
        *("all rest", "one rests", "one parked"),
    ],
)
def test_a_mean_is_rounded_only_among_members_with_the_latest_mean(notes, exact):
    assert RoundDecision.of(dict(enumerate(notes)), gone=[]).exact is exact
