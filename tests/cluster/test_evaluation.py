"""Evaluation over workers: uneven and empty partitions, and one whose worker dies."""

import functools
import itertools
import os

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn
from torchmetrics.classification import MulticlassAUROC

import daskdl
from tests.support.clusters import still_left_behind
from tests.support.recording import MeetInPass

GENERATOR = np.random.default_rng(0)
ROWS = 1000
X = GENERATOR.normal(size=(ROWS, 4)).astype(np.float32)
Y = np.sort(GENERATOR.integers(0, 3, ROWS))
SIZES = (7, 0, 500, 1, 0, 492)  # of partitions; most have one class


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()


@pytest.fixture
def scores(model):
    with torch.no_grad():
        return model(torch.from_numpy(X)).double().softmax(1).numpy()


def check(values, scores):
    """It is scikit-learn's, of the whole."""
    chosen = scores.argmax(1)
    expected = sklearn_metrics.confusion_matrix(Y, chosen)
    assert values["confusion_matrix"].tolist() == expected.tolist()
    numbers = {
        "loss": sklearn_metrics.log_loss(Y, scores),
        "accuracy": sklearn_metrics.accuracy_score(Y, chosen),
        "f1": sklearn_metrics.f1_score(Y, chosen, average="macro"),
        "mcc": sklearn_metrics.matthews_corrcoef(Y, chosen),
        "roc_auc": sklearn_metrics.roc_auc_score(Y, scores, multi_class="ovr"),
        "MulticlassAUROC": sklearn_metrics.roc_auc_score(Y, scores, multi_class="ovr"),
    }
    assert {name: values[name] for name in numbers} == pytest.approx(numbers, rel=1e-6)


def measured(model, client, *data):
    return daskdl.evaluate(
        model,
        *data,
        loss=nn.CrossEntropyLoss(),
        metrics=["classification", MulticlassAUROC(3)],
        client=client,
        batch_size=64,
    )


def partitions(load):
    """A bag of these sizes; each partition is made by a task of its own."""
    edges = np.cumsum([0, *SIZES])
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return db.from_delayed(
        [dask.delayed(load)(n, span) for n, span in enumerate(spans)]
    )


def loaded(number, span):
    return list(zip(X[span], Y[span], strict=True))


def test_uneven_and_empty_partitions_are_the_whole(client, model, scores):
    values = measured(model, client, partitions(loaded))

    check(values, scores)
    assert still_left_behind(client) == {}


def lost_once(flag, number, span):
    """The first to load the large partition ends its worker."""
    if number == 2 and not os.path.exists(flag):
        with open(flag, "w"):
            pass
        os._exit(1)
    return loaded(number, span)


@pytest.mark.slow
def test_a_worker_that_dies_on_a_part_changes_nothing(three, model, scores, tmp_path):
    flag = str(tmp_path / "died")
    bag = partitions(functools.partial(lost_once, flag))

    values = measured(model, three, bag)

    check(values, scores)
    assert os.path.exists(flag)


@pytest.mark.parametrize("chunk", [None, 97], ids=["numpy", "dask"])
def test_every_worker_does_a_part_and_nothing_stays(client, model, chunk, tmp_path):
    data = (
        (X, Y) if chunk is None else (da.from_array(X, (97, 4)), da.from_array(Y, 90))
    )
    model = model.train().bfloat16()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"loss": nn.CrossEntropyLoss(), "batch_size": 4}

    meeting = MeetInPass(tmp_path, 2)
    values = daskdl.evaluate(model, *data, client=client, transform=meeting, **options)

    assert len(list(tmp_path.iterdir())) == 2
    assert still_left_behind(client) == {}
    # Batches may be rounded otherwise, and bfloat16 has 8 bits.
    here = daskdl.evaluate(model, X, Y, client=False, **options)
    assert values == pytest.approx(here, rel=2e-2)
    assert model.training
    assert all(torch.equal(state[n], value) for n, value in model.state_dict().items())


def test_metrics_of_validation_data_are_those_of_all_workers(client):
    trainer = daskdl.Trainer(
        lambda: nn.Linear(4, 3),
        "cross_entropy",
        "sgd",
        metrics=["f1", "roc_auc", sklearn_metrics.cohen_kappa_score],
        callbacks=[daskdl.EarlyStopping("val_roc_auc", mode="max", target=0.0)],
        client=client,
    )
    data = da.from_array(X, (97, 4)), da.from_array(Y, 97)

    history = trainer.fit(*data, epochs=2, validation=data)

    assert history.stopping.reason == "target"
    (row,) = history
    values = trainer.evaluate(*data)
    names = "accuracy", "f1", "roc_auc", "cohen_kappa_score"
    values["accuracy"] = trainer.score(*data)
    expected = {f"val_{name}": values[name] for name in names}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
