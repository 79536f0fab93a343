"""One contract over all kernels: numpy as reference, boundaries, the same bits."""

import math
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.codec import Kind, SparseUpdate, Stamp
from daskdl.compression import replica_vector
from daskdl.compression.kernels import (
    PinnedGroup,
    ReceivedEntries,
    VectorGroup,
    own_factor,
)
from daskdl.compression.kernels_numba import NumbaGroup
from daskdl.compression.replica_vector import fold_, kernels_for, triton_or_torch
from tests.support.recording import parameters_in_step

GRID = 2.0**-20
QUANTUM = 64 * GRID
CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TRITON = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
# Triton reads it when it is imported, which other tests may do before.
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="see make test-triton"
)


KERNELS_IN_TRITON = "daskdl.compression.kernels_triton"


def triton_group(*vectors):
    """Make a group whose kernels Triton interprets on the CPU, or runs on CUDA."""
    return import_module(KERNELS_IN_TRITON).TritonGroup(*vectors)


KERNELS = [
    pytest.param((NumbaGroup, "cpu"), id="numba"),
    pytest.param((VectorGroup, "cpu"), id="torch"),
    pytest.param((VectorGroup, "cuda"), id="cuda", marks=CUDA),
    pytest.param((triton_group, "cpu"), id="triton", marks=[TRITON, INTERPRETED]),
    pytest.param((triton_group, "cuda"), id="triton-cuda", marks=[TRITON, *CUDA]),
]
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Return a function that makes a group of one kind of kernels on its device."""
    kind, device = request.param

    def group(local, shared=None, start=0, dtype=torch.float32):
        local = torch.as_tensor(local, dtype=dtype, device=device)
        shared = torch.zeros(len(local)) if shared is None else shared
        shared = torch.as_tensor(shared, dtype=torch.int32, device=device)
        return kind(local, local, shared, start)

    group.interpreted = kind is triton_group and device == "cpu"
    return group


def random_pair(size, seed, dtype=torch.float32, scale=3.0):
    """Local and shared whose residual is ``scale`` quanta of 64 steps wide."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(-(2**20), 2**20, (size,), generator=generator).int()
    noise = torch.randn(size, generator=generator, dtype=torch.float64) * scale * 64
    return ((shared.double() + noise) * GRID).to(dtype), shared


def reference_find(local, shared, count):
    """Entries and levels in numpy, with the dtype's own rounding of the difference."""
    local = local.numpy()
    sent = shared.numpy().astype(local.dtype) * local.dtype.type(GRID)
    residual = (local - sent).astype(np.float64)
    positions = np.flatnonzero(np.abs(residual) >= count * GRID)
    entries = (np.sign(residual[positions]) * (positions + 1)).astype(np.int64)
    levels = np.minimum(np.abs(residual[positions]) / (count * GRID), 15)
    return entries, levels.astype(np.uint8)


BELOW = float(np.nextafter(np.float32(QUANTUM), np.float32(0)))
FOUND = {
    "on the threshold": ([QUANTUM, -QUANTUM], [1, -2]),
    "just below": ([BELOW, -BELOW], []),
    "nan and infinity": ([math.nan, math.inf, -math.inf], [2, -3]),
}


class TestFind:
    @pytest.mark.parametrize(("local", "expected"), FOUND.values(), ids=FOUND)
    def test_positions_that_have_reached_the_threshold_are_entries(
        self, kernel, local, expected
    ):
        entries, _ = kernel(local).find(64, GRID)

        assert (entries.tolist(), entries.dtype) == (expected, torch.int32)

    @FLOATS
    @pytest.mark.parametrize(
        "size", [1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192 + 5], ids=str
    )
    @pytest.mark.parametrize("scale", [0.5, 3.0], ids=str)  # 5 and 74 % are entries
    def test_it_finds_what_numpy_finds(self, kernel, size, dtype, scale):
        local, shared = random_pair(size, seed=size, dtype=dtype, scale=scale)

        entries = kernel(local, shared, dtype=dtype).find(64, GRID)

        for actual, expected in zip(
            entries, reference_find(local, shared, 64), strict=True
        ):
            np.testing.assert_array_equal(actual.cpu(), expected)

    def test_it_finds_entries_that_are_close_together_in_places(self, kernel):
        local, shared = random_pair(10_000, seed=5, scale=0.5)
        crowded = slice(2000, 5000)
        local[crowded], shared[crowded] = random_pair(3000, seed=6, scale=50.0)

        entries, levels = kernel(local, shared).find(64, GRID, where=slice(3, None))

        expected_entries, expected_levels = reference_find(local[3:], shared[3:], 64)
        expected_entries += 3 * np.sign(expected_entries)
        np.testing.assert_array_equal(entries.cpu(), expected_entries)
        np.testing.assert_array_equal(levels.cpu(), expected_levels)

    def test_positions_are_exact_beyond_float32_integers(self, kernel):
        if kernel.interpreted:
            pytest.skip("17 million positions take Triton's interpreter a minute")
        local = torch.zeros(2**24 + 1)  # the first gap in float32
        local[-1] = -1.0

        entries, _ = kernel(local, start=2).find(64, GRID)

        assert entries.tolist() == [-(2**24 + 3)]

    def test_there_are_no_entries_where_shared_could_wrap(self, kernel):
        most = 2**30
        group = kernel([0.0] * 5, [-most - 1, -most, most, most + 1, -(2**31)])

        assert group.find(64, GRID)[0].tolist() == [2, -3]

    def test_a_part_of_a_group_has_the_positions_of_the_model(self, kernel):
        group = kernel([1.0, 1.0, -1.0, 1.0], start=10)

        assert group.find(64, GRID, where=slice(1, 3))[0].tolist() == [12, -13]


