"""Presets match scikit-learn, on all rows and on merged parts."""

import functools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn
from torch.nn.functional import binary_cross_entropy, one_hot
from torchmetrics.functional import classification as tm

from daskdl.keras import CrossEntropyOfProbabilities
from daskdl.losses import scale_of
from daskdl.metrics import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)
from tests.support.metric_parts import (
    CUTS,
    ROWS,
    check_close,
    classes,
    measured,
    random,
    sample_of,
    softmax,
)

NAN, IGNORED = float("nan"), -100
LOGITS, CHANCES = {}, {"scale": "probabilities"}


def masked(y, value, seed):
    """Some labels do not count, and of rows 20 to 30 none does."""
    y = y.clone()
    y[random(seed, *y.shape) > 0.6] = value
    y[20:30] = value
    return y


# Of 5 classes 0 and 4 have labels, 4 is never predicted, 2 has none and is, and 1 and 3
# do not occur.
ABSENT = random(3, ROWS, 5) - torch.tensor([0.0, 9, 0, 9, 9])
Y3, Y7, BITS = classes(1, ROWS, 3), classes(8, ROWS, 7), classes(40, ROWS, 2)
STEPS = classes(11, ROWS * 4, 3).reshape(ROWS, 4)
BIT_STEPS = classes(42, ROWS * 3, 2).reshape(ROWS, 3).float()
SCORES = random(41, ROWS) + BITS
MANY = (random(46, ROWS, 4) > torch.tensor([0.2, 0, 1, -1])).long().sort(0).values
MANY_SCORES = random(47, ROWS, 4) + MANY
NUMBERS = random(60, ROWS, 3).sort(dim=0).values
NUMBER_STEPS = random(61, ROWS, 4, 2)


def with_column(column, value):
    y = MANY.clone()
    y[:, column] = value
    return y


# Metrics, outputs, labels, and facts of the sample.
CLASSES = {
    "balanced": ({}, random(0, ROWS, 3) + one_hot(Y3, 3), Y3, LOGITS),
    "absent": ({}, ABSENT, (classes(2, ROWS, 2) * 4), LOGITS),
    "one class": ({}, random(4, ROWS, 3), torch.ones(ROWS, dtype=torch.int64), LOGITS),
    "ties": ({}, (random(5, ROWS, 3).softmax(1) * 8).round() / 8, Y3, CHANCES),
    "logs": ({}, random(7, ROWS, 7).log_softmax(1), Y7, {"scale": "log_probabilities"}),
    "two classes": ({}, random(9, ROWS, 2), BITS, LOGITS),
    "steps": (
        {},
        random(13, ROWS, 3, 4),
        masked(STEPS, IGNORED, 12),
        {"ignored": IGNORED},
    ),
}
BINARY = {
    "flat": ({}, SCORES, BITS, LOGITS),
    "column": ({}, SCORES[:, None], BITS.float(), LOGITS),
    "column of labels": ({}, SCORES, BITS[:, None].bool(), LOGITS),
    "probabilities": ({"threshold": 0.8}, SCORES.sigmoid(), BITS, CHANCES),
    "no 1": ({}, SCORES, BITS * 0, LOGITS),
    "no 0": ({}, SCORES, BITS * 0 + 1, LOGITS),
    "never 1": ({}, SCORES - 99, BITS, LOGITS),
    "steps": ({"ignore": -1}, random(44, ROWS, 3), masked(BIT_STEPS, -1, 43), LOGITS),
    "NaN": ({"ignore": NAN}, random(44, ROWS, 3), masked(BIT_STEPS, NAN, 43), LOGITS),
    "steps of two": (
        {},
        random(45, ROWS, 2, 3),
        masked(BIT_STEPS.long(), IGNORED, 43),
        {"ignored": IGNORED},
    ),
}
LABELS = {
    "all": ({}, MANY_SCORES, MANY, LOGITS),
    "one": ({}, MANY_SCORES[:, :1], MANY[:, :1].bool(), LOGITS),
    "unlabelled": ({}, MANY_SCORES, with_column(2, 0), LOGITS),
    "always": ({"threshold": 0.3}, MANY_SCORES, with_column(1, 1).float(), LOGITS),
    "never": ({}, MANY_SCORES - torch.tensor([0, 0, 0, 99]), with_column(3, 0), LOGITS),
    "masked": ({"ignore": -1}, MANY_SCORES, masked(MANY.double(), -1, 48), LOGITS),
    "NaN": ({"ignore": NAN}, MANY_SCORES, masked(MANY.double(), NAN, 48), LOGITS),
    "steps": ({}, random(49, ROWS, 2, 2), MANY.reshape(ROWS, 2, 2), LOGITS),
}
ERRORS = {
    "one column": ({}, NUMBERS[:, 0] + random(63, ROWS), NUMBERS[:, 0], LOGITS),
    "column": ({}, random(63, ROWS, 1), NUMBERS[:, 0].double(), LOGITS),
    "three columns": ({}, NUMBERS + random(64, ROWS, 3), NUMBERS, LOGITS),
    "steps": (
        {"ignore": -7.0},
        random(65, ROWS, 4, 2),
        masked(NUMBER_STEPS, -7.0, 62),
        LOGITS,
    ),
    "NaN": (
        {"ignore": NAN},
        random(65, ROWS, 4, 2),
        masked(NUMBER_STEPS, NAN, 62),
        LOGITS,
    ),
    "far from 0": (
        {},
        1e6 + random(66, ROWS, 2).double(),
        1e6 + NUMBERS[:, 1:],
        LOGITS,
    ),
    "tiny": ({}, 1e-6 * random(67, ROWS, 2), 1e-6 * NUMBERS[:, :2], LOGITS),
    "one far out": (
        {},
        NUMBERS[:, 0] * 1.0,
        NUMBERS[:, 0] + 1e6 * (NUMBERS[:, 1] > 2.3),
        LOGITS,
    ),
}
CALIBRATED = {name: CLASSES[name] for name in ("balanced", "two classes", "steps")} | {
    name: BINARY[name] for name in ("flat", "column", "steps")
}


