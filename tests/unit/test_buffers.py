import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.compression.flat import (
    Buffers,
    average_buffers,
    load_buffers_,
    pack_buffers,
)
from daskdl.errors import ModelError


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def test_all_buffers_are_packed_once():
    module = nn.Sequential(nn.BatchNorm1d(2), Masked())

    buffers = pack_buffers(module)

    np.testing.assert_array_equal(buffers.floating_F, [0, 0, 1, 1, 0, -math.inf, 1, 1])
    assert buffers.integer_I.tolist() == [0]


def test_what_was_packed_comes_back():
    module, other = nn.Module(), nn.Module()
    for m, k in ((module, 3), (other, 0)):
        m.register_buffer("a", torch.full((2, 2), 0.1 * k, dtype=torch.bfloat16))
        m.register_buffer("b", torch.tensor([k > 0, False]))
        m.register_buffer("c", torch.full((2,), complex(k, -k)))
        m.register_buffer("d", torch.tensor(2**40 * k))
        m.register_buffer("e", None)

    packed = pack_buffers(module)
    for part in packed:
        part.flags.writeable = False  # as what came through Dask
    load_buffers_(other, packed)

    for one, two in zip(module.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 2), (5, 1)], ids=str)
def test_other_sizes_are_refused_before_anything_is_written(sizes):
    module = nn.BatchNorm1d(2)
    buffers = Buffers(np.full(sizes[0], 9.0), np.zeros(sizes[1], np.int64))

    with pytest.raises(ModelError, match=rf"got .* \[{sizes[0]}, {sizes[1]}\], model"):
        load_buffers_(module, buffers)

    assert module.running_mean.tolist() == [0.0, 0.0]


def test_floating_means_are_weighted_and_integers_take_the_maximum():
    parts = [
        (Buffers(np.array([1.0, 0.0]), np.array([3, 9])), 30),
        (Buffers(np.array([4.0, 1.0]), np.array([5, 2])), 10),
    ]

    floating, integer = average_buffers(parts)

    assert (floating.tolist(), integer.tolist()) == ([1.75, 0.25], [5, 9])


def test_without_examples_the_mean_is_plain():
    parts = [(Buffers(np.array([x]), np.array([0])), 0) for x in (1.0, 4.0)]

    assert average_buffers(parts).floating_F.tolist() == [2.5]


def test_a_replica_without_examples_does_not_count():
    idle = Buffers(np.array([math.nan]), np.array([7]))
    busy = Buffers(np.array([4.0]), np.array([0]))

    merged = average_buffers([(idle, 0), (busy, 3)])

    assert (merged.floating_F.tolist(), merged.integer_I.tolist()) == ([4.0], [7])


def test_what_all_agree_on_stays_bit_for_bit():
    values = np.array([0.1, -math.inf, math.inf, 1 / 3])
    parts = [(Buffers(values.copy(), np.zeros(0, np.int64)), n) for n in (3, 7, 9)]

    np.testing.assert_array_equal(average_buffers(parts).floating_F, values)


def test_infinities_of_both_signs_have_no_mean():
    parts = [(Buffers(np.array([x]), np.array([0])), 1) for x in (math.inf, -math.inf)]

    assert math.isnan(average_buffers(parts).floating_F[0])


@pytest.mark.parametrize(
    "sizes",
    [(), ((1, 0), (2, 0)), ((1, 2), (1, 3))],
    ids=["none", "floating", "integer"],
)
def test_buffers_of_one_size_are_needed(sizes):
    parts = [(Buffers(np.zeros(f), np.zeros(i, np.int64)), 1) for f, i in sizes]

    with pytest.raises(ModelError, match="need buffers of one size, got"):
        average_buffers(parts)
