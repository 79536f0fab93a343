"""Predictions that a cluster computes: what only it can show."""

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import get_task_stream
from torch import nn

import daskdl
from daskdl.errors import ModelError
from tests.support.clusters import still_left_behind

ROWS = 53
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.Dropout(0.5))


@pytest.fixture
def expected(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(X)).numpy()


@pytest.mark.parametrize("batch_size", [1, 100])
def test_numpy_gets_numpy_and_nothing_is_left_behind(
    client, model, expected, batch_size
):
    output = daskdl.predict(model, X, client=client, batch_size=batch_size)

    assert type(output) is np.ndarray
    np.testing.assert_allclose(output, expected, **CLOSE)
    assert still_left_behind(client) == {}


def test_a_dask_array_stays_lazy(client, model, expected):
    x = da.from_array(X, chunks=((20, 0, 33), 4))
    output = daskdl.predict(model, x, client=client, batch_size=6)
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))

    assert output.chunks == ((20, 0, 33), (3,))
    assert all(str(key).startswith("daskdl-model-") for key in keys)
    whole, sums = client.gather(client.compute([output, output[-3:].sum(axis=1)]))
    np.testing.assert_allclose(whole, expected, **CLOSE)
    np.testing.assert_allclose(sums, expected[-3:].sum(1), **CLOSE)


def test_a_large_model_gives_no_warning_about_a_large_graph(client):
    model = nn.Linear(4, 800_000, bias=False)  # 12.8 MB; Dask warns at 10 MB

    output = daskdl.predict(model, da.from_array(X[:4], chunks=(2, 4)), client=client)

    assert client.compute(output[:, :2]).result().shape == (4, 2)


def test_workers_that_are_threads_leave_the_rows_alone(threads, model, expected):
    before = X.copy()

    output = daskdl.predict(model, da.from_array(X, chunks=(30, 4)), client=threads)
    small = daskdl.predict(model, X, client=threads)

    np.testing.assert_allclose(threads.compute(output).result(), expected, **CLOSE)
    np.testing.assert_allclose(small, expected, **CLOSE)
    np.testing.assert_array_equal(X, before)


def test_an_error_on_a_worker_leaves_nothing_behind(client):
    class Growing(nn.Module):
        def forward(self, x):
            return x[:, : int(x[0, 0]) + 1]

    rows = np.zeros((4, 4))
    rows[2] = 2

    with pytest.raises(ModelError, match=r"gave the shape \(1, 3\) for 1 rows, after"):
        daskdl.predict(Growing(), rows, client=client, batch_size=1)
    assert still_left_behind(client) == {}


def test_rows_in_memory_travel_in_a_few_parts_for_each_thread(client):
    """Each costs as much as many a row: what it takes does not depend on its size."""
    rows = np.random.default_rng(0).random((640, 3), np.float32)

    with get_task_stream(client) as stream:
        outputs = daskdl.predict(nn.Identity(), rows, client=client, batch_size=2)

    np.testing.assert_array_equal(outputs, rows)
    threads = sum(client.nthreads().values())
    assert threads < len(stream.data) <= 4 * threads
