"""Threshold algorithms by the names of parameters, alone and in a compressor."""

import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.errors import OptionError
from daskdl.residuals import ResidualPostProcessor
from daskdl.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    LayerThresholds,
    LinkThreshold,
    Sent,
    ThresholdAlgorithm,
)
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.updates import GRID, make

SMALL, LARGE = FixedThreshold(2.0**-6), FixedThreshold(2.0**-3)
NAMES = ["embedding.weight", "0.weight", "0.bias", "1.weight", "1.bias"]


def assigned(mapping, names=NAMES):
    return LayerThresholds.of(mapping).assign(names)


class TestAssign:
    def test_the_first_pattern_that_matches_is_taken(self):
        mapping = {"0.*": SMALL, "*.bias": LARGE, "*": SMALL}

        assert assigned(mapping) == {
            "embedding.weight": "*",
            "0.weight": "0.*",
            "0.bias": "0.*",
            "1.weight": "*",
            "1.bias": "*.bias",
        }

    def test_patterns_have_sets_and_capitals_count(self):
        mapping = {"[01].weight": SMALL, "*.?ias": LARGE, "*": SMALL}

        assert list(assigned(mapping).values()) == [
            *("*", "[01].weight", "*.?ias", "[01].weight", "*.?ias"),
        ]
        with pytest.raises(OptionError, match="matches no"):
            assigned({"*.Bias": SMALL, "*": SMALL})

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            (
                {"*.bias": SMALL, "[01].*": LARGE},
                "threshold has no pattern that parameter 'embedding.weight' matches, "
                "got ['*.bias', '[01].*']; end it with '*' for all others",
            ),
            (
                {"*.biases": SMALL, "*": LARGE},
                "threshold pattern '*.biases' matches no trainable parameter of the "
                "model, which are 'embedding.weight', '0.weight', '0.bias', "
                "'1.weight', '1.bias'",
            ),
            (
                {"*": SMALL, "0.*": LARGE},
                "threshold pattern '0.*' gets no parameter: '0.weight' and all others "
                "that it matches go to '*'",
            ),
        ],
        ids=["no pattern", "no parameter", "too late"],
    )
    def test_what_does_not_fit_is_named(self, mapping, message):
        with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
            assigned(mapping)

    def test_of_many_names_some_are_shown(self):
        names = [f"{i}.weight" for i in range(9)]

        with pytest.raises(OptionError, match=r"'4\.weight', \.\.\.$"):
            assigned({"x": SMALL, "*": SMALL}, names)


class TestValue:
    def test_it_is_frozen_hashed_and_pickled(self):
        one = LayerThresholds.of({"a": SMALL, "*": LARGE})

        other = pickle.loads(pickle.dumps(one))

        assert (one == other, hash(one) == hash(other)) == (True, True)
        with pytest.raises(AttributeError):
            one.pairs = ()

    def test_it_reads_like_the_mapping(self):
        mapping = {"a": SMALL, "*": LARGE}
        one = LayerThresholds.of(mapping)

        assert (one, dict(one), repr(one)) == (mapping, mapping, repr(mapping))
        assert (len(one), one["a"]) == (2, SMALL)

    @pytest.mark.parametrize(
        "other", [{"*": LARGE, "a": SMALL}, {"a": SMALL}, SMALL], ids=str
    )
    def test_it_differs_from(self, other):
        assert LayerThresholds.of({"a": SMALL, "*": LARGE}) != other

    def test_one_that_follows_the_link_has_none_beside_it(self):
        with pytest.raises(
            OptionError,
            match=r"pattern '\*' has .* the link, got LinkThreshold.* alone",
        ):
            GradientSharing({"a": SMALL, "*": LinkThreshold()})

    def test_one_that_follows_the_link_may_be_for_all(self):
        assert LayerThresholds.of({"*": LinkThreshold()}) == {"*": LinkThreshold()}

    def test_one_algorithm_is_for_all(self):
        assert LayerThresholds.of(SMALL) == {"*": SMALL}


