"""What the vectors of a model do with updates, at a barrier, and as a newcomer."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.codec import DenseUpdate
from daskdl.compression.flat import (
    FLOATING,
    INTEGER,
    FlatParameters,
    Untrained,
    average_untrained,
    grid_for,
    load_counts_,
    load_untrained_,
)
from daskdl.compression.kernels import CHUNK
from daskdl.compression.replica_vector import (
    MAX_COUNT,
    NEIGHBORS,
    GroupEntries,
    ResidualView,
)
from daskdl.errors import CodecError, ModelError, RunError
from tests.support.updates import GRID, STAMP, Vector, sparse, whole

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sparse_layer():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    return module


def too_wide():
    module = nn.Module()
    module.wide = nn.Parameter(torch.zeros(1).expand(2**31))
    return module


def not_finite():
    module = net()
    module[2].bias.data[1] = math.nan
    return module


class TestFlatParameters:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parameters_become_views_with_their_values(self, dtype):
        module = net().to(dtype)
        before = [p.detach().clone() for p in module.parameters()]

        flat = FlatParameters(module)

        assert [group.flat.dtype for group in flat.groups] == [dtype]
        for kept, parameter in zip(before, module.parameters(), strict=True):
            assert torch.equal(parameter, kept)
        flat.groups[0].flat.fill_(0.5)
        assert all(bool((p == 0.5).all()) for p in module.parameters())

    def test_each_dtype_has_a_group_of_its_own(self):
        module = net()
        module[1].to(torch.float64)

        flat = FlatParameters(module)

        assert flat.size == 12 + 4 + 8 + 8 + 2
        groups = [(group.flat.dtype, group.start) for group in flat.groups]
        assert groups == [(torch.float32, 0), (torch.float64, 26)]
        assert [name[0] for name in flat.slices] == ["0", "0", "2", "2", "1", "1"]
        assert flat.slices["1.bias"] == slice(30, 34)

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (nn.ReLU(), "no trainable parameters"),
            (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
            (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64"),
            (nn.LazyLinear(2), "'weight' is not initialized"),
            (nn.Linear(2, 2, device="meta"), "'weight' is not initialized"),
            (sparse_layer(), r"'weight' is torch.float32 \(torch.sparse_coo\)"),
            (too_wide(), r"has 2147483648 .* limit is 2147483647"),
            (not_finite(), r"'2.bias' has values that are not finite"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    @pytest.mark.filterwarnings("ignore:Lazy modules")
    def test_modules_that_cannot_be_trained_are_refused(self, module, message):
        with pytest.raises(ModelError, match=message):
            FlatParameters(module)

    @pytest.mark.parametrize("trained", [0, 1], ids=["outer", "inner"])
    def test_two_parameters_in_one_memory_are_refused(self, trained):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = nn.Parameter(module[0].weight.data[1:])
        module[1 - trained].weight.requires_grad_(False)

        with pytest.raises(ModelError, match=r"'0.weight' and '1.weight' share memory"):
            FlatParameters(module)


class TestGrid:
    @pytest.mark.parametrize(
        ("largest", "exponent"),
        [(0.0, -24), (0.3, -24), (1.0, -24), (1.0001, -23), (2.0, -23), (-5.0, -21)],
        ids=str,
    )
    def test_the_largest_parameter_decides(self, largest, exponent):
        module = nn.Linear(2, 1)
        nn.init.zeros_(module.weight)
        nn.init.constant_(module.bias, largest)

        assert grid_for(FlatParameters(module)) == 2.0**exponent


class TestLoadCounts:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_counts_come_back_as_parameters(self, dtype):
        module, restored = net().to(dtype), net().to(dtype)
        flat = FlatParameters(restored)
        counts = np.arange(-10, flat.size - 10, dtype=np.int32)
        counts.flags.writeable = False

        load_counts_(module, counts, 0.25)

        values = nn.utils.parameters_to_vector(module.parameters())
        assert torch.equal(values, torch.from_numpy(counts * 0.25).to(dtype))


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


def test_untrained_tensors_are_loaded_as_taken():
    module, restored = of_every_kind(0), of_every_kind(0)
    untrained = Untrained(module)
    module.load_state_dict(of_every_kind(3).state_dict())

    untrained.find_changed()
    arrays = untrained.take()
    for array in arrays.values():
        array.flags.writeable = False  # as what came through Dask
    load_untrained_(restored, arrays)

    assert len(arrays) == 2 + 4
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name])


def mean_of(*parts):
    """The mean of arrays of (floating, integer, examples)."""
    packed = [({FLOATING: np.array(f), INTEGER: np.array(i)}, n) for f, i, n in parts]
    return [array.tolist() for array in average_untrained(packed).values()]


def test_floating_means_are_weighted_and_integers_take_the_maximum():
    assert mean_of(([1.0, 0.0], [3, 9], 30), ([4.0, 1.0], [5, 2], 10)) == [
        [1.75, 0.25],
        [5, 9],
    ]


def test_values_on_which_all_agree_stay_bit_for_bit():
    values = [0.1, -math.inf, math.inf, 1 / 3]

    assert mean_of(*((values, [0], n) for n in (3, 7, 9))) == [values, [0]]


class TestApply:
    def test_a_dense_update_is_applied(self):
        module = Vector([0.0, 0.0], second=[0.0])
        vector = whole(module)
        counts = np.array([2**20, 0, -3], np.int32)
        counts.flags.writeable = False

        vector.apply_(DenseUpdate(STAMP, 3, GRID, counts))

        assert module.first.tolist() == [0.0625, 0.0]
        assert module.second.tolist() == [-3 * GRID]
        assert vector.shared_counts().tolist() == counts.tolist()

    @pytest.mark.parametrize(
        ("update", "message"),
        [
            (sparse(4, [1]), "model has 3 parameters, got 4"),
            (sparse(3, [1], 1.5 * GRID), r"1 to 4194304 whole steps .* got 8.9"),
            (sparse(3, [1], GRID / 2), "whole steps"),
            (sparse(3, [1], (MAX_COUNT + 1) * GRID), "whole steps"),
            (sparse(3, [1], math.nan), "whole steps"),
            (DenseUpdate(STAMP, 3, 2 * GRID, np.ones(3, np.int32)), "grid must be"),
            (DenseUpdate(STAMP, 3, GRID, np.ones(2, np.int32)), "need 3 counts"),
            (DenseUpdate(STAMP, 3, GRID, np.ones(3)), "int32, got float64"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_foreign_updates_are_refused_before_anything_moves(self, update, message):
        module = Vector([0.0, 0.0], second=[0.0])
        vector = whole(module)
        digest = vector.digest()

        with pytest.raises(CodecError, match=message):
            vector.apply_(update)

        assert vector.digest() == digest
        assert [*module.first.tolist(), *module.second.tolist()] == [0.0, 0.0, 0.0]


class TestResidual:
    def test_counts_saturate_and_nan_is_kept_back(self):
        module = Vector([1.0, 0.0, 0.0, -1.0])
        vector = whole(module)
        module.step(1e9, -1e9, math.nan, -math.inf)

        counts = vector.residual_counts()
        flushed = vector.flush_residual_()

        limit = 2**31 - 1
        assert counts.tolist() == [limit - 2**24, -limit, 0, -limit + 2**24]
        assert flushed.tolist() == counts.tolist()
        assert vector.shared_counts().tolist() == [limit, -limit, 0, -limit]

    def test_added_counts_are_residual_whatever_the_lead_of_local(self):
        vector = whole(Vector([0.5, 0.0, 0.0]))
        vector.set_scale_(1 / 4)  # as one of four replicas that send the mean

        vector.add_residual_(np.array([3, 0, -5], np.int32), vector.grid)

        assert vector.residual_counts().tolist() == [3, 0, -5]


class TestSnapshot:
    def test_a_joining_replica_adopts_shared_and_local(self):
        module = Vector([0.5, 0.0], second=[0.0])
        vector = whole(module)
        counts = np.array([7, -8, 9], np.int32)

        vector.replace_shared_(counts, 2.0**-3)

        assert vector.shared_counts().tolist() == [7, -8, 9]
        assert module.first.tolist() == [7 / 8, -1.0]
        assert module.second.tolist() == [9 / 8]
        assert vector.grid == 2.0**-3
        assert vector.farthest() == 0.0

    def test_the_residual_stays_when_shared_is_replaced(self):
        module = Vector([0.5, 0.0])
        vector = whole(module)
        module.step(0.25, 0.0)

        vector.replace_shared_(np.array([4, 0], np.int32), 2.0**-3)

        assert module.first.tolist() == [0.5 + 0.25, 0.0]
        assert vector.residual_counts().tolist() == [2, 0]

    def test_an_own_dense_update_moves_local_back_by_the_share_of_the_others(self):
        module = Vector([0.0, 0.0])
        vector = whole(module)
        vector.set_scale_(0.25)
        module.step(8 * GRID, 0.0)

        vector.apply_counts_(np.array([2, 0], np.int32), from_residual=True)

        assert module.first.tolist() == [2 * GRID, 0.0]  # ahead of shared by nothing
        assert vector.residual_counts().tolist() == [0, 0]


class TestDigest:
    @pytest.mark.parametrize("place", [0, 1, 2], ids=str)
    def test_one_step_anywhere_changes_the_digest(self, place):
        vector = whole(Vector([0.5, 0.1], second=[0.0]))
        before, counts = vector.digest(), np.zeros(3, np.int32)
        counts[place] = 1

        vector.apply_counts_(counts)

        assert vector.digest() != before

        assert vector.digest() != before

    def test_another_grid_changes_the_digest(self):
        coarse, fine = (whole(Vector([0.5, 0.0])) for _ in range(2))
        counts = fine.shared_counts()

        coarse.replace_shared_(counts, 2 * fine.grid)

        assert coarse.shared_counts().tolist() == counts.tolist()
        assert coarse.digest() != fine.digest()


class TestRegrid:
    @pytest.mark.parametrize(
        ("largest", "factor"),
        [
            (2**28, 1),
            (2**28 + 1, 16),
            (2**29 - 1, 32),
            (-(2**29) + 1, 32),
            (2**30, 64),
            (2**31 - 1, 128),
            (-(2**31), 128),
        ],
        ids=str,
    )
    def test_shared_is_brought_back_when_it_has_grown(self, largest, factor):
        vector = whole(Vector([0.0, 0.0]))
        vector.apply_counts_(np.array([largest, 33], np.int32))

        vector.regrid_()

        assert vector.grid == factor * GRID
        after = int(vector.shared_counts()[0])
        assert after == math.floor(largest / factor + 0.5)
        assert factor == 1 or 2**24 - 1 <= abs(after) < 2**25


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestShowingShared:
    def test_the_module_shows_shared_and_is_restored(self, dtype, strict):
        module = Vector([0.5, 0.25], dtype)
        vector = whole(module, strict)
        module.step(0.1, 0.0)
        vector.sync_from_parameters_()
        before = module.first.clone()

        with vector.showing_shared():
            inside = module.first.tolist()

        assert inside == [0.5, 0.25]
        assert torch.equal(module.first, before)
        assert vector.farthest() == pytest.approx(0.1, rel=2**-6)

    @pytest.mark.parametrize(
        "use",
        [
            lambda vector: vector.apply_(sparse(2, [1])),
            lambda vector: vector.apply_counts_(np.ones(2, np.int32)),
            lambda vector: vector.flush_residual_(),
            lambda vector: vector.regrid_(),
            lambda vector: vector.sync_from_parameters_(),
            lambda vector: vector.residual_counts(),
            lambda vector: vector.replace_shared_(np.zeros(2, np.int32), GRID),
            lambda vector: vector.farthest(),
            lambda vector: vector.commit_(first_entry(vector), 1, math.inf),
            lambda vector: ResidualView(vector, [(vector.groups[0], slice(0, 2))]).find(
                1
            ),
        ],
        ids=[
            *("apply", "counts", "flush", "regrid", "sync"),
            *("residual", "snapshot", "farthest", "commit", "find"),
        ],
    )
    def test_local_cannot_be_used_inside(self, dtype, strict, use):
        vector = whole(Vector([0.5, 0.25], dtype), strict)

        with (
            vector.showing_shared(),
            pytest.raises(RunError, match="shows shared"),
        ):
            use(vector)

        use(vector)


def first_entry(vector):
    """A positive entry at the first position."""
    entries_K, levels_K = torch.tensor([1]).int(), torch.tensor([1]).byte()
    return [GroupEntries(vector.groups[0], entries_K, levels_K)]


def trained(values, dtype, strict, *step):
    """A module of which the optimizer made a step, and its vectors, synced."""
    module = Vector(values, dtype)
    vector = whole(module, strict)
    if step:
        module.step(*step)
        vector.sync_from_parameters_()
    return module, vector, vector.groups[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestHalf:
    """Eager: local is a float32 vector of its own, and the module shows it rounded."""

    def test_quanta_below_the_resolution_add_up(self, dtype):
        module, vector, _ = trained([1.0], dtype, False)

        for _ in range(256):  # a sixteenth of float16's resolution there
            vector.apply_(sparse(1, [1], 2.0**-14))

        assert module.first.item() == 1.0 + 2.0**-6


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
class TestStrict:
    """The module shows shared; local is a vector of its own."""

    def test_own_progress_is_seen_once_it_is_committed(self, dtype):
        module, vector, group = trained([1.0, 1.0], dtype, True, 0.5, 0.5)

        before = module.first.tolist()
        vector.commit_(first_entry(vector), MAX_COUNT, math.inf)

        assert before == [1.0, 1.0]
        assert module.first.tolist() == [1.25, 1.0]
        assert vector.residual(group, slice(None)).tolist() == [0.25, 0.5]


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
def test_vectors_longer_than_a_chunk_are_processed_to_the_end(strict):
    module = Vector([0.25] * (CHUNK + 3), torch.bfloat16)
    vector = whole(module, strict)
    with torch.no_grad():
        module.first[-1] = 0.5

    vector.sync_from_parameters_()

    assert vector.residual_counts().nonzero()[0].tolist() == [CHUNK + 2]
    assert vector.farthest() == 0.25
    before = vector.digest()
    vector.flush_residual_()
    assert vector.digest() != before
    assert module.first[-1] == 0.5


class TestSample:
    """What rules see of the residual."""

    @staticmethod
    def view(*sizes, ranges=None):
        """Of groups in which each residual is its position."""
        module, dtypes = nn.Module(), (torch.float32, torch.float64)
        for name, size, dtype in zip("ab", sizes, dtypes, strict=False):
            values = nn.Parameter(torch.zeros(size, dtype=dtype))
            module.register_parameter(name, values)
        vector = whole(module)
        for group in vector.groups:
            group.flat.copy_(group.start + torch.arange(group.flat.numel()))
        every = [slice(0, group.flat.numel()) for group in vector.groups]
        pairs = enumerate(every) if ranges is None else ranges
        return ResidualView(vector, [(vector.groups[i], where) for i, where in pairs])

    def test_a_sample_has_evenly_spaced_runs(self):
        sample = self.view(100).sample(most=50)

        runs = [
            *range(NEIGHBORS),
            *range(2 * NEIGHBORS, 3 * NEIGHBORS),
            *range(4 * NEIGHBORS, 5 * NEIGHBORS),
        ]
        assert sample.tolist() == [*runs, 96.0, 97.0, 98.0, 99.0]

    def test_runs_are_evenly_spaced_over_ranges_that_are_shorter_than_one(self):
        places = [
            slice(start, start + NEIGHBORS // 2) for start in range(0, 160, NEIGHBORS)
        ]
        apart = self.view(160, ranges=[(0, where) for where in places])
        positions = torch.cat([torch.arange(160)[where] for where in places])
        together = self.view(apart.size)

        sample = apart.sample(most=20)

        assert sample.tolist() == positions[together.sample(most=20).long()].tolist()
        assert len(sample) == 2 * NEIGHBORS
