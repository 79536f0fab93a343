"""`LinkThreshold` in a simulation of training over a link: no clock, no socket.

Residuals grow and are sent as in the compressor; a pump carries frames over a link
with a bandwidth and a latency, and times come out up to 20 % off. A model of many
parameters is represented by some of them, and its frames are as much larger.
"""

import math
from collections import deque

import numpy as np
import pytest
import torch

from daskdl import LinkThreshold, codec
from daskdl.codec import dense8
from daskdl.thresholds import (
    HEADER_BYTES,
    HOLD,
    MOST,
    Drained,
    Link,
    Measured,
    Request,
    Sent,
    plain_bytes,
)

MODEL_HEADER_BYTES = 64
PACE_S = 0.005  # of the pump
OUTBOX_BYTES = 2**20
REPRESENTED = 20_000  # parameters that are computed, of any number
NOISE = 0.2

FAST = 10e9 / 8  # bytes/s: 10 Gbit/s
SLOW = 50e6 / 8


class Residual:
    """The residual of the simulated parameters, sampled whole."""

    def __init__(self, values):
        self.values = values

    def sample(self, most):
        return torch.from_numpy(self.values)


class Updates:
    """Updates of a step, whose scales differ by parameter, with a heavy tail."""

    def __init__(self, kind, count, seed):
        self.random = np.random.default_rng(seed)
        self.kind, self.count = kind, count
        self.scale = 1e-4 * self.random.lognormal(0.0, 1.5, count)
        self.drift = 0.3 * self.random.choice([-1.0, 1.0], count)

    def next(self):
        noise = {
            "gaussian": self.random.standard_normal,
            "laplace": lambda n: self.random.laplace(size=n),
            "heavy": lambda n: self.random.standard_t(2, n),
        }[self.kind](self.count)
        return self.scale * (self.drift + noise)


class Wire:
    """A sender and its link: one request at a time, with all waiting frames."""

    def __init__(self, bandwidth, latency_s, copies, seed):
        self.bandwidth, self.latency_s, self.copies = bandwidth, latency_s, copies
        self.random = np.random.default_rng(seed)
        self.waiting = deque()
        self.batch, self.began, self.ends = [], 0.0, math.inf
        self.free_from = 0.0
        self.drained = Drained(copies=copies)

    def noise(self):
        return self.random.uniform(1 - NOISE, 1 + NOISE)

    def has_room(self):
        return sum(self.waiting) + sum(self.batch) < OUTBOX_BYTES

    def until(self, now):
        """Simulate the link up to a time."""
        while True:
            if not self.batch:
                if not self.waiting or self.free_from > now:
                    return
                self.batch = [nbytes * self.copies for nbytes in self.waiting]
                self.waiting.clear()
                self.began = self.free_from
                time_s = self.latency_s + sum(self.batch) / self.bandwidth
                self.ends = self.began + self.noise() * time_s
            if self.ends > now:
                return
            self._arrive()

    def _arrive(self):
        former = self.drained
        self.drained = Drained(
            former.nbytes + sum(self.batch),
            former.frames + len(self.batch) * self.copies,
            former.requests + self.copies,
            former.busy_s + self.ends - self.began,
            self.copies,
        )
        self.batch = []
        self.free_from = self.ends + PACE_S

    def offer(self, nbytes, now):
        if not self.waiting and not self.batch:
            self.free_from = max(self.free_from, now)
        self.waiting.append(nbytes)

    def take(self):
        drained, self.drained = self.drained, Drained(copies=self.copies)
        return drained


