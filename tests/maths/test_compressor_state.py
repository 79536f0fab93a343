"""What a compressor goes on from: of one replica exactly, of several all they had."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.residuals import KeepResidual, ResidualClipping
from daskdl.thresholds import AdaptiveThreshold, FixedThreshold, Sent
from tests.support.updates import Vector, make

RULE = AdaptiveThreshold(initial=0.02, max_density=0.3)
LAYERS = {"first": FixedThreshold(0.03), "*": RULE}
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

    def __init__(self, seed=0, scale=0.5, threshold=RULE, apply="eager", **types):
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
@pytest.mark.parametrize("threshold", [RULE, LAYERS], ids=["one rule", "two"])
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
def test_its_state_goes_on_changing_and_is_not_changed_by_another(types):
    one, other = Replica(**types).train(), Replica(**types)
    shared, own = one.own.state()
    before = one.vectors()

    other.own.restore_(shared, [own])
    other.train()

    assert all(map(torch.equal, one.vectors(), before))
    local = own["local"][0].clone()
    one.train()
    assert not torch.equal(own["local"][0], local)


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


@each_type
@each_way
def test_of_none_there_is_no_residual(types, apply):
    one, other = Replica(apply=apply, **types).train(), Replica(apply=apply, **types)

    other.own.restore_(one.state()[0], [])

    assert other.own.vector.farthest() == 0.0
    assert other.own.vector.digest() == one.own.vector.digest()
    assert (other.own.clipped, other.own.sent) == (0.0, {})


def test_a_grid_that_was_coarsened_is_taken_over():
    one, other = (make(Vector([0.5, 0.25]), residual=KeepResidual()) for _ in "ab")
    one.vector.replace_shared_(np.array([3, -5], np.int32), 2.0**-10)

    shared, own = one.state()
    other.restore_(shared, [own])

    assert other.vector.grid == 2.0**-10
    assert other.vector.digest() == one.vector.digest()


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

    def test_a_pattern_that_is_new_begins(self, trained):
        other = Replica(threshold={"second": RULE, "*": RULE})

        carry(trained, other)

        assert other.own.groups["*"].exchanges == 3
        assert other.own.groups["second"].exchanges == 0
        assert other.own.groups["second"].sent is None

    def test_one_that_never_sent_has_no_outcome(self):
        one, other = Replica(), Replica()

        carry(one, other)

        assert other.own.sent == {}

    def test_what_a_link_was_measured_to_be_is_left_out(self, trained):
        group = trained.own.groups["*"]
        group.sent = Sent(0.25, 0.5, link="of this replica")
        other = Replica(threshold=LAYERS)

        carry(trained, other)

        assert other.own.groups["*"].sent == Sent(0.25, 0.5)
