"""Data on a cluster: futures, passes over parts, and the placement of a fit's parts.

Parts that are sent by themselves go to one worker each; other sources to all workers.
Tensors never cross Dask: numpy arrays and packed tasks do.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from distributed import (
    Client,
    Future,
    Worker,
    as_completed,
    default_client,
    get_client,
    get_worker,
)
from distributed.client import FutureCancelledError
from distributed.utils_comm import gather_from_workers
from typing_extensions import override

from daskdl.config import Bound, Timeouts
from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.source import PartGraph, Separate, Source
from daskdl.errors import DataError, LostPieceError, OptionError, WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.util import check_installed

logger = logging.getLogger(__name__)


def new_key(what: str) -> str:
    """A key for Dask that says whose it is, and that nothing else has."""
    return f"daskdl-{what}-{uuid.uuid4().hex}"


def release(futures: Iterable[Any]) -> None:
    """Let go of Dask futures, so that what is not computed yet never is.

    Not by cancelling them, which the scheduler logs key by key.
    """
    for future in futures:
        future.release()


def workers_of(client: Client) -> list[str]:
    """Addresses of the workers of a synchronous client, in a fixed order, >= 1."""
    if client.asynchronous:
        raise OptionError(
            f"client must be synchronous, got {client}; use Client(...) instead of "
            "await Client(..., asynchronous=True)"
        )
    addresses = sorted(client.nthreads())
    if not addresses:
        raise OptionError(
            f"{client} has no workers; wait for some with client.wait_for_workers(1)"
        )
    return addresses


def answers_of(
    client: Client,
    workers: Sequence[str],
    function: Callable[[], Any],
    bound: Bound,
    what: str,
) -> dict[str, Any]:
    """Call a function on workers, beside their tasks."""

    async def ask() -> Any:
        # Dask by itself waits for a worker that hangs.
        asking = client.run(function, workers=list(workers))
        return await asyncio.wait_for(asking, bound.seconds)

    try:
        answers: dict[str, Any] = client.sync(ask)
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"not all of {', '.join(workers)} said within {bound} {what}"
        ) from error
    return answers


ASK_S = 5.0  # for a better message, after a bound was passed anyway
LOOK_S = 0.25  # between two looks whether nobody wants it any more


class Fetcher:
    """Gets results of Dask's to one worker; made in a task, used by any thread.

    Dask moves them, so they count and spill like any others. The task must have
    seceded, or its worker needs a second thread.

    Attributes:
        names: What parts are called that were sent as tasks, by key.
    """

    names: dict[str, str]

    def __init__(self) -> None:
        self.names = {}
        self._worker: Worker = get_worker()
        self._client: Client = get_client()

    def here(self, key: Any) -> Any | None:
        """A result that is in this worker's store; None if it is not."""
        return self._worker.data.get(key)

    def rows(self, key: str, timeout_s: float, unwanted: Callable[[], bool]) -> Rows:
        """Get a part, whether it is here as rows or has to be computed."""
        content = self.fetch(key, timeout_s, unwanted)
        if not isinstance(content, Packed):
            x, y = content
            return x, y
        graph: PartGraph = content.unpack()
        self.names[key] = graph.name
        return graph.rows(self._needs(graph, timeout_s, unwanted))

    def separate(
        self, key: str, timeout_s: float, unwanted: Callable[[], bool]
    ) -> Separate:
        """What a part is made of, see `Source.separate`; arguments as of `rows`."""
        content = self.fetch(key, timeout_s, unwanted)
        if not isinstance(content, Packed):
            return []
        graph: PartGraph = content.unpack()
        return graph.separate(self._needs(graph, timeout_s, unwanted))

    def _needs(
        self, graph: PartGraph, timeout_s: float, unwanted: Callable[[], bool]
    ) -> dict[Any, Any]:
        """All results that a part begins with; those elsewhere in one request."""
        found = {key: self.here(key) for key in graph.needs}
        missing = [key for key, value in found.items() if value is None]
        if len(missing) > 1:
            gathered = self._gathered(missing, timeout_s, unwanted)
            found |= gathered
            missing = [key for key in missing if key not in gathered]
        # One by one, which says which is lost.
        return found | {k: self._need(k, timeout_s, unwanted) for k in missing}

    def _gathered(
        self, keys: Sequence[Any], timeout_s: float, unwanted: Callable[[], bool]
    ) -> dict[Any, Any]:
        """Those of many small results that their workers hand over in one request."""
        loop = self._client.loop.asyncio_loop
        coming = asyncio.run_coroutine_threadsafe(_gather(self._client, keys), loop)
        deadline = time.monotonic() + timeout_s
        while not concurrent.futures.wait([coming], LOOK_S).done:
            if time.monotonic() >= deadline or unwanted():
                coming.cancel()
                return {}
        return {} if isinstance(coming.exception(), OSError) else coming.result()

    def _need(self, key: Any, timeout_s: float, unwanted: Callable[[], bool]) -> Any:
        """A result that a part begins with; to send the part again is of no use."""
        try:
            return self.fetch(key, timeout_s, unwanted)
        except LostPieceError as error:
            if unwanted():
                raise
            raise DataError(
                f"{key} was lost with the worker that held it, and Dask cannot compute "
                "it again; persist() what comes from tasks, or scatter with "
                "broadcast=True"
            ) from error

    def fetch(self, key: Any, timeout_s: float, unwanted: Callable[[], bool]) -> Any:
        """Get one result from this worker's store, else from another's; see `rows`."""
        held = self.here(key)
        if held is not None:
            return held
        moved = self._client.submit(
            _itself,
            Future(key, self._client),
            key=new_key("moved"),
            workers=[self._worker.address],
        )
        try:
            self._wait(moved, key, timeout_s, unwanted)
            # It is here: a client would fetch it through a connection to this worker.
            held = self._worker.data.get(moved.key)
            return moved.result() if held is None else held
        except FutureCancelledError as error:
            raise LostPieceError(
                f"{key} was lost with the worker that held it"
            ) from error
        finally:
            moved.release()

    def _wait(
        self, moved: Any, key: Any, timeout_s: float, unwanted: Callable[[], bool]
    ) -> None:
        ended = threading.Event()
        moved.add_done_callback(lambda _: ended.set())
        deadline = time.monotonic() + timeout_s
        while not ended.wait(LOOK_S):
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{key} did not come to {self._worker.address} within "
                    f"{timeout_s:g} s (daskdl.timeouts.data); {self._where(key)}"
                )
            if unwanted():
                raise LostPieceError(f"{key} is not wanted any more")

    def _where(self, key: Any) -> str:
        """What the scheduler says of a result that does not come."""
        client = self._client
        try:
            answers = client.sync(_ask_where, client, key, callback_timeout=ASK_S)
        except (OSError, TimeoutError):
            return f"the scheduler did not say within {ASK_S:g} s where it is"
        holders, computing = answers
        if holders:
            return f"it is held by {', '.join(holders)} and was not moved in time"
        if computing:
            return f"it is being computed on {', '.join(computing)}"
        return "nobody has it; it waits for Dask to compute what it is made of"


