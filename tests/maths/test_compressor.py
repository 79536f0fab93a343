"""What one compressor proposes, commits and goes on from; and thresholds by name.

test_conservation.py has several.
"""

import copy
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from daskdl import codec
from daskdl.codec import Stamp, counts_of, decode_sum, encode_sum
from daskdl.compression.kernels import GUARD
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.compression.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.compression.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    LayerThresholds,
    Outcome,
    ThresholdAlgorithm,
)
from daskdl.errors import OptionError
from tests.support.updates import GRID, Vector, make, proposed


class TestPropose:
    def test_the_threshold_is_put_on_the_grid(self):
        compressor = make(Vector([0.5]), FixedThreshold(1.2e-3))

        update = proposed(compressor)

        assert (
            update.quantum_count == 20133
        )  # 20132.66 steps: the nearest, not the first
        assert update.quantum == update.quantum_count * GRID
        assert update.quantum == np.float32(update.quantum)
        assert update.threshold == 1.2e-3

    @pytest.mark.parametrize(
        ("value", "count"), [(GRID / 1000, 1), (1e9, MAX_COUNT)], ids=["low", "high"]
    )
    def test_the_threshold_is_limited_to_the_range_of_the_grid(self, value, count):
        update = proposed(make(Vector([0.5]), FixedThreshold(value)))

        assert update.quantum_count == count
        assert update.threshold == count * GRID

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
    def test_a_rule_must_return_a_positive_number(self, value):
        class Odd(ThresholdAlgorithm):
            def next_threshold(self, residual, last):
                return value

        with pytest.raises(OptionError, match=f"finite and > 0, got {value} from"):
            make(Vector([0.5]), Odd()).propose()


THRESHOLDS = st.floats(2 * GRID, MAX_COUNT * GRID)


class TestSums:
    """Updates that are summed on their way have quanta that are powers of two."""

    @staticmethod
    def summed(threshold):
        module = Vector([0.0])
        compressor = make(module, FixedThreshold(threshold), summed=True)
        module.step(0.5)
        return proposed(compressor)

    @given(THRESHOLDS)
    def test_a_quantum_is_just_below_its_threshold(self, threshold):
        update = self.summed(threshold)

        change = update.quantum / threshold
        assert 0.5 * (1 - 1e-12) <= change <= 1 + 1e-12
        assert update.threshold == threshold  # from which its algorithm goes on

    @given(st.lists(THRESHOLDS, min_size=2, max_size=5))
    def test_a_sum_has_a_large_unit(self, thresholds):
        proposals = [self.summed(threshold) for threshold in thresholds]
        updates = [
            codec.decode(update.encode(Stamp(1, origin, 1, 1)))
            for origin, update in enumerate(proposals)
        ]

        total = decode_sum(encode_sum(1, updates))

        assert total.threshold >= min(update.quantum for update in proposals)

    @pytest.mark.parametrize(
        ("value", "count"), [(GRID / 1000, 1), (1e9, MAX_COUNT)], ids=["low", "high"]
    )
    def test_a_quantum_stays_in_the_range_of_the_grid(self, value, count):
        assert self.summed(value).quantum_count == count


class TestCommit:
    def test_the_algorithm_gets_the_outcome_of_the_last_exchange(self):
        module = Vector([0.0, 0.0, 0.0, 0.0])
        rule = AdaptiveThreshold(initial=1e-3, max_density=0.1, decay=0.5)
        compressor = make(module, rule)
        module.step(0.5, 0.0, 0.0, 0.0)

        compressor.commit_(proposed(compressor))

        assert compressor.sent == {"*": Outcome(1e-3, 0.25)}
        assert compressor.groups["*"].exchanges == 1
        assert proposed(compressor).threshold == 2e-3

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

    def test_clipped_mass_adds_up(self):
        module = Vector([0.0])
        compressor = make(module, residual=ResidualClipping(1.0, frequency=1))

        clipped = []
        for _ in range(3):
            module.step(2.0)
            compressor.commit_(proposed(compressor))
            clipped.append(compressor.clipped)

        assert clipped[0] == 0  # the first exchange clips nothing
        assert 0 < clipped[1] < clipped[2]


