"""Metrics by name and by function, of one output or of several, are scikit-learn's."""

import functools

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import MulticlassAccuracy

import daskdl
from daskdl.errors import DataError, ModelError, OptionError
from tests.support.metric_parts import random
from tests.support.sources import Parts

ROWS = 101
Y = torch.arange(ROWS) % 3
SCORES = random(0, ROWS, 3) + nn.functional.one_hot(Y, 3)
BITS = (torch.arange(ROWS) % 5 > 2).float()
LOGITS = random(1, ROWS) + 2 * BITS
MANY = (random(2, ROWS, 4) > 0.5).float()
MANY_LOGITS = random(3, ROWS, 4) + MANY
NUMBERS = random(4, ROWS, 2)
PREDICTED = NUMBERS + random(5, ROWS, 2) / 2
CROSS, BINARY, SQUARES = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()


def evaluate(output, y, metrics, loss=None, **options):
    """Evaluate on parts that differ in size, the outputs being the inputs."""
    return daskdl.evaluate(
        nn.Identity(),
        *(output, y),
        loss=loss,
        metrics=metrics,
        client=False,
        batch_size=7,
        **options,
    )


RATES = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
AVERAGED = {
    f"{name}_{average}": functools.partial(function, average=average)
    for name, function in RATES.items()
    for average in ("macro", "micro", "weighted")
}
MACRO = {n: functools.partial(f, average="macro") for n, f in RATES.items()}
SPECIFICITY = functools.partial(sk.recall_score, pos_label=0)
SINGLE = {
    "accuracy": sk.accuracy_score,
    "acc": sk.accuracy_score,
    "balanced_accuracy": sk.balanced_accuracy_score,
    "matthews_corrcoef": sk.matthews_corrcoef,
    "cohen_kappa": sk.cohen_kappa_score,
    "confusion_matrix": sk.confusion_matrix,
    **AVERAGED,
}
ERRORS = {
    "mse": sk.mean_squared_error,
    "MeanSquaredError": sk.mean_squared_error,
    "mae": sk.mean_absolute_error,
    "rmse": sk.root_mean_squared_error,
    "r2": sk.r2_score,
}
# Outputs, labels, loss, predictions, and the functions of (labels, predictions).
CASES = {
    "classes": (SCORES, Y, CROSS, SCORES.argmax(1), SINGLE | MACRO),
    "one-hot": (
        *(SCORES, nn.functional.one_hot(Y, 3).float(), CROSS, SCORES.argmax(1)),
        {"accuracy": lambda _, p: sk.accuracy_score(Y.numpy(), p)},
    ),
    "one score": (LOGITS, BITS, BINARY, LOGITS > 0, SINGLE | RATES),
    "column": (LOGITS[:, None], BITS[:, None], BINARY, LOGITS > 0, RATES),
    "two scores": (
        *(torch.stack([-LOGITS, LOGITS], 1), BITS.long(), CROSS, LOGITS > 0),
        {**SINGLE, **RATES, "specificity": SPECIFICITY},
    ),
    "several labels": (
        *(MANY_LOGITS, MANY, BINARY, MANY_LOGITS > 0),
        {"exact_match": sk.accuracy_score, **MACRO, **AVERAGED}
        | {"confusion_matrix": sk.multilabel_confusion_matrix},
    ),
    "numbers": (PREDICTED, NUMBERS, SQUARES, PREDICTED, ERRORS),
    "one number": (PREDICTED[:, :1], NUMBERS[:, 0], None, PREDICTED[:, 0], ERRORS),
}


def wide(values):
    """As scikit-learn needs it to be as exact as daskdl."""
    return (values.double() if values.is_floating_point() else values).numpy()


@pytest.mark.parametrize("case", CASES)
def test_a_name_is_what_scikit_learn_computes(case):
    output, y, loss, predictions, functions = CASES[case]

    values = evaluate(output, y, [*functions], loss)

    assert set(values) == {*functions} | ({"loss"} if loss else set())
    for name, function in functions.items():
        expected = function(wide(y), wide(predictions))
        np.testing.assert_allclose(values[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("roc_auc", lambda y, p: sk.roc_auc_score(y, p, multi_class="ovr")),
        ("AUROC", lambda y, p: sk.roc_auc_score(y, p, multi_class="ovr")),
        ("top_2_accuracy", lambda y, p: sk.top_k_accuracy_score(y, p, k=2)),
    ],
)
def test_names_that_rank_scores(name, expected):
    values = evaluate(SCORES, Y, name, CROSS)

    assert values[name] == pytest.approx(expected(Y.numpy(), wide(SCORES.softmax(1))))


