"""Threshold and residual rules."""

import math
import pickle

import pytest
import torch

from daskdl.compression.residuals import KeepResidual, ResidualClipping
from daskdl.compression.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    Outcome,
    TargetSparsityThreshold,
    average_outcome,
)
from daskdl.errors import OptionError

ALGORITHMS = [
    AdaptiveThreshold(),
    FixedThreshold(),
    TargetSparsityThreshold(),
]


class Untouched:
    """A residual that must not be read as a whole."""

    def tensor(self):
        raise AssertionError("a built-in rule made the residual")

    def sample(self, most):
        return torch.tensor([0.5, -1.0, 0.0])


class Sampled(Untouched):
    """A residual with these values."""

    def __init__(self, values):
        self.values = torch.tensor(values)

    def sample(self, most):
        return self.values[:most]


RESIDUAL = Untouched()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    "last", [None, Outcome(1e-3, 0.0), Outcome(1e-3, 1.0)], ids=str
)
def test_every_threshold_is_positive_and_needs_no_whole_residual(algorithm, last):
    assert 0 < algorithm.next_threshold(RESIDUAL, last) < math.inf


@pytest.mark.parametrize("rule", [*ALGORITHMS, ResidualClipping(), KeepResidual()])
def test_every_rule_can_be_pickled(rule):
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AdaptiveThreshold, {"initial": 0}, "initial must be finite and > 0, got 0"),
        (AdaptiveThreshold, {"initial": math.nan}, "initial must be .* got nan"),
        (AdaptiveThreshold, {"initial": math.inf}, "initial must be .* got inf"),
        (AdaptiveThreshold, {"min_density": 0.0}, "need 0 < min_density .* 0.0 and"),
        (
            AdaptiveThreshold,
            {"min_density": 0.02},
            "min_density <= max_density .* 0.02",
        ),
        (AdaptiveThreshold, {"max_density": 1.5}, "max_density <= 1, got 0.0001 and"),
        (AdaptiveThreshold, {"max_density": math.nan}, "got 0.0001 and nan"),
        (AdaptiveThreshold, {"decay": 0.49}, r"decay must be in \[0.5, 1\), got 0.49"),
        (AdaptiveThreshold, {"decay": 1.0}, r"decay must be in \[0.5, 1\), got 1.0"),
        (FixedThreshold, {"value": -1.0}, "value must be .* > 0, got -1.0"),
        (FixedThreshold, {"value": math.inf}, "value must be .* > 0, got inf"),
        (TargetSparsityThreshold, {"initial": 0.0}, "initial must be"),
        (
            TargetSparsityThreshold,
            {"target": 0.0},
            r"target must be in \(0, 1/16\), got",
        ),
        (TargetSparsityThreshold, {"target": 1 / 16}, "target must be .* got 0.0625"),
        (TargetSparsityThreshold, {"decay": 0.4}, "decay must be"),
        (ResidualClipping, {"multiple": 0.99}, "multiple must be finite and >= 1, got"),
        (ResidualClipping, {"multiple": math.inf}, "multiple must be .* got inf"),
        (ResidualClipping, {"frequency": 0}, "frequency must be an integer >= 1, got"),
        (ResidualClipping, {"frequency": 2.5}, "frequency must be .* got 2.5"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(kind, options, message):
    with pytest.raises(OptionError, match=message):
        kind(**options)


def test_clipping_skips_the_first_exchange():
    rule = ResidualClipping(multiple=3.0, frequency=4)

    assert [rule.bound(n, 0.5) for n in range(9)] == (
        [math.inf] * 4 + [1.5] + [math.inf] * 3 + [1.5]
    )
    assert KeepResidual().bound(5, 0.5) == math.inf


class TestAdaptiveThreshold:
    @pytest.mark.parametrize(
        ("values", "band", "expected"),
        [
            ([4.0, -3.0, 2.0, 1.0], (0.25, 0.25), 4.0),
            # The middle of the band is 0.3.
            ([4.0, -3.0, 2.0, 1.0, 0.5, 0.25], (0.1, 0.9), 3.0),
            # A share of 1/e of those that moved.
            ([4.0, -3.0, 2.0, 1.0, 0.5, 0.25], (1.0, 1.0), 3.0),
            ([0.0] * 97 + [-3.0, 2.0, 1.0], (0.5, 0.5), 3.0),
            ([math.inf, -3.0, math.nan, 2.0], (1e-4, 1e-2), 3.0),
            ([0.0, 0.0], (1e-4, 1e-2), 1e-4),
            # The geometric mean of the band is 0.1, the arithmetic one 0.25.
            ([1.0 * n for n in range(20)], (0.02, 0.5), 18.0),
        ],
    )
    def test_without_an_initial_threshold_the_first_residual_determines_it(
        self, values, band, expected
    ):
        rule = AdaptiveThreshold(None, *band)

        assert rule.next_threshold(Sampled(values), None) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("density", "expected"),
        [(0.0, 0.5), (0.05, 0.5), (0.1, 1.0), (0.2, 1.0), (0.3, 1.0), (0.4, 2.0)],
    )
    def test_steers_towards_the_band(self, density, expected):
        algorithm = AdaptiveThreshold(min_density=0.1, max_density=0.3, decay=0.5)

        assert algorithm.next_threshold(RESIDUAL, Outcome(1.0, density)) == expected

    def test_follows_the_sequence_of_deeplearning4js_own_test(self):
        rule = AdaptiveThreshold(1e-3, 1e-3, 1e-2, 0.95)

        first = rule.next_threshold(RESIDUAL, None)
        second = rule.next_threshold(RESIDUAL, Outcome(first, DENSE_DENSITY))
        third = rule.next_threshold(RESIDUAL, Outcome(second, 0.1))
        fourth = rule.next_threshold(RESIDUAL, Outcome(third, 1e-4))
        reduced = average_outcome([Outcome(fourth, 1e-4), None, Outcome(fourth, 1e-4)])
        fifth = rule.next_threshold(RESIDUAL, reduced)

        assert first == 1e-3
        assert second == 1e-3 / 0.95
        assert third == second / 0.95
        assert fourth == third * 0.95
        assert fifth == pytest.approx(fourth * 0.95, rel=1e-15)


class TestTargetSparsityThreshold:
    @pytest.mark.parametrize(
        ("last", "expected"),
        [
            (None, 0.25),
            (Outcome(1.0, 0.0), 0.5),
            (Outcome(1.0, 0.01), 1.0),
            (Outcome(1.0, 0.011), 2.0),
            (Outcome(1.0, DENSE_DENSITY), 2.0),
        ],
        ids=["first", "nothing", "on target", "above", "dense"],
    )
    def test_steers_towards_the_target(self, last, expected):
        rule = TargetSparsityThreshold(initial=0.25, target=0.01, decay=0.5)

        assert rule.next_threshold(RESIDUAL, last) == expected
