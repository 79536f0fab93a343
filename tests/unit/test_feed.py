"""What a replica trains on, when a piece does not come."""

from types import SimpleNamespace

import pytest

from daskdl.channel.base import Piece, Stopped
from daskdl.training import feed as module
from daskdl.training.feed import Feed


class OnePiece:
    """As much of a channel as leasing a piece needs."""

    def __init__(self, stopped=None):
        self._stopped = stopped

    def lease(self, *args, **keywords):
        return Piece(0, "daskdl-piece")

    def check(self):
        if self._stopped:
            raise Stopped(self._stopped)

    def wait_for_data(self, future, timeout_s):
        raise AssertionError("no future was made")


@pytest.mark.parametrize(
    ("stopped", "expected"), [(None, RuntimeError), ("its worker closes", Stopped)]
)
def test_what_dask_raises_while_a_worker_closes_is_no_failure(
    stopped, expected, monkeypatch
):
    def load(*args):
        raise RuntimeError("the client of the worker is closed")

    monkeypatch.setattr(module, "load", load)
    options = SimpleNamespace(
        batch_size=4, labels=None, timeouts=SimpleNamespace(data=1.0, silence=4.0)
    )
    feed = Feed(OnePiece(stopped), options, "train", 0)

    with pytest.raises(expected, match="closes" if stopped else "closed"):
        next(feed.batches(lambda: None))
