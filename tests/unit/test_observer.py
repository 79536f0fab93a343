"""What becomes of what an exchange says that it does."""

import math

import numpy as np
import pytest
import torch

from daskdl import codec
from daskdl.compression.compressor import Sample
from daskdl.training.base import ExchangeStats, StepStats
from daskdl.training.telemetry import Observer, spread_of

ENTRIES = np.arange(1, 33, dtype=np.int32)
STAMP = codec.Stamp(1, 0, 1, 1)
SPARSE = codec.encode(STAMP, 1000, 0.5, ENTRIES)
DENSE = codec.encode_dense(STAMP, 0.5, np.ones(1000, np.int32))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, stopwatch, seconds):
        with stopwatch:
            self.now += seconds
        self.now += 100.0  # what is outside does not count


def sample(values, threshold=1.0, size=None):
    values = torch.tensor(values)
    return Sample(len(values) if size is None else size, values, threshold)


class TestStep:
    def test_it_says_what_was_done_and_how_long_that_took(self):
        clock = Clock()
        observer = Observer(clock)
        observer.begin_step()
        clock.spend(observer.waiting, 1.0)
        clock.spend(observer.waiting, 0.5)
        clock.spend(observer.applying, 0.25)
        clock.spend(observer.encoding, 0.125)
        observer.leads(3)
        observer.exchanged(0.032, [SPARSE])

        step = observer.step([sample([3.0, -4.0], threshold=2.0)])

        assert step == StepStats(
            threshold=2.0,
            density=0.032,
            sent_bytes=SPARSE.nbytes,
            kind=codec.read_kind(SPARSE.data).name,
            residual_norm=5.0,
            residual_p50=1.5,
            residual_p90=2.0,
            residual_p99=2.0,
            staleness=3,
            wait_s=1.5,
            encode_s=0.125,
            apply_s=0.25,
        )

    def test_the_next_step_begins_at_nothing(self):
        clock = Clock()
        observer = Observer(clock)
        clock.spend(observer.waiting, 1.0)
        clock.spend(observer.encoding, 1.0)
        clock.spend(observer.applying, 1.0)
        observer.leads(3)
        observer.exchanged(0.032, [SPARSE])

        observer.begin_step()
        step = observer.step([sample([1.0])])

        assert step[2:4] == (0, None)
        assert step[-4:] == (0, 0.0, 0.0, 0.0)
        assert math.isnan(step.density)

    def test_of_several_frames_the_kind_is_that_of_the_largest(self):
        observer = Observer()
        observer.exchanged(0.5, [SPARSE, DENSE, SPARSE])

        step = observer.step([sample([1.0])])

        assert step.kind == "DENSE32"
        assert step.sent_bytes == DENSE.nbytes + 2 * SPARSE.nbytes

    def test_an_exchange_with_nothing_to_send_has_no_kind(self):
        observer = Observer()
        observer.exchanged(0.0, [])

        step = observer.step([sample([1.0])])

        assert (step.density, step.sent_bytes, step.kind) == (0.0, 0, None)

    def test_the_threshold_is_the_mean_of_those_that_there_are(self):
        samples = [sample([1.0], t) for t in (0.25, math.nan, 0.75)]

        assert Observer().step(samples).threshold == 0.5
        assert math.isnan(Observer().step(samples[1:2]).threshold)


class TestStatistics:
    def test_they_are_sums_since_the_last_call(self):
        observer = Observer()
        for lead, density in ((2, 0.5), (3, 0.25), (0, 0.0)):
            observer.begin_step()
            observer.leads(lead)
            if density:
                observer.exchanged(density, [])

        assert observer.statistics([0.25, 0.75], 1.5) == ExchangeStats(
            exchanges=2,
            density_sum=0.75,
            threshold=0.5,
            clipped=1.5,
            lead_sum=5,
            steps=3,
        )
        again = observer.statistics([], 0.0)
        assert again[:2] + again[3:] == (0, 0.0, 0.0, 0, 0, 0)
        assert math.isnan(again.threshold)


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
