import dask.array as da
import numpy as np
import pytest
import torch
from distributed import get_task_stream
from torch import nn

from daskdl.data.inputs import ReadOptions
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.inference.predict import predict as predict_with
from tests.support.clusters import still_left_behind

ROWS = 53
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def predict(model, X, client, batch_size=64):
    """As a trainer does it."""
    return predict_with(model, X, ReadOptions(batch_size), client)


@pytest.fixture
def model():
    """Sensitive to its mode: dropout and batch norm; and works in place first."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    ).train()


@pytest.fixture
def expected(model):
    with torch.no_grad():
        output = model.eval()(torch.tensor(X))
    model.train()
    return output.numpy()


# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def tasks(client):
    """What the scheduler knows of."""
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    return [str(key) for key in keys]


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_numpy_in_numpy_out(client, model, expected, batch_size):
    before = X.copy()

    output = predict(model, X, client, batch_size=batch_size)

    assert type(output) is np.ndarray
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, expected, **CLOSE)
    np.testing.assert_array_equal(X, before)
    assert still_left_behind(client) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_in_torch_out(client, model, expected, dtype):
    output = predict(model.to(dtype), torch.from_numpy(X), client)

    assert output.dtype == dtype
    assert not output.requires_grad
    tolerance = CLOSE if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    np.testing.assert_allclose(output.float().numpy(), expected, **tolerance)


def test_a_dask_array_stays_lazy(client, model, expected):
    x = da.from_array(X, chunks=((20, 0, 33), 4))
    output = predict(model, x, client, batch_size=6)

    assert isinstance(output, da.Array)
    assert output.chunks == ((20, 0, 33), (3,))
    assert output.dtype == np.float32
    assert type(output._meta) is np.ndarray
    assert all(key.startswith("daskdl-model-") for key in tasks(client))
    whole, sums = client.gather(client.compute([output, output[-3:].sum(axis=1)]))
    np.testing.assert_allclose(whole, expected, **CLOSE)
    np.testing.assert_allclose(sums, expected[-3:].sum(1), **CLOSE)


def test_a_large_model_gives_no_warning_about_a_large_graph(client):
    model = nn.Linear(4, 800_000, bias=False)  # 12.8 MB; Dask warns at 10 MB

    output = predict(model, da.from_array(X[:4], chunks=(2, 4)), client)

    assert client.compute(output[:, :2]).result().shape == (4, 2)


def test_it_is_computed_by_the_client_that_was_given(threads, model, expected):
    before = X.copy()

    output = predict(model, da.from_array(X, chunks=(30, 4)), threads)
    small = predict(model, X, threads)

    np.testing.assert_allclose(threads.compute(output).result(), expected, **CLOSE)
    np.testing.assert_allclose(small, expected, **CLOSE)
    # Workers that are threads of this process see the array itself.
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Flatten(0), None), (nn.Unflatten(1, (2, 2)), (2, 2)), (nn.Identity(), (4,))],
    ids=["one long row", "more axes", "the same"],
)
def test_outputs_may_have_any_shape_with_a_row_per_example(client, module, shape):
    if shape is None:
        with pytest.raises(ModelError, match=r"one row per example .* \(8,\) for two"):
            predict(module, X, client)
        return

    output = predict(module, da.from_array(X, chunks=(30, 4)), client)

    computed = client.compute(output).result()
    assert output.shape == (ROWS, *shape)
    np.testing.assert_array_equal(computed, X.reshape(ROWS, *shape))


def test_integer_outputs_and_inputs_keep_their_dtype(client):
    indices = np.arange(12).reshape(4, 3)

    output = predict(nn.Identity(), indices, client)

    assert output.dtype == np.int64
    np.testing.assert_array_equal(output, indices)


def test_a_model_whose_outputs_change_their_form_is_refused(client):
    class Growing(nn.Module):
        def forward(self, x):
            return x[:, : int(x[0, 0]) + 1]

    rows = np.zeros((4, 4))
    rows[2] = 2

    with pytest.raises(ModelError, match=r"gave the shape \(1, 3\) for 1 rows, after"):
        predict(Growing(), rows, client, batch_size=1)
    assert still_left_behind(client) == {}


class Listing(nn.Linear):
    """Lists are no trees."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return [super().forward(x)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"X": X.tolist()}, DataError, "got a list; convert it"),
        ({"X": X[:0]}, DataError, "X must not be empty"),
        ({"X": da.zeros((4, 4), chunks=2)}, DataError, r"X.rechunk\({1: -1}\)"),
        ({"X": X[:, 1:]}, ModelError, r"model failed on 2 rows of X, shape \(2, 3\)"),
        ({"model": nn.Linear}, ModelError, "model must be a torch.nn.Module"),
        ({"model": nn.LSTM(4, 2)}, ModelError, r"got \(1, 2\) for two rows"),
        ({"model": Listing()}, ModelError, "got <class 'list'> for two rows"),
        ({"batch_size": 0}, OptionError, "batch_size must be"),
    ],
    ids=["kind", "empty", "chunks", "shape", "class", "state", "list", "batch"],
)
def test_what_cannot_be_predicted_is_refused_on_the_client(
    client, model, arguments, error, message
):
    with pytest.raises(error, match=message):
        predict(client=client, **({"model": model, "X": X} | arguments))


def test_rows_in_memory_travel_in_a_few_parts_for_each_thread(client):
    """Each costs as much as many a row: what it takes does not depend on its size."""
    rows = np.random.default_rng(0).random((640, 3), np.float32)

    with get_task_stream(client) as stream:
        outputs = predict(nn.Identity(), rows, client, batch_size=2)

    np.testing.assert_array_equal(outputs, rows)
    threads = sum(client.nthreads().values())
    assert threads < len(stream.data) <= 4 * threads
