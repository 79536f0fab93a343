"""Flat, local and shared where local is a vector of its own."""

import pytest
import torch
from torch import nn

from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import PIECE, Progress

GRID = 2.0**-24


def progress(values, dtype, strict):
    module = nn.Module()
    module.vector = nn.Parameter(torch.tensor(values, dtype=dtype))
    return Progress(FlatParameters(module).groups[0], GRID, strict)


def entries(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestEagerHalf:
    def test_local_is_float32_and_flat_shows_it(self, dtype):
        own = progress([0.5], dtype, strict=False)

        own.apply_(entries(1), count=2**12 + 1)

        assert own.local_N.tolist() == [0.5 + (2**12 + 1) * GRID]
        assert own.local_N.dtype == torch.float32
        assert torch.equal(own.flat, own.local_N.to(dtype))

    def test_quanta_below_the_resolution_add_up(self, dtype):
        own = progress([1.0], dtype, strict=False)
        count = 2**10  # 2**-14: a sixteenth of float16's resolution there

        for _ in range(256):
            own.apply_(entries(1), count)

        assert own.flat.item() == 1.0 + 2.0**-6

    def test_a_step_of_the_optimizer_is_added_to_local(self, dtype):
        own = progress([0.25, 2.0], dtype, strict=False)
        own.apply_(entries(1), count=3)  # flat cannot show it
        own.flat += torch.tensor([0.5, 0.0], dtype=dtype)

        own.absorb_()
        own.absorb_()

        assert own.local_N.tolist() == [0.75 + 3 * GRID, 2.0]
        assert own.flat.tolist() == [0.75, 2.0]

    def test_a_step_waiting_in_flat_survives_what_comes(self, dtype):
        own = progress([1.0, 2.0], dtype, strict=False)
        own.flat += torch.tensor([0.5, 0.25], dtype=dtype)

        own.apply_(entries(-1), count=2**22)
        own.absorb_()

        assert own.local_N.tolist() == [1.25, 2.25]
        assert own.flat.tolist() == [1.25, 2.25]

    def test_a_step_waiting_in_flat_survives_a_dense_update(self, dtype):
        own = progress([1.0, 2.0], dtype, strict=False)
        own.flat += torch.tensor([0.5, 0.25], dtype=dtype)

        own.apply_counts_(entries(-(2**22), 0))

        assert own.local_N.tolist() == [1.25, 2.25]
        assert own.flat.tolist() == [1.25, 2.25]

    def test_clipping_is_shown(self, dtype):
        own = progress([0.0], dtype, strict=False)
        own.flat += 1.0
        own.absorb_()

        mass = own.take_(entries(1), count=2**22, bound=0.25)

        assert mass == 0.5
        assert own.flat.tolist() == own.local_N.tolist() == [0.5]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestStrict:
    def test_own_progress_is_seen_once_it_is_sent(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5

        own.absorb_()
        unsent = own.flat.tolist()
        own.take_(entries(1), count=2**22, bound=float("inf"))

        assert unsent == [1.0, 1.0]
        assert own.flat.tolist() == [1.25, 1.0]
        assert own.residual(slice(None)).tolist() == [0.25, 0.5]

    def test_what_others_sent_is_seen_at_once(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5
        own.absorb_()

        own.apply_(entries(-2), count=2**22)
        own.apply_counts_(torch.tensor([2**22, 0], dtype=torch.int32))

        assert own.flat.tolist() == [1.25, 0.75]
        assert own.residual(slice(None)).tolist() == [0.5, 0.5]

    def test_a_step_waiting_in_flat_survives_what_comes(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5

        own.apply_(entries(-2), count=2**22)
        own.absorb_()

        assert own.flat.tolist() == [1.0, 0.75]
        assert own.residual(slice(None)).tolist() == [0.5, 0.5]

    def test_a_step_waiting_in_flat_survives_a_dense_update(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5

        own.apply_counts_(entries(0, -(2**22)))

        assert own.flat.tolist() == [1.0, 0.75]
        assert own.residual(slice(None)).tolist() == [0.5, 0.5]

    def test_handing_over_shows_everything(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5
        own.absorb_()

        counts = own.hand_over_()

        assert counts.tolist() == [2**23, 2**23]
        assert own.flat.tolist() == [1.5, 1.5]

    def test_a_replaced_shared_is_shown_and_the_residual_stays(self, dtype):
        own = progress([1.0, 1.0], dtype, strict=True)
        own.flat += 0.5

        own.replace_shared_(entries(4, -4), grid=0.5)

        assert own.flat.tolist() == [2.0, -2.0]
        assert own.residual(slice(None)).tolist() == [0.5, 0.5]

    def test_a_coarser_grid_is_shown(self, dtype):
        own = progress([0.0], dtype, strict=True)
        own.apply_counts_(entries(2**20 + 2**17))
        own.absorb_()

        own.regrid_(shift=20)

        assert own.shared_N.tolist() == [1]
        assert own.flat.tolist() == [0.0625]
        assert own.residual(slice(None)).tolist() == [2.0**-7]


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
def test_vectors_longer_than_a_piece_are_done_to_the_end(strict):
    own = progress([0.25] * (PIECE + 3), torch.bfloat16, strict)
    own.flat[-1] = 0.5

    own.absorb_()

    assert own.residual_counts().nonzero().tolist() == [[PIECE + 2]]
    assert own.squares() == 0.0625
    assert own.largest_count() == 2**22
    before = own.checksum(0)
    own.hand_over_()
    assert own.checksum(0) != before
    assert own.flat[-1] == 0.5
