"""Replicas as threads of this process."""

import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from typing_extensions import override

from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.source import Source
from daskdl.errors import OptionError
from daskdl.serialization import Packed
from daskdl.training.backend import (
    Backend,
    Event,
    FitResult,
    ReplicaSpec,
    Result,
    RunEnded,
    TaskFailed,
    UserObjects,
    event_of,
    merge,
    most_replicas,
    run_spec_of,
    sizes_of,
    useful,
)
from daskdl.training.base import TrainingMaster
from daskdl.training.data_feed import LocalStore
from daskdl.training.replica import run_replica, surroundings
from daskdl.util import settle

logger = logging.getLogger(__name__)

HERE = "this machine"  # where replicas are, in messages


def replicas_here(master: TrainingMaster, most: int) -> int:
    """Choose how many replicas this process gets.

    Args:
        master: Says how many it wants.
        most: See `most_replicas`.

    Raises:
        OptionError: If that is fewer than `min_replicas`: none can join later.
    """
    each = master.replicas_per_worker
    wanted = max(1, torch.cuda.device_count()) if each == "auto" else int(each)
    replicas = useful(wanted, most)
    if master.min_replicas > replicas:
        raise OptionError(
            f"min_replicas must be at most {replicas}, the number of replicas in this "
            f"process, got {master.min_replicas}; without a cluster no more will come: "
            "set replicas_per_worker"
        )
    return replicas


class LocalBackend(Backend):
    """Threads of this process, one for each replica.

    Args:
        options: Of the run; there is nothing to route.
        sources: Data of each phase.
    """

    def __init__(self, options: ReplicaSpec, sources: Mapping[str, Source]) -> None:
        most = most_replicas(sources["train"], options)
        replicas = replicas_here(options.master, most)
        self.workers = dict.fromkeys(range(replicas), HERE)
        self._options = options
        self._sources = {
            phase: sharded(own, replicas) for phase, own in sources.items()
        }
        self._seen = 0  # events
        sizes = {
            phase: sizes_of(options, phase, own, replicas)
            for phase, own in self._sources.items()
        }
        # Whoever fills a queue of the relay empties it: nothing waits there.
        self._run = LocalRun(run_spec_of(options, self.workers, sizes, relay_bytes=0))
        self._results: dict[int, concurrent.futures.Future[Result]] = {}
        self._threads: list[threading.Thread] = []

    @override
    def open(self) -> None:
        pass  # the run is there

    @override
    def assign(self, objects: Packed[UserObjects]) -> None:
        threads = max(1, torch.get_num_threads() // len(self.workers))
        for replica in self.workers:
            self._results[replica] = concurrent.futures.Future()
            thread = threading.Thread(
                target=self._end_with_result,
                args=(objects, replica, threads),
                name=f"daskdl-replica-{replica}",
                # One that hangs in the user's code must not keep Python from ending.
                daemon=True,
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _end_with_result(
        self, objects: Packed[UserObjects], replica: int, threads: int
    ) -> None:
        train = functools.partial(self._train, objects, replica, threads)
        settle(self._results[replica], train)
        with self._run.changed:
            self._run.changed.notify_all()

    def _train(self, objects: Packed[UserObjects], number: int, threads: int) -> Result:
        options = self._options
        own = objects.unpack()
        channel = LocalChannel(self._run, options.endpoint(number, own))
        store = LocalStore(
            self._sources, channel, options.timeouts, options.load_threads
        )
        try:
            with surroundings(options.device, threads) as device:
                return run_replica(number, options, own, channel, device, store)
        finally:
            store.close()
            channel.leave()

    def _ended(self) -> bool:
        return all(result.done() for result in self._results.values())

    @override
    def poll_events(self, timeout_s: float) -> Iterator[Event]:
        ended = self._ended()
        posted = self._run.watch(self._seen, timeout_s, self._ended)
        self._seen += len(posted)
        yield from map(event_of, posted)
        for replica, result in self._results.items():
            error = result.exception() if result.done() else None
            if error is not None:
                yield TaskFailed(replica, error)
        if ended and not posted:
            yield RunEnded()

    @override
    def stop(self, reason: str) -> None:
        self._run.stop(reason)

    @override
    def collect(self) -> FitResult | None:
        deadline = time.monotonic() + self._options.timeouts.stop
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        results = []
        for replica, result in self._results.items():
            if not result.done():
                bound = self._options.timeouts.bound("stop")
                who = self._run.describe(replica)
                logger.warning("after %s it has not left: %s", bound, who)
            elif result.exception() is None:
                results.append(result.result())
        return merge(results).unpack() if results else None

    @override
    def close(self) -> None:
        self._run.stop("the run was closed")
