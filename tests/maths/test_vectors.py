import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.compression.flat import FlatParameters, empty, grid_for, load_counts_
from daskdl.errors import ModelError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sparse():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    return module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class TestFlatParameters:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parameters_become_views_with_their_values(self, dtype):
        module = net().to(dtype)
        before = [p.detach().clone() for p in module.parameters()]

        flat = FlatParameters(module)

        assert [group.flat.dtype for group in flat.groups] == [dtype]
        for kept, parameter in zip(before, module.parameters(), strict=True):
            assert torch.equal(parameter, kept)
        flat.groups[0].flat.fill_(0.5)
        assert all(bool((p == 0.5).all()) for p in module.parameters())

    def test_positions_follow_named_parameters(self):
        flat = FlatParameters(module := nn.Linear(2, 3))

        group = flat.groups[0]
        assert flat.slices == {"weight": slice(0, 6), "bias": slice(6, 9)}
        assert (group.start, group.names, group.numels) == (
            0,
            ("weight", "bias"),
            (6, 3),
        )
        assert torch.equal(group.flat[6:], module.bias)
        assert torch.equal(group.flat[:6], module.weight.flatten())

    def test_each_dtype_has_a_group_of_its_own(self):
        module = net()
        module[1].to(torch.float64)

        flat = FlatParameters(module)

        assert flat.size == 12 + 4 + 8 + 8 + 2
        groups = [(group.flat.dtype, group.start) for group in flat.groups]
        assert groups == [(torch.float32, 0), (torch.float64, 26)]
        assert [name[0] for name in flat.slices] == ["0", "0", "2", "2", "1", "1"]
        assert flat.slices["1.bias"] == slice(30, 34)

    def test_identity_gradients_and_optimizer_are_kept(self):
        parameters = list((module := net()).parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        module(torch.ones(2, 3)).sum().backward()
        gradients = [p.grad for p in parameters]

        flat = FlatParameters(module)
        before = flat.groups[0].flat.clone()
        optimizer.step()

        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
        moved = torch.cat([g.flatten() for g in gradients]) * 0.5
        torch.testing.assert_close(flat.groups[0].flat, before - moved)

    def test_tied_parameters_appear_once_and_stay_tied(self):
        module = Tied()

        flat = FlatParameters(module)

        assert list(flat.slices) == ["embedding.weight"]
        assert module.head.weight is module.embedding.weight

    def test_frozen_parameters_are_left_alone(self):
        module = net()
        module[0].weight.requires_grad_(False)
        pointer = module[0].weight.data_ptr()

        flat = FlatParameters(module)

        assert "0.weight" not in flat.slices
        assert module[0].weight.data_ptr() == pointer

    def test_frozen_parameters_may_be_of_any_dtype(self):
        module = nn.Linear(2, 1)
        module.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), False)

        assert FlatParameters(module).size == 3

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_layers_without_inputs_are_not_taken_for_tied_ones(self):
        module = nn.Sequential(nn.Linear(0, 5), nn.Linear(0, 5))

        assert FlatParameters(module).size == 10

    def test_a_flat_module_can_be_flattened_again(self):
        module = net()
        FlatParameters(module)
        before = nn.utils.parameters_to_vector(module.parameters()).detach()

        assert torch.equal(FlatParameters(module).groups[0].flat, before)

    def test_memory_formats_become_contiguous(self):
        module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        before = module.weight.detach().clone()

        flat = FlatParameters(module)

        assert torch.equal(module.weight, before)
        assert torch.equal(flat.groups[0].flat[:24], before.flatten())

    @pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
    def test_a_start_that_is_not_finite_is_named(self, value):
        module = net()
        module[2].bias.data[1] = value

        with pytest.raises(
            ModelError, match=r"'2.bias' has values that are not finite"
        ):
            FlatParameters(module)

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (nn.ReLU(), "no trainable parameters"),
            (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
            (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64"),
            (nn.LazyLinear(2), "'weight' is not initialised"),
            (nn.Linear(2, 2, device="meta"), "'weight' is not initialised"),
            (sparse(), r"'weight' is torch.float32 \(torch.sparse_coo\); trainable"),
        ],
        ids=["none", "frozen", "complex", "lazy", "meta", "sparse"],
    )
    @pytest.mark.filterwarnings("ignore:Lazy modules")
    def test_what_cannot_be_trained_is_refused(self, module, message):
        with pytest.raises(ModelError, match=message):
            FlatParameters(module)

    def test_more_than_int32_positions_are_refused(self):
        module = nn.Module()
        module.wide = nn.Parameter(torch.zeros(1).expand(2**31))

        with pytest.raises(ModelError, match=r"has 2147483648 .* limit is 2147483647"):
            FlatParameters(module)

    @pytest.mark.parametrize("trained", [0, 1], ids=["outer", "inner"])
    def test_two_parameters_in_one_memory_are_refused(self, trained):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = nn.Parameter(module[0].weight.data[1:])
        module[1 - trained].weight.requires_grad_(False)

        with pytest.raises(ModelError, match=r"'0.weight' and '1.weight' share memory"):
            FlatParameters(module)

    def test_sharing_the_last_element_is_sharing(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(1, 1))
        module[1].weight = nn.Parameter(module[0].weight.data[1:, 1:])

        with pytest.raises(ModelError, match="share memory"):
            FlatParameters(module)

    def test_frozen_ones_may_share_memory(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = nn.Parameter(module[0].weight.data[1:])
        module[0].weight.requires_grad_(False)
        module[1].weight.requires_grad_(False)

        assert FlatParameters(module).size == 4


class TestGrid:
    @pytest.mark.parametrize(
        ("largest", "exponent"),
        [(0.0, -24), (0.3, -24), (1.0, -24), (1.0001, -23), (2.0, -23), (-5.0, -21)],
        ids=str,
    )
    def test_the_largest_parameter_decides(self, largest, exponent):
        module = nn.Linear(2, 1)
        nn.init.zeros_(module.weight)
        nn.init.constant_(module.bias, largest)

        assert grid_for(FlatParameters(module)) == 2.0**exponent

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_a_group_without_parameters_does_not(self):
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(0, 3, False).double())
        nn.init.constant_(module[0].bias, 4.0)

        assert grid_for(FlatParameters(module)) == 2.0**-22

    def test_any_group_may_hold_it(self):
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
        nn.init.constant_(module[1].bias, 100.0)

        assert grid_for(FlatParameters(module)) == 2.0**-17


