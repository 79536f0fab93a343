"""Where rows come from: from this process, and from Dask when a part does not come."""

import dataclasses
import itertools
import threading
import weakref
from concurrent.futures import Future

import numpy as np
import pytest

from daskdl.channel.base import Stopped
from daskdl.data.tables import InMemory
from daskdl.errors import LostPieceError, WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.training import data_feed as module
from daskdl.training.data_feed import Loader, LocalStore, WorkerStore
from tests.support.run_states import TIMEOUTS
from tests.support.sources import Parts, Streamed

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12)
PATIENCE_S = 30  # of a test that would fail otherwise


class Channel:
    """As much of a channel as getting a part needs."""

    def __init__(self, stopped=None):
        self._stopped = stopped
        self.asked = []

    def check(self):
        if self._stopped:
            raise Stopped(self._stopped)

    def wait(self, cause, future, timeout_s):
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        return ended.wait(min(timeout_s, PATIENCE_S))

    def missing(self, phase, part, key):
        self.asked.append((phase, part, key))
        return f"{key} again"


class KeepingChannel(Channel):
    """Knows of no other key, unless the part was lost."""

    def __init__(self, lost):
        super().__init__()
        self._lost = lost

    def missing(self, phase, part, key):
        return f"{key} again" if self._lost else key


class Fetching:
    """Stands for what gets parts from Dask."""

    def __init__(self, rows, held=()):
        self._rows = rows
        self._held = dict(held)
        self.names = {}

    def here(self, key):
        return self._held.get(key)

    def rows(self, key, unwanted):
        return self._rows(key, unwanted)


@pytest.fixture
def worker_store(monkeypatch):
    """Makes stores with a fetcher of the test's own; closes them."""
    stores = []

    def make(rows, channel, *, held=(), sources=None, timeouts=TIMEOUTS):
        monkeypatch.setattr(
            "daskdl.training.data_feed.Fetcher", lambda timeout_s: Fetching(rows, held)
        )
        stores.append(WorkerStore(sources or {}, channel, timeouts, 1))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def local_store():
    """Makes stores of this process; closes them."""
    stores = []

    def make(source, channel=None, threads=1, timeouts=TIMEOUTS):
        usual_channel = channel or Channel()
        stores.append(LocalStore({"train": source}, usual_channel, timeouts, threads))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


class Waiting(Parts):
    """Parts that are loaded when the test lets them."""

    def __init__(self, *pairs):
        super().__init__(*pairs)
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.loaded = []

    def load(self, part):
        self.loaded.append(part)
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return super().load(part)


def join_loaders():
    """Wait for what is begun; stores have been closed."""
    for thread in threading.enumerate():
        if thread.name == "daskdl-loader":
            thread.join(PATIENCE_S)


def waiting(parts=3):
    return Waiting(*((X + part, Y) for part in range(parts)))


