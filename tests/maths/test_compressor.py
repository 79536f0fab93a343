"""What one compressor proposes and commits; test_conservation.py has several.

What one compressor does when everything is sent, in eight bits.

What a compressor goes on from: of one replica exactly, of several all they had.

Threshold algorithms by the names of parameters, alone and in a compressor.
"""

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import codec
from daskdl.codec import Stamp, counts_of, decode
from daskdl.errors import OptionError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    DENSE_DENSITY,
    AdaptiveThreshold,
    FixedThreshold,
    LayerThresholds,
    LinkThreshold,
    Sent,
    ThresholdAlgorithm,
)
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.updates import GRID, Vector, make, proposed


class TestPropose:
    def test_the_threshold_is_put_on_the_grid(self):
        compressor = make(Vector([0.5]), FixedThreshold(1.2e-3))

        update = proposed(compressor)

        assert update.count == 20133  # 20132.66 steps: the nearest, not the first
        assert update.threshold == update.count * GRID
        assert update.threshold == np.float32(update.threshold)
        assert update.chosen == 1.2e-3

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


STAMP = Stamp(1, 0, 1, 1)


def taken(compressor):
    """Propose densely, take it, and return what it moves shared by."""
    [update] = compressor.propose(dense=True)
    compressor.commit_(update)
    return counts_of(update.quantized).tolist()


class TestProposeDense:
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


class TestCommitDense:
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

    def test_what_rounding_leaves_stays_in_the_residual(self):
        module = Vector([0.0, 0.0])
        compressor = make(module)
        module.step(127 * 10 * GRID, 14 * GRID)

        assert taken(compressor) == [1270, 10]
        assert compressor.vector.residual_counts().tolist() == [0, 4]
        assert taken(compressor) == [0, 4]


class TestThresholdAfterDense:
    RULE = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)

    def test_it_counts_as_a_dense_message(self):
        compressor = make(Vector([0.0]), self.RULE)

        taken(compressor)

        assert compressor.sent == {"*": Sent(1e-3, DENSE_DENSITY)}
        assert compressor.groups["*"].exchanges == 1


STEADY = AdaptiveThreshold(initial=0.02, max_density=0.3)
LAYERS = {"first": FixedThreshold(0.03), "*": STEADY}
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
        self.own = make(self.module, threshold, residual, apply=apply)
        self.own.vector.set_scale_(scale)

    def train(self, steps=3, others=()):
        for step in range(steps):
            self.module.step(100 * self.seed + step)
            self.own.vector.sync_from_parameters_()
            for update in self.own.propose():
                self.own.commit_(update)
                for other in others:
                    other.apply(update)
        return self

    def apply(self, update):
        from daskdl import codec

        frame = update.encode(codec.Stamp(0, 0, 1, 1))
        self.own.vector.apply_(codec.decode(frame.tobytes()))

    def state(self):
        return copy.deepcopy(self.own.state())

    def residual(self):
        vector = self.own.vector
        parts = [vector.residual(group, slice(None)) for group in vector.groups]
        return torch.cat([part.double() for part in parts]).numpy()

    def vectors(self):
        self.own.vector.sync_from_parameters_()
        groups = self.own.vector.groups
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
def test_one_that_goes_on_is_the_same_bit_for_bit(types, apply, threshold):
    options = {"apply": apply, "threshold": threshold, **types}
    one, other = Replica(**options).train(), Replica(scale=1.0, **options)
    shared, own = one.state()

    other.own.restore_(shared, [own])

    assert other.own.vector.lead == one.own.vector.lead
    assert other.own.clipped == one.own.clipped > 0
    assert other.own.vector.digest() == one.own.vector.digest()
    for step in range(3):  # and they stay so
        assert all(map(torch.equal, other.vectors(), one.vectors())), step
        assert other.own.sent == one.own.sent
        exchanges = ([g.exchanges for g in r.own.groups.values()] for r in (one, other))
        assert len({tuple(counts) for counts in exchanges}) == 1
        one.train(1)
        other.train(1)


@each_type
@each_way
@pytest.mark.parametrize("scale", [1 / 3, 1.0])
def test_of_several_the_residuals_add_up(types, apply, scale):
    options = {"scale": scale, "apply": apply, **types}
    replicas = [Replica(seed, **options) for seed in range(3)]
    for replica in replicas:
        others = [other for other in replicas if other is not replica]
        replica.train(others=others)
    replicas[2].own.vector.set_scale_(0.7)  # as if others had left it
    shared = replicas[0].state()[0]
    expected = sum(replica.residual() for replica in replicas)
    assert np.abs(expected).max() > 0.01

    one = Replica(9, **{**options, "scale": 0.5})
    one.own.restore_(shared, [replica.state()[1] for replica in replicas])

    atol = FLOAT64 if types["dtype"] is torch.float64 else FLOAT32
    np.testing.assert_allclose(one.residual(), expected, rtol=0, atol=atol)
    assert one.own.vector.digest() == replicas[0].own.vector.digest()
    one.own.vector.set_scale_(1.0)  # alone from now on
    np.testing.assert_allclose(one.residual(), expected, rtol=0, atol=2 * atol)
    clipped = sum(replica.own.clipped for replica in replicas)
    assert one.own.clipped == pytest.approx(clipped)