class Training:
    """One replica with its residual, threshold rule, link and clock.

    Attributes:
        densities: Of each exchange; 1 for a dense one.
        thresholds: Of each sparse exchange.
        costs: Share of a step that each frame takes of the link, without the noise.
        busy_s: Of the link, by frames alone.
    """

    def __init__(
        self, rule, *, size, step_s, bandwidth, latency_s, kind="gaussian",
        copies=1, seed=0,
    ):  # fmt: skip
        count = min(size, REPRESENTED)
        self.rule, self.size, self.step_s = rule, size, step_s
        self.times = size / count
        self.updates = Updates(kind, count, seed)
        self.residual = np.zeros(count)
        self.wire = Wire(bandwidth, latency_s, copies, seed + 1)
        self.sent, self.now, self.computed_s, self.chances = None, 0.0, 0.0, 0
        self.exchanges = self.arrivals = 0
        self.densities, self.thresholds, self.costs = [], [], []
        self.withheld = 0

    def step(self):
        took_s = self.step_s * self.wire.noise()
        self.now += took_s
        self.computed_s += took_s
        self.chances += 1
        self.residual += self.updates.next()
        self.wire.until(self.now)
        if not self.wire.has_room():
            self.withheld += 1
            return
        self._exchange()

    def steps(self, count):
        for _ in range(count):
            self.step()

    def until_arrivals(self, count, most=20_000):
        """Make steps until frames have arrived `count` more times."""
        goal = self.arrivals + count
        for _ in range(most):
            if self.arrivals >= goal:
                return
            self.step()
        raise AssertionError(f"{self.arrivals} arrivals after {most} steps")

    def _exchange(self):
        dense = self.rule.sends_dense(self.sent)
        threshold, nbytes, density = self._send_dense() if dense else self._send()
        drained = self.wire.take()
        self.arrivals += bool(drained.frames)
        if nbytes:
            self.wire.offer(nbytes, self.now)
        former = self.sent.link if self.sent else None
        step_s = self.computed_s / self.chances
        measured = Measured(self.size, density, nbytes, dense, step_s, drained)
        self.sent = Sent(threshold, density, self.rule.learn(former, measured))
        self.computed_s, self.chances = 0.0, 0
        self.exchanges += 1
        self.densities.append(density)
        cost_s = nbytes * self.wire.copies / self.wire.bandwidth
        self.costs.append(cost_s / self.step_s)

    def _send_dense(self):
        # What is left is the rounding: a 254th of the largest at most.
        self.residual *= 1e-3 * self.updates.random.standard_normal(len(self.residual))
        return self.sent.threshold, dense8.length(self.size) + MODEL_HEADER_BYTES, 1.0

    def _send(self):
        threshold = self.rule.next_threshold(Residual(self.residual), self.sent)
        self.thresholds.append(threshold)
        reached = np.abs(self.residual) >= threshold
        signs = np.sign(self.residual[reached])
        self.residual[reached] -= threshold * signs
        if self.exchanges % 5 == 0:
            bound = 5 * threshold
            self.residual[reached] = self.residual[reached].clip(-bound, bound)
        entries = (signs * (np.flatnonzero(reached) + 1)).astype(np.int32)
        if not len(entries):
            return threshold, 0, 0.0
        sizes = codec.payload_sizes(len(self.residual), entries)
        nbytes = round(min(sizes.values()) * self.times) + MODEL_HEADER_BYTES
        return threshold, nbytes, len(entries) / len(self.residual)


SETTLED = 30  # arrivals of frames: one for each step, where steps are not shorter


def training(rule=None, **options):
    defaults = {"size": 10**6, "step_s": 0.1, "bandwidth": FAST, "latency_s": 1e-3}
    return Training(rule or LinkThreshold(), **{**defaults, **options})


def settled(replica, arrivals=40):
    """Return densities and costs after the rule has settled."""
    replica.until_arrivals(SETTLED)
    before = len(replica.densities)
    replica.until_arrivals(arrivals)
    return replica.densities[before:], replica.costs[before:]


def mean(values):
    return sum(values) / len(values)


def kinds_and_sizes():
    """Yield each kind and each size once; other pairs are slow."""
    sizes = {"small": (10**4, 0.01), "middle": (10**6, 0.1), "large": (25 * 10**6, 1.0)}
    for i, kind in enumerate(("gaussian", "laplace", "heavy")):
        for j, (name, size) in enumerate(sizes.items()):
            marks = [] if i == j else [pytest.mark.slow]
            yield pytest.param(kind, *size, marks=marks, id=f"{name}-{kind}")


of_each_kind_and_size = pytest.mark.parametrize(
    ("kind", "size", "step_s"), list(kinds_and_sizes())
)


