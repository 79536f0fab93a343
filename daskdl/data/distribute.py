"""Place parts of a source on a cluster, fetch them, and map functions over them.

If `Source.sent_by_part`, each part is sent to one worker; otherwise each worker gets
the whole source.
Dask transfers numpy arrays and packed tasks, never tensors.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import dask
import numpy as np
from distributed import Client, Future, Worker, as_completed, get_client, get_worker
from distributed.client import FutureCancelledError
from distributed.utils_comm import gather_from_workers
from typing_extensions import override

from daskdl.config import Bound, Timeouts
from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.source import PartGraph, Pieces, Source
from daskdl.errors import DataError, LostPieceError, OptionError, WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.util import check_installed, running_client

logger = logging.getLogger(__name__)


def new_key(what: str) -> str:
    """A unique key for Dask that starts with ``daskdl-``."""
    return f"daskdl-{what}-{uuid.uuid4().hex}"


def release(futures: Iterable[Any]) -> None:
    """Release futures; the scheduler would log every key that is cancelled instead."""
    for future in futures:
        future.release()


def check_annotations() -> None:
    """Raise an OptionError inside a `dask.annotate` block that places tasks.

    daskdl binds tasks to workers. With an annotation in addition, they might never run.
    """
    placement = {"workers", "allow_other_workers", "resources"}
    if refused := sorted(placement.intersection(dask.get_annotations())):
        raise OptionError(
            "tasks of daskdl are placed on all workers of the client, got an enclosing "
            f"dask.annotate({', '.join(f'{name}=' for name in refused)}); call it "
            "outside of that block, and annotate only the data in it"
        )


def workers_of(client: Client) -> list[str]:
    """Sorted addresses of the workers of a synchronous client, at least one."""
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
    """Call a function on workers, beside their tasks; `what` is for the message."""

    async def ask() -> Any:
        # Without a bound, Dask would wait for a worker that hangs.
        asking = client.run(function, workers=list(workers))
        return await asyncio.wait_for(asking, bound.seconds)

    try:
        answers: dict[str, Any] = client.sync(ask)
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"not all of {', '.join(workers)} said within {bound} {what}"
        ) from error
    return answers


def responsive(client: Client, workers: Iterable[str]) -> set[str]:
    """Return the workers that are connected and answer within `ASK_S`."""

    async def ask() -> set[str]:
        asking = {
            worker: asyncio.ensure_future(
                client.run(_answer, workers=[worker], on_error="return")
            )
            for worker in workers
        }
        if asking:
            _, waiting = await asyncio.wait(asking.values(), timeout=ASK_S)
            for task in waiting:
                task.cancel()
        return {
            worker
            for worker, task in asking.items()
            if task.done()
            and not task.cancelled()
            and not task.exception()
            and task.result() == {worker: True}
        }

    connected: set[str] = client.sync(ask)
    return connected


def _answer() -> bool:
    return True


ASK_S = 5.0  # maximum wait for details of an error message, after a timeout
LOOK_S = 0.25  # between two checks whether the result is still needed


class Fetcher:
    """Fetches results of Dask tasks to one worker; made in a task, used by any thread.

    Dask moves the results, so its memory limits and spilling apply to them. The task
    must have seceded, or its worker needs a second thread. Each result has `timeout_s`
    to arrive.
    """

    def __init__(self, timeout_s: float) -> None:
        self.names: dict[str, str] = {}  # of the parts that were sent as tasks, by key
        self._timeout_s = timeout_s
        self._worker: Worker = get_worker()
        self._client: Client = get_client()

    def here(self, key: Any) -> Any | None:
        """Return a result in this worker's store, or None."""
        return self._worker.data.get(key)

    def rows(self, key: str, unwanted: Callable[[], bool]) -> Rows:
        """Fetch a part that was sent as rows, or compute one that was sent as tasks.

        The wait ends if the part is `unwanted` by now.
        """
        content = self.fetch(key, unwanted)
        if not isinstance(content, Packed):
            x, y = content
            return x, y
        graph: PartGraph = content.unpack()
        self.names[key] = graph.name
        return graph.rows(self._needs(graph, unwanted))

    def pieces(self, key: str, unwanted: Callable[[], bool]) -> Pieces:
        """Return the pieces of a part, see `Source.pieces` and `rows`."""
        content = self.fetch(key, unwanted)
        if not isinstance(content, Packed):
            return []
        graph: PartGraph = content.unpack()
        return graph.pieces(self._needs(graph, unwanted))

    def _needs(self, graph: PartGraph, unwanted: Callable[[], bool]) -> dict[Any, Any]:
        """Fetch the results that a part depends on; several in one request."""
        results = {key: self.here(key) for key in graph.needs}
        missing = [key for key, value in results.items() if value is None]
        if len(missing) > 1:
            results |= self._gathered(missing, unwanted)
            missing = [key for key, value in results.items() if value is None]
        # One by one: the error then names the lost one.
        return results | {key: self._need(key, unwanted) for key in missing}

    def _gathered(
        self, keys: Sequence[Any], unwanted: Callable[[], bool]
    ) -> dict[Any, Any]:
        """Fetch many small results straight from their workers; some may be missing."""

        async def gather() -> dict[Any, Any]:
            held = await self._client.scheduler.who_has(keys=keys)
            values, *_ = await gather_from_workers(held, rpc=self._client.rpc)
            return dict(values)

        loop = self._client.loop.asyncio_loop
        coming = asyncio.run_coroutine_threadsafe(gather(), loop)
        deadline = time.monotonic() + self._timeout_s
        while not concurrent.futures.wait([coming], LOOK_S).done:
            if time.monotonic() >= deadline or unwanted():
                coming.cancel()
                return {}
        return {} if isinstance(coming.exception(), OSError) else coming.result()

    def _need(self, key: Any, unwanted: Callable[[], bool]) -> Any:
        """Fetch a result that a part depends on.

        A lost result raises a DataError, because a part that is sent again needs the
        result, too.
        """
        try:
            return self.fetch(key, unwanted)
        except LostPieceError as error:
            if unwanted():
                raise
            raise DataError(
                f"{key} was lost with the worker that held it, and Dask cannot compute "
                "it again; persist() what comes from tasks, or scatter with "
                "broadcast=True"
            ) from error

    def fetch(self, key: Any, unwanted: Callable[[], bool]) -> Any:
        """Fetch a result from this worker's store, or another's; see `rows`."""
        held = self.here(key)
        if held is not None:
            return held
        address = self._worker.address
        moved = self._client.submit(
            _itself, Future(key, self._client), key=new_key("moved"), workers=[address]
        )
        ended = threading.Event()
        moved.add_done_callback(lambda _: ended.set())
        deadline = time.monotonic() + self._timeout_s
        try:
            while not ended.wait(LOOK_S):
                if time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"{key} did not come to {address} within {self._timeout_s:g} s "
                        f"(daskdl.timeouts.data); {self._where(key)}"
                    )
                if unwanted():
                    raise LostPieceError(f"{key} is no longer needed")
            # From the store: the client would open a connection to this very worker.
            held = self.here(moved.key)
            return moved.result() if held is None else held
        except FutureCancelledError as error:
            raise LostPieceError(
                f"{key} was lost with the worker that held it"
            ) from error
        finally:
            moved.release()

    def _where(self, key: Any) -> str:
        """Ask the scheduler about a result that does not arrive."""

        async def ask() -> tuple[Any, Any]:
            scheduler: Any = self._client.scheduler
            held = await scheduler.who_has(keys=[key])
            return held.get(key), await scheduler.processing(workers=None)

        try:
            holders, processing = self._client.sync(ask, callback_timeout=ASK_S)
        except (OSError, TimeoutError):
            return f"the scheduler did not say within {ASK_S:g} s where it is"
        if holders:
            return f"it is held by {', '.join(holders)} and was not moved in time"
        computing = [worker for worker, keys in processing.items() if key in keys]
        if computing:
            return f"it is being computed on {', '.join(computing)}"
        return "no worker has it; it waits for Dask to compute what it depends on"


