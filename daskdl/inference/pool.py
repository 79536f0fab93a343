"""What a place must provide that answers calls. No Dask.

Whatever says that a replica cannot be reached any more is an OSError, as Dask's own
errors of a connection are, and every time-out.

Waiting for futures until a time of the clock, in a thread or on an event loop.

A model in memory, and the thread that computes with it. No Dask.

Event loops in threads of their own, and who may wait for them.

Replicas that are threads of this process.

A replica's end on a worker: a handler for requests, and nothing else of Dask's.

No plugin: the client says which workers are to have a replica, so that no other one
needs anything. It is put there by :func:`open_end`, and goes when the client says so,
when the worker closes, or when the client has been silent for too long, as one that
was killed is.

Replicas on workers, as the client sees them.

Requests go to a handler of the worker's, by Dask's own connections: one small request
there and back took 1.0 ms through the scheduler and 0.6 ms to the worker directly,
where a submitted task with its result took 12 ms and a method of an actor 2.1 ms, on
two loaded cores. (An actor keeps its worker from being retired, too.) They go through
the scheduler, which every client reaches; `Client(direct_to_workers=True)` says that
this one reaches the workers, which pays for large rows: it is Dask's own setting.

The model that all replicas of a predictor have, and how they get another one.

As many replicas as were asked for, all with one model. No Dask.

A replica that is lost is let go of, and another one is started where there is room. No
place has more than its share, which is set at the start: when a worker dies its place
stays free until one comes, so that the others are not made slower for good.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from distributed import Client, Worker
from torch import nn
from typing_extensions import override

from daskdl.channel.protocol import (
    Answer,
    Fields,
    GoneError,
    Guard,
    Natural,
    unwrap,
    wrap,
)
from daskdl.config import Bound, Timeouts
from daskdl.data import batching
from daskdl.data.batching import (
    Transform,
    Tree,
    auto_device,
    floating_dtype,
    inputs_to_device,
    rows_in,
    tensors,
)
from daskdl.errors import (
    ChannelError,
    ModelError,
    OptionError,
    RunError,
    WaitTimeoutError,
)
from daskdl.inference.batching import Failure, Outputs, structure_of, tree_of
from daskdl.serialization import Packed, PackedModel
from daskdl.training.replica import torch_threads

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Replica(ABC):
    """A model somewhere, which answers batches in the order in which they come.

    All methods are called on one event loop, and raise OSError if it is gone.

    Attributes:
        place: Where it is, for messages; several may be in one place.
        version: Of the model it answers by; 0: it has none. Changed by `CurrentModel`
            only, as what follows.
        staged: The version of the model that was sent last.
    """

    place: str
    version: int = 0
    staged: int = 0

    @abstractmethod
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        """Unpack a model, beside the one in use."""

    @abstractmethod
    async def use(self, version: int) -> None:
        """Answer by a model that was staged: what is asked later is answered by it."""

    @abstractmethod
    async def discard(self) -> None:
        """Models that were staged are not wanted."""

    @abstractmethod
    async def ask(self, x: Tree) -> Outputs | Failure:
        """What the model says to the rows of a batch, numpy arrays."""

    @abstractmethod
    async def hear(self) -> None:
        """Whether it is there; one that hears nothing for long closes itself."""

    @abstractmethod
    async def close(self, wait: bool) -> None:
        """Leave nothing where it is.

        Args:
            wait: Until what it computes is done, and its model in memory no longer.
        """


class Ground(ABC):
    """Where replicas can be."""

    @abstractmethod
    async def places(self) -> list[str]:
        """The places that are there now, in a fixed order.

        Raises:
            OSError: If that cannot be known now.
            ChannelError: If nothing will be there any more.
        """

    @abstractmethod
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        """Make a replica, without a model yet.

        Args:
            place: Where.
            number: No other one has it.
            sharing: Replicas that share a place at most.

        Raises:
            OSError: If the place is gone.
        """


async def within(doing: Awaitable[T], bound: Bound, what: str) -> T:
    """Wait for something, for so long.

    Args:
        doing: Cancelled if it takes longer.
        bound: How long that is.
        what: Did not come then, for the message.

    Raises:
        WaitTimeoutError: If it takes longer, which is an OSError.
    """
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task}, timeout=bound.seconds)
        if not task.done():
            raise WaitTimeoutError(f"{what} within {bound}")
        return task.result()
    finally:
        task.cancel()  # also if nobody waits any more; one that is done stays so


LOOK_S = 1.0  # between looks at whether there is still somebody to wait for


def done_by(deadline: float, future: Future[Any]) -> bool:
    """Wait in this thread; whether the future is done.

    Args:
        deadline: Of ``time.monotonic()``.
        future: Not changed.
    """
    rest_s = max(0.0, deadline - time.monotonic())
    return bool(wait([future], rest_s).done)


def settled(future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Wait in this thread until a future is done.

    Args:
        future: Not changed.
        loop: Who sets it; that of a client stops when the client is closed.

    Raises:
        RunError: If that has stopped.
    """
    while not done_by(time.monotonic() + LOOK_S, future):
        if not loop.is_running() and not future.done():
            raise RunError("the predictor's client is closed")


