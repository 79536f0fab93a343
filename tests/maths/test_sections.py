"""What is looked at of the residual of each section."""

import math

import pytest
import torch
from torch import nn

from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.residuals import KeepResidual
from daskdl.thresholds import FixedThreshold

RULE = FixedThreshold(2.0**-4)


class Two(nn.Module):
    def __init__(self, large, small):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(large))
        self.small = nn.Parameter(torch.zeros(small))


def compressor(module, threshold):
    return Compressor(FlatParameters(module), threshold, KeepResidual())


def test_each_section_gives_its_share_of_the_sample():
    module = Two(60_000, 3_000)
    own = compressor(module, {"large": RULE, "small": RULE})

    large, small = own.samples(1024)

    assert (large.size, small.size) == (60_000, 3_000)
    assert 900 <= len(large.residuals) <= 1024
    assert 32 <= len(small.residuals) <= 64


def test_a_small_model_is_looked_at_whole():
    module = Two(5, 3)
    own = compressor(module, {"*": RULE})
    with torch.no_grad():
        module.large.copy_(torch.arange(5) / 64)
        module.small.fill_(-0.5)

    [sample] = own.samples(1024)

    assert sample.residuals.tolist() == [0, 1 / 64, 2 / 64, 3 / 64, 4 / 64] + [-0.5] * 3


def test_the_threshold_is_that_of_the_last_exchange():
    module = Two(5, 3)
    own = compressor(module, {"large": FixedThreshold(0.25), "small": RULE})

    assert all(math.isnan(s.threshold) for s in own.samples(16))
    with torch.no_grad():
        module.large.fill_(1.0)
    own.commit_(own.propose()[0])

    large, small = own.samples(16)
    assert large.threshold == 0.25
    assert math.isnan(small.threshold)
    assert large.residuals.tolist() == [0.75] * 5


@pytest.mark.parametrize("numel", [0, 1])
def test_a_section_may_have_no_parameters_or_one(numel):
    own = compressor(Two(numel, 2), {"large": RULE, "small": RULE})

    assert [len(s.residuals) for s in own.samples(8)] == [numel, 2]
