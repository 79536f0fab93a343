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
from daskdl.training.tree_reduce import Key, ReduceOp, ReduceState, TreeMean

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


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


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
                state.feedback.settle_(self.rounds - 1)
            return terms
        for r, state in enumerate(self.states):
            terms[r].load_(results[r], step=step)
            state.feedback.settle_(self.rounds)
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
        return sum(s.feedback.residual.get(name, 0.0) for s in self.states)

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


def test_what_was_sent_and_what_is_left_is_what_was_trained():
    team = trained(Team())

    team.check_nothing_is_lost()
    team.check_all_have_the_same()
    assert np.abs(team.left(PARAMETERS)).max() > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_in_other_dtypes_to_their_rounding(dtype):
    team = trained(Team(dtype=dtype))

    team.check_all_have_the_same()
    steps = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    team.check_nothing_is_lost(rtol=0, atol=10 * steps)


def test_a_whole_mean_leaves_nothing():
    team = trained(Team())

    team.train()
    team.average(SOME, whole=True)

    team.check_nothing_is_lost()
    team.check_all_have_the_same()
    assert [state.feedback.residual for state in team.states] == [{}] * REPLICAS


def test_what_is_left_completes_a_mean_to_which_nobody_has_anything_to_add():
    team = trained(Team())

    team.average({2: 1.0}, whole=True)

    team.check_nothing_is_lost()
    team.check_all_have_the_same()
    assert [state.feedback.residual for state in team.states] == [{}] * REPLICAS


@pytest.mark.parametrize("whole", [True, False])
def test_a_mean_that_nobody_got_is_made_again_of_the_same(whole):
    team = trained(Team(), rounds=3)
    team.train(SOME)

    team.average(SOME, whole=whole, reached=False)
    team.average(SOME)

    team.check_nothing_is_lost()
    team.check_all_have_the_same()


def test_rounding_is_fed_back():
    """Else it would stay as far from the mean as each rounding takes it."""
    team, exact = trained(Team(), 1), trained(Team(), 1)
    for _ in range(20):  # nobody moves any more
        team.average(SOME)
    exact.average(SOME, whole=True)

    expected = exact.linear(0)
    for name, array in team.linear(0).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-12)


def with_outer():
    return trained(Team(outer=lambda params: torch.optim.SGD(params, lr=0.5)))


def test_the_outer_optimizer_makes_no_step_of_what_is_left():
    team, name = with_outer(), PARAMETERS
    before, left = team.linear(0)[name], team.left(name)

    team.average({2: 1.0}, whole=True, step=False)

    np.testing.assert_allclose(team.linear(0)[name], before + left, rtol=1e-12)
    team.check_all_have_the_same()
    assert np.abs(left).max() > 1e-6


def test_the_outer_optimizer_goes_on_from_there():
    team, name = with_outer(), PARAMETERS
    team.average({2: 1.0}, whole=True, step=False)
    before = team.linear(0)[name]

    team.average({2: 1.0}, whole=True)  # nobody has moved

    np.testing.assert_array_equal(team.linear(0)[name], before)


def test_parameters_and_momentum_travel_in_eight_bits():
    terms = trained(Team(dtype=torch.float32), 2).average(SOME)

    whole = Team(dtype=torch.float32).average(SOME, whole=True)
    numbers = 20 * 30 + 3 * 30
    assert {one.kind for one in terms} == {"DENSE8"}
    assert {one.kind for one in whole} == {"MEAN"}
    assert terms[0].sent_bytes < 0.4 * 2 * 4 * numbers


def test_moments_that_a_step_divides_by_travel_whole():
    team = trained(Team(optimizer=adam), 2)
    team.train(SOME)
    shares = [team.states[r].take(1.0) for r in ALL]

    team.average(SOME)

    after = team.states[0].take(1.0)
    moments = [key for key in after if "exp_avg" in key.name]
    assert len(moments) == 8
    for name in moments:
        mean = sum(weight * shares[r][name] for r, weight in SOME.items())
        np.testing.assert_allclose(after[name], mean, rtol=1e-12, atol=1e-18)


def test_numbers_that_are_not_finite_reach_all():
    team = trained(Team(), 2)
    with torch.no_grad():
        team.modules[1][0].weight[3, 4] = torch.nan

    team.average(SOME)

    for module in team.modules:
        assert module[0].weight.isnan().nonzero().tolist() == [[3, 4]]


def test_counters_are_the_largest_of_all():
    team = Team()
    team.train([1])
    team.train([0, 1])

    team.average({0: 0.5, 1: 0.5})  # at the second one, which adds its own first

    assert {int(m[1].num_batches_tracked) for m in team.modules} == {2}
