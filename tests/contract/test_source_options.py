"""How data are to be read: arguments that fit, evaluate and predict have in common."""

import io
import re
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from dask import delayed
from torch import nn
from torch.utils.data import DataLoader

import daskdl
from daskdl.data import dataset, files
from daskdl.data.inputs import compose, source_of
from daskdl.data.normalize import Standardize
from daskdl.data.storage import Store
from daskdl.errors import OptionError
from tests.support import s3


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: files("x.csv", "csv"), "loader must be a function load(file) -> "),
        (lambda: files("x", storage_options=[("key", "secret")]), "None, got a list"),
        (lambda: dataset([1], collate_fn=[]), "collate_fn must be a function or None"),
        (lambda: dataset(np.eye(2)), "a torch Dataset or a list of examples, got a nd"),
        (lambda: dataset("x.csv"), "a torch Dataset or a list of examples, got a str"),
        (lambda: dataset(DataLoader([1])), "daskdl.data.dataset(loader.dataset, coll"),
        (
            lambda: source_of(dataset([delayed(1)])),
            "items in memory, got a list of Del",
        ),
    ],
    ids=["loader", "options", "collate_fn", "array", "path", "DataLoader", "Delayed"],
)
def test_a_reader_is_refused_by_name_before_anything_is_read(read, message):
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        read()
    assert "secret" not in str(caught.value)


def test_files_with_storage_options_are_read_by_each_method(
    bucket, s3_endpoint, tmp_path
):
    url, storage = f"{bucket}/rows", s3.options(s3_endpoint)
    content = io.BytesIO()
    np.savez(content, x=np.eye(3, dtype="float32"), y=np.arange(3))
    Store(url, storage).write("0.npz", content.getvalue())
    trainer = daskdl.Trainer(
        nn.Linear(3, 3),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        client=False,
        progress=False,
    )
    rows = files(url, storage_options=storage)

    history = trainer.fit(np.eye(3), np.arange(3), validation=rows)

    assert history.column("val_loss") == [pytest.approx(1.0, abs=3)]
    assert 0 <= trainer.evaluate(rows)["accuracy"] <= 1
    assert "accuracy" in daskdl.evaluate(trainer.model_, rows, client=False)
    assert len(trainer.score_examples(rows)) == 3
    assert len(trainer.predict(rows)) == 3
    assert len(daskdl.predict(trainer.model_, rows, client=False)) == 3
    shift = Standardize().fit(rows, client=False).scalings.shift
    assert shift == pytest.approx(np.full(3, 1 / 3))


def doubled(batch):
    x, y = batch
    return 2 * x, y


def raised(batch):
    x, y = batch
    return x + 1, y


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ((doubled, None), 10.0),
        ((doubled, raised), 11.0),
        ((raised, doubled), 12.0),
        ((raised, doubled, raised), 13.0),
    ],
    ids=["one", "two", "the other way round", "three"],
)
def test_transforms_are_made_one_after_the_other_wherever_they_are(
    transforms, expected
):
    transform = cloudpickle.loads(cloudpickle.dumps(compose(*transforms)))

    x, y = transform((torch.tensor(5.0), "labels"))

    assert (x.item(), y) == (expected, "labels")


def test_of_no_transforms_there_is_none():
    assert compose(None, None) is None
    assert compose() is None
