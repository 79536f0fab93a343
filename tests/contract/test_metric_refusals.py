"""Refusals of metrics: messages with the value and the remedy."""

import re

import pytest
import torch
from sklearn.metrics import f1_score, make_scorer
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric, Running

import daskdl
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.metrics import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.metric_parts import measured, sample_of

NAN = float("nan")
PRESETS = (
    ClassificationMetrics,
    BinaryMetrics,
    MultilabelMetrics,
    RegressionMetrics,
    CalibrationMetrics,
)


def of(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


INDICES = of(4, dtype=torch.int64)

# Metrics, outputs, labels and the message.
SHAPES = {
    "labels of floats": (
        *(ClassificationMetrics(), of(4, 3), of(4)),
        'got torch.float32 of shape (4,); for labels 0 and 1 use "binary"',
    ),
    "one score": (
        *(ClassificationMetrics(), of(4, 1), INDICES),
        "2 or more classes along dimension 1, (B, C) or (B, C, T) for labels (B,) or "
        "(B, T), got outputs (4, 1) for labels (4,)",
    ),
    "three scores": (
        *(BinaryMetrics(), of(4, 3), INDICES),
        'got outputs (4, 3) for labels (4,); for several classes use "classification"',
    ),
    "one score of many": (
        *(MultilabelMetrics(), of(4, 3), INDICES),
        "got outputs (4, 3) for labels (4,); for one class per row use",
    ),
    "other columns": (
        *(RegressionMetrics(), of(4, 2), of(4, 3)),
        "must have the same shape, (B,), (B, n) or (B, T, n), got outputs (4, 2) for "
        "labels (4, 3)",
    ),
    "neither": (
        *(CalibrationMetrics(), of(4, 3), of(4, 2)),
        "the scores of two classes, (B, 2), got outputs (4, 3) for labels (4, 2)",
    ),
    **{
        f"names of {type(metrics).__name__}": (
            *(metrics, of(4, 3) if count == 3 else of(4), y),
            f"must be {count} names, got 1: ['a']",
        )
        for metrics, y, count in [
            (ClassificationMetrics(classes=["a"]), INDICES, 3),
            (BinaryMetrics(classes=["a"]), INDICES, 2),
            (MultilabelMetrics(classes=["a"]), of(4, 3), 3),
            (CalibrationMetrics(classes=["a"]), INDICES, 3),
            (RegressionMetrics(columns=["a"]), of(4, 3), 3),
        ]
    },
    "top": (
        *(ClassificationMetrics(top=3), of(4, 3), INDICES),
        "below the number of classes, got 3 of 3",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_outputs_and_labels_that_do_not_match_are_refused(case):
    metrics, output, y, message = SHAPES[case]

    with pytest.raises((DataError, ModelError, OptionError), match=re.escape(message)):
        metrics.collection(sample_of(output, y)._replace(output=output, y=y))


@pytest.mark.parametrize("kind", PRESETS)
def test_anything_but_one_tensor_is_refused(kind):
    sample = sample_of(of(4, 2), INDICES)

    with pytest.raises(
        ModelError, match=r"output must be a single tensor, got {'a': .}; se"
    ):
        kind().collection(sample._replace(output={"a": of(4, 2)}))
    with pytest.raises(DataError, match="labels must be a single tensor, got NoneType"):
        kind().collection(sample._replace(y=None))


INFINITE, MISSING = (torch.tensor([0.0, 0.0, x, 0.0]) for x in (float("inf"), NAN))
ROWS = {
    "too high": (ClassificationMetrics, of(2, 3), [0, 3], "0 to 2, got 3 (1 invalid)"),
    "negative": (CalibrationMetrics, of(2, 3), [-1, -1], "0 to 2, got -1 (2 invalid)"),
    "half": (BinaryMetrics, of(2), [0.5, 1], "0 or 1, got 0.5 (1 invalid)"),
    "NaN": (MultilabelMetrics, of(2, 1), [[NAN], [1]], "0 or 1, got nan (1 invalid)"),
    "minus": (
        MultilabelMetrics,
        of(2, 1),
        [[-1], [1]],
        "or mask the label with ignore=",
    ),
    "no number": (RegressionMetrics, of(2), [NAN, 1.0], "1 labels are NaN or infinite"),
    **{
        f"outputs of {kind.__name__}": (
            *(kind, output, [0] * 4),
            "1 of 4 outputs are NaN or infinite",
        )
        for kind, output in [
            (ClassificationMetrics, INFINITE[:, None] * torch.ones(3)),
            (CalibrationMetrics, MISSING),
            (BinaryMetrics, MISSING),
            (RegressionMetrics, INFINITE),
        ]
    },
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_cannot_be_measured_are_refused(case):
    kind, output, y, message = ROWS[case]
    y = torch.tensor(y)

    with pytest.raises((DataError, ModelError), match=re.escape(message)):
        measured(kind(), sample_of(output, y), output, y)


def test_outputs_of_ignored_rows_may_be_nan():
    output, y = torch.tensor([[1.0, 0.0], [NAN, NAN]]), torch.tensor([0, -100])

    values = measured(
        ClassificationMetrics(), sample_of(output, y, ignored=-100), output, y
    )

    assert (values["accuracy"], values["support"].tolist()) == (1.0, [1, 0])


def test_only_rounding_may_take_a_probability_out_of_range():
    output, y = torch.tensor([1.0000001, 0.2]), torch.tensor([1, 0])
    sample = sample_of(output, y, scale="probabilities")

    values = measured(BinaryMetrics(), sample, output, y)

    assert values["confusion_matrix"].tolist() == [[1, 0], [0, 1]]
    with pytest.raises(
        ModelError, match=r"must be probabilities.* -3.25 is not a prob"
    ):
        measured(BinaryMetrics(), sample, torch.tensor([-3.25, 4.0]), y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassificationMetrics(top=1), "top must be >= 2, got 1; top-1 acc"),
        (lambda: ClassificationMetrics(thresholds=1), "thresholds must be >= 2"),
        (lambda: BinaryMetrics(threshold=-0.1), r"in \[0, 1\), got -0.1"),
        (lambda: MultilabelMetrics(threshold=1.0), r"in \[0, 1\), got 1.0"),
        (lambda: CalibrationMetrics(bins=0), "bins must be >= 1, got 0"),
    ],
)
def test_options_outside_their_range_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def evaluated(metrics):
    # A loss of logits: scores outside [0, 1] are those of no other scale.
    output = torch.tensor([[2.0, -1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
    y = torch.arange(3)
    loss, model = torch.nn.CrossEntropyLoss(), torch.nn.Identity()
    return daskdl.evaluate(model, output, y, loss=loss, metrics=metrics, client=False)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("accurcy", "by name are 'accuracy', .* 'accurcy'; did you mean 'accuracy'"),
        ("neg_mean_squared_error", "did you mean 'mse'.* For any other metric, pass a"),
        ("top_0_accuracy", "got 'top_0_accuracy'; did you mean 'top_5_accuracy'?"),
        (
            "perplexity",
            r"the presets 'classification', .* got 'perplexity'. For any",
        ),
        ("specificity", "not defined for outputs .* use one of accuracy, balanced"),
        ("exact_match", "'exact_match' is not defined for outputs"),
        (7, "metrics must be a name such as 'accuracy', a function .* got 7"),
        ([], r"metrics must be a name such as 'accuracy', .* got \[\]"),
        (MeanSquaredError, "got the class MeanSquaredError; create one"),
        ({"a": 7}, r"metrics\['a'\] must be a function f\(y_true, y_pred\), .* got 7"),
        ({3: MeanMetric()}, r"metrics\[3\] must be .* under a name"),
        (make_scorer(f1_score), "a scorer calls .* pass the scorer's function"),
        (
            [f1_score, f1_score],
            "two metrics are named 'f1_score'; .*{'a': f1_score, 'b'",
        ),
        (
            lambda y_true, y_pred: y_pred.mode(),
            "metric '<lambda>' failed on labels of shape",
        ),
        ([MeanMetric(), MeanMetric()], "two metrics are named 'MeanMetric'; give"),
        ({"loss": MeanMetric()}, "must not include the name 'loss'"),
        (Running(MeanMetric(), 3), r"metrics\['Running'\] depends on the order"),
    ],
)
def test_arguments_that_are_no_metrics_are_refused(metrics, message):
    with pytest.raises(OptionError, match=message):
        evaluated(metrics)


ACCURACY = MulticlassAccuracy(3)


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (ACCURACY, ["MulticlassAccuracy"]),
        (MetricCollection([ACCURACY], prefix="a/"), ["a/MulticlassAccuracy"]),
        ({"a": MetricCollection([ACCURACY])}, ["a_MulticlassAccuracy"]),
        ([ACCURACY, {"b": ACCURACY}], ["MulticlassAccuracy", "b"]),
    ],
    ids=["metric", "collection", "collection by name", "sequence"],
)
def test_metrics_of_torchmetrics_have_names_and_are_never_changed(metrics, names):
    ACCURACY.reset()
    ACCURACY.update(torch.tensor([0, 1]), torch.tensor([1, 0]))

    values = evaluated(metrics)

    assert [*values] == ["loss", *names]
    assert set(values.values()) == {values["loss"], 1.0}
    assert (ACCURACY.update_count, int(ACCURACY.tp.sum())) == (1, 0)


def test_only_metrics_for_classification_get_probabilities():
    numbers, scores = MeanSquaredError(), MinMaxMetric(BinaryAUROC())
    output, y = torch.tensor([-1.0, 3.0]), torch.tensor([0.0, 1.0])

    values = daskdl.evaluate(
        torch.nn.Identity(),
        *(output, y),
        loss=torch.nn.BCEWithLogitsLoss(),
        metrics=[{"auc": scores}, numbers],
        client=False,
    )

    assert values["raw"] == 1.0
    assert values["MeanSquaredError"] == ((output - y) ** 2).mean().item()
