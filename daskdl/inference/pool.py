"""Replicas of a predictor's model, on the workers of a cluster or in this process.

Hides how replicas are placed, called and replaced, and how their model is swapped. An
OSError means that a replica cannot be reached.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import traceback
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from distributed import Client, Worker
from torch import Tensor, nn
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
from daskdl.data.batching import Transform, Tree
from daskdl.data.tables import as_numpy
from daskdl.errors import (
    ChannelError,
    DaskDLError,
    ModelError,
    OptionError,
    WaitTimeoutError,
)
from daskdl.objective import call
from daskdl.process_settings import torch_threads
from daskdl.serialization import Packed, PackedModel
from daskdl.util import guarded, text_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Outputs(NamedTuple):
    """Outputs of a batch."""

    tree: Tree  # of numpy arrays
    dtypes: tuple[torch.dtype, ...]  # by leaf: numpy has no bfloat16

    @classmethod
    def of(cls, outputs: Any, rows: int) -> "Outputs":
        """Convert outputs; refuse anything but a tree of tensors with `rows` rows."""
        for leaf in batching.leaves(outputs):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ModelError(
                    "model must return a tensor with one row per example, or tuples "
                    f"and dicts of such tensors, got {got} for {rows} rows; select one "
                    "of several outputs with Predictor(output=...)"
                )
        dtypes = tuple(leaf.dtype for leaf in batching.leaves(outputs))
        return cls(batching.tree_map(as_numpy, outputs), dtypes)


class ModelFailure(NamedTuple):
    """An error of a model or a transform as text, so that no frames are kept."""

    summary: str
    details: str  # the traceback

    @classmethod
    def of(cls, error: BaseException) -> "ModelFailure":
        summary = text_of(error, named=not isinstance(error, DaskDLError))
        return cls(summary, "".join(traceback.format_exception(error)))

    def error(self, what: str) -> ModelError:
        """Return the error to raise in the caller."""
        error = ModelError(f"{what}: {self.summary}")
        error.add_note(f"where it happened:\n{self.details}")
        return error


class ModelReplica(ABC):
    """A model that answers batches in the order of their arrival.

    All methods are called on one event loop, and raise an OSError if the replica is
    lost. Only the pool changes `version` (of the model in use) and `staged` (of the
    model that was sent last).
    """

    place: str
    version: int = 0
    staged: int = 0

    async def open(self) -> None:  # noqa: B027  # optional
        """Start the replica, without a model."""

    @abstractmethod
    async def stage(self, version: int, model: PackedModel) -> ModelFailure | None:
        """Unpack a model beside the one in use."""

    @abstractmethod
    async def use(self, version: int) -> None:
        """Answer later batches with this model, and release all others."""

    @abstractmethod
    async def ask(self, x: Tree) -> Outputs | ModelFailure:
        """Return the outputs for a batch, numpy arrays."""

    async def ping(self) -> None:  # noqa: B027  # optional
        """Check that the replica is alive, and keep it open."""

    @abstractmethod
    async def close(self, wait: bool) -> None:
        """Close the replica; `wait` until the last batch is done and memory is free."""


class Host(ABC):
    """Where replicas can run: in this process, or on the workers of a cluster."""

    @abstractmethod
    async def places(self) -> list[str]:
        """Return the places that exist now, in a fixed order.

        Raises an OSError if they cannot be listed now, and a ChannelError if they never
        can be again.
        """

    @abstractmethod
    def replica(self, place: str, sharing: int) -> ModelReplica:
        """Return an unopened replica, one of at most `sharing` at the same place."""


async def within(doing: Awaitable[T], bound: Bound, what: str) -> T:
    """Wait for at most `bound`; after that, cancel and raise a WaitTimeoutError."""
    try:
        async with asyncio.timeout(bound.seconds) as waiting:
            return await doing
    except TimeoutError as error:
        if not waiting.expired():
            raise
        raise WaitTimeoutError(f"{what} within {bound}") from error


# ---- in one process


class ModelThread(ModelReplica):
    """A model in this process, and the thread that computes with it.

    Methods are called on one event loop; the computations run in the thread.
    """

    place = "this process"
    _model: nn.Module | None
    _staged: dict[int, nn.Module]  # by version
    _device: torch.device

    def __init__(self, transform: Packed[Transform] | None, threads: int) -> None:
        self._transform = transform
        self._model, self._staged = None, {}
        self._in_use = 0
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._ending = contextlib.ExitStack()
        self._executor = ThreadPoolExecutor(1, "daskdl-predictor")
        # torch applies the setting to the thread that makes it, and to later threads.
        self._executor.submit(self._ending.enter_context, torch_threads(threads))

    # ---- event loop

    @override
    async def stage(self, version: int, model: PackedModel) -> ModelFailure | None:
        unpacked = await self._run(lambda: self._unpacked(model))
        if isinstance(unpacked, ModelFailure):
            return unpacked
        self._staged[version] = unpacked
        return None

    @override
    async def use(self, version: int) -> None:
        if version != self._in_use:
            self._model, self._in_use = self._staged[version], version
        self._staged.clear()

    @override
    async def ask(self, x: Tree) -> Outputs | ModelFailure:
        return await self._run(lambda: self._outputs(x))

    @override
    async def close(self, wait: bool) -> None:
        if not self.closed:
            self.closed = True
            self._executor.submit(self._end)
            self._executor.shutdown(wait=False)
        if wait:
            await self._gone.wait()

    async def _run(self, function: Callable[[], T | ModelFailure]) -> T | ModelFailure:
        if self.closed:
            raise ConnectionError("the replica is closed")
        # asyncio cannot pass a StopIteration from a thread.
        future = self._executor.submit(guarded, function, ModelFailure.of)
        return await asyncio.wrap_future(future)

    # ---- its thread

    def _unpacked(self, model: PackedModel) -> nn.Module:
        self._device = batching.auto_device()
        return model.unpack().eval().to(self._device)

    def _outputs(self, x: Tree) -> Outputs:
        model = self._model
        assert model is not None
        batch = batching.tensors((x, None))  # copies: a layer may work in place
        rows = batching.length(batch)
        if self._transform is not None:
            batch = self._transform.shared()(batch)
        dtype = batching.floating_dtype(model)
        with torch.inference_mode():
            inputs = batching.inputs_to_device(batch[0], self._device, dtype)
            return Outputs.of(call(model, inputs), rows)

    def _end(self) -> None:
        self._model = None
        self._staged.clear()
        self._ending.close()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._gone.set)


@dataclass(frozen=True)
class LocalHost(Host):
    """This process."""

    transform: Packed[Transform] | None
    threads: int = field(default_factory=torch.get_num_threads)

    @override
    async def places(self) -> list[str]:
        return [ModelThread.place]

    @override
    def replica(self, place: str, sharing: int) -> ModelReplica:
        return ModelThread(self.transform, max(1, self.threads // sharing))


# ---- on workers


class ReplicaServer:
    """The worker's end of a replica: a handler of its client's requests.

    A round trip over Dask's connections takes 1.0 ms through the scheduler, which every
    client reaches, and 0.6 ms directly. A task takes 12 ms, and a method of an actor
    2.1 ms; an actor would also keep its worker from being retired. No plugin is needed:
    the client opens replicas on the workers that it chooses. A replica closes with its
    worker, or when its client has been silent for `silence_s`.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        sharing: int,
        transform: Packed[Transform] | None,
        silence_s: float,
    ) -> None:
        self._name = name
        self._worker = worker
        self._silence_s = silence_s
        self._model = ModelThread(transform, max(1, worker.state.nthreads // sharing))
        self._pending = 0  # requests without an answer
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        worker.handlers[name] = Guard(lambda fields: None).of(self._answer)
        worker.extensions[name] = self
        self._timer = self._loop.call_later(silence_s, self._check_client)

    async def _answer(
        self, call: str, version: Natural, payload: Any, wait: bool
    ) -> Fields:
        """Answer a request of the client; `Guard` refuses malformed requests."""
        if self._model.closed and call in ("ask", "stage"):
            raise GoneError("the replica is closed")
        result: Outputs | ModelFailure | None = None
        self._pending += 1
        try:
            match call:
                case "ask":
                    result = await self._model.ask(unwrap(payload))
                case "stage":
                    packed = PackedModel.of(np.asarray(unwrap(payload)), "model")
                    result = await self._model.stage(version, packed)
                case "use":
                    await self._model.use(version)
                case "close":
                    self._remove()
                    await self._model.close(wait)
                case "ping":
                    pass
                case _:
                    raise ValueError(f"there is no call {call!r}")
        finally:
            self._pending -= 1
        self._heard = self._loop.time()
        return {"result": None if result is None else wrap(result)}

    async def close(self) -> None:
        """Stop; Dask calls this when the worker closes."""
        self._timer.cancel()
        await self._model.close(wait=False)

    def _remove(self) -> None:
        self._timer.cancel()
        self._worker.handlers.pop(self._name, None)
        self._worker.extensions.pop(self._name, None)

    def _check_client(self) -> None:
        silent_s = self._loop.time() - self._heard
        if silent_s < self._silence_s or self._pending:
            wait_s = max(self._silence_s - silent_s, self._silence_s / 4)
            self._timer = self._loop.call_later(wait_s, self._check_client)
            return
        logger.warning(
            "closing %s: its client has been silent for %.0f s", self._name, silent_s
        )
        self._remove()
        self._closing = self._loop.create_task(self.close())


async def start_server(
    name: str,
    sharing: int,
    transform: Packed[Transform] | None,
    silence_s: float,
    dask_worker: Worker,
) -> None:
    """Create a `ReplicaServer`; Dask's `run` calls this on a worker."""
    ReplicaServer(dask_worker, name, sharing, transform, silence_s)


class RemoteReplica(ModelReplica):
    """The client's end of a replica on a worker; used on the client's event loop."""

    def __init__(
        self,
        client: Client,
        place: str,
        sharing: int,
        transform: Packed[Transform] | None,
        silence_s: float,
    ) -> None:
        self.place = place
        self._client = client
        self._name = f"daskdl-predictor-{uuid.uuid4().hex}"
        self._sharing = sharing
        self._transform = transform
        self._silence_s = silence_s

    @override
    async def open(self) -> None:
        await self._client.run(
            start_server,
            self._name,
            self._sharing,
            self._transform,
            self._silence_s,
            workers=[self.place],
        )

    @override
    async def stage(self, version: int, model: PackedModel) -> ModelFailure | None:
        payload = wrap(model.payload)
        failure: ModelFailure | None
        failure = await self._request("stage", version=version, payload=payload)
        return failure

    @override
    async def use(self, version: int) -> None:
        failure = await self._request("use", version=version)
        if failure is not None:
            raise ConnectionError(failure.summary)

    @override
    async def ask(self, x: Tree) -> Outputs | ModelFailure:
        outputs: Outputs | ModelFailure = await self._request("ask", payload=wrap(x))
        return outputs

    @override
    async def ping(self) -> None:
        await self._request("ping")

    @override
    async def close(self, wait: bool) -> None:
        await self._request("close", wait=wait)

    async def _request(
        self, call: str, *, version: int = 0, payload: Any = None, wait: bool = False
    ) -> Any:
        if self._client.status in ("closing", "closed"):
            raise ConnectionError("the client is closed")
        fields = {"call": call, "version": version, "payload": payload, "wait": wait}
        if self._client.direct_to_workers:
            answer = await getattr(self._client.rpc(self.place), self._name)(**fields)
        else:
            message = {"op": self._name, **fields}
            answer = await self._client.scheduler.proxy(worker=self.place, msg=message)
        if not isinstance(answer, dict):  # Dask's answer if there is no handler
            raise ConnectionError(f"worker {self.place} no longer has the replica")
        if answer["status"] == Answer.UNKNOWN:
            raise ConnectionError(f"worker {self.place}: {answer['reason']}")
        if answer["status"] == Answer.REFUSED:
            return ModelFailure(answer["reason"], "before the batch reached the model")
        return unwrap(answer["result"])


CLIENT_CLOSED = "the client is closed, and no worker can be reached"


@dataclass(frozen=True)
class ClusterHost(Host):
    """The workers of a cluster; replicas close after `silence_s` without a ping."""

    client: Client
    transform: Packed[Transform] | None
    silence_s: float

    @override
    async def places(self) -> list[str]:
        if self.client.status in ("closing", "closed"):
            raise ChannelError(CLIENT_CLOSED)
        return sorted(await self.client.scheduler.ncores())

    @override
    def replica(self, place: str, sharing: int) -> ModelReplica:
        return RemoteReplica(
            self.client, place, sharing, self.transform, self.silence_s
        )


# ---- the pool


LOOK_S = 0.5  # between calls of `look`, each of which is a request to the scheduler


class ReplicaPool:
    """A fixed number of replicas of one model. Used on one event loop.

    A lost replica is replaced where there is room. The start determines how many
    replicas a place may have. If a worker dies, its replicas wait for a new worker, so
    that the remaining workers do not become slower permanently.

    `ready` lists the replicas that take batches. `lost` is called with each lost
    replica, `changed` when a replica becomes ready, and `ended` with an error when no
    replica can start any more.
    """

    ready: list[ModelReplica]
    lost: Callable[[ModelReplica], None]
    changed: Callable[[], None]
    ended: Callable[[BaseException], None]

    def __init__(
        self, host: Host, model: PackedModel, wanted: int, timeouts: Timeouts
    ) -> None:
        self.ready = []
        self._host = host
        self._version, self._model = 1, model
        self._wanted = wanted
        self._timeouts = timeouts
        self._sharing = wanted  # limit of replicas per place; `open` lowers it
        self._swapping = asyncio.Lock()
        self.starting: dict[asyncio.Task[None], str] = {}  # place of each start
        self._background: set[asyncio.Task[None]] = set()
        self._failures: Counter[str] = Counter()  # of starts and replicas, by place
        self._pinged_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all replicas; raises an OptionError if the cluster has no workers."""
        places = await self._host.places()
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
        self._pinged_at = asyncio.get_running_loop().time()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    async def close(self, wait: bool) -> None:
        """Close all replicas, see `ModelReplica.close`."""
        if self._watching is not None:
            self._watching.remove_done_callback(self._watched)
            self._watching.cancel()
        if self.starting:  # a replica that is being opened cannot be closed
            await asyncio.wait(self.starting, timeout=self._timeouts.stop)
        for task in self.starting:
            task.cancel()
        for replica in self.ready:
            self._in_background(self._close(replica, wait))
        self.ready.clear()
        await asyncio.gather(*self.starting, return_exceptions=True)
        await asyncio.gather(*self._background)

    def lose(self, replica: ModelReplica, why: object) -> None:
        """Remove a replica that can no longer be reached."""
        if replica not in self.ready:
            return
        logger.warning("a replica on %s is lost: %s", replica.place, why)
        self.ready.remove(replica)
        self._failures[replica.place] += 1
        self._in_background(self._close(replica))
        self.lost(replica)

    # ---- models

    async def swap(self, model: PackedModel) -> None:
        """Send a model to all replicas, then answer all later batches with it.

        Raises a ModelError if a replica cannot use the model; all replicas then keep
        the former one.
        """
        async with self._swapping:
            version = self._version + 1
            refusals = await self._each(
                self.ready, lambda replica: self._stage(replica, version, model)
            )
            if refusals:
                await self._each(self.ready, self._use)  # releases the staged model
                raise next(iter(refusals.values()))
            self._version, self._model = version, model
            while behind := [r for r in self.ready if r.version != version]:
                for replica, error in (await self._each(behind, self._update)).items():
                    self.lose(replica, error)  # started during the swap

    async def _each(
        self,
        replicas: list[ModelReplica],
        do: Callable[[ModelReplica], Awaitable[None]],
    ) -> dict[ModelReplica, ModelError]:
        """Call a function with each replica; remove those that cannot be reached."""
        asked = list(replicas)
        done = await asyncio.gather(*map(do, asked), return_exceptions=True)
        refusals = {}
        for replica, error in zip(asked, done, strict=True):
            if isinstance(error, ModelError):
                refusals[replica] = error
            elif isinstance(error, OSError):
                self.lose(replica, error)
            elif error is not None:
                raise error
        return refusals

    async def _update(self, replica: ModelReplica) -> None:
        """Make a replica use the current model."""
        while replica.version != self._version:  # a swap may happen in between
            if replica.staged != self._version:
                await self._stage(replica, self._version, self._model)
            else:
                await self._use(replica)

    async def _stage(
        self, replica: ModelReplica, version: int, model: PackedModel
    ) -> None:
        what = f"the model ({model.payload.nbytes} bytes) did not reach {replica.place}"
        bound = self._timeouts.bound("data")
        failure = await within(replica.stage(version, model), bound, what)
        if failure is not None:
            raise failure.error(f"the model cannot be used on {replica.place}")
        replica.staged = version

    async def _use(self, replica: ModelReplica) -> None:
        version, bound = self._version, self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not take the model"
        await within(replica.use(version), bound, what)
        replica.version = version

    # ---- membership

    async def _start(self, place: str) -> None:
        replica = self._host.replica(place, self._sharing)
        bound, what = self._timeouts.bound("join"), f"no replica started on {place}"
        try:
            await within(replica.open(), bound, what)
            await self._update(replica)
            self.ready.append(replica)
        finally:
            if replica not in self.ready:
                self._in_background(self._close(replica))
        self.changed()

    def _in_background(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doing)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _close(self, replica: ModelReplica, wait: bool = True) -> None:
        """Close a replica, if it can still be reached."""
        try:
            bound = self._timeouts.bound("stop")
            await within(replica.close(wait), bound, "the replica did not close")
        except OSError as error:
            logger.info("a replica on %s was not closed: %s", replica.place, error)

    async def _ping(self, replica: ModelReplica) -> None:
        try:
            bound = self._timeouts.bound("request")
            await within(replica.ping(), bound, "the replica did not answer")
        except OSError as error:
            self.lose(replica, error)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:
                logger.info("the workers could not be listed: %s", error)
            await asyncio.sleep(LOOK_S)

    def _watched(self, task: asyncio.Task[None]) -> None:
        # A client that closes its event loop cancels all tasks.
        closed = ChannelError(CLIENT_CLOSED) if task.cancelled() else None
        error = closed or task.exception()
        if error is not None:
            self.ended(error)

    async def look(self) -> None:
        """Check which places exist, start missing replicas and ping those that run."""
        bound = self._timeouts.bound("request")
        places = await within(
            self._host.places(), bound, "the scheduler did not answer"
        )
        for replica in list(self.ready):
            if replica.place not in places:
                self.lose(replica, "its worker has left")
        used = Counter([r.place for r in self.ready] + list(self.starting.values()))
        while used.total() < self._wanted:
            room = [place for place in places if used[place] < self._sharing]
            if not room:
                break
            place = min(room, key=lambda place: (used[place], self._failures[place]))
            used[place] += 1
            task = asyncio.create_task(self._start(place))
            self.starting[task] = place
            task.add_done_callback(self._started)
        now = asyncio.get_running_loop().time()
        if now - self._pinged_at >= self._timeouts.silence / 4:
            self._pinged_at = now
            for replica in self.ready:
                self._in_background(self._ping(replica))

    def _started(self, task: asyncio.Task[None]) -> None:
        place = self.starting.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures[place] += 1
            logger.warning("no replica could be started on %s: %s", place, error)
