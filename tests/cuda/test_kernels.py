"""The kernels of the device give the bits of the compiled kernels of the CPU.

tests/maths/test_kernels.py has the contract that both fulfil, value by value.
"""

import functools
import math
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    FixedThreshold,
    KeepResidual,
    ResidualClipping,
    SampledThreshold,
    TargetSparsityThreshold,
    codec,
)
from daskdl.codec import Stamp
from daskdl.compression import replica_vector
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.compression.kernels import GUARD, PinnedGroup, VectorGroup
from daskdl.compression.kernels_numba import NumbaGroup
from tests.support.devices import DEVICE, needs_cuda

GRID = 2.0**-24
COUNT = 2**12  # steps of a quantum
STAMP = Stamp(run=1, origin=2, sequence=3, step=4)
# Kernels of the device, each compared with those of the CPU.
KINDS = {VectorGroup.__name__: VectorGroup}
if DEVICE.type == "cuda" and find_spec("triton"):
    KINDS["TritonGroup"] = import_module(
        "daskdl.compression.kernels_triton"
    ).TritonGroup
# This one differs in its copies only, which a replica makes.
COPYING = {"PinnedGroup": PinnedGroup} if DEVICE.type == "cuda" else {}
NAMES = {torch.float32: "float32", torch.float64: "float64"}
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Problem(NamedTuple):
    """Tensors on the CPU."""

    local_N: torch.Tensor
    shared_N: torch.Tensor
    entries_K: torch.Tensor  # of another replica, ascending
    levels_K: torch.Tensor
    counts_N: torch.Tensor  # of a dense update

    def group(self, kind, device):
        local_N = self.local_N.to(device, copy=True)
        return kind(local_N, local_N, self.shared_N.to(device, copy=True), 7)


