"""Iterable datasets that ask ``get_worker_info()`` which items are theirs.

Torch keeps the answer once for the whole process, as in the processes of a
``DataLoader``. Here several threads go through datasets, so it is set for the time of
each step of one of them, and only one at a time may take a step.
"""

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

_one_at_a_time = threading.Lock()
_END = object()


class _Noticing:
    """A worker's info that notes whether anything about the worker is read from it.

    Args:
        told: The info; torch's own, which cannot be derived from in all its versions.
        noted: Called when something is read.
    """

    def __init__(self, told: worker.WorkerInfo, noted: Callable[[], None]) -> None:
        self._told = told
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed"):
            self._noted()
        return getattr(self._told, name)


class WorkerShards:
    """What each worker of a ``DataLoader`` would see of a dataset.

    Each pass goes through a shallow copy, so that attributes a dataset sets while it
    is gone through are its own.

    Args:
        dataset: To be gone through; not changed.

    Attributes:
        asked: Whether the dataset has read in any pass, in this process, which worker
            it is on. One that never does gives all its items to each.
    """

    asked: bool
    _passes: Counter[int]  # that have begun in this process, by shard

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self.asked = False
        self._passes = Counter()

    def __call__(self, shard: int, shards: int) -> Iterator[Any]:
        """Yield the items of a shard; every pass has another ``seed``.

        Args:
            shard: Its number, the worker's ``id``.
            shards: How many there are, ``num_workers``.
        """
        dataset = copy.copy(self._dataset)
        seed = self._passes[shard] * shards + shard
        self._passes[shard] += 1
        info = worker.WorkerInfo(
            id=shard, num_workers=shards, seed=seed, dataset=dataset
        )
        told = _Noticing(info, self._note)
        with worker_info(told):
            items = iter(dataset)
        while True:
            with worker_info(told):
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _note(self) -> None:
        self.asked = True


@contextlib.contextmanager
def worker_info(told: Any) -> Iterator[None]:
    """Answer ``get_worker_info()`` in this process, for a moment.

    Args:
        told: The answer; the former one comes back at the end.
    """
    with _one_at_a_time:
        former = worker._worker_info
        worker._worker_info = told
        try:
            yield
        finally:
            worker._worker_info = former
