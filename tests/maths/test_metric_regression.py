"""The preset of numbers: parts give what the whole gives, and scikit-learn says so."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torchmetrics.functional import regression as tm

from daskdl.metrics import RegressionMetrics
from tests.support.metric_parts import (
    CUTS,
    ROWS,
    check_close,
    measured,
    random,
    shown_of,
)

NAN = float("nan")
ERRORS = ("mse", "mae", "rmse", "r2", "pearson")
SORTED = random(60, ROWS, 3).sort(dim=0).values


def masked(value):
    y = random(61, ROWS, 4, 2)
    y[random(62, ROWS, 4, 2) > 0.5] = value
    y[30:40] = value
    return y


# Outputs, labels, and what the preset is told.
DATA = {
    "one column": (SORTED[:, 0] + random(63, ROWS), SORTED[:, 0], {}),
    "column": (SORTED[:, :1] + random(63, ROWS, 1), SORTED[:, 0].double(), {}),
    "three columns": (SORTED + random(64, ROWS, 3), SORTED, {}),
    "steps": (random(65, ROWS, 4, 2), masked(-7.0), {"ignore": -7.0}),
    "steps without": (random(65, ROWS, 4, 2), masked(NAN), {"ignore": NAN}),
    "far from 0": (
        1e6 + random(66, ROWS, 2).double(),
        1e6 + SORTED.double()[:, :2],
        {},
    ),
    "far from each other": (random(66, ROWS) + 1e4, SORTED[:, 0], {}),
    "tiny": (1e-6 * random(67, ROWS, 2), 1e-6 * SORTED[:, :2], {}),
    "whole numbers": (random(68, ROWS), torch.arange(ROWS), {}),
    "one far out": (SORTED[:, 0] * 1.0, SORTED[:, 0] + 1e6 * (SORTED[:, 1] > 2.3), {}),
}


def columns_of(output, y, options):
    """Values that count, of each column, by numpy."""
    width = y.shape[-1] if y.ndim > 1 else 1
    both = [t.double().numpy().reshape(-1, width) for t in (output, y)]
    ignore = options.get("ignore", NAN)
    counts = ~np.isnan(both[1]) & (both[1] != ignore)
    return [(both[0][counts[:, k], k], both[1][counts[:, k], k]) for k in range(width)]


def reference(output, y, options):
    scorers = {
        "mse": sk.mean_squared_error,
        "mae": sk.mean_absolute_error,
        "rmse": lambda t, p: math.sqrt(sk.mean_squared_error(t, p)),
        "r2": sk.r2_score,
        "pearson": lambda t, p: np.corrcoef(t, p)[0, 1],
    }
    columns = columns_of(output, y, options)
    each = {name: [f(t, p) for p, t in columns] for name, f in scorers.items()}
    return {
        **{name: np.mean(values) for name, values in each.items()},
        **{f"{name}_per_column": values for name, values in each.items()},
        "count": [len(t) for _, t in columns],
    }


@pytest.mark.parametrize("data", DATA)
def test_each_error_is_that_of_scikit_learn(data):
    output, y, options = DATA[data]

    shown = shown_of(output, y)
    values = measured(RegressionMetrics(**options), shown, output, y, [1, 7, 60])

    check_close(values, reference(output, y, options), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("data", DATA)
def test_parts_give_what_the_whole_gives(data, cuts):
    output, y, options = DATA[data]
    shown = shown_of(output, y)

    parts = measured(RegressionMetrics(**options), shown, output, y, CUTS[cuts])

    whole = measured(RegressionMetrics(**options), shown, output, y)
    for name, value in whole.items():  # sums are rounded
        np.testing.assert_allclose(parts[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mse", tm.mean_squared_error),
        ("mae", tm.mean_absolute_error),
        ("r2", tm.r2_score),
        ("pearson", tm.pearson_corrcoef),
    ],
)
def test_each_error_is_that_of_torchmetrics(name, function):
    output, y, _ = DATA["one column"]

    values = measured(RegressionMetrics(), shown_of(output, y), output, y)

    expected = function(output.double(), y.double())
    assert values[name] == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize(
    ("predicted", "r2"), [([2.5, 2.5, 2.5], 1.0), ([2.5, 2.5, 3.5], 0.0)]
)
@pytest.mark.parametrize("cuts", [[], [1]])
def test_labels_that_are_all_the_same_are_explained_or_not(predicted, r2, cuts):
    output, y = torch.tensor(predicted), torch.full((3,), 2.5)

    values = measured(RegressionMetrics(), shown_of(output, y), output, y, cuts)

    assert values["r2"] == sk.r2_score(y, output) == r2
    assert math.isnan(values["pearson"])


def test_of_one_row_there_are_errors_only():
    output, y = torch.tensor([1.0]), torch.tensor([3.0])

    values = measured(RegressionMetrics(), shown_of(output, y), output, y)

    numbers = {name: values[name] for name in ERRORS}
    assert numbers == pytest.approx(
        {"mse": 4.0, "mae": 2.0, "rmse": 2.0, "r2": NAN, "pearson": NAN}, nan_ok=True
    )


def test_a_column_without_a_value_is_left_out_of_means():
    output, y = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[2.0, NAN]] * 2)

    metrics = RegressionMetrics(ignore=NAN)
    values = measured(metrics, shown_of(output, y), output, y)

    assert values["mse"] == values["mse_per_column"][0] == 0.5
    assert math.isnan(values["mse_per_column"][1])


def test_labels_that_are_all_the_same_are_so_whatever_rounding_says():
    """The first rows do not count, so that sums are not of small differences."""
    y = torch.full((50,), 0.1, dtype=torch.float64)
    y[:2] = NAN
    output = y.nan_to_num() + 1

    metrics = RegressionMetrics(ignore=NAN)
    values = measured(metrics, shown_of(output, y), output, y)

    assert values["r2"] == 0.0
    assert math.isnan(values["pearson"])
