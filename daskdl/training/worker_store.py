"""The parts of the data as a replica on a worker of Dask's gets them."""

import threading
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from daskdl.channel.remote import RemoteChannel
from daskdl.data.loading import Fetcher
from daskdl.data.source import Source
from daskdl.data.trees import Rows
from daskdl.packed import Packed
from daskdl.timeouts import Timeouts
from daskdl.training.stores import Store, Which


class WorkerStore(Store):
    """Parts are loaded by this worker, or are results of Dask's, here or elsewhere.

    Made in the task of the replica.

    Args:
        sources: Of the phases whose source every worker has as a whole.
        channel: Of the replica; what is lost is had again through it.
        timeouts: See `Store`, as `threads`.
    """

    def __init__(
        self,
        sources: Mapping[str, Packed[Source]],
        channel: RemoteChannel,
        timeouts: Timeouts,
        threads: int,
    ) -> None:
        super().__init__(channel, timeouts, threads)
        self._remote = channel
        self._sources = sources
        self._fetcher = Fetcher()
        self._keys: dict[Which, str] = {}  # of parts, as they were asked for last

    @override
    def source(self, phase: str) -> Source | None:
        packed = self._sources.get(phase)
        return None if packed is None else packed.shared()

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        held = self._fetcher.here(key) if key else None
        if held is not None and not isinstance(held, Packed):
            self._drop((phase, part))  # it may have been begun
            x, y = held  # without going through another thread
            return x, y
        return super().rows(phase, part, key)

    @override
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        if not key:
            return lambda: self._sources[phase].shared().load(part)
        self._keys[phase, part] = key
        timeout_s = self._timeouts.data
        return lambda: self._fetcher.rows(key, timeout_s, unwanted.is_set)

    @override
    def _name(self, phase: str, part: int) -> str:
        key = self._keys.get((phase, part), "")
        return self._fetcher.names.get(key) or super()._name(phase, part)

    @override
    def _separate(
        self, phase: str, part: int, key: str
    ) -> Sequence[tuple[str, Callable[[], Rows]]]:
        if not key:
            return super()._separate(phase, part, key)
        timeout_s = self._timeouts.data
        return self._fetcher.separate(key, timeout_s, lambda: self._channel.closing)

    @override
    def _still(self, phase: str, part: int, key: str) -> bool:
        return not key or self._remote.missing(phase, part, key) == key

    @override
    def _found_again(self, phase: str, part: int, key: str) -> str:
        return self._remote.missing(phase, part, key)
