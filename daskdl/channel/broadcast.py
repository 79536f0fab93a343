"""The model on all workers of a run: the client sends it once, workers pass it on.

The client puts the parts of a value on the scheduler. Each worker requests parts
before they have arrived there, so that all links are busy at once: even parts follow a
binary tree of the workers, odd parts the same tree in reverse order. A worker with
successors in one tree has none in the other, so no worker sends more than one copy, and
neither does the scheduler. A part passes at most log2(workers) + 2 links. Workers that
come later load the value from one that has it, or that is still loading it: workers
that come together form a tree, too.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskdl.channel import protocol
from daskdl.channel.protocol import (
    Answer,
    Arrays,
    BlobParts,
    Fields,
    Form,
    GoneError,
    Natural,
    RunId,
    Token,
    join,
    run_id,
    unwrap,
    wrap,
)
from daskdl.channel.run_state import MAX_READERS
from daskdl.channel.transport import SchedulerTransport, Transport, time_limit
from daskdl.config import Bound
from daskdl.errors import ChannelError, WaitTimeoutError

logger = logging.getLogger(__name__)

MIN_PART_BYTES = 2**14  # a message has about 300 bytes more
PARTS = 64  # of a small value: a part waits at each link until it has arrived
# Requests of a worker that wait at the same time, for each half of the parts.
WINDOW = 3
OTHERS = 3  # sources of a worker that comes later if the first is lost
CONNECT_S = 5.0  # for a worker to accept a connection; behind a firewall, none does
WAIT_S = 1.0  # longest wait for a part; the requester then asks again

MAX_WAIT_S = 1e9  # of a worker for one answer
LEFT = "it has left, or the run was closed"

T = TypeVar("T")
Convert = Callable[[str, NDArray[Any]], T]
Key = tuple[int, int]  # run and secret: a run that opens again has another secret
Route = Sequence[str]  # workers to request parts from, nearest first


def parts_of(arrays: Arrays) -> BlobParts:
    """Cut arrays into parts for `Broadcast`.

    Example:
        >>> [parts_of({"x": np.zeros(size)}).parts for size in (1, 10**4, 10**6)]
        [1, 5, 64]
    """
    size = -(-sum(array.nbytes for array in arrays.values()) // PARTS)
    size = min(max(size, MIN_PART_BYTES), protocol.PART_BYTES)
    return BlobParts(arrays, size)


def routes_of(workers: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the routes of even and of odd parts to each worker, without the scheduler.

    Example:
        >>> for worker, (even, odd) in routes_of(["a", "b", "c", "d"]).items():
        ...     print(worker, even, odd)
        a [] ['c', 'd']
        b ['a'] ['d']
        c ['a'] ['d']
        d ['b', 'a'] []
    """
    routes: dict[str, list[list[str]]] = {worker: [] for worker in workers}
    for order in (workers, workers[::-1]):
        for place, worker in enumerate(order):
            route = []
            while place > 0:
                place = (place - 1) // 2
                route.append(order[place])
            routes[worker].append(route)
    return routes


def check_wait(timeout_s: float) -> None:
    """Raise a ValueError unless the number is a time to wait, seconds."""
    if not 0 <= timeout_s <= MAX_WAIT_S:
        raise ValueError(f"timeout_s must be in 0 .. {MAX_WAIT_S:g}, got {timeout_s}")


