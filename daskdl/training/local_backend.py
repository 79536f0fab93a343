"""Replicas as threads of this process."""

import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from typing_extensions import override

from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.data.source import Source
from daskdl.serialization import Packed
from daskdl.training.backend import Event, Final, Stage, extent_for, merge, plan_of
from daskdl.training.data_feed import LocalStore
from daskdl.training.replica import Replica, surroundings
from daskdl.training.spec import Recipe, Result, TaskOptions
from daskdl.util import settle

logger = logging.getLogger(__name__)

HERE = "this machine"  # where replicas are, in messages


class LocalStage(Stage):
    """Threads of this process, one for each replica.

    Args:
        options: Of the run; there is nothing to route.
        replicas: How many.
        sources: Of each phase.
    """

    def __init__(
        self, options: TaskOptions, replicas: int, sources: Mapping[str, Source]
    ) -> None:
        self.seats = dict.fromkeys(range(replicas), HERE)
        self._options = options
        self._sources = sources
        extents = {
            phase: extent_for(options, phase, own, replicas)
            for phase, own in sources.items()
        }
        # Nothing waits in the relay's queues: they are emptied by whoever fills them.
        self._run = LocalRun(plan_of(options, self.seats, extents, relay_bytes=0))
        self._results: dict[int, concurrent.futures.Future[Result]] = {}
        self._threads: list[threading.Thread] = []

    @override
    def open(self) -> None:
        pass  # the run is there

    @override
    def start(self, recipe: Packed[Recipe]) -> None:
        threads = max(1, torch.get_num_threads() // len(self.seats))
        for replica in self.seats:
            self._results[replica] = concurrent.futures.Future()
            thread = threading.Thread(
                target=self._end_with_result,
                args=(recipe, replica, threads),
                name=f"daskdl-replica-{replica}",
                # One that hangs in the user's code must not keep Python from ending.
                daemon=True,
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _end_with_result(
        self, recipe: Packed[Recipe], replica: int, threads: int
    ) -> None:
        train = functools.partial(self._train, recipe, replica, threads)
        settle(self._results[replica], train)
        with self._run.changed:
            self._run.changed.notify_all()

    def _train(self, recipe: Packed[Recipe], number: int, threads: int) -> Result:
        options = self._options
        own = recipe.unpack()
        channel = LocalChannel(self._run, options.endpoint(number, own))
        store = LocalStore(
            self._sources, channel, options.timeouts, options.load_threads
        )
        try:
            with surroundings(options.device, threads) as device:
                return Replica(number, options, own, channel, device, store).run()
        finally:
            store.close()
            channel.leave()

    @override
    def news(self, seen: int, timeout_s: float) -> Sequence[Event]:
        return self._run.watch(seen, timeout_s, self.ended)

    @override
    def heed(self, event: Event) -> None:
        pass  # nobody comes later, and nothing is lost

    @override
    def ended(self) -> bool:
        return all(result.done() for result in self._results.values())

    @override
    def errors(self) -> Iterator[tuple[int, BaseException]]:
        for replica, result in self._results.items():
            error = result.exception() if result.done() else None
            if error is not None:
                yield replica, error

    @override
    def given_up(self) -> list[int]:
        return []

    @override
    def stop(self, reason: str) -> None:
        self._run.stop(reason)

    @override
    def collect(self) -> Final | None:
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
