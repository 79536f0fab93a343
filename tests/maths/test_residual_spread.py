"""How a residual compares with its thresholds."""

import math

import numpy as np
import pytest
import torch

from daskdl.compression.compressor import Sample
from daskdl.training.telemetry import spread_of


def sample(values, threshold=1.0, size=None):
    values = torch.tensor(values)
    return Sample(len(values) if size is None else size, values, threshold)


class TestSpread:
    @pytest.mark.parametrize("sign", [1, -1])
    def test_of_all_of_it_the_numbers_are_exact(self, sign):
        values = sign * np.random.default_rng(0).permutation(np.arange(1.0, 1001.0))

        norm, *percentiles = spread_of([sample(values, threshold=0.5)])

        assert norm == pytest.approx(np.linalg.norm(values))
        assert percentiles == [2 * 500.0, 2 * 900.0, 2 * 990.0]

    def test_each_pattern_counts_by_its_parameters_and_its_own_threshold(self):
        # 90 parameters at 1 of their thresholds, 10 at 4 of theirs.
        large = sample([2.0] * 3, threshold=2.0, size=90)
        small = sample([1.0] * 5, threshold=0.25, size=10)

        norm, *percentiles = spread_of([small, large])

        assert norm == pytest.approx(math.sqrt(90 * 4 + 10))
        assert percentiles == [1.0, 1.0, 4.0]

    def test_one_without_a_threshold_counts_for_the_length_only(self):
        samples = [sample([3.0], math.nan), sample([4.0], 2.0)]

        assert spread_of(samples) == [5.0, 2.0, 2.0, 2.0]

    def test_without_any_threshold_there_is_the_length_alone(self):
        norm, *percentiles = spread_of([sample([3.0, 4.0], math.nan)])

        assert norm == 5.0
        assert all(math.isnan(p) for p in percentiles)

    def test_a_pattern_without_parameters_is_left_out(self):
        assert spread_of([sample([]), sample([2.0])]) == [2.0, 2.0, 2.0, 2.0]

    def test_what_is_not_a_number_shows(self):
        norm, *percentiles = spread_of([sample([math.nan, 1.0])])

        assert math.isnan(norm)
        assert math.isnan(percentiles[-1])
