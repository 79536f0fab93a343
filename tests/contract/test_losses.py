"""Lost results of Dask tasks, without Dask."""

import types
from collections import Counter

import pytest

from daskdl.config import Timeouts
from daskdl.data import distribute
from daskdl.data.distribute import MOST_LOSSES, Fetcher, _Pass
from daskdl.errors import DataError, LostPieceError, WaitTimeoutError


class Forgetful(Fetcher):
    """Finds nothing any more."""

    def __init__(self):
        pass

    def fetch(self, key, timeout_s, unwanted):
        raise LostPieceError(f"{key} was lost")


def test_a_lost_dependency_that_is_still_needed_is_a_data_error():
    with pytest.raises(DataError, match="Dask cannot compute it again") as caught:
        Forgetful()._need("x", 1.0, lambda: False)

    assert not isinstance(caught.value, LostPieceError)


def test_a_lost_dependency_that_is_not_needed_is_no_data_error():
    with pytest.raises(LostPieceError, match="x was lost"):
        Forgetful()._need("x", 1.0, lambda: True)


class Client:
    """Of a cluster whose workers come back, or not."""

    def __init__(self, comes=True):
        self.asynchronous = False
        self._comes = comes

    def wait_for_workers(self, count, timeout):
        if not self._comes:
            raise TimeoutError

    def nthreads(self):
        return {"new": 1} if self._comes else {}


def future(*, cancelled):
    return types.SimpleNamespace(cancelled=lambda: cancelled, release=lambda: None)


def running(sends=lambda: {"function": "again"}, client=None, *, cancelled=True):
    own = _Pass.__new__(_Pass)
    own._client = client or Client()
    own._source = types.SimpleNamespace(name="part {}".format)
    own._timeouts = Timeouts.from_config()
    own._workers, own._lost = ["old"], Counter()
    own._sent = {"function": future(cancelled=cancelled)}
    own._share = sends
    return own


def test_a_lost_shared_object_is_sent_again():
    own = running()

    own._recover(3, KeyError())

    assert own._sent == {"function": "again"}
    assert own._workers == ["new"]


def test_a_present_shared_object_is_not_sent_again():
    own = running(cancelled=False)

    own._recover(3, KeyError())

    assert own._sent["function"] != "again"


def test_a_worker_lost_while_sending_counts_as_another_loss():
    answers = iter([OSError("gone"), None])

    def send():
        if (error := next(answers)) is not None:
            raise error
        return {"function": "again"}

    own = running(send)

    own._recover(3, KeyError())

    assert own._sent == {"function": "again"}
    assert own._lost[3] == 2


def test_a_part_that_is_lost_too_often_is_an_error():
    own = running(cancelled=False)
    for _ in range(MOST_LOSSES):
        own._recover(3, KeyError())
    own._recover(4, KeyError())

    with pytest.raises(DataError, match="part 3 was lost with its worker 4 times"):
        own._recover(3, KeyError())


def test_the_wait_for_a_worker_is_bounded():
    own = running(client=Client(comes=False))

    with pytest.raises(WaitTimeoutError, match="no worker came within 60"):
        own._recover(3, KeyError())


def test_a_part_is_placed_on_a_worker_that_accepts_it(monkeypatch):
    def scatter(client, data, workers, bound, what):
        if workers == ["old"]:
            raise OSError("gone")
        return dict.fromkeys(data, workers[0])

    monkeypatch.setattr(distribute, "scatter", scatter)
    monkeypatch.setattr(distribute, "content_of", lambda source, part: part)
    own = running()
    own._workers, own._bound = ["new", "old"], None

    homes = [own._placed(part, "a part") for part in (0, 1)]

    assert homes == ["new", "new"]
