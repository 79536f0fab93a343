"""Fits of iterable datasets among threads."""

import pytest

import daskdl
from tests.support.problems import ShardedStream, Stream, trainer

REMEDY = r"2 parts.* used 2 times.*get_worker_info\(\).*daskdl\.data\.Stream"


@pytest.mark.parametrize(
    ("data", "options", "examples"),
    [
        (Stream(64), {}, 128),
        (Stream(64, shuffled=True), {}, 128),
        (ShardedStream(64), {"validation": Stream(32)}, 64),
    ],
    ids=["in order", "shuffled", "validation"],
)
def test_a_stream_used_whole_by_every_replica_is_warned_of(data, options, examples):
    fitted = trainer(False, master=daskdl.GradientSharing(replicas_per_worker=2))

    with pytest.warns(UserWarning, match=REMEDY):
        history = fitted.fit(data, batch_size=16, **options)

    assert history[-1]["examples"] == examples


@pytest.mark.parametrize(
    ("replicas", "data"),
    [(2, ShardedStream(64)), (1, Stream(64))],
    ids=["shards", "one"],
)
def test_sharded_streams_train_on_every_row_once(replicas, data):
    fitted = trainer(False, master=daskdl.GradientSharing(replicas_per_worker=replicas))

    assert fitted.fit(data, batch_size=16)[-1]["examples"] == 64
