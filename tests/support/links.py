"""A model of training over a link, on a clock of its own, for `LinkThreshold`.

Residuals grow and are sent as in the compressor; a pump carries frames over a link
with a bandwidth and a latency, and times come out up to 20 % off. A model of many
parameters is represented by some of them, and its frames are as much larger.
"""

import math
from collections import deque

import numpy as np
import torch

from daskdl import codec
from daskdl.codec import dense8
from daskdl.thresholds import Drained, Measured, Sent

HEADER_BYTES = 64
PACE_S = 0.005  # of the pump
OUTBOX_BYTES = 2**20
REPRESENTED = 20_000  # parameters that are computed, of any number
NOISE = 0.2

FAST = 10e9 / 8  # bytes/s: 10 Gbit/s
SLOW = 50e6 / 8


class Residual:
    """Of the parameters that are computed; sampled whole."""

    def __init__(self, values):
        self.values = values

    def sample(self, most):
        return torch.from_numpy(self.values)


class Updates:
    """What one step adds: scales differ by parameter, with a heavy tail."""

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
    """A pump and its link: one request at a time, with all that waits."""

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
        """Carry on until then."""
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
    """One replica: its residual, its rule, its link, and its clock.

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
        """Make steps until frames have arrived so many times more."""
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
        return self.sent.threshold, dense8.length(self.size) + HEADER_BYTES, 1.0

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
        nbytes = round(min(sizes.values()) * self.times) + HEADER_BYTES
        return threshold, nbytes, len(entries) / len(self.residual)