def _itself(rows: Any) -> Any:
    return rows


def scatter(
    client: Any,
    data: Mapping[str, Any],
    workers: Sequence[str],
    bound: Bound,
    what: str,
) -> dict[str, Any]:
    """Put each value on all of these workers; return the futures by key.

    Without the bound, Dask would wait for a worker that hangs as long as its connection
    is open. `what` names the values in the message. An OSError means that a worker has
    left, or does not take the values in time.
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
            # Not cancelled: the scheduler would go on, and keep what arrives late.
            sending.add_done_callback(_release_late)
            raise WaitTimeoutError(
                f"{what} could not be sent to {', '.join(workers)} within {bound}; is "
                "the network slow, or a worker busy?"
            )
        return sending.result()

    try:
        futures: dict[str, Any] = client.sync(send)
    except (KeyError, ValueError) as error:
        raise OSError(f"Dask has removed a worker of {list(workers)}") from error
    return futures


def _release_late(sending: asyncio.Task[Mapping[str, Any]]) -> None:
    if not sending.cancelled() and sending.exception() is None:
        release(sending.result().values())


LOST = ("lost", "cancelled")  # statuses of Dask's

# Small parts are sent together, so that thousands do not take minutes; larger messages
# would be held twice on their way.
SENT_BYTES = 4 * 2**20


class DataPlacement:
    """Places the parts of a source on workers, and holds them there until released.

    Each part of a source that is `sent_by_part` goes to one worker, preferably to one
    that holds a result that the part depends on. Any other source goes to every worker
    as a whole, with the replica. A context manager.

    Attributes:
        source: Source of the parts, kept so that lost parts can be sent again.
        packed: The whole source, for every worker; None if it is `sent_by_part`.
    """

    def __init__(
        self, source: Source, client: Client, workers: Sequence[str], bound: Bound
    ) -> None:
        self.source = source
        self.packed = None if source.sent_by_part else Packed(source, "X")
        self._futures: dict[int, Future] = {}  # by part
        self._client = client
        self._bound = bound
        source.prepare(client)
        if source.sent_by_part:
            with contextlib.ExitStack() as unless_complete:
                unless_complete.callback(self.release)  # also after Ctrl-C
                self._send(range(source.parts), workers)
                unless_complete.pop_all()

    @property
    def keys(self) -> Sequence[str]:
        """Current Dask key of each part; "" if no worker holds it."""
        if self.packed is not None:
            return [""] * self.source.parts
        return [str(self._futures[part].key) for part in sorted(self._futures)]

    def lost(self) -> list[tuple[int, str]]:
        """Parts, and their keys, that were lost with the only worker that held them."""
        lost = [p for p, future in self._futures.items() if future.status in LOST]
        return [(part, str(self._futures[part].key)) for part in sorted(lost)]

    def restore(self, part: int, key: str, workers: Sequence[str]) -> str:
        """Send a lost part again, unless its key is outdated; return the new key."""
        former = self._futures.get(part)
        if former is None:
            raise OptionError("the data have been released")
        if former.key == key:
            self._send([part], workers)
            former.release()
        return str(self._futures[part].key)

    def release(self) -> None:
        """Release the parts that workers hold; may be called again."""
        release(self._futures.values())
        self._futures.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _send(self, parts: Sequence[int], workers: Sequence[str]) -> None:
        needs = {part: keys[0] for part in parts if (keys := self.source.needs(part))}
        held: Mapping[Any, Sequence[str]] = {}
        if needs:
            who_has = self._client.scheduler.who_has
            held = self._client.sync(who_has, keys=list(set(needs.values())))
        holders = {part: held.get(key, ()) for part, key in needs.items()}
        sending = _sent(
            self.source, parts, self._client, [*workers], holders, self._bound
        )
        for sent in sending:
            self._futures |= sent


def _sent(
    source: Source,
    parts: Iterable[int],
    client: Client,
    workers: list[str],
    holders: Mapping[int, Sequence[str]],
    bound: Bound,
) -> Iterator[dict[int, Future]]:
    """Put each part on one worker, and yield the futures.

    Workers that have left or hang are removed from the list `workers`, and the others
    take their parts; an OSError if none is left. `holders` are the workers that hold a
    result that the part depends on, by part.
    """
    left = list(parts)
    while left:
        chosen = _spread(left, workers, holders)
        left = []
        for worker in dict.fromkeys(chosen.values()):
            unsent = [part for part in chosen if chosen[part] == worker]
            try:
                for contents in _portions(source, unsent):
                    # No local variable: a logged error may keep this frame.
                    yield _scattered(client, contents, worker, bound)
                    unsent = unsent[len(contents) :]
            except OSError as error:
                workers.remove(worker)
                if not workers:
                    raise
                logger.warning("no data on %s: %s", worker, error)
                left += unsent


def _scattered(
    client: Client, contents: Mapping[int, Any], worker: str, bound: Bound
) -> dict[int, Future]:
    nbytes = sum(map(bytes_of, contents.values()))
    what = f"parts {min(contents)} to {max(contents)} of the data ({nbytes} bytes)"
    # New keys: the scheduler may still be forgetting the old ones.
    keys = {part: f"{new_key('part')}-{part}" for part in contents}
    data = {keys[part]: content for part, content in contents.items()}
    futures = scatter(client, data, [worker], bound, what)
    return {part: futures[key] for part, key in keys.items()}


def _portions(source: Source, parts: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Yield the contents of these parts; small parts are sent together."""
    together: dict[int, Any] = {}
    nbytes = 0
    for part in parts:
        together[part] = content = content_of(source, part)
        nbytes += bytes_of(content)
        if nbytes >= SENT_BYTES:
            yield together
            together, nbytes = {}, 0
    if together:
        yield together