LEVELS = {
    "one": (1.0, 1),
    "one and a half": (-1.5, 1),
    "two": (2.0, 2),
    "just below three": (float(np.nextafter(np.float32(3), np.float32(0))), 2),
    "fifteen": (-15.99, 15),
    "more": (400.0, 15),
    "infinity": (math.inf, 15),
}


@pytest.mark.parametrize(("quanta", "level"), LEVELS.values(), ids=LEVELS)
def test_a_level_counts_whole_quanta_up_to_fifteen(kernel, quanta, level):
    group = kernel([0.0, quanta * QUANTUM], start=10)

    _, levels = group.find(64, GRID)

    assert (levels.tolist(), levels.dtype) == ([level], torch.uint8)


@FLOATS
def test_what_is_found_has_one_quantum_at_least(kernel, dtype):
    tries = 50 if kernel.interpreted else 2_000
    counts = np.random.default_rng(0).integers(1, 2**18, tries)
    for count in counts.tolist():
        group = kernel([count * GRID, -7 * count * GRID], dtype=dtype)

        _, levels = group.find(count, GRID)

        assert levels.tolist() == [1, 7], count


@pytest.mark.parametrize(("bits", "most"), [(18, 15), (20, 15), (21, 8), (22, 4)])
def test_an_update_moves_shared_by_a_bounded_number_of_steps(kernel, bits, most):
    group = kernel([1000.0 * 2**bits * GRID])

    _, levels = group.find(2**bits, GRID)

    assert levels.tolist() == [most]


class TestCommit:
    @FLOATS
    @pytest.mark.parametrize("multiple", [1.0, 1.7, 5.0], ids=str)
    def test_clipping_the_entries_equals_clipping_everything(
        self, kernel, dtype, multiple
    ):
        group = kernel(*random_pair(5000, 3, dtype, scale=4.0), dtype=dtype)
        before, bound = group.local_N.clone(), multiple * QUANTUM

        mass = group.commit_(group.find(64, GRID)[0], 64, GRID, bound)

        sent = group.shared_N.to(dtype) * GRID
        residual = before - sent
        dense = torch.where(residual > bound, sent + bound, before)
        dense = torch.where(residual < -bound, sent - bound, dense)
        assert torch.equal(group.local_N, dense)
        moved = (before.double() - group.local_N.double()).abs().sum().item()
        assert moved > 0
        assert mass == pytest.approx(moved, rel=1e-12)  # order of a float64 sum


def test_levels_move_by_so_many_quanta(kernel):
    group = kernel([9 * QUANTUM, -2 * QUANTUM, 1.0], start=10)
    device = group.local_N.device
    entries, levels = ints([11, -12]).to(device), torch.tensor([7, 2]).byte().to(device)

    cut = group.commit_(entries, 64, GRID, QUANTUM / 4, 2.0, levels)

    # Back by one quantum for each; then ahead of shared by -5 quanta and 2.
    assert group.shared_N.tolist() == [7 * 64, -2 * 64, 0]
    assert group.local_N.tolist() == [6.5 * QUANTUM, -1.5 * QUANTUM, 1.0]
    assert cut == (4.5 + 1.5) * QUANTUM / 2
    group.apply_(entries, 64, GRID, levels)
    assert group.shared_N.tolist() == [14 * 64, -4 * 64, 0]
    assert group.local_N.tolist() == [13.5 * QUANTUM, -3.5 * QUANTUM, 1.0]


