"""What one accumulator does at a barrier, at its end, and as a newcomer."""

import contextlib
import math

import numpy as np
import pytest
import torch
from accumulators import GRID, Vector, make, proposed, sparse

from daskdl.errors import CodecError, RunError
from daskdl.quanta import MAX_COUNT
from daskdl.thresholds import FixedThreshold


class TestResidual:
    def test_counts_are_rounded_and_change_nothing(self):
        module = Vector([0.0, 0.0, 0.0])
        accumulator = make(module)
        module.step(10.4 * GRID, -10.6 * GRID, 0.4 * GRID)
        before = module.first.clone()

        counts = accumulator.residual_counts()

        assert counts.tolist() == [10, -11, 0]
        assert counts.dtype == np.int32
        assert torch.equal(module.first, before)
        assert accumulator.shared_counts().tolist() == [0, 0, 0]

    def test_handing_over_leaves_half_a_step_at_most(self):
        module = Vector([0.25, 0.0], second=[0.0])
        accumulator = make(module)
        module.step(0.1, -10.6 * GRID)
        before, shared = module.first.clone(), accumulator.shared_counts()

        counts = accumulator.hand_over_()

        assert (accumulator.shared_counts() - shared).tolist() == counts.tolist()
        assert counts.tolist() == [round(0.1 / GRID), -11, 0]
        assert torch.equal(module.first, before)
        assert accumulator.residual_norm() < GRID
        assert accumulator.residual_counts().tolist() == [0, 0, 0]

    def test_counts_saturate_and_nan_is_kept_back(self):
        module = Vector([1.0, 0.0, 0.0, -1.0])
        accumulator = make(module)
        module.step(1e9, -1e9, math.nan, -math.inf)

        counts = accumulator.residual_counts()
        handed_over = accumulator.hand_over_()

        limit = 2**31 - 1
        assert counts.tolist() == [limit - 2**24, -limit, 0, -limit + 2**24]
        assert handed_over.tolist() == counts.tolist()
        assert accumulator.shared_counts().tolist() == [limit, -limit, 0, -limit]

    def test_counts_across_all_of_int32_saturate(self):
        module = Vector([0.0])
        accumulator = make(module)
        accumulator.apply_counts_(np.array([1 - 2**31], np.int32))
        module.step(1e9)

        assert accumulator.residual_counts().tolist() == [2**31 - 1]

    @pytest.mark.parametrize(
        ("look", "expected"),
        [
            (lambda a: a.residual_norm(), 5 * GRID),
            (lambda a: a.residual_counts().tolist(), [3, -4]),
            (lambda a: a.hand_over_().tolist(), [3, -4]),
        ],
        ids=["norm", "counts", "hand over"],
    )
    def test_a_step_that_only_the_module_knows_of_counts(self, look, expected):
        module = Vector([0.0, 0.0])
        accumulator = make(module, apply="strict")
        module.step(3 * GRID, -4 * GRID)

        assert look(accumulator) == expected

    def test_norm_is_over_all_groups(self):
        module = Vector([0.0], second=[0.0])
        accumulator = make(module)
        module.step(3.0)
        with torch.no_grad():
            module.second -= 4.0

        assert accumulator.residual_norm() == 5.0


class TestSnapshot:
    def test_a_newcomer_takes_shared_and_local_from_it(self):
        module = Vector([0.5, 0.0], second=[0.0])
        accumulator = make(module)
        counts = np.array([7, -8, 9], np.int32)

        accumulator.replace_shared_(counts, 2.0**-3)

        assert accumulator.shared_counts().tolist() == [7, -8, 9]
        assert module.first.tolist() == [7 / 8, -1.0]
        assert module.second.tolist() == [9 / 8]
        assert accumulator.grid == 2.0**-3
        assert accumulator.residual_norm() == 0.0

    def test_a_repair_keeps_the_residual(self):
        module = Vector([0.5, 0.0])
        accumulator = make(module)
        module.step(0.03125, -0.25)

        accumulator.replace_shared_(np.array([2**24, 0], np.int32), GRID)

        assert module.first.tolist() == [1.03125, -0.25]
        assert accumulator.residual_counts().tolist() == [2**19, -(2**22)]

    def test_another_size_is_refused(self):
        accumulator = make(Vector([0.5]))

        with pytest.raises(CodecError, match="need 1 counts of int32"):
            accumulator.replace_shared_(np.zeros(2, np.int32), GRID)


class TestDigest:
    def test_equal_for_those_that_agree_whatever_their_residual(self):
        one, two = make(Vector([0.5, 0.1])), make(module := Vector([0.5, 0.1]))
        module.step(1.0, 2.0)

        assert one.digest() == two.digest()

    @pytest.mark.parametrize("place", [0, 1, 2], ids=str)
    def test_one_step_anywhere_makes_another(self, place):
        one = make(Vector([0.5, 0.1], second=[0.0]))
        before, counts = one.digest(), np.zeros(3, np.int32)
        counts[place] = 1

        one.apply_counts_(counts)

        assert one.digest() != before

    def test_another_grid_makes_another(self):
        one = make(Vector([0.5]))
        before = one.digest()

        one.replace_shared_(one.shared_counts(), 2 * GRID)

        assert one.digest() != before


