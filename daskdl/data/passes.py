"""One pass over all parts of a source: a function is called where each part is.

For what is done once, beside training: to count, to check, to export.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from distributed import Client, Future, as_completed, default_client
from distributed.client import FutureCancelledError
from typing_extensions import override

from daskdl.cluster import check_installed
from daskdl.config import Timeouts
from daskdl.data.batching import Rows
from daskdl.data.futures import new_key, release, workers_of
from daskdl.data.part_graph import PartGraph
from daskdl.data.scattering import scatter
from daskdl.data.source import Source
from daskdl.data.supplies import content_of
from daskdl.errors import DataError, WaitTimeoutError
from daskdl.serialization import Packed

T = TypeVar("T")

# Enough that no thread of a worker waits for the client, few enough that what is not
# begun costs nothing.
TASKS_PER_THREAD = 2

LISTED_S = 0.5  # until Dask has noticed, at most, that a worker has gone
MOST_LOSSES = 3  # of a part, as Dask's `allowed-failures`: it may be what ends them


def each_part(
    source: Source,
    function: Callable[[Source, int], T],
    client: Client | Literal[False] | None = None,
    *,
    parts: Iterable[int] | None = None,
    send: bool = False,
) -> Iterator[tuple[int, T]]:
    """Call a function once for each part, and yield what it returns as it comes.

    Args:
        source: What the parts are of.
        function: Of the source, as it is where it is called, and the number of a part.
            What it raises comes out here.
        client: Synchronous: one Dask task for each part. None: the default client, if
            there is one. False: in this process.
        parts: Numbers; None: all.
        send: Also what is in this process's memory goes to the workers; without, it
            is gone through here.

    Yields:
        Pairs (part, result), in any order.
    """
    numbers = iter(range(source.parts) if parts is None else parts)
    stays = client is False or (source.here and not send)
    found = None if stays else client or _default()
    if found is None:
        for part in numbers:
            yield part, function(source, part)
        return
    own = _Pass(source, function, found)
    try:
        yield from own.results(numbers)
    finally:
        own.end()


class _Sent(Source):
    """A source of which one part is here, or what it is made from.

    Args:
        name: Of the part.
        content: Rows, or packed tasks.
        held: Results that these begin with, by key.
    """

    parts = 1
    lengths = None
    first = None

    def __init__(self, name: str, content: Any, held: Mapping[Any, Any]) -> None:
        self._name = name
        self._content = content
        self._held = held

    @override
    def name(self, part: int) -> str:
        return self._name

    @override
    def load(self, part: int) -> Rows:
        if isinstance(self._content, Packed):
            graph: PartGraph = self._content.unpack()
            return graph.rows(self._held)
        x, y = self._content
        return x, y


class _Pass:
    """One pass on a cluster.

    Args:
        source: What the parts are of.
        function: Called for each.
        client: Of the cluster.
    """

    def __init__(
        self, source: Source, function: Callable[[Source, int], Any], client: Client
    ) -> None:
        self._source = source
        self._client = client
        self._workers = workers_of(client)
        check_installed(client)
        self._timeouts = Timeouts.from_config()
        self._bound = self._timeouts.bound("data")
        self._packed: dict[str, Packed[Any]] = {
            "function": Packed(function, "function")
        }
        if not source.apart:
            self._packed["source"] = Packed(source, "X")
        self._sent = self._share()
        self._running: dict[Any, int] = {}
        self._lost: Counter[int] = Counter()  # how often, by part

    def _share(self) -> dict[str, Any]:
        """Send all workers what each needs; futures by what they are of."""
        nbytes = sum(value.payload.nbytes for value in self._packed.values())
        what = f"what is to be done ({nbytes} bytes)"
        keys = {name: new_key(name) for name in self._packed}
        data = {keys[name]: value for name, value in self._packed.items()}
        sent = scatter(self._client, data, self._workers, self._bound, what)
        return {name: sent[key] for name, key in keys.items()}

    def results(self, numbers: Iterator[int]) -> Iterator[tuple[int, Any]]:
        """Yield results as they come; the next part is begun for each."""
        most = TASKS_PER_THREAD * max(sum(self._client.nthreads().values()), 1)
        coming = as_completed(loop=self._client.loop)
        for _, part in zip(range(most), numbers, strict=False):
            coming.add(self._begin(part))
        for future in coming:
            part = self._running[future]
            try:
                result = future.result()  # one that failed is let go of in the end
            except FutureCancelledError as error:
                del self._running[future]
                self._recover(part, error)
                coming.add(self._begin(part))
                continue
            del self._running[future]
            future.release()
            for following in itertools.islice(numbers, 1):
                coming.add(self._begin(following))
            yield part, result

    def _recover(self, part: int, error: BaseException) -> None:
        """What a part was sent was lost with a worker: it goes to another one."""
        self._count_loss(part, error)
        self._workers = self._there()
        if any(future.cancelled() for future in self._sent.values()):
            release(self._sent.values())
            try:
                self._sent = self._share()
            except OSError as gone:  # one more, meanwhile
                self._recover(part, gone)

    def _count_loss(self, part: int, error: BaseException) -> None:
        self._lost[part] += 1
        if self._lost[part] > MOST_LOSSES:
            raise DataError(
                f"{self._source.name(part)} was lost with its worker "
                f"{self._lost[part]} times; does it, or one that was there with it, "
                "fit into a worker's memory, and is what it is made from still there?"
            ) from error

    def _there(self) -> list[str]:
        """The workers; if there is none, the last may be about to be started again."""
        bound = self._timeouts.bound("join")
        while not (workers := sorted(self._client.nthreads())):
            try:
                self._client.wait_for_workers(1, timeout=bound.seconds)
            except TimeoutError as error:
                raise WaitTimeoutError(
                    f"no worker came within {bound} after the last one was lost"
                ) from error
        return workers

    def _besides(self, home: str, error: OSError) -> list[str]:
        """The other workers. One that has gone alone is given time to be replaced.

        Raises:
            OSError: That is given, if there is only one, and it hangs.
        """
        others = [worker for worker in self._there() if worker != home]
        if others:
            return others
        if isinstance(error, WaitTimeoutError):
            raise error
        time.sleep(LISTED_S)
        return self._there()

    def end(self) -> None:
        """Leave nothing of it on the cluster."""
        release(list(self._running))
        release(self._sent.values())

    def _begin(self, part: int) -> Any:
        key = f"{new_key('pass')}-{part}"
        task: tuple[Any, ...]
        function = self._sent["function"]
        if self._source.apart:
            task = (_apply_apart, function, *self._apart(part), part)
        else:
            task = (_apply, function, self._sent["source"], part)
        future = self._client.submit(*task, key=key, pure=False)
        self._running[future] = part
        return future

    def _apart(self, part: int) -> tuple[Any, ...]:
        needs = self._source.needs(part)
        held = [Future(key, self._client) for key in needs]
        name = self._source.name(part)
        return name, self._placed(part, name), needs, held

    def _placed(self, part: int, name: str) -> Any:
        """The future of what a part is made of, on a worker that takes it."""
        content = {new_key("part"): content_of(self._source, part)}
        while True:
            home = self._workers[part % len(self._workers)]
            try:
                sent = scatter(self._client, content, [home], self._bound, name)
            except OSError as error:  # it has gone, or hangs: another one
                self._count_loss(part, error)
                self._workers = self._besides(home, error)
            else:
                (future,) = sent.values()
                return future


def _apply(
    function: Packed[Callable[[Source, int], T]], source: Packed[Source], part: int
) -> T:
    """The task of a part of a source that each worker has."""
    return function.shared()(source.shared(), part)


def _apply_apart(
    function: Packed[Callable[[Source, int], T]],
    name: str,
    content: Any,
    keys: tuple[Any, ...],
    values: list[Any],
    part: int,
) -> T:
    """The task of a part that was sent by itself."""
    held = dict(zip(keys, values, strict=True))
    return function.shared()(_Sent(name, content, held), part)


def _default() -> Client | None:
    try:
        return default_client()
    except ValueError:  # Dask's way to say that there is none
        return None
