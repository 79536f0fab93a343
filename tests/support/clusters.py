"""Clusters of worker processes: started, changed during a run, and left empty."""

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from typing import ClassVar

import pytest
from distributed import Client, LocalCluster, get_client
from torch import nn

from daskdl import Callback
from daskdl.channel.protocol import NAME

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def cluster_of(workers, **options):
    """A client of so many workers, each with one thread and without a dashboard.

    Args:
        workers: How many.
        options: Of `LocalCluster`.
    """
    # With `dashboard_address=None` it would take the default port.
    quiet = {"dashboard_address": ":0", "scheduler_kwargs": {"dashboard": False}}
    with (
        LocalCluster(
            n_workers=workers, **{"threads_per_worker": 1, **quiet, **options}
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def end(process, within_s=30):
    """End a process, by force if it does not end by itself."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ProcessCluster:
    """A scheduler and workers, each a process of its own, as ``dask worker`` starts it.

    Args:
        folder: Of the scheduler file, of preloads, and of the logs.

    Attributes:
        processes: The scheduler, and each worker so far.
        client: A client.
    """

    def __init__(self, folder):
        self._folder, self._file = folder, str(folder / "scheduler.json")
        self.processes = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._ends = stack
            self._start("scheduler", "--port=0")
            client = Client(scheduler_file=self._file, set_as_default=False)
            self.client = stack.enter_context(client)
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._ends.close()

    def _start(self, kind, *options):
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *options]
        command += ["--scheduler-file", self._file, "--no-dashboard"]
        with (self._folder / f"log-{len(self.processes)}").open("w") as log:
            process = subprocess.Popen(command, stderr=log)
        self.processes.append(process)
        self._ends.callback(end, process)

    def grow(self, preload=""):
        """Start one more worker, and wait until Dask knows it."""
        file = self._folder / f"preload-{len(self.processes)}.py"
        file.write_text(preload)
        self._start("worker", "--nthreads=1", "--no-nanny", "--preload", str(file))
        self.client.wait_for_workers(len(self.processes) - 1, timeout=60)


class EnoughError(Exception):
    """What the test waited for has happened."""


class Script(Callback):
    """On the client: wait for a number of replicas, act, and so on; then stop.

    Args:
        acts: Pairs (replicas, what to do at the end of the first epoch with as many);
            or instead of a number, what tells of its row whether it is that epoch.
    """

    def __init__(self, *acts):
        self._acts = list(acts)
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(row)
        when, act = self._acts[0]
        if when(row) if callable(when) else row["replicas"] == when:
            del self._acts[0]
            act()

    def run(self, trainer, x, y, **options):
        trainer.callbacks = [*trainer.callbacks, self]
        with pytest.raises(EnoughError):
            trainer.fit(x, y, epochs=10**6, batch_size=16, **options)
        return trainer


class TookPart(Callback):
    """On workers: notes which replicas train in which epochs.

    A worker that was killed may be there again before an epoch has ended without it.

    Args:
        folder: For the notes.
    """

    def __init__(self, folder):
        self._folder = folder

    def on_step_end(self, step):
        self._note(step.replica, step.epoch).touch()

    def _note(self, replica, epoch):
        return self._folder / f"took-part-{replica}-{epoch}"

    def by(self, replica):
        """What tells of the row of an epoch whether a replica took part in it."""
        return lambda row: self._note(replica, row["epoch"]).exists()


def enough():
    raise EnoughError


class Tracked(nn.Module):
    """A module that can be found as long as anything in its process holds it."""

    _all: ClassVar = weakref.WeakSet()

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)  # unpickled and copied ones come by here, too
        Tracked._all.add(self)
        return self

    @staticmethod
    def held(name):
        """Those of a class, in this process, by the name it has in every process."""
        gc.collect()
        return [
            instance for instance in Tracked._all if type(instance).__name__ == name
        ]


# What has been left behind and reported: the tests that follow are not to blame.
reported: set = set()


def left_behind(client):
    """What is on the scheduler and the workers when all should be forgotten."""

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.extensions.get(NAME)
        runs = [] if plugin is None else [*plugin.runs, *plugin.copies.broadcasts]
        return [*runs, *dask_scheduler.tasks]

    def on_worker(dask_worker):
        plugin = dask_worker.extensions.get(NAME)
        links = [] if plugin is None else [*plugin.endpoints, *plugin.copies.held]
        return [*links, *dask_worker.data, *dask_worker.state.tasks]

    places = {"scheduler": client.run_on_scheduler(on_scheduler)}
    places |= client.run(on_worker)
    new = {
        place: [thing for thing in things if thing not in reported]
        for place, things in places.items()
    }
    return {place: things for place, things in new.items() if things}


def still_left_behind(client, within_s=60.0):
    """The same, when Dask has had time to forget: releasing a future is a message.

    A worker that was fetching a key from one that has died keeps it, as cancelled,
    while it tries to connect: 30 s (``distributed.comm.timeouts.connect``). Futures of
    a lazy collection may wait for Python to look for garbage.
    """
    deadline = time.monotonic() + within_s
    while (left := left_behind(client)) and time.monotonic() < deadline:
        gc.collect()  # each look asks the scheduler and every worker
    if left:
        things = {thing for things in left.values() for thing in things}
        reported.update(things)
        keys = [thing for thing in things if isinstance(thing, str)]
        stories = client.run(lambda dask_worker: dask_worker.state.story(*keys))
        stories["scheduler"] = client.run_on_scheduler(
            lambda dask_scheduler: dask_scheduler.story(*keys)
        )
        for place, story in stories.items():
            logger.error("%s: %s", place, "\n  ".join(map(str, story)))
    return left


def census(client):
    """All that a run could leave on a cluster and in its client, counted.

    The scheduler of a `LocalCluster` is in this process, with the client.
    """

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.extensions[NAME]
        plugin.dashboard.forget()  # of runs that are over, which stay for an hour
        forget_batches(
            *dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()
        )
        return {
            "runs": len(plugin.runs),
            "abandoned": len(plugin._abandoning),
            "tasks": len(dask_scheduler.tasks),
            "groups": len(dask_scheduler.task_groups),
            "prefixes": sorted(dask_scheduler.task_prefixes),
            "wanted": sum(len(c.wants_what) for c in dask_scheduler.clients.values()),
            "handlers": sorted(dask_scheduler.handlers),
            "stream handlers": sorted(dask_scheduler.stream_handlers),
            "extensions": sorted(dask_scheduler.extensions),
            "plugins": sorted(dask_scheduler.plugins),
            "worker plugins": sorted(dask_scheduler.worker_plugins),
            "topics": sorted(map(str, dask_scheduler._broker._topics)),
            "events": sorted(dask_scheduler.extensions["events"]._events),
            "objects": own_objects(),
            "work": own_work(),
        }

    def on_worker(dask_worker):
        plugin = dask_worker.extensions[NAME]
        forget_batches(dask_worker.batched_stream)
        return {
            "links": len(plugin.endpoints),
            "data": len(dask_worker.data),
            "tasks": len(dask_worker.state.tasks),
            "active": len(dask_worker.active_threads),
            "handlers": sorted(dask_worker.handlers),
            "stream handlers": sorted(dask_worker.stream_handlers),
            "extensions": sorted(dask_worker.extensions),
            "plugins": sorted(dask_worker.plugins),
            "threads": own_threads(),
            "objects": own_objects(),
            "work": own_work(),
            "tensors": tensors(),
        }

    return {
        "client": {"futures": len(client.futures), "refcount": len(client.refcount)},
        "scheduler": client.run_on_scheduler(on_scheduler),
        **client.run(on_worker),
    }


def forget_batches(*streams):
    """Dask keeps the last batches of each stream, with the arguments of tasks."""
    for stream in streams:
        stream.recent_message_log.clear()


def own_threads():
    """Threads of this process outside the pools of Dask and asyncio, or in daskdl."""
    frames = sys._current_frames()
    running = {
        thread.name
        for thread in threading.enumerate()
        for frame, _ in traceback.walk_stack(frames.get(thread.ident))
        if "/daskdl/" in frame.f_code.co_filename
    }
    pools = ("Dask-", "asyncio_")  # they grow with the calls at a time
    threads = [thread.name for thread in threading.enumerate()]
    names = {name for name in threads if not any(pool in name for pool in pools)}
    return sorted(names | running)


def own_objects():
    """Objects of daskdl's classes in this process, by class."""
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    # What the test itself holds in this process is a trainer and its results.
    return dict(
        Counter(k.__name__ for k in kinds if str(k.__module__).startswith("daskdl."))
    )


def own_work():
    """Coroutines of daskdl that somebody awaits, on the event loop of this thread."""
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    codes = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks()]
    return sorted(n for n, file in zip(names, codes, strict=True) if "/daskdl/" in file)


def tensors():
    """Tensors in this process, and their bytes."""
    torch = sys.modules["torch"]
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return len(tensors), sum(t.nbytes for t in tensors)


def at_rest(client):
    """The census when nothing is on its way any more."""
    for worker in client.nthreads():  # each makes itself a client once
        client.submit(_with_client, workers=[worker], pure=False).result(30)
    before = census(client)
    deadline = time.monotonic() + 20.0
    while (now := census(client)) != before:
        assert time.monotonic() < deadline, _changed(before, now)
        before = now
    work = [place.get("work", []) for place in now.values()]
    assert not any(work), work
    return now


def _with_client():
    get_client()


def changed_since(client, before, within_s=20.0):
    """What differs from an earlier census, when all had time to be forgotten."""
    deadline = time.monotonic() + within_s
    while (changed := _changed(before, census(client))) and time.monotonic() < deadline:
        pass  # each look asks the scheduler and every worker
    return changed


def _changed(before, now):
    pairs = {
        f"{name} of {place}": (before[place][name], now[place][name])
        for place in before
        for name in before[place]
    }
    return {
        what: _difference(*pair) for what, pair in pairs.items() if pair[0] != pair[1]
    }


def _difference(before, now):
    if not isinstance(before, dict):
        return before, now
    return {
        k: (before.get(k, 0), now.get(k, 0))
        for k in before.keys() | now.keys()
        if before.get(k) != now.get(k)
    }