class TestRegrid:
    @pytest.mark.parametrize(
        ("largest", "factor"),
        [
            (2**28, 1),
            (2**28 + 1, 16),
            (2**29 - 1, 32),
            (-(2**29) + 1, 32),
            (2**30, 64),
            (2**31 - 1, 128),
            (-(2**31), 128),
        ],
        ids=str,
    )
    def test_shared_is_brought_back_when_it_has_grown(self, largest, factor):
        accumulator = make(Vector([0.0, 0.0]))
        accumulator.apply_counts_(np.array([largest, 33], np.int32))

        grid = accumulator.regrid_()

        assert grid == accumulator.grid == factor * GRID
        after = int(accumulator.shared_counts()[0])
        assert after == math.floor(largest / factor + 0.5)
        assert factor == 1 or 2**24 - 1 <= abs(after) < 2**25

    def test_local_is_unchanged_and_all_groups_follow(self):
        module = Vector([0.0, 0.0], second=[0.0])
        accumulator = make(module)
        accumulator.apply_counts_(np.array([2**29, 40, -40], np.int32))
        before = module.first.tolist(), module.second.tolist()

        accumulator.regrid_()

        assert (module.first.tolist(), module.second.tolist()) == before
        assert accumulator.shared_counts().tolist() == [2**24, 1, -1]
        assert accumulator.residual_counts().tolist() == [0, 0, 0]

    def test_a_group_without_parameters_does_no_harm(self):
        module = Vector([], second=[0.0])
        accumulator = make(module)
        with torch.no_grad():
            module.second += 0.5

        accumulator.take_(proposed(accumulator))

        assert accumulator.regrid_() == GRID
        assert accumulator.shared_counts().tolist() == [2**20]

    def test_growth_far_beyond_the_start_waits_and_then_goes_on(self):
        module = Vector([0.0])
        accumulator = make(module, FixedThreshold(MAX_COUNT * GRID))
        module.step(1000.0)

        while len((proposal := proposed(accumulator)).entries_K):
            accumulator.take_(proposal)
        stuck = accumulator.shared_counts()[0]
        accumulator.regrid_()
        proposal = proposed(accumulator)

        assert 2**30 < stuck <= 2**30 + MAX_COUNT
        assert module.first.item() == 1000.0
        assert proposal.entries_K.tolist() == [1]
        accumulator.apply_(sparse(1, [1], proposal.threshold))
        accumulator.take_(proposal)
        assert module.first.item() == 1000.0 + proposal.threshold


@pytest.mark.parametrize("apply", ["eager", "strict"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestShowingShared:
    def test_the_module_shows_shared_and_then_what_it_was(self, dtype, apply):
        module = Vector([0.5, 0.25], dtype)
        accumulator = make(module, apply=apply)
        module.step(0.1, 0.0)
        accumulator.absorb_()
        before = module.first.clone()

        with accumulator.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert torch.equal(module.first, before)
        assert accumulator.residual_norm() == pytest.approx(0.1, rel=2**-6)

    def test_a_step_just_made_is_not_lost(self, dtype, apply):
        module = Vector([0.5, 0.25], dtype)
        accumulator = make(module, apply=apply)
        module.step(0.125, 0.0)

        with accumulator.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert accumulator.residual_norm() == 0.125

    def test_what_was_changed_inside_is_undone(self, dtype, apply):
        module = Vector([0.5, 0.25], dtype)
        accumulator = make(module, apply=apply)

        with contextlib.suppress(KeyError), accumulator.showing_shared():
            module.first.data.fill_(7.0)
            raise KeyError

        assert module.first.tolist() == [0.5, 0.25]

    @pytest.mark.parametrize(
        "use",
        [
            lambda a: a.propose(),
            lambda a: a.apply_(sparse(2, [1])),
            lambda a: a.apply_counts_(np.ones(2, np.int32)),
            lambda a: a.hand_over_(),
            lambda a: a.regrid_(),
            lambda a: a.absorb_(),
            lambda a: a.residual_counts(),
            lambda a: a.replace_shared_(np.zeros(2, np.int32), GRID),
            lambda a: a.residual_norm(),
        ],
        ids=[
            *("propose", "apply", "counts", "hand over", "regrid", "absorb"),
            *("residual", "snapshot", "norm"),
        ],
    )
    def test_local_cannot_be_used_inside(self, dtype, apply, use):
        accumulator = make(Vector([0.5, 0.25], dtype), apply=apply)

        with (
            accumulator.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            use(accumulator)

        use(accumulator)

    def test_a_proposal_made_before_cannot_be_taken_inside(self, dtype, apply):
        accumulator = make(Vector([0.5, 0.25], dtype), apply=apply)
        proposal = proposed(accumulator)

        with (
            accumulator.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            accumulator.take_(proposal)

        assert accumulator.sections["*"].exchanges == 0
