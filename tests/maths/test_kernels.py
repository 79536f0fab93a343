"""One contract over all kernels, an independent numpy reference, the boundaries."""

import math

import numpy as np
import pytest
import torch

from daskdl.codec import Kind, SparseUpdate, Stamp
from daskdl.compression.replica_vector import fold_
from tests.support.kernel_cases import GRID, INT32_MIN, KERNELS


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Kernels and a function that makes their tensors."""
    return request.param


def random_pair(size, seed, dtype=torch.float32, scale=3.0):
    """Local and shared whose residual is ``scale`` quanta of 64 steps wide."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(-(2**20), 2**20, (size,), generator=generator).int()
    noise = torch.randn(size, generator=generator, dtype=torch.float64) * scale * 64
    local = ((shared.double() + noise) * GRID).to(dtype)
    return local, shared


def reference_find(local, shared, count, base=0):
    """In numpy, with the dtype's own rounding of the difference."""
    local = local.cpu().numpy()
    sent = shared.cpu().numpy().astype(local.dtype) * local.dtype.type(GRID)
    residual = (local - sent).astype(np.float64)
    positions = np.flatnonzero(np.abs(residual) >= count * GRID)
    return (np.sign(residual[positions]) * (positions + 1 + base)).astype(np.int64)


class TestFind:
    def test_an_entry_on_the_threshold_is_sent(self, kernel):
        kernels, make = kernel
        local = make([64 * GRID, -64 * GRID])

        entries = kernels.find(local, make([0, 0], torch.int32), 64, GRID)

        assert entries.tolist() == [1, -2]

    def test_just_below_the_threshold_waits(self, kernel):
        kernels, make = kernel
        below = float(np.nextafter(np.float32(64 * GRID), np.float32(0)))

        entries = kernels.find(
            make([below, -below]), make([0, 0], torch.int32), 64, GRID
        )

        assert entries.tolist() == []
        assert entries.dtype == torch.int32

    def test_the_difference_to_shared_counts(self, kernel):
        kernels, make = kernel
        local = make([100 * GRID, 100 * GRID, -100 * GRID])

        entries = kernels.find(local, make([100, 36, 0], torch.int32), 64, GRID)

        assert entries.tolist() == [2, -3]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize(
        "size", [1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192 + 5], ids=str
    )
    def test_it_finds_what_numpy_finds(self, kernel, size, dtype):
        kernels, make = kernel
        local, shared = random_pair(size, seed=size, dtype=dtype, scale=0.5)
        device = make([0.0]).device

        entries = kernels.find(local.to(device), shared.to(device), 64, GRID)

        np.testing.assert_array_equal(entries.cpu(), reference_find(local, shared, 64))

    def test_everything_may_be_an_entry(self, kernel):
        kernels, make = kernel
        size = 5 * 8192 + 3
        local = make([1.0]).repeat(size)
        shared = make([0], torch.int32).repeat(size)

        entries = kernels.find(local, shared, 64, GRID)

        assert torch.equal(entries.cpu(), torch.arange(1, size + 1, dtype=torch.int32))

    def test_an_empty_vector_has_no_entries(self, kernel):
        kernels, make = kernel

        assert kernels.find(make([]), make([], torch.int32), 1, GRID).tolist() == []

    def test_positions_are_exact_beyond_float32_integers(self, kernel):
        kernels, make = kernel
        local = make([0.0]).repeat(2**24 + 1)  # the first gap in float32
        shared = torch.zeros_like(local, dtype=torch.int32)
        local[-1] = -1.0

        entries = kernels.find(local, shared, 64, GRID, base=2)

        assert entries.tolist() == [-(2**24 + 3)]

    def test_base_shifts_positions_up_to_the_last_int32(self, kernel):
        kernels, make = kernel
        local, shared = make([1.0, -1.0]), make([0, 0], torch.int32)

        entries = kernels.find(local, shared, 64, GRID, base=2**31 - 3)

        assert entries.tolist() == [2**31 - 2, -(2**31 - 1)]

    def test_nan_is_never_an_entry_and_infinity_always(self, kernel):
        kernels, make = kernel
        local = make([math.nan, math.inf, -math.inf])

        entries = kernels.find(local, make([0] * 3, torch.int32), 64, GRID)

        assert entries.tolist() == [2, -3]

    def test_counts_near_the_end_of_int32_wait(self, kernel):
        kernels, make = kernel
        shared = [2**30, 2**30 + 1, -(2**30), -(2**30) - 1, INT32_MIN]
        local = make([1e6, 1e6, -1e6, -1e6, -1e6])

        entries = kernels.find(local, make(shared, torch.int32), 64, GRID)

        assert entries.tolist() == [1, -3]

    def test_it_only_reads(self, kernel):
        kernels, make = kernel
        local, shared = make([1.0, 0.0, -1.0]), make([0, 0, 7], torch.int32)
        before = local.clone(), shared.clone()

        kernels.find(local, shared, 64, GRID)

        assert torch.equal(local, before[0])
        assert torch.equal(shared, before[1])