def chances_of(output, y, ignored=(), scale="logits"):
    """Probabilities, (N,) or (N, C), and labels of what counts, by numpy."""
    scores = output.numpy().astype(np.float64)
    if output.ndim == y.ndim + 1 and output.shape[1] > 1:
        scores = {
            "logits": lambda: softmax(output),
            "probabilities": lambda: scores,
            "log_probabilities": lambda: np.exp(scores),
        }[scale]()
        scores = np.moveaxis(scores, 1, -1).reshape(-1, output.shape[1])
    else:
        scores = (
            scores if scale == "probabilities" else 1 / (1 + np.exp(-scores))
        ).ravel()
    labels = y.numpy().astype(np.float64).ravel()
    counts = ~np.isnan(labels) & ~np.isin(labels, ignored)
    return scores[counts], labels[counts].astype(int)


def ignored_of(options, facts):
    values = options.get("ignore"), facts.get("ignored")
    return [value for value in values if value is not None]


def class_reference(options, output, y, facts):
    chances, labels = chances_of(
        output, y, ignored_of(options, facts), facts.get("scale", "logits")
    )
    every, best = np.arange(output.shape[1]), chances.argmax(axis=1)
    both = [0 < (labels == k).sum() < len(labels) for k in every]
    expected = {
        "accuracy": sk.accuracy_score(labels, best),
        "mcc": sk.matthews_corrcoef(labels, best),
        "confusion_matrix": sk.confusion_matrix(labels, best, labels=every),
        "support": np.bincount(labels, minlength=len(every)),
        "predicted": np.bincount(best, minlength=len(every)),
    }
    scorers = [("precision", sk.precision_score), ("recall", sk.recall_score)]
    for name, scorer in [*scorers, ("f1", sk.f1_score)]:
        seen = np.union1d(labels, best)
        expected[name] = scorer(
            labels, best, labels=seen, average="macro", zero_division=0
        )
        expected[f"{name}_per_class"] = scorer(
            labels, best, labels=every, average=None, zero_division=0
        )
    areas = {
        "roc_auc": (sk.roc_auc_score, both),
        "average_precision": (
            sk.average_precision_score,
            [(labels == k).any() for k in every],
        ),
    }
    for name, (area, there) in areas.items():
        each = [area(labels == k, chances[:, k]) if there[k] else NAN for k in every]
        expected[f"{name}_per_class"] = each
        expected[name] = np.nanmean(each) if any(there) else NAN
    return expected


