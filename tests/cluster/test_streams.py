"""Fits of iterable datasets on a cluster."""

import pytest

from tests.support.problems import ShardedStream, Stream, trainer

REMEDY = r"2 parts.* used 2 times.*get_worker_info\(\).*daskdl\.data\.Stream"


def test_a_stream_that_every_replica_goes_through_whole_is_warned_of(client):
    own = trainer(client)

    with pytest.warns(UserWarning, match=REMEDY):
        history = own.fit(Stream(64), batch_size=16)
    with pytest.warns(UserWarning, match=REMEDY):
        own.evaluate(Stream(64))

    assert history[-1]["examples"] == 2 * 64


def test_a_stream_in_shards_trains_on_every_row_once(client):
    history = trainer(client).fit(ShardedStream(64), batch_size=16)

    assert history[-1]["examples"] == 64