class TestApply:
    @FLOATS
    @pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 50_000], ids=str)
    def test_several_updates_together_are_as_one_after_the_other(
        self, kernel, size, dtype
    ):
        start, generator = 7, np.random.default_rng(size)
        local, shared = random_pair(size, seed=size, dtype=dtype)
        together = kernel(local, shared, start, dtype)
        alone = VectorGroup(local.clone(), local.clone(), shared.clone(), start)
        device, updates = together.local_N.device, []
        for count, density, leveled in (
            (64, 0.3, True),
            (5, 0.01, False),
            (2**10, 1.0, True),
            (1, 0.2, False),
        ):
            chosen = np.flatnonzero(generator.random(size) < density)
            signs = generator.choice([-1, 1], len(chosen))
            entries_K = torch.from_numpy((chosen + 1 + start) * signs).int()
            levels = generator.integers(1, 16, len(chosen), np.uint8)
            levels_K = torch.from_numpy(levels) if leveled else None
            alone.apply_(entries_K, count, GRID, levels_K)
            moved = None if levels_K is None else levels_K.to(device)
            updates.append(ReceivedEntries(entries_K.to(device), moved, count))

        together.apply_all_(updates, GRID)

        assert torch.equal(together.shared_N.cpu(), alone.shared_N)
        assert torch.equal(together.local_N.cpu(), alone.local_N)


def test_folded_entries_are_added_up():
    total = np.array([1, 0, 0], np.int32)

    for entries, count, levels in [([1, -3], 5, None), ([-1, -2], 2, [1, 15])]:
        levels_K = levels and np.array(levels, np.uint8)
        entries_K = np.array(entries, np.int32)
        entries_K.flags.writeable = False
        stamp = Stamp(run=1, origin=2, sequence=3, step=4)
        update = SparseUpdate(stamp, Kind.RAW32, 3, count * GRID, entries_K, levels_K)
        fold_(total, update, GRID)

    assert total.tolist() == [4, -30, -5]


@FLOATS
def test_the_residual_is_rounded_to_even_and_nothing_changes(kernel, dtype):
    steps = np.array([10.5, -11.5, 0.4, -0.6])
    group = kernel(steps * GRID, [0, 0, 3, -1], dtype=dtype)
    before = group.local_N.clone(), group.shared_N.clone()

    counts = group.residual_counts(GRID)

    assert counts.tolist() == [10, -12, -3, 0]
    assert (counts.dtype, counts.device.type) == (torch.int32, "cpu")
    assert torch.equal(group.local_N, before[0])
    assert torch.equal(group.shared_N, before[1])


def test_nan_is_no_residual(kernel):
    group = kernel([math.nan, 5 * GRID])

    assert group.residual_counts(GRID).tolist() == [0, 5]


class TestLead:
    """Local is shared plus ``local_factor`` times the residual."""

    def test_an_entry_takes_that_many_quanta_of_local(self, kernel):
        group = kernel([3.9 * QUANTUM, 4 * QUANTUM, -4 * QUANTUM])

        assert group.find(64, GRID, local_factor=4.0)[0].tolist() == [2, -3]

    def test_a_commit_moves_local_back_by_the_quanta_expected_from_others(self, kernel):
        group = kernel([5 * QUANTUM, -4 * QUANTUM, 1.0], start=10)
        entries = ints([11, -12]).to(group.local_N.device)

        cut = group.commit_(entries, 64, GRID, QUANTUM / 8, local_factor=4.0)

        # Ahead of shared by a quantum and none; an eighth of one is kept, 4 times.
        assert group.local_N.tolist() == [1.5 * QUANTUM, -QUANTUM, 1.0]
        assert group.shared_N.tolist() == [64, -64, 0]
        assert cut == QUANTUM / 8

    def test_with_momentum_the_residual_keeps_part_of_what_is_sent(self, kernel):
        group = kernel([8 * QUANTUM, -8 * QUANTUM])
        entries = ints([1, -2]).to(group.local_N.device)
        levels = torch.tensor([2, 1], dtype=torch.uint8, device=entries.device)

        group.commit_(entries, 64, GRID, math.inf, 4.0, levels, momentum=0.75)

        # Residuals of 2 quanta; 2 and 1 are sent, 1.5 and .75 of them kept.
        assert group.shared_N.tolist() == [128, -64]
        residual = (group.local_N - group.shared_N * GRID) / 4.0
        assert residual.tolist() == [1.5 * QUANTUM, -1.75 * QUANTUM]