class TestWorkerStore:
    @pytest.mark.parametrize(
        ("stopped", "expected"), [(None, RuntimeError), ("its worker closes", Stopped)]
    )
    def test_what_dask_raises_while_a_worker_closes_is_no_failure(
        self, stopped, expected, worker_store
    ):
        def rows(key, unwanted):
            raise RuntimeError("the client of the worker is closed")

        store = worker_store(rows, Channel(stopped))

        with pytest.raises(expected, match="closes" if stopped else "closed"):
            store.rows("train", 0, "daskdl-part")

    def test_a_lost_part_is_had_under_its_new_key(self, worker_store):
        def rows(key, unwanted):
            if key != "daskdl-part again":
                raise LostPieceError(key)
            return X, Y

        channel = Channel()
        store = worker_store(rows, channel)

        assert store.rows("train", 3, "daskdl-part") == (X, Y)
        assert channel.asked == [("train", 3, "daskdl-part")]

    @pytest.mark.parametrize("lost", [False, True])
    def test_a_part_does_not_wait_for_one_ahead_that_hangs(self, lost, worker_store):
        hanging = threading.Event()

        def rows(key, unwanted):
            if key == "ahead":
                hanging.set()
                while not unwanted():
                    threading.Event().wait(0.01)
                raise LostPieceError(key)
            if lost and key == "needed":
                raise LostPieceError(key)
            return X, Y

        soon = dataclasses.replace(TIMEOUTS, silence=0.2)
        store = worker_store(rows, KeepingChannel(lost), timeouts=soon)
        store.begin("train", 1, "ahead")
        assert hanging.wait(PATIENCE_S)

        assert store.rows("train", 0, "needed") == (X, Y)

    def test_after_a_loss_those_ahead_are_not_waited_for_at_all(self, worker_store):
        def rows(key, unwanted):
            if key == "ahead":
                while not unwanted():  # it was on the same worker
                    threading.Event().wait(0.01)
                raise LostPieceError(key)
            if key == "needed":
                assert both_begun.wait(PATIENCE_S)
                raise LostPieceError(key)
            return X, Y

        class Looking(Channel):
            def wait(self, cause, future, timeout_s):
                both_begun.set()
                looks.append(super().wait(cause, future, timeout_s))
                return looks[-1]

        both_begun, looks = threading.Event(), []
        soon = dataclasses.replace(TIMEOUTS, silence=20.0)
        store = worker_store(rows, Looking(), timeouts=soon)
        store.begin("train", 0, "needed")
        store.begin("train", 1, "ahead")

        assert store.rows("train", 0, "needed") == (X, Y)
        assert looks == [True, True]

    @pytest.mark.parametrize(("key", "looks"), [("", 2), ("key", 7)])
    def test_who_fetches_a_part_has_time_to_say_where_it_is(
        self, key, looks, worker_store
    ):
        def rows(key, unwanted):
            may_end.wait(PATIENCE_S)

        class NeverThere(KeepingChannel):
            def wait(self, cause, future, timeout_s):
                waits.append(timeout_s)
                return False

            def missing(self, phase, part, key):
                assert key  # what has none is on no worker
                return super().missing(phase, part, key)

        may_end, waits = threading.Event(), []
        timeouts = dataclasses.replace(TIMEOUTS, data=2.0, silence=4.0)
        sources = {"train": Packed(Parts((X, Y)), "X")}
        channel = NeverThere(lost=False)
        store = worker_store(rows, channel, sources=sources, timeouts=timeouts)

        with pytest.raises(WaitTimeoutError, match="was not loaded within 2 s"):
            store.rows("train", 0, key)
        may_end.set()

        assert waits == [1.0] * looks

    def test_a_part_on_a_worker_that_hangs_is_had_under_its_new_key(self, worker_store):
        begun, let_go, told = threading.Event(), threading.Event(), []

        def rows(key, unwanted):
            if key == "key":
                begun.set()
                told.append(let_go.wait(PATIENCE_S) and unwanted())
            return X, Y

        class Impatient(Channel):
            def wait(self, cause, future, timeout_s):
                if not self.asked:
                    assert begun.wait(PATIENCE_S)
                    return False
                let_go.set()
                return super().wait(cause, future, timeout_s)

        store = worker_store(rows, Impatient())

        assert store.rows("train", 0, "key") == (X, Y)
        assert told == [True]

    def test_of_rows_that_are_here_nothing_is_kept_if_they_were_begun(
        self, worker_store
    ):
        def rows(key, unwanted):
            x = X.copy()
            if key == "key":
                weakref.finalize(x, gone.set)
                begun.set()
            return x, Y

        begun, gone = threading.Event(), threading.Event()
        store = worker_store(rows, Channel(), held={"key": [X, Y]})
        store.begin("train", 0, "key")
        assert begun.wait(PATIENCE_S)

        assert store.rows("train", 0, "key") == (X, Y)
        assert store.rows("train", 1, "elsewhere") is not None  # so that 0 has come
        assert gone.wait(PATIENCE_S)


def test_what_is_in_this_process_is_cut_in_the_thread_that_asks(
    local_store, monkeypatch
):
    class Nobody(module.Loader):
        def submit(self, job):
            raise AssertionError("it needs no other thread")

    class Noting(InMemory):
        def load(self, part):
            loaded.append(threading.current_thread())
            return super().load(part)

    loaded = []
    monkeypatch.setattr(module, "Loader", Nobody)
    store = local_store(Noting(X, Y, batch_size=4))

    store.begin("train", 0, "")
    store.rows("train", 0, "")

    assert loaded == [threading.current_thread()]


