"""Every kind of data trains the same model to the same weights, bit for bit."""

import io
import os
import threading
import uuid
from pathlib import Path

import dask.bag as db
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from daskdl import data, predict
from daskdl.data.storage import Store
from tests.support.kinds import KINDS, ROWS, Given, Joining, Where, X, Y, save_npz
from tests.support.problems import kept, plain, trainer
from tests.support.recording import vector

# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def fitted(client, dataset):
    fitted = trainer(
        client,
        model=Joining,
        loss=dataset.loss,
        optimizer=plain,
        master=kept(max_staleness=0),
    )
    fitted.fit(
        dataset.x,
        dataset.y,
        epochs=2,
        batch_size=8,
        shuffle=False,
        **dataset.options,
        **dataset.fit,
    )
    return fitted


@pytest.fixture(scope="module")
def reference(shared_client):
    """A trainer that was given numpy's arrays."""
    return fitted(shared_client, Given(X, Y))


def computed(client, outputs):
    """What `predict` returned as one array."""
    if isinstance(outputs, list):
        return np.concatenate(client.gather(client.compute(outputs)))
    if isinstance(outputs, np.ndarray | torch.Tensor | pd.DataFrame):
        return np.asarray(outputs)
    whole = client.compute(outputs).result()
    return np.stack(whole) if isinstance(outputs, db.Bag) else np.asarray(whole)


# One of each way to the workers; the others come with all tests.
FEW = {
    "numpy",
    "lazy array",
    "persisted array",
    "xarray beside pandas",
    "dask.dataframe",
    "dask.bag",
    "delayed",
    "futures",
    "Dataset",
    ".npz",
    "packed rows",
    "packed files",
    "images",
}


def some_slow(kind):
    return pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow)


@pytest.mark.parametrize("kind", [some_slow(kind) for kind in KINDS])
def test_all_train_score_and_predict_alike(forgetful, reference, tmp_path, kind):
    dataset = KINDS[kind](Where(forgetful, tmp_path))

    trained = fitted(forgetful, dataset)
    score = trained.evaluate(dataset.x, dataset.y, batch_size=8, **dataset.options)
    outputs = trained.predict(dataset.x, batch_size=8, **dataset.options)

    assert torch.equal(vector(trained.model_), vector(reference.model_))
    assert trained.history_.column("examples") == [ROWS, ROWS]
    assert trained.history_.column("replicas") == [2, 2]
    assert trained.history_.column("loss") == reference.history_.column("loss")
    expected = reference.evaluate(X, Y, batch_size=8)
    assert score == pytest.approx({name: expected[name] for name in score}, rel=1e-6)
    assert isinstance(outputs, dataset.output_type)
    np.testing.assert_allclose(
        computed(forgetful, outputs), reference.predict(X), **CLOSE
    )


def test_the_reference_depends_on_its_rows(client, reference):
    """Or else all kinds would be alike whatever they held."""
    trained = fitted(client, Given(X[::-1].copy(), Y[::-1].copy()))

    assert not torch.equal(vector(trained.model_), vector(reference.model_))


@pytest.mark.parametrize("packed", [False, True], ids=["files", "packed rows"])
def test_files_in_memory_where_the_workers_are_threads(threads, reference, packed):
    store = Store(f"memory://kinds-{uuid.uuid4().hex}")
    for number in range(3):
        rows = slice(30 * number, 30 * number + 30)
        file = io.BytesIO()
        save_npz(file, X[rows], Y[rows])
        store.write(f"{number}.npz", file.getvalue())
    url = store.url
    if packed:
        url = f"memory://kinds-{uuid.uuid4().hex}"
        loose = data.files(store.url)
        data.pack(loose, url=url, per_file=8, shuffle=False, client=threads)

    trained = fitted(threads, Given(url))

    assert torch.equal(vector(trained.model_), vector(reference.model_))


class Numbers(IterableDataset):
    """Row numbers as x and y, split as torch's documentation says."""

    def __iter__(self):
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(number, ROWS, workers):
            yield np.full(4, i, np.float32), np.float32(i)


def numbers(shard, shards):
    for i in range(shard, ROWS, shards):
        yield np.full(4, i, np.float32), np.float32(i)


STREAMS = {
    "IterableDataset": Numbers,
    "Stream": lambda: data.Stream(numbers),
    "three shards": lambda: data.Stream(numbers, 3),
}


class Noting:
    """A loss that writes down which rows it gets on workers."""

    def __init__(self, folder):
        self._folder = str(folder)
        self._home = os.getpid()

    def __call__(self, output, labels):
        if os.getpid() != self._home:  # where the first rows are rehearsed
            path = Path(self._folder, f"{os.getpid()}-{threading.get_ident()}")
            with path.open("a") as file:
                file.writelines(f"{int(number)}\n" for number in labels)
        return labels.mean() + 0 * output.sum()

    def rows(self):
        """In any order; then all is forgotten."""
        paths = list(Path(self._folder).iterdir())
        rows = [int(line) for path in paths for line in path.read_text().split()]
        for path in paths:
            path.unlink()
        return sorted(rows)


@pytest.mark.parametrize("kind", STREAMS)
def test_of_streams_each_row_is_used_once_and_outputs_have_its_order(
    client, tmp_path, kind
):
    noting = Noting(tmp_path)
    fitted = trainer(client, model=Joining, loss=noting, optimizer=plain)

    history = fitted.fit(STREAMS[kind](), epochs=2, batch_size=8)
    trained = noting.rows()
    score = fitted.evaluate(STREAMS[kind](), batch_size=8)
    scored = noting.rows()
    fitted.model_ = nn.Identity()
    outputs = fitted.predict(STREAMS[kind](), batch_size=8)
    alone = predict(nn.Identity(), STREAMS[kind](), client=False)

    assert trained == sorted([*range(ROWS), *range(ROWS)])
    assert history.column("examples") == [ROWS, ROWS]
    assert history.column("replicas") == [2, 2]
    assert scored == list(range(ROWS))
    assert score == {"loss": pytest.approx(np.arange(ROWS).mean())}
    assert sorted(outputs[:, 0]) == list(range(ROWS))
    np.testing.assert_array_equal(outputs, alone)
