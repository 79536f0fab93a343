"""What one compressor proposes and commits; test_conservation.py has several."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import codec
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.errors import OptionError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    Sent,
    ThresholdAlgorithm,
)
from tests.support.updates import GRID, Vector, make, proposed, sparse


class TestStart:
    def test_another_way_to_apply_is_refused(self):
        with pytest.raises(OptionError, match=r"apply must be .* got 'lazy'"):
            make(Vector([0.5]), apply="lazy")


class TestPropose:
    def test_the_threshold_is_put_on_the_grid(self):
        compressor = make(Vector([0.5]), FixedThreshold(1.2e-3))

        update = proposed(compressor)

        assert update.count == 20133  # 20132.66 steps: the nearest, not the first
        assert update.threshold == update.count * GRID
        assert update.threshold == np.float32(update.threshold)
        assert update.chosen == 1.2e-3

    @pytest.mark.parametrize(
        ("value", "count"), [(1e-30, 1), (1e9, MAX_COUNT)], ids=["small", "large"]
    )
    def test_a_rule_cannot_leave_the_grid(self, value, count):
        update = proposed(make(Vector([0.5]), FixedThreshold(value)))

        assert (update.count, update.chosen) == (count, count * GRID)

    def test_it_changes_nothing(self):
        module = Vector([0.5, 0.25])
        compressor = make(module)
        module.step(0.1, -0.1)
        before, digest = module.first.clone(), compressor.vector.digest()

        first, second = proposed(compressor), proposed(compressor)

        assert first.entries_K.tolist() == second.entries_K.tolist() == [1, -2]
        assert torch.equal(module.first, before)
        assert compressor.vector.digest() == digest
        assert (compressor.sent, compressor.groups["*"].exchanges) == (
            {},
            0,
        )

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
    def test_a_rule_must_return_a_positive_number(self, value):
        class Odd(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                return value

        with pytest.raises(OptionError, match=f"finite and > 0, got {value} from"):
            make(Vector([0.5]), Odd()).propose()


class TestCommit:
    def test_the_outcome_is_what_the_rule_sees_next(self):
        module = Vector([0.0, 0.0, 0.0, 0.0])
        rule = AdaptiveThreshold(initial=1e-3, max_density=0.1, decay=0.5)
        compressor = make(module, rule)
        module.step(0.5, 0.0, 0.0, 0.0)

        compressor.commit_(proposed(compressor))

        assert compressor.sent == {"*": Sent(1e-3, 0.25)}
        assert compressor.groups["*"].exchanges == 1
        assert proposed(compressor).chosen == 2e-3

    def test_nothing_to_send_is_an_outcome_too(self):
        compressor = make(Vector([0.0]), AdaptiveThreshold(initial=1e-3, decay=0.5))

        compressor.commit_(proposed(compressor))

        assert compressor.sent == {"*": Sent(1e-3, 0.0)}
        assert proposed(compressor).chosen == 5e-4

    def test_what_is_clipped_adds_up(self):
        module = Vector([0.0])
        compressor = make(module, residual=ResidualClipping(1.0, frequency=1))
        compressor.commit_(proposed(compressor))

        for _ in range(2):
            module.step(0.5)
            compressor.commit_(proposed(compressor))

        assert compressor.clipped == 0.375 + 0.4375

    @pytest.mark.parametrize("factor", [0.5, math.nan], ids=["half", "nan"])
    def test_a_bound_below_the_threshold_is_refused(self, factor):
        class Tight(ResidualPostProcessor):
            def bound(self, exchange, threshold):
                return threshold * factor

        module = Vector([0.0])
        compressor = make(module, residual=Tight())
        module.step(0.5)
        update = proposed(compressor)

        with pytest.raises(
            OptionError, match=f"bound must be >= .* got {0.0625 * factor}"
        ):
            compressor.commit_(update)

        assert compressor.vector.shared_counts().tolist() == [0]
        assert compressor.groups["*"].exchanges == 0

    def test_an_update_of_another_grid_is_refused(self):
        compressor = make(Vector([0.0]))
        update = proposed(compressor)
        compressor.vector.replace_shared_(np.zeros(1, np.int32), 2 * GRID)

        with pytest.raises(OptionError, match="propose again"):
            compressor.commit_(update)


class TestRegrid:
    def test_a_group_without_parameters_does_no_harm(self):
        module = Vector([], second=[0.0])
        compressor = make(module)
        with torch.no_grad():
            module.second += 0.5

        compressor.commit_(proposed(compressor))

        assert compressor.vector.regrid_() == GRID
        assert compressor.vector.shared_counts().tolist() == [2**20]

    def test_growth_far_beyond_the_start_waits_and_then_goes_on(self):
        module = Vector([0.0])
        compressor = make(module, FixedThreshold(MAX_COUNT * GRID))
        module.step(1000.0)

        while len((update := proposed(compressor)).entries_K):
            compressor.commit_(update)
        stuck = compressor.vector.shared_counts()[0]
        compressor.vector.regrid_()
        update = proposed(compressor)

        assert 2**30 < stuck <= 2**30 + MAX_COUNT
        assert module.first.item() == 1000.0
        assert update.entries_K.tolist() == [1]
        compressor.vector.apply_(sparse(1, [1], update.threshold))
        compressor.commit_(update)
        assert module.first.item() == 1000.0 + update.threshold


def scaled(values, scale, **options):
    module = Vector([0.0] * len(values))
    compressor = make(module, **options)
    assert compressor.vector.set_scale_(scale) == 1.0
    module.step(*values)
    return module, compressor


class TestLead:
    def test_what_is_sent_leaves_as_many_quanta(self):
        quantum = 2.0**-4
        module, compressor = scaled([5 * quantum, -4 * quantum, quantum], 0.25)

        compressor.commit_(proposed(compressor))

        # Ahead of shared by 5 and 4 quanta before, by 1 and 0 now.
        assert module.first.tolist() == [2 * quantum, -quantum, quantum]
        shared = compressor.vector.shared_counts() * compressor.vector.grid
        assert shared.tolist() == [quantum, -quantum, 0]

    def test_the_residual_is_the_share(self):
        _, compressor = scaled([0.75, -1.0], 0.25)

        assert compressor.vector.farthest() == pytest.approx(0.25)
        np.testing.assert_array_equal(
            compressor.vector.residual_counts() * compressor.vector.grid,
            [0.1875, -0.25],
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_another_scale_leaves_the_residual(self, dtype):
        module = Vector([0.0, 0.0], dtype)
        compressor = make(module)
        compressor.vector.set_scale_(0.5)
        module.step(0.5, -0.25)
        compressor.vector.sync_from_parameters_()
        before = compressor.vector.residual_counts()

        compressor.vector.set_scale_(0.25)

        np.testing.assert_array_equal(compressor.vector.residual_counts(), before)
        assert module.first.tolist() == [1.0, -0.5]

    def test_a_state_that_is_taken_over_leaves_it_too(self):
        module, compressor = scaled([0.5, -0.25], 0.25)
        before = compressor.vector.residual_counts()
        state = np.array([16, 32], np.int32)

        compressor.vector.replace_shared_(state, compressor.vector.grid)

        np.testing.assert_array_equal(compressor.vector.residual_counts(), before)
        ahead = module.first.detach().numpy() - state * compressor.vector.grid
        np.testing.assert_allclose(ahead, [0.5, -0.25])

    def test_a_residual_that_is_added_counts_once_whatever_the_lead(self):
        _, compressor = scaled([0.5, 0.0], 0.25)

        compressor.vector.add_residual_(np.array([8, -16], np.int32), 2.0**-10)

        residual = compressor.vector.residual_counts() * compressor.vector.grid
        assert residual.tolist() == [0.125 + 2.0**-7, -(2.0**-6)]

    def test_clipped_is_what_the_group_does_not_get(self):
        rule = ResidualClipping(1.0, 1)
        _, compressor = scaled([4.0], 0.25, residual=rule)
        compressor.commit_(proposed(compressor))  # the first one never cuts
        assert compressor.clipped == 0.0
        compressor.commit_(proposed(compressor))

        # A share of 1, of quanta of 1/16: two were sent, one stays.
        assert compressor.clipped == pytest.approx(1 - 3 / 16)
        assert compressor.vector.farthest() == pytest.approx(1 / 16)

    @pytest.mark.parametrize("dense", [False, True])
    def test_with_all_residuals_shared_is_the_mean_of_the_replicas(self, dense):
        moves = ([0.75, -1.0, 0.3], [0.25, 0.5, -0.1], [1.0, 0.0, 0.01])
        group = [scaled(values, 1 / 3) for values in moves]
        frames = []
        for i, (_, compressor) in enumerate(group):
            updates = compressor.propose(dense=True) if dense else compressor.propose()
            for update in updates:
                frames.append((i, update.encode(codec.Stamp(1, i, 1, 1))))
                compressor.commit_(update)
            stamp, counts = codec.Stamp(1, i, 2, 1), compressor.vector.flush_residual_()
            frames.append(
                (i, codec.encode_dense(stamp, compressor.vector.grid, counts))
            )
        for i, (_, compressor) in enumerate(group):
            for origin, frame in frames:
                if origin != i:
                    compressor.vector.apply_(codec.decode(frame.tobytes()))

        mean = torch.tensor(moves).mean(0)
        for module, compressor in group:
            torch.testing.assert_close(module.first.data, mean, rtol=0, atol=1e-6)
            shared = compressor.vector.shared_counts() * compressor.vector.grid
            np.testing.assert_allclose(shared, mean, rtol=0, atol=1e-6)


RULE = FixedThreshold(2.0**-4)


class Two(nn.Module):
    def __init__(self, large, small):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(large))
        self.small = nn.Parameter(torch.zeros(small))


class TestSamples:
    """What telemetry reads of the residual of each parameter group."""

    def test_each_group_gives_its_share_of_the_sample(self):
        module = Two(60_000, 3_000)
        own = make(module, {"large": RULE, "small": RULE})

        large, small = own.samples(1024)

        assert (large.size, small.size) == (60_000, 3_000)
        assert 900 <= len(large.residuals) <= 1024
        assert 32 <= len(small.residuals) <= 64

    def test_the_threshold_is_that_of_the_last_exchange(self):
        module = Two(5, 3)
        own = make(module, {"large": FixedThreshold(0.25), "small": RULE})

        assert all(math.isnan(s.threshold) for s in own.samples(16))
        with torch.no_grad():
            module.large.fill_(1.0)
        own.commit_(own.propose()[0])

        large, small = own.samples(16)
        assert large.threshold == 0.25
        assert math.isnan(small.threshold)
        assert large.residuals.tolist() == [0.75] * 5

    @pytest.mark.parametrize("numel", [0, 1])
    def test_a_group_may_have_no_parameters_or_one(self, numel):
        own = make(Two(numel, 2), {"large": RULE, "small": RULE})

        assert [len(s.residuals) for s in own.samples(8)] == [numel, 2]
