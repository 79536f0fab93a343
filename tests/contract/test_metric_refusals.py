"""What presets refuse: messages say what was got, what is allowed, and what to do."""

import re

import pytest
import torch
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric, Running

from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.metric_sets import SampleBatch, metric_sets
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

SHAPES = {
    "labels of floats": (
        *(ClassificationMetrics, of(4, 3), of(4)),
        'integers, got torch.float32 of shape (4,): for labels 0 and 1 use "binary"',
    ),
    "one-hot": (
        *(ClassificationMetrics, of(4, 3), of(4, 3)),
        "of one-hot rows give y.argmax(1)",
    ),
    "one score": (
        *(ClassificationMetrics, of(4, 1), INDICES),
        "2 classes or more, along dimension 1, as (B, C) or (B, C, T) for labels (B,) "
        "or (B, T); got outputs (4, 1) for labels (4,)",
    ),
    "classes last": (
        *(ClassificationMetrics, of(4, 5, 3), of(4, 5, dtype=torch.int64)),
        "got outputs (4, 5, 3) for labels (4, 5)",
    ),
    "three scores": (
        *(BinaryMetrics, of(4, 3), INDICES),
        'got outputs (4, 3) for labels (4,): for more classes use "classification"',
    ),
    "two rows of one": (
        *(BinaryMetrics, of(4, 2), of(4, 1)),
        "got outputs (4, 2) for labels (4, 1)",
    ),
    "one score of many": (
        *(MultilabelMetrics, of(4, 3), INDICES),
        "got outputs (4, 3) for labels (4,): for one class of each row use",
    ),
    "one dimension": (
        *(MultilabelMetrics, of(4), of(4)),
        "both be (B, L), or (B, L, T)",
    ),
    "other columns": (
        *(RegressionMetrics, of(4, 2), of(4, 3)),
        "must have the same shape, (B,), (B, n) or (B, T, n), got outputs (4, 2) for "
        "labels (4, 3)",
    ),
    "numbers for classes": (
        *(RegressionMetrics, of(4, 3), INDICES),
        'for class indices use "classification"',
    ),
    "neither": (
        *(CalibrationMetrics, of(4, 3), of(4, 2)),
        "two class scores, as (B, 2); got outputs (4, 3) for labels (4, 2)",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_outputs_and_labels_that_do_not_go_together_are_refused(case):
    kind, output, y, message = SHAPES[case]

    with pytest.raises((DataError, ModelError), match=re.escape(message)):
        kind().collection(SampleBatch(output, y, "logits", None, None))


@pytest.mark.parametrize("kind", PRESETS)
def test_outputs_of_several_tensors_are_refused(kind):
    message = "need output of one tensor, got {'a': .}: wrap the model"
    output, y = {"a": of(4, 2)}, INDICES

    with pytest.raises(ModelError, match=re.escape(message)):
        kind().collection(sample_of(of(4, 2), y)._replace(output=output))


@pytest.mark.parametrize("kind", PRESETS)
def test_missing_labels_are_refused(kind):
    with pytest.raises(DataError, match="need labels of one tensor, got NoneType"):
        kind().collection(sample_of(of(4, 2), INDICES)._replace(y=None))


LABELS = {
    "too high": (ClassificationMetrics, of(2, 3), [0, 3], "0 to 2, got 3 (1 such)"),
    "negative": (CalibrationMetrics, of(2, 3), [-1, -1], "0 to 2, got -1 (2 such)"),
    "two": (BinaryMetrics, of(2), [1, 2], "0 or 1, got 2 (1 such)"),
    "half": (BinaryMetrics, of(2), [0.5, 1], "0 or 1, got 0.5 (1 such)"),
    "NaN": (MultilabelMetrics, of(2, 1), [[NAN], [1]], "0 or 1, got nan (1 such)"),
    "minus": (MultilabelMetrics, of(2, 1), [[-1], [1]], "name the label that does not"),
    "no number": (RegressionMetrics, of(2), [NAN, 1.0], "1 labels are NaN or infinite"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_are_none_are_refused(case):
    kind, output, y, message = LABELS[case]
    y = torch.tensor(y)

    with pytest.raises(DataError, match=re.escape(message)):
        measured(kind(), sample_of(output, y), output, y)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize(
    ("kind", "shape", "labels"),
    [
        (ClassificationMetrics, (4, 3), INDICES),
        (CalibrationMetrics, (4, 3), INDICES),
        (RegressionMetrics, (4,), of(4)),
    ],
)
def test_outputs_that_are_no_numbers_are_refused(kind, shape, labels, value):
    output = of(*shape)
    output[2] = value

    with pytest.raises(ModelError, match="1 of 4 outputs are NaN or infinite"):
        measured(kind(), sample_of(output, labels), output, labels)


@pytest.mark.parametrize("kind", [BinaryMetrics, CalibrationMetrics])
def test_scores_of_one_label_that_are_no_numbers_are_refused(kind):
    output = torch.tensor([0.0, NAN])

    with pytest.raises(ModelError, match="1 of 2 outputs are NaN or infinite"):
        measured(kind(), sample_of(output, INDICES[:2]), output, INDICES[:2])


def test_a_row_that_does_not_count_may_be_no_number():
    output, y = torch.tensor([[1.0, 0.0], [NAN, NAN]]), torch.tensor([0, -100])

    shown = sample_of(output, y, ignored=-100)
    values = measured(ClassificationMetrics(), shown, output, y)

    assert (values["accuracy"], values["support"].tolist()) == (1.0, [1, 0])


def test_scores_that_are_no_probabilities_where_the_loss_takes_such_are_refused():
    output = torch.tensor([-3.25, 4.0])

    with pytest.raises(ModelError, match=r"must be probabilities.* got -3.25 where"):
        measured(
            BinaryMetrics(),
            sample_of(output, INDICES[:2], scale="probabilities"),
            output,
            INDICES[:2],
        )


def test_a_probability_that_rounding_took_above_1_is_1():
    output = torch.tensor([1.0000001, 0.2])

    shown = sample_of(output, INDICES[:2], scale="probabilities")
    values = measured(CalibrationMetrics(bins=2), shown, output, INDICES[:2])

    assert values["bin_confidence"].tolist() == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize(
    ("metrics", "output", "y", "count"),
    [
        (ClassificationMetrics(classes=["a"]), of(4, 3), INDICES, 3),
        (BinaryMetrics(classes=["a"]), of(4), INDICES, 2),
        (MultilabelMetrics(classes=["a"]), of(4, 3), of(4, 3), 3),
        (CalibrationMetrics(classes=["a"]), of(4, 3), INDICES, 3),
        (RegressionMetrics(columns=["a"]), of(4, 3), of(4, 3), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_for_other_than_there_are_is_refused(metrics, output, y, count):
    with pytest.raises(OptionError, match=rf"must be {count} names, got 1: \['a'\]"):
        metrics.collection(sample_of(output, y))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            "accuracy",
            "metrics by name are 'classification', 'binary', 'multilabel', "
            "'regression', 'calibration', got 'accuracy': give one of these, an object "
            "of daskdl.metrics",
        ),
        (7, "metrics must be the name of a preset, .* got 7"),
        ([], r"metrics must be the name of a preset, .* got \[\]"),
        ({}, r"metrics must be .* got \{\}"),
        (MeanSquaredError, "got the class MeanSquaredError; create one"),
        ({"a": "binary"}, r"metrics\['a'\] must be a Metric .* got 'binary'"),
        ({3: MeanMetric()}, r"metrics\[3\] must be .* by a name"),
        ([MeanMetric(), MeanMetric()], "two named 'MeanMetric'; name them"),
        ({"loss": MeanMetric()}, "must not have one named 'loss'"),
        (Running(MeanMetric(), 3), r"metrics\['Running'\] is of the last updates"),
        (lambda output, y: 0, "metrics must be .* got <function"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, message):
    with pytest.raises(OptionError, match=message):
        metric_sets(metrics)


@pytest.mark.parametrize("kind", PRESETS)
def test_a_name_is_the_preset_as_it_comes(kind):
    name = kind.__name__.removesuffix("Metrics").lower()

    assert metric_sets(name) == (kind(),)


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (MeanSquaredError(), ["MeanSquaredError"]),
        (MetricCollection([MeanSquaredError()], prefix="a/"), ["a/MeanSquaredError"]),
        ({"error": MeanSquaredError()}, ["error"]),
        ({"a": MetricCollection([MeanSquaredError()])}, ["a_MeanSquaredError"]),
        ([MeanSquaredError(), {"b": MeanMetric()}], ["MeanSquaredError", "b"]),
    ],
    ids=["metric", "collection", "mapping", "collection by name", "sequence"],
)
def test_metrics_of_torchmetrics_have_names(metrics, names):
    (own,) = metric_sets(metrics)

    assert (list(own.metrics), own.scored) == (names, False)


def test_those_for_classification_are_a_set_of_their_own():
    given = ["classification", {"m": MeanMetric(), "auc": MinMaxMetric(BinaryAUROC())}]

    first, *own = metric_sets(given)

    assert first == ClassificationMetrics()
    sets = [(list(one.metrics), one.scored) for one in own]
    assert sets == [(["auc"], True), (["m"], False)]


def test_what_is_given_is_never_changed():
    metric = MulticlassAccuracy(3)
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    (own,) = metric_sets(metric)

    live = own.collection(None)["MulticlassAccuracy"]
    live.update(torch.tensor([0]), torch.tensor([0]))

    assert (live.update_count, metric.update_count) == (1, 1)
    assert (int(live.tp.sum()), int(metric.tp.sum())) == (1, 1)