def binary_values(chances, labels, threshold):
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


def binary_reference(options, output, y, facts):
    if output.ndim == y.ndim + 1 and output.shape[1] == 2:
        output = output[:, 1] - output[:, 0]
    chances, labels = chances_of(
        output, y, ignored_of(options, facts), facts.get("scale", "logits")
    )
    return binary_values(chances, labels, options.get("threshold", 0.5))


def label_reference(options, output, y, facts):
    rows = [t.movedim(1, -1).flatten(0, -2) for t in (output, y)]
    threshold, ignored = options.get("threshold", 0.5), ignored_of(options, facts)
    each = [
        chances_of(*(t[:, k] for t in rows), ignored) for k in range(rows[1].shape[1])
    ]
    values = [binary_values(*column, threshold) for column in each]
    seen = [(c > threshold).any() or bool(t.any()) for c, t in each]
    names = ("accuracy", "precision", "recall", "f1", "roc_auc", "average_precision")
    expected = {
        f"{n}_per_class": np.array([value[n] for value in values]) for n in names
    }
    expected |= {n: np.nanmean(expected[f"{n}_per_class"][seen]) for n in names}
    chances, labels = map(np.concatenate, zip(*each, strict=True))
    expected["accuracy"] = sk.accuracy_score(labels, chances > threshold)
    expected["support"] = [t.sum() for _, t in each]
    expected["predicted"] = [(c > threshold).sum() for c, _ in each]
    if not ignored and threshold == 0.5:
        expected["exact_match"] = sk.accuracy_score(rows[1], rows[0] > 0)
    matrices = [value["confusion_matrix"] for value in values]
    return {**expected, "confusion_matrices": np.stack(matrices)}


def error_reference(options, output, y, facts):
    width = y.shape[-1] if y.ndim > 1 else 1
    p, t = (each.double().numpy().reshape(-1, width) for each in (output, y))
    counts = ~np.isnan(t) & (t != options.get("ignore", NAN))
    columns = [(t[counts[:, k], k], p[counts[:, k], k]) for k in range(width)]
    scorers = {
        "mse": sk.mean_squared_error,
        "mae": sk.mean_absolute_error,
        "rmse": lambda t, p: math.sqrt(sk.mean_squared_error(t, p)),
        "r2": sk.r2_score,
        "pearson": lambda t, p: np.corrcoef(t, p)[0, 1],
    }
    each = {name: [f(*column) for column in columns] for name, f in scorers.items()}
    return {
        **{name: np.mean(values) for name, values in each.items()},
        **{f"{name}_per_column": values for name, values in each.items()},
        "count": counts.sum(axis=0),
    }


def calibration_reference(options, output, y, facts, bins=15):
    sure, right = chances_of(output, y, ignored_of(options, facts))
    if sure.ndim == 2:
        right, sure = sure.argmax(axis=1) == right, sure.max(axis=1)
    place = np.minimum(np.floor(sure * bins).astype(int), bins - 1)
    inside = [place == k for k in range(bins)]
    gaps = [abs(sure[i].mean() - right[i].mean()) if i.any() else 0 for i in inside]
    count = [i.sum() for i in inside]
    return {
        "bin_count": count,
        "bin_confidence": [sure[i].mean() if i.any() else NAN for i in inside],
        "bin_accuracy": [right[i].mean() if i.any() else NAN for i in inside],
        "ece": np.average(gaps, weights=count),
        "mce": max(gaps),
    }


