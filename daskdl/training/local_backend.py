"""Replicas as threads of this process.

:class:`LocalBackend` needs neither Dask nor a scheduler. The number of replicas is
fixed: no replica can join later.
"""

import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.data.source import Source
from daskdl.data.torch_datasets import split_stream
from daskdl.errors import OptionError
from daskdl.serialization import Packed
from daskdl.training.backend import (
    POLL_S,
    Backend,
    Event,
    TaskFailed,
    event_of,
    merge,
    most_replicas,
    run_spec_of,
    useful,
)
from daskdl.training.base import TrainingMaster
from daskdl.training.data_feed import LocalStore
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.replica import FitResult, Replica, process_environment
from daskdl.util import settle

logger = logging.getLogger(__name__)

HERE = "this machine"  # location of the replicas in messages


def replicas_here(master: TrainingMaster, most: int) -> int:
    """Choose the number of replicas in this process."""
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
    """Runs each replica in a thread of this process."""

    def __init__(self, spec: ReplicaSpec, sources: Mapping[str, Source]) -> None:
        self._packed = Packed(spec, "trainer", here=True)
        most = most_replicas(sources["train"], spec)
        replicas = replicas_here(spec.master, most)
        self.workers = dict.fromkeys(range(replicas), HERE)
        self._spec = spec
        self._sources = {
            phase: split_stream(own, replicas) for phase, own in sources.items()
        }
        # The thread that fills a relay queue also empties it: no bound is needed.
        self._run = LocalRun(run_spec_of(spec, self.workers, self._sources))
        self._results: dict[int, concurrent.futures.Future[FitResult]] = {}
        self._threads: list[threading.Thread] = []

    @override
    def open(self) -> None:
        pass  # the constructor has opened the run

    @override
    def assign(self) -> None:
        threads = max(1, torch.get_num_threads() // len(self.workers))
        for replica in self.workers:
            self._results[replica] = concurrent.futures.Future()
            thread = threading.Thread(
                target=self._end_with_result,
                args=(replica, threads),
                name=f"daskdl-replica-{replica}",
                # A thread that hangs in user code must not block interpreter exit.
                daemon=True,
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _end_with_result(self, replica: int, threads: int) -> None:
        train = functools.partial(self._train, replica, threads)
        settle(self._results[replica], train)
        with self._run.changed:
            self._run.changed.notify_all()

    def _train(self, number: int, threads: int) -> FitResult:
        spec = self._packed.unpack()
        channel = LocalChannel(self._run, spec.spec(number))
        store = LocalStore(self._sources, channel, spec.timeouts, spec.load_threads)
        try:
            with process_environment(str(spec.device), threads) as device:
                return Replica(number, spec, channel, device, store).run()
        finally:
            store.close()
            channel.leave()

    def _ended(self) -> bool:
        return all(result.done() for result in self._results.values())

    @override
    def poll_events(self) -> Iterator[Event]:
        posted: Sequence[Mapping[str, Any]] = ()
        ended = False
        while posted or not ended:
            ended = self._ended()
            posted = self._run.watch(POLL_S, self._ended)
            yield from filter(None, map(event_of, posted))
            for replica, result in self._results.items():
                error = result.exception() if result.done() else None
                if error is not None:
                    yield TaskFailed(replica, error)

    @override
    def stop(self, reason: str) -> None:
        self._run.stop(reason)

    @override
    def collect(self) -> FitResult | None:
        deadline = time.monotonic() + self._spec.timeouts.stop
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        results = []
        for replica, result in self._results.items():
            if not result.done():
                bound = self._spec.timeouts.bound("stop")
                who = self._run.describe(replica)
                logger.warning("after %s it has not left: %s", bound, who)
            elif result.exception() is None:
                results.append(result.result())
        return merge(results) if results else None

    @override
    def close(self) -> None:
        self._run.stop("the run was closed")