def carry(one, other):
    shared, own = one.own.state()
    other.own.restore_(shared, [own])


class TestThresholds:
    """Thresholds go on; those of patterns that are new begin."""

    @pytest.fixture
    def trained(self):
        return Replica(threshold=LAYERS).train()

    def test_what_was_sent_last_and_how_often(self, trained):
        other = Replica(threshold=LAYERS)

        carry(trained, other)

        assert other.own.sent == trained.own.sent
        assert {g.exchanges for g in other.own.groups.values()} == {3}


SMALL, LARGE = FixedThreshold(2.0**-6), FixedThreshold(2.0**-3)
NAMES = ["embedding.weight", "0.weight", "0.bias", "1.weight", "1.bias"]


def assigned(mapping, names=NAMES):
    return LayerThresholds.of(mapping).assign(names)


class TestAssign:
    def test_the_first_pattern_that_matches_is_taken(self):
        mapping = {"0.*": SMALL, "*.bias": LARGE, "*": SMALL}

        assert assigned(mapping) == {
            "embedding.weight": "*",
            "0.weight": "0.*",
            "0.bias": "0.*",
            "1.weight": "*",
            "1.bias": "*.bias",
        }

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            (
                {"*.bias": SMALL, "[01].*": LARGE},
                "threshold has no pattern that parameter 'embedding.weight' matches, "
                "got ['*.bias', '[01].*']; end it with '*' for all others",
            ),
            (
                {"*.biases": SMALL, "*": LARGE},
                "threshold pattern '*.biases' matches no trainable parameter of the "
                "model, which are 'embedding.weight', '0.weight', '0.bias', "
                "'1.weight', '1.bias'",
            ),
            (
                {"*": SMALL, "0.*": LARGE},
                "threshold pattern '0.*' gets no parameter: '0.weight' and all others "
                "that it matches go to '*'",
            ),
        ],
        ids=["no pattern", "no parameter", "too late"],
    )
    def test_what_does_not_fit_is_named(self, mapping, message):
        with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
            assigned(mapping)


class TestValue:
    def test_it_is_frozen_hashed_and_pickled(self):
        one = LayerThresholds.of({"a": SMALL, "*": LARGE})

        other = pickle.loads(pickle.dumps(one))

        assert (one == other, hash(one) == hash(other)) == (True, True)
        with pytest.raises(AttributeError):
            one.pairs = ()

    def test_one_that_follows_the_link_has_none_beside_it(self):
        with pytest.raises(
            OptionError,
            match=r"pattern '\*' has .* the link, got LinkThreshold.* alone",
        ):
            GradientSharing({"a": SMALL, "*": LinkThreshold()})


class Layers(nn.Module):
    """Three parameters of four numbers, the last one in a group of its own."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.two = nn.Parameter(torch.zeros(4))
        self.last = nn.Parameter(torch.zeros(4, dtype=dtype))

    def step(self, **amounts):
        with torch.no_grad():
            for name, amount in amounts.items():
                getattr(self, name)[1] += amount


MAPPING = {"bias": SMALL, "*": LARGE}


class TestCompressor:
    def test_each_pattern_has_its_threshold_and_whole_model_positions(self):
        module = Layers()
        compressor = make(module, MAPPING)
        module.step(one=2.0**-5, bias=-(2.0**-5), two=0.25, last=-0.25)

        bias, rest = compressor.propose()

        assert (bias.pattern, bias.threshold) == ("bias", 2.0**-6)
        assert (rest.pattern, rest.threshold) == ("*", 2.0**-3)
        assert bias.entries_K.tolist() == [-6]
        assert rest.entries_K.tolist() == [10, -14]
        assert bias.size == rest.size == 16

    def test_what_was_taken_least_often_comes_first(self):
        compressor = make(Layers(), {"bias": SMALL, "one": SMALL, "*": LARGE})

        compressor.commit_(compressor.propose()[0])
        order = [update.pattern for update in compressor.propose()]

        assert order == ["one", "*", "bias"]

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
            "bias": Sent(2.0**-6, DENSE_DENSITY),
            "*": Sent(2.0**-3, DENSE_DENSITY),
        }
