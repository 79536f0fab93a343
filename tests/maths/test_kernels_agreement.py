"""All kernels agree bit for bit, and with Deeplearning4j's cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.compression.kernels import TorchKernels
from daskdl.compression.kernels_numba import NumbaKernels
from tests.support.kernel_cases import GRID, KERNELS


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Kernels and a function that makes their tensors."""
    return request.param


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
        for kernels in (NumbaKernels(), TorchKernels()):
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

    @pytest.mark.parametrize("k", [5, 34], ids=str)
    def test_the_first_k_of_ten_thousand(self, kernel, k):
        kernels, make = kernel
        local = make([0.0]).repeat(10_000)
        local[:k] = 2e-3
        shared = torch.zeros_like(local, dtype=torch.int32)
        count = round(1e-3 * 2**24)

        entries = kernels.find(local, shared, count, 2.0**-24)
        kernels.commit_(local, shared, entries, count, 2.0**-24)

        assert len(entries) == k
        residual = local - shared * 2.0**-24
        torch.testing.assert_close(residual[:k], make([1e-3]).repeat(k))
        assert not residual[k:].any()

    def test_values_below_the_threshold_are_not_sent(self, kernel):
        kernels, make = kernel
        local = make([1e-4] * 6)

        count = round(1e-3 * 2**24)

        assert (
            kernels.find(local, make([0] * 6, torch.int32), count, 2**-24).numel() == 0
        )

    def test_applying_twice_doubles(self, kernel):
        kernels, make = kernel
        local, shared = make([0.0] * 6), make([0] * 6, torch.int32)
        entries = make([1, 2, -5, -6], torch.int32)

        kernels.apply_(local, shared, entries, 2, 2.0**-11)
        kernels.apply_(local, shared, entries, 2, 2.0**-11)

        assert (local * 2**9).tolist() == [1.0, 1.0, 0.0, 0.0, -1.0, -1.0]
