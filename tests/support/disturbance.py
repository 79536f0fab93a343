"""What happens to the workers of a cluster: kills, freezes, more of them, fewer."""

import contextlib
import logging
import os
import random
import signal
import threading
import time

from daskdl.channel.protocol import NAME

logger = logging.getLogger(__name__)

PAUSE_S = (1.0, 5.0)  # between two things that happen
SILENCE_S = 6.0  # that is borne
FREEZE_S = (0.5, 8.0)  # shorter and longer
HEARD_S = SILENCE_S / 3  # ago, of one that is well; it says something each quarter


def training(dask_scheduler):
    """Addresses of the workers whose replicas train and are well, of all runs.

    One that says nothing, because its machine is busy, may be given up too.
    """
    return [
        live.state.members.replicas[replica].worker
        for live in dask_scheduler.extensions[NAME].runs.values()
        for replica in live.state.members.expected
        if replica in live.state.members.present
        and live.now() - live.state.members.replicas[replica].heartbeat_at < HEARD_S
    ]


class Disturbance(threading.Thread):
    """Something happens to a worker every few seconds, until it is told to end.

    At least two replicas are always left alone, and nothing is added or taken away
    while a worker is frozen: Dask would wait for it.

    Args:
        client: Of a `LocalCluster` of processes.
        seed: The same things happen in the same order, at other steps.
        workers: As many as there are, give or take one.
    """

    def __init__(self, client, seed, workers):
        super().__init__(name="disturbance", daemon=True)
        self.happened = []
        self._client = client
        self._random = random.Random(seed)
        self._workers = workers
        self._over = threading.Event()
        self._frozen = {}  # process to when it goes on
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
        while not self._over.wait(self._random.uniform(*PAUSE_S)):
            self._thaw()
            self._random.choice(acts)()

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