class TestLead:
    def test_a_committed_quantum_moves_local_back_by_the_share_of_the_others(self):
        quantum, module = 2.0**-4, Vector([0.0] * 3)
        compressor = make(module)
        assert compressor.vector.set_scale_(0.25) == 1.0
        module.step(5 * quantum, -4 * quantum, quantum)

        compressor.commit_(proposed(compressor))

        # Ahead of shared by 5 and 4 quanta before, by 1 and 0 now.
        assert module.first.tolist() == [2 * quantum, -quantum, quantum]
        shared = compressor.vector.shared_counts() * compressor.vector.grid
        assert shared.tolist() == [quantum, -quantum, 0]


class TestCommitDense:
    def test_rounding_errors_stay_in_the_residual(self):
        module = Vector([0.0, 0.0])
        compressor = make(module)
        module.step(127 * 10 * GRID, 14 * GRID)

        for sent, left in [([1270, 10], [0, 4]), ([0, 4], [0, 0])]:
            [update] = compressor.propose(dense=True)
            compressor.commit_(update)
            assert counts_of(update.quantized).tolist() == sent
            assert compressor.vector.residual_counts().tolist() == left

    def test_shared_stays_within_the_guard_but_for_rounding(self):
        module = Vector([0.0])
        compressor = make(module)
        module.step(GRID * 2.0**31)

        [update] = compressor.propose(dense=True)

        assert counts_of(update.quantized).tolist()[0] <= GUARD * (1 + 2**-20)


# Steps move parameters by 25 quanta: more than an entry sends, so some are clipped.
STEADY = AdaptiveThreshold(initial=0.002, max_density=0.3)
LAYERS = {"first": FixedThreshold(0.003), "*": STEADY}
FLOAT32, FLOAT64 = 1e-6, 1e-14  # roundings of numbers about 1


class Net(nn.Module):
    """With parameters of one type, or of two."""

    def __init__(self, dtype=torch.float32, second=None):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(40, generator=generator)
        self.first = nn.Parameter(start[:24].to(dtype))
        self.second = nn.Parameter(start[24:].to(second or dtype))

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * noise.to(parameter.dtype)


class Replica:
    """A module and its compressor."""

    def __init__(self, seed=0, scale=0.5, threshold=STEADY, apply="eager", **types):
        self.module, self.seed = Net(**types), seed
        residual = ResidualClipping(1.0, 1)
        self.compressor = make(self.module, threshold, residual, apply=apply)
        self.compressor.vector.set_scale_(scale)

    def train(self, steps=3, others=()):
        for step in range(steps):
            self.module.step(100 * self.seed + step)
            self.compressor.vector.sync_from_parameters_()
            for update in self.compressor.propose():
                self.compressor.commit_(update)
                for peer in others:
                    peer.apply(update)
        return self

    def apply(self, update):
        frame = update.encode(codec.Stamp(0, 0, 1, 1))
        self.compressor.vector.apply_(codec.decode(frame.tobytes()))

    def state(self):
        return copy.deepcopy(self.compressor.state())

    def residual(self):
        vector = self.compressor.vector
        parts = [vector.residual(group, slice(None)) for group in vector.groups]
        return torch.cat([part.double() for part in parts]).numpy()

    def vectors(self):
        self.compressor.vector.sync_from_parameters_()
        groups = self.compressor.vector.groups
        tensors = [t for g in groups for t in (g.flat, g.local_N, g.shared_N)]
        return [tensor.clone() for tensor in tensors]


TYPES = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "two": {"dtype": torch.bfloat16, "second": torch.float64},
}
each_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
each_way = pytest.mark.parametrize("apply", ["eager", "strict"])


