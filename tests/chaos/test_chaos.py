"""A model trains while its workers are killed, frozen, taken away and added.

``make chaos`` runs twenty seeds, the suite the first of them. Each prints a line: what
happened, and the longest step of the others between a kill and what happened next,
over the median of all steps. Kills while a worker is frozen, or soon after, do not
count: the others wait for it.
"""

import contextlib
import logging
import math
import os
import random
import signal
import threading
import time
from collections import Counter

import dask.config
import numpy as np
import pytest

from daskdl import Callback, GradientSharing, KeepResidual
from daskdl.channel.protocol import NAME
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES
from tests.support.clusters import cluster_of, still_left_behind
from tests.support.digits import accuracy, images, trainer
from tests.support.recording import ATOL, Recorded, check_barrier, records

logger = logging.getLogger(__name__)

PAUSE_S = (1.0, 5.0)  # between two disturbances
SILENCE_S = 6.0  # the timeout
FREEZE_S = (0.5, 8.0)  # shorter and longer than that
HEARD_S = SILENCE_S / 3  # heartbeats come after each quarter of the timeout


def training(dask_scheduler):
    """Addresses of workers whose replicas train and have sent a recent heartbeat."""
    return [
        live.state.members.replicas[replica].worker
        for live in dask_scheduler.extensions[NAME].runs.values()
        for replica in live.state.members.expected
        if replica in live.state.members.present
        and live.now() - live.state.members.replicas[replica].heartbeat_at < HEARD_S
    ]


class Disturbance(threading.Thread):
    """Kills, freezes, adds or removes a worker every few seconds.

    At least two replicas are always left alone. The cluster is not scaled while a
    worker is frozen, since Dask would wait for it.

    Args:
        client: Of a `LocalCluster` of processes.
        seed: Of the order of the disturbances; they happen at other steps each time.
        workers: Usual number of workers.
    """

    def __init__(self, client, seed, workers):
        super().__init__(name="disturbance", daemon=True)
        self.happened = []
        self.intervals = []  # from a kill to what happened next, none being frozen
        self._client = client
        self._random = random.Random(seed)
        self._workers = workers
        self._over = threading.Event()
        self._frozen = {}  # when each frozen process continues
        self._waited_for = -math.inf  # the last time that a process was frozen
        self._failure = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self._over.set()
        self.join(60)
        self._thaw(everybody=True)
        assert not self.is_alive()
        if self._failure is not None:
            raise self._failure

    def run(self):
        try:
            self._disturb()
        except Exception as error:  # the test's thread raises it
            self._failure = error
            self._thaw(everybody=True)

    def _disturb(self):
        acts = [self._kill, self._kill, self._freeze, self._freeze, self._scale]
        killed_at = None
        while not self._over.wait(self._random.uniform(*PAUSE_S)):
            if killed_at is not None:
                self.intervals.append((killed_at, time.time()))
            self._thaw()
            act, before = self._random.choice(acts), len(self.happened)
            began_at = time.time()
            act()
            kills = act == self._kill and len(self.happened) > before
            alone = not self._frozen and began_at > self._waited_for + SILENCE_S
            killed_at = began_at if kills and alone else None

    def _processes(self):
        """Process of each worker that trains and is not frozen, by address."""
        nannies = {
            nanny.worker_address: nanny.pid
            for nanny in list(self._client.cluster.workers.values())
        }
        addresses = self._client.run_on_scheduler(training)
        pids = {a: nannies[a] for a in sorted(addresses) if nannies.get(a)}
        return {a: pid for a, pid in pids.items() if pid not in self._frozen}

    def _one(self):
        processes = self._processes()
        choice = self._random.random()
        if len(processes) < 3:
            return None
        return list(processes.items())[int(choice * len(processes))]

    def _kill(self):
        if victim := self._one():
            self._note("killed", victim[0])
            self._signal(victim[1], signal.SIGKILL)

    def _freeze(self):
        length_s = self._random.uniform(*FREEZE_S)
        if victim := self._one():
            self._note(f"froze for {length_s:.1f} s", victim[0])
            self._signal(victim[1], signal.SIGSTOP)
            self._frozen[victim[1]] = time.monotonic() + length_s

    def _thaw(self, *, everybody=False):
        for pid, until in list(self._frozen.items()):
            if everybody or time.monotonic() >= until:
                del self._frozen[pid]
                self._waited_for = time.time()
                self._signal(pid, signal.SIGCONT)

    @staticmethod
    def _signal(pid, number):
        with contextlib.suppress(ProcessLookupError):  # its nanny was faster
            os.kill(pid, number)

    def _scale(self):
        workers = self._workers + self._random.choice((-1, 0, 1))
        if not self._frozen and len(self._processes()) >= 3:
            self._note("scaled to", workers)
            self._client.cluster.scale(workers)

    def _note(self, what, whom):
        logger.info("%s %s", what, whom)
        self.happened.append((what, whom))