@functools.cache
def problem(size, density, dtype=torch.float32, seed=0):
    """Residuals of which ``density`` reach a quantum, and values at all the borders."""
    draw = torch.Generator().manual_seed(seed)
    integers = functools.partial(torch.randint, generator=draw)
    shared_N = integers(-(2**22), 2**22, (size,)).int()
    ahead_N = torch.rand(size, generator=draw, dtype=torch.float64) * COUNT
    ahead_N[torch.rand(size, generator=draw) < density] *= 20.0
    ahead_N *= 1 - 2 * integers(0, 2, (size,))
    local_N = ((shared_N.double() + ahead_N) * GRID).to(dtype)
    odd = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e30, -1e-40]
    local_N[: len(odd)] = torch.tensor(odd[:size], dtype=dtype)
    far = [GUARD, -GUARD, GUARD + 1, -GUARD - 1, 2**31 - 1, -(2**31)]
    for start in range(len(odd), size - len(far), max(len(far), size // 3)):
        shared_N[start : start + len(far)] = torch.tensor(far)
    numbers = torch.arange(1, size + 1)[torch.rand(size, generator=draw) < 0.1] + 7
    signs = 1 - 2 * integers(0, 2, numbers.shape)
    levels_K = integers(1, 16, numbers.shape).to(torch.uint8)
    counts_N = integers(-(2**20), 2**20, (size,)).int()
    return Problem(local_N, shared_N, (numbers * signs).int(), levels_K, counts_N)


def assert_same_bits(value, expected):
    """Of tensors on any device; NaN has several patterns of bits, all the same here."""
    value = value.cpu()
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    if value.is_floating_point():
        assert torch.equal(value.isnan(), expected.isnan())
        value, expected = (
            torch.where(v.isnan(), 0.5, v).view(torch.uint8) for v in (value, expected)
        )
    np.testing.assert_array_equal(value, expected)


def both(size, density, dtype, kind):
    case = problem(size, density, dtype, seed=size)
    return case, case.group(NumbaGroup, "cpu"), case.group(KINDS[kind], DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize(
    ("size", "density"),
    [
        *((0, 0.5), (1, 0.5), (63, 0.5), (4099, 0.0), (4099, 0.5)),
        pytest.param(2**20 + 3, 0.02, marks=pytest.mark.slow),  # a second chunk
    ],
    ids=str,
)
class TestBits:
    @pytest.mark.parametrize("local_factor", [3.0, 0.7], ids=str)
    def test_entries_and_levels(self, kind, dtype, density, size, local_factor):
        _, expected, group = both(size, density, dtype, kind)
        where = slice(size // 3, size)

        for options in ({}, {"where": where}):
            on_device = group.find(COUNT, GRID, local_factor, **options)
            reference = expected.find(COUNT, GRID, local_factor, **options)

            for value, correct in zip(on_device, reference, strict=True):
                assert_same_bits(value, correct)
        if size > 100 and density:
            assert len(reference[0]) > size * density / 4

    @pytest.mark.parametrize(
        ("bound", "momentum"), [(1.5, 0.9), (math.inf, 0.0)], ids=str
    )
    def test_vectors_after_updates(self, kind, dtype, density, size, bound, momentum):
        case, expected, group = both(size, density, dtype, kind)
        outcomes = []
        for vectors in (expected, group):
            entries_K, levels_K, counts_N = (
                tensor.to(vectors.flat.device) for tensor in case[2:]
            )
            entries, quanta = vectors.find(COUNT, GRID, 3.0)
            options = (COUNT, GRID, bound * COUNT * GRID, 3.0)
            cut = vectors.commit_(entries, *options, quanta, momentum)
            vectors.apply_(entries_K, COUNT, GRID, levels_K)
            again, _ = vectors.find(COUNT, GRID, 3.0)
            cut += vectors.commit_(again, *options, momentum=momentum)
            vectors.apply_(entries_K, COUNT, GRID)
            vectors.apply_counts_(counts_N, GRID, -1.3)
            outcomes.append((cut, vectors.local_N, vectors.shared_N))

        (cut, *reference), (device_cut, *vectors) = outcomes
        for value, correct in zip(vectors, reference, strict=True):
            assert_same_bits(value, correct)
        assert device_cut == pytest.approx(cut, rel=1e-9, nan_ok=True)

    @pytest.mark.parametrize("most", [2**31 - 1, GUARD], ids=str)
    def test_whole_residuals(self, kind, dtype, density, size, most):
        _, expected, group = both(size, density, dtype, kind)

        counts = group.residual_counts(GRID, most, 3.0)

        assert counts.device.type == "cpu"
        assert_same_bits(counts, expected.residual_counts(GRID, most, 3.0))


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_million_parameters(kind):
    case, expected, group = both(30_000_000, 0.01, torch.float32, kind)
    entries_K, levels_K = expected.find(COUNT, GRID)

    for value, correct in zip(
        group.find(COUNT, GRID), (entries_K, levels_K), strict=True
    ):
        assert_same_bits(value, correct)
    expected.commit_(entries_K, COUNT, GRID, math.inf, 1.0, levels_K)
    on_device = entries_K.to(DEVICE), levels_K.to(DEVICE)
    group.commit_(on_device[0], COUNT, GRID, math.inf, 1.0, on_device[1])
    expected.apply_(case.entries_K, COUNT, GRID, case.levels_K)
    group.apply_(case.entries_K.to(DEVICE), COUNT, GRID, case.levels_K.to(DEVICE))
    assert_same_bits(group.local_N, expected.local_N)
    assert_same_bits(group.shared_N, expected.shared_N)


# ---- replicas


class Layers(nn.Module):
    """Two layers of one type and one of another."""

    def __init__(self, dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(1500, generator=draw).to(dtype))
        self.second = nn.Parameter(torch.randn(40, 37, generator=draw).to(dtype))
        self.wide = nn.Parameter(torch.randn(99, generator=draw).double())

    def step(self, number):
        """Move the parameters, each by another distance, as no optimizer would."""
        draw = torch.Generator().manual_seed(number)
        for parameter in self.parameters():
            steps = torch.randn(parameter.shape, generator=draw) ** 3 * 1e-3
            parameter.data += steps.to(parameter)


THRESHOLDS = {
    "fixed": FixedThreshold(2.0**-10),
    "adaptive": AdaptiveThreshold(initial=1e-3, max_density=0.05),
    "target": TargetSparsityThreshold(initial=1e-3),
    "by layer": {"first": FixedThreshold(1e-3), "*": SampledThreshold()},
}


@pytest.fixture(params=KINDS | COPYING)
def replica(request, monkeypatch):
    """Return a function that makes a replica on the CPU or the device."""

    def make(place, dtype, threshold, **options):
        kind = NumbaGroup if place == "cpu" else (KINDS | COPYING)[request.param]
        monkeypatch.setattr(replica_vector, "kernels_for", lambda device: kind)
        module = Layers(dtype).to(place)
        parameters = FlatParameters(module)
        return module, Compressor(parameters, THRESHOLDS[threshold], **options)

    return make


def exchange(module, compressor, number, *, dense):
    """Make a step; return what is sent, as it is on the wire."""
    module.step(number)
    compressor.vector.sync_from_parameters_()
    updates = compressor.propose(dense=dense)
    frames = [update.encode(STAMP).tobytes() for update in updates]
    for update in updates:
        compressor.commit_(update)
    return frames


@pytest.mark.parametrize("threshold", ["adaptive", "target", "by layer"])
@pytest.mark.parametrize(
    ("apply", "momentum"), [("eager", 0.0), ("eager", 0.5), ("strict", 0.5)], ids=str
)
@pytest.mark.parametrize("dtype", NAMES | HALVES, ids=(NAMES | HALVES).get)
def test_a_replica_sends_the_bytes_of_one_on_the_cpu(
    replica, threshold, apply, dtype, momentum
):
    options = {"apply": apply, "momentum": momentum}
    options["residual"] = ResidualClipping(2.0, 2) if momentum else KeepResidual()
    pairs = [replica(place, dtype, threshold, **options) for place in ("cpu", DEVICE)]
    others = replica("cpu", dtype, threshold, **options)
    for _, compressor in pairs:
        compressor.vector.set_scale_(1 / 3)  # rounded, unlike a half

    for number in range(6):
        dense = number == 3
        expected, frames = (exchange(*p, number, dense=dense) for p in pairs)
        foreign = exchange(*others, 100 + number, dense=dense)

        assert frames == expected
        assert any(len(frame) > 64 for frame in frames)  # more than a header
        for _, compressor in pairs:
            for frame in foreign:
                compressor.vector.apply_(codec.decode(frame))
    assert_same_replicas(*(compressor for _, compressor in pairs))


def assert_same_replicas(expected, compressor):
    ours, theirs = compressor.vector, expected.vector
    assert (ours.digest(), ours.grid) == (theirs.digest(), theirs.grid)
    np.testing.assert_array_equal(ours.shared_counts(), theirs.shared_counts())
    np.testing.assert_array_equal(ours.residual_counts(), theirs.residual_counts())
    assert ours.farthest() == theirs.farthest()
    for group, correct in zip(ours.groups, theirs.groups, strict=True):
        assert_same_bits(group.flat, correct.flat)
        assert_same_bits(group.local_N, correct.local_N)


@pytest.mark.parametrize("apply", ["eager", "strict"])
@pytest.mark.parametrize("dtype", NAMES | HALVES, ids=(NAMES | HALVES).get)
def test_whole_vectors_are_those_of_the_cpu(replica, dtype, apply):
    compressors, shown = [], []
    for place in ("cpu", DEVICE):
        module, compressor = replica(
            place, dtype, "fixed", residual=KeepResidual(), apply=apply
        )
        vector = compressor.vector
        vector.set_scale_(1 / 3)
        exchange(module, compressor, 1, dense=False)
        counts_N = np.arange(vector.size, dtype=np.int32) * 1000
        vector.add_residual_(counts_N, vector.grid)
        with vector.showing_shared():
            shown.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
        vector.replace_shared_(vector.shared_counts() + counts_N, vector.grid)
        vector.apply_counts_(np.full(vector.size, 2**28 + 5, np.int32))
        vector.regrid_()
        vector.flush_residual_()
        exchange(module, compressor, 2, dense=False)
        compressors.append(compressor)

    assert_same_bits(shown[1], shown[0])
    assert compressors[0].vector.grid > GRID
    assert_same_replicas(*compressors)


@pytest.mark.parametrize("places", [("cpu", DEVICE), (DEVICE, "cpu")], ids=str)
@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_a_replica_goes_on_from_the_state_of_another_device(replica, places, apply):
    options = {"residual": KeepResidual(), "apply": apply}
    pairs = [replica(place, torch.float32, "adaptive", **options) for place in places]
    for number in range(2):
        exchange(*pairs[0], number, dense=False)
    shared, part = pairs[0][1].state()

    pairs[1][1].restore_(shared, [part])

    frames = [exchange(*pair, 9, dense=False) for pair in pairs]
    assert frames[0] == frames[1]
    states = [compressor for _, compressor in pairs]
    assert_same_replicas(*(states if places[0] == "cpu" else reversed(states)))
