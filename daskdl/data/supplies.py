"""The data of one phase of a run, as its client keeps them for the workers.

Tensors never cross Dask: what is sent of a part are numpy arrays, or packed tasks.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from distributed import Client
from typing_extensions import override

from daskdl.config import Bound
from daskdl.data import batching
from daskdl.data.futures import new_key, release
from daskdl.data.part_graph import PartGraph
from daskdl.data.scattering import scatter
from daskdl.data.source import Source
from daskdl.errors import OptionError
from daskdl.serialization import Packed

logger = logging.getLogger(__name__)

# Small parts go together, so that thousands do not take minutes; more would be held
# twice while they are on their way.
SENT_BYTES = 4 * 2**20


class Supply(ABC):
    """Has to be released. A context manager, too.

    Attributes:
        source: What the parts are of.
        keys: For each part the Dask key under which a worker holds it, or "".
        packed: What goes to every worker once, or None.
    """

    source: Source
    keys: Sequence[str]
    packed: Packed[Source] | None = None

    @abstractmethod
    def lost(self) -> list[tuple[int, str]]:
        """Parts and their keys that died with the only worker that held them."""

    @abstractmethod
    def restore(self, part: int, key: str, workers: Sequence[str]) -> str:
        """Send a part again that was lost with its worker.

        Args:
            part: Its number.
            key: That was found lost. If it is not the part's key any more, it has
                been sent again already.
            workers: Addresses to choose from.

        Returns:
            The new key.

        Raises:
            OSError: If a worker is gone, or does not take it in time.
        """

    def release(self) -> None:  # noqa: B027 - some hold nothing
        """Let go of what workers hold; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Carried(Supply):
    """A source that every worker gets as a whole, and loads parts of by itself.

    Args:
        source: Files, a dataset.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.keys = ("",) * source.parts
        self.packed = Packed(source, "X")

    @override
    def lost(self) -> list[tuple[int, str]]:
        return []

    @override
    def restore(self, part: int, key: str, workers: Sequence[str]) -> str:
        raise AssertionError("no worker holds a part")


class Scattered(Supply):
    """Each part is sent to one worker, and kept there.

    Args:
        source: Whose parts are sent apart; kept, to send lost ones again.
        client: A synchronous client.
        workers: Addresses to spread the parts over, evenly; a part whose results are
            on one of them goes there.
        bound: For a worker to take what is sent to it at a time.
    """

    _futures: dict[int, Any]  # Dask futures, by part

    def __init__(
        self, source: Source, client: Client, workers: Sequence[str], bound: Bound
    ) -> None:
        self.source = source
        self._client = client
        self._bound = bound
        self._futures = {}
        self._released = False
        with contextlib.ExitStack() as unless_complete:
            unless_complete.callback(self.release)  # also after Ctrl-C
            self._send(range(source.parts), workers)
            unless_complete.pop_all()

    @property
    def keys(self) -> Sequence[str]:  # type: ignore[override]
        """Of each part, as it is now."""
        return [str(self._futures[part].key) for part in sorted(self._futures)]

    @override
    def lost(self) -> list[tuple[int, str]]:
        ends = ("lost", "cancelled")  # statuses of Dask's
        lost = [p for p, future in self._futures.items() if future.status in ends]
        return [(part, str(self._futures[part].key)) for part in sorted(lost)]

    @override
    def restore(self, part: int, key: str, workers: Sequence[str]) -> str:
        former = self._futures.get(part)
        if former is None or former.key == key:
            self._send([part], workers)
            release([] if former is None else [former])
        return str(self._futures[part].key)

    @override
    def release(self) -> None:
        self._released = True
        release(self._futures.values())
        self._futures.clear()

    def _send(self, parts: Sequence[int], workers: Sequence[str]) -> None:
        if self._released:
            raise OptionError("the data have been released")
        if not workers:
            raise OptionError("workers must name at least one worker, got none")
        homes = _spread(parts, workers, _holders(self.source, self._client, parts))
        there = list(workers)
        for worker in dict.fromkeys(homes.values()):
            left = [part for part in parts if homes[part] == worker]
            try:
                for together in self._portions(left):
                    what = f"parts {min(together)} to {max(together)} of the data"
                    self._scatter(together, worker, what)
                    left = left[len(together) :]
            except OSError as error:  # it has gone, or hangs: the others take them
                there.remove(worker)
                if not there:
                    raise
                logger.warning("no data on %s: %s", worker, error)
                self._send(left, there)

    def _portions(self, parts: Sequence[int]) -> Iterator[dict[int, Any]]:
        """What is sent of these parts, as much at a time as should be."""
        together: dict[int, Any] = {}
        nbytes = 0
        for part in parts:
            together[part] = content = content_of(self.source, part)
            nbytes += bytes_of(content)
            if nbytes >= SENT_BYTES:
                yield together
                together, nbytes = {}, 0
        if together:
            yield together

    def _scatter(self, contents: Mapping[int, Any], worker: str, what: str) -> None:
        # A new name each time: the scheduler may still be forgetting the old.
        keys = {part: f"{new_key('part')}-{part}" for part in contents}
        data = {keys[part]: content for part, content in contents.items()}
        what += f" ({sum(bytes_of(content) for content in data.values())} bytes)"
        futures = scatter(self._client, data, [worker], self._bound, what)
        self._futures |= {part: futures[key] for part, key in keys.items()}


def supply_of(
    source: Source, client: Client, workers: Sequence[str], bound: Bound
) -> Supply:
    """Choose how parts come to the workers; arguments as of `Scattered`."""
    if source.apart:
        return Scattered(source, client, workers, bound)
    return Carried(source)


def content_of(source: Source, part: int) -> Any:
    """What is sent of a part that is sent by itself: rows, or packed tasks."""
    content = source.packed(part)
    return Packed(content, "X") if isinstance(content, PartGraph) else content


def bytes_of(content: Any) -> int:
    """How much of the network and of memory that takes."""
    if isinstance(content, Packed):
        return int(content.payload.nbytes)
    return batching.nbytes(content)


def _holders(
    source: Source, client: Client, parts: Sequence[int]
) -> dict[int, Sequence[str]]:
    """Who has what a part is made from, by part."""
    needs = {part: source.needs(part)[0] for part in parts if source.needs(part)}
    if not needs:
        return {}
    asked = client.sync(client.scheduler.who_has, keys=list(set(needs.values())))
    return {part: asked.get(key, ()) for part, key in needs.items()}


def _spread(
    parts: Sequence[int], workers: Sequence[str], holders: Mapping[int, Sequence[str]]
) -> dict[int, str]:
    """A worker per part: one that has it already, else any; the one with the fewest."""
    there = {p: [w for w in held if w in workers] for p, held in holders.items()}
    count = dict.fromkeys(workers, 0)
    chosen = {}
    for part in sorted(parts, key=lambda part: not there.get(part)):
        chosen[part] = min(there.get(part) or workers, key=count.__getitem__)
        count[chosen[part]] += 1
    return chosen