class Signal:
    """Wakes everyone who waits for a change, on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()


class ModelCopy:
    """A value in one process, some parts of which may not have arrived yet.

    Attributes:
        forms: Names, dtypes and shapes of the arrays.
        parts: Serialized parts; None: not here yet.
        failed: Whether no more parts arrive.
    """

    forms: Sequence[Form]
    parts: list[Any]
    failed: bool

    def __init__(self, forms: Sequence[Form], count: int) -> None:
        self.forms = forms
        self.parts = [None] * count
        self.failed = False
        self._changed = Signal()
        self._values: dict[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Whether all parts are here."""
        return all(part is not None for part in self.parts)

    def put(self, number: int, part: Any) -> None:
        """Add a part."""
        self.parts[number] = part
        self._changed.notify()

    def fail(self) -> None:
        """End the waits for parts: no more parts arrive."""
        self.failed = True
        self._changed.notify()

    async def part(self, number: int) -> Any:
        """Return a part; None if it has not arrived within `WAIT_S`."""
        try:
            async with asyncio.timeout(WAIT_S):
                while self.parts[number] is None:
                    if self.failed:
                        raise GoneError("no more parts arrive here")
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.parts[number]

    def values(self, convert: Convert[T]) -> dict[str, T]:
        """Return what the first call makes of the arrays, by name.

        All replicas of a process share it.

        Args:
            convert: Makes a value of an array that must not be changed: name and array.
        """
        with self._lock:
            if self._values is None:
                parts = [np.frombuffer(unwrap(part), np.uint8) for part in self.parts]
                arrays = join(self.forms, parts)
                blob = parts_of(arrays)
                # Views: otherwise the arrays would be here twice.
                self.parts = [wrap(blob.part(number)) for number in range(blob.parts)]
                self._values = {name: convert(name, a) for name, a in arrays.items()}
            return self._values


class Copies:
    """The copies of one process, which others request part by part.

    Attributes:
        held: The copies, by run and secret.
    """

    held: dict[Key, ModelCopy]

    def __init__(self, transport: Transport) -> None:
        self.held = {}
        self._transport = transport
        self._arrived = Signal()  # of another copy

    def hold(self, key: Key, forms: Sequence[Form], parts: int) -> ModelCopy:
        """Begin a copy; one that is here already stays."""
        if key not in self.held:
            self.held[key] = ModelCopy(forms, parts)
            self._arrived.notify()
        return self.held[key]

    def _forget(self, key: Key) -> None:
        """Drop a copy, and end the waits for its parts."""
        copy = self.held.pop(key, None)
        if copy is not None:
            copy.fail()

    async def handle_part(self, run: RunId, secret: Token, number: Natural) -> Fields:
        """Return a part of a value; wait for it, but not for long."""
        key = run, secret
        try:
            async with asyncio.timeout(WAIT_S):
                while key not in self.held:  # the message about it may be on its way
                    await self._arrived.wait()
        except TimeoutError:
            raise GoneError(f"no model of run {run_id(run)} here") from None
        return {"bytes": await self.held[key].part(number)}