@st.composite
def problems(draw):
    """Local, shared, the quantum in steps of the grid, and the local_factor."""
    size = draw(st.integers(1, 40))
    number = st.floats(-4.0, 4.0, width=32)
    local = draw(st.lists(number, min_size=size, max_size=size))
    count = draw(st.sampled_from([1, 3, 64, 3 * 2**16, 2**18, 2**22]))
    steps = st.integers(-(2**23), 2**23)
    shared = draw(st.lists(steps, min_size=size, max_size=size))
    local_factor = draw(st.sampled_from([1.0, 2.0, 3.0, 8.0, 0.7]))
    return local, shared, count, local_factor


def group_of(local, shared, kind=NumbaGroup, dtype=torch.float32, device="cpu"):
    local_N = torch.tensor(local, dtype=dtype, device=device)
    return kind(local_N, local_N, ints(shared).to(device), 0)


DTYPES = st.sampled_from([torch.float32, torch.float64])
MOMENTA = st.sampled_from([0.0, 0.5, 0.9])


@given(problems(), DTYPES, MOMENTA)
@settings(max_examples=150)
def test_numba_gives_the_bits_of_torch(problem, dtype, momentum):
    compare_with_torch(NumbaGroup, "cpu", problem, dtype, momentum)


@TRITON
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=CUDA)],
)
@given(problems(), DTYPES, MOMENTA)
@settings(max_examples=40)
def test_triton_gives_the_bits_of_torch(device, problem, dtype, momentum):
    compare_with_torch(triton_group, device, problem, dtype, momentum)


def compare_with_torch(kernels, kernels_device, problem, dtype, momentum):
    """Compare kernels on a device with torch operations on the CPU."""
    local, shared, count, local_factor = problem
    outcomes, cuts = [], []
    for kind, device in [(kernels, kernels_device), (VectorGroup, "cpu")]:
        group = group_of(local, shared, kind, dtype, device)
        entries, levels = group.find(count, GRID, local_factor)
        bound = 1.3 * count * GRID
        cuts.append(group.commit_(entries, count, GRID, bound, local_factor, levels))
        group.apply_(entries, count, GRID, levels)
        cuts[-1] += group.commit_(
            entries, count, GRID, bound, local_factor, momentum=momentum
        )
        group.apply_(entries, count, GRID)
        counts = ints(shared).to(device)
        group.apply_counts_(counts, GRID, own_factor(local_factor, momentum))
        residual = group.residual_counts(GRID, 2**22, local_factor)
        outcomes.append((entries, levels, group.local_N, group.shared_N, residual))

    assert cuts[0] == pytest.approx(cuts[1], rel=1e-12)
    for by_kernel, by_torch in zip(*outcomes, strict=True):
        assert torch.equal(by_kernel.cpu(), by_torch)


def test_compiled_kernels_are_for_the_cpu_and_cuda_and_torch_operations_for_all_else(
    monkeypatch,
):
    monkeypatch.setattr(replica_vector, "triton_or_torch", lambda device: PinnedGroup)

    kinds = [kernels_for(torch.device(name)) for name in ("cpu", "cuda:1", "mps")]

    assert kinds == [NumbaGroup, PinnedGroup, VectorGroup]


@pytest.fixture
def no_kernels_chosen():
    triton_or_torch.cache_clear()
    yield
    triton_or_torch.cache_clear()


def test_without_triton_torch_operations_are_for_cuda(
    no_kernels_chosen, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNELS_IN_TRITON, raising=False)

    assert triton_or_torch(torch.device("cpu")) is PinnedGroup
    assert "Triton needs a C compiler" in caplog.text


@pytest.fixture
def launching(no_kernels_chosen, monkeypatch):
    """Return a function that makes each launch of a kernel raise an error."""
    kernels = import_module(KERNELS_IN_TRITON)

    def fail_with(error):
        monkeypatch.setattr(kernels, "_launch", Mock(side_effect=error))

    return fail_with


@TRITON
@INTERPRETED
def test_kernels_in_triton_are_for_cuda_if_they_compile(no_kernels_chosen):
    kind = import_module(KERNELS_IN_TRITON).TritonGroup

    assert triton_or_torch(torch.device("cpu")) is kind


# What Triton 3.9 raises, as its source has it.
UNUSABLE = {
    "no C compiler": RuntimeError("Failed to find C compiler. Please specify via CC"),
    "no headers": subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"]),
    "no ldconfig": FileNotFoundError("/sbin/ldconfig"),
    "no libcuda": AssertionError("libcuda.so cannot found!"),
    "no assembler": RuntimeError("Cannot find ptxas"),
    "another driver": RuntimeError(
        "Triton Error [CUDA]: device kernel image is invalid"
    ),
}
OF_THE_DEVICE = {
    "out of memory": RuntimeError("Triton Error [CUDA]: out of memory"),
    "out of memory in torch": torch.OutOfMemoryError("CUDA out of memory"),
    "failed": RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    "a fault of ours": TypeError("unexpected keyword argument"),
}