class TestLoadCounts:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_counts_come_back_as_parameters(self, dtype):
        module, other = net().to(dtype), net().to(dtype)
        flat = FlatParameters(other)
        counts = np.arange(-10, flat.size - 10, dtype=np.int32)
        counts.flags.writeable = False

        load_counts_(module, counts, 0.25)

        values = nn.utils.parameters_to_vector(module.parameters())
        assert torch.equal(values, torch.from_numpy(counts * 0.25).to(dtype))

    def test_groups_are_in_the_order_of_flat_parameters(self):
        module = nn.Sequential(
            nn.Linear(1, 1), nn.Linear(1, 1).double(), nn.Linear(1, 1)
        )

        load_counts_(module, np.arange(6, dtype=np.int32), 1.0)

        assert [p.item() for p in module.parameters()] == [0, 1, 4, 5, 2, 3]

    def test_float64_keeps_all_bits_of_a_count(self):
        module = nn.Linear(1, 1, bias=False).double()

        load_counts_(module, np.array([2**31 - 1], np.int32), 1.0)

        assert module.weight.item() == 2**31 - 1

    def test_another_size_is_refused(self):
        with pytest.raises(ModelError, match="need 3 parameters, got 2 values"):
            load_counts_(nn.Linear(2, 1), np.zeros(2, np.int32), 1.0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32], ids=str)
def test_empty_vectors_are_aligned_to_cache_lines(dtype):
    vectors = [empty(size, dtype, torch.device("cpu")) for size in (0, 1, 1000)]

    assert [vector.shape for vector in vectors] == [(0,), (1,), (1000,)]
    assert all(vector.dtype == dtype for vector in vectors)
    assert all(vector.data_ptr() % 64 == 0 for vector in vectors[1:])
