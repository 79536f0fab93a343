"""The residual of some segments, as rules look at it."""

import torch
from torch import nn

from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import RUN, Progress, Residuals, Segment

GRID = 2.0**-24


def residuals(*sizes, segments=None):
    """Of groups in which each value is its position."""
    module, dtypes = nn.Module(), (torch.float32, torch.float64)
    for name, size, dtype in zip("ab", sizes, dtypes, strict=False):
        module.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))
    groups = [Progress(g, GRID, strict=False) for g in FlatParameters(module).groups]
    for group in groups:
        group.flat += torch.arange(group.start, group.stop)
    whole = [Segment(group, slice(0, group.flat.numel())) for group in groups]
    return Residuals(whole if segments is None else segments(groups))


class TestSample:
    def test_a_small_residual_is_sampled_whole(self):
        sample = residuals(40, 3).sample(most=43)

        assert sample.tolist() == [float(i) for i in range(43)]

    def test_of_a_large_one_runs_are_taken_evenly(self):
        sample = residuals(100).sample(most=50)

        runs = [*range(RUN), *range(2 * RUN, 3 * RUN), *range(4 * RUN, 5 * RUN)]
        assert sample.tolist() == [*runs, 96.0, 97.0, 98.0, 99.0]

    def test_it_is_as_even_over_segments_as_over_one(self):
        def cut(groups):
            return [Segment(groups[0], slice(i, i + 7)) for i in range(0, 7000, 7)]

        sample = residuals(7000, segments=cut).sample(most=700)

        assert sample.tolist() == residuals(7000).sample(most=700).tolist()

    def test_values_of_every_group_are_in_it(self):
        sample = residuals(1000, 1000).sample(most=320)

        # 14 runs of 16, 7 groups of 16 apart: the last one begins at 1904.
        assert sample.tolist()[::16] == [float(i) for i in range(0, 2000, 112)]

    def test_of_some_segments_nothing_else_is_in_it(self):
        def ends(groups):
            return [Segment(groups[0], slice(90, 100)), Segment(groups[1], slice(0, 2))]

        sample = residuals(100, 5, segments=ends).sample(most=12)

        assert sample.tolist() == [*map(float, range(90, 102))]

    def test_it_may_be_changed(self):
        whole = residuals(4)

        whole.sample(most=4).zero_()

        assert whole.sample(most=4).tolist() == [0.0, 1.0, 2.0, 3.0]
