"""What one accumulator does when everything is sent, in eight bits."""

import math

import numpy as np
import pytest
import torch

from daskdl.codec import Stamp, counts_of, decode
from daskdl.errors import OptionError, RunError
from daskdl.residuals import ResidualClipping
from daskdl.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    Sent,
    ThresholdAlgorithm,
)
from tests.support.accumulators import GRID, Vector, make, proposed

STAMP = Stamp(1, 0, 1, 1)


def taken(accumulator):
    """Propose densely, take it, and return what it moves shared by."""
    proposal = accumulator.propose_dense()
    accumulator.take_(proposal)
    return counts_of(proposal.quantized).tolist()


class TestPropose:
    def test_it_changes_nothing(self):
        module = Vector([0.5, 0.25])
        accumulator = make(module)
        module.step(0.1, -0.1)
        before, digest = module.first.clone(), accumulator.progress.digest()

        accumulator.propose_dense()

        assert torch.equal(module.first, before)
        assert accumulator.progress.digest() == digest
        assert (accumulator.sections.sent, accumulator.sections["*"].exchanges) == (
            {},
            0,
        )

    def test_the_frame_is_what_is_taken(self):
        module = Vector([0.0, 0.0], second=[0.0])
        accumulator = make(module)
        module.step(0.1, -0.003)

        proposal = accumulator.propose_dense()
        update = decode(proposal.encode(STAMP))
        accumulator.take_(proposal)

        assert update.grid == GRID
        assert update.counts_N.tolist() == accumulator.progress.shared_counts().tolist()
        assert update.counts_N.any()

    def test_there_is_nothing_to_send_where_nothing_moved(self):
        module = Vector([0.5, 0.25])
        accumulator = make(module)
        module.step(0.4 * GRID, 0.0)

        nothing = accumulator.propose_dense()
        module.step(0.0, GRID)

        assert (nothing.entries, accumulator.propose_dense().entries) == (0, 2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_what_is_not_finite_is_kept_back_or_limited(self, dtype):
        module = Vector([0.0, 0.0, 0.0, 0.0], dtype)
        accumulator = make(module)
        module.step(math.nan, math.inf, -1e9, 0.0)

        moved = taken(accumulator)

        shared = accumulator.progress.shared_counts().astype(np.int64)
        assert moved == shared.tolist()
        assert (moved[0], moved[3]) == (0, 0)
        np.testing.assert_allclose(shared[1:3], [2**30, -(2**30)], rtol=1 / 254)

    def test_shared_does_not_wrap(self):
        module = Vector([0.0, 0.0])
        accumulator = make(module)
        accumulator.progress.apply_counts_(np.array([2**31 - 1, 1 - 2**31], np.int32))
        module.step(1e9, -1e9)

        taken(accumulator)

        np.testing.assert_allclose(
            accumulator.progress.shared_counts(), [2**30, -(2**30)], rtol=1 / 254
        )


class TestTake:
    def test_eager_shared_moves_and_local_stays(self):
        module = Vector([0.5, 0.25])
        accumulator = make(module)
        module.step(3 * GRID, -2 * GRID)
        before, shared = module.first.clone(), accumulator.progress.shared_counts()

        moved = taken(accumulator)

        assert moved == [3, -2]
        assert (accumulator.progress.shared_counts() - shared).tolist() == moved
        assert torch.equal(module.first, before)
        assert accumulator.progress.residual_norm() == 0.0

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
    )
    def test_strict_the_module_shows_what_was_sent(self, dtype):
        module = Vector([0.5, 0.25], dtype)
        accumulator = make(module, apply="strict")
        module.step(0.125, -0.0625)

        taken(accumulator)

        shown = (accumulator.progress.shared_counts() * GRID).astype(np.float32)
        assert module.first.tolist() == torch.tensor(shown).to(dtype).tolist()
        assert module.first[0].item() == pytest.approx(0.625, abs=0.125 / 127)

    def test_what_rounding_leaves_stays_in_the_residual(self):
        module = Vector([0.0, 0.0])
        accumulator = make(module)
        module.step(127 * 10 * GRID, 14 * GRID)

        assert taken(accumulator) == [1270, 10]
        assert accumulator.progress.residual_counts().tolist() == [0, 4]
        assert taken(accumulator) == [0, 4]

    def test_nothing_is_clipped(self):
        module = Vector([0.0, 0.0])
        accumulator = make(
            module, FixedThreshold(GRID), ResidualClipping(1.0, frequency=1)
        )
        taken(accumulator)
        module.step(0.25, 100 * GRID)

        taken(accumulator)

        assert accumulator.clipped == 0.0
        assert module.first[1].item() == 100 * GRID

    def test_a_proposal_of_another_grid_is_refused(self):
        accumulator = make(Vector([0.0]))
        proposal = accumulator.propose_dense()
        accumulator.progress.replace_shared_(np.zeros(1, np.int32), 2 * GRID)

        with pytest.raises(OptionError, match="propose again"):
            accumulator.take_(proposal)

    def test_it_cannot_be_made_or_taken_while_the_module_shows_shared(self):
        accumulator = make(Vector([0.5]), apply="strict")
        proposal = accumulator.propose_dense()

        with accumulator.progress.showing_shared():
            with pytest.raises(RunError, match="shows shared"):
                accumulator.propose_dense()
            with pytest.raises(RunError, match="shows shared"):
                accumulator.take_(proposal)

        assert accumulator.sections.sent == {}


class TestThreshold:
    RULE = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)

    def test_it_counts_as_a_dense_message(self):
        accumulator = make(Vector([0.0]), self.RULE)

        taken(accumulator)

        assert accumulator.sections.sent == {"*": Sent(1e-3, DENSE_DENSITY)}
        assert accumulator.sections["*"].exchanges == 1

    def test_it_stands_still_from_one_to_the_next_and_rises_once_after(self):
        accumulator = make(Vector([0.0]), self.RULE)

        for _ in range(30):
            taken(accumulator)

        assert accumulator.sections.sent["*"].threshold == 1e-3
        assert proposed(accumulator).rule == 2e-3

    def test_it_goes_on_from_where_entries_left_it(self):
        accumulator = make(Vector([0.0]), self.RULE, last={"*": Sent(0.125, 0.001)})

        taken(accumulator)

        assert accumulator.sections.sent == {"*": Sent(0.125, DENSE_DENSITY)}

    def test_the_first_is_within_what_the_grid_can_express(self):
        accumulator = make(Vector([0.0]), FixedThreshold(1e-30))

        taken(accumulator)

        assert accumulator.sections.sent["*"].threshold == GRID

    def test_a_rule_that_is_none_is_told_before_anything_is_sent(self):
        class Odd(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                return math.nan

        with pytest.raises(OptionError, match="finite and > 0, got nan"):
            make(Vector([0.0]), Odd()).propose_dense()
