import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.errors import ModelError
from daskdl.vectors import (
    Buffers,
    FlatParameters,
    average_buffers,
    grid_for,
    load_buffers_,
    load_counts_,
    pack_buffers,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("hidden", torch.ones(2), persistent=False)


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
        assert group.shapes == (torch.Size([3, 2]), torch.Size([3]))
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
        ],
        ids=["none", "frozen", "complex", "lazy", "meta"],
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


class TestBuffers:
    def test_all_buffers_are_packed_once(self):
        module = nn.Sequential(nn.BatchNorm1d(2), Tied())

        buffers = pack_buffers(module)

        np.testing.assert_array_equal(
            buffers.floating_F, [0, 0, 1, 1, 0, -math.inf, 1, 1]
        )
        assert buffers.integer_I.tolist() == [0]

    def test_what_was_packed_comes_back(self):
        module, other = nn.Module(), nn.Module()
        for m, k in ((module, 3), (other, 0)):
            m.register_buffer("a", torch.full((2, 2), 0.1 * k, dtype=torch.bfloat16))
            m.register_buffer("b", torch.tensor([k > 0, False]))
            m.register_buffer("c", torch.full((2,), complex(k, -k)))
            m.register_buffer("d", torch.tensor(2**40 * k))
            m.register_buffer("e", None)

        load_buffers_(other, pack_buffers(module))

        for one, two in zip(module.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two)

    def test_other_sizes_are_refused_before_anything_is_written(self):
        module = nn.BatchNorm1d(2)

        with pytest.raises(ModelError, match=r"got .* \[4, 2\], model has \[4, 1\]"):
            load_buffers_(module, Buffers(np.full(4, 9.0), np.zeros(2, np.int64)))

        assert module.running_mean.tolist() == [0.0, 0.0]

    def test_floating_means_are_weighted_and_integers_take_the_maximum(self):
        parts = [
            (Buffers(np.array([1.0, 0.0]), np.array([3, 9])), 30),
            (Buffers(np.array([4.0, 1.0]), np.array([5, 2])), 10),
        ]

        floating, integer = average_buffers(parts)

        assert (floating.tolist(), integer.tolist()) == ([1.75, 0.25], [5, 9])

    def test_without_examples_the_mean_is_plain(self):
        parts = [(Buffers(np.array([x]), np.array([0])), 0) for x in (1.0, 4.0)]

        assert average_buffers(parts).floating_F.tolist() == [2.5]

    def test_a_replica_without_examples_does_not_count(self):
        idle = Buffers(np.array([math.nan]), np.array([7]))
        busy = Buffers(np.array([4.0]), np.array([0]))

        merged = average_buffers([(idle, 0), (busy, 3)])

        assert (merged.floating_F.tolist(), merged.integer_I.tolist()) == ([4.0], [7])

    def test_what_all_agree_on_stays_bit_for_bit(self):
        values = np.array([0.1, -math.inf, math.inf, 1 / 3])
        parts = [(Buffers(values.copy(), np.zeros(0, np.int64)), n) for n in (3, 7, 9)]

        np.testing.assert_array_equal(average_buffers(parts).floating_F, values)

    @pytest.mark.parametrize("sizes", [(), (1, 2)], ids=["none", "different"])
    def test_buffers_of_one_size_are_needed(self, sizes):
        parts = [(Buffers(np.zeros(n), np.zeros(0, np.int64)), 1) for n in sizes]

        with pytest.raises(ModelError, match="need buffers of one size, got"):
            average_buffers(parts)
