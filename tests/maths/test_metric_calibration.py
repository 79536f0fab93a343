"""The preset of calibration: parts give the whole, as numpy and torchmetrics."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torchmetrics.functional import classification as tm

from daskdl.errors import OptionError
from daskdl.metrics import CalibrationMetrics
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
LABELS = classes(70, ROWS, 4)
SCORES = 2 * random(71, ROWS, 4) + torch.nn.functional.one_hot(LABELS, 4)
BITS = classes(72, ROWS, 2)
BIT_SCORES = random(73, ROWS) + BITS


def some_masked(y):
    y = y.clone()
    y[::3] = MASKED
    y[50:70] = MASKED
    return y


DATA = {
    "classes": (SCORES, LABELS),
    "two classes": (SCORES[:, :2], BITS),
    "one class": (SCORES, LABELS * 0 + 2),
    "masked classes": (SCORES, some_masked(LABELS)),
    "steps": (
        random(74, ROWS, 3, 2),
        some_masked(classes(75, ROWS * 2, 3).reshape(-1, 2)),
    ),
    "binary": (BIT_SCORES, BITS.float()),
    "column": (BIT_SCORES[:, None], BITS),
    "masked binary": (BIT_SCORES, some_masked(BITS)),
}


def predictions(output, y):
    """Confidences, and whether they are right, of what counts; by numpy."""
    labels = y.numpy().reshape(-1)
    if output.ndim == y.ndim + 1 and output.shape[1] > 1:
        chances = np.moveaxis(softmax(output), 1, -1).reshape(-1, output.shape[1])
        sure, right = chances.max(axis=1), chances.argmax(axis=1) == labels
    else:
        sure = 1 / (1 + np.exp(-output.double().numpy().reshape(-1)))
        right = labels == 1
    return sure[labels != MASKED], right[labels != MASKED]


def reference(output, y, bins):
    sure, right = predictions(output, y)
    edges = np.linspace(0, 1, bins + 1)
    place = np.minimum(np.floor(sure * bins).astype(int), bins - 1)
    inside = [place == k for k in range(bins)]
    gaps = [abs(sure[i].mean() - right[i].mean()) if i.any() else 0 for i in inside]
    count = np.array([i.sum() for i in inside])
    return {
        "bin_edges": edges,
        "bin_count": count,
        "bin_confidence": [sure[i].mean() if i.any() else np.nan for i in inside],
        "bin_accuracy": [right[i].mean() if i.any() else np.nan for i in inside],
        "ece": np.average(gaps, weights=count),
        "mce": max(gaps),
    }


@pytest.mark.parametrize("bins", [1, 15])
@pytest.mark.parametrize("data", DATA)
def test_each_value_is_that_of_numpy(data, bins):
    output, y = DATA[data]

    shown = shown_of(output, y, ignored=MASKED)
    values = measured(CalibrationMetrics(bins), shown, output, y, [1, 7, 60])

    check_close(values, reference(output, y, bins), atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("data", DATA)
def test_parts_give_what_the_whole_gives(data, cuts):
    output, y = DATA[data]
    shown = shown_of(output, y, ignored=MASKED)

    parts = measured(CalibrationMetrics(), shown, output, y, CUTS[cuts])

    whole = measured(CalibrationMetrics(), shown, output, y)
    for name, value in whole.items():  # sums are rounded
        np.testing.assert_allclose(parts[name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "norm"), [("ece", "l1"), ("mce", "max")])
def test_errors_of_classes_are_those_of_torchmetrics(name, norm):
    values = measured(CalibrationMetrics(), shown_of(SCORES, LABELS), SCORES, LABELS)

    chances = torch.from_numpy(softmax(SCORES))
    theirs = tm.multiclass_calibration_error(chances, LABELS, 4, n_bins=15, norm=norm)
    assert values[name] == pytest.approx(theirs.item(), abs=1e-6)


@pytest.mark.parametrize(("name", "norm"), [("ece", "l1"), ("mce", "max")])
def test_errors_of_one_score_are_those_of_torchmetrics(name, norm):
    values = measured(
        CalibrationMetrics(), shown_of(BIT_SCORES, BITS), BIT_SCORES, BITS
    )

    chances = BIT_SCORES.double().sigmoid()
    theirs = tm.binary_calibration_error(chances, BITS, n_bins=15, norm=norm)
    assert values[name] == pytest.approx(theirs.item(), abs=1e-6)


def test_each_class_against_the_others_is_that_of_scikit_learn():
    shown = shown_of(SCORES, LABELS)
    values = measured(CalibrationMetrics(10), shown, SCORES, LABELS, CUTS["rows"])

    chances = softmax(SCORES)
    for k in range(4):
        accuracy, sure = calibration_curve(k == LABELS, chances[:, k], n_bins=10)
        there = values["bin_count_per_class"][k] > 0
        ours = values["bin_accuracy_per_class"][k][there]
        np.testing.assert_allclose(ours, accuracy, atol=1e-12)
        ours = values["bin_confidence_per_class"][k][there]
        np.testing.assert_allclose(ours, sure, atol=1e-12)


def test_errors_of_each_class_are_those_of_torchmetrics():
    values = measured(CalibrationMetrics(), shown_of(SCORES, LABELS), SCORES, LABELS)

    chances = torch.from_numpy(softmax(SCORES))
    for name, norm in [("ece_per_class", "l1"), ("mce_per_class", "max")]:
        theirs = [
            tm.binary_calibration_error(one, k == LABELS, 15, norm)
            for k, one in enumerate(chances.T.contiguous())
        ]
        np.testing.assert_allclose(values[name], theirs, atol=1e-6)


def test_a_confidence_on_an_edge_is_in_the_upper_bin_and_1_in_the_last():
    output, y = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0, 1, 1])

    shown = shown_of(output, y, scale="probabilities")
    values = measured(CalibrationMetrics(bins=2), shown, output, y)

    assert values["bin_count"].tolist() == [1, 2]


def test_no_bin_is_refused():
    with pytest.raises(OptionError, match="bins must be 1 or more, got 0"):
        CalibrationMetrics(bins=0)