CASES = [
    pytest.param(kind, reference, *case, id=f"{kind.__name__}-{name}")
    for kind, reference, cases in (
        (ClassificationMetrics, class_reference, CLASSES),
        (BinaryMetrics, binary_reference, BINARY),
        (MultilabelMetrics, label_reference, LABELS),
        (RegressionMetrics, error_reference, ERRORS),
        (CalibrationMetrics, calibration_reference, CALIBRATED),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize(
    ("kind", "reference", "options", "output", "y", "facts"), CASES
)
def test_values_match_scikit_learn_for_any_partitioning(
    kind, reference, options, output, y, facts
):
    metrics, sample = kind(**options), sample_of(output, y, **facts)

    whole = measured(metrics, sample, output, y)

    sums = kind in (RegressionMetrics, CalibrationMetrics)  # of floats, and rounded
    check_close(
        whole,
        reference(options, output, y, facts),
        rtol=1e-7 if kind is RegressionMetrics else 0,
        atol=1e-12,
    )
    for cuts in CUTS.values():
        parts = measured(metrics, sample, output, y, cuts)
        assert parts.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_allclose(
                parts[name], value, rtol=1e-9 * sums, atol=1e-12 * sums, err_msg=name
            )


class TestCurves:
    @pytest.mark.parametrize("thresholds", [2, 5, 100])
    def test_areas_at_some_thresholds_are_those_of_torchmetrics(self, thresholds):
        options, output, y, facts = LABELS["masked"]

        metrics = MultilabelMetrics(**options, thresholds=thresholds)
        values = measured(metrics, sample_of(output, y, **facts), output, y, [1, 7, 60])

        for k in range(y.shape[1]):
            chances, labels = chances_of(output[:, k], y[:, k], [options["ignore"]])
            tensors = torch.from_numpy(chances), torch.from_numpy(labels)
            areas = {"roc_auc": tm.binary_auroc}
            areas["average_precision"] = tm.binary_average_precision
            for name, area in areas.items():
                theirs = area(*tensors, thresholds=thresholds).item()
                ours = values[f"{name}_per_class"][k]
                assert ours == pytest.approx(theirs, abs=1e-6)

    @pytest.mark.parametrize(("rows", "error"), [(ROWS, 1e-12), (3000, 1e-2)])
    def test_areas_are_those_below_the_curves_of_101_points(self, rows, error):
        y = classes(30, rows, 2)
        output = random(31, rows) + y

        values = measured(BinaryMetrics(), sample_of(output, y), output, y)

        (others, hits), (recall, precision) = (
            values[f"{kind}_curves"][0] for kind in ("roc", "precision_recall")
        )
        assert len(others) == len(recall) == 101
        assert (others[0], hits[0], others[-1], hits[-1]) == (0, 0, 1, 1)
        area = np.sum(np.diff(others) * (hits[1:] + hits[:-1]) / 2)
        average = np.sum(np.diff(recall) * precision[1:])
        assert values["roc_auc"] == pytest.approx(area, abs=error)
        assert values["average_precision"] == pytest.approx(average, abs=error)

    def test_thresholds_bound_the_size_of_states(self):
        _, output, y, _ = CLASSES["balanced"]
        metrics, sample = ClassificationMetrics(thresholds=50), sample_of(output, y)
        live = metrics.collection(sample)

        for _ in range(10):
            live.update(*metrics.prepared(sample, output, y))

        assert (
            sum(s.numel() for s in live["curves"].metric_state.values()) == 2 * 3 * 50
        )


class TestClasses:
    @pytest.mark.parametrize(
        ("count", "given_top", "top"),
        [(5, None, 2), (6, None, 5), (6, 3, 3)],
    )
    def test_the_label_is_among_the_best_scores(self, count, given_top, top):
        scores, y = random(20, ROWS, count), classes(21, ROWS, count)

        metrics = ClassificationMetrics(top=given_top)
        values = measured(metrics, sample_of(scores, y), scores, y, CUTS["unequal"])

        expected = sk.top_k_accuracy_score(y, scores, k=top, labels=np.arange(count))
        assert values[f"top_{top}_accuracy"] == pytest.approx(expected, abs=1e-12)


class TestLabels:
    def test_masked_labels_make_no_row_wrong(self):
        output = torch.tensor([[9.0, 9.0], [9.0, NAN], [NAN, 9.0]])
        y = torch.tensor([[1, -1], [0, -1], [-1, -1]])

        metrics = MultilabelMetrics(ignore=-1)
        values = measured(metrics, sample_of(output, y), output, y)

        assert (values["exact_match"], values["rows"]) == (0.5, 2)
        assert values["accuracy"] == 0.5


class TestCalibration:
    @pytest.mark.parametrize(("name", "norm"), [("ece", "l1"), ("mce", "max")])
    def test_errors_are_those_of_torchmetrics(self, name, norm):
        _, scores, y, _ = CLASSES["balanced"]

        values = measured(CalibrationMetrics(), sample_of(scores, y), scores, y)

        chances = torch.from_numpy(softmax(scores))
        theirs = tm.multiclass_calibration_error(chances, y, 3, n_bins=15, norm=norm)
        assert values[name] == pytest.approx(theirs.item(), abs=1e-6)
        each = [
            tm.binary_calibration_error(column, k == y, 15, norm)
            for k, column in enumerate(chances.T.contiguous())
        ]
        np.testing.assert_allclose(values[f"{name}_per_class"], each, atol=1e-6)

    def test_a_confidence_on_an_edge_is_in_the_upper_bin_and_1_in_the_last(self):
        output, y = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0, 1, 1])

        sample = sample_of(output, y, **CHANCES)
        values = measured(CalibrationMetrics(bins=2), sample, output, y)

        assert values["bin_count"].tolist() == [1, 2]