def content_of(source: Source, part: int) -> Any:
    """Return what is sent for a part: rows, or packed tasks."""
    content = source.content(part)
    return Packed(content, "X") if isinstance(content, PartGraph) else content


def bytes_of(content: Any) -> int:
    if isinstance(content, Packed):
        return int(content.payload.nbytes)
    return batching.nbytes(content)


def _spread(
    parts: Sequence[int], workers: Sequence[str], holders: Mapping[int, Sequence[str]]
) -> dict[int, str]:
    """Choose a worker for each part, a holder if possible; the least used of them."""
    present = {p: [w for w in held if w in workers] for p, held in holders.items()}
    count = dict.fromkeys(workers, 0)
    chosen = {}
    for part in sorted(parts, key=lambda part: not present.get(part)):
        chosen[part] = min(present.get(part) or workers, key=count.__getitem__)
        count[chosen[part]] += 1
    return chosen


T = TypeVar("T")

# Enough to keep every thread of the workers busy, and few enough that releasing tasks
# that have not started costs nothing.
TASKS_PER_THREAD = 2

LISTED_S = 0.5  # at most, until Dask has noticed that a worker has left
MAX_LOSSES = 3  # of a part, like Dask's `allowed-failures`: it may kill its workers


def map_parts(
    source: Source,
    function: Callable[[Source, int], T],
    client: Client | Literal[False] | None = None,
    *,
    parts: Iterable[int] | None = None,
    send: bool = False,
) -> Generator[tuple[int, T]]:
    """Call a function once for each part; yield parts and results as they arrive.

    Args:
        source: Source of the parts.
        function: Called with the source, or with one that has this part alone, and the
            part's number. Its exceptions are passed on.
        client: Synchronous: one Dask task for each part. None: the default client, if
            there is one. False: in this process.
        parts: Numbers; None: all.
        send: Whether data in this process's memory are sent to the workers; otherwise
            this process calls the function.
    """
    numbers = iter(range(source.parts) if parts is None else parts)
    stays = client is False or (source.in_memory and not send)
    cluster = None if stays else client or running_client()
    source.prepare(cluster or False)
    if cluster is None:
        for part in numbers:
            yield part, function(source, part)
        return
    tasks = _PartTasks(source, function, cluster)
    try:
        yield from tasks.results(numbers)
    finally:
        tasks.end()


