"""What the vectors of a model do with updates, at a barrier, and as a newcomer."""

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.codec import DenseUpdate
from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import (
    CHUNK,
    MAX_COUNT,
    RUN,
    ReplicaVector,
    ResidualView,
    count_of,
)
from daskdl.errors import CodecError, RunError
from tests.support.updates import GRID, STAMP, Vector, sparse, whole

QUARTER = MAX_COUNT * GRID  # the largest quantum


class TestStart:
    def test_the_start_is_rounded_to_the_grid(self):
        module = Vector([0.1, -1.0, 2.0**-25, 3 * 2.0**-25])

        vector = whole(module)

        counts = [round(0.1 * 2**24), -(2**24), 0, 2]
        assert vector.grid == GRID
        assert vector.shared_counts().tolist() == counts
        assert module.first.tolist() == [count * GRID for count in counts]
        assert vector.farthest() == 0.0

    def test_eager_float32_has_no_second_local(self):
        module = Vector([0.5, 0.25])
        parameters = FlatParameters(module)

        vector = ReplicaVector(parameters, strict=False)

        assert vector.groups[0].local_N is parameters.groups[0].flat


class TestApply:
    def test_local_and_shared_move_and_the_residual_stays(self):
        module = Vector([0.0, 0.0, 0.0])
        vector = whole(module)
        module.step(0.03, 0.0, 0.0)

        vector.apply_(sparse(3, [1, -3]))

        assert module.first.tolist() == pytest.approx([0.0925, 0.0, -0.0625])
        assert vector.shared_counts().tolist() == [2**20, 0, -(2**20)]
        assert vector.farthest() == pytest.approx(0.03, rel=1e-6)

    def test_entries_reach_their_groups(self):
        module = Vector([0.0, 0.0], second=[0.0, 0.0])
        vector = whole(module)

        vector.apply_(sparse(4, [2, -3]))

        assert module.first.tolist() == [0.0, 0.0625]
        assert module.second.tolist() == [-0.0625, 0.0]

    def test_a_dense_update_is_applied(self):
        module = Vector([0.0, 0.0], second=[0.0])
        vector = whole(module)
        counts = np.array([2**20, 0, -3], np.int32)
        counts.flags.writeable = False

        vector.apply_(DenseUpdate(STAMP, 3, GRID, counts))

        assert module.first.tolist() == [0.0625, 0.0]
        assert module.second.tolist() == [-3 * GRID]
        assert vector.shared_counts().tolist() == counts.tolist()

    @pytest.mark.parametrize(
        ("update", "message"),
        [
            (sparse(4, [1]), "model has 3 parameters, got 4"),
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
        vector = whole(module)
        digest = vector.digest()

        with pytest.raises(CodecError, match=message):
            vector.apply_(update)

        assert vector.digest() == digest
        assert [*module.first.tolist(), *module.second.tolist()] == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("count", [1, 3, MAX_COUNT], ids=str)
    def test_a_threshold_is_read_as_steps(self, count):
        assert count_of(count * GRID, GRID) == count


class TestResidual:
    def test_flushing_leaves_half_a_step_at_most(self):
        module = Vector([0.25, 0.0], second=[0.0])
        vector = whole(module)
        module.step(0.1, -10.6 * GRID)
        before, shared = module.first.clone(), vector.shared_counts()

        counts = vector.flush_residual_()

        assert (vector.shared_counts() - shared).tolist() == counts.tolist()
        assert counts.tolist() == [round(0.1 / GRID), -11, 0]
        assert torch.equal(module.first, before)
        assert vector.farthest() < GRID
        assert vector.residual_counts().tolist() == [0, 0, 0]

    def test_counts_saturate_and_nan_is_kept_back(self):
        module = Vector([1.0, 0.0, 0.0, -1.0])
        vector = whole(module)
        module.step(1e9, -1e9, math.nan, -math.inf)

        counts = vector.residual_counts()
        flushed = vector.flush_residual_()

        limit = 2**31 - 1
        assert counts.tolist() == [limit - 2**24, -limit, 0, -limit + 2**24]
        assert flushed.tolist() == counts.tolist()
        assert vector.shared_counts().tolist() == [limit, -limit, 0, -limit]

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [(3.0, -4.0, 4.0), (math.nan, 1.0, math.nan), (1.0, math.nan, math.nan)],
    )
    def test_farthest_is_over_all_groups_and_nan_if_one_is(
        self, first, second, expected
    ):
        module = Vector([0.0], second=[0.0])
        vector = whole(module)
        with torch.no_grad():
            module.first += first
            module.second += second

        assert vector.farthest() == pytest.approx(expected, nan_ok=True)


class TestSnapshot:
    def test_a_newcomer_takes_shared_and_local_from_it(self):
        module = Vector([0.5, 0.0], second=[0.0])
        vector = whole(module)
        counts = np.array([7, -8, 9], np.int32)

        vector.replace_shared_(counts, 2.0**-3)

        assert vector.shared_counts().tolist() == [7, -8, 9]
        assert module.first.tolist() == [7 / 8, -1.0]
        assert module.second.tolist() == [9 / 8]
        assert vector.grid == 2.0**-3
        assert vector.farthest() == 0.0

    def test_a_repair_keeps_the_residual(self):
        module = Vector([0.5, 0.0])
        vector = whole(module)
        module.step(0.03125, -0.25)

        vector.replace_shared_(np.array([2**24, 0], np.int32), GRID)

        assert module.first.tolist() == [1.03125, -0.25]
        assert vector.residual_counts().tolist() == [2**19, -(2**22)]

    def test_another_size_is_refused(self):
        vector = whole(Vector([0.5]))

        with pytest.raises(CodecError, match="need 1 counts of int32"):
            vector.replace_shared_(np.zeros(2, np.int32), GRID)


class TestDigest:
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
        vector = whole(Vector([0.0, 0.0]))
        vector.apply_counts_(np.array([largest, 33], np.int32))

        grid = vector.regrid_()

        assert grid == vector.grid == factor * GRID
        after = int(vector.shared_counts()[0])
        assert after == math.floor(largest / factor + 0.5)
        assert factor == 1 or 2**24 - 1 <= abs(after) < 2**25

    def test_local_is_unchanged_and_all_groups_follow(self):
        module = Vector([0.0, 0.0], second=[0.0])
        vector = whole(module)
        vector.apply_counts_(np.array([2**29, 40, -40], np.int32))
        before = module.first.tolist(), module.second.tolist()

        vector.regrid_()

        assert (module.first.tolist(), module.second.tolist()) == before
        assert vector.shared_counts().tolist() == [2**24, 1, -1]
        assert vector.residual_counts().tolist() == [0, 0, 0]


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestShowingShared:
    def test_the_module_shows_shared_and_then_what_it_was(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        vector = whole(module, strict)
        module.step(0.1, 0.0)
        vector.sync_from_parameters_()
        before = module.first.clone()

        with vector.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert torch.equal(module.first, before)
        assert vector.farthest() == pytest.approx(0.1, rel=2**-6)

    def test_what_was_changed_inside_is_undone(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        vector = whole(module, strict)

        with contextlib.suppress(KeyError), vector.showing_shared():
            module.first.data.fill_(7.0)
            raise KeyError

        assert module.first.tolist() == [0.5, 0.25]

    @pytest.mark.parametrize(
        "use",
        [
            lambda own: own.apply_(sparse(2, [1])),
            lambda own: own.apply_counts_(np.ones(2, np.int32)),
            lambda own: own.flush_residual_(),
            lambda own: own.regrid_(),
            lambda own: own.sync_from_parameters_(),
            lambda own: own.residual_counts(),
            lambda own: own.replace_shared_(np.zeros(2, np.int32), GRID),
            lambda own: own.farthest(),
            lambda own: own.commit_(np.array([1], np.int32), 1, math.inf),
            lambda own: ResidualView(own, [(own.groups[0], slice(0, 2))]).find(1),
        ],
        ids=[
            *("apply", "counts", "flush", "regrid", "sync"),
            *("residual", "snapshot", "farthest", "commit", "find"),
        ],
    )
    def test_local_cannot_be_used_inside(self, dtype, strict, use):
        vector = whole(Vector([0.5, 0.25], dtype), strict)

        with (
            vector.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            use(vector)

        use(vector)


def trained(values, dtype, strict, *step):
    """A module of which the optimizer made a step, and its vectors, synced."""
    module = Vector(values, dtype)
    vector = whole(module, strict)
    if step:
        module.step(*step)
        vector.sync_from_parameters_()
    return module, vector, vector.groups[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestHalf:
    """Eager: local is a float32 vector of its own, and the module shows it rounded."""

    def test_local_is_float32_and_the_module_shows_it(self, dtype):
        module, vector, group = trained([0.5], dtype, False)

        vector.apply_(sparse(1, [1], (2**12 + 1) * GRID))

        assert group.local_N.tolist() == [0.5 + (2**12 + 1) * GRID]
        assert group.local_N.dtype == torch.float32
        assert torch.equal(module.first, group.local_N.to(dtype))

    def test_quanta_below_the_resolution_add_up(self, dtype):
        module, vector, _ = trained([1.0], dtype, False)

        for _ in range(256):  # a sixteenth of float16's resolution there
            vector.apply_(sparse(1, [1], 2.0**-14))

        assert module.first.item() == 1.0 + 2.0**-6

    def test_a_step_of_the_optimizer_is_added_to_local_once(self, dtype):
        module, vector, group = trained([0.25, 1.0], dtype, False)
        vector.apply_(sparse(2, [1], 3 * GRID))  # the module cannot show it
        module.step(0.5, 0.0)

        vector.sync_from_parameters_()
        vector.sync_from_parameters_()

        assert group.local_N.tolist() == [0.75 + 3 * GRID, 1.0]
        assert module.first.tolist() == [0.75, 1.0]

    def test_clipping_is_shown(self, dtype):
        module, vector, group = trained([0.0], dtype, False, 1.0)

        mass = vector.commit_(np.array([1], np.int32), MAX_COUNT, bound=0.25)

        assert mass == 0.5
        assert module.first.tolist() == group.local_N.tolist() == [0.5]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestStrict:
    """The module shows shared; local is a vector of its own."""

    def test_own_progress_is_seen_once_it_is_committed(self, dtype):
        module, vector, group = trained([1.0, 1.0], dtype, True, 0.5, 0.5)

        before = module.first.tolist()
        vector.commit_(np.array([1], np.int32), MAX_COUNT, math.inf)

        assert before == [1.0, 1.0]
        assert module.first.tolist() == [1.25, 1.0]
        assert vector.residual(group, slice(None)).tolist() == [0.25, 0.5]

    def test_what_others_sent_is_seen_at_once(self, dtype):
        module, vector, group = trained([1.0, 1.0], dtype, True, 0.5, 0.5)

        vector.apply_(sparse(2, [-2], QUARTER))
        vector.apply_counts_(np.array([MAX_COUNT, 0], np.int32))

        assert module.first.tolist() == [1.25, 0.75]
        assert vector.residual(group, slice(None)).tolist() == [0.5, 0.5]

    def test_flushing_shows_everything(self, dtype):
        module, vector, _ = trained([1.0, 1.0], dtype, True, 0.5, 0.5)

        assert vector.flush_residual_().tolist() == [2**23, 2**23]
        assert module.first.tolist() == [1.5, 1.5]

    def test_a_replaced_shared_is_shown_and_the_residual_stays(self, dtype):
        module, vector, group = trained([1.0, 1.0], dtype, True, 0.5, 0.5)

        vector.replace_shared_(np.array([4, -4], np.int32), grid=0.5)

        assert module.first.tolist() == [2.0, -2.0]
        assert vector.residual(group, slice(None)).tolist() == [0.5, 0.5]

    def test_a_coarser_grid_is_shown(self, dtype):
        module, vector, _ = trained([0.0], dtype, True)
        vector.apply_counts_(np.array([2**29 + 16], np.int32))

        vector.regrid_()

        assert (vector.shared_counts(), vector.grid) == ([2**24 + 1], 32 * GRID)
        shown = torch.tensor([32 + 32 * GRID], dtype=torch.float64).to(dtype)
        assert torch.equal(module.first, shown)


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
def test_vectors_longer_than_a_chunk_are_done_to_the_end(strict):
    module = Vector([0.25] * (CHUNK + 3), torch.bfloat16)
    vector = whole(module, strict)
    with torch.no_grad():
        module.first[-1] = 0.5

    vector.sync_from_parameters_()

    assert vector.residual_counts().nonzero()[0].tolist() == [CHUNK + 2]
    assert vector.farthest() == 0.25
    before = vector.digest()
    vector.flush_residual_()
    assert vector.digest() != before
    assert module.first[-1] == 0.5


class TestSample:
    """What rules see of the residual."""

    @staticmethod
    def view(*sizes, ranges=None):
        """Of groups in which each residual is its position."""
        module, dtypes = nn.Module(), (torch.float32, torch.float64)
        for name, size, dtype in zip("ab", sizes, dtypes, strict=False):
            values = nn.Parameter(torch.zeros(size, dtype=dtype))
            module.register_parameter(name, values)
        vector = whole(module)
        for group in vector.groups:
            group.flat.copy_(torch.arange(group.start, group.stop))
        every = [slice(0, group.flat.numel()) for group in vector.groups]
        pairs = enumerate(every) if ranges is None else ranges
        return ResidualView(vector, [(vector.groups[i], where) for i, where in pairs])

    def test_a_small_residual_is_sampled_whole(self):
        assert self.view(40, 3).sample(most=43).tolist() == [*map(float, range(43))]

    def test_of_a_large_one_runs_are_taken_evenly(self):
        sample = self.view(100).sample(most=50)

        runs = [*range(RUN), *range(2 * RUN, 3 * RUN), *range(4 * RUN, 5 * RUN)]
        assert sample.tolist() == [*runs, 96.0, 97.0, 98.0, 99.0]

    def test_it_is_as_even_over_ranges_as_over_one(self):
        cut = [(0, slice(i, i + 7)) for i in range(0, 7000, 7)]

        sample = self.view(7000, ranges=cut).sample(most=700)

        assert sample.tolist() == self.view(7000).sample(most=700).tolist()

    def test_of_some_ranges_nothing_else_is_in_it(self):
        ends = [(0, slice(90, 100)), (1, slice(0, 2))]

        sample = self.view(100, 5, ranges=ends).sample(most=12)

        assert sample.tolist() == [*map(float, range(90, 102))]
