"""What all kernels refuse, that they agree bit for bit, and Deeplearning4j's cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl import kernels
from daskdl.errors import CodecError
from daskdl.kernels import cpu, generic, loops
from tests.support.kernel_cases import GRID, INT32_MIN, KERNELS


@pytest.fixture(params=KERNELS)
def kernel(request):
    """A kernel module and a function that makes its tensors."""
    return request.param


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


BAD_ENTRIES = pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([1, 0], 1),
        ([4], 0),
        ([1, -4], 1),
        ([INT32_MIN], 0),
        ([2**31 - 1], 0),
        ([2, 1], 1),
        ([1, -1], 1),
    ],
    ids=["zero", "beyond", "beyond-", "minimum", "maximum", "descending", "twice"],
)


class TestRefusal:
    @BAD_ENTRIES
    def test_nothing_is_moved(self, kernel, entries, place):
        module, make = kernel
        local = make([1.0, 2.0, 3.0])

        with pytest.raises(CodecError, match=rf"entry {place} is .* in \[1, 3\]"):
            module.move_(local, make(entries, torch.int32), 1.0)

        assert local.tolist() == [1.0, 2.0, 3.0]

    @BAD_ENTRIES
    @pytest.mark.parametrize("name", ["take_", "apply_"])
    def test_nothing_is_written(self, kernel, name, entries, place):
        module, make = kernel
        local, shared = make([1.0, 2.0, 3.0]), make([1, 2, 3], torch.int32)
        entries = make(entries, torch.int32)

        with pytest.raises(CodecError, match=rf"entry {place} is .* in \[1, 3\]"):
            getattr(module, name)(local, shared, entries, 64, GRID)

        assert local.tolist() == [1.0, 2.0, 3.0]
        assert shared.tolist() == [1, 2, 3]

    @BAD_ENTRIES
    def test_nothing_is_folded(self, kernel, entries, place):
        module, make = kernel
        total = make([1, 2, 3], torch.int32)

        with pytest.raises(CodecError, match=f"entry {place} is"):
            module.fold_(total, make(entries, torch.int32), 64)

        assert total.tolist() == [1, 2, 3]

    @pytest.mark.parametrize("entry", [10, -14], ids=["before", "behind"])
    def test_the_base_moves_the_range(self, kernel, entry):
        module, make = kernel

        with pytest.raises(CodecError, match=r"in \[11, 13\]"):
            module.check(make([entry], torch.int32), 10, 3)


class TestChoice:
    @pytest.mark.parametrize(
        ("vector", "expected"),
        [
            (torch.zeros(4), True),
            (torch.zeros(4, dtype=torch.float64), True),
            (torch.zeros(4, dtype=torch.bfloat16), False),
            (torch.zeros(8)[::2], False),
            (torch.zeros(4, device="meta"), False),
        ],
        ids=["float32", "float64", "bfloat16", "strided", "device"],
    )
    def test_numba_takes_what_it_can(self, vector, expected):
        assert cpu.supports(vector) is expected

    def test_a_strided_vector_goes_through_torch(self):
        local, shared = torch.zeros(8)[::2], torch.zeros(8, dtype=torch.int32)[::2]
        local[3] = -1.0

        entries = kernels.find(local, shared, 64, GRID)
        kernels.take_(local, shared, entries, 64, GRID)
        kernels.apply_(local, shared, ints([1]), 64, GRID)
        kernels.apply_counts_(local, shared, ints([0, 3, 0, 0]), GRID)
        kernels.fold_(shared, ints([-2]), 1)

        assert entries.tolist() == [-4]
        assert shared.tolist() == [64, 2, 0, -64]
        assert local.tolist() == [64 * GRID, 3 * GRID, 0.0, -1.0]

    def test_both_guard_int32_at_the_same_count(self):
        assert loops.GUARD == generic.GUARD == 2**30


@st.composite
def problems(draw):
    size = draw(st.integers(1, 40))
    number = st.floats(-4.0, 4.0, width=32)
    local = draw(st.lists(number, min_size=size, max_size=size))
    count = draw(st.sampled_from([1, 3, 64, 2**18, 2**22]))
    steps = st.integers(-(2**23), 2**23)
    shared = draw(st.lists(steps, min_size=size, max_size=size))
    weight = draw(st.sampled_from([1.0, 2.0, 3.0, 8.0, 0.7]))
    return local, shared, count, weight


class TestBothKernels:
    @given(problems(), st.sampled_from([torch.float32, torch.float64]))
    @settings(max_examples=150)
    def test_they_give_the_same_bits(self, problem, dtype):
        local, shared, count, weight = problem
        outcomes = []
        for module in (cpu, generic):
            local_N = torch.tensor(local, dtype=dtype)
            shared_N = ints(shared)
            entries = module.find(local_N, shared_N, count, GRID, 0, weight)
            bound = 1.3 * count * GRID
            module.move_(local_N, entries, (1 - weight) * count * GRID)
            module.take_(local_N, shared_N, entries, count, GRID, weight * bound)
            module.apply_(local_N, shared_N, entries, count, GRID)
            module.apply_counts_(local_N, shared_N, ints(shared), GRID, 1 - weight)
            residual = module.residual_counts(local_N, shared_N, GRID, 2**22, weight)
            total = torch.zeros_like(shared_N)
            module.fold_(total, entries, count)
            outcomes.append((entries, local_N, shared_N, total, residual))

        for one, other in zip(*outcomes, strict=True):
            assert torch.equal(one, other)

    @given(problems())
    @settings(max_examples=100)
    def test_the_other_way_round_is_the_negative(self, problem):
        local, shared, count, weight = problem
        local_N, shared_N = torch.tensor(local), ints(shared)

        entries = kernels.find(local_N, shared_N, count, GRID, 0, weight)
        mirrored = kernels.find(-local_N, -shared_N, count, GRID, 0, weight)

        assert torch.equal(entries, -mirrored)

    @given(problems())
    @settings(max_examples=100)
    def test_taking_until_nothing_is_found_leaves_less_than_a_quantum(self, problem):
        local, shared, count, _ = problem
        count = max(count, 2**18)  # 64 rounds at most
        local_N, shared_N = torch.tensor(local), ints(shared)

        while len(entries := kernels.find(local_N, shared_N, count, GRID)):
            kernels.take_(local_N, shared_N, entries, count, GRID)

        residual = local_N.double() - shared_N.double() * GRID
        assert residual.abs().max() < count * GRID * (1 + 2**-20)
        assert torch.equal(local_N, torch.tensor(local))


class TestDeeplearning4j:
    """Golden cases of its own tests, on a grid that holds their thresholds."""

    def test_three_values_and_half(self, kernel):
        module, make = kernel
        local, shared = make([1.5, 2.5, -3.5]), make([0, 0, 0], torch.int32)

        entries = module.find(local, shared, count=2, grid=0.25)
        module.take_(local, shared, entries, 2, 0.25)

        assert entries.tolist() == [1, 2, -3]
        assert (local - shared * 0.25).tolist() == [1.0, 2.0, -3.0]

    @pytest.mark.parametrize("k", [5, 34], ids=str)
    def test_the_first_k_of_ten_thousand(self, kernel, k):
        module, make = kernel
        local = make([0.0]).repeat(10_000)
        local[:k] = 2e-3
        shared = torch.zeros_like(local, dtype=torch.int32)
        count = round(1e-3 * 2**24)

        entries = module.find(local, shared, count, 2.0**-24)
        module.take_(local, shared, entries, count, 2.0**-24)

        assert len(entries) == k
        residual = local - shared * 2.0**-24
        torch.testing.assert_close(residual[:k], make([1e-3]).repeat(k))
        assert not residual[k:].any()

    def test_values_below_the_threshold_are_not_sent(self, kernel):
        module, make = kernel
        local = make([1e-4] * 6)

        count = round(1e-3 * 2**24)

        assert (
            module.find(local, make([0] * 6, torch.int32), count, 2**-24).numel() == 0
        )

    def test_applying_twice_doubles(self, kernel):
        module, make = kernel
        local, shared = make([0.0] * 6), make([0] * 6, torch.int32)
        entries = make([1, 2, -5, -6], torch.int32)

        module.apply_(local, shared, entries, 2, 2.0**-11)
        module.apply_(local, shared, entries, 2, 2.0**-11)

        assert (local * 2**9).tolist() == [1.0, 1.0, 0.0, 0.0, -1.0, -1.0]
