"""Local is shared plus so many times the residual: what is sent is its share."""

import numpy as np
import pytest
import torch

from daskdl import codec
from daskdl.residuals import ResidualClipping
from tests.support.accumulators import GRID, Vector, make, proposed
from tests.support.kernel_cases import KERNELS

QUANTUM = 64 * GRID


@pytest.fixture(params=KERNELS)
def kernel(request):
    """A kernel module and a function that makes its tensors."""
    return request.param


class TestKernels:
    def test_an_entry_is_so_many_quanta_of_local(self, kernel):
        module, make = kernel
        local = make([3.9 * QUANTUM, 4 * QUANTUM, -4 * QUANTUM])
        shared = make([0, 0, 0], torch.int32)

        assert module.find(local, shared, 64, GRID, 0, 4.0).tolist() == [2, -3]

    def test_a_move_leaves_shared(self, kernel):
        module, make = kernel
        local = make([5 * QUANTUM, -4 * QUANTUM, QUANTUM])

        module.move_(local, make([11, -12], torch.int32), -3 * QUANTUM, 10)

        assert local.tolist() == [2 * QUANTUM, -QUANTUM, QUANTUM]

    def test_the_residual_is_counted_as_it_will_be_sent(self, kernel):
        module, make = kernel
        local, shared = make([7 * GRID, -8 * GRID]), make([3, 0], torch.int32)

        counts = module.residual_counts(local, shared, GRID, 2**30, 4.0)

        assert counts.tolist() == [1, -2]

    def test_an_own_dense_update_leaves_it(self, kernel):
        module, make = kernel
        local, shared = make([12 * GRID]), make([0], torch.int32)

        module.apply_counts_(local, shared, make([3], torch.int32), GRID, 1 - 4.0)

        assert shared.tolist() == [3]
        assert local.tolist() == [3 * GRID]


def scaled(values, scale, **options):
    module = Vector([0.0] * len(values))
    accumulator = make(module, **options)
    assert accumulator.progress.scale_(scale) == 1.0
    module.step(*values)
    return module, accumulator


class TestAccumulator:
    def test_strict_leaves_the_scale_to_the_learning_rate(self):
        module = Vector([0.0])
        accumulator = make(module, apply="strict")

        assert accumulator.progress.scale_(0.25) == 0.25
        module.step(0.5)
        accumulator.progress.absorb_()
        assert accumulator.progress.weight == 1.0
        assert accumulator.progress.residual_norm() == 0.5

    def test_what_is_sent_leaves_as_many_quanta(self):
        quantum = 2.0**-4
        module, accumulator = scaled([5 * quantum, -4 * quantum, quantum], 0.25)

        accumulator.take_(proposed(accumulator))

        # Ahead of shared by 5 and 4 quanta before, by 1 and 0 now.
        assert module.first.tolist() == [2 * quantum, -quantum, quantum]
        shared = accumulator.progress.shared_counts() * accumulator.progress.grid
        assert shared.tolist() == [quantum, -quantum, 0]

    def test_the_residual_is_the_share(self):
        _, accumulator = scaled([0.75, -1.0], 0.25)

        assert accumulator.progress.residual_norm() == pytest.approx(0.3125)
        np.testing.assert_array_equal(
            accumulator.progress.residual_counts() * accumulator.progress.grid,
            [0.1875, -0.25],
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_another_scale_leaves_the_residual(self, dtype):
        module = Vector([0.0, 0.0], dtype)
        accumulator = make(module)
        accumulator.progress.scale_(0.5)
        module.step(0.5, -0.25)
        before = accumulator.progress.residual_counts()

        accumulator.progress.scale_(0.25)

        np.testing.assert_array_equal(accumulator.progress.residual_counts(), before)
        assert module.first.tolist() == [1.0, -0.5]

    def test_a_state_that_is_taken_over_leaves_it_too(self):
        module, accumulator = scaled([0.5, -0.25], 0.25)
        before = accumulator.progress.residual_counts()
        state = np.array([16, 32], np.int32)

        accumulator.progress.replace_shared_(state, accumulator.progress.grid)

        np.testing.assert_array_equal(accumulator.progress.residual_counts(), before)
        ahead = module.first.detach().numpy() - state * accumulator.progress.grid
        np.testing.assert_allclose(ahead, [0.5, -0.25])

    def test_clipped_is_what_the_group_does_not_get(self):
        rule = ResidualClipping(1.0, 1)
        _, accumulator = scaled([4.0], 0.25, residual=rule)
        accumulator.take_(proposed(accumulator))  # the first one never cuts
        assert accumulator.clipped == 0.0
        accumulator.take_(proposed(accumulator))

        # A share of 1, of quanta of 1/16: two were sent, one stays.
        assert accumulator.clipped == pytest.approx(1 - 3 / 16)
        assert accumulator.progress.residual_norm() == pytest.approx(1 / 16)

    @pytest.mark.parametrize("dense", [False, True])
    def test_with_all_residuals_shared_is_the_mean_of_the_replicas(self, dense):
        moves = ([0.75, -1.0, 0.3], [0.25, 0.5, -0.1], [1.0, 0.0, 0.01])
        group = [scaled(values, 1 / 3) for values in moves]
        frames = []
        for i, (_, accumulator) in enumerate(group):
            proposals = (
                [accumulator.propose_dense()] if dense else accumulator.propose()
            )
            for proposal in proposals:
                frames.append((i, proposal.encode(codec.Stamp(1, i, 1, 1))))
                accumulator.take_(proposal)
            stamp, counts = codec.Stamp(1, i, 2, 1), accumulator.progress.hand_over_()
            frames.append(
                (i, codec.encode_dense(stamp, accumulator.progress.grid, counts))
            )
        for i, (_, accumulator) in enumerate(group):
            for origin, frame in frames:
                if origin != i:
                    accumulator.progress.apply_(codec.decode(frame.tobytes()))

        mean = torch.tensor(moves).mean(0)
        for module, accumulator in group:
            torch.testing.assert_close(module.first.data, mean, rtol=0, atol=1e-6)
            shared = accumulator.progress.shared_counts() * accumulator.progress.grid
            np.testing.assert_allclose(shared, mean, rtol=0, atol=1e-6)
