"""Bad input is refused by name, with the remedy, before any worker is touched."""

import asyncio
import threading

import dask.array as da
import dask.config
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl
from daskdl import (
    Callback,
    DataError,
    GradientSharing,
    ModelError,
    OptionError,
    Trainer,
)
from daskdl.channel.scheduler import NAME
from tests.cluster.problems import mlp, rows, sgd

X, Y = rows(64)


@pytest.fixture(scope="module")
def idle():
    """A cluster that must never be asked for anything."""
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def untouched(idle):
    yield idle
    scheduler = idle.cluster.scheduler
    assert scheduler.transition_counter == 0
    assert NAME not in scheduler.extensions
    assert NAME not in scheduler.worker_plugins


def trainer(client, **options):
    options = {"model": mlp, "optimizer": sgd, "progress": False, **options}
    options = {"loss": nn.CrossEntropyLoss(), **options}
    return Trainer(client=client, **options)


def changed(array, position, value):
    array = array.copy()
    array[position] = value
    return array


BLOCKS = da.from_array(X, chunks=(16, 20))
TARGETS = changed(Y.astype(np.float32)[:, None], 2, np.nan)

DATA = {
    "lengths": (X[:-1], Y, {}, "X and y must have the same length, got 63 and 64"),
    "empty": (X[:0], Y[:0], {}, r"X must not be empty, got the shape \(0, 20\)"),
    "a list": (X.tolist(), Y, {}, r"X must be a .* got a list; convert it with"),
    "no label": (X, None, {}, "y must be a .* got a NoneType"),
    "too large": (X, changed(Y, 3, 4), {}, r"y\[3\] is 4, .* must be in \[0, 4\)"),
    "negative": (X, changed(Y, 5, -1), {}, r"y\[5\] is -1, .* must be in \[0, 4\)"),
    "nan": (X, TARGETS, {}, r"y\[2, 0\] is nan; remove such examples"),
    "kept apart": (BLOCKS, Y, {}, "X is a dask.array and y is in memory; use "),
    "unknown": (
        BLOCKS[BLOCKS[:, 0] > 0],
        da.from_array(Y, chunks=16),
        {},
        r"X has chunks of unknown size; call X.compute_chunk_sizes\(\)",
    ),
    "validation lengths": (
        X,
        Y,
        {"validation": (X, Y[:-1])},
        "validation: X and y must have the same length, got 64 and 63",
    ),
    "validation label": (
        X,
        Y,
        {"validation": (X, changed(Y, 7, 9))},
        r"validation: y\[7\] is 9, but the model gives 4 outputs",
    ),
}


@pytest.mark.parametrize(("x", "y", "options", "message"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_trained_on(untouched, x, y, options, message):
    with pytest.raises(DataError, match=message):
        trainer(untouched).fit(x, y, **options)


class Locked(nn.Sequential):
    """It holds what cannot be pickled."""

    def __init__(self):
        super().__init__(nn.Linear(20, 4))
        self.lock = threading.Lock()


class LockedCallback(Callback):
    def __init__(self):
        self.lock = threading.Lock()

    def on_step(self, step):
        """It would have to travel."""


def locked_loss():
    loss = nn.CrossEntropyLoss()
    loss.lock = threading.Lock()
    return loss


def frozen():
    return mlp().requires_grad_(False)


def on_other_parameters(_):
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


MODELS = {
    "nothing to train": (
        {"model": frozen},
        "model has no trainable parameters: Sequential has none with requires_grad",
    ),
    "no module": (
        {"model": 3},
        "model must be a torch.nn.Module or a function that returns one, got 3",
    ),
    "a function of nothing": (
        {"model": lambda: None},
        "model must be a torch.nn.Module or a function that returns one, got None",
    ),
    "not seen yet": (
        {"model": nn.LazyLinear(4)},
        "the shape of model.weight is not known yet; run the model on one batch",
    ),
    "too narrow": (
        {"model": nn.Linear(7, 4)},
        r"model failed on 2 rows of X, shape \(2, 20\)",
    ),
    "locked, built": ({"model": Locked()}, r"model\.lock \(a _thread\.lock\) cannot"),
    "locked, made": ({"model": Locked}, r"model\.lock \(a _thread\.lock\) cannot"),
    "a loss for each row": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        r"loss must return one floating number .* got shape \(2,\).* take the mean",
    ),
    "a class of losses": (
        {"loss": nn.CrossEntropyLoss},
        r"loss is the class CrossEntropyLoss; create one, CrossEntropyLoss\(\)",
    ),
    "locked loss": ({"loss": locked_loss()}, r"loss\.lock \(a _thread\.lock\) cannot"),
    "no optimizer": (
        {"optimizer": "adam"},
        "optimizer must be a function that makes one .*; got 'adam'",
    ),
    "an optimizer": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)},
        "optimizer must be a function that makes one from parameters",
    ),
    "optimizer of nothing": (
        {"optimizer": lambda params: None},
        "optimizer must return a torch.optim.Optimizer, got None",
    ),
    "optimizer of another model": (
        {"optimizer": on_other_parameters},
        "optimizer works on parameters it was not given",
    ),
    "locked callback": (
        {"callbacks": [LockedCallback()]},
        r"trainer\.callbacks\[0\]\.lock \(a _thread\.lock\) cannot be pickled",
    ),
}


@pytest.mark.parametrize(("options", "message"), MODELS.values(), ids=MODELS)
def test_a_model_loss_or_optimizer_that_cannot_be_used(untouched, options, message):
    with pytest.raises(ModelError, match=message):
        trainer(untouched, **options).fit(X, Y)


