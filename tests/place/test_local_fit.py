"""`Trainer(client=False)`: threads of this process, without a cluster."""

import threading

import dask
import dask.array as da
import distributed
import pytest
import torch
from distributed.utils_test import poll_for
from tqdm.auto import tqdm

from daskdl import OptionError, Trainer
from daskdl.observe.history import COLUMNS
from tests.support.problems import kept, mlp, rows, sgd, trainer
from tests.support.recording import Notes, vector

X, Y = rows()
TWO = kept(replicas_per_worker=2)
BLOCKS = da.from_array(X, chunks=(50, 20)), da.from_array(Y, chunks=50)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Refuse clusters and clients."""

    def refuse(self, *args, **options):
        raise AssertionError("there is to be no cluster")

    for kind in (distributed.Client, distributed.LocalCluster, distributed.Scheduler):
        monkeypatch.setattr(kind, "__init__", refuse)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Check that threads, torch's settings and random state are restored."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of the bar's own
    former = torch.get_num_threads()
    threads, state = set(threading.enumerate()), torch.get_rng_state()
    yield
    # One that was told to end may still be about to.
    poll_for(lambda: set(threading.enumerate()) <= threads, timeout=30)
    assert torch.get_num_threads() == former
    assert torch.equal(torch.get_rng_state(), state)


def test_the_history_has_all_columns_and_the_loss_falls():
    fitted = trainer(False, master=TWO)

    history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))

    assert history[0].keys() == {*COLUMNS, "val_loss", "val_accuracy"}
    assert history.column("replicas") == [2] * 4
    assert history.column("examples") == [480] * 4
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["val_accuracy"] > 0.9
    assert history[0]["received_bytes"] == history[0]["sent_bytes"] > 0
    assert fitted.history_ is history


@pytest.mark.parametrize("model", [mlp, mlp()])
def test_a_trainer_that_is_reset_begins_as_it_first_did(one_thread, model):
    fitted = trainer(False, model=model)
    fitted.fit(X, Y)
    first = vector(fitted.model_)
    fitted.fit(X, Y)
    assert not torch.equal(vector(fitted.model_), first)

    fitted.reset()

    names = ("model_", "optimizer_", "scheduler_", "history_")
    assert not any(hasattr(fitted, name) for name in names)
    fitted.fit(X, Y)
    assert torch.equal(vector(fitted.model_), first)


MODES = []


def noting_step(model, batch):
    MODES.append(all(module.training for module in model.modules()))
    return model(batch[0]).square().mean()


def test_the_model_comes_back_in_evaluation_mode():
    MODES.clear()
    fitted = trainer(False, loss=None, step=noting_step)

    for _ in range(2):
        fitted.fit(X, Y, batch_size=240)
        assert not any(module.training for module in fitted.model_.modules())
    assert MODES == [False, False, True, True] * 2


def test_replicas_share_the_threads_of_torch(tmp_path):
    notes = Notes(tmp_path)
    former = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        trainer(False, master=TWO, callbacks=[notes]).fit(X, Y)

        assert {line["threads"] for line in notes.read()} == {2}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(former)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_block_is_computed_once_in_each_epoch_beside_the_replica(prefetch):
    computed = []

    def noting(block, block_info):
        number = block_info[None]["chunk-location"][0]
        computed.append((threading.current_thread().name, number))
        return block

    x = BLOCKS[0].map_blocks(noting, dtype=X.dtype)
    single = kept(replicas_per_worker=1)
    history = trainer(False, master=single).fit(
        x, BLOCKS[1], epochs=2, prefetch=prefetch
    )

    assert history.column("examples") == [480, 480]
    expected = [("daskdl-loader", number) for number in range(10)]
    assert sorted(computed[:10]) == sorted(computed[10:]) == expected


def test_a_replica_that_computes_a_block_is_not_given_up():
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


@pytest.mark.parametrize("approach", ["direct", "export"])
def test_a_wrong_configuration_is_refused_before_the_data_are_read(approach):
    read = []

    def note(block):
        read.append(len(block))
        return block

    x = BLOCKS[0].map_blocks(note, dtype=X.dtype, meta=X[:0])

    with (
        dask.config.set({"daskdl.silence": "5s"}),
        pytest.raises(OptionError, match=r"mean daskdl\.timeouts\.silence"),
    ):
        trainer(False).fit(x, BLOCKS[1], approach=approach)

    assert read == []


def test_labels_are_checked_after_the_transform():
    shifted = (X, Y + 9)
    fitted = trainer(False, transform=lambda batch: (batch[0], batch[1] - 9))

    history = fitted.fit(*shifted, validation=shifted)

    assert history.column("examples") == [len(X)]
    assert 0 < history[0]["val_accuracy"] <= 1


def test_a_trainer_that_was_made_for_cuda_still_evaluates(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fitted = trainer(False)
    fitted.fit(X, Y)
    fitted.device = "cuda"
    fitted.save(tmp_path)

    loaded = Trainer.load(tmp_path, client=False, model=mlp, optimizer=sgd)

    assert loaded.evaluate(X, Y)["accuracy"] == fitted.evaluate(X, Y)["accuracy"]
