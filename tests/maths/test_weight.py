"""Local is shared plus so many times the residual: what is sent is its share."""

import numpy as np
import pytest
import torch

from daskdl import codec
from daskdl.residuals import ResidualClipping
from tests.support.compressors import GRID, Vector, make, proposed
from tests.support.kernel_cases import KERNELS

QUANTUM = 64 * GRID


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Kernels and a function that makes their tensors."""
    return request.param


class TestKernels:
    def test_an_entry_is_so_many_quanta_of_local(self, kernel):
        kernels, make = kernel
        local = make([3.9 * QUANTUM, 4 * QUANTUM, -4 * QUANTUM])
        shared = make([0, 0, 0], torch.int32)

        assert kernels.find(local, shared, 64, GRID, 0, 4.0).tolist() == [2, -3]

    def test_a_commit_moves_local_back_by_what_others_are_to_send(self, kernel):
        kernels, make = kernel
        local, shared = (
            make([5 * QUANTUM, -4 * QUANTUM, 1.0]),
            make([0] * 3, torch.int32),
        )
        entries = make([11, -12], torch.int32)

        cut = kernels.commit_(
            local, shared, entries, 64, GRID, QUANTUM / 8, base=10, lead=4.0
        )

        # Ahead of shared by a quantum and none; an eighth of one is kept, 4 times.
        assert local.tolist() == [1.5 * QUANTUM, -QUANTUM, 1.0]
        assert shared.tolist() == [64, -64, 0]
        assert cut == QUANTUM / 8

    def test_the_residual_is_counted_as_it_will_be_sent(self, kernel):
        kernels, make = kernel
        local, shared = make([7 * GRID, -8 * GRID]), make([3, 0], torch.int32)

        counts = kernels.residual_counts(local, shared, GRID, 2**30, 4.0)

        assert counts.tolist() == [1, -2]

    def test_an_own_dense_update_leaves_it(self, kernel):
        kernels, make = kernel
        local, shared = make([12 * GRID]), make([0], torch.int32)

        kernels.apply_counts_(local, shared, make([3], torch.int32), GRID, 1 - 4.0)

        assert shared.tolist() == [3]
        assert local.tolist() == [3 * GRID]


def scaled(values, scale, **options):
    module = Vector([0.0] * len(values))
    compressor = make(module, **options)
    assert compressor.vector.set_scale_(scale) == 1.0
    module.step(*values)
    return module, compressor


class TestCompressor:
    def test_strict_leaves_the_scale_to_the_learning_rate(self):
        module = Vector([0.0])
        compressor = make(module, apply="strict")

        assert compressor.vector.set_scale_(0.25) == 0.25
        module.step(0.5)
        compressor.vector.sync_from_parameters_()
        assert compressor.vector.lead == 1.0
        assert compressor.vector.residual_norm() == 0.5

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

        assert compressor.vector.residual_norm() == pytest.approx(0.3125)
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

    def test_clipped_is_what_the_group_does_not_get(self):
        rule = ResidualClipping(1.0, 1)
        _, compressor = scaled([4.0], 0.25, residual=rule)
        compressor.commit_(proposed(compressor))  # the first one never cuts
        assert compressor.clipped == 0.0
        compressor.commit_(proposed(compressor))

        # A share of 1, of quanta of 1/16: two were sent, one stays.
        assert compressor.clipped == pytest.approx(1 - 3 / 16)
        assert compressor.vector.residual_norm() == pytest.approx(1 / 16)

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