def test_names_of_classes_do_not_keep_the_scores_of_rows():
    from daskdl.evaluation.metric_names import metric_sets

    for names, kept in (["accuracy", "f1"], False), (["accuracy", "roc_auc"], True):
        (metric_set,) = metric_sets(names)
        collection = metric_set.collection(metric_set.sample(CROSS, SCORES, Y, None))
        lists = [
            m for m in collection.values() for s in m._defaults.values() if s == []
        ]
        assert bool(lists) is kept


def test_without_labels_that_count_a_score_is_not_a_number():
    ignored = torch.full((ROWS,), -100)

    values = evaluate(SCORES, ignored, ["accuracy", "cohen_kappa"], CROSS)

    assert np.isnan([values["accuracy"], values["cohen_kappa"]]).all()


def test_all_kinds_of_metrics_are_measured_together():
    values = evaluate(
        PREDICTED[:, 0],
        NUMBERS[:, 0],
        ["mae", sk.max_error, MeanAbsoluteError(), {"own": sk.median_absolute_error}],
        SQUARES,
    )

    assert set(values) == {"loss", "mae", "max_error", "MeanAbsoluteError", "own"}
    assert values["mae"] == pytest.approx(values["MeanAbsoluteError"])
    assert "max_error" in str(values)


# Outputs, labels, loss, a function, and what it must get.
GIVEN = {
    "classes": (SCORES, Y, CROSS, sk.f1_score, Y, SCORES.argmax(1)),
    "scores": (SCORES, Y, CROSS, sk.roc_auc_score, Y, SCORES.softmax(1)),
    "log loss": (SCORES, Y, CROSS, sk.log_loss, Y, SCORES.softmax(1)),
    "binary": (LOGITS[:, None], BITS[:, None], BINARY, sk.f1_score, BITS, LOGITS > 0),
    "chances": (LOGITS, BITS, BINARY, sk.brier_score_loss, BITS, LOGITS.sigmoid()),
    "two": (
        *(torch.stack([-LOGITS, LOGITS], 1), BITS.long(), CROSS, sk.roc_auc_score),
        *(BITS, (2 * LOGITS).sigmoid()),
    ),
    "several": (MANY_LOGITS, MANY, BINARY, sk.f1_score, MANY, MANY_LOGITS > 0),
    "numbers": (PREDICTED, NUMBERS, SQUARES, sk.max_error, NUMBERS, PREDICTED),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_function_gets_labels_and_predictions_in_order(case):
    output, y, loss, function, labels, predictions = GIVEN[case]
    calls = []

    @functools.wraps(function)
    def recorded(*both):
        calls.append(both)
        return len(both[0])

    values = evaluate(output, y, recorded, loss)

    assert values[function.__name__] == ROWS
    (both,) = calls
    for got, expected in zip(both, (labels, predictions), strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected.double(), rtol=1e-5)


def test_ignored_labels_do_not_reach_a_function():
    y = Y.where(torch.arange(ROWS) % 2 == 0, -100)

    values = evaluate(SCORES, y, {"n": lambda y_true, y_pred: len(y_true)}, CROSS)

    assert values["n"] == 51


def test_parts_of_rows_are_gathered_up_to_a_bound(monkeypatch):
    x, y = PREDICTED[:, 0].numpy(), NUMBERS[:, 0].numpy()
    source = Parts(*((x[i : i + 20], y[i : i + 20]) for i in range(0, ROWS, 20)))
    source.first_rows = x[:2], y[:2]
    monkeypatch.setattr("daskdl.evaluation.metric_names.GATHERED_BYTES", 16 * ROWS)

    values = evaluate(source, None, sk.max_error, SQUARES)

    assert values["max_error"] == pytest.approx(np.abs(x - y).max())
    monkeypatch.setattr("daskdl.evaluation.metric_names.GATHERED_BYTES", 16 * ROWS - 1)
    with pytest.raises(DataError, match=r"receive all labels .* more than .* GiB"):
        evaluate(source, None, sk.max_error, SQUARES)


OUTPUT = {"kind": SCORES, "size": PREDICTED[:, 0]}
LABELS = {"kind": Y, "size": NUMBERS[:, 0]}


class TestOutputs:
    def test_each_output_has_its_metrics(self):
        values = evaluate(
            OUTPUT,
            LABELS,
            {"kind": ["accuracy", sk.log_loss], "size": "r2"},
        )

        assert values == {
            "kind_accuracy": pytest.approx(
                sk.accuracy_score(wide(Y), wide(SCORES.argmax(1)))
            ),
            "kind_log_loss": pytest.approx(
                sk.log_loss(wide(Y), wide(SCORES.double().softmax(1)))
            ),
            "size_r2": pytest.approx(
                sk.r2_score(wide(NUMBERS[:, 0]), wide(PREDICTED[:, 0]))
            ),
        }
        assert "Output kind" in str(values)

    def test_outputs_of_a_tuple_have_numbers(self):
        both = [tuple(tree.values()) for tree in (OUTPUT, LABELS)]

        values = evaluate(*both, {0: "classification", 1: [MeanAbsoluteError()]})

        assert {"0_accuracy", "0_f1_per_class", "1_MeanAbsoluteError"} <= values.keys()

    @pytest.mark.parametrize("names", [("kind", "size"), ("size", "kind")])
    def test_numbers_of_outputs_in_a_dict_find_the_labels_by_name(self, names):
        labels = {name: LABELS[name] for name in names}

        values = evaluate(OUTPUT, labels, {0: "accuracy", 1: [MeanAbsoluteError()]})

        expected = evaluate(
            OUTPUT, LABELS, {"kind": "accuracy", "size": [MeanAbsoluteError()]}
        )
        assert [*values.values()] == [*expected.values()]

    @pytest.mark.parametrize(
        ("output", "labels", "metrics", "message"),
        [
            (tuple(OUTPUT.values()), LABELS, {0: "accuracy"}, "labels are {'kind': ."),
            (OUTPUT, LABELS, "accuracy", "select one of several by name: metrics="),
            (
                OUTPUT,
                LABELS,
                {"sizes": "r2"},
                "outputs are {'kind': ., 'size': .}; use",
            ),
            (SCORES, Y, {"kind": "f1"}, "outputs are one Tensor"),
            (OUTPUT, LABELS["kind"], {"kind": "mse"}, "compare numbers, got scores of"),
        ],
        ids=["number", "no name", "other name", "one output", "other labels"],
    )
    def test_other_outputs_are_refused(self, output, labels, metrics, message):
        with pytest.raises(ModelError, match=message):
            evaluate(output, labels, metrics, loss=lambda *_: torch.zeros(()))


class TestBinaryLosses:
    @pytest.mark.parametrize(
        ("loss", "output", "y"),
        [
            (BINARY, LOGITS, BITS),
            (nn.BCELoss(), LOGITS.sigmoid(), BITS),
            (nn.functional.binary_cross_entropy_with_logits, LOGITS, BITS),
            (BINARY, MANY_LOGITS, MANY),
        ],
        ids=["logits", "probabilities", "function", "several labels"],
    )
    def test_accuracy_needs_no_metrics(self, loss, output, y):
        values = evaluate(output, y, None, loss)

        right = (output > (0.5 if isinstance(loss, nn.BCELoss) else 0)) == (y == 1)
        assert values["accuracy"] == pytest.approx(right.double().mean().item())

    def test_soft_labels_have_none(self):
        soft = torch.full((ROWS,), 0.3)

        assert [*evaluate(LOGITS, soft, None, BINARY)] == ["loss"]

    def test_a_score_of_nan_is_never_right(self):
        nothing = torch.full((ROWS,), float("nan"))

        assert evaluate(nothing, BITS, None, BINARY)["accuracy"] == 0

    def test_validation_has_an_accuracy_that_can_be_monitored(self):
        trainer = trained(BINARY, callbacks=[daskdl.EarlyStopping("val_accuracy")])
        y = BITS[:, None]

        history = trainer.fit(X, y, validation=(X, y))

        expected = trainer.evaluate(X, y)["accuracy"]
        assert history.column("val_accuracy") == [pytest.approx(expected)]

    def test_validation_with_soft_labels_has_none(self):
        y = torch.full((ROWS, 1), 0.3)
        y[ROWS // 2 :] = 1

        history = trained(BINARY).fit(X, y, validation=(X, y))

        assert "val_accuracy" not in history[0]


X = random(9, ROWS, 4)


def trained(loss, outputs=1, **options):
    return daskdl.Trainer(
        lambda: nn.Linear(4, outputs),
        *(loss, torch.optim.SGD),
        client=False,
        **options,
    )


class TestTrainer:
    @pytest.mark.parametrize(
        ("loss", "y", "score"),
        [
            (CROSS, Y, sk.accuracy_score),
            (BINARY, BITS[:, None], sk.accuracy_score),
            (SQUARES, NUMBERS[:, :1], sk.r2_score),
        ],
        ids=["classes", "binary", "numbers"],
    )
    def test_the_score_is_that_of_scikit_learn(self, loss, y, score):
        trainer = trained(loss, outputs=3 if loss is CROSS else 1)
        trainer.fit(X, y)

        output = trainer.predict(X)
        predicted = {CROSS: output.argmax(1), BINARY: output > 0}.get(loss, output)
        expected = score(y.numpy(), predicted.numpy())
        assert trainer.score(X, y, batch_size=9) == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(
        ("loss", "y", "expected"),
        [
            (CROSS, Y, lambda z: z.softmax(1)),
            (
                BINARY,
                BITS[:, None],
                lambda z: torch.cat([(-z).sigmoid(), z.sigmoid()], 1),
            ),
        ],
        ids=["classes", "binary"],
    )
    def test_probabilities_follow_from_the_loss(self, loss, y, expected):
        trainer = trained(loss, outputs=3 if loss is CROSS else 1)
        trainer.fit(X, y)

        chances = trainer.predict_proba(X, batch_size=9)

        torch.testing.assert_close(chances, expected(trainer.predict(X)))
        fitted = trained(lambda output, y: output.mean())
        fitted.fit(X, y)
        with pytest.raises(OptionError, match="attribute scale: 'logits'"):
            fitted.predict_proba(X)


class TestFit:
    """Metrics of the validation data, on several replicas, are those of all rows."""

    def fitted(self, metrics, replicas=3, **options):
        trainer = daskdl.Trainer(
            lambda: nn.Linear(4, 3),
            *(CROSS, torch.optim.SGD),
            metrics=metrics,
            master=daskdl.GradientSharing(replicas_per_worker=replicas),
            client=False,
            **options,
        )
        trainer.fit(X, Y, epochs=2, batch_size=8, validation=(X, Y))
        return trainer

    def test_columns_are_what_evaluate_returns(self):
        metrics = ["f1", "roc_auc", sk.cohen_kappa_score, MulticlassAccuracy(3)]
        trainer = self.fitted([*metrics, "calibration"])

        values = trainer.evaluate(X, Y)

        row = trainer.history_[-1]
        names = ["ece", "mce", "f1", "roc_auc"]
        names += ["cohen_kappa_score", "MulticlassAccuracy"]
        columns = [f"val_{name}" for name in ["loss", "accuracy", *names]]
        assert [name for name in row if name.startswith("val_")] == columns
        for name in names:
            assert row[f"val_{name}"] == pytest.approx(values[name], rel=1e-6), name

    def test_a_metric_is_monitored(self):
        stopping = daskdl.EarlyStopping("val_f1", mode="max", target=0.0)

        trainer = self.fitted("f1", callbacks=[stopping])

        assert trainer.history_.stopping.reason == "target"
        assert len(trainer.history_) == 1

    def test_epochs_without_an_evaluation_have_none(self):
        trainer = self.fitted("f1", callbacks=[daskdl.Evaluate(every=2)])

        first, last = trainer.history_.column("val_f1")
        assert np.isnan(first)
        assert last == pytest.approx(trainer.evaluate(X, Y)["f1"])

    def test_states_of_rows_are_sent_up_to_a_bound(self, monkeypatch):
        monkeypatch.setattr("daskdl.evaluation.metric_state.MAX_SENT_BYTES", 9000)

        with pytest.raises(DataError, match=r"trainer.evaluate\(metrics=...\) after"):
            self.fitted(["top_2_accuracy", sk.cohen_kappa_score], replicas=1)

    def test_a_step_shows_no_outputs(self):
        trainer = daskdl.Trainer(
            nn.Linear(4, 3),
            optimizer="sgd",
            step=lambda model, batch: model(batch[0]).mean(),
            metrics="f1",
            client=False,
        )

        with pytest.raises(OptionError, match="log numbers in the step, or measure"):
            trainer.fit(X, Y, validation=(X, Y))
