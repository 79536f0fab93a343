"""What may be given as ``metrics``."""

import pytest
import torch
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric, Running

from daskdl.errors import OptionError
from daskdl.evaluation.metric_sets import metric_sets
from daskdl.metrics import BinaryMetrics, ClassificationMetrics, RegressionMetrics


def names(sets):
    return [(sorted(one.metrics), one.scored) for one in sets]


def test_a_name_and_a_set_are_sets():
    assert metric_sets("regression") == (RegressionMetrics(),)
    assert metric_sets(BinaryMetrics(0.3)) == (BinaryMetrics(0.3),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (MeanSquaredError(), ["MeanSquaredError"]),
        (MetricCollection([MeanSquaredError()], prefix="a/"), ["a/MeanSquaredError"]),
        ({"error": MeanSquaredError()}, ["error"]),
        ({"a": MetricCollection([MeanSquaredError()])}, ["a_MeanSquaredError"]),
        ([MeanSquaredError(), {"b": MeanMetric()}], ["MeanSquaredError", "b"]),
    ],
    ids=["metric", "collection", "mapping", "collection by name", "sequence"],
)
def test_metrics_of_torchmetrics_have_names(given, expected):
    assert names(metric_sets(given)) == [(expected, False)]


def test_those_for_classification_are_a_set_of_their_own():
    given = ["classification", {"m": MeanMetric(), "auc": MinMaxMetric(BinaryAUROC())}]

    first, *own = metric_sets(given)

    assert first == ClassificationMetrics()
    assert names(own) == [(["auc"], True), (["m"], False)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("accuracy", "metrics by name are 'classification', .* got 'accuracy'"),
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
def test_anything_else_is_refused(given, message):
    with pytest.raises(OptionError, match=message):
        metric_sets(given)


def test_what_is_given_is_never_changed():
    metric = MulticlassAccuracy(3)
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    (own,) = metric_sets(metric)

    live = own.collection(None)["MulticlassAccuracy"]
    live.update(torch.tensor([0]), torch.tensor([0]))

    assert (live.update_count, metric.update_count) == (1, 1)
    assert (int(live.tp.sum()), int(metric.tp.sum())) == (1, 1)
    assert int(metric.fn.sum()) == 1
