"""What one accumulator does at a step; test_conservation.py has several together."""

import math

import numpy as np
import pytest
import torch
from accumulators import GRID, STAMP, Vector, make, proposed, sparse

from daskdl.accumulator import Accumulator
from daskdl.codec import DenseUpdate
from daskdl.errors import CodecError, OptionError
from daskdl.quanta import MAX_COUNT, count_of
from daskdl.residuals import KeepResidual, ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    Sent,
    ThresholdAlgorithm,
)
from daskdl.vectors import FlatParameters


class TestStart:
    def test_the_start_is_rounded_to_the_grid(self):
        module = Vector([0.1, -1.0, 2.0**-25, 3 * 2.0**-25])

        accumulator = make(module)

        counts = [round(0.1 * 2**24), -(2**24), 0, 2]
        assert accumulator.grid == GRID
        assert accumulator.shared_counts().tolist() == counts
        assert module.first.tolist() == [count * GRID for count in counts]
        assert accumulator.residual_norm() == 0.0

    def test_eager_float32_has_no_second_local(self):
        module = Vector([0.5, 0.25])
        parameters = FlatParameters(module)

        accumulator = Accumulator(parameters, FixedThreshold(), KeepResidual())

        assert accumulator._groups[0].local_N is parameters.groups[0].flat

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
        before, digest = module.first.clone(), accumulator.digest()

        first, second = proposed(accumulator), proposed(accumulator)

        assert first.entries_K.tolist() == second.entries_K.tolist() == [1, -2]
        assert torch.equal(module.first, before)
        assert accumulator.digest() == digest
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
        assert accumulator.shared_counts().tolist() == [2**20, 0, 0, -(2**20)]

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

        assert accumulator.shared_counts().tolist() == [0]
        assert accumulator.sections["*"].exchanges == 0

    def test_a_proposal_of_another_grid_is_refused(self):
        accumulator = make(Vector([0.0]))
        proposal = proposed(accumulator)
        accumulator.replace_shared_(np.zeros(1, np.int32), 2 * GRID)

        with pytest.raises(OptionError, match="propose again"):
            accumulator.take_(proposal)


class TestApply:
    def test_local_and_shared_move_and_the_residual_stays(self):
        module = Vector([0.0, 0.0, 0.0])
        accumulator = make(module)
        module.step(0.03, 0.0, 0.0)

        accumulator.apply_(sparse(3, [1, -3]))

        assert module.first.tolist() == pytest.approx([0.0925, 0.0, -0.0625])
        assert accumulator.shared_counts().tolist() == [2**20, 0, -(2**20)]
        assert accumulator.residual_norm() == pytest.approx(0.03, rel=1e-6)

    def test_entries_reach_their_groups(self):
        module = Vector([0.0, 0.0], second=[0.0, 0.0])
        accumulator = make(module)

        accumulator.apply_(sparse(4, [2, -3]))

        assert module.first.tolist() == [0.0, 0.0625]
        assert module.second.tolist() == [-0.0625, 0.0]

    def test_a_dense_update_is_applied(self):
        module = Vector([0.0, 0.0], second=[0.0])
        accumulator = make(module)
        counts = np.array([2**20, 0, -3], np.int32)
        counts.flags.writeable = False

        accumulator.apply_(DenseUpdate(STAMP, 3, GRID, counts))

        assert module.first.tolist() == [0.0625, 0.0]
        assert module.second.tolist() == [-3 * GRID]
        assert accumulator.shared_counts().tolist() == counts.tolist()

    @pytest.mark.parametrize(
        ("update", "message"),
        [
            (sparse(4, [1]), "model has 3 parameters, got 4"),
            (sparse(3, [1, -4]), r"entry 1 is -4; .* in \[1, 3\]"),
            (sparse(3, [3, 1]), "entry 1 is 1; need ascending"),
            (sparse(3, [1], 1.5 * GRID), r"1 to 4194304 whole steps .* got 8.9"),
            (sparse(3, [1], GRID / 2), "whole steps"),
            (sparse(3, [1], 0.0), "whole steps"),
            (sparse(3, [1], (MAX_COUNT + 1) * GRID), "whole steps"),
            (sparse(3, [1], math.nan), "whole steps"),
            (sparse(3, [1], math.inf), "whole steps"),
            (DenseUpdate(STAMP, 3, 2 * GRID, np.ones(3, np.int32)), "grid must be"),
            (DenseUpdate(STAMP, 3, GRID, np.ones(2, np.int32)), "need 3 counts"),
            (DenseUpdate(STAMP, 3, GRID, np.ones(3)), "int32, got float64"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_foreign_updates_are_refused_before_anything_moves(self, update, message):
        module = Vector([0.0, 0.0], second=[0.0])
        accumulator = make(module)
        digest = accumulator.digest()

        with pytest.raises(CodecError, match=message):
            accumulator.apply_(update)

        assert accumulator.digest() == digest
        assert [*module.first.tolist(), *module.second.tolist()] == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("count", [1, 3, MAX_COUNT], ids=str)
    def test_a_threshold_is_read_as_steps(self, count):
        assert count_of(count * GRID, GRID) == count
