"""The presets of one label and of several: parts give the whole, as scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

from daskdl.errors import OptionError
from daskdl.evaluation.streaming import MASKED, AllRight
from daskdl.metrics import BinaryMetrics, MultilabelMetrics
from tests.support.metric_parts import (
    CUTS,
    ROWS,
    check_close,
    classes,
    measured,
    random,
    shown_of,
)

NAN = float("nan")
LABELS = classes(40, ROWS, 2)
SCORES = random(41, ROWS) + LABELS
STEPS = classes(42, ROWS * 3, 2).reshape(ROWS, 3).float()


def masked(value):
    y = STEPS.clone()
    y[random(43, ROWS, 3) > 0.7] = value
    y[20:30] = value  # of whole parts nothing counts
    return y


# Outputs, labels, what the preset is told, and facts.
BINARY = {
    "flat": (SCORES, LABELS, {}, {}),
    "column": (SCORES[:, None], LABELS.float(), {}, {}),
    "column of labels": (SCORES, LABELS[:, None].bool(), {}, {}),
    "bools": (SCORES, LABELS.bool(), {}, {}),
    "two scores": (torch.stack([-SCORES, SCORES], 1), LABELS, {}, {}),
    "probabilities": (SCORES.sigmoid(), LABELS, {}, {"scale": "probabilities"}),
    "threshold": (SCORES, LABELS, {"threshold": 0.8}, {}),
    "no 1": (SCORES, LABELS * 0, {}, {}),
    "no 0": (SCORES, LABELS * 0 + 1, {}, {}),
    "never 1": (SCORES - 99, LABELS, {}, {}),
    "steps": (random(44, ROWS, 3), masked(-1), {"ignore": -1}, {}),
    "steps without": (random(44, ROWS, 3), masked(NAN), {"ignore": NAN}, {}),
    "steps of two scores": (
        random(45, ROWS, 2, 3),
        masked(-100).long(),
        {},
        {"ignored": -100},
    ),
}


def chances_of(output, y, options, facts):
    """Probabilities of 1 and labels of what counts, by numpy."""
    scores = output.numpy().astype(np.float64)
    if output.ndim == y.ndim + 1 and output.shape[1] == 2:
        scores = scores[:, 1] - scores[:, 0]
    if facts.get("scale", "logits") == "logits":
        scores = 1 / (1 + np.exp(-scores))
    labels = y.numpy().astype(np.float64).reshape(-1)
    ignored = (options.get("ignore"), facts.get("ignored"))
    counts = ~np.isnan(labels) & ~np.isin(labels, [i for i in ignored if i is not None])
    return scores.reshape(-1)[counts], labels[counts].astype(int)


def binary_reference(chances, labels, threshold=0.5):
    best = (chances > threshold).astype(int)
    both = 0 < labels.sum() < len(labels)
    none = {"zero_division": 0}
    return {
        "accuracy": sk.accuracy_score(labels, best),
        "precision": sk.precision_score(labels, best, **none),
        "recall": sk.recall_score(labels, best, **none),
        "specificity": sk.recall_score(labels, best, pos_label=0, **none),
        "f1": sk.f1_score(labels, best, **none),
        "mcc": sk.matthews_corrcoef(labels, best) if labels.any() or best.any() else 0,
        "confusion_matrix": sk.confusion_matrix(labels, best, labels=[0, 1]),
        "roc_auc": sk.roc_auc_score(labels, chances) if both else NAN,
        "average_precision": (
            sk.average_precision_score(labels, chances) if labels.any() else NAN
        ),
    }


@pytest.mark.parametrize("data", BINARY)
def test_each_binary_metric_is_that_of_scikit_learn(data):
    output, y, options, facts = BINARY[data]

    shown = shown_of(output, y, **facts)
    values = measured(BinaryMetrics(**options), shown, output, y, [1, 7, 60])

    chances, labels = chances_of(output, y, options, facts)
    expected = binary_reference(chances, labels, options.get("threshold", 0.5))
    check_close(values, expected, atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("data", BINARY)
def test_parts_of_one_label_give_what_the_whole_gives(data, cuts):
    output, y, options, facts = BINARY[data]
    shown = shown_of(output, y, **facts)

    parts = measured(BinaryMetrics(**options), shown, output, y, CUTS[cuts])

    whole = measured(BinaryMetrics(**options), shown, output, y)
    np.testing.assert_equal(parts, whole)


@pytest.mark.parametrize("thresholds", [2, 7, 200])
def test_binary_areas_at_some_thresholds_are_those_of_torchmetrics(thresholds):
    metrics = BinaryMetrics(thresholds=thresholds)

    shown = shown_of(SCORES, LABELS)
    values = measured(metrics, shown, SCORES, LABELS, CUTS["rows"])

    chances = SCORES.double().sigmoid()
    roc = tm.binary_auroc(chances, LABELS, thresholds=thresholds)
    ap = tm.binary_average_precision(chances, LABELS, thresholds=thresholds)
    assert values["roc_auc"] == pytest.approx(roc.item(), abs=1e-6)
    assert values["average_precision"] == pytest.approx(ap.item(), abs=1e-6)


def test_a_score_on_the_threshold_is_no_1():
    output, y = torch.tensor([0.0, 0.0]), torch.tensor([1, 0])

    values = measured(BinaryMetrics(), shown_of(output, y), output, y)

    assert values["confusion_matrix"].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
@pytest.mark.parametrize("kind", [BinaryMetrics, MultilabelMetrics])
def test_a_threshold_outside_its_range_is_refused(kind, threshold):
    with pytest.raises(OptionError, match=rf"in \[0, 1\), got {threshold}"):
        kind(threshold=threshold)


MANY = classes(46, ROWS * 4, 2).reshape(ROWS, 4)[torch.randperm(ROWS)]
MANY_SCORES = random(47, ROWS, 4) + MANY


def changed(column, value):
    y = MANY.clone()
    y[:, column] = value
    return y


def some_masked(value):
    y = MANY.double()
    y[random(48, ROWS, 4) > 0.8] = value
    y[40:50] = value
    return y


MULTILABEL = {
    "all": (MANY_SCORES, MANY, {}, {}),
    "one": (MANY_SCORES[:, :1], MANY[:, :1].bool(), {}, {}),
    "unlabelled": (MANY_SCORES, changed(2, 0), {}, {}),
    "always": (MANY_SCORES, changed(1, 1).float(), {"threshold": 0.3}, {}),
    "never": (
        MANY_SCORES - torch.tensor([0.0, 0, 0, 99]),
        changed(3, 0),
        {},
        {},
    ),
    "masked": (MANY_SCORES, some_masked(-1), {"ignore": -1}, {}),
    "NaN": (MANY_SCORES, some_masked(NAN), {"ignore": NAN}, {}),
    "steps": (
        random(49, ROWS, 3, 2),
        classes(50, ROWS * 6, 2).reshape(ROWS, 3, 2),
        {},
        {},
    ),
}
OF_EACH = ("accuracy", "precision", "recall", "f1", "roc_auc", "average_precision")


def by_label(output, y):
    """Rows by labels, also of steps."""
    if y.ndim == 2:
        return output, y
    return output.movedim(1, -1).flatten(0, 1), y.movedim(1, -1).flatten(0, 1)


def labels_reference(output, y, options, facts):
    output, y = by_label(output, y)
    threshold = options.get("threshold", 0.5)
    each = [
        chances_of(output[:, k], y[:, k], options, facts) for k in range(y.shape[1])
    ]
    per = [binary_reference(*one, threshold) for one in each]
    seen = [(c > threshold).any() or bool(t.any()) for c, t in each]
    expected = {
        f"{name}_per_class": np.array([one[name] for one in per]) for name in OF_EACH
    }
    expected |= {
        name: np.nanmean(expected[f"{name}_per_class"][seen]) for name in OF_EACH
    }
    chances, labels = (np.concatenate(both) for both in zip(*each, strict=True))
    expected["accuracy"] = sk.accuracy_score(labels, chances > threshold)
    expected["support"] = np.array([t.sum() for _, t in each])
    expected["predicted"] = np.array([(c > threshold).sum() for c, _ in each])
    matrices = [one["confusion_matrix"] for one in per]
    return {**expected, "confusion_matrices": np.stack(matrices)}


@pytest.mark.parametrize("data", MULTILABEL)
def test_each_metric_of_labels_is_that_of_scikit_learn(data):
    output, y, options, facts = MULTILABEL[data]

    shown = shown_of(output, y, **facts)
    values = measured(MultilabelMetrics(**options), shown, output, y, [1, 7, 60])

    check_close(values, labels_reference(output, y, options, facts), atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("data", MULTILABEL)
def test_parts_of_many_labels_give_what_the_whole_gives(data, cuts):
    output, y, options, facts = MULTILABEL[data]
    shown = shown_of(output, y, **facts)

    parts = measured(MultilabelMetrics(**options), shown, output, y, CUTS[cuts])

    whole = measured(MultilabelMetrics(**options), shown, output, y)
    np.testing.assert_equal(parts, whole)


@pytest.mark.parametrize("data", ["all", "one", "unlabelled", "never", "steps"])
def test_rows_that_match_exactly_are_those_of_scikit_learn(data):
    output, y, options, facts = MULTILABEL[data]

    shown = shown_of(output, y, **facts)
    values = measured(MultilabelMetrics(**options), shown, output, y, [3])

    output, y = by_label(output, y)
    expected = sk.accuracy_score(y, output > 0)
    assert values["exact_match"] == pytest.approx(expected, abs=1e-12)


def test_what_is_masked_makes_no_row_wrong_and_a_row_of_nothing_none():
    output = torch.tensor([[9.0, 9.0], [9.0, 9.0], [9.0, 9.0]])
    y = torch.tensor([[1, -1], [0, -1], [-1, -1]])

    metrics = MultilabelMetrics(ignore=-1)
    values = measured(metrics, shown_of(output, y), output, y)

    assert (values["exact_match"], values["rows"]) == (0.5, 2)


def test_a_score_that_does_not_count_may_be_anything():
    output = torch.tensor([[9.0, NAN], [-9.0, 9.0]])
    y = torch.tensor([[1, -1], [0, 1]])

    metrics = MultilabelMetrics(ignore=-1)
    values = measured(metrics, shown_of(output, y), output, y)

    assert values["accuracy"] == 1.0


@pytest.mark.parametrize("thresholds", [3, 50])
def test_what_is_masked_is_not_counted_at_thresholds_either(thresholds):
    output, y, options, facts = MULTILABEL["masked"]

    metrics = MultilabelMetrics(thresholds=thresholds, **options)
    values = measured(metrics, shown_of(output, y), output, y, CUTS["unequal"])

    each = [chances_of(output[:, k], y[:, k], options, facts) for k in range(4)]
    expected = [
        tm.binary_auroc(*map(torch.from_numpy, one), thresholds=thresholds)
        for one in each
    ]
    np.testing.assert_allclose(values["roc_auc_per_class"], expected, atol=1e-6)


def test_a_masked_label_is_right_whatever_its_score():
    exact = AllRight(0.5)

    exact.update(torch.tensor([[0.9, 0.9]]), torch.tensor([[1, MASKED]]))

    assert exact.compute() == (1, 1)


def test_a_probability_that_rounding_took_above_1_makes_no_logits_of_others():
    output, y = torch.tensor([1.0000001, 0.2]), torch.tensor([1, 0])

    shown = shown_of(output, y, scale="probabilities")
    values = measured(BinaryMetrics(), shown, output, y)

    assert values["confusion_matrix"].tolist() == [[1, 0], [0, 1]]
