"""Replicas reduce models to their mean, exact and rounded, while some fail."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.channel.protocol import MeshTopology
from daskdl.codec import Stamp
from daskdl.codec.dense8 import MOST
from daskdl.errors import CodecError
from daskdl.training.parameter_averaging import RoundDecision, Vote
from daskdl.training.tree_reduce import (
    Key,
    ReduceOp,
    ReduceState,
    TreeMean,
    from_blob,
    to_blob,
)

PATIENCE_S = 30  # of a test that would hang otherwise


class Board:
    """What all offer; what a lost one offers never comes."""

    def __init__(self, lost=()):
        self._changed = threading.Condition()
        self._there = {}
        self._lost = set(lost)
        self.fetches = Counter()  # by who fetched

    def offer(self, replica, name, arrays):
        with self._changed:
            self._there[replica, name] = arrays
            self._changed.notify_all()

    def fetch(self, asking, replica, name):
        key = (replica, name)
        self.fetches[asking] += 1
        with self._changed:
            over = self._changed.wait_for(
                lambda: key in self._there or replica in self._lost, PATIENCE_S
            )
            assert over, f"{name} of replica {replica} did not come to {asking}"
            return self._there.get(key)


class Channel:
    """As much of a channel as a reduction needs."""

    def __init__(self, board, replica):
        self.publish_blob = partial(board.offer, replica)
        self.fetch_blob = partial(board.fetch, replica)


REPLICAS = 5
ALL = range(REPLICAS)
PARAMETERS = Key(ReduceOp.SUM, "parameters")


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Team:
    """Replicas of a model, that train each in a direction of its own."""

    def __init__(self, optimizer=momentum, dtype=torch.float64, outer=None):
        self.modules, self.optimizers, self.states = [], [], []
        for _ in ALL:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)).to(dtype)
            self.modules.append(module)
            self.optimizers.append(optimizer(list(module.parameters())))
            state = ReduceState(module, self.optimizers[-1], outer, compressed=True)
            self.states.append(state)
        self.rounds = 0
        self.moved = {}  # sum of the true means of differences, by name
        self.start = self.linear(0)

    def linear(self, replica):
        whole = self.states[replica].take(1.0)
        return {key: np.array(a) for key, a in whole.items() if key.linear}

    def train(self, replicas=ALL):
        for r in replicas:
            torch.manual_seed(100 * self.rounds + r)
            module = self.modules[r]
            self.states[r].keep_common_()
            x = torch.randn(8, 20, dtype=next(module.parameters()).dtype)
            module(x).pow(3).sum().mul(1e-3).backward()
            self.optimizers[r].step()
            self.optimizers[r].zero_grad()

    def average(self, weights, *, whole=False, reached=True, step=True, fan_out=2):
        """Make a mean; not `reached`: nobody learns that there is one."""
        self.rounds += 1
        for state in self.states:
            state.keep_common_()
        before = [self.linear(r) for r in ALL]
        common = self.states[0].common
        results, terms = self._reduce(weights, whole, fan_out)
        if not reached:
            for state in self.states:
                state.settle_(self.rounds - 1)
            return terms
        for r, state in enumerate(self.states):
            terms[r].load_(results[r], step=step)
            state.settle_(self.rounds)
        for r, weight in weights.items():
            for name, array in before[r].items():
                moved = weight * (array - common.get(name, 0))
                self.moved[name] = self.moved.get(name, 0) + moved
        return terms

    def _reduce(self, weights, whole, fan_out):
        board, routes = Board(), MeshTopology(self.rounds, tuple(ALL), fan_out)
        root = self.rounds % REPLICAS
        terms = [
            TreeMean(
                self.states[r],
                Channel(board, r),
                routes,
                root,
                Stamp(1, r, self.rounds, 1),
                exact=whole,
            )
            for r in ALL
        ]
        with ThreadPoolExecutor(REPLICAS) as pool:
            means = pool.map(lambda r: terms[r].reduce(weights.get(r)), ALL)
            return list(means), terms

    def left(self, name):
        return sum(s.residual.get(name, 0.0) for s in self.states)

    def check_nothing_is_lost(self, rtol=1e-12, atol=1e-15):
        now = self.linear(0)
        assert now.keys() == self.moved.keys()
        for name, array in now.items():
            sent = array - self.start.get(name, 0)
            expected = self.moved[name]
            np.testing.assert_allclose(sent + self.left(name), expected, rtol, atol)

    def check_all_have_the_same(self):
        first = self.states[0].take(1.0)
        for state in self.states[1:]:
            for name, array in state.take(1.0).items():
                np.testing.assert_array_equal(array, first[name])


SOME = {0: 0.5, 1: 0.125, 3: 0.375}


def trained(team, rounds=3):
    for number in range(rounds):
        team.train(SOME)
        team.average(SOME, fan_out=1 + number % 3)
    return team


def test_sums_and_residuals_add_up_to_the_training():
    team = trained(Team())

    team.check_nothing_is_lost()
    team.check_all_have_the_same()
    assert np.abs(team.left(PARAMETERS)).max() > 1e-6


def test_an_exact_mean_delivers_all_residuals():
    team = trained(Team())

    team.average({2: 1.0}, whole=True)

    team.check_nothing_is_lost()
    team.check_all_have_the_same()
    assert [state.residual for state in team.states] == [{}] * REPLICAS


@pytest.mark.parametrize("whole", [True, False])
def test_a_lost_mean_is_computed_again_from_the_same_residuals(whole):
    team = trained(Team(), rounds=3)
    team.train(SOME)

    team.average(SOME, whole=whole, reached=False)
    team.average(SOME)

    team.check_nothing_is_lost()
    team.check_all_have_the_same()


def test_parameters_and_momentum_are_sent_in_eight_bits():
    terms = trained(Team(dtype=torch.float32), 2).average(SOME)

    whole = Team(dtype=torch.float32).average(SOME, whole=True)
    numbers = 20 * 30 + 3 * 30
    assert {one.kind for one in terms} == {"DENSE8"}
    assert {one.kind for one in whole} == {"MEAN"}
    assert terms[0].sent_bytes < 0.4 * 2 * 4 * numbers


STAMP = Stamp(run=7, origin=2, sequence=5, step=40)
KEY = Key(ReduceOp.SUM, "parameters")
NOTHING = np.zeros(())


def rounded(array):
    """A blob, and what rounding leaves."""
    blob, left = to_blob({KEY: array}, STAMP)
    return blob, left.get(KEY, NOTHING)


def read(blob):
    return from_blob(blob)[KEY]


def is_frame(blob, array):
    return blob["0"].dtype == np.uint8 != array.dtype


def normal(size, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1000,), (30, 7, 3)])
def test_decoded_values_plus_residual_are_the_array(shape, dtype):
    array = normal(shape, dtype)

    sent, left = rounded(array)

    got = read(sent)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert 0 < np.abs(left).max() < np.abs(array).max() / MOST
    np.testing.assert_array_equal(got + left, array)


def with_one(value, dtype=np.float32):
    array = normal(1000, dtype)
    array[17] = value
    return array


@pytest.mark.parametrize(
    "array",
    [
        with_one(np.nan),
        with_one(-np.inf),
        with_one(2.0**126, np.float32),  # might be rounded up to infinity
        with_one(1e300, np.float64),  # the grid would not be exact in float32
        normal(20),  # a frame is larger
        np.empty(0, np.float32),
    ],
    ids=["nan", "infinite", "large", "huge", "small", "empty"],
)
def test_arrays_that_do_not_fit_a_frame_are_sent_exactly(array):
    sent, left = rounded(array)

    assert left is NOTHING
    np.testing.assert_array_equal(read(sent), array)
    assert not is_frame(sent, array)


def test_a_damaged_frame_is_refused():
    sent, _ = rounded(normal(1000))
    sent["0"][200] ^= 1

    with pytest.raises(CodecError, match="checksum"):
        read(sent)


def vote(mean=4, examples=10, seen=4, **more):
    return Vote(seen, mean, examples, **more)


def test_means_are_weighted_by_examples():
    decided = RoundDecision.of({0: vote(examples=30), 1: vote(examples=10)}, gone=[])

    assert decided.weights == {0: 0.75, 1: 0.25}
    assert decided.members == decided.current == (0, 1)


def test_a_replica_that_waits_for_a_lease_is_no_member_but_may_donate():
    notes = {0: vote(mean=3, examples=0), 1: vote(examples=0, parked=True)}

    decided = RoundDecision.of(notes, gone=[])

    assert (decided.weights, decided.members) == ({}, (0,))
    assert decided.current == decided.donors == (1,)


def test_the_root_has_the_latest_mean():
    notes = {0: vote(mean=3), 1: vote(), 2: vote(), 3: vote(parked=True, examples=0)}

    roots = {
        RoundDecision.of({**notes, 1: vote(seen=n)}, []).root for n in range(4, 12)
    }

    assert roots == {1, 2}


def ended(**more):
    return vote(examples=0, ended=True, **more)


@pytest.mark.parametrize(
    ("notes", "whole"),
    [
        ([vote(), vote()], False),
        ([vote(), vote(examples=0)], False),
        ([vote(), vote(), vote(mean=3, examples=0, parked=True)], False),
        ([vote()], True),  # there is nobody to send to
        ([vote(), vote(mean=3)], True),
        ([vote(), vote(mean=-1, examples=0)], True),
        ([vote(mean=-1, seen=0), vote(mean=-1, seen=0)], True),
        ([ended(), ended(owes=True)], True),
        ([vote(rests=True), vote(rests=True)], True),
        ([vote(rests=True), vote()], False),
        ([vote(rests=True), vote(), vote(examples=0, parked=True, rests=True)], False),
    ],
    ids=[
        *("all", "idle", "parked", "alone", "late", "new", "no mean", "ended"),
        *("all rest", "one rests", "one parked"),
    ],
)
def test_a_mean_is_rounded_only_among_members_with_the_latest_mean(notes, whole):
    assert RoundDecision.of(dict(enumerate(notes)), gone=[]).whole is whole