# The first rows do not count.
CONSTANT = torch.tensor([NAN, NAN] + [0.1] * 48, dtype=torch.float64)
# Outputs, labels and values.
UNDEFINED = {
    "constant labels": ([2.5] * 3, [2.5] * 3, {"r2": 1, "pearson": NAN}),
    "constant labels, an error": ([2.5, 2.5, 3.5], [2.5] * 3, {"r2": 0}),
    "constant up to rounding": (
        *(CONSTANT.nan_to_num() + 1, CONSTANT),
        {"r2": 0, "pearson": NAN},
    ),
    "one row": ([1.0], [3.0], {"mse": 4, "mae": 2, "r2": NAN}),
    "a column without labels": (
        *([[1.0, 1.0], [2.0, 2.0]], [[2.0, NAN]] * 2),
        {"mse": 0.5, "mse_per_column": [0.5, NAN]},
    ),
}


@pytest.mark.parametrize("cuts", [[], [1]])
@pytest.mark.parametrize("case", UNDEFINED)
def test_regression_without_variance_or_labels(case, cuts):
    *rows, expected = UNDEFINED[case]
    output, y = map(torch.as_tensor, rows)
    metrics = RegressionMetrics(ignore=NAN)

    values = measured(metrics, sample_of(output, y), output, y, cuts)

    check_close(values, expected, atol=0)


class Focal(nn.Module):
    scale = "log_probabilities"


SPREAD = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 0.25]])


@pytest.mark.parametrize(
    ("loss", "output", "scale"),
    [
        (nn.BCEWithLogitsLoss(), SPREAD.softmax(1), "logits"),
        (nn.NLLLoss(), SPREAD, "log_probabilities"),
        (CrossEntropyOfProbabilities(), SPREAD, "probabilities"),
        (functools.partial(binary_cross_entropy), SPREAD, "probabilities"),
        (Focal(), SPREAD, "log_probabilities"),
        # Other losses do not say it.
        (None, SPREAD, "logits"),
        (None, SPREAD.softmax(1).bfloat16(), "probabilities"),
        (None, SPREAD[..., None].log_softmax(1).expand(2, 3, 4), "log_probabilities"),
        (None, torch.zeros(2, 3), "logits"),
        (None, torch.tensor([[2.0, -1.0], [1.5, -0.5]]), "logits"),  # their sum is 1
        (None, torch.ones(2, 1), "logits"),
        (None, torch.full((2,), 0.5), "logits"),
        (None, {"a": SPREAD.softmax(1)}, "logits"),
    ],
)
def test_the_scale_follows_from_the_loss_or_the_scores(loss, output, scale):
    assert scale_of(loss, output) == scale
