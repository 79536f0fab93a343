"""Where rows come from: from this process, and from Dask when a piece does not come."""

import dask
import dask.array as da
import numpy as np
import pytest

from daskdl.channel.base import Stopped
from daskdl.data.sources import source_of
from daskdl.errors import LostPieceError
from daskdl.training import stores as module
from daskdl.training.stores import LocalStore, WorkerStore
from tests.unit.records import TIMEOUTS

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12)


class Channel:
    """As much of a channel as getting a piece needs."""

    def __init__(self, stopped=None):
        self._stopped = stopped

    def check(self):
        if self._stopped:
            raise Stopped(self._stopped)

    def wait_for_data(self, future, timeout_s):
        raise AssertionError("no future was made")

    def missing(self, phase, part, key):
        return f"{key} again"


@pytest.mark.parametrize(
    ("stopped", "expected"), [(None, RuntimeError), ("its worker closes", Stopped)]
)
def test_what_dask_raises_while_a_worker_closes_is_no_failure(
    stopped, expected, monkeypatch
):
    def load(*args):
        raise RuntimeError("the client of the worker is closed")

    monkeypatch.setattr(module, "load", load)
    store = WorkerStore(Channel(stopped), TIMEOUTS)

    with pytest.raises(expected, match="closes" if stopped else "closed"):
        store.rows("train", 0, "daskdl-piece")


def test_a_lost_piece_is_had_under_its_new_key(monkeypatch):
    def load(key, *args):
        if key != "daskdl-piece again":
            raise LostPieceError(key)
        return X, Y

    monkeypatch.setattr(module, "load", load)
    store = WorkerStore(Channel(), TIMEOUTS)

    assert store.rows("train", 0, "daskdl-piece") == (X, Y)


@pytest.mark.parametrize(
    ("x", "y"),
    [(X, Y), (da.from_array(X, chunks=(3, 2)), da.from_array(Y, chunks=4))],
    ids=["numpy", "dask"],
)
def test_a_local_store_has_every_row_once_and_in_order(x, y):
    source = source_of(x, y, batch_size=1, replicas=1, shuffle_seed=None)
    store = LocalStore({"train": source})

    pieces = [store.rows("train", i, "") for i, _ in enumerate(source.lengths)]

    assert len(pieces) > 2
    np.testing.assert_array_equal(np.concatenate([x for x, _ in pieces]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in pieces]), Y)


def test_a_local_store_computes_only_the_piece_that_is_asked_for():
    computed = []

    def noting(block, block_info):
        computed.append(block_info[None]["chunk-location"][0])
        return block

    x = da.from_array(X, chunks=(3, 2)).map_blocks(noting, dtype=X.dtype)
    source = source_of(x, da.from_array(Y, chunks=3), 1, 1, None)

    with dask.config.set(scheduler=lambda *args, **options: 1 / 0):
        LocalStore({"train": source}).rows("train", 2, "")

    assert computed == [2]