@TRITON
@INTERPRETED
@pytest.mark.parametrize("error", UNUSABLE.values(), ids=UNUSABLE)
def test_where_triton_cannot_compile_torch_operations_are_for_cuda(
    launching, error, caplog
):
    launching(error)

    assert triton_or_torch(torch.device("cpu")) is PinnedGroup
    assert str(error) in caplog.text


@TRITON
@INTERPRETED
def test_where_triton_cannot_assemble_for_a_device_torch_operations_are_for_cuda(
    launching, caplog
):
    errors = import_module("triton.runtime.errors")
    launching(errors.PTXASError("Value 'sm_999' is not defined"))

    assert triton_or_torch(torch.device("cpu")) is PinnedGroup
    assert "sm_999" in caplog.text


@TRITON
@INTERPRETED
@pytest.mark.parametrize("error", OF_THE_DEVICE.values(), ids=OF_THE_DEVICE)
def test_errors_that_say_nothing_about_triton_are_not_hidden(launching, error):
    launching(error)

    with pytest.raises(type(error), match=re.escape(str(error))):
        triton_or_torch(torch.device("cpu"))


FITS = [
    pytest.param("cpu", (NumbaGroup, VectorGroup), id="numba"),
    pytest.param("cuda", (VectorGroup, PinnedGroup), id="pinned-cuda", marks=CUDA),
    pytest.param(
        "cpu", (VectorGroup, triton_group), id="triton", marks=[TRITON, INTERPRETED]
    ),
    pytest.param(
        "cuda", (VectorGroup, triton_group), id="triton-cuda", marks=[TRITON, *CUDA]
    ),
]


@pytest.mark.parametrize(("device", "kinds"), FITS)
@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_a_fit_with_torch_operations_ends_with_the_bits_of_compiled_kernels(
    device, kinds, apply, monkeypatch
):
    ends = []
    for kind in kinds:
        monkeypatch.setattr(replica_vector, "kernels_for", lambda device, k=kind: k)
        ends.append(parameters_in_step(device, apply))

    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param(VectorGroup, "cpu", id="torch"),
        pytest.param(PinnedGroup, "cpu", id="pinned"),
        pytest.param(VectorGroup, "cuda", id="cuda", marks=CUDA),
        pytest.param(PinnedGroup, "cuda", id="pinned-cuda", marks=CUDA),
    ],
)
def test_copies_to_the_device_and_back_are_complete(kind, device):
    group = group_of([0.0], [0], kind, device=device)
    size = 2**20

    # None is waited for, and each is forgotten: another may get its memory.
    sent = [group.from_host(torch.full((size,), i).int()) for i in range(50)]
    received = group.to_host(*(values + 1 for values in sent))

    assert {values.device.type for values in sent} == {device}
    assert {values.device.type for values in received} == {"cpu"}
    for i, values in enumerate(received):
        assert np.array_equal(values.numpy(), np.full(size, i + 1)), i


@given(problems())
@settings(max_examples=100)
def test_the_opposite_residual_has_the_opposite_entries(problem):
    local, shared, count, local_factor = problem
    group, mirrored = group_of(local, shared), group_of(local, shared)
    mirrored.local_N.neg_()
    mirrored.shared_N.neg_()

    entries, levels = group.find(count, GRID, local_factor)
    opposite, same = mirrored.find(count, GRID, local_factor)

    assert torch.equal(entries, -opposite)
    assert torch.equal(levels, same)


@given(problems())
@settings(max_examples=100)
def test_committing_until_nothing_is_found_leaves_less_than_a_quantum(problem):
    local, shared, count, _ = problem
    count = max(count, 2**18)  # 64 rounds at most
    group = group_of(local, shared)

    while len(entries := group.find(count, GRID)[0]):
        group.commit_(entries, count, GRID)

    residual = group.local_N.double() - group.shared_N.double() * GRID
    assert residual.abs().max() < count * GRID * (1 + 2**-20)
    assert torch.equal(group.local_N, torch.tensor(local))


def test_the_entries_of_deeplearning4j(kernel):
    """A golden case of its own tests, on a grid that holds its threshold."""
    group = kernel([1.5, 2.5, -3.5])

    entries, _ = group.find(count=2, grid=0.25)
    group.commit_(entries, 2, 0.25)

    assert entries.tolist() == [1, 2, -3]
    assert (group.local_N - group.shared_N * 0.25).tolist() == [1.0, 2.0, -3.0]
