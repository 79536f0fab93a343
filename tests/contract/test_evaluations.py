"""Any number of metrics in one pass beside the loss, in this process."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn
from torch.nn import functional
from torchmetrics import (
    CatMetric,
    MeanAbsoluteError,
    MeanSquaredError,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import MulticlassAccuracy

import daskdl
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.report import user_metrics
from daskdl.metrics import (
    BinaryMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.sources import Parts

ROWS = 101
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 4)).astype(np.float32)
Y = np.sort(GENERATOR.integers(0, 3, ROWS))
evaluate = functools.partial(daskdl.evaluate, client=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.fixture
def scores(model):
    """Probabilities, in one pass by hand."""
    with torch.no_grad():
        return model.eval()(torch.from_numpy(X)).double().softmax(1).numpy()


class TestOnePass:
    def test_all_that_is_asked_for_is_there_in_its_order(self, model, scores):
        own = {"top": MulticlassAccuracy(3, average="micro")}
        passes = []

        class Counted(nn.Sequential):
            def forward(self, x):
                passes.append(len(x))
                return super().forward(x)

        told = evaluate(
            Counted(model),
            X,
            Y,
            loss=nn.CrossEntropyLoss(),
            metrics=[ClassificationMetrics(top=2), "calibration", own],
            batch_size=10,
        )

        right = (scores.argmax(1) == Y).mean()
        assert list(told)[:3] == ["loss", "accuracy", "top_2_accuracy"]
        assert list(told)[-1] == "top"
        assert (told["accuracy"], told["top"]) == pytest.approx((right, right))
        assert told["roc_auc"] == pytest.approx(
            sklearn_metrics.roc_auc_score(Y, scores, multi_class="ovr")
        )
        assert told["ece"] > 0
        assert sum(passes) - ROWS <= 6  # the rest: two rows at a time, to rehearse

    def test_without_metrics_it_is_loss_and_accuracy(self, model, scores):
        told = evaluate(model, X, Y, loss=nn.CrossEntropyLoss())

        assert told == {
            "loss": pytest.approx(sklearn_metrics.log_loss(Y, scores), rel=1e-6),
            "accuracy": pytest.approx((scores.argmax(1) == Y).mean()),
        }
        assert list(told) == ["loss", "accuracy"]

    def test_of_a_regression(self):
        x, y = X[:, :2], X[:, :2] + X[:, 2:]
        metrics = [MeanAbsoluteError(), {"r": PearsonCorrCoef(2)}, MeanSquaredError()]

        told = evaluate(nn.Identity(), x, y, metrics=metrics, batch_size=7)

        error = X[:, 2:]
        expected = [np.corrcoef(x[:, i], y[:, i])[0, 1] for i in (0, 1)]
        assert list(told) == ["MeanAbsoluteError", "r", "MeanSquaredError"]
        assert told["r"] == pytest.approx(np.array(expected), rel=1e-4)
        assert told["MeanAbsoluteError"] == pytest.approx(abs(error).mean(), rel=1e-6)

    @pytest.mark.parametrize(
        ("loss", "last"),
        [
            (nn.CrossEntropyLoss(), nn.Identity()),
            (nn.NLLLoss(), nn.LogSoftmax(1)),
            (daskdl.keras.CrossEntropyOfProbabilities(), nn.Softmax(1)),
            (lambda output, y: functional.nll_loss(output, y), nn.LogSoftmax(1)),
            (lambda output, y: functional.nll_loss(output.log(), y), nn.Softmax(1)),
        ],
        ids=["logits", "log", "probabilities", "own log", "own probabilities"],
    )
    def test_scores_are_what_the_loss_takes(self, model, scores, loss, last):
        told = evaluate(nn.Sequential(model, last), X, Y, loss=loss, metrics=Kept())

        assert told["probabilities"] == pytest.approx(scores, rel=1e-5)

    def test_a_label_that_the_loss_passes_over_does_not_count(self, model, scores):
        y = np.where(np.arange(ROWS) % 3, Y, 7)
        loss = nn.CrossEntropyLoss(ignore_index=7)

        told = evaluate(model, X, y, loss=loss, metrics="classification")

        counted = y != 7
        right = (scores.argmax(1) == Y)[counted].mean()
        assert told["accuracy"] == pytest.approx(right)
        assert told["support"].sum() == counted.sum()

    def test_classes_have_the_names_that_the_trainer_has_seen(self, model):
        names = pd.Series(pd.Categorical.from_codes(Y, ["ant", "bee", "cat"]))
        trainer = daskdl.Trainer(
            model,
            nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            client=False,
        )
        trainer.fit(X, names)

        told = trainer.evaluate(X, Y, metrics="classification")

        assert told.sections[0].names == ("ant", "bee", "cat")

    def test_a_trainer_does_the_same(self, model):
        trainer = daskdl.Trainer(
            model,
            nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            client=False,
        )
        trainer.fit(X, Y)

        told = trainer.evaluate(X, Y, metrics="calibration", batch_size=50)

        loss = nn.CrossEntropyLoss()
        by_hand = evaluate(trainer.model_, X, Y, loss=loss, metrics="calibration")
        assert told["ece"] == pytest.approx(by_hand["ece"], rel=1e-6)
        assert told["loss"] == pytest.approx(by_hand["loss"], rel=1e-6)


class First(CatMetric):
    def update(self, preds, target):
        super().update(preds)


class Kept(ClassificationMetrics):
    """Tells the probabilities themselves."""

    def collection(self, shown):
        return MetricCollection({"probabilities": First()})

    def section(self, sample, computed):
        return user_metrics({"probabilities": computed["probabilities"].numpy()})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"X": X.tolist()}, DataError, "X must be a numpy array"),
        ({"y": Y[1:]}, DataError, "same length, got 101 and 100"),
        ({"X": X[:0], "y": Y[:0]}, DataError, "X must not be empty"),
        ({"model": "resnet"}, ModelError, "model must be a torch.nn.Module"),
        ({"loss": nn.NLLLoss}, ModelError, "loss is the class NLLLoss"),
        ({"X": X[:, 1:]}, ModelError, r"rows of X, shape \(2, 3\)"),
        ({"loss": nn.NLLLoss(reduction="none")}, ModelError, r"got shape \(2,\)"),
        ({"batch_size": 2.5}, OptionError, "batch_size must be .* got 2.5"),
        ({"client": "tcp://"}, OptionError, "client must be a distributed.Client"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(model, given, error, message):
    usual = {"model": model, "loss": nn.CrossEntropyLoss(), "X": X, "y": Y}

    with pytest.raises(error, match=message):
        evaluate(**(usual | given))


class TestTrouble:
    def test_a_step_shows_no_outputs(self, model):
        trainer = daskdl.Trainer(
            model,
            step=lambda model, batch: model(batch[0]).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            client=False,
        )
        trainer.fit(X, Y)

        with pytest.raises(OptionError, match="which a step does not show"):
            trainer.evaluate(X, Y, metrics="classification")
        assert trainer.evaluate(X, Y).keys() == {"loss"}

    def test_there_must_be_something_to_measure(self, model):
        with pytest.raises(OptionError, match="nothing to measure without loss"):
            evaluate(model, X, X)

    @pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
    def test_labels_must_be_there(self, model, loss):
        with pytest.raises(DataError, match=r"(y|labels) must be given"):
            evaluate(model, X, loss=loss, metrics="classification")

    @pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
    def test_a_label_without_an_output_is_an_error(self, model, loss):
        wrong = Y.copy()
        wrong[70] = 3

        with pytest.raises(DataError, match=r"(labels must be|y\[70\] is 3)"):
            evaluate(model, X, wrong, loss=loss, metrics="classification")

    def test_a_class_that_nobody_has_seen_is_told_as_such(self, model):
        few = Y != 1

        told = evaluate(model, X[few], Y[few], metrics="classification")

        assert told["support"][1] == 0
        assert np.isnan(told["roc_auc_per_class"][1])
        assert np.isfinite(told["roc_auc"])

    def test_a_model_that_returns_no_tensors_cannot_be_measured(self, model):
        class Named(nn.Module):
            def forward(self, x):
                return ["scores", x]

        with pytest.raises(ModelError, match="need a model that returns tensors"):
            evaluate(Named(), X, Y, metrics="classification")

    def test_scores_of_nan_are_never_right(self):
        x = torch.eye(3)[[0, 1, 2]]
        x[2, 0] = float("nan")
        y = torch.tensor([0, 1, 0])  # what argmax says of NaN

        told = evaluate(nn.Identity(), x, y, loss=nn.CrossEntropyLoss())

        assert np.isnan(told["loss"])
        assert told["accuracy"] == pytest.approx(2 / 3)


def test_no_value_takes_the_place_of_another_however_many_sets_there_are():
    chances, labels = np.linspace(0, 1, 5, dtype=np.float32), np.ones(5, np.int64)
    sets = [BinaryMetrics(threshold=at) for at in (0.1, 0.3, 0.6)]
    model = nn.Identity()

    told = evaluate(model, chances, labels, loss=chance_loss, metrics=sets)

    recalls = told["recall"], told["binary_recall"], told["binary_2_recall"]
    assert recalls == (0.8, 0.6, 0.4)
    assert str(told).count("Binary:") == 3
    assert "binary_recall" not in str(told)  # it is in its own section


def chance_loss(output, y):
    return output.mean()


chance_loss.scale = "probabilities"


@pytest.mark.parametrize("loss", [None, lambda output, y: output.mean()])
@pytest.mark.parametrize("kind", [RegressionMetrics, MultilabelMetrics])
def test_labels_that_are_nan_can_be_masked(kind, loss):
    labels = (X[:, :3] > 0).astype(np.float32)
    labels[0] = labels[50, 1] = labels[-3:, 2] = np.nan
    source = Parts((X[:40], labels[:40]), (X[40:], labels[40:]))
    source.first = X[:2], labels[:2]
    model, metrics = nn.Linear(4, 3), kind(ignore=float("nan"))

    whole = evaluate(model, X, labels, loss=loss, metrics=metrics)
    parts = evaluate(model, source, loss=loss, metrics=metrics)

    name = "count" if kind is RegressionMetrics else "support"
    counted = ~np.isnan(labels) if name == "count" else labels == 1
    assert whole[name].tolist() == parts[name].tolist() == counted.sum(0).tolist()


def test_labels_that_are_nan_and_not_masked_are_refused():
    labels = X[:, :3].copy()
    labels[50, 1] = np.nan

    with pytest.raises(DataError, match=r"y\[50, 1\] is nan"):
        evaluate(nn.Linear(4, 3), X, labels, metrics="regression")


def rows(labels):
    """A part with these labels, of which two in three are right."""
    y = np.array(labels, np.int64)
    x = np.eye(3, dtype=np.float32)[(y + (np.arange(len(y)) % 3 == 0)) % 3]
    return x, y


class TestParts:
    def source(self, *parts):
        source = Parts(*parts)
        source.first = rows([0, 1])
        return source

    def test_empty_parts_and_those_of_one_class_add_nothing_of_their_own(self):
        whole = [0] * 5 + [2] * 40 + [1] * 3
        parts = [rows([]), rows([0] * 5), rows([2] * 40), rows([]), rows([1] * 3)]

        told = evaluate(
            nn.Identity(), self.source(*parts), metrics="classification", batch_size=8
        )

        chosen = np.concatenate([x.argmax(1) for x, _ in parts])
        expected = sklearn_metrics.confusion_matrix(whole, chosen)
        assert told["confusion_matrix"].tolist() == expected.tolist()
        macro = sklearn_metrics.f1_score(whole, chosen, average="macro")
        assert told["f1"] == pytest.approx(macro)

    def test_a_part_that_cannot_be_read_is_left_out_if_it_may_be(self):
        source = self.source(rows([0, 1, 2]), DataError("bad"), rows([1]))

        told = evaluate(
            nn.Identity(), source, metrics="classification", on_bad_batch="skip"
        )

        assert told["support"].sum() == 4

    def test_nothing_at_all_is_an_error(self):
        with pytest.raises(DataError, match="no examples were scored"):
            evaluate(nn.Identity(), self.source(rows([])), metrics="classification")