class _SentPart(Source):
    """A source of a single part, whose content has arrived: rows, or packed tasks.

    `values` are the results that the tasks depend on, by `keys`.
    """

    parts = 1
    lengths = None
    first_rows = None

    def __init__(
        self, name: str, content: Any, keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        self._name = name
        self._content = content
        self._held = dict(zip(keys, values, strict=True))

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


# What all tasks need goes to the workers in blocks, each to another worker. So each
# passes on a share of it; a worker that had all of it would send it to all others.
BLOCK_BYTES = 2**20  # at least
MAX_BLOCKS = 32  # that a task depends on


class InBlocks:
    """Picklable: packed values in blocks of bytes, unpacked once in each process.

    Args:
        counts: Number of blocks of each value, by its argument in the user's call.
        block: The first block; tasks get the others as results of their own.
    """

    _counts: Mapping[str, int]
    _block: np.ndarray
    _lock: threading.Lock
    _values: list[Any] | None

    def __init__(self, counts: Mapping[str, int], block: np.ndarray) -> None:
        self.__setstate__({"counts": counts, "block": block})

    def unpacked(self, others: Sequence[np.ndarray]) -> list[Any]:
        """Return the values, which the threads of a process share.

        Args:
            others: The blocks after the first.
        """
        with self._lock:
            if self._values is None:
                blocks = iter([self._block, *others])
                self._values = [
                    Packed.of(
                        joined(itertools.islice(blocks, count)), argument
                    ).unpack()
                    for argument, count in self._counts.items()
                ]
            return self._values

    @override
    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self._block.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": self._counts, "block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._counts, self._block = state["counts"], state["block"]
        self._values, self._lock = None, threading.Lock()


def joined(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Join arrays; a single one is not copied."""
    arrays = list(blocks)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def in_blocks(
    packed: Sequence[Packed[Any]], places: int
) -> tuple[dict[str, int], list[np.ndarray]]:
    """Cut the bytes of packed values into about as many blocks as there are places.

    Returns:
        The number of blocks of each value, see `InBlocks`, and the blocks.
    """
    nbytes = sum(value.payload.nbytes for value in packed)
    size = max(-(-nbytes // places), BLOCK_BYTES)
    blocks = {
        value.argument: [
            value.payload[start : start + size]
            for start in range(0, value.payload.nbytes, size)
        ]
        for value in packed
    }
    counts = {argument: len(of_value) for argument, of_value in blocks.items()}
    return counts, list(itertools.chain.from_iterable(blocks.values()))


class _PartTasks:
    """One task for each part of a source, on a cluster that may lose workers."""

    def __init__(
        self, source: Source, function: Callable[[Source, int], Any], client: Client
    ) -> None:
        self._source = source
        self._client = client
        check_annotations()
        self._workers = workers_of(client)
        check_installed(client)
        self._timeouts = Timeouts.from_config()
        self._bound = self._timeouts.bound("data")
        self._packed: list[Packed[Any]] = [Packed(function, "function")]
        if not source.sent_by_part:
            self._packed.append(Packed(source, "X"))
        self._shared = self._share()
        self._running: dict[Future, int] = {}
        self._losses: Counter[int] = Counter()  # by part

    def _share(self) -> list[Future]:
        """Send the function, and the source unless it is `sent_by_part`, to workers.

        Each block goes to one worker; the others fetch it with their first task. If
        `scatter` copied it to all, Dask's active memory manager could drop a copy
        meanwhile, and `scatter` would copy it again: the scheduler may then forget that
        copy, which the worker keeps for ever (seen in distributed 2026.8).

        Returns:
            An `InBlocks`, and the blocks except for the first.
        """
        workers = list(self._workers)
        counts, blocks = in_blocks(self._packed, min(len(workers), MAX_BLOCKS))
        nbytes = sum(block.nbytes for block in blocks)
        what, name = f"the function and its data ({nbytes} bytes)", new_key("pass")
        sent: list[Future] = []
        with contextlib.ExitStack() as unless_complete:
            unless_complete.callback(release, sent)
            values = [InBlocks(counts, blocks[0]), *blocks[1:]]
            for number, value in enumerate(values):
                data = {f"{name}-{number}": value}
                while len(sent) == number:
                    try:
                        sent += scatter(
                            self._client, data, workers[:1], self._bound, what
                        ).values()
                    except OSError as error:
                        hangs = isinstance(error, WaitTimeoutError)
                        if len(workers) == 1 or (hangs and not sent):
                            raise
                        del workers[0]  # it has left, or hangs while others do not
                workers.append(workers.pop(0))
            unless_complete.pop_all()
        return sent

    def results(self, numbers: Iterator[int]) -> Iterator[tuple[int, Any]]:
        """Yield results as they arrive; each one starts the task of another part."""
        most = TASKS_PER_THREAD * max(sum(self._client.nthreads().values()), 1)
        coming = as_completed(loop=self._client.loop)
        for part in itertools.islice(numbers, most):
            coming.add(self._begin(part))
        for future in coming:
            part = self._running[future]
            try:
                result = future.result()  # `end` releases one that failed
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

    def end(self) -> None:
        """Leave nothing on the cluster."""
        release([*self._running, *self._shared])

    def _begin(self, part: int) -> Future:
        key = f"{new_key('pass')}-{part}"
        future = self._client.submit(
            _apply, self._shared, part, *self._content(part), key=key, pure=False
        )
        self._running[future] = part
        return future

    def _content(self, part: int) -> tuple[Any, ...]:
        """Arguments of `_SentPart`; none if workers have the source."""
        if not self._source.sent_by_part:
            return ()
        needs = self._source.needs(part)
        held = [Future(key, self._client) for key in needs]
        return self._source.name(part), self._placed(part), needs, held

    def _placed(self, part: int) -> Future:
        """Put the content of a part on a worker, in turns."""
        while True:
            holders = {part: [self._workers[part % len(self._workers)]]}
            sending = _sent(
                self._source, [part], self._client, self._workers, holders, self._bound
            )
            try:
                return next(sending)[part]
            except OSError as error:
                if isinstance(error, WaitTimeoutError):
                    raise
                # All have left, which Dask may not have noticed yet.
                self._count_loss(part, error)
                time.sleep(LISTED_S)
                self._workers = self._live_workers()

    def _recover(self, part: int, error: BaseException) -> None:
        """Prepare to start a part again that was lost with its worker."""
        self._count_loss(part, error)
        self._workers = self._live_workers()
        if any(future.status in LOST for future in self._shared):
            release(self._shared)
            try:
                self._shared = self._share()
            except OSError as gone:  # another worker has left meanwhile
                self._recover(part, gone)

    def _count_loss(self, part: int, error: BaseException) -> None:
        self._losses[part] += 1
        if self._losses[part] > MAX_LOSSES:
            raise DataError(
                f"{self._source.name(part)} was lost with its worker "
                f"{self._losses[part]} times; check that the parts on a worker fit "
                "into its memory, and that the results that the part depends on still "
                "exist"
            ) from error

    def _live_workers(self) -> list[str]:
        """Return the workers; wait for one if the last is being restarted."""
        bound = self._timeouts.bound("join")
        while not (workers := sorted(self._client.nthreads())):
            try:
                self._client.wait_for_workers(1, timeout=bound.seconds)
            except TimeoutError as error:
                raise WaitTimeoutError(
                    f"no worker joined within {bound} after the last one was lost"
                ) from error
        return workers


def _apply(shared: Sequence[Any], part: int, *sent: Any) -> Any:
    """The task of a part.

    Args:
        shared: What `_PartTasks._share` has sent.
        part: Number of the part.
        *sent: Arguments of `_SentPart`, if the part was sent.
    """
    packed, *blocks = shared
    function, *source = packed.unpacked(blocks)
    return function(_SentPart(*sent) if sent else source[0], part)
