"""What is made of outputs on the worker, and the names of columns."""

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import daskdl
from daskdl.errors import ModelError, OptionError

X = np.arange(14.0, dtype=np.float32).reshape(7, 2)
TABLE = pd.DataFrame(X, columns=["a", "b"], index=list("tuvwxyz"))


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


def say(data, **options):
    return daskdl.predict(
        nn.Identity(), data, client=False, **({"batch_size": 2} | options)
    )


def table():
    return dd.from_pandas(TABLE, npartitions=3)


@pytest.mark.parametrize(
    "data", [X, da.from_array(X, chunks=(3, 2))], ids=["numpy", "dask"]
)
def test_it_is_called_with_the_outputs_of_each_batch(data):
    found = say(data, postprocess=lambda outputs: outputs.argmax(dim=1))

    assert found.shape == (7,)
    assert found.dtype == np.int64
    assert np.asarray(found).tolist() == [1] * 7


def test_it_comes_after_the_transform_and_without_gradients():
    seen = []

    def noting(outputs):
        seen.append((outputs[0].tolist(), outputs.requires_grad))
        return outputs

    daskdl.predict(
        nn.Linear(2, 2),
        X[:2],
        client=False,
        transform=lambda batch: (torch.zeros(2, 2), None),
        postprocess=noting,
    )

    assert len(seen) == 2  # the first is the rehearsal
    assert seen[0][0] == pytest.approx(seen[1][0])
    assert [grad for _, grad in seen] == [False, False]


def test_it_may_choose_from_what_a_model_gives():
    lstm = nn.LSTM(2, 3, batch_first=True)
    x = torch.ones(5, 4, 2)

    found = daskdl.predict(
        lstm, x, client=False, batch_size=2, postprocess=lambda out: out[0][:, -1]
    )

    assert found.shape == (5, 3)


def test_a_dict_of_columns_makes_one_dataframe():
    found = say(
        table(), postprocess=lambda x: {"best": x.argmax(1), "score": x.amax(1)}
    )

    assert isinstance(found, dd.DataFrame)
    assert found.divisions == table().divisions
    expected = pd.DataFrame({"best": [1] * 7, "score": X[:, 1]}, TABLE.index)
    assert found.dtypes.to_dict() == expected.dtypes.to_dict()
    pd.testing.assert_frame_equal(found.compute(), expected, check_index_type=False)


@pytest.mark.parametrize(
    ("classes", "columns"),
    [(("cat", "dog"), ["cat", "dog"]), (("a", "b", "c"), [0, 1]), (None, [0, 1])],
    ids=["fit", "do not fit", "none"],
)
def test_names_of_classes_are_those_of_columns_where_they_fit(classes, columns):
    trainer = daskdl.Trainer(nn.Identity, nn.MSELoss(), torch.optim.Adam, client=False)
    trainer.model_, trainer.classes_ = nn.Identity(), classes

    found = trainer.predict(table())

    assert list(found.columns) == list(found.compute().columns) == columns
    assert found.compute().to_numpy().tolist() == X.tolist()


def test_nan_passes_through():
    with_nan = X.copy()
    with_nan[3] = np.nan

    found = say(da.from_array(with_nan, chunks=(3, 2))).compute()

    np.testing.assert_array_equal(found, with_nan)


def failing(outputs):
    if outputs.shape[0] == 2 and outputs.max() > 8:
        raise ZeroDivisionError("mine")
    return outputs


@pytest.mark.parametrize(
    "data", [X, da.from_array(X, chunks=(3, 2))], ids=["numpy", "dask"]
)
def test_what_it_raises_comes_out_with_where_it_was(data):
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        np.asarray(say(data, postprocess=failing))

    assert caught.value.__notes__[0] == "in postprocess"
    assert caught.value.__notes__[1].startswith("in part ")
    assert "failing" in [frame.name for frame in caught.traceback]


@pytest.mark.parametrize(
    ("postprocess", "message"),
    [
        (
            lambda x: x["y"],
            r"postprocess failed on the outputs of two rows, shape \(2,",
        ),
        (lambda x: x.sum(), r"postprocess must give .* got \(\) for two rows"),
        (lambda x: x[:1], r"postprocess must give .* got \(1, 2\) for two rows"),
        (lambda x: [x], r"postprocess must give .* got <class 'list'>"),
        (lambda x: {}, r"postprocess must give .* got <class 'dict'>"),
        (lambda x: {"a": 1}, r"postprocess must give .* got <class 'int'>"),
    ],
    ids=["fails", "a number", "fewer rows", "a list", "nothing", "no tensor"],
)
def test_one_that_cannot_be_used_is_refused_on_two_rows(postprocess, message):
    with pytest.raises(ModelError, match=message):
        say(X, postprocess=postprocess)


def test_what_is_no_function_is_refused():
    with pytest.raises(OptionError, match="postprocess must be a function"):
        say(X, postprocess=3)


def test_a_given_model_is_left_as_it_was():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    first, second = (daskdl.predict(model, X, client=False) for _ in range(2))

    assert model.training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("model", [nn.Linear, lambda x: x], ids=["class", "function"])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ModelError, match=r"model must be a torch.nn.Module"):
        daskdl.predict(model, X, client=False)
