"""What the vectors of a model do with updates, at a barrier, and as a newcomer."""

import contextlib
import math

import numpy as np
import pytest
import torch

from daskdl.codec import DenseUpdate
from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import MAX_COUNT, ModelProgress, count_of
from daskdl.errors import CodecError, RunError
from tests.support.accumulators import GRID, STAMP, Vector, sparse, whole


class TestStart:
    def test_the_start_is_rounded_to_the_grid(self):
        module = Vector([0.1, -1.0, 2.0**-25, 3 * 2.0**-25])

        progress = whole(module)

        counts = [round(0.1 * 2**24), -(2**24), 0, 2]
        assert progress.grid == GRID
        assert progress.shared_counts().tolist() == counts
        assert module.first.tolist() == [count * GRID for count in counts]
        assert progress.residual_norm() == 0.0

    def test_eager_float32_has_no_second_local(self):
        module = Vector([0.5, 0.25])
        parameters = FlatParameters(module)

        progress = ModelProgress(parameters, strict=False)

        assert progress.groups[0].local_N is parameters.groups[0].flat


class TestApply:
    def test_local_and_shared_move_and_the_residual_stays(self):
        module = Vector([0.0, 0.0, 0.0])
        progress = whole(module)
        module.step(0.03, 0.0, 0.0)

        progress.apply_(sparse(3, [1, -3]))

        assert module.first.tolist() == pytest.approx([0.0925, 0.0, -0.0625])
        assert progress.shared_counts().tolist() == [2**20, 0, -(2**20)]
        assert progress.residual_norm() == pytest.approx(0.03, rel=1e-6)

    def test_entries_reach_their_groups(self):
        module = Vector([0.0, 0.0], second=[0.0, 0.0])
        progress = whole(module)

        progress.apply_(sparse(4, [2, -3]))

        assert module.first.tolist() == [0.0, 0.0625]
        assert module.second.tolist() == [-0.0625, 0.0]

    def test_a_dense_update_is_applied(self):
        module = Vector([0.0, 0.0], second=[0.0])
        progress = whole(module)
        counts = np.array([2**20, 0, -3], np.int32)
        counts.flags.writeable = False

        progress.apply_(DenseUpdate(STAMP, 3, GRID, counts))

        assert module.first.tolist() == [0.0625, 0.0]
        assert module.second.tolist() == [-3 * GRID]
        assert progress.shared_counts().tolist() == counts.tolist()

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
        progress = whole(module)
        digest = progress.digest()

        with pytest.raises(CodecError, match=message):
            progress.apply_(update)

        assert progress.digest() == digest
        assert [*module.first.tolist(), *module.second.tolist()] == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("count", [1, 3, MAX_COUNT], ids=str)
    def test_a_threshold_is_read_as_steps(self, count):
        assert count_of(count * GRID, GRID) == count


class TestResidual:
    def test_counts_are_rounded_and_change_nothing(self):
        module = Vector([0.0, 0.0, 0.0])
        progress = whole(module)
        module.step(10.4 * GRID, -10.6 * GRID, 0.4 * GRID)
        before = module.first.clone()

        counts = progress.residual_counts()

        assert counts.tolist() == [10, -11, 0]
        assert counts.dtype == np.int32
        assert torch.equal(module.first, before)
        assert progress.shared_counts().tolist() == [0, 0, 0]

    def test_handing_over_leaves_half_a_step_at_most(self):
        module = Vector([0.25, 0.0], second=[0.0])
        progress = whole(module)
        module.step(0.1, -10.6 * GRID)
        before, shared = module.first.clone(), progress.shared_counts()

        counts = progress.hand_over_()

        assert (progress.shared_counts() - shared).tolist() == counts.tolist()
        assert counts.tolist() == [round(0.1 / GRID), -11, 0]
        assert torch.equal(module.first, before)
        assert progress.residual_norm() < GRID
        assert progress.residual_counts().tolist() == [0, 0, 0]

    def test_counts_saturate_and_nan_is_kept_back(self):
        module = Vector([1.0, 0.0, 0.0, -1.0])
        progress = whole(module)
        module.step(1e9, -1e9, math.nan, -math.inf)

        counts = progress.residual_counts()
        handed_over = progress.hand_over_()

        limit = 2**31 - 1
        assert counts.tolist() == [limit - 2**24, -limit, 0, -limit + 2**24]
        assert handed_over.tolist() == counts.tolist()
        assert progress.shared_counts().tolist() == [limit, -limit, 0, -limit]

    def test_counts_across_all_of_int32_saturate(self):
        module = Vector([0.0])
        progress = whole(module)
        progress.apply_counts_(np.array([1 - 2**31], np.int32))
        module.step(1e9)

        assert progress.residual_counts().tolist() == [2**31 - 1]

    @pytest.mark.parametrize(
        ("look", "expected"),
        [
            (lambda own: own.residual_norm(), 5 * GRID),
            (lambda own: own.residual_counts().tolist(), [3, -4]),
            (lambda own: own.hand_over_().tolist(), [3, -4]),
        ],
        ids=["norm", "counts", "hand over"],
    )
    def test_a_step_that_only_the_module_knows_of_counts(self, look, expected):
        module = Vector([0.0, 0.0])
        progress = whole(module, strict=True)
        module.step(3 * GRID, -4 * GRID)

        assert look(progress) == expected

    def test_norm_is_over_all_groups(self):
        module = Vector([0.0], second=[0.0])
        progress = whole(module)
        module.step(3.0)
        with torch.no_grad():
            module.second -= 4.0

        assert progress.residual_norm() == 5.0