def test_validation_data_that_the_model_does_not_fit(untouched):
    with pytest.raises(ModelError, match="validation: model failed on 2 rows of X"):
        trainer(untouched).fit(X, Y, validation=(X[:, :3], Y))


FIT_OPTIONS = {
    "no epoch": ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
    "half epochs": ({"epochs": 1.5}, "epochs must be a whole number >= 1, got 1.5"),
    "true epochs": ({"epochs": True}, "epochs must be a whole number >= 1, got True"),
    "no row": ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
    "shuffle": ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    "validation": (
        {"validation": X},
        r"validation must be a tuple \(X, y\), got a ndarray",
    ),
}


@pytest.mark.parametrize(("options", "message"), FIT_OPTIONS.values(), ids=FIT_OPTIONS)
def test_options_of_a_fit(untouched, options, message):
    with pytest.raises(OptionError, match=message):
        trainer(untouched).fit(X, Y, **options)


TRAINER_OPTIONS = {
    "master": ({"master": "mean"}, "master must be a daskdl.TrainingMaster, got 'mean"),
    "class": ({"master": GradientSharing}, "master must be a daskdl.TrainingMaster"),
    "seed -1": ({"seed": -1}, r"seed must be a whole number in \[0, 2\*\*63\), got -1"),
    "large": (
        {"seed": 2**63},
        "seed must be a whole number in .* got 9223372036854775",
    ),
    "seed text": ({"seed": "0"}, "seed must be a whole number in .* got '0'"),
    "seed true": ({"seed": True}, "seed must be a whole number in .* got True"),
    "device": ({"device": "quantum"}, "device must be 'auto' or .* got 'quantum'"),
    "number": ({"device": 0}, "device must be 'auto' or a torch device, got 0"),
    "progress": ({"progress": "yes"}, "progress must be True, False or None, got 'yes"),
    "one": ({"callbacks": Callback()}, "callbacks must be a list of daskdl.Callback"),
    "print": ({"callbacks": [print]}, "callbacks must be daskdl.Callback, got <built"),
}


@pytest.mark.parametrize(
    ("options", "message"), TRAINER_OPTIONS.values(), ids=TRAINER_OPTIONS
)
def test_options_of_a_trainer(untouched, options, message):
    with pytest.raises(OptionError, match=message):
        trainer(untouched, **options)


def test_a_time_out_that_is_no_time(untouched):
    with (
        dask.config.set({"daskdl.timeouts.silence": "soon"}),
        pytest.raises(OptionError, match=r"daskdl\.timeouts\.silence must .* 'soon'"),
    ):
        trainer(untouched).fit(X, Y)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_what_is_not_trained_yet_cannot_be_used(untouched, method):
    arguments = (X, Y) if method == "evaluate" else (X,)

    with pytest.raises(OptionError, match="has no model_ yet; call fit first"):
        getattr(trainer(untouched), method)(*arguments)


class TestClient:
    def test_text_is_refused(self):
        with pytest.raises(OptionError, match="client must be a distributed"):
            trainer("tcp://127.0.0.1:8786").fit(X, Y)

    def test_a_closed_one_is_refused(self, idle):
        with Client(idle.cluster, set_as_default=False) as closed:
            pass

        with pytest.raises(OptionError, match=r"and running, .* 'closed'"):
            trainer(closed).fit(X, Y)

    def test_an_asynchronous_one_is_refused(self, untouched):
        async def fit():
            async with Client(
                untouched.cluster.scheduler_address,
                asynchronous=True,
                set_as_default=False,
            ) as client:
                trainer(client).fit(X, Y)

        with pytest.raises(OptionError, match="asynchronous=True; use Client"):
            asyncio.run(fit())

    def test_a_cluster_without_workers_is_refused(self):
        with (
            LocalCluster(
                n_workers=0, processes=False, dashboard_address=":0"
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
            pytest.raises(OptionError, match="has no workers; wait for some with"),
        ):
            trainer(client).fit(X, Y)

    def test_a_lazy_prediction_needs_a_cluster_that_stays(self, monkeypatch):
        def none():
            raise ValueError

        monkeypatch.setattr("daskdl.cluster.default_client", none)
        own = trainer(None)
        own.model_ = mlp()

        with pytest.raises(OptionError, match="client must be given to predict on a"):
            own.predict(BLOCKS)


class TestOnWorkers:
    """What only a worker can see: the content of blocks that no client has loaded."""

    def test_a_wrong_label_in_a_block_is_named(self, client):
        y = changed(Y, 37, 9)

        with pytest.raises(DataError) as caught:
            trainer(client).fit(BLOCKS, da.from_array(y, chunks=16))

        assert "y of piece 2 of the train data[5] is 9" in str(caught.value)
        assert "labels must be in [0, 4)" in str(caught.value)
        assert any(worker in str(caught.value) for worker in client.nthreads())

    def test_a_wrong_label_in_a_block_of_validation_data_is_named(self, client):
        wrong = (BLOCKS, da.from_array(changed(Y, 20, -3), chunks=16))

        with pytest.raises(
            DataError, match=r"y of piece 1 of the validation data\[4\] is -3"
        ):
            trainer(client).fit(X, Y, validation=wrong)

    def test_a_missing_target_in_a_block_is_named(self, client):
        targets = changed(X[:, :1], 50, np.nan)
        own = trainer(client, model=nn.Linear(20, 1), loss=nn.MSELoss())

        with pytest.raises(daskdl.DaskDLError, match=r"y of piece 3\[2, 0\] is nan"):
            own.fit(BLOCKS, da.from_array(targets, chunks=(16, 1)))
