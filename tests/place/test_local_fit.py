"""`Trainer(client=False)`: what is as on a cluster, and what is there for it."""

import contextlib
import threading

import dask
import dask.array as da
import distributed
import pytest
import torch
from distributed.utils_test import poll_for
from tqdm.auto import tqdm

from daskdl import Callback, FailureInjection, OptionError, ReplicaError
from daskdl.history import COLUMNS
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Notes

X, Y = rows()
TWO = kept(replicas_per_worker=2)
BLOCKS = da.from_array(X, chunks=(50, 20)), da.from_array(Y, chunks=50)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Nobody may start one, or even a connection."""

    def refuse(self, *args, **options):
        raise AssertionError("there is to be no cluster")

    for kind in (distributed.Client, distributed.LocalCluster, distributed.Scheduler):
        monkeypatch.setattr(kind, "__init__", refuse)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Threads, torch's settings and torch's random state are as they were."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of the bar's own
    former = torch.get_num_threads()
    threads, state = set(threading.enumerate()), torch.get_rng_state()
    yield
    # One that was told to end may still be about to.
    poll_for(lambda: set(threading.enumerate()) <= threads, timeout=30)
    assert torch.get_num_threads() == former
    assert torch.equal(torch.get_rng_state(), state)


class TestHistory:
    def test_it_has_all_columns_and_the_loss_falls(self):
        own = trainer(False, master=TWO)

        history = own.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))

        assert history[0].keys() == {*COLUMNS, "val_loss", "val_accuracy"}
        assert history.column("replicas") == [2] * 4
        assert history.column("examples") == [480] * 4
        assert history[-1]["loss"] < history[0]["loss"] / 2
        assert history[-1]["val_accuracy"] > 0.9
        assert history[0]["received_bytes"] == history[0]["sent_bytes"] > 0
        assert own.history_ is history


class Threads(Callback):
    """Notes where it is called."""

    epochs = ()

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, step):
        name = threading.current_thread().name
        (self.folder / f"{step.replica}").write_text(name)

    def on_epoch_end(self, row):
        self.epochs = (*self.epochs, threading.current_thread())


class TestCallbacks:
    def test_torchs_threads_are_shared_out(self, tmp_path):
        notes = Notes(tmp_path)
        former = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            trainer(False, master=TWO, callbacks=[notes]).fit(X, Y)
            inside = {line["threads"] for line in notes.read()}

            assert inside == {2}
            assert torch.get_num_threads() == 4
        finally:
            torch.set_num_threads(former)


class TestData:
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_each_block_is_computed_once_in_each_epoch(self, prefetch):
        computed = []

        def noting(block, block_info):
            computed.append(block_info[None]["chunk-location"][0])
            return block

        x = BLOCKS[0].map_blocks(noting, dtype=X.dtype)
        one = kept(replicas_per_worker=1)
        history = trainer(False, master=one).fit(
            x, BLOCKS[1], epochs=2, prefetch=prefetch
        )

        assert history.column("examples") == [480, 480]
        assert sorted(computed[:10]) == sorted(computed[10:]) == list(range(10))

    def test_blocks_are_computed_beside_the_replicas(self):
        threads = []

        def noting(block):
            threads.append(threading.current_thread().name)
            return block

        x = BLOCKS[0].map_blocks(noting, dtype=X.dtype, meta=X)
        history = trainer(False, master=TWO).fit(x, BLOCKS[1], epochs=2)

        assert history.column("examples") == [480, 480]
        # At the end of an epoch one may be shared, and is then computed twice.
        assert len(threads) >= 2 * 10
        assert set(threads) == {"daskdl-loader"}

    def test_others_have_patience_with_one_that_computes_a_block(self):
        gate = threading.Event()

        def slow(block, block_info):
            if block_info[None]["chunk-location"][0] == 1:
                gate.wait(2.0)  # nobody sets it: longer than silence and request
            return block

        x = BLOCKS[0].map_blocks(slow, dtype=X.dtype)
        bounds = {"daskdl.timeouts.silence": "0.5s", "daskdl.timeouts.request": "0.5s"}

        with dask.config.set(bounds):
            master = kept(replicas_per_worker=2, max_staleness=1)
            history = trainer(False, master=master).fit(x, BLOCKS[1], batch_size=10)

        assert history.column("examples") == [480]
        assert history[0]["waits"]["staleness"] > 0.5


@pytest.fixture(scope="module")
def fitted():
    own = trainer(False, master=TWO)
    own.fit(X, Y, epochs=4, batch_size=16)
    return own


class TestOptions:
    @pytest.mark.parametrize("routing", ["auto", "plain", "mesh"])
    def test_any_routing_will_do(self, routing):
        master = kept(replicas_per_worker=2, routing=routing)

        assert trainer(False, master=master).fit(X, Y).column("replicas") == [2]

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("drop", r"replica \d on this machine: .* no update can get lost"),
            ("exit", r"kind='exit' would hit the client's own process"),
            ("freeze", r"kind='freeze' would hit the client's own process"),
        ],
    )
    def test_failures_that_cannot_be_here_are_refused(self, kind, message):
        own = trainer(False, master=TWO, callbacks=[FailureInjection(kind)])

        with pytest.raises(OptionError, match=message):
            own.fit(X, Y)

    @pytest.mark.parametrize(
        ("failure", "expected"),
        [
            (FailureInjection("raise", replicas=[1], steps=[3]), ReplicaError),
            (FailureInjection("sleep", seconds=0.01, times=2), None),
        ],
        ids=["raise", "sleep"],
    )
    def test_others_happen(self, failure, expected):
        own = trainer(False, master=TWO, callbacks=[failure])

        with pytest.raises(expected) if expected else contextlib.nullcontext():
            own.fit(X, Y, batch_size=16)
