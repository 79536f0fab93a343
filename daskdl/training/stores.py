"""Where a replica gets the parts of the data from that it trains on."""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from typing_extensions import override

from daskdl.channel.base import Channel
from daskdl.data.faults import separated
from daskdl.data.loading import ASK_S
from daskdl.data.source import Source
from daskdl.data.trees import Rows
from daskdl.errors import LostPieceError, WaitTimeoutError
from daskdl.timeouts import Timeouts
from daskdl.training.loader import Loader

Which = tuple[str, int]  # phase and part
T = TypeVar("T")


class _Loading(NamedTuple):
    """A part on its way."""

    rows: Future[Rows]
    unwanted: threading.Event  # set when nobody waits for it any more


class Store(ABC):
    """The data of a run, as one replica sees them; its training thread uses it.

    Args:
        channel: Of the replica.
        timeouts: Bounds on waiting.
        threads: How many parts are loaded at the same time, >= 1.
    """

    def __init__(self, channel: Channel, timeouts: Timeouts, threads: int) -> None:
        self._channel = channel
        self._timeouts = timeouts
        self._loader = Loader(threads, "daskdl-loader")
        self._begun: dict[Which, _Loading] = {}

    def begin(self, phase: str, part: int, key: str) -> None:
        """Begin to load a part, if that has not been done; nothing is waited for.

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Its number.
            key: Dask's, of a part that workers hold; else "".
        """
        if (phase, part) not in self._begun:
            unwanted = threading.Event()
            job = self._job(phase, part, key, unwanted)
            self._begun[phase, part] = _Loading(self._loader.submit(job), unwanted)

    def forget(self, phase: str, but: Collection[int]) -> None:
        """Load none of those that were begun and are not needed after all.

        Args:
            phase: ``"train"`` or ``"validation"``.
            but: These are.
        """
        for which in [w for w in self._begun if w[0] == phase and w[1] not in but]:
            self._drop(which)

    def _drop(self, which: Which) -> None:
        loading = self._begun.pop(which, None)
        if loading is not None:
            loading.unwanted.set()
            loading.rows.cancel()

    def rows(self, phase: str, part: int, key: str) -> Rows:
        """Get a part, which is loaded beside this thread; see `begin`.

        Returns:
            Trees (x, y) of arrays, to be read only.

        Raises:
            WaitTimeoutError: If it does not come in time.
            DataError: If it cannot be used. What the user's code raises comes out.
        """
        while True:
            self.begin(phase, part, key)
            try:
                return self._wait(phase, part, key, self._begun[phase, part].rows)
            except LostPieceError:
                self.forget(phase, ())  # they may be where this one was
                key = self._found_again(phase, part, key)
            finally:
                self._drop((phase, part))
                self._channel.check()  # Dask fails as it likes while a worker closes

    def stream(self, phase: str, part: int, size: int, ahead: int) -> Iterator[Rows]:
        """Go through a part that is sequential, bit by bit.

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Its number.
            size: About so many rows at a time.
            ahead: So many such bits are loaded while one is trained on.
        """
        own = Loader(1, "daskdl-stream")  # the order counts
        source = self.source(phase)
        assert source is not None, "what is sequential is sent as a whole"
        bits = source.stream(part, size)
        coming = [own.submit(lambda: next(bits, None)) for _ in range(ahead + 1)]
        try:
            while True:
                bit = self._wait(phase, part, "", coming.pop(0))
                if bit is None:
                    return
                coming.append(own.submit(lambda: next(bits, None)))
                yield bit
                del bit  # or it would stay while the next is waited for
        finally:
            own.close()

    def separate(
        self, phase: str, part: int, key: str, skips: bool
    ) -> list[tuple[str, Rows]]:
        """Get a part that is made of several files or parts one by one.

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Its number.
            key: Dask's, of a part that workers hold; else "".
            skips: Whether those that cannot be read are left out; else the error is
                that of the first.

        Returns:
            Names and rows; nothing if it can only be had as a whole.
        """
        job = self._loader.submit(
            lambda: list(separated(self._separate(phase, part, key), skips))
        )
        return self._wait(phase, part, "", job)

    def _separate(
        self, phase: str, part: int, key: str
    ) -> Sequence[tuple[str, Callable[[], Rows]]]:
        """See `Source.separate`; it runs in another thread."""
        source = self.source(phase)
        return () if source is None else source.separate(part)

    def name(self, phase: str, part: int) -> str:
        """What a part is called in messages, with its file where that is known."""
        own = self._name(phase, part)
        if own.startswith(("part ", "parts ")):  # as the user counts them
            return f"{own} of the {phase} data"
        return f"part {part} of the {phase} data ({own})"

    def _name(self, phase: str, part: int) -> str:
        """See `Source.name`; its number where nobody has said more."""
        source = self.source(phase)
        return f"part {part}" if source is None else source.name(part)

    def close(self) -> None:
        """Load nothing any more."""
        for which in list(self._begun):
            self._drop(which)
        self._loader.close()

    @abstractmethod
    def source(self, phase: str) -> Source | None:
        """What the parts of a phase are of, if it is here as a whole."""

    @abstractmethod
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        """What loads a part; it runs in another thread."""

    def _still(self, phase: str, part: int, key: str) -> bool:
        """Whether it may still come under this key."""
        return True

    def _found_again(self, phase: str, part: int, key: str) -> str:
        """Under which key a part is that was lost."""
        raise AssertionError("nothing is lost in this process")

    def _wait(self, phase: str, part: int, key: str, coming: "Future[T]") -> T:
        bound = self._timeouts.bound("data")
        look_s = min(self._timeouts.silence / 4, bound.seconds)
        # Who fetches a result has the same bound, and says then where it is.
        most_s = bound.seconds + (ASK_S if key else 0.0)
        for waited in itertools.count(1):
            if self._channel.wait_for_data(coming, look_s):
                return coming.result()
            if waited * look_s >= most_s:
                raise WaitTimeoutError(
                    f"no part came within {bound}; it is waiting for "
                    f"{self.name(phase, part)} to be loaded"
                )
            if key and not coming.running():  # those before it may hang
                self.forget(phase, (part,))
            if not self._still(phase, part, key):
                raise LostPieceError(f"part {part} is on a worker that hangs")
        raise AssertionError


class LocalStore(Store):
    """Parts are cut, loaded or computed in this process.

    Nothing is kept: what has to be computed is computed again in each epoch.

    Args:
        sources: Of each phase; all replicas may share them.
        channel: See `Store`, as `timeouts` and `threads`.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        channel: Channel,
        timeouts: Timeouts,
        threads: int,
    ) -> None:
        super().__init__(channel, timeouts, threads)
        self._sources = sources

    @override
    def source(self, phase: str) -> Source:
        return self._sources[phase]

    @override
    def begin(self, phase: str, part: int, key: str) -> None:
        if not self._sources[phase].here:  # else it is only to be cut
            super().begin(phase, part, key)

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        if self._sources[phase].here:
            return self._sources[phase].load(part)
        return super().rows(phase, part, key)

    @override
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        return lambda: self._sources[phase].load(part)
