"""Threads that load data beside training."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from daskdl.guard import settle

T = TypeVar("T")
Job = tuple["Future[Any]", Callable[[], Any]]


class Loader:
    """Runs jobs in their order, in daemon threads that are started when needed.

    Daemons, because one that hangs in the user's code must not keep a process from
    ending; that is what sets it apart from Python's own pool.

    Args:
        threads: How many jobs may run at the same time, >= 1.
        name: Of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job as soon as a thread is free, in the context of who asks for it.

        So user's code finds in it what it would find in the calling thread: for one,
        the worker of Dask's that it runs on.

        Args:
            job: What it raises is the future's.
        """
        future: Future[T] = Future()
        if len(self._threads) < self._most:
            self._threads.append(
                threading.Thread(target=self._work, name=self._name, daemon=True)
            )
            self._threads[-1].start()
        self._jobs.put((future, partial(copy_context().run, job)))
        return future

    def close(self) -> None:
        """Begin no more jobs; those that run come to their end by themselves."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._jobs.get_nowait():
                waiting[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            if future.set_running_or_notify_cancel():
                settle(future, job)
            del future, job, taken  # a part that is here would stay until the next job
