"""Loss, accuracy and any number of metrics in one pass, in this process."""

import functools

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.classification import MulticlassAccuracy

import daskdl
from daskdl.data import dataset
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.evaluate import score_batches
from daskdl.metrics import (
    BinaryMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.sources import Parts, Streamed

ROWS = 101  # a prime: no batch size divides it
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 4)).astype(np.float32)
# Sorted, so that each part of the data has another loss than the others.
Y = np.sort(GENERATOR.integers(0, 3, ROWS))
evaluate = functools.partial(daskdl.evaluate, client=False)


@pytest.fixture
def model():
    """Sensitive to its mode: dropout and batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )


@pytest.fixture
def scores(model):
    """Probabilities, in one pass by hand."""
    with torch.no_grad():
        scores = model.eval()(torch.from_numpy(X)).double().softmax(1).numpy()
    model.train()
    return scores


def trainer_of(model, **options):
    return daskdl.Trainer(
        model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        client=False,
        **options or {"loss": nn.CrossEntropyLoss()},
    )


class TestOnePass:
    def test_all_metrics_are_measured_in_one_pass_in_order(self, model, scores):
        metrics = {"top": MulticlassAccuracy(3, average="micro")}
        passes = []

        class Counted(nn.Sequential):
            def forward(self, x):
                passes.append(len(x))
                return super().forward(x)

        values = evaluate(
            Counted(model),
            X,
            Y,
            loss=nn.CrossEntropyLoss(),
            metrics=[ClassificationMetrics(top=2), "calibration", metrics],
            batch_size=10,
        )

        right = (scores.argmax(1) == Y).mean()
        assert list(values)[:3] == ["loss", "accuracy", "top_2_accuracy"]
        assert list(values)[-1] == "top"
        assert (values["accuracy"], values["top"]) == pytest.approx((right, right))
        assert values["roc_auc"] == pytest.approx(
            sklearn_metrics.roc_auc_score(Y, scores, multi_class="ovr")
        )
        assert values["ece"] > 0
        assert sum(passes) - ROWS <= 6  # the rest: two rows at a time, a dry run

    def test_without_metrics_there_are_loss_and_accuracy(self, model, scores):
        before = {name: value.clone() for name, value in model.state_dict().items()}

        values = evaluate(model, X, Y, loss=nn.CrossEntropyLoss())

        assert list(values.items()) == [
            ("loss", pytest.approx(sklearn_metrics.log_loss(Y, scores), rel=1e-6)),
            ("accuracy", pytest.approx((scores.argmax(1) == Y).mean())),
        ]
        assert model.training
        after = model.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before)

    def test_a_trainer_does_the_same_with_the_names_of_its_classes(self, model):
        trainer, loss = trainer_of(model), nn.CrossEntropyLoss()
        names = pd.Categorical.from_codes(Y, ["ant", "bee", "cat"])
        trainer.fit(X, pd.Series(names))

        values = trainer.evaluate(X, Y, metrics="classification", batch_size=50)

        assert values.sections[0].names == ("ant", "bee", "cat")
        by_hand = evaluate(trainer.model_, X, Y, loss=loss, metrics="classification")
        for name in ("loss", "accuracy", "mcc"):
            assert values[name] == pytest.approx(by_hand[name], rel=1e-6)

    def test_a_step_shows_no_outputs(self, model):
        trainer = trainer_of(model, step=lambda model, batch: model(batch[0]).mean())
        trainer.fit(X, Y)

        with pytest.raises(OptionError, match="which a step does not return"):
            trainer.evaluate(X, Y, metrics="classification")
        with torch.no_grad():
            mean = trainer.model_.eval()(torch.from_numpy(X)).mean().item()
        values = trainer.evaluate(X, Y, batch_size=7)
        assert values == {"loss": pytest.approx(mean, rel=1e-5)}


class TestLossAndAccuracy:
    @pytest.mark.parametrize("batch_size", [1, 7, ROWS])
    @pytest.mark.parametrize(
        "loss",
        [
            nn.CrossEntropyLoss(ignore_index=1),
            nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 0.5]), ignore_index=2),
            nn.CrossEntropyLoss(ignore_index=1, reduction="sum"),
            functools.partial(functional.cross_entropy, ignore_index=1),
            functools.partial(
                functional.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1])
            ),
        ],
        ids=["ignored", "weights", "sum", "partial", "partial weights"],
    )
    def test_the_loss_is_that_of_all_rows_at_once(self, model, loss, batch_size):
        values = evaluate(model, X, Y, loss=loss, batch_size=batch_size)

        with torch.no_grad():
            whole = loss(model.eval()(torch.from_numpy(X)), torch.from_numpy(Y)).item()
        if getattr(loss, "reduction", "mean") == "sum":
            whole /= ROWS
        # 1e-6: float32 losses of batches, summed in another order.
        assert values["loss"] == pytest.approx(whole, rel=1e-6)

    def test_ignored_steps_of_a_sequence_have_no_weight(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(9, 3, 5, generator=generator)
        y = torch.randint(0, 3, (9, 5), generator=generator)
        y[:4] = y[6, 2:] = -100
        loss = nn.CrossEntropyLoss()

        values = evaluate(nn.Identity(), x, y, loss=loss, batch_size=1)

        assert values["loss"] == pytest.approx(loss(x, y).item(), rel=1e-6)
        right = (x.argmax(1) == y)[y != -100].double().mean().item()
        assert values["accuracy"] == pytest.approx(right)
        assert np.isnan(evaluate(nn.Identity(), x[:4], y[:4], loss=loss)["loss"])

    @pytest.mark.parametrize("batch_size", [1, 3, 7])
    @pytest.mark.parametrize("padded", ["collated", "trimmed", "weighted"])
    def test_sequences_of_several_lengths_are_weighted_by_labels(
        self, padded, batch_size
    ):
        generator = torch.Generator().manual_seed(0)
        items = [
            (
                torch.randn(steps, 3, generator=generator),
                torch.randint(0, 3, (steps,), generator=generator),
            )
            for steps in range(2, 21)
        ]

        def collated(items):
            x, y = zip(*items, strict=True)
            x = pad_sequence(x, batch_first=True).mT  # (B, 3, T)
            return x, pad_sequence(y, batch_first=True, padding_value=-100)

        def trimmed(batch):
            x, y = batch
            longest = (y != -100).sum(dim=1).max()
            return x[..., :longest], y[:, :longest]

        x, y = collated(items)
        weight = np.arange(1.0, 20) if padded == "weighted" else np.ones(19)
        data, options = (x, y), {"transform": trimmed}
        if padded == "collated":
            data, options = (dataset(items, collate_fn=collated),), {}
        if padded == "weighted":
            options["sample_weight"] = weight
        loss = nn.CrossEntropyLoss()

        values = evaluate(
            nn.Identity(), *data, loss=loss, batch_size=batch_size, **options
        )

        losses = functional.cross_entropy(x, y, reduction="none").double()
        weights = torch.from_numpy(weight)[:, None] * (y != -100)
        expected = ((losses * weights).sum() / weights.sum()).item()
        assert values["loss"] == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("metrics", [None, "classification"])
    def test_a_label_that_the_loss_ignores_is_neither_right_nor_wrong(
        self, model, scores, metrics
    ):
        loss = nn.CrossEntropyLoss(ignore_index=2)

        values = evaluate(model, X, Y, loss=loss, metrics=metrics)

        right = (scores.argmax(1) == Y)[Y != 2].mean()
        assert values["accuracy"] == pytest.approx(right)

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)),
            (torch.ones(2, 3, 5), torch.ones(2, 4, dtype=torch.int64)),
            (torch.ones(2, 3), torch.ones(2)),
            (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        ],
        ids=["one output each", "positions", "floats", "no scores"],
    )
    def test_without_one_score_per_class_there_is_no_accuracy(self, x, y):
        values = evaluate(nn.Identity(), x, y, loss=lambda output, y: output.mean())

        assert values == {"loss": 1.0}

    def test_scores_of_nan_are_never_right(self):
        x = 2 * torch.eye(3)
        x[2, 0] = float("nan")
        y = torch.tensor([0, 1, 0])  # what argmax says of NaN

        values = evaluate(nn.Identity(), x, y, loss=nn.CrossEntropyLoss())

        assert np.isnan(values["loss"])
        assert values["accuracy"] == pytest.approx(2 / 3)


class TestLiveModel:
    """A replica scores the module that it goes on training."""

    rows = ((torch.from_numpy(X[:50]), torch.from_numpy(Y[:50])),)

    def test_each_submodule_gets_its_mode_back_after_an_error_too(self, model):
        model[1].eval()
        seen = []

        def loss(output, labels):
            seen.append((output.requires_grad, model.training))
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            score_batches(model, loss, self.rows, "cpu")

        assert seen == [(False, False)]
        assert [part.training for part in model] == [True, False, True, True]

    def test_tensors_that_the_model_caches_can_be_trained_with(self):
        class Caching(nn.Linear):
            cached = None

            def forward(self, x):
                if self.cached is None:
                    self.cached = torch.ones(1) * 2
                return super().forward(x) * self.cached

        module = Caching(4, 3)

        score_batches(module, nn.CrossEntropyLoss(), self.rows, "cpu")

        module(torch.from_numpy(X)).sum().backward()
        assert module.weight.grad is not None


class Wordy(nn.Module):
    def forward(self, x):
        return ["scores", x]


WITH_NAN = np.where(np.arange(ROWS)[:, None] == 50, np.nan, X[:, :3])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"y": Y[1:]}, DataError, "same length, got 101 and 100"),
        ({"X": X[:0], "y": Y[:0]}, DataError, "X must not be empty"),
        ({"model": "resnet"}, ModelError, "model must be a torch.nn.Module"),
        (
            {"model": Wordy(), "loss": None, "metrics": "classification"},
            ModelError,
            "need a model that returns tensors",
        ),
        ({"loss": nn.NLLLoss}, ModelError, "loss is the class NLLLoss"),
        ({"X": X[:, 1:]}, ModelError, r"rows of X, shape \(2, 3\)"),
        ({"loss": nn.NLLLoss(reduction="none")}, ModelError, r"got shape \(2,\)"),
        ({"batch_size": 2.5}, OptionError, "batch_size must be .* got 2.5"),
        ({"client": "tcp://"}, OptionError, "client must be a distributed.Client"),
        (
            {"loss": None, "y": X},
            OptionError,
            "there is nothing to measure",
        ),
        ({"y": None, "metrics": "classification"}, DataError, "y must be given"),
        (
            {"loss": None, "y": None, "metrics": "classification"},
            DataError,
            "metrics need labels; pass y",
        ),
        ({"y": Y + 1}, DataError, r"y\[\d+\] is 3"),
        (
            {"loss": None, "y": Y + 1, "metrics": "classification"},
            DataError,
            r"labels must be|y\[\d+\] is 3",
        ),
        (
            {"y": WITH_NAN, "loss": None, "metrics": "regression"},
            DataError,
            r"y\[50, 0\] is nan",
        ),
    ],
)
def test_arguments_that_cannot_be_evaluated_are_refused(model, changes, error, message):
    usual = {"model": model, "loss": nn.CrossEntropyLoss(), "X": X, "y": Y}

    with pytest.raises(error, match=message):
        evaluate(**(usual | changes))


def test_values_of_equal_names_are_prefixed():
    chances, labels = np.linspace(0, 1, 5, dtype=np.float32), np.ones(5, np.int64)
    sets = [BinaryMetrics(threshold=at) for at in (0.1, 0.3, 0.6)]
    loss = nn.BCELoss()

    values = evaluate(
        nn.Identity(), chances, labels.astype(np.float32), loss=loss, metrics=sets
    )

    recalls = values["recall"], values["binary_recall"], values["binary_2_recall"]
    assert recalls == (0.8, 0.6, 0.4)
    assert str(values).count("Binary:") == 3
    assert "binary_recall" not in str(values)  # it is in its own section


@pytest.mark.parametrize("loss", [None, lambda output, y: output.mean()])
@pytest.mark.parametrize("kind", [RegressionMetrics, MultilabelMetrics])
def test_labels_that_are_nan_can_be_masked(kind, loss):
    labels = (X[:, :3] > 0).astype(np.float32)
    labels[0] = labels[50, 1] = labels[-3:, 2] = np.nan
    source = Parts((X[:40], labels[:40]), (X[40:], labels[40:]))
    source.first_rows = X[:2], labels[:2]
    model, metrics = nn.Linear(4, 3), kind(ignore=float("nan"))

    whole = evaluate(model, X, labels, loss=loss, metrics=metrics)
    parts = evaluate(model, source, loss=loss, metrics=metrics)

    name = "count" if kind is RegressionMetrics else "support"
    counted = ~np.isnan(labels) if name == "count" else labels == 1
    assert whole[name].tolist() == parts[name].tolist() == counted.sum(0).tolist()


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("chunks", [None, 64], ids=["numpy", "dask.array"])
def test_numbers_far_from_0_keep_their_digits(chunks):
    rng = np.random.default_rng(0)
    y = 1e8 + rng.normal(size=(200, 1))
    x = y + 0.1 * rng.normal(size=(200, 1))
    data = x, y
    if chunks:
        data = [da.from_array(each, (chunks, 1)) for each in data]

    values = evaluate(Double(), *data, metrics="regression")

    assert values["r2"] == pytest.approx(sklearn_metrics.r2_score(y, x), rel=1e-6)
    pearson = np.corrcoef(x[:, 0], y[:, 0])[0, 1]
    assert values["pearson"] == pytest.approx(pearson, rel=1e-6)


# ---- parts


def rows(labels):
    """A part with these labels, of which two in three are right."""
    y = np.array(labels, np.int64)
    x = np.eye(3, dtype=np.float32)[(y + (np.arange(len(y)) % 3 == 0)) % 3]
    return x, y


ONES, TWOS = (
    (np.full((count, 1), value, np.float32), np.zeros((count, 1), np.float32))
    for count, value in ((2, 1), (6, 2))
)


def of_parts(*pairs, kind=Parts, **options):
    source = kind(*pairs)
    source.first_rows = TWOS
    options |= {"loss": nn.MSELoss(), "batch_size": 4, "metrics": "regression"}
    return evaluate(nn.Identity(), source, **options)


@pytest.mark.parametrize("kind", [Parts, Streamed])
def test_parts_are_weighted_by_rows(kind):
    values = of_parts(ONES, TWOS, kind=kind)

    assert values["loss"] == values["mse"] == pytest.approx((2 * 1 + 6 * 4) / 8)


MISSING = ONES[0], np.full((2, 1), np.nan, np.float32)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (DataError("bad"), "bad"),
        (EOFError("torn"), "torn"),
        (MISSING, r"y of box 1\[0, 0\] is nan"),
    ],
    ids=["bad", "torn", "no label"],
)
def test_a_part_that_cannot_be_read_is_named_or_left_out(part, message, caplog):
    with pytest.raises((DataError, EOFError), match=message) as caught:
        of_parts(ONES, part)

    assert "box 1" in f"{caught.value}{getattr(caught.value, '__notes__', '')}"
    values = of_parts(ONES, part, TWOS, on_bad_batch="skip")
    assert values["loss"] == values["mse"] == pytest.approx(3.25)
    assert caplog.messages[-1] == "1 parts had no rows to score: [1]"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (OptionError("pillow is missing"), "pillow is missing"),
        (DataError("bad"), "no examples were scored"),
    ],
    ids=["not about the data", "nothing is left"],
)
def test_an_evaluation_of_nothing_is_an_error(part, message):
    with pytest.raises((DataError, OptionError), match=message):
        of_parts(part, on_bad_batch="skip")