class TestCommit:
    def test_shared_moves_and_local_stays(self, kernel):
        kernels, make = kernel
        local, shared = make([1.0, 0.5, -1.0]), make([0, 5, 0], torch.int32)

        mass = kernels.commit_(local, shared, make([1, -3], torch.int32), 64, GRID)

        assert mass == 0.0
        assert local.tolist() == [1.0, 0.5, -1.0]
        assert shared.tolist() == [64, 5, -64]

    def test_what_is_left_over_is_cut_to_the_bound(self, kernel):
        kernels, make = kernel
        local = make([200 * GRID, -200 * GRID, 140 * GRID])
        shared = make([0, 0, 0], torch.int32)
        entries = make([1, -2, 3], torch.int32)

        mass = kernels.commit_(local, shared, entries, 64, GRID, bound=100 * GRID)

        assert mass == 2 * 36 * GRID
        assert local.tolist() == [164 * GRID, -164 * GRID, 140 * GRID]
        assert shared.tolist() == [64, -64, 64]

    def test_a_residual_on_the_bound_stays(self, kernel):
        kernels, make = kernel
        local, shared = make([164 * GRID]), make([0], torch.int32)

        mass = kernels.commit_(
            local, shared, make([1], torch.int32), 64, GRID, bound=100 * GRID
        )

        assert (mass, local.tolist()) == (0.0, [164 * GRID])

    @pytest.mark.parametrize(
        ("bound", "mass"), [(math.inf, 0.0), (1.0, math.inf)], ids=["none", "one"]
    )
    def test_infinite_progress_is_cut_by_a_bound_only(self, kernel, bound, mass):
        kernels, make = kernel
        local, shared = make([-math.inf]), make([0], torch.int32)

        clipped = kernels.commit_(
            local, shared, make([-1], torch.int32), 64, GRID, bound
        )

        assert clipped == mass
        assert local.tolist() == [-64 * GRID - bound]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("multiple", [1.0, 1.7, 5.0], ids=str)
    def test_cutting_the_entries_is_cutting_everything(self, kernel, dtype, multiple):
        kernels, make = kernel
        device = make([0.0]).device
        local, shared = (t.to(device) for t in random_pair(5000, 3, dtype, scale=4.0))
        before, bound = local.clone(), multiple * 64 * GRID
        entries = kernels.find(local, shared, 64, GRID)

        mass = kernels.commit_(local, shared, entries, 64, GRID, bound)

        sent = shared.to(dtype) * GRID
        residual = before - sent
        dense = torch.where(residual > bound, sent + bound, before)
        dense = torch.where(residual < -bound, sent - bound, dense)
        assert torch.equal(local, dense)
        moved = (before.double() - local.double()).abs().sum().item()
        assert moved > 0
        assert mass == pytest.approx(moved, rel=1e-12)  # order of a float64 sum

    def test_base_is_taken_off(self, kernel):
        kernels, make = kernel
        local, shared = make([1.0, -1.0]), make([0, 0], torch.int32)

        kernels.commit_(local, shared, make([-12], torch.int32), 64, GRID, base=10)

        assert shared.tolist() == [0, -64]


class TestApply:
    def test_local_and_shared_both_move(self, kernel):
        kernels, make = kernel
        local, shared = make([0.5, 0.25, -1.0]), make([0, 5, 0], torch.int32)

        kernels.apply_(local, shared, make([1, -3], torch.int32), 64, GRID)

        assert local.tolist() == [0.5 + 64 * GRID, 0.25, -1.0 - 64 * GRID]
        assert shared.tolist() == [64, 5, -64]

    def test_base_is_taken_off(self, kernel):
        kernels, make = kernel
        local, shared = make([0.0, 0.0]), make([0, 0], torch.int32)

        kernels.apply_(local, shared, make([11], torch.int32), 64, GRID, base=10)

        assert (local.tolist(), shared.tolist()) == ([64 * GRID, 0.0], [64, 0])

    def test_a_dense_update_moves_both(self, kernel):
        kernels, make = kernel
        local, shared = make([0.5, 0.0, 1.0]), make([1, 2, 3], torch.int32)

        kernels.apply_counts_(local, shared, make([-3, 0, 9], torch.int32), GRID)

        assert local.tolist() == [0.5 - 3 * GRID, 0.0, 1.0 + 9 * GRID]
        assert shared.tolist() == [-2, 2, 12]


class TestFold:
    def test_entries_are_added_up(self):
        total = np.array([1, 0, 0], np.int32)

        for entries, count in [([1, -3], 5), ([-1, -2], 2)]:
            entries_K = np.array(entries, np.int32)
            entries_K.flags.writeable = False
            stamp = Stamp(run=1, origin=2, sequence=3, step=4)
            update = SparseUpdate(stamp, Kind.RAW32, 3, count * GRID, entries_K)
            fold_(total, update, GRID)

        assert total.tolist() == [4, -2, -5]


class TestResidualCounts:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_it_is_rounded_to_even_and_nothing_changes(self, kernel, dtype):
        kernels, make = kernel
        steps = make([10.5, -11.5, 0.4, -0.6], dtype)
        local, shared = steps * GRID, make([0, 0, 3, -1], torch.int32)
        before = local.clone(), shared.clone()

        counts = kernels.residual_counts(local, shared, GRID, 2**31 - 1)

        assert counts.tolist() == [10, -12, -3, 0]
        assert (counts.dtype, counts.device.type) == (torch.int32, "cpu")
        assert (local == before[0]).all()
        assert (shared == before[1]).all()

    @pytest.mark.parametrize(
        ("local", "shared", "most", "expected"),
        [
            (math.inf, 0, 2**31 - 1, 2**31 - 1),
            (-math.inf, 0, 2**31 - 1, 1 - 2**31),
            (math.nan, 7, 2**31 - 1, 0),
            (1e30, 1 - 2**31, 2**31 - 1, 2**31 - 1),
            (-1e30, 2**31 - 1, 2**31 - 1, 1 - 2**31),
            (1e30, 5, 2**30, 2**30 - 5),
            (-1e30, 5, 2**30, -(2**30) - 5),
            (0.0, 2**31 - 1, 2**30, 1 - 2**31),
        ],
        ids=str,
    )
    def test_it_keeps_shared_within_a_bound(
        self, kernel, local, shared, most, expected
    ):
        kernels, make = kernel

        counts = kernels.residual_counts(
            make([local]), make([shared], torch.int32), GRID, most
        )

        assert counts.tolist() == [expected]
