"""One contract over all kernels: numpy as reference, boundaries, the same bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.codec import Kind, SparseUpdate, Stamp
from daskdl.compression.kernels import Kernels
from daskdl.compression.kernels_numba import NumbaKernels
from daskdl.compression.replica_vector import fold_

GRID = 2.0**-20
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def maker(device):
    """Return a function that makes tensors on a device."""
    return lambda values, dtype=torch.float32: torch.tensor(
        values, dtype=dtype, device=device
    )


KERNELS = [
    pytest.param((NumbaKernels(), maker("cpu")), id="numba"),
    pytest.param((Kernels(), maker("cpu")), id="torch"),
    pytest.param((Kernels(), maker("cuda")), id="cuda", marks=CUDA),
]


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


QUANTUM = 64 * GRID


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

    def test_positions_are_exact_beyond_float32_integers(self, kernel):
        kernels, make = kernel
        local = make([0.0]).repeat(2**24 + 1)  # the first gap in float32
        shared = torch.zeros_like(local, dtype=torch.int32)
        local[-1] = -1.0

        entries = kernels.find(local, shared, 64, GRID, base=2)

        assert entries.tolist() == [-(2**24 + 3)]

    def test_nan_is_never_an_entry_and_infinity_always(self, kernel):
        kernels, make = kernel
        local = make([math.nan, math.inf, -math.inf])

        entries = kernels.find(local, make([0] * 3, torch.int32), 64, GRID)

        assert entries.tolist() == [2, -3]


class TestCommit:
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


class TestLead:
    """Local is shared plus so many times the residual."""

    def test_an_entry_is_so_many_quanta_of_local(self, kernel):
        kernels, make = kernel
        local = make([3.9 * QUANTUM, 4 * QUANTUM, -4 * QUANTUM])
        shared = make([0, 0, 0], torch.int32)

        assert kernels.find(local, shared, 64, GRID, 0, 4.0).tolist() == [2, -3]

    def test_a_commit_moves_local_back_by_what_others_are_to_send(self, kernel):
        kernels, make = kernel
        local, shared = (
            make([5 * QUANTUM, -4 * QUANTUM, 1.0]),
            make([0] * 3, torch.int32),
        )
        entries = make([11, -12], torch.int32)

        cut = kernels.commit_(
            local, shared, entries, 64, GRID, QUANTUM / 8, base=10, lead=4.0
        )

        # Ahead of shared by a quantum and none; an eighth of one is kept, 4 times.
        assert local.tolist() == [1.5 * QUANTUM, -QUANTUM, 1.0]
        assert shared.tolist() == [64, -64, 0]
        assert cut == QUANTUM / 8


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def problems(draw):
    size = draw(st.integers(1, 40))
    number = st.floats(-4.0, 4.0, width=32)
    local = draw(st.lists(number, min_size=size, max_size=size))
    count = draw(st.sampled_from([1, 3, 64, 2**18, 2**22]))
    steps = st.integers(-(2**23), 2**23)
    shared = draw(st.lists(steps, min_size=size, max_size=size))
    lead = draw(st.sampled_from([1.0, 2.0, 3.0, 8.0, 0.7]))
    return local, shared, count, lead


class TestBothKernels:
    @given(problems(), st.sampled_from([torch.float32, torch.float64]))
    @settings(max_examples=150)
    def test_they_give_the_same_bits(self, problem, dtype):
        local, shared, count, lead = problem
        outcomes, cuts = [], []
        for kernels in (NumbaKernels(), Kernels()):
            local_N = torch.tensor(local, dtype=dtype)
            shared_N = ints(shared)
            entries = kernels.find(local_N, shared_N, count, GRID, 0, lead)
            bound = 1.3 * count * GRID
            cut = kernels.commit_(
                local_N, shared_N, entries, count, GRID, bound, 0, lead
            )
            kernels.apply_(local_N, shared_N, entries, count, GRID)
            kernels.apply_counts_(local_N, shared_N, ints(shared), GRID, 1 - lead)
            residual = kernels.residual_counts(local_N, shared_N, GRID, 2**22, lead)
            assert cut == pytest.approx(cuts[0] if cuts else cut, rel=1e-12)
            cuts.append(cut)
            outcomes.append((entries, local_N, shared_N, residual))

        for one, other in zip(*outcomes, strict=True):
            assert torch.equal(one, other)

    @given(problems())
    @settings(max_examples=100)
    def test_the_other_way_round_is_the_negative(self, problem):
        local, shared, count, lead = problem
        local_N, shared_N = torch.tensor(local), ints(shared)
        kernels = NumbaKernels()

        entries = kernels.find(local_N, shared_N, count, GRID, 0, lead)
        mirrored = kernels.find(-local_N, -shared_N, count, GRID, 0, lead)

        assert torch.equal(entries, -mirrored)

    @given(problems())
    @settings(max_examples=100)
    def test_taking_until_nothing_is_found_leaves_less_than_a_quantum(self, problem):
        local, shared, count, _ = problem
        count = max(count, 2**18)  # 64 rounds at most
        local_N, shared_N = torch.tensor(local), ints(shared)
        kernels = NumbaKernels()

        while len(entries := kernels.find(local_N, shared_N, count, GRID)):
            kernels.commit_(local_N, shared_N, entries, count, GRID)

        residual = local_N.double() - shared_N.double() * GRID
        assert residual.abs().max() < count * GRID * (1 + 2**-20)
        assert torch.equal(local_N, torch.tensor(local))


class TestDeeplearning4j:
    """Golden cases of its own tests, on a grid that holds their thresholds."""

    def test_three_values_and_half(self, kernel):
        kernels, make = kernel
        local, shared = make([1.5, 2.5, -3.5]), make([0, 0, 0], torch.int32)

        entries = kernels.find(local, shared, count=2, grid=0.25)
        kernels.commit_(local, shared, entries, 2, 0.25)

        assert entries.tolist() == [1, 2, -3]
        assert (local - shared * 0.25).tolist() == [1.0, 2.0, -3.0]
