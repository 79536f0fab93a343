"""The presets of classes: parts give what the whole gives, and scikit-learn says so."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

from daskdl.errors import OptionError
from daskdl.metrics import ClassificationMetrics
from tests.support.metric_parts import (
    CUTS,
    ROWS,
    check_close,
    classes,
    measured,
    random,
    shown_of,
    softmax,
)

MASKED = -100


def balanced():
    y = classes(1, ROWS, 3)
    return random(0, ROWS, 3) + torch.nn.functional.one_hot(y, 3), y, {}


def absent():
    """Of 5 classes 0 and 4 have labels, 4 is never predicted, 2 has none and is, and
    1 and 3 do not occur.
    """
    y = (classes(2, ROWS, 2) * 4).sort().values
    scores = random(3, ROWS, 5)
    scores[:, [1, 3, 4]] -= 9
    return scores, y, {}


def one_class():
    return random(4, ROWS, 3), torch.ones(ROWS, dtype=torch.int64), {}


def ties():
    scores = (random(5, ROWS, 3).softmax(dim=1) * 8).round() / 8
    return scores, classes(6, ROWS, 3), {"scale": "probabilities"}


def logs():
    return (
        random(7, ROWS, 7).log_softmax(1),
        classes(8, ROWS, 7),
        {"scale": "log_probabilities"},
    )


def two_classes():
    return random(9, ROWS, 2), classes(10, ROWS, 2), {}


def masked_steps():
    """Sequences of 4 steps, of which some, in a few rows all, do not count."""
    y = classes(11, ROWS * 4, 3).reshape(ROWS, 4)
    y[random(12, ROWS, 4) > 0.5] = MASKED
    y[50:60] = MASKED
    return random(13, ROWS, 3, 4), y, {"ignored": MASKED}


DATA = {
    make.__name__: make
    for make in (balanced, absent, one_class, ties, logs, two_classes, masked_steps)
}


def flat(scores, y, facts):
    """Probabilities and labels of what counts, by numpy alone."""
    chances = {
        "logits": softmax,
        "probabilities": lambda s: s.numpy().astype(np.float64),
        "log_probabilities": lambda s: np.exp(s.numpy().astype(np.float64)),
    }[facts.get("scale", "logits")](scores)
    chances = np.moveaxis(chances, 1, -1).reshape(-1, scores.shape[1])
    labels = y.numpy().reshape(-1)
    return chances[labels != MASKED], labels[labels != MASKED]


def reference(scores, y, facts):
    """What scikit-learn says."""
    chances, labels = flat(scores, y, facts)
    every = np.arange(scores.shape[1])
    best = chances.argmax(axis=1)
    seen = np.union1d(labels, best)
    both = [0 < (labels == k).sum() < len(labels) for k in every]
    areas = {
        "roc_auc": [
            sk.roc_auc_score(labels == k, chances[:, k]) if both[k] else np.nan
            for k in every
        ],
        "average_precision": [
            sk.average_precision_score(labels == k, chances[:, k])
            if (labels == k).any()
            else np.nan
            for k in every
        ],
    }
    scorers = {"precision": sk.precision_score, "recall": sk.recall_score}
    scorers["f1"] = sk.f1_score
    expected = {
        "accuracy": sk.accuracy_score(labels, best),
        "mcc": sk.matthews_corrcoef(labels, best),
        "confusion_matrix": sk.confusion_matrix(labels, best, labels=every),
        "support": np.bincount(labels, minlength=len(every)),
        "predicted": np.bincount(best, minlength=len(every)),
    }
    for name, scorer in scorers.items():
        settings_ = {"zero_division": 0}
        expected[name] = scorer(labels, best, labels=seen, average="macro", **settings_)
        expected[f"{name}_per_class"] = scorer(
            labels, best, labels=every, average=None, **settings_
        )
    for name, each in areas.items():
        expected[f"{name}_per_class"] = np.array(each)
        defined = [value for value in each if not np.isnan(value)]
        expected[name] = np.mean(defined) if defined else np.nan
    return expected


@pytest.mark.parametrize("data", DATA)
def test_each_metric_is_that_of_scikit_learn(data):
    scores, y, facts = DATA[data]()

    values = measured(
        ClassificationMetrics(), shown_of(scores, y, **facts), scores, y, [1, 7, 60]
    )

    check_close(values, reference(scores, y, facts), atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("data", DATA)
def test_parts_give_what_the_whole_gives(data, cuts):
    scores, y, facts = DATA[data]()
    shown = shown_of(scores, y, **facts)
    whole = measured(ClassificationMetrics(), shown, scores, y)

    parts = measured(ClassificationMetrics(), shown, scores, y, CUTS[cuts])

    np.testing.assert_equal(parts, whole)


@given(st.lists(st.integers(0, ROWS), max_size=12).map(sorted))
@settings(max_examples=30)
def test_parts_of_any_size_give_what_the_whole_gives(cuts):
    scores, y, facts = masked_steps()
    shown = shown_of(scores, y, **facts)

    parts = measured(ClassificationMetrics(thresholds=9), shown, scores, y, cuts)

    whole = measured(ClassificationMetrics(thresholds=9), shown, scores, y)
    np.testing.assert_equal(parts, whole)


@pytest.mark.parametrize(("count", "top"), [(3, 2), (5, 2), (6, 5), (30, 5)])
def test_the_label_is_among_the_best_scores(count, top):
    scores, y = random(20, ROWS, count), classes(21, ROWS, count)

    values = measured(
        ClassificationMetrics(), shown_of(scores, y), scores, y, CUTS["unequal"]
    )

    expected = sk.top_k_accuracy_score(y, scores, k=top, labels=np.arange(count))
    assert values[f"top_{top}_accuracy"] == pytest.approx(expected, abs=1e-12)


def test_how_many_scores_are_the_best_can_be_said():
    scores, y = random(22, ROWS, 6), classes(23, ROWS, 6)

    values = measured(ClassificationMetrics(top=3), shown_of(scores, y), scores, y)

    expected = sk.top_k_accuracy_score(y, scores, k=3, labels=np.arange(6))
    assert values["top_3_accuracy"] == pytest.approx(expected, abs=1e-12)


def test_of_two_classes_both_are_among_the_best_and_that_is_not_told():
    scores, y, facts = two_classes()

    values = measured(ClassificationMetrics(), shown_of(scores, y, **facts), scores, y)

    assert [name for name in values if name.startswith("top_")] == []


MICRO = {"average": "micro"}
OF_TORCHMETRICS = {
    "accuracy": partial(tm.multiclass_accuracy, **MICRO),
    "precision": partial(tm.multiclass_precision, average="macro"),
    "recall": partial(tm.multiclass_recall, average="macro"),
    "f1": partial(tm.multiclass_f1_score, average="macro"),
    "mcc": tm.multiclass_matthews_corrcoef,
    "confusion_matrix": tm.multiclass_confusion_matrix,
    "roc_auc": tm.multiclass_auroc,
    "roc_auc_per_class": partial(tm.multiclass_auroc, average="none"),
    "average_precision": tm.multiclass_average_precision,
    "top_5_accuracy": partial(tm.multiclass_accuracy, **MICRO, top_k=5),
}


def test_each_metric_is_that_of_torchmetrics():
    scores, y, facts = logs()

    values = measured(ClassificationMetrics(), shown_of(scores, y, **facts), scores, y)

    given_ = scores.exp().double(), y, 7
    expected = {name: metric(*given_) for name, metric in OF_TORCHMETRICS.items()}
    check_close(values, expected, atol=1e-6)


@pytest.mark.parametrize("thresholds", [2, 5, 100])
@pytest.mark.parametrize("data", ["balanced", "logs", "ties"])
def test_areas_at_some_thresholds_are_those_of_torchmetrics(data, thresholds):
    scores, y, facts = DATA[data]()
    chances, _ = flat(scores, y, facts)
    chances = np.minimum(chances, 0.999)  # at 1 they leave out the start of the curve
    metrics = ClassificationMetrics(thresholds=thresholds)
    shown = shown_of(scores, y, scale="probabilities")

    values = measured(metrics, shown, torch.from_numpy(chances), y, [1, 7, 60])

    given_ = torch.from_numpy(chances), y, chances.shape[1]
    roc = tm.multiclass_auroc(*given_, thresholds=thresholds, average="none")
    ap = tm.multiclass_average_precision(*given_, thresholds=thresholds, average="none")
    np.testing.assert_allclose(values["roc_auc_per_class"], roc, atol=1e-6)
    np.testing.assert_allclose(values["average_precision_per_class"], ap, atol=1e-6)


def test_thresholds_bound_what_is_kept():
    scores, y, facts = balanced()
    shown = shown_of(scores, y, **facts)
    live = ClassificationMetrics(thresholds=50).collection(shown)

    for _ in range(10):
        live["ranking"].update(*ClassificationMetrics().prepared(shown, scores, y))

    states = live["ranking"].metric_state.values()
    assert sum(state.numel() for state in states) == 2 * 3 * 50


def test_a_share_is_as_exact_as_it_can_be():
    y = torch.zeros(10, dtype=torch.int64)
    scores = torch.tensor([[1.0, 0.0]]).repeat(10, 1)
    scores[0] = torch.tensor([0.0, 1.0])

    values = measured(ClassificationMetrics(), shown_of(scores, y), scores, y)

    assert values["accuracy"] == 0.9  # which float32 is not


def test_a_million_rows_agree_with_scikit_learn():
    rows = 1_000_000
    y = classes(30, rows, 2)
    scores = random(31, rows, 2) + 0.5 * torch.nn.functional.one_hot(y, 2)

    values = measured(ClassificationMetrics(), shown_of(scores, y), scores, y, [9, 999])

    chances = softmax(scores)[:, 1]
    expected = {
        "roc_auc": sk.roc_auc_score(y, chances),
        "mcc": sk.matthews_corrcoef(y, scores.argmax(dim=1)),
    }
    assert {name: values[name] for name in expected} == pytest.approx(
        expected, abs=1e-9
    )
    ap = sk.average_precision_score(y, chances)
    assert values["average_precision_per_class"][1] == pytest.approx(ap, abs=1e-9)


def test_scores_of_batches_far_from_each_other_are_treated_alike():
    """Torchmetrics takes what it gets for logits if any of it is outside [0, 1]."""
    scores = torch.tensor([[0.1, 0.6, 0.3], [5.0, -5.0, 0.0]])
    y = torch.tensor([1, 0])

    values = measured(ClassificationMetrics(), shown_of(scores, y), scores, y, [1])

    np.testing.assert_equal(
        values, measured(ClassificationMetrics(), shown_of(scores, y), scores, y)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top": 1}, "top must be 2 or more, got 1: 1 is accuracy"),
        ({"thresholds": 1}, "thresholds must be 2 or more, or None for all"),
    ],
)
def test_options_outside_their_range_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        ClassificationMetrics(**arguments)


def test_more_best_scores_than_classes_are_refused():
    scores, y, facts = balanced()

    with pytest.raises(OptionError, match="below the number of classes, got 3 of 3"):
        ClassificationMetrics(top=3).collection(shown_of(scores, y, **facts))
