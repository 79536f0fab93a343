"""Where a replica gets the rows of a piece that it has leased."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from typing_extensions import override

from daskdl.channel.remote import RemoteChannel
from daskdl.data.loading import load
from daskdl.data.sources import Rows, Source
from daskdl.errors import LostPieceError
from daskdl.timeouts import Timeouts


class Store(ABC):
    """The data of a run, as one replica sees them."""

    @abstractmethod
    def rows(self, phase: str, part: int, key: str) -> Rows:
        """Get a part: arrays (x, y), to be read only.

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Of a piece that was leased.
            key: Dask's.
        """


class LocalStore(Store):
    """Pieces are cut, or computed, in this process when they are asked for.

    Nothing is kept: what has to be computed is computed again in each epoch.

    Args:
        sources: Of each phase; all replicas may share them.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        return self._sources[phase].rows(part)


class WorkerStore(Store):
    """Pieces are results of Dask's, on this worker or on another one.

    Args:
        channel: Of the replica; what is lost is had again through it.
        timeouts: Bounds on waiting.
    """

    def __init__(self, channel: RemoteChannel, timeouts: Timeouts) -> None:
        self._channel = channel
        self._timeouts = timeouts

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        def is_there() -> bool:
            return self._channel.missing(phase, part, key) == key

        while True:
            try:
                return load(
                    key,
                    self._timeouts.data,
                    self._timeouts.silence / 4,
                    is_there,
                    self._channel.wait_for_data,
                )
            except LostPieceError:
                key = self._channel.missing(phase, part, key)
            finally:
                self._channel.check()  # Dask fails as it likes while a worker closes
