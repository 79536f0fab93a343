"""How data are to be read: arguments that fit, evaluate and predict have in common."""

import io
import re
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.data.inputs import ReadOptions, compose
from daskdl.data.normalize import Standardize
from daskdl.data.storage import Store
from daskdl.errors import OptionError
from tests.support import s3


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("batch_size", 0, "batch_size must be a whole number >= 1, got 0"),
        ("batch_size", 1.0, "batch_size must be a whole number >= 1, got 1.0"),
        ("batch_size", True, "batch_size must be a whole number >= 1, got True"),
        ("on_bad_batch", "ignore", "on_bad_batch must be 'raise' or 'skip', got 'ign"),
        ("on_bad_batch", None, "on_bad_batch must be 'raise' or 'skip', got None"),
        ("transform", 3, "transform must be a function or None, got 3"),
        ("loader", "csv", "loader must be a function load(file) -> (x, y) of an"),
        ("collate_fn", [], "collate_fn must be a function or None, got []"),
        ("storage_options", [("secret", 1)], "must be a dict or None, got a list"),
    ],
    ids=repr,
)
def test_an_option_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        ReadOptions(**{"batch_size": 1, option: value})


@pytest.mark.parametrize(("word", "skips"), [("raise", False), ("skip", True)])
def test_only_one_word_leaves_parts_out(word, skips):
    assert ReadOptions(1, on_bad_batch=word).skips is skips


def test_storage_options_open_the_store_in_each_call(bucket, s3_endpoint, tmp_path):
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
    own = {"storage_options": storage}

    history = trainer.fit(np.eye(3), np.arange(3), validation=url, **own)

    assert history.column("val_loss") == [pytest.approx(1.0, abs=3)]
    assert 0 <= trainer.evaluate(url, **own)["accuracy"] <= 1
    assert "accuracy" in daskdl.evaluate(trainer.model_, url, client=False, **own)
    assert len(trainer.score_examples(url, **own)) == 3
    assert len(trainer.predict(url, **own)) == 3
    assert len(daskdl.predict(trainer.model_, url, client=False, **own)) == 3
    assert Standardize().fit(url, client=False, **own).scalings.shift == pytest.approx(
        np.full(3, 1 / 3)
    )
    assert "secret" not in repr(ReadOptions(1, **own))


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
