import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.compression.flat import (
    FLOATING,
    INTEGER,
    Untrained,
    average_untrained,
    load_untrained_,
)
from daskdl.errors import ModelError


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def test_all_buffers_are_taken_once():
    module = nn.Sequential(nn.BatchNorm1d(2), Masked())

    arrays = Untrained(module).take()

    np.testing.assert_array_equal(arrays[FLOATING], [0, 0, 1, 1, 0, -math.inf, 1, 1])
    assert arrays[INTEGER].tolist() == [0]


def of_every_kind(k):
    module = nn.Module()
    module.register_buffer("a", torch.full((2, 2), 0.1 * k, dtype=torch.bfloat16))
    module.register_buffer("b", torch.tensor([k > 0, False]))
    module.register_buffer("c", torch.full((2,), complex(k, -k)))
    module.register_buffer("d", torch.tensor(2**40 * k))
    for name, value in module.state_dict().items():
        module.register_parameter(f"own {name}", nn.Parameter(value.clone(), False))
    module.register_buffer("e", None)
    return module


def test_what_was_taken_comes_back():
    module, other = of_every_kind(0), of_every_kind(0)
    untrained = Untrained(module)
    module.load_state_dict(of_every_kind(3).state_dict())

    untrained.look()
    arrays = untrained.take()
    for array in arrays.values():
        array.flags.writeable = False  # as what came through Dask
    load_untrained_(other, arrays)

    assert len(arrays) == 2 + 4
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize("sizes", [(4, 2), (3, 2), (5, 1)], ids=str)
def test_other_sizes_are_refused_before_anything_is_written(sizes):
    module = nn.BatchNorm1d(2)
    arrays = {FLOATING: np.full(sizes[0], 9.0), INTEGER: np.zeros(sizes[1], np.int64)}

    with pytest.raises(ModelError, match=r"got \d \w+ buffers, model has [41]"):
        load_untrained_(module, arrays)

    assert module.running_mean.tolist() == [0.0, 0.0]


def mean_of(*parts):
    """The mean of arrays of (floating, integer, examples)."""
    packed = [({FLOATING: np.array(f), INTEGER: np.array(i)}, n) for f, i, n in parts]
    return [array.tolist() for array in average_untrained(packed).values()]


def test_floating_means_are_weighted_and_integers_take_the_maximum():
    assert mean_of(([1.0, 0.0], [3, 9], 30), ([4.0, 1.0], [5, 2], 10)) == [
        [1.75, 0.25],
        [5, 9],
    ]


def test_without_examples_the_mean_is_plain():
    assert mean_of(([1.0], [0], 0), ([4.0], [0], 0)) == [[2.5], [0]]


def test_a_replica_without_examples_does_not_count():
    assert mean_of(([math.nan], [7], 0), ([4.0], [0], 3)) == [[4.0], [7]]


def test_what_all_agree_on_stays_bit_for_bit():
    values = [0.1, -math.inf, math.inf, 1 / 3]

    assert mean_of(*((values, [0], n) for n in (3, 7, 9))) == [values, [0]]


def test_infinities_of_both_signs_have_no_mean():
    [mean], _ = mean_of(([math.inf], [0], 1), ([-math.inf], [0], 1))

    assert math.isnan(mean)


def test_arrays_of_one_size_are_needed():
    with pytest.raises(ModelError, match=r"need integer buffers of .*, got \[2, 3\]"):
        mean_of(([1.0], [0, 0], 1), ([1.0], [0, 0, 0], 1))