@of_each_kind_and_size
def test_a_slow_link_is_busy_for_the_share_and_the_density_is_steady(
    kind, size, step_s
):
    bandwidth = SLOW / 20 if size == 10**4 else SLOW
    replica = training(size=size, step_s=step_s, bandwidth=bandwidth, kind=kind)

    densities, costs = settled(replica)

    assert 0.18 < mean(costs) < 0.3
    assert max(densities) < 2 * min(densities)


@of_each_kind_and_size
def test_a_fast_link_carries_all_within_thirty_steps(kind, size, step_s):
    replica = training(size=size, step_s=step_s, kind=kind)
    replica.steps(30)
    before = len(replica.densities)

    replica.steps(40)

    assert replica.densities[before:] == [1.0] * 40


@pytest.mark.parametrize(
    ("step_s", "latency_s"),
    [
        pytest.param(0.001, 0.005, marks=pytest.mark.slow),
        pytest.param(0.001, 0.01, marks=pytest.mark.slow),
        (0.005, 0.01),
    ],
)
class TestStepsShorterThanRequests:
    def test_a_fast_link_carries_all(self, step_s, latency_s):
        replica = training(size=10**4, step_s=step_s, latency_s=latency_s)

        densities, _ = settled(replica)

        assert densities == [1.0] * len(densities)

    def test_a_slow_link_is_busy_for_about_the_share(self, step_s, latency_s):
        replica = training(
            size=10**4, step_s=step_s, latency_s=latency_s, bandwidth=SLOW / 5
        )

        _, costs = settled(replica)

        # Times of requests that are 20 % off differ by as much as the share is.
        assert 0.05 < mean(costs) < 0.4


def test_the_density_follows_a_link_down_and_up_again():
    replica = training()
    replica.steps(30)
    assert replica.densities[-1] == 1.0

    replica.wire.bandwidth = SLOW / 5
    slow, costs = settled(replica)
    replica.wire.bandwidth = FAST
    fast, _ = settled(replica)

    assert 0.18 < mean(costs) < 0.3
    assert max(slow) < 2 * min(slow)
    assert fast == [1.0] * len(fast)


class TestLeastDensityTooCostly:
    """A link with a measured price of a millisecond per byte."""

    LINK = Link(10**6, 1e-4, floor=Request(1e-3, 200), price_s=1e-3, hold=HOLD)

    def densities(self, takes, count=60):
        """Return the density after each delivery; `takes` gives a duration."""
        rule, link, densities = LinkThreshold(), self.LINK, []
        for _ in range(count):
            nbytes = round(link.frame_bytes(link.density))
            drained = Drained(nbytes, 1, 1, takes(nbytes))
            measured = Measured(10**6, link.density, nbytes, False, 0.1, drained)
            link = rule.learn(link, measured)
            densities.append(link.density)
        return densities

    def test_growth_shows_that_latency_was_the_cost(self):
        assert max(self.densities(lambda nbytes: 0.05)) >= 0.9 * MOST

    def test_growth_is_small_and_rare_if_bytes_are_the_cost(self):
        densities = self.densities(lambda nbytes: 1e-3 * nbytes)

        assert max(densities) < 2.2e-4
        assert sum(d > 1e-4 for d in densities) < 20


def test_without_a_link_all_exchanges_but_the_first_are_dense():
    rule = LinkThreshold()
    drained = Drained(100, 1, requests=0)

    link = rule.learn(None, Measured(10**5, 1e-4, 100, False, 1.0, drained))

    assert rule.sends_dense(Sent(1.0, 1e-4, link))
    link = rule.learn(link, Measured(10**5, 1.0, 10**5, True, 1.0, drained))
    assert rule.sends_dense(Sent(1.0, 1.0, link))


@pytest.mark.parametrize("density", [1e-3, 1e-2, 0.1, 0.3, 1.0])
def test_the_size_of_a_frame_of_independent_positions_is_predicted(density):
    size = 100_000
    random = np.random.default_rng(0)
    positions = np.sort(random.choice(size, round(size * density), replace=False))
    sizes = codec.payload_sizes(size, (positions + 1).astype(np.int32))

    actual = min(sizes.values()) + HEADER_BYTES

    # BITMAP spends 12 % more than the entropy at 0.3; none is needed for all.
    spare = size / 8 if density == 1.0 else 0
    assert actual - spare == pytest.approx(plain_bytes(size, density), rel=0.15)