class WorkerCopies(Copies):
    """The copies of a worker, which requests them from others and passes them on."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._loading: dict[Key, asyncio.Task[str]] = {}

    async def handle_receive(
        self,
        run: RunId,
        secret: Token,
        forms: Sequence[Form],
        parts: Natural,
        routes: Sequence[Route],
        timeout_s: float,
    ) -> Fields:
        """Request all parts, unless they are here; answer when they have arrived."""
        check_wait(timeout_s)
        key = run, secret
        if key not in self.held:
            loads = self._load(key, self.hold(key, forms, parts), routes, timeout_s)
            self._loading[key] = asyncio.ensure_future(loads)
        if (loading := self._loading.get(key)) is not None:
            await asyncio.wait([loading])
            self._loading.pop(key, None)
            error = "it was dropped" if loading.cancelled() else loading.result()
            if error:
                raise GoneError(error)
        return {}

    async def handle_drop(self, run: RunId, secret: Token) -> Fields:
        """Forget a value."""
        loading = self._loading.pop((run, secret), None)
        if loading is not None:
            loading.cancel()
        self._forget((run, secret))
        return {}

    def values(
        self, run: int, secret: int, worker: str, bound: Bound, convert: Convert[T]
    ) -> dict[str, T]:
        """Return the values of a run; a worker that comes later loads them first.

        Called in the thread of a task; see `ModelCopy.values`.
        """
        key = run, secret
        if key not in self.held or not self.held[key].complete:
            asking = self._transport.ask(
                None, protocol.SPREAD, run=run, secret=secret, workers=[worker]
            )
            loop = self._transport.loop
            future = asyncio.run_coroutine_threadsafe(_answered(asking, bound), loop)
            failures = future.result()
            if failures:
                raise ChannelError(f"the model was not sent: {failures[worker]}")
        copy = self.held.get(key)
        if copy is None:
            raise ChannelError(f"run {run_id(run)} was closed")
        return copy.values(convert)

    async def _load(
        self, key: Key, copy: ModelCopy, routes: Sequence[Route], timeout_s: float
    ) -> str:
        """Request all parts; return the error, or nothing."""
        loops = []
        for half, route in enumerate(routes):
            half_numbers = iter(range(half, len(copy.parts), len(routes)))
            sources: list[str | None] = [*route, None]
            loops += [
                asyncio.ensure_future(
                    self._request(key, copy, half_numbers, sources, timeout_s)
                )
                for _ in range(WINDOW)
            ]
        try:
            await asyncio.gather(*loops)
        except OSError as error:
            self._forget(key)
            return str(error)
        finally:
            for loop in loops:
                loop.cancel()
        return ""

    async def _request(
        self,
        key: Key,
        copy: ModelCopy,
        numbers: Iterator[int],
        sources: list[str | None],
        timeout_s: float,
    ) -> None:
        """Request parts one after another; from the next source if one fails.

        Args:
            key: Run and secret.
            copy: The copy that the parts belong to.
            numbers: Parts to request, shared with the other requests of this half.
            sources: Changed in place; None is the scheduler.
            timeout_s: Longest wait for one answer.
        """
        run, secret = key
        former: str | None = None
        for number in numbers:
            while copy.parts[number] is None:
                source = sources[0]
                try:
                    async with time_limit(timeout_s):
                        if source != former:
                            await self._check_listening(source)
                            former = source
                        answer = await self._transport.ask(
                            source, protocol.PART, run=run, secret=secret, number=number
                        )
                except OSError as error:  # a TimeoutError is one
                    answer = {"status": Answer.UNKNOWN, "reason": repr(error)}
                if isinstance(answer, dict) and answer["status"] == Answer.OK:
                    if answer["bytes"] is not None:
                        part = np.frombuffer(unwrap(answer["bytes"]), np.uint8)
                        copy.put(number, wrap(part))
                    continue
                logger.info("part %s of %s: %r", number, source, answer)
                if source != sources[0]:  # another request has noticed
                    continue
                if len(sources) == 1:
                    raise OSError(f"the scheduler answered {answer!r}")
                del sources[0]

    async def _check_listening(self, source: str | None) -> None:
        """Raise an OSError soon, where Dask would try to connect for 30 s."""
        if source is None or await self._transport.is_listening(source, CONNECT_S):
            return
        raise OSError(f"nobody listens at {source}")


class Broadcast:
    """The scheduler's record of a value that workers pass on.

    Attributes:
        copy: The copy here, until the run opens; None afterwards.
        forms: Names, dtypes and shapes of the arrays.
        parts: Number of parts.
        client: Id of the client that sends it.
        timeout_s: Longest wait of a worker for one answer.
        holders: Workers that have it all.
        readers: By worker, those that load it from this worker; for holders, and for
            workers that came later and are still loading it.
        sending: The request to each worker to load it.
    """

    def __init__(self, copy: ModelCopy, client: str, timeout_s: float) -> None:
        self.copy: ModelCopy | None = copy
        self.forms, self.parts = copy.forms, len(copy.parts)
        self.client = client
        self.timeout_s = timeout_s
        self.holders: set[str] = set()
        self.readers: dict[str, set[str]] = {}
        self.sending: dict[str, asyncio.Task[str]] = {}

    def source(self) -> str:
        """The worker from which the next one loads it.

        Of the holders that serve fewer than `MAX_READERS` others, it is the one with
        fewest readers. If there is none, it is the earliest worker still loading that
        serves fewer than `MAX_READERS`: the tree stays as flat as possible. There is
        always one, because each worker takes one such place and adds `MAX_READERS`.
        """
        free = [w for w, of in self.readers.items() if len(of) < MAX_READERS]

        def order(worker: str) -> tuple[int, str]:
            if worker not in self.holders:
                return MAX_READERS, ""
            return len(self.readers[worker]), worker

        return min(free, key=order)

    def forget(self, worker: str) -> None:
        """Forget a worker that has left, or could not load it."""
        self.holders.discard(worker)
        self.readers.pop(worker, None)


class SchedulerCopies(Copies):
    """What the scheduler holds until all workers have it, and who has it afterwards."""

    broadcasts: dict[Key, Broadcast]
    _transport: SchedulerTransport

    def __init__(self, transport: SchedulerTransport) -> None:
        super().__init__(transport)
        self.broadcasts = {}
        self._dropping: set[asyncio.Task[None]] = set()

    # ---- requests of a client

    async def handle_offer(
        self,
        run: RunId,
        secret: Token,
        client: str,
        forms: Sequence[Form],
        parts: Natural,
        timeout_s: float,
    ) -> Fields:
        """Announce a value; its parts come with `handle_put`."""
        if not self._transport.has_client(client):
            raise ValueError(f"{client!r} is not a client of this cluster")
        check_wait(timeout_s)
        key = run, secret
        if key not in self.broadcasts:
            copy = self.hold(key, forms, parts)
            self.broadcasts[key] = Broadcast(copy, client, timeout_s)
        return {}

    async def handle_put(
        self, run: RunId, secret: Token, number: Natural, payload: Any
    ) -> Fields:
        """Take a part of a value."""
        if (run, secret) not in self.held:
            raise GoneError(f"no model of run {run_id(run)} here")
        self.held[run, secret].put(number, payload)
        return {}

    async def handle_spread(
        self, run: RunId, secret: Token, workers: Sequence[str]
    ) -> Fields:
        """Let workers load a value, for a client or for a worker that comes later.

        Returns:
            ``failures``: the reason for each worker that does not have it.
        """
        broadcast = self.broadcasts.get((run, secret))
        if broadcast is None:
            raise GoneError(f"no model of run {run_id(run)} here")
        routes = routes_of(workers)
        for worker in workers:
            sending = broadcast.sending.get(worker)
            if sending is None or sending.done():
                loading = self._load_on(worker, (run, secret), broadcast, routes)
                broadcast.sending[worker] = asyncio.ensure_future(loading)
        tasks = {worker: broadcast.sending[worker] for worker in workers}
        if tasks:
            await asyncio.wait(tasks.values())
        results = {
            worker: LEFT if task.cancelled() else task.result()
            for worker, task in tasks.items()
        }
        return {"failures": {worker: why for worker, why in results.items() if why}}

    async def _load_on(
        self,
        worker: str,
        key: Key,
        broadcast: Broadcast,
        routes: Mapping[str, Sequence[Route]],
    ) -> str:
        """Let one worker load a value; return the error, or nothing."""
        if worker in broadcast.holders:
            return ""
        if not self._transport.has_worker(worker):
            return LEFT
        if broadcast.copy is not None:
            error = await self._ask(worker, key, broadcast, routes[worker])
        else:
            error = await self._load_from_another(worker, key, broadcast)
        if error:
            broadcast.forget(worker)
        else:
            broadcast.holders.add(worker)
            broadcast.readers.setdefault(worker, set())
        return error

    async def _load_from_another(
        self, worker: str, key: Key, broadcast: Broadcast
    ) -> str:
        """Let a worker load a value from another, or from holders if that is lost."""
        if not broadcast.holders:
            return "no worker has the model any more"
        source, readers = broadcast.source(), broadcast.readers
        spares = sorted(
            broadcast.holders - {source}, key=lambda h: (len(readers[h]), h)
        )
        of_source = readers[source]  # another set if it leaves and comes back
        of_source.add(worker)
        readers[worker] = set()
        try:
            return await self._ask(worker, key, broadcast, [[source, *spares[:OTHERS]]])
        finally:
            of_source.discard(worker)

    async def _ask(
        self, worker: str, key: Key, broadcast: Broadcast, routes: Sequence[Route]
    ) -> str:
        run, secret = key
        try:
            answer = await self._transport.ask(
                worker,
                protocol.RECEIVE,
                run=run,
                secret=secret,
                forms=broadcast.forms,
                parts=broadcast.parts,
                routes=routes,
                timeout_s=broadcast.timeout_s,
            )
        except OSError as error:
            return str(error) or repr(error)
        if not isinstance(answer, dict):  # so Dask answers an unknown request
            return "it has no daskdl plugin; see its log"
        return "" if answer["status"] == Answer.OK else str(answer.get("reason"))

    # ---- the end

    def release(self, key: Key) -> None:
        """Drop the copy here, as the run opens."""
        self.held.pop(key, None)
        if key in self.broadcasts:
            self.broadcasts[key].copy = None

    def worker_removed(self, worker: str) -> None:
        """Forget a worker that has left."""
        for broadcast in self.broadcasts.values():
            broadcast.forget(worker)
            if worker in broadcast.sending:
                broadcast.sending[worker].cancel()

    def client_removed(self, client: str, open_runs: Iterable[int]) -> None:
        """Drop what a client had sent for runs that have not opened."""
        for key, broadcast in list(self.broadcasts.items()):
            if broadcast.client == client and key[0] not in open_runs:
                self.drop(*key)

    def drop(self, run: int, secret: int) -> None:
        """Drop a value here, and, in the background, on the workers."""
        self._forget((run, secret))
        broadcast = self.broadcasts.pop((run, secret), None)
        if broadcast is None:
            return
        for worker, sending in broadcast.sending.items():
            sending.cancel()
            if not self._transport.has_worker(worker):
                continue
            dropping = asyncio.ensure_future(
                self._drop_on(worker, run, secret, broadcast.timeout_s)
            )
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _drop_on(
        self, worker: str, run: int, secret: int, timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._transport.ask(worker, protocol.DROP, run=run, secret=secret)
        except OSError as error:  # a TimeoutError is one
            logger.info("%s does not drop a model: %s", worker, error)


async def _answered(asking: Awaitable[Any], bound: Bound) -> Mapping[str, str]:
    """Wait for the failures that an answer to SPREAD has."""
    try:
        async with time_limit(bound.seconds):
            answer = await asking
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"the model did not arrive within {bound}; is the network slow?"
        ) from error
    except OSError as error:
        raise ChannelError(f"the scheduler was lost: {error}") from error
    if not isinstance(answer, dict) or answer["status"] != Answer.OK:
        raise ChannelError(f"the scheduler answered {answer!r} to {protocol.SPREAD}")
    failures: Mapping[str, str] = answer["failures"]
    return failures


async def send(
    ask: Callable[..., Awaitable[Any]],
    blob: BlobParts,
    unsent: list[int],
    workers: Sequence[str],
    **offer: Any,
) -> Mapping[str, str]:
    """Send a value to workers; return the reason for each that does not have it.

    Args:
        ask: Sends a request for the run to the scheduler: an operation and its fields.
        blob: The value.
        unsent: Parts that the scheduler does not have; changed in place.
        workers: Addresses.
        **offer: Further fields of the offer.
    """

    async def ok(operation: str, **fields: Any) -> Mapping[str, Any]:
        answer = await ask(operation, **fields)
        if not isinstance(answer, dict) or answer["status"] != Answer.OK:
            raise ChannelError(f"the scheduler answered {answer!r} to {operation}")
        return answer

    async def put() -> None:
        while unsent:
            number = unsent.pop(0)
            try:
                payload = wrap(blob.part(number))
                await ok(protocol.PUT, number=number, payload=payload)
            except BaseException:
                unsent.insert(0, number)
                raise

    await ok(protocol.OFFER, forms=blob.forms, parts=blob.parts, **offer)
    sending = [asyncio.ensure_future(put()) for _ in range(WINDOW)]
    spreading = asyncio.ensure_future(ok(protocol.SPREAD, workers=list(workers)))
    try:
        await asyncio.gather(*sending)
        answer = await spreading
    finally:
        for task in (*sending, spreading):
            task.cancel()
    failures: Mapping[str, str] = answer["failures"]
    return failures