class Layers(nn.Module):
    """Three parameters of four numbers, the last one in a group of its own."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.two = nn.Parameter(torch.zeros(4))
        self.last = nn.Parameter(torch.zeros(4, dtype=dtype))

    def step(self, **amounts):
        with torch.no_grad():
            for name, amount in amounts.items():
                getattr(self, name)[1] += amount


MAPPING = {"bias": SMALL, "*": LARGE}


class TestCompressor:
    def test_each_pattern_has_its_threshold_and_whole_model_positions(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(one=2.0**-5, bias=-(2.0**-5), two=0.25, last=-0.25)

        bias, rest = compressor.propose()

        assert (bias.pattern, bias.threshold) == ("bias", 2.0**-6)
        assert (rest.pattern, rest.threshold) == ("*", 2.0**-3)
        assert bias.entries_K.tolist() == [-6]
        assert rest.entries_K.tolist() == [10, -14]
        assert bias.size == rest.size == 16

    def test_only_what_is_taken_leaves_the_residual(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(bias=0.25, two=0.25)
        bias, _ = compressor.propose()

        compressor.commit_(bias)

        shared = compressor.vector.shared_counts() * GRID
        assert shared.nonzero()[0].tolist() == [5]
        assert shared[5] == 2.0**-6
        assert list(compressor.sent) == ["bias"]

    def test_density_is_of_the_pattern(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(bias=0.25, two=0.25)

        for update in compressor.propose():
            compressor.commit_(update)

        assert compressor.sent == {
            "bias": Sent(2.0**-6, 1 / 4),
            "*": Sent(2.0**-3, 1 / 12),
        }

    def test_what_was_taken_least_often_comes_first(self):
        compressor = make(Layers(), {"bias": SMALL, "one": SMALL, "*": LARGE})

        compressor.commit_(compressor.propose()[0])
        order = [update.pattern for update in compressor.propose()]

        assert order == ["one", "*", "bias"]

    def test_each_goes_on_from_its_own_outcome(self):
        adaptive = AdaptiveThreshold(decay=0.5)
        last = {"bias": Sent(0.25, 0.0), "gone": Sent(1.0, 1.0)}
        compressor = make(Layers(), {"bias": adaptive, "*": adaptive}, last=last)

        rules = {p.pattern: p.chosen for p in compressor.propose()}

        assert rules == {"bias": 0.125, "*": 1e-4}

    def test_neighbours_are_looked_at_together(self):
        compressor = make(Layers(torch.float32), {"bias": SMALL, "*": LARGE})

        ranges = {p: g.residual.ranges for p, g in compressor.groups.items()}

        assert [where for _, where in ranges["bias"]] == [slice(4, 8)]
        assert [where for _, where in ranges["*"]] == [slice(0, 4), slice(8, 16)]

    def test_one_algorithm_looks_at_each_vector_once(self):
        compressor = make(Layers(), LARGE)

        [group] = compressor.groups.values()

        assert [w for _, w in group.residual.ranges] == [slice(0, 12), slice(0, 4)]

    def test_a_rule_sees_the_residual_of_its_own(self):
        class Largest(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                return float(residual.tensor().abs().max())

        module = Layers()
        compressor = make(module, {"bias": Largest(), "*": Largest()})
        module.step(bias=0.25, two=0.125, last=0.0625)

        assert [p.chosen for p in compressor.propose()] == [0.25, 0.125]

    def test_the_residual_rule_gets_each_threshold_and_count_of_exchanges(self):
        seen = []

        class Seeing(ResidualPostProcessor):
            def bound(self, exchange, threshold):
                seen.append((exchange, threshold))
                return math.inf

        compressor = make(Layers(), MAPPING, Seeing())
        bias, rest = compressor.propose()
        for update in (bias, rest, bias):
            compressor.commit_(update)

        assert seen == [(0, 2.0**-6), (0, 2.0**-3), (1, 2.0**-6)]

    def test_only_those_sent_are_clipped_by_the_threshold_of_their_own(self):
        class Tight(ResidualPostProcessor):
            def bound(self, exchange, threshold):
                return threshold

        module = Layers()
        compressor = make(module, MAPPING, Tight())
        module.step(bias=0.25, two=0.5)
        for update in compressor.propose():
            compressor.commit_(update)

        assert module.bias[1].item() == 2 * 2.0**-6
        assert module.two[1].item() == 2 * 2.0**-3
        assert compressor.clipped == 0.25 - 2.0**-5 + 0.5 - 2.0**-2

    def test_a_dense_exchange_is_one_of_all_patterns(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(bias=3 * GRID, last=-GRID)

        compressor.commit_(*compressor.propose(dense=True))

        assert compressor.vector.farthest() == 0.0
        assert compressor.sent == {
            "bias": Sent(2.0**-6, DENSE_DENSITY),
            "*": Sent(2.0**-3, DENSE_DENSITY),
        }

    def test_a_mapping_that_does_not_fit_leaves_the_model_alone(self):
        module = Layers()
        with torch.no_grad():
            module.one += 0.1
        before = module.one.clone()

        with pytest.raises(OptionError, match="no pattern"):
            make(module, {"bias": SMALL})

        assert torch.equal(module.one, before)

    def test_frozen_parameters_need_no_pattern(self):
        module = Layers()
        module.two.requires_grad_(False)

        compressor = make(module, {"bias": SMALL, "one": LARGE, "last": LARGE})

        assert compressor.vector.size == 12

    def test_a_pattern_whose_parameters_are_empty_does_no_harm(self):
        module = Layers()
        module.bias = nn.Parameter(torch.zeros(0))
        compressor = make(module, MAPPING)
        module.step(two=0.25)

        for update in compressor.propose():
            compressor.commit_(update)

        assert compressor.sent["bias"].density == 0.0
        assert np.count_nonzero(compressor.vector.shared_counts()) == 1