@each_type
@each_way
@pytest.mark.parametrize("threshold", [STEADY, LAYERS], ids=["one rule", "two"])
def test_a_restored_compressor_continues_bit_for_bit(types, apply, threshold):
    options = {"apply": apply, "threshold": threshold, **types}
    saved, restored = Replica(**options).train(), Replica(scale=1.0, **options)
    shared, per_replica = saved.state()

    restored.compressor.restore_(shared, [per_replica])

    assert (
        restored.compressor.vector.local_factor == saved.compressor.vector.local_factor
    )
    assert restored.compressor.clipped == saved.compressor.clipped > 0
    assert restored.compressor.vector.digest() == saved.compressor.vector.digest()
    for step in range(3):  # and they stay so
        assert all(map(torch.equal, restored.vectors(), saved.vectors())), step
        assert restored.compressor.sent == saved.compressor.sent
        exchanges = (
            [g.exchanges for g in r.compressor.groups.values()]
            for r in (saved, restored)
        )
        assert len({tuple(counts) for counts in exchanges}) == 1
        saved.train(1)
        restored.train(1)


@each_type
@each_way
@pytest.mark.parametrize("scale", [1 / 3, 1.0])
def test_the_residuals_of_several_restored_states_add_up(types, apply, scale):
    options = {"scale": scale, "apply": apply, **types}
    replicas = [Replica(seed, **options) for seed in range(3)]
    for replica in replicas:
        others = [peer for peer in replicas if peer is not replica]
        replica.train(others=others)
    replicas[2].compressor.vector.set_scale_(0.7)  # as if others had left it
    shared = replicas[0].state()[0]
    expected = sum(replica.residual() for replica in replicas)
    assert np.abs(expected).max() > 1e-3

    joined = Replica(9, **{**options, "scale": 0.5})
    joined.compressor.restore_(shared, [replica.state()[1] for replica in replicas])

    atol = FLOAT64 if types["dtype"] is torch.float64 else FLOAT32
    np.testing.assert_allclose(joined.residual(), expected, rtol=0, atol=atol)
    assert joined.compressor.vector.digest() == replicas[0].compressor.vector.digest()
    joined.compressor.vector.set_scale_(1.0)  # alone from now on
    np.testing.assert_allclose(joined.residual(), expected, rtol=0, atol=2 * atol)
    clipped = sum(replica.compressor.clipped for replica in replicas)
    assert joined.compressor.clipped == pytest.approx(clipped)


SMALL, LARGE = FixedThreshold(2.0**-6), FixedThreshold(2.0**-3)
NAMES = ["embedding.weight", "0.weight", "0.bias", "1.weight", "1.bias"]


class TestAssign:
    def test_the_first_pattern_that_matches_is_taken(self):
        mapping = {"0.*": SMALL, "*.bias": LARGE, "*": SMALL}

        patterns = LayerThresholds.of(mapping).assign(NAMES)

        assert list(patterns.values()) == ["*", "0.*", "0.*", "*", "*.bias"]

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            (
                {"*.bias": SMALL, "[01].*": LARGE},
                "no pattern that parameter 'embedding.weight' matches, got ",
            ),
            ({"*.biases": SMALL, "*": LARGE}, "'*.biases' matches no trainable"),
            ({"*": SMALL, "0.*": LARGE}, "'0.*' gets no parameter: '0.weight' and all"),
        ],
        ids=["no pattern", "no parameter", "too late"],
    )
    def test_mappings_that_do_not_fit_the_parameters_are_refused(
        self, mapping, message
    ):
        with pytest.raises(OptionError, match=re.escape(message)):
            LayerThresholds.of(mapping).assign(NAMES)