async def _gather(client: Client, keys: Sequence[Any]) -> dict[Any, Any]:
    held = await client.scheduler.who_has(keys=keys)
    found, *_ = await gather_from_workers(held, rpc=client.rpc)
    return dict(found)


async def _ask_where(client: Any, key: Any) -> tuple[list[str], list[str]]:
    held = await client.scheduler.who_has(keys=[key])
    processing = await client.scheduler.processing(workers=None)
    computing = [worker for worker, keys in processing.items() if key in keys]
    return list(held.get(key, ())), computing


def _itself(rows: Any) -> Any:
    return rows


def scatter(
    client: Any,
    data: Mapping[str, Any],
    workers: Sequence[str],
    bound: Bound,
    what: str,
) -> dict[str, Any]:
    """Put each value on all of these workers; returns the futures by key.

    Dask by itself waits for a worker that hangs as long as its connection is open.
    """

    async def send() -> Any:
        sending = asyncio.ensure_future(
            client.scatter(
                dict(data),
                workers=list(workers),
                broadcast=len(workers) > 1,
                asynchronous=True,
            )
        )
        done, _ = await asyncio.wait({sending}, timeout=bound.seconds)
        if not done:
            # Not cancelled: the scheduler goes on, and would keep what arrives late.
            sending.add_done_callback(_let_go)
            raise WaitTimeoutError(
                f"{what} could not be sent to {', '.join(workers)} within {bound}; is "
                "the way there slow, or a worker busy?"
            )
        return sending.result()

    try:
        futures: dict[str, Any] = client.sync(send)
    except (KeyError, ValueError) as error:
        raise OSError(f"Dask has removed a worker of {list(workers)}") from error
    return futures


def _let_go(sending: asyncio.Task[Mapping[str, Any]]) -> None:
    """Nobody waits any more for what was sent."""
    if sending.cancelled() or sending.exception() is not None:
        return
    for future in sending.result().values():
        future.release()


# Small parts go together, so that thousands do not take minutes; more would be held
# twice while they are on their way.
SENT_BYTES = 4 * 2**20


class DataPlacement(ABC):
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
        """Send a part again that was lost with its worker."""

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


class Broadcast(DataPlacement):
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


class Scattered(DataPlacement):
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


def place_data(
    source: Source, client: Client, workers: Sequence[str], bound: Bound
) -> DataPlacement:
    """Choose how parts come to the workers; arguments as of `Scattered`."""
    if source.apart:
        return Scattered(source, client, workers, bound)
    return Broadcast(source)


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


T = TypeVar("T")

# Enough that no thread of a worker waits for the client, few enough that what is not
# begun costs nothing.
TASKS_PER_THREAD = 2

LISTED_S = 0.5  # until Dask has noticed, at most, that a worker has gone
MOST_LOSSES = 3  # of a part, as Dask's `allowed-failures`: it may be what ends them


def map_parts(
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
        """The other workers. One that has gone alone is given time to be replaced."""
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