class TestAhead:
    @pytest.mark.parametrize("end", ["forget", "close"])
    def test_a_part_that_is_not_needed_after_all_is_not_loaded(self, local_store, end):
        source = waiting()
        store = local_store(source)
        for part in range(3):
            store.begin("train", part, "")
        assert source.begun.wait(PATIENCE_S)

        if end == "forget":
            store.forget("train", but=[0, 2])
            source.may_end.set()
            store.rows("train", 2, "")
            assert source.loaded == [0, 2]
        else:
            store.close()
            source.may_end.set()
            join_loaders()
            assert source.loaded == [0]

    def test_as_many_parts_are_loaded_together_as_there_are_threads(self, local_store):
        class Meeting(Parts):
            def load(self, part):
                meeting.wait(PATIENCE_S)
                return super().load(part)

        meeting = threading.Barrier(2)
        store = local_store(Meeting((X, Y), (X + 1, Y)), threads=2)
        store.begin("train", 1, "")

        x, _ = store.rows("train", 0, "")

        assert x[0, 0] == 0

    def test_a_part_that_does_not_come_in_time_is_named(self, local_store):
        source = waiting()
        soon = dataclasses.replace(TIMEOUTS, data=0.02, silence=0.01)
        store = local_store(source, timeouts=soon)

        with pytest.raises(WaitTimeoutError) as caught:
            store.rows("train", 1, "")
        source.may_end.set()

        assert str(caught.value) == (
            "part 1 of the train data (box 1) was not loaded within 0.02 s "
            "(daskdl.timeouts.data)"
        )


class TestStream:
    @pytest.mark.parametrize("ahead", [0, 1, 9])
    def test_a_part_comes_bit_by_bit_in_order(self, local_store, ahead):
        store = local_store(Streamed((X, Y), step=5))

        bits = list(store.stream("train", 0, 5, ahead))

        assert [y.tolist() for _, y in bits] == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, 9],
            [10, 11],
        ]

    @pytest.mark.parametrize("ahead", [0, 1, 2])
    def test_as_many_bits_as_asked_for_are_read_ahead(
        self, local_store, monkeypatch, ahead
    ):
        asked = []

        class Endless(Streamed):
            def stream(self, part, rows):
                for number in itertools.count():
                    asked.append(number)
                    yield X, Y

        def at_once(loader, job):
            future = Future()
            future.set_result(job())
            return future

        monkeypatch.setattr(Loader, "submit", at_once)
        bits = local_store(Endless((X, Y))).stream("train", 0, 12, ahead)
        next(bits)
        assert asked == [*range(1 + ahead)]

        next(bits)
        assert asked == [*range(2 + ahead)]

    def test_a_bit_is_gone_when_the_next_is_waited_for(self, local_store):
        seen = []

        class Weak(Streamed):
            def stream(self, part, rows):
                for number in range(3):
                    yield X + number, Y

        class Looking(Channel):
            def wait(self, cause, future, timeout_s):
                came = super().wait(cause, future, timeout_s)
                seen.append([ref() is not None for ref in refs])
                return came

        refs = []
        store = local_store(Weak((X, Y)), Looking())
        for bit in store.stream("train", 0, 12, 0):
            refs.append(weakref.ref(bit[0]))
            del bit

        assert seen == [[], [False], [False] * 2, [False] * 3]

    def test_what_is_wrong_in_the_middle_comes_out_there(self, local_store):
        class Broken(Streamed):
            def stream(self, part, rows):
                yield X, Y
                raise KeyError("mine")

        bits = local_store(Broken((X, Y))).stream("train", 0, 5, 1)

        assert len(next(bits)) == 2
        with pytest.raises(KeyError, match="mine"):
            next(bits)

    def test_no_more_is_read_once_nobody_goes_on(self, local_store):
        asked, held = [], threading.Event()

        class Endless(Streamed):
            def stream(self, part, rows):
                for number in range(100):
                    asked.append(number)
                    if number == 1:
                        assert held.wait(PATIENCE_S)
                    yield X, Y

        bits = local_store(Endless((X, Y))).stream("train", 0, 5, 8)
        next(bits)
        bits.close()
        held.set()
        for thread in threading.enumerate():
            if thread.name == "daskdl-stream":
                thread.join(PATIENCE_S)

        assert asked == [0, 1]