class TestSnapshot:
    def test_a_newcomer_takes_shared_and_local_from_it(self):
        module = Vector([0.5, 0.0], second=[0.0])
        progress = whole(module)
        counts = np.array([7, -8, 9], np.int32)

        progress.replace_shared_(counts, 2.0**-3)

        assert progress.shared_counts().tolist() == [7, -8, 9]
        assert module.first.tolist() == [7 / 8, -1.0]
        assert module.second.tolist() == [9 / 8]
        assert progress.grid == 2.0**-3
        assert progress.residual_norm() == 0.0

    def test_a_repair_keeps_the_residual(self):
        module = Vector([0.5, 0.0])
        progress = whole(module)
        module.step(0.03125, -0.25)

        progress.replace_shared_(np.array([2**24, 0], np.int32), GRID)

        assert module.first.tolist() == [1.03125, -0.25]
        assert progress.residual_counts().tolist() == [2**19, -(2**22)]

    def test_another_size_is_refused(self):
        progress = whole(Vector([0.5]))

        with pytest.raises(CodecError, match="need 1 counts of int32"):
            progress.replace_shared_(np.zeros(2, np.int32), GRID)


class TestDigest:
    def test_equal_for_those_that_agree_whatever_their_residual(self):
        one, two = whole(Vector([0.5, 0.1])), whole(module := Vector([0.5, 0.1]))
        module.step(1.0, 2.0)

        assert one.digest() == two.digest()

    @pytest.mark.parametrize("place", [0, 1, 2], ids=str)
    def test_one_step_anywhere_makes_another(self, place):
        one = whole(Vector([0.5, 0.1], second=[0.0]))
        before, counts = one.digest(), np.zeros(3, np.int32)
        counts[place] = 1

        one.apply_counts_(counts)

        assert one.digest() != before

    def test_another_grid_makes_another(self):
        one = whole(Vector([0.5]))
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
        progress = whole(Vector([0.0, 0.0]))
        progress.apply_counts_(np.array([largest, 33], np.int32))

        grid = progress.regrid_()

        assert grid == progress.grid == factor * GRID
        after = int(progress.shared_counts()[0])
        assert after == math.floor(largest / factor + 0.5)
        assert factor == 1 or 2**24 - 1 <= abs(after) < 2**25

    def test_local_is_unchanged_and_all_groups_follow(self):
        module = Vector([0.0, 0.0], second=[0.0])
        progress = whole(module)
        progress.apply_counts_(np.array([2**29, 40, -40], np.int32))
        before = module.first.tolist(), module.second.tolist()

        progress.regrid_()

        assert (module.first.tolist(), module.second.tolist()) == before
        assert progress.shared_counts().tolist() == [2**24, 1, -1]
        assert progress.residual_counts().tolist() == [0, 0, 0]


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestShowingShared:
    def test_the_module_shows_shared_and_then_what_it_was(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        progress = whole(module, strict)
        module.step(0.1, 0.0)
        progress.absorb_()
        before = module.first.clone()

        with progress.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert torch.equal(module.first, before)
        assert progress.residual_norm() == pytest.approx(0.1, rel=2**-6)

    def test_a_step_just_made_is_not_lost(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        progress = whole(module, strict)
        module.step(0.125, 0.0)

        with progress.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert progress.residual_norm() == 0.125

    def test_what_was_changed_inside_is_undone(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        progress = whole(module, strict)

        with contextlib.suppress(KeyError), progress.showing_shared():
            module.first.data.fill_(7.0)
            raise KeyError

        assert module.first.tolist() == [0.5, 0.25]

    @pytest.mark.parametrize(
        "use",
        [
            lambda own: own.apply_(sparse(2, [1])),
            lambda own: own.apply_counts_(np.ones(2, np.int32)),
            lambda own: own.hand_over_(),
            lambda own: own.regrid_(),
            lambda own: own.absorb_(),
            lambda own: own.residual_counts(),
            lambda own: own.replace_shared_(np.zeros(2, np.int32), GRID),
            lambda own: own.residual_norm(),
        ],
        ids=[
            *("apply", "counts", "hand over", "regrid", "absorb"),
            *("residual", "snapshot", "norm"),
        ],
    )
    def test_local_cannot_be_used_inside(self, dtype, strict, use):
        progress = whole(Vector([0.5, 0.25], dtype), strict)

        with (
            progress.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            use(progress)

        use(progress)
