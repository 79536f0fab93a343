"""What one compressor does when everything is sent, in eight bits."""

import numpy as np
import pytest
import torch

from daskdl.codec import Stamp, counts_of, decode
from daskdl.residuals import ResidualClipping
from daskdl.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    Sent,
)
from tests.support.updates import GRID, Vector, make, proposed

STAMP = Stamp(1, 0, 1, 1)


def taken(compressor):
    """Propose densely, take it, and return what it moves shared by."""
    [update] = compressor.propose(dense=True)
    compressor.commit_(update)
    return counts_of(update.quantized).tolist()


class TestPropose:
    def test_it_changes_nothing(self):
        module = Vector([0.5, 0.25])
        compressor = make(module)
        module.step(0.1, -0.1)
        before, digest = module.first.clone(), compressor.vector.digest()

        compressor.propose(dense=True)

        assert torch.equal(module.first, before)
        assert compressor.vector.digest() == digest
        assert (compressor.sent, compressor.groups["*"].exchanges) == (
            {},
            0,
        )

    def test_the_frame_is_what_is_taken(self):
        module = Vector([0.0, 0.0], second=[0.0])
        compressor = make(module)
        module.step(0.1, -0.003)

        [pending] = compressor.propose(dense=True)
        update = decode(pending.encode(STAMP))
        compressor.commit_(pending)

        assert update.grid == GRID
        assert update.counts_N.tolist() == compressor.vector.shared_counts().tolist()
        assert update.counts_N.any()

    def test_there_is_nothing_to_send_where_nothing_moved(self):
        module = Vector([0.5, 0.25])
        compressor = make(module)
        module.step(0.4 * GRID, 0.0)

        [nothing] = compressor.propose(dense=True)
        module.step(0.0, GRID)

        assert (nothing.entries, compressor.propose(dense=True)[0].entries) == (0, 2)

    def test_shared_does_not_wrap(self):
        module = Vector([0.0, 0.0])
        compressor = make(module)
        compressor.vector.apply_counts_(np.array([2**31 - 1, 1 - 2**31], np.int32))
        module.step(1e9, -1e9)

        taken(compressor)

        np.testing.assert_allclose(
            compressor.vector.shared_counts(), [2**30, -(2**30)], rtol=1 / 254
        )


class TestCommit:
    def test_eager_shared_moves_and_local_stays(self):
        module = Vector([0.5, 0.25])
        compressor = make(module)
        module.step(3 * GRID, -2 * GRID)
        before, shared = module.first.clone(), compressor.vector.shared_counts()

        moved = taken(compressor)

        assert moved == [3, -2]
        assert (compressor.vector.shared_counts() - shared).tolist() == moved
        assert torch.equal(module.first, before)
        assert compressor.vector.farthest() == 0.0

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
    )
    def test_strict_the_module_shows_what_was_sent(self, dtype):
        module = Vector([0.5, 0.25], dtype)
        compressor = make(module, apply="strict")
        module.step(0.125, -0.0625)
        compressor.vector.sync_from_parameters_()

        taken(compressor)

        shown = (compressor.vector.shared_counts() * GRID).astype(np.float32)
        assert module.first.tolist() == torch.tensor(shown).to(dtype).tolist()
        assert module.first[0].item() == pytest.approx(0.625, abs=0.125 / 127)

    def test_what_rounding_leaves_stays_in_the_residual(self):
        module = Vector([0.0, 0.0])
        compressor = make(module)
        module.step(127 * 10 * GRID, 14 * GRID)

        assert taken(compressor) == [1270, 10]
        assert compressor.vector.residual_counts().tolist() == [0, 4]
        assert taken(compressor) == [0, 4]

    def test_nothing_is_clipped(self):
        module = Vector([0.0, 0.0])
        compressor = make(
            module, FixedThreshold(GRID), ResidualClipping(1.0, frequency=1)
        )
        taken(compressor)
        module.step(0.25, 100 * GRID)

        taken(compressor)

        assert compressor.clipped == 0.0
        assert module.first[1].item() == 100 * GRID


class TestThreshold:
    RULE = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)

    def test_it_counts_as_a_dense_message(self):
        compressor = make(Vector([0.0]), self.RULE)

        taken(compressor)

        assert compressor.sent == {"*": Sent(1e-3, DENSE_DENSITY)}
        assert compressor.groups["*"].exchanges == 1

    def test_it_stands_still_from_one_to_the_next_and_rises_once_after(self):
        compressor = make(Vector([0.0]), self.RULE)

        for _ in range(30):
            taken(compressor)

        assert compressor.sent["*"].threshold == 1e-3
        assert proposed(compressor).chosen == 2e-3

    def test_it_goes_on_from_where_entries_left_it(self):
        compressor = make(Vector([0.0]), self.RULE, last={"*": Sent(0.125, 0.001)})

        taken(compressor)

        assert compressor.sent == {"*": Sent(0.125, DENSE_DENSITY)}

    def test_the_first_is_within_what_the_grid_can_express(self):
        compressor = make(Vector([0.0]), FixedThreshold(1e-30))

        taken(compressor)

        assert compressor.sent["*"].threshold == GRID