SEEDS = range(int(os.environ.get("DASKDL_CHAOS_SEEDS", "1")))
WORKERS = 4
EPOCHS = 30
BATCH_SIZE = 16
STEP_S = 0.05  # so that the run takes long enough to be disturbed


class Larger(Callback):
    """Makes each step take as long as that of a larger model; notes when it ended."""

    def __init__(self, folder):
        self._folder = folder

    def on_step_end(self, step):
        time.sleep(STEP_S)
        with (self._folder / f"steps-{step.replica}").open("a") as file:
            file.write(f"{step.epoch} {time.time()}\n")


def longest_step(folder, intervals):
    """The longest step in these intervals and the median of all, seconds.

    A step counts from the end of the one before, in the same epoch, up to the end of
    the interval, if a part of it is in the interval.
    """
    steps, within = [], [0.0]
    for path in folder.glob("steps-*"):
        epochs, ends = np.loadtxt(path, ndmin=2).T
        same = np.diff(epochs) == 0
        steps.append(np.diff(ends)[same])
        for first, last in intervals:
            there = same & (ends[1:] > first) & (ends[:-1] < last)
            within += (np.minimum(ends[1:], last) - ends[:-1])[there].tolist()
    return max(within), float(np.median(np.concatenate(steps)))


@pytest.fixture
def four():
    """A client of four workers that Dask does not give up soon."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "90s"}),
        cluster_of(WORKERS) as client,
    ):
        yield client


def sharing(seed):
    routing = ("mesh", "plain")[seed % 2]
    return GradientSharing(residual=KeepResidual(), routing=routing, fan_out=2)


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_and_the_model_learns(four, seed, tmp_path, capsys):
    x_train, x_test, y_train, y_test = images()
    undisturbed = trainer(four, sharing(seed), seed=seed)
    undisturbed.fit(x_train, y_train, epochs=EPOCHS, batch_size=BATCH_SIZE)

    fitted = trainer(
        four,
        Recorded(str(tmp_path), sharing(seed), atol=ATOL),
        seed=seed,
        callbacks=[Larger(tmp_path)],
    )
    with (
        dask.config.set(
            {"daskdl.timeouts.silence": SILENCE_S, "daskdl.timeouts.request": "10s"}
        ),
        Disturbance(four, seed, WORKERS) as disturbance,
    ):
        history = fitted.fit(x_train, y_train, epochs=EPOCHS, batch_size=BATCH_SIZE)

    longest_s, median_s = longest_step(tmp_path, disturbance.intervals)
    counts = Counter(what.split()[0] for what, _ in disturbance.happened)
    replicas = history.column("replicas")
    with capsys.disabled():
        print(
            f"\nseed {seed}, {sharing(seed).routing}: "
            + ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            + f"; {min(replicas)} to {max(replicas)} replicas; "
            f"{sum(history.column('repeated_pieces'))} pieces repeated; "
            f"longest step after {len(disturbance.intervals)} kills "
            f"{longest_s / median_s:.2f} of the median, {1e3 * median_s:.0f} ms"
        )
    assert {what.split()[0] for what, _ in disturbance.happened} >= {"killed", "froze"}
    assert len(history) == EPOCHS
    ends = [records(tmp_path, epoch) for epoch in range(EPOCHS)]
    for end in ends:
        check_barrier(end)
    check_memory(ends)
    best = accuracy(undisturbed.model_, x_test, y_test)
    assert accuracy(fitted.model_, x_test, y_test) >= best - 0.02
    assert still_left_behind(four) == {}


def check_memory(ends):
    """Check that the queues of each replica stay within their bounds."""
    for replica in {replica for end in ends for replica in end}:
        peaks = [int(end[replica]["peak_bytes"]) for end in ends if replica in end]
        assert peaks[-1] - peaks[0] < OUTBOX_BYTES + INBOX_BYTES, replica