class Layers(nn.Module):
    """Three parameters of four numbers, the last one in a group of its own."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.two = nn.Parameter(torch.zeros(4))
        self.last = nn.Parameter(torch.zeros(4, dtype=dtype))

    def step(self, **amounts):
        with torch.no_grad():
            for name, amount in amounts.items():
                getattr(self, name)[1] += amount


MAPPING = {"bias": SMALL, "*": LARGE}


def sent_entries(update):
    """The entries of an update as others decode them."""
    frame = update.encode(codec.Stamp(0, 0, 1, 1))
    return codec.decode(frame.tobytes()).entries_K.tolist()


class TestCompressor:
    def test_each_pattern_has_its_threshold_and_whole_model_positions(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(first=2.0**-5, bias=-(2.0**-5), two=0.25, last=-0.25)

        bias, rest = compressor.propose()

        assert (bias.pattern, bias.quantum) == ("bias", 2.0**-6)
        assert (rest.pattern, rest.quantum) == ("*", 2.0**-3)
        assert sent_entries(bias) == [-6]
        assert sent_entries(rest) == [10, -14]
        assert bias.pack().size == rest.pack().size == 16

    def test_the_least_often_committed_pattern_comes_first(self):
        compressor = make(Layers(), {"bias": SMALL, "first": SMALL, "*": LARGE})

        compressor.commit_(compressor.propose()[0])
        order = [update.pattern for update in compressor.propose()]

        assert order == ["first", "*", "bias"]

    def test_the_residual_rule_gets_each_threshold_and_count_of_exchanges(self):
        seen = []

        class Seeing(ResidualPostProcessor):
            def bound(self, exchange, threshold):
                seen.append((exchange, threshold))
                return math.inf

        compressor = make(Layers(), MAPPING, Seeing())
        bias, rest = compressor.propose()
        for update in (bias, rest, bias):
            compressor.commit_(update)

        assert seen == [(0, 2.0**-6), (0, 2.0**-3), (1, 2.0**-6)]

    def test_a_dense_exchange_is_one_of_all_patterns(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(bias=3 * GRID, last=-GRID)

        compressor.commit_(*compressor.propose(dense=True))

        assert compressor.vector.farthest() == 0.0
        assert compressor.sent == {
            "bias": Outcome(2.0**-6, DENSE_DENSITY),
            "*": Outcome(2.0**-3, DENSE_DENSITY),
        }


class TestLevels:
    """Entries carry several quanta where that is more for their bytes."""

    def test_a_long_residual_leaves_with_one_update(self):
        module = Vector([0.0] * 100)
        compressor = make(module, FixedThreshold(2.0**-4))
        module.step(*[2.0**-4 * quanta for quanta in range(100)])

        update = proposed(compressor)
        compressor.commit_(update)

        assert update.pack().kind is codec.Kind.LEVELS
        residual = compressor.vector.residual_counts() / round(update.quantum_count)
        assert residual.tolist() == [max(0, quanta - 15) for quanta in range(100)]

    @pytest.mark.parametrize("apply", ["eager", "strict"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_what_was_sent_and_what_is_left_is_what_was_made(self, apply, dtype):
        module = Vector([0.0] * 40, dtype, second=[0.0] * 40)
        compressor = make(module, FixedThreshold(2.0**-6), apply=apply)
        compressor.vector.set_scale_(0.5)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.randn(40, generator=generator).to(parameter.dtype)
        compressor.vector.sync_from_parameters_()
        before = compressor.vector.residual_counts().astype(np.int64)

        update = proposed(compressor)
        frame = update.encode(codec.Stamp(0, 0, 1, 1))
        compressor.commit_(update)

        sent = np.zeros(80, np.int64)
        decoded = codec.decode(frame)
        sent[np.abs(decoded.entries_K) - 1] = decoded.quanta_K * update.quantum_count
        after = compressor.vector.residual_counts().astype(np.int64)
        assert decoded.levels_K.max() == 15
        # A step of the grid for each rounding: before, local, after.
        np.testing.assert_allclose(before, sent + after, rtol=0, atol=3)
