"""Models that return their own loss are trained on it, with ``loss=None``."""

import re
from collections import UserDict
from types import SimpleNamespace

import dask.bag
import numpy as np
import pytest
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import daskdl
from daskdl.errors import ModelError, OptionError
from tests.support.problems import rows, trainer

X, Y = rows(96)
HELD = {"X": X[:32], "labels": Y[:32]}


class Classifier(nn.Module):
    """Like a model of transformers: the loss comes with the logits, if it can."""

    result = dict

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, X, labels=None, weights=None):
        logits = self.layer(X)
        if labels is None:
            return self.result(logits=logits)
        return self.result(loss=functional.cross_entropy(logits, labels), logits=logits)


class OfObjects(Classifier):
    result = SimpleNamespace


class OfMappings(Classifier):
    result = UserDict


class OneDict(Classifier):
    def forward(self, batch):
        return super().forward(**batch)


class Items(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return UserDict(X=X[index], labels=Y[index])


def fitted(*data, model=Classifier, **options):
    options = {"loss": None, "model": model} | options
    fitted = trainer(False, **options)
    fitted.fit(*data, epochs=2, batch_size=16, shuffle=False, validation=HELD)
    return fitted


@pytest.fixture(scope="module")
def expected():
    """Trained on the logits alone, by a loss."""

    class Logits(Classifier):
        def forward(self, X):
            return super().forward(X)["logits"]

    fitted = trainer(False, model=Logits)
    fitted.fit(
        X, Y, epochs=2, batch_size=16, shuffle=False, validation=(X[:32], Y[:32])
    )
    return fitted


DATA = {
    "a dict with labels": ({"X": X, "labels": Y},),
    "labels in few bits": ({"X": X, "labels": Y.astype(np.int8)},),
    "labels apart": (X, Y),
    "labels apart from a dict": ({"X": X}, Y),
    "a dataset of dicts": (Items(),),
    "a list of dicts": ([{"X": x, "labels": y} for x, y in zip(X, Y, strict=True)],),
    "a bag of dicts": (
        dask.bag.from_sequence(
            [{"X": x, "labels": y} for x, y in zip(X, Y, strict=True)], npartitions=3
        ),
    ),
}


@pytest.mark.parametrize("data", DATA)
def test_labels_come_in_a_dict_or_as_y(data, expected):
    trained = fitted(*DATA[data])

    for name in ("loss", "val_loss", "val_accuracy"):
        losses, expected_losses = (
            trained.history_.column(name),
            expected.history_.column(name),
        )
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    scores = trained.evaluate(HELD, metrics="classification")
    assert scores["accuracy"] == expected.history_.column("val_accuracy")[-1]
    own_scores = trained.score_examples(HELD)
    # A loss near 0 is the difference of two logarithms: 1e-7 is its last bit.
    np.testing.assert_allclose(
        own_scores, expected.score_examples(X[:32], Y[:32]), rtol=1e-5, atol=2e-7
    )


@pytest.mark.parametrize("model", [OfObjects, OfMappings, OneDict])
def test_the_loss_is_in_an_object_or_any_mapping(model, expected):
    trained = fitted({"X": X, "labels": Y}, model=model)

    losses, expected_losses = (
        trained.history_.column("loss"),
        expected.history_.column("loss"),
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_a_loss_that_is_given_gets_the_logits_of_an_object(expected):
    fitted = trainer(False, model=OfObjects)
    fitted.fit(X, Y, epochs=2, batch_size=16, shuffle=False)

    losses, expected_losses = (
        fitted.history_.column("loss"),
        expected.history_.column("loss"),
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    scores = fitted.evaluate(X[:32], Y[:32], metrics="classification")
    assert scores["accuracy"] == expected.history_.column("val_accuracy")[-1]


GIVE = (
    "pass loss=, such as torch.nn.CrossEntropyLoss(), or step=; without both, the "
    "model must compute its own loss"
)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (nn.Linear(20, 4), (X, Y), f"{GIVE} from y, its 'labels', but forward of "
         "Linear takes 'input'"),
        (nn.Linear(20, 4), (X,), f"{GIVE}, but Linear returned a Tensor, without"),
        (Classifier(), (X,), f"{GIVE}, but Classifier returned a dict with 'logits', "
         "without 'loss'; transformers' models compute it from labels, passed as y or "
         "X['labels']"),
        (OfObjects(), (X,), "returned a SimpleNamespace with 'logits', without 'loss'"),
        (Classifier(), (HELD, Y[:32]), "labels are passed both as y and as X"),
        (Classifier(), ({"X": X, "label": Y},), "forward of Classifier takes 'X', "
         "'labels', 'weights', but X has 'X', 'label': 'label' is none of them"),
    ],
    ids=["forgotten", "no labels", "no loss", "an object", "labels twice", "label"],
)  # fmt: skip
def test_a_model_without_a_loss_is_told_what_to_give(model, data, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        trainer(False, loss=None, model=model).fit(*data)


def test_a_loss_of_several_numbers_is_refused():
    class Each(Classifier):
        def forward(self, X, labels):
            logits = self.layer(X)
            return {"loss": functional.cross_entropy(logits, labels, reduction="none")}

    with pytest.raises(ModelError, match="the model's loss must return one floating"):
        trainer(False, loss=None, model=Each).fit(X, Y)


def test_a_saved_trainer_without_a_loss_goes_on(tmp_path):
    trained = fitted(HELD)
    trained.save(tmp_path / "run")

    again = daskdl.Trainer.load(tmp_path / "run", model=Classifier, client=False)

    assert again.evaluate(HELD) == trained.evaluate(HELD)
    with pytest.raises(OptionError, match="loss must be None with step="):
        daskdl.Trainer.load(
            tmp_path / "run", model=Classifier, loss=nn.MSELoss(), step=print
        )