async def awaited(future: Future[Any]) -> None:
    """Wait on this event loop until a future is done, whatever it raises.

    A future of asyncio's own cannot be told of every error: not of a StopIteration.

    Args:
        future: Not changed, nor cancelled by whoever cancels the wait.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()


async def awaited_by(deadline: float, future: Future[Any]) -> bool:
    """Wait on this event loop; whether the future is done.

    Args:
        deadline: Of ``time.monotonic()``.
        future: See `awaited`.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await awaited(future)
    except TimeoutError:
        return future.done()
    return True


def late(timeout_s: float | None) -> WaitTimeoutError:
    """There is no answer in time."""
    return WaitTimeoutError(
        f"no answer within timeout_s={timeout_s}; is the model slow, or are there more "
        "calls than the replicas can answer?"
    )


class Resident:
    """A model that stays in a process, in evaluation mode, and answers in order.

    Its methods are called on one event loop, and what takes time is done in a thread
    of its own. A new model is put beside the old one first: so it is known to be
    usable here before it takes over.

    Args:
        transform: What is made of each batch before, or None.
        threads: Of torch's own, >= 1.
    """

    _model: nn.Module | None
    _staged: dict[int, nn.Module]  # by version
    closed: bool

    def __init__(self, transform: Packed[Transform] | None, threads: int) -> None:
        self._transform = transform
        self._model = None
        self._staged = {}
        self.closed = False
        self._gone: Future[None] | None = None
        self._ending = contextlib.ExitStack()
        self._executor = ThreadPoolExecutor(1, "daskdl-predictor")
        # torch's setting is that of the thread which makes it, and of later ones.
        self._executor.submit(self._ending.enter_context, torch_threads(threads))

    # ---- event loop

    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        """Unpack a model, beside the one in use."""
        unpacked = await self._done(self._unpacked, model)
        if isinstance(unpacked, Failure):
            return unpacked
        if not self.closed:  # while it was unpacked
            self._staged[version] = unpacked
        return None

    def use(self, version: int) -> None:
        """Answer by a model that was staged; the former and all other ones go."""
        self._model = self._staged[version]
        self._staged.clear()

    def discard(self) -> None:
        """Models that were staged are not wanted."""
        self._staged.clear()

    async def outputs(self, x: Tree) -> Outputs | Failure:
        """What the model says to rows; they are not changed."""
        return await self._done(self._outputs, x)

    def close(self) -> None:
        """What was asked is answered, then the model and the thread go."""
        if self.closed:
            return
        self.closed = True
        self._gone = self._executor.submit(self._forget)
        self._executor.shutdown(wait=False)

    async def gone(self) -> None:
        """It was closed, and its model is in memory no longer."""
        assert self._gone is not None
        await awaited(self._gone)

    async def _done(self, function: Callable[..., T], *args: Any) -> T | Failure:
        """What a function returns, or raises, in the thread."""
        if self.closed:
            raise ConnectionError("the replica is closed")
        future = self._executor.submit(function, *args)
        await awaited(future)
        error = future.exception()
        return future.result() if error is None else Failure.of(error)

    # ---- its thread

    def _unpacked(self, model: PackedModel) -> nn.Module:
        return model.unpack().eval().to(auto_device())

    def _outputs(self, x: Tree) -> Outputs:
        model = self._model
        assert model is not None
        batch = tensors((x, None))  # copied: a first layer may work in place
        rows = rows_in(batch)
        if self._transform is not None:
            batch = self._transform.shared()(batch)
        own, _ = batch
        with torch.inference_mode():
            moved = inputs_to_device(own, auto_device(), floating_dtype(model))
            return Outputs.of(model(moved), rows)

    def _forget(self) -> None:
        self._model = None
        self._staged.clear()
        self._ending.close()


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in another thread meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_forever, name="daskdl-predictor-loop", daemon=True
    )
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check_elsewhere(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to wait where that would be for ever.

    Args:
        loop: Whose work is waited for.

    Raises:
        RunError: If this is its thread.
    """
    # What asyncio sets: `get_running_loop` raises where there is none.
    if asyncio._get_running_loop() is loop:
        raise RunError(
            "this thread answers the predictor's calls, as callbacks of its futures "
            "run there, and must not wait for them; use submit, or another thread"
        )


PLACE = "this process"


class LocalReplica(Replica):
    """A model in this process.

    Args:
        resident: It.
    """

    place = PLACE

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    @override
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        return await self._resident.stage(version, model)

    @override
    async def use(self, version: int) -> None:
        self._resident.use(version)

    @override
    async def discard(self) -> None:
        self._resident.discard()

    @override
    async def ask(self, x: Tree) -> Outputs | Failure:
        return await self._resident.outputs(x)

    @override
    async def hear(self) -> None:
        """It is here."""

    @override
    async def close(self, wait: bool) -> None:
        self._resident.close()
        if wait:
            await self._resident.gone()


class LocalGround(Ground):
    """This process.

    Args:
        transform: See `Resident`.
    """

    def __init__(self, transform: Packed[Transform] | None) -> None:
        self._transform = transform
        self._threads = torch.get_num_threads()

    @override
    async def places(self) -> list[str]:
        return [PLACE]

    @override
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        threads = max(1, self._threads // sharing)
        return LocalReplica(Resident(self._transform, threads))


FAILED = "failed"  # the status where the model, or a transform, raised


async def open_end(
    name: str,
    transform: Packed[Transform] | None,
    sharing: int,
    silence_s: float,
    dask_worker: Worker,
) -> None:
    """Make a replica without a model; what Dask's `run` calls on a worker.

    Args:
        name: Of its requests.
        transform: See `Resident`.
        sharing: Replicas that a worker has at most.
        silence_s: After so long without a word of its client it goes.
        dask_worker: Given by Dask.
    """
    threads = max(1, dask_worker.state.nthreads // sharing)
    ReplicaEnd(dask_worker, name, Resident(transform, threads), silence_s)


class ReplicaEnd:
    """Answers the requests of a predictor on a worker.

    Args:
        worker: Whose handlers and extensions it is among, from now on.
        name: There.
        resident: Who answers.
        silence_s: See `open_end`.

    Attributes:
        refused: Requests that were not understood.
    """

    refused: int

    def __init__(
        self, worker: Worker, name: str, resident: Resident, silence_s: float
    ) -> None:
        self._worker = worker
        self._name = name
        self._resident = resident
        self._silence_s = silence_s
        self.refused = 0
        self._asked = 0  # requests that have no answer yet
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        guard = Guard(self._count)
        self._other = guard.of(self._refuse)
        self._calls = {
            "ask": guard.of(self._ask),
            "stage": guard.of(self._stage),
            "use": guard.of(self._use),
            "discard": guard.of(self._discard),
            "hear": guard.of(self._hear),
            "close": guard.of(self._close),
        }
        worker.handlers[name] = self.handle
        worker.extensions[name] = self
        self._timer = self._loop.call_later(silence_s, self._look)

    # ---- event loop

    async def handle(self, /, call: Any = None, **fields: Any) -> dict[str, Any]:
        """Its client asks for something; anybody else is refused."""
        known = isinstance(call, str) and call in self._calls
        answering = self._calls[call] if known else self._other
        self._asked += 1
        try:
            answer = {"status": Answer.OK.value, **await answering(**fields)}
        finally:
            self._asked -= 1
        if answer["status"] != Answer.REFUSED:
            self._heard = self._loop.time()
        return answer

    async def _ask(self, structure: bytes, leaves: Sequence[Any]) -> dict[str, Any]:
        self._check_open()
        x = tree_of(structure, [unwrap(leaf) for leaf in leaves])
        outputs = await self._resident.outputs(x)
        if isinstance(outputs, Failure):
            return _failed(outputs)
        return {
            "structure": structure_of(outputs.tree),
            "leaves": [wrap(leaf) for leaf in batching.leaves(outputs.tree)],
            "dtypes": list(outputs.dtypes),
        }

    async def _stage(self, version: Natural, payload: Any) -> dict[str, Any]:
        self._check_open()
        packed = PackedModel.of(np.asarray(unwrap(payload)), "model")
        failure = await self._resident.stage(version, packed)
        return {} if failure is None else _failed(failure)

    async def _use(self, version: Natural) -> dict[str, Any]:
        self._resident.use(version)
        return {}

    async def _discard(self) -> dict[str, Any]:
        self._resident.discard()
        return {}

    async def _hear(self) -> dict[str, Any]:
        return {}

    async def _close(self, wait: bool) -> dict[str, Any]:
        self._remove()
        if wait:
            await self._resident.gone()
        return {}

    async def _refuse(self) -> dict[str, Any]:
        raise ValueError(f"call must be one of {', '.join(self._calls)}")

    def _check_open(self) -> None:
        if self._resident.closed:
            raise GoneError("the replica is closed")

    def _count(self, fields: Fields) -> None:
        self.refused += 1

    def close(self) -> None:
        """The worker closes; what Dask calls of an extension."""
        self._timer.cancel()
        self._resident.close()

    def _remove(self) -> None:
        self.close()
        self._worker.handlers.pop(self._name, None)
        self._worker.extensions.pop(self._name, None)

    def _look(self) -> None:
        """Whether its client is still there."""
        silent_s = self._loop.time() - self._heard
        if silent_s < self._silence_s or self._asked:
            rest_s = max(self._silence_s - silent_s, self._silence_s / 4)
            self._timer = self._loop.call_later(rest_s, self._look)
            return
        logger.warning("%s goes: silent for %.0f s", self._name, silent_s)
        self._remove()


def _failed(failure: Failure) -> dict[str, Any]:
    return {
        "status": FAILED,
        "summary": failure.summary,
        "details": failure.details,
    }


class RemoteReplica(Replica):
    """A model on a worker.

    Args:
        client: Of the cluster.
        place: The worker's address.
        name: Of its requests.
    """

    def __init__(self, client: Client, place: str, name: str) -> None:
        self.place = place
        self._client = client
        self._name = name

    @override
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        payload = wrap(model.payload)
        answer = await self._request("stage", version=version, payload=payload)
        return _failure(answer)

    @override
    async def use(self, version: int) -> None:
        answer = await self._request("use", version=version)
        if answer["status"] == Answer.REFUSED:
            raise ConnectionError(answer["reason"])

    @override
    async def discard(self) -> None:
        await self._request("discard")

    @override
    async def ask(self, x: Tree) -> Outputs | Failure:
        leaves = [wrap(leaf) for leaf in batching.leaves(x)]
        answer = await self._request("ask", structure=structure_of(x), leaves=leaves)
        failure = _failure(answer)
        if failure is not None:
            return failure
        outputs = [unwrap(leaf) for leaf in answer["leaves"]]
        tree = tree_of(bytes(answer["structure"]), outputs)
        return Outputs(tree, tuple(answer["dtypes"]))

    @override
    async def hear(self) -> None:
        await self._request("hear")

    @override
    async def close(self, wait: bool) -> None:
        await self._request("close", wait=wait)

    async def _request(self, call: str, **fields: Any) -> dict[str, Any]:
        if self._client.status in ("closing", "closed"):
            raise ConnectionError("the client is closed")
        if self._client.direct_to_workers:
            ask = getattr(self._client.rpc(self.place), self._name)
            answer = await ask(call=call, **fields)
        else:
            message = {"op": self._name, "call": call, **fields}
            answer = await self._client.scheduler.proxy(worker=self.place, msg=message)
        if not isinstance(answer, dict):  # Dask's answer where there is no handler
            raise ConnectionError(f"worker {self.place} has the replica no longer")
        if answer["status"] == Answer.UNKNOWN:
            raise ConnectionError(f"worker {self.place}: {answer['reason']}")
        return answer


class RemoteGround(Ground):
    """The workers of a cluster.

    Args:
        client: Synchronous; used on its event loop only.
        transform: See `Resident`.
        silence_s: After so long without a word of the client replicas go.
    """

    def __init__(
        self, client: Client, transform: Packed[Transform] | None, silence_s: float
    ) -> None:
        self._client = client
        self._transform = transform
        self._silence_s = silence_s
        self._name = f"daskdl-predictor-{uuid.uuid4().hex}"

    @override
    async def places(self) -> list[str]:
        if self._client.status in ("closing", "closed"):
            raise ChannelError("the client is closed, and no worker can be reached")
        return sorted(await self._client.scheduler.ncores())

    @override
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        name = f"{self._name}-{number}"
        terms = (name, self._transform, sharing, self._silence_s)
        await self._client.run(open_end, *terms, workers=[place])
        return RemoteReplica(self._client, place, name)


def _failure(answer: dict[str, Any]) -> Failure | None:
    if answer["status"] == Answer.REFUSED:
        return Failure(answer["reason"], "before it came to the model")
    if answer["status"] != FAILED:
        return None
    return Failure(answer["summary"], answer["details"])


Lose = Callable[[Replica, object], None]


class CurrentModel:
    """What replicas answer by, with a version that grows with each swap.

    Args:
        model: The first.
        timeouts: Of the waits.
    """

    def __init__(self, model: PackedModel, timeouts: Timeouts) -> None:
        self._version, self._model = 1, model
        self._timeouts = timeouts
        self._swapping = asyncio.Lock()

    async def bring(self, replica: Replica) -> None:
        """Let a replica answer by the model of now, whatever it had.

        Raises:
            ModelError: If it cannot be used there.
            OSError: If the replica is lost.
        """
        while replica.version != self._version:  # it may be swapped meanwhile
            version = self._version
            if replica.staged != version:
                await self._stage(replica, version, self._model)
            bound = self._timeouts.bound("request")
            what = f"the replica on {replica.place} did not take the model"
            await within(replica.use(version), bound, what)
            replica.version = version

    async def swap(self, model: PackedModel, ready: list[Replica], lose: Lose) -> None:
        """Give all replicas another model; one swap after the other.

        It is sent to all before the first of them answers by it.

        Args:
            model: The next.
            ready: The replicas; may change meanwhile.
            lose: Called with each that cannot be reached, and why.

        Raises:
            ModelError: If it cannot be used somewhere; then the former one stays.
        """
        async with self._swapping:
            version = self._version + 1

            async def stage(replica: Replica) -> None:
                await self._stage(replica, version, model)

            refusals = await _refusals(ready, stage, lose)
            if refusals:
                await _refusals(ready, self._discard, lose)
                raise refusals[0]
            self._version, self._model = version, model
            while behind := [r for r in ready if r.version != version]:
                await _refusals(behind, self._bring_newcomer, lose)

    async def _bring_newcomer(self, replica: Replica) -> None:
        """One that came meanwhile has not been sent it yet."""
        try:
            await self.bring(replica)
        except ModelError as error:
            raise ConnectionError(f"it cannot use the model: {error}") from error

    async def _discard(self, replica: Replica) -> None:
        bound = self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not answer"
        await within(replica.discard(), bound, what)

    async def _stage(self, replica: Replica, version: int, model: PackedModel) -> None:
        what = f"the model ({model.payload.nbytes} bytes) was not on {replica.place}"
        bound = self._timeouts.bound("data")
        failure = await within(replica.stage(version, model), bound, what)
        if failure is not None:
            raise failure.error(f"the model cannot be used on {replica.place}")
        replica.staged = version


async def _refusals(
    replicas: list[Replica], do: Callable[[Replica], Awaitable[None]], lose: Lose
) -> list[ModelError]:
    """Do something with each replica, which may be lost by it, or refuse."""
    asked = list(replicas)
    done = await asyncio.gather(*(do(r) for r in asked), return_exceptions=True)
    refusals = []
    for replica, error in zip(asked, done, strict=True):
        if isinstance(error, ModelError):
            refusals.append(error)
        elif isinstance(error, OSError):
            lose(replica, error)
        elif error is not None:
            raise error
    return refusals


CREW_LOOK_S = 0.5  # between looks at who is there: one small request of the scheduler


class Crew:
    """The replicas of a predictor. All its methods are called on one event loop.

    Args:
        ground: Where they can be.
        model: They answer by at first.
        wanted: How many there should be, >= 1.
        timeouts: Of the waits.

    Attributes:
        ready: Those that can be asked. Changed in place.
        lost: Called with each that is lost.
        changed: Called when one has become ready.
        ended: Called with an error if there will never be one again.
    """

    ready: list[Replica]
    lost: Callable[[Replica], None]
    changed: Callable[[], None]
    ended: Callable[[BaseException], None]

    def __init__(
        self, ground: Ground, model: PackedModel, wanted: int, timeouts: Timeouts
    ) -> None:
        self.ready = []
        self._ground = ground
        self._wanted = wanted
        self._timeouts = timeouts
        self._sharing = wanted  # replicas of one place at most; known when it opens
        self._current = CurrentModel(model, timeouts)
        self._numbers = itertools.count()
        self._starting: dict[asyncio.Task[None], str] = {}  # and the place
        self._opening: set[asyncio.Task[Replica]] = set()
        self._parting: set[asyncio.Task[None]] = set()
        self._failed: Counter[str] = Counter()  # starts and replicas, by place
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all of them.

        Raises:
            OptionError: If there is no place.
            ModelError: If the model cannot be used there.
            OSError: If one of them cannot be started.
        """
        places = await self._ground.places()
        if not places:
            raise OptionError(
                "the cluster has no workers; wait for some with "
                "client.wait_for_workers(1)"
            )
        self._sharing = math.ceil(self._wanted / len(places))
        chosen = itertools.islice(itertools.cycle(places), self._wanted)
        starts = [self._start(place) for place in chosen]
        for done in await asyncio.gather(*starts, return_exceptions=True):
            if done is not None:
                raise done
        self._heard_at = asyncio.get_running_loop().time()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    async def close(self, wait: bool) -> None:
        """Leave no replica anywhere.

        Args:
            wait: For what they compute, so that no model is in memory afterwards.
        """
        tasks = [*self._starting, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opening:
            await asyncio.wait(self._opening, timeout=self._timeouts.stop)
        for replica in list(self.ready):
            self._part(replica, wait)
        self.ready.clear()
        await asyncio.gather(*self._parting)

    def lose(self, replica: Replica, why: object) -> None:
        """One cannot be asked any more."""
        if replica not in self.ready:
            return
        logger.warning("a replica on %s is lost: %s", replica.place, why)
        self.ready.remove(replica)
        self._failed[replica.place] += 1
        self._part(replica)
        self.lost(replica)

    async def swap(self, model: PackedModel) -> None:
        """Answer by another model: what is asked from now on, by all of them.

        Raises:
            ModelError: If it cannot be used somewhere; then the former one stays.
        """
        await self._current.swap(model, self.ready, self.lose)

    # ---- who is there

    async def _start(self, place: str) -> None:
        replica = await self._opened(place)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self._part, replica)
            await self._current.bring(replica)
            unless_ready.pop_all()
        self.ready.append(replica)
        self.changed()

    async def _opened(self, place: str) -> Replica:
        opening = asyncio.create_task(
            self._ground.open(place, next(self._numbers), self._sharing)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        bound, what = self._timeouts.bound("join"), f"no replica was made on {place}"
        with contextlib.ExitStack() as unless_there:
            # It may be made all the same, and nobody would take it from there.
            unless_there.callback(opening.add_done_callback, self._abandon)
            replica = await within(asyncio.shield(opening), bound, what)
            unless_there.pop_all()
        return replica

    def _abandon(self, opening: asyncio.Task[Replica]) -> None:
        """One was made that nobody waits for any more."""
        if not opening.cancelled() and opening.exception() is None:
            self._part(opening.result())

    def _part(self, replica: Replica, wait: bool = True) -> None:
        """Tell a replica to go, if it still hears that."""

        async def part() -> None:
            bound = self._timeouts.bound("stop")
            try:
                await within(replica.close(wait), bound, "it did not answer")
            except OSError as error:
                logger.info("a replica on %s was not closed: %s", replica.place, error)

        task = asyncio.create_task(part())
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:
                logger.info("it is not known which workers are there: %s", error)
            await asyncio.sleep(CREW_LOOK_S)

    def _watched(self, task: asyncio.Task[None]) -> None:
        """Nobody looks after them any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ended(error)

    async def look(self) -> None:
        """See who is there, and start those who are missing.

        Raises:
            OSError: If that cannot be known.
            ChannelError: If nobody will be there any more.
        """
        bound = self._timeouts.bound("request")
        places = await within(
            self._ground.places(), bound, "no answer of the scheduler"
        )
        for replica in list(self.ready):
            if replica.place not in places:
                self.lose(replica, "its worker is gone")
        for place in self._free(places):
            task = asyncio.create_task(self._start(place))
            self._starting[task] = place
            task.add_done_callback(self._started)
        self._hear()

    def _free(self, places: list[str]) -> list[str]:
        """Where those who are missing are to be started."""
        used = Counter([r.place for r in self.ready] + list(self._starting.values()))
        chosen: list[str] = []
        while used.total() < self._wanted:
            room = [place for place in places if used[place] < self._sharing]
            if not room:
                break
            place = min(room, key=lambda place: (used[place], self._failed[place]))
            used[place] += 1
            chosen.append(place)
        return chosen

    def _started(self, task: asyncio.Task[None]) -> None:
        place = self._starting.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed[place] += 1
            logger.warning("no replica could be started on %s: %s", place, error)

    def _hear(self) -> None:
        """Let all know that somebody is there who may ask them."""
        now = asyncio.get_running_loop().time()
        if now - self._heard_at < self._timeouts.silence / 4:
            return
        self._heard_at = now
        for replica in self.ready:
            task = asyncio.create_task(self._listen(replica))
            self._parting.add(task)
            task.add_done_callback(self._parting.discard)

    async def _listen(self, replica: Replica) -> None:
        bound = self._timeouts.bound("request")
        try:
            await within(replica.hear(), bound, "it did not answer")
        except OSError as error:
            self.lose(replica, error)
