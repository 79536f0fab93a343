"""Several replicas, any order of events: nothing is lost, and shared agrees.

Replicas step, propose, are refused, take all or some of what they proposed, switch
between entries, eight bits and whole counts, are scaled, and receive each other's
updates late, one by one or folded, each replica in an order of its own. A float64
ledger keeps what every optimizer step added.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daskdl import codec
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import fold_
from daskdl.compression.residuals import KeepResidual, ResidualClipping
from daskdl.compression.thresholds import AdaptiveThreshold, FixedThreshold

SIZES = {"a": (5, 3), "b": (8,), "c": (2, 2, 2)}
# Roundings of hundreds of events in the working type, at values below 8.
TOLERANCE = {torch.float64: 1e-12}
FLOAT32 = 4e-5  # half types too: their local is float32


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SIZES.items():
            start = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(start))
        self.c.data = self.c.data.double()  # a group of its own


class Replica:
    """A compressor, what it has not received yet, and the ledger of its steps."""

    def __init__(self, case, seed):
        self.module = Net(case.dtype)
        parameters = FlatParameters(self.module)
        residual = ResidualClipping(1.5, 2) if case.clipping else KeepResidual()
        rule = AdaptiveThreshold(initial=0.02, max_density=0.3, decay=0.7)
        if case.clipping:  # steps move by more than the 15 quanta of an entry
            rule = FixedThreshold(0.002)
        if case.layers:
            rule = {"b": FixedThreshold(0.03), "[ac]": rule}
        self.momentum = case.momentum
        self.compressor = Compressor(
            parameters, rule, residual, case.apply, case.momentum
        )
        self.start = self.compressor.vector.shared_counts().astype(np.float64)
        self.moved = np.zeros(parameters.size)
        self.scale = 1.0  # so many times an update of the module's counts
        self.strict = case.apply == "strict"
        self.waiting = []
        self.random = np.random.default_rng(seed)

    def step(self, amount=0):
        """Add noise to the parameters; book what they really moved by."""
        moved = []
        for parameter in self.parameters():
            before = parameter.detach().double().clone()
            noise = torch.from_numpy(self.random.normal(0, 0.05, parameter.shape))
            with torch.no_grad():
                parameter += noise.to(parameter.dtype)
            moved.append((parameter.detach().double() - before).flatten())
        self.moved += self.scale * torch.cat(moved).numpy()

    def be_scaled(self, amount):
        """As when others come and go."""
        factor = self.compressor.vector.set_scale_(1 / amount)
        assert factor == (1 / amount if self.strict else 1.0)
        self.scale = 1.0 if self.strict else 1 / amount

    def local(self):
        """Whichever vector it is kept in: no public method shows it."""
        groups = self.compressor.vector.groups
        return torch.cat([group.local_N.double() for group in groups]).numpy().copy()

    def parameters(self):
        named = dict(self.module.named_parameters())
        return [named[name] for name in ("a", "b", "c")]

    def share(self, amount=4):
        """Propose, and take so many of the updates; the updates as they travel."""
        return [self.take(p) for p in self.compressor.propose()[:amount]]

    def share_dense(self, amount=0):
        return [self.take(p) for p in self.compressor.propose(dense=True)]

    def take(self, update):
        frame = update.encode(codec.Stamp(1, 0, 0, 0))
        self.compressor.commit_(update)
        vector = self.compressor.vector
        received = codec.decode(frame, run=1, size=vector.size)
        # Momentum is progress of the replica, too.
        self.moved += self.momentum * vector.grid * counts_of(received, vector.grid)
        return received

    def be_refused(self, amount):
        self.compressor.propose()
        self.compressor.propose(dense=True)

    def sync(self, amount):
        self.compressor.vector.sync_from_parameters_()

    def flush(self, amount=0):
        counts = self.compressor.vector.flush_residual_()
        stamp = codec.Stamp(1, 0, 0, 0)
        frame = codec.encode_dense(stamp, self.compressor.vector.grid, counts)
        return [codec.decode(frame)]

    def receive(self, amount):
        """Apply some of what waits, in an order of its own."""
        self.random.shuffle(self.waiting)
        now, self.waiting = self.waiting[:amount], self.waiting[amount:]
        for update in now:
            self.compressor.vector.apply_(update)

    def receive_folded(self, amount):
        total = np.zeros(self.compressor.vector.size, np.int32)
        for update in self.waiting:
            fold_(total, update, self.compressor.vector.grid)
        self.waiting = []
        self.compressor.vector.apply_counts_(total)


class Case(NamedTuple):
    dtype: torch.dtype
    apply: str
    clipping: bool
    layers: bool = False
    momentum: float = 0.0


EVENTS = [
    *("step", "step", "share", "share_dense", "be_refused", "receive"),
    *("receive_folded", "flush", "sync", "be_scaled"),
]


def run(case, replicas, events):
    group = [Replica(case, seed) for seed in range(replicas)]
    sent = np.zeros(group[0].compressor.vector.size)
    for which, event, amount in events:
        replica = group[which % replicas]
        for update in getattr(replica, event)(amount) or ():
            sent += counts_of(update, replica.compressor.vector.grid)
            for peer in group:
                if peer is not replica:
                    peer.waiting.append(update)
        check(group, sent, case)
    return group, sent


def counts_of(update, grid):
    if isinstance(update, codec.DenseUpdate):
        return update.counts_N.astype(np.float64)
    dense = np.zeros(update.size)
    entries = update.entries_K.astype(np.int64)
    dense[np.abs(entries) - 1] = update.quanta_K * (update.threshold / grid)
    return dense


def check(group, sent, case):
    """Start + all updates = what was sent + all residuals."""
    grid = group[0].compressor.vector.grid
    residuals = np.zeros_like(sent)
    for replica in group:
        replica.compressor.vector.sync_from_parameters_()
        ahead = replica.local() - replica.compressor.vector.shared_counts() * grid
        residuals += replica.scale * ahead
    start = group[0].start
    lost = (
        start * grid + sum(r.moved for r in group) - (start + sent) * grid - residuals
    )
    clipped = sum(replica.compressor.clipped for replica in group)
    allowed = TOLERANCE.get(case.dtype, FLOAT32)
    if case.clipping:
        assert np.abs(lost).sum() <= clipped + allowed * lost.size
    else:
        assert clipped == 0.0
        np.testing.assert_allclose(lost, 0.0, atol=allowed)


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(EVENTS), st.integers(1, 4)),
    min_size=1,
    max_size=40,
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("apply", ["eager", "strict"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestReplicas:
    @pytest.mark.parametrize(
        ("clipping", "layers", "momentum"),
        [
            *((False, False, 0.0), (True, False, 0.0), (False, True, 0.0)),
            *((True, True, 0.0), (False, False, 0.9), (True, True, 0.5)),
        ],
        ids=["kept", "clipped", "kept-layers", "clipped-layers", "momentum", "all"],
    )
    @given(replicas=st.integers(1, 4), events=events)
    @settings(max_examples=20)
    def test_nothing_is_lost_and_shared_agrees(
        self, dtype, apply, clipping, layers, momentum, replicas, events
    ):
        case = Case(dtype, apply, clipping, layers, momentum)
        group, sent = run(case, replicas, events)

        for replica in group:
            replica.receive(len(replica.waiting))
        digests = {replica.compressor.vector.digest() for replica in group}
        assert len(digests) == 1
        np.testing.assert_array_equal(
            group[0].compressor.vector.shared_counts(), group[0].start + sent
        )

    @pytest.mark.parametrize("layers", [False, True], ids=["one", "layers"])
    def test_a_long_run_in_different_orders_ends_bit_identical(
        self, dtype, apply, layers
    ):
        random = np.random.default_rng(5)
        choices = [
            (int(random.integers(4)), str(random.choice(EVENTS)), 3) for _ in range(300)
        ]
        group, sent = run(Case(dtype, apply, False, layers), 4, choices)

        for replica in group:
            replica.receive(len(replica.waiting))
        assert np.count_nonzero(sent) == sent.size
        assert len({replica.compressor.vector.digest() for replica in group}) == 1
        for replica in group[1:]:
            for expected, parameter in zip(
                group[0].parameters(), replica.parameters(), strict=True
            ):
                assert apply == "eager" or torch.equal(expected, parameter)

    def test_a_new_grid_loses_nothing_and_agrees(self, dtype, apply):
        group = [Replica(Case(dtype, apply, False), seed) for seed in range(3)]
        growth = np.full(group[0].compressor.vector.size, 2**29 + 3, np.int32)
        for replica in group:
            replica.step()
            replica.compressor.vector.apply_counts_(growth)
            replica.compressor.vector.sync_from_parameters_()
        before = [replica.local() for replica in group]

        for replica in group:
            replica.compressor.vector.regrid_()

        assert len({replica.compressor.vector.grid for replica in group}) == 1
        assert len({replica.compressor.vector.digest() for replica in group}) == 1
        for replica, local in zip(group, before, strict=True):
            np.testing.assert_array_equal(replica.local(), local)


def test_the_clipped_mass_equals_the_change_of_local():
    replica = Replica(Case(torch.float64, "eager", clipping=True), seed=0)
    missing = []
    for _ in range(9):
        replica.step()
        before = replica.local()
        replica.share()
        missing.append(np.abs(before - replica.local()).sum())

    assert replica.compressor.clipped == pytest.approx(sum(missing), rel=1e-12)
    assert replica.compressor.clipped > 0.05
