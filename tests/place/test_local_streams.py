"""Fits of iterable datasets among threads."""

import pytest

import daskdl
from tests.support.problems import ShardedStream, Stream, trainer

REMEDY = r"2 parts.* used 2 times.*get_worker_info\(\).*daskdl\.data\.Stream"


def two():
    return trainer(False, master=daskdl.GradientSharing(replicas_per_worker=2))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_that_every_replica_trains_on_whole_is_warned_of(shuffled):
    with pytest.warns(UserWarning, match=REMEDY):
        history = two().fit(Stream(64, shuffled), batch_size=16)

    assert history[-1]["examples"] == 2 * 64


def test_so_is_one_to_validate_with():
    own = two()
    own.fit(ShardedStream(64), batch_size=16)

    with pytest.warns(UserWarning, match=REMEDY):
        own.fit(ShardedStream(64), validation=Stream(32), batch_size=16)


def test_a_stream_in_shards_trains_on_every_row_once():
    history = two().fit(ShardedStream(64), batch_size=16)

    assert history[-1]["examples"] == 64


def test_one_replica_may_have_all_of_a_stream():
    history = trainer(False).fit(Stream(64), batch_size=16)

    assert history[-1]["examples"] == 64
