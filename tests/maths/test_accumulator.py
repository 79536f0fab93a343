"""What one accumulator does at a step; test_conservation.py has several together."""

import math

import numpy as np
import pytest
import torch

from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.errors import OptionError, RunError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    Sent,
    ThresholdAlgorithm,
)
from tests.support.accumulators import GRID, Vector, make, proposed, sparse


class TestStart:
    def test_another_way_to_apply_is_refused(self):
        with pytest.raises(OptionError, match=r"apply must be .* got 'lazy'"):
            make(Vector([0.5]), apply="lazy")


class TestPropose:
    def test_the_threshold_is_put_on_the_grid(self):
        accumulator = make(Vector([0.5]), FixedThreshold(1.2e-3))

        proposal = proposed(accumulator)

        assert proposal.count == 20133  # 20132.66 steps: the nearest, not the first
        assert proposal.threshold == proposal.count * GRID
        assert proposal.threshold == np.float32(proposal.threshold)
        assert proposal.rule == 1.2e-3

    @pytest.mark.parametrize(
        ("value", "count"), [(1e-30, 1), (1e9, MAX_COUNT)], ids=["small", "large"]
    )
    def test_a_rule_cannot_leave_the_grid(self, value, count):
        proposal = proposed(make(Vector([0.5]), FixedThreshold(value)))

        assert (proposal.count, proposal.rule) == (count, count * GRID)

    def test_it_changes_nothing(self):
        module = Vector([0.5, 0.25])
        accumulator = make(module)
        module.step(0.1, -0.1)
        before, digest = module.first.clone(), accumulator.progress.digest()

        first, second = proposed(accumulator), proposed(accumulator)

        assert first.entries_K.tolist() == second.entries_K.tolist() == [1, -2]
        assert torch.equal(module.first, before)
        assert accumulator.progress.digest() == digest
        assert (accumulator.sections.sent, accumulator.sections["*"].exchanges) == (
            {},
            0,
        )

    def test_groups_follow_each_other(self):
        module = Vector([0.0, 0.0], second=[0.0, 0.0])
        accumulator = make(module)
        module.step(0.5, 0.0)
        with torch.no_grad():
            module.second[1] = -0.5

        proposal = proposed(accumulator)
        accumulator.take_(proposal)

        assert proposal.entries_K.tolist() == [1, -4]
        assert accumulator.progress.shared_counts().tolist() == [2**20, 0, 0, -(2**20)]

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
    def test_a_rule_must_return_a_positive_number(self, value):
        class Odd(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                return value

        with pytest.raises(OptionError, match=f"finite and > 0, got {value} from"):
            make(Vector([0.5]), Odd()).propose()

    def test_a_rule_may_look_at_the_residual_of_all_groups(self):
        class Largest(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                assert residual.tensor().shape == (3,)
                return float(residual.tensor().abs().max())

        module = Vector([0.5, 0.5], second=[0.0])
        accumulator = make(module, Largest())
        module.step(0.0, 2.0**-5)

        proposal = proposed(accumulator)

        assert (proposal.rule, proposal.entries_K.tolist()) == (2.0**-5, [2])


class TestTake:
    def test_the_outcome_is_what_the_rule_sees_next(self):
        module = Vector([0.0, 0.0, 0.0, 0.0])
        rule = AdaptiveThreshold(initial=1e-3, max_density=0.1, decay=0.5)
        accumulator = make(module, rule)
        module.step(0.5, 0.0, 0.0, 0.0)

        accumulator.take_(proposed(accumulator))

        assert accumulator.sections.sent == {"*": Sent(1e-3, 0.25)}
        assert accumulator.sections["*"].exchanges == 1
        assert proposed(accumulator).rule == 2e-3

    def test_nothing_to_send_is_an_outcome_too(self):
        accumulator = make(Vector([0.0]), AdaptiveThreshold(initial=1e-3, decay=0.5))

        accumulator.take_(proposed(accumulator))

        assert accumulator.sections.sent == {"*": Sent(1e-3, 0.0)}
        assert proposed(accumulator).rule == 5e-4

    def test_the_last_outcome_can_be_carried_on(self):
        rule = AdaptiveThreshold(decay=0.5)

        accumulator = make(Vector([0.0]), rule, last={"*": Sent(0.125, 0.5)})

        assert proposed(accumulator).rule == 0.25

    def test_clipping_is_counted(self):
        module = Vector([0.0, 0.0])
        accumulator = make(module, residual=ResidualClipping(2.0, frequency=1))
        accumulator.take_(proposed(accumulator))
        module.step(0.5, -0.0625)

        accumulator.take_(proposed(accumulator))

        assert module.first.tolist() == [0.1875, -0.0625]  # 1 quantum sent, 2 kept
        assert accumulator.clipped == 0.5 - 0.1875

    def test_the_first_exchange_never_cuts(self):
        module = Vector([0.0])
        accumulator = make(module, residual=ResidualClipping(2.0, frequency=1))
        module.step(0.5)

        accumulator.take_(proposed(accumulator))

        assert (module.first.item(), accumulator.clipped) == (0.5, 0.0)

    def test_a_bound_may_be_the_threshold_itself(self):
        module = Vector([0.0])
        accumulator = make(module, residual=ResidualClipping(1.0, frequency=1))
        accumulator.take_(proposed(accumulator))
        module.step(0.5)

        accumulator.take_(proposed(accumulator))

        assert module.first.item() == 0.125

    def test_what_is_clipped_adds_up(self):
        module = Vector([0.0])
        accumulator = make(module, residual=ResidualClipping(1.0, frequency=1))
        accumulator.take_(proposed(accumulator))

        for _ in range(2):
            module.step(0.5)
            accumulator.take_(proposed(accumulator))

        assert accumulator.clipped == 0.375 + 0.4375

    @pytest.mark.parametrize("factor", [0.5, math.nan], ids=["half", "nan"])
    def test_a_bound_below_the_threshold_is_refused(self, factor):
        class Tight(ResidualPostProcessor):
            def bound(self, exchange, threshold):
                return threshold * factor

        module = Vector([0.0])
        accumulator = make(module, residual=Tight())
        module.step(0.5)
        proposal = proposed(accumulator)

        with pytest.raises(
            OptionError, match=f"bound must be >= .* got {0.0625 * factor}"
        ):
            accumulator.take_(proposal)

        assert accumulator.progress.shared_counts().tolist() == [0]
        assert accumulator.sections["*"].exchanges == 0

    def test_a_proposal_of_another_grid_is_refused(self):
        accumulator = make(Vector([0.0]))
        proposal = proposed(accumulator)
        accumulator.progress.replace_shared_(np.zeros(1, np.int32), 2 * GRID)

        with pytest.raises(OptionError, match="propose again"):
            accumulator.take_(proposal)


class TestRegrid:
    def test_a_group_without_parameters_does_no_harm(self):
        module = Vector([], second=[0.0])
        accumulator = make(module)
        with torch.no_grad():
            module.second += 0.5

        accumulator.take_(proposed(accumulator))

        assert accumulator.progress.regrid_() == GRID
        assert accumulator.progress.shared_counts().tolist() == [2**20]

    def test_growth_far_beyond_the_start_waits_and_then_goes_on(self):
        module = Vector([0.0])
        accumulator = make(module, FixedThreshold(MAX_COUNT * GRID))
        module.step(1000.0)

        while len((proposal := proposed(accumulator)).entries_K):
            accumulator.take_(proposal)
        stuck = accumulator.progress.shared_counts()[0]
        accumulator.progress.regrid_()
        proposal = proposed(accumulator)

        assert 2**30 < stuck <= 2**30 + MAX_COUNT
        assert module.first.item() == 1000.0
        assert proposal.entries_K.tolist() == [1]
        accumulator.progress.apply_(sparse(1, [1], proposal.threshold))
        accumulator.take_(proposal)
        assert module.first.item() == 1000.0 + proposal.threshold


@pytest.mark.parametrize("apply", ["eager", "strict"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestShowingShared:
    def test_nothing_is_proposed_inside(self, dtype, apply):
        accumulator = make(Vector([0.5, 0.25], dtype), apply=apply)

        with (
            accumulator.progress.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            accumulator.propose()

        accumulator.propose()

    def test_a_proposal_made_before_cannot_be_taken_inside(self, dtype, apply):
        accumulator = make(Vector([0.5, 0.25], dtype), apply=apply)
        proposal = proposed(accumulator)

        with (
            accumulator.progress.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            accumulator.take_(proposal)

        assert accumulator.sections["*"].exchanges == 0
