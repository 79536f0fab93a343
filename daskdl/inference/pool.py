"""Replicas of a predictor's model, on the workers of a cluster or in this process.

The pool places, calls and replaces replicas, and swaps their model. An OSError means
that a replica cannot be reached.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import traceback
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from distributed import Client, Worker
from torch import Tensor, nn
from typing_extensions import override

from daskdl.channel.broadcast import parts_of, send
from daskdl.channel.protocol import (
    CLOSE,
    NAME,
    Answer,
    Fields,
    GoneError,
    Guard,
    Natural,
    unwrap,
    wrap,
)
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin, set_up
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
    hide_internal_frames_,
)
from daskdl.objective import call
from daskdl.process_settings import device_to_evaluate_on, torch_threads
from daskdl.serialization import Packed, PackedModel
from daskdl.util import guarded, text_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Outputs(NamedTuple):
    """Outputs of a batch."""

    tree: Tree  # numpy arrays
    dtypes: tuple[torch.dtype, ...]  # of each leaf, because numpy has no bfloat16

    @classmethod
    def of(cls, outputs: Any, rows: int) -> "Outputs":
        """Convert outputs, which must be a tree of tensors with `rows` rows."""
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
    """An error of a model or a transform, as text that keeps no frames alive."""

    summary: str
    details: str  # the traceback; empty without frames of the user

    @classmethod
    def of(cls, error: BaseException) -> "ModelFailure":
        hide_internal_frames_(error)
        summary = text_of(error, named=not isinstance(error, DaskDLError))
        if error.__traceback__ is None and error.__cause__ is None:
            return cls(summary, "")
        return cls(summary, "".join(traceback.format_exception(error)))

    def error(self, what: str) -> ModelError:
        """Return the error to raise in the caller; `what` says what has failed."""
        error = ModelError(f"{what}: {self.summary}")
        if self.details:
            error.add_note(f"original traceback:\n{self.details}")
        return error


class SentModel(NamedTuple):
    """Names a model that was sent to workers, which pass it on to each other.

    Attributes:
        version: Version of the model.
        run: Id of the copies on the workers, random.
        secret: Part of each request about the copies, see `check_secret`.
    """

    version: int
    run: int
    secret: int


class ModelReplica(ABC):
    """A model that answers batches in the order of their arrival.

    All methods are called on one event loop, and raise an OSError if the replica is
    lost. Only the pool changes `version` and `staged`.
    """

    place: str  # address of the worker, or "this process"
    version: int = 0  # of the model in use
    staged: int = 0  # version of the model that was sent last

    async def open(self) -> None:  # noqa: B027  # optional
        """Start the replica, without a model."""

    @abstractmethod
    async def stage(
        self, version: int, model: PackedModel, sent: SentModel | None = None
    ) -> ModelFailure | None:
        """Unpack a model, while the current model stays in use.

        Args:
            version: Version of the model.
            model: The model, sent if the place has not received it.
            sent: A model that the place may have received, used if it has `version`.
        """

    @abstractmethod
    async def use(self, version: int) -> None:
        """Answer later batches with this version, and release all others."""

    @abstractmethod
    async def ask(self, x: Tree) -> Outputs | ModelFailure:
        """Return the outputs for a batch, numpy arrays."""

    async def ping(self) -> None:  # noqa: B027  # optional
        """Check that the replica is alive, and keep it open."""

    @abstractmethod
    async def close(self, wait: bool) -> None:
        """Close the replica.

        `wait`: return after the last batch is done and the memory is released.
        """


class Host(ABC):
    """Where replicas can run: in this process, or on the workers of a cluster."""

    @abstractmethod
    async def places(self) -> list[str]:
        """Return the places that exist now, in a fixed order.

        Raises:
            OSError: If the places cannot be listed now.
            ChannelError: If they will never be listed again.
        """

    @abstractmethod
    def replica(self, place: str, sharing: int) -> ModelReplica:
        """Return an unopened replica, one of at most `sharing` at the same place."""

    @contextlib.asynccontextmanager
    async def sent(
        self, version: int, model: PackedModel, places: Collection[str]
    ) -> AsyncIterator[SentModel | None]:
        """Send a model to all places at once, before their replicas stage it.

        It stays there until the context ends. None: each replica gets it by itself.
        """
        yield None


async def within(awaitable: Awaitable[T], bound: Bound, what: str) -> T:
    """Wait for at most `bound`; then cancel, and raise a WaitTimeoutError."""
    try:
        async with asyncio.timeout(bound.seconds) as timeout:
            return await awaitable
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise WaitTimeoutError(f"{what} within {bound}") from error


# ---- in one process


class ModelThread(ModelReplica):
    """A model in this process, and the thread that applies it.

    Methods are called on one event loop; the model runs in the thread.
    """

    place = "this process"
    _model: nn.Module | None
    _staged: dict[int, nn.Module]  # by version
    _device: torch.device

    def __init__(
        self, transform: Packed[Transform] | None, device: str, threads: int
    ) -> None:
        self._transform = transform
        self._device_name = device
        self._model, self._staged = None, {}
        self._version = 0  # of the model in use
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._released = asyncio.Event()
        self._settings = contextlib.ExitStack()
        self._executor = ThreadPoolExecutor(1, "daskdl-predictor")
        # torch applies the setting to the calling thread, and to later threads.
        self._executor.submit(self._settings.enter_context, torch_threads(threads))

    # ---- event loop

    @override
    async def stage(
        self, version: int, model: PackedModel, sent: SentModel | None = None
    ) -> ModelFailure | None:
        unpacked = await self._run(lambda: self._unpacked(model))
        if isinstance(unpacked, ModelFailure):
            return unpacked
        self._staged[version] = unpacked
        return None

    @override
    async def use(self, version: int) -> None:
        if version != self._version:
            self._model, self._version = self._staged[version], version
        self._staged.clear()

    @override
    async def ask(self, x: Tree) -> Outputs | ModelFailure:
        return await self._run(lambda: self._outputs(x))

    @override
    async def close(self, wait: bool) -> None:
        if not self.closed:
            self.closed = True
            self._executor.submit(self._release)
            self._executor.shutdown(wait=False)
        if wait:
            await self._released.wait()

    async def _run(self, function: Callable[[], T | ModelFailure]) -> T | ModelFailure:
        if self.closed:
            raise ConnectionError("the replica is closed")
        # asyncio futures cannot hold a StopIteration.
        future = self._executor.submit(guarded, function, ModelFailure.of)
        return await asyncio.wrap_future(future)

    # ---- model thread

    def _unpacked(self, model: PackedModel) -> nn.Module:
        self._device = device_to_evaluate_on(self._device_name)
        return model.unpack().eval().to(self._device)

    def _outputs(self, x: Tree) -> Outputs:
        model = self._model
        assert model is not None
        batch = batching.tensors((x, None))  # copies, because layers may work in place
        rows = batching.length(batch)
        if self._transform is not None:
            batch = self._transform.shared()(batch)
        dtype = batching.floating_dtype(model)
        with torch.inference_mode():
            inputs = batching.inputs_to_device(batch[0], self._device, dtype)
            return Outputs.of(call(model, inputs), rows)

    def _release(self) -> None:
        self._model = None
        self._staged.clear()
        self._settings.close()
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(self._released.set)


@dataclass(frozen=True)
class LocalHost(Host):
    """This process."""

    transform: Packed[Transform] | None
    device: str
    threads: int = field(default_factory=torch.get_num_threads)

    @override
    async def places(self) -> list[str]:
        return [ModelThread.place]

    @override
    def replica(self, place: str, sharing: int) -> ModelReplica:
        threads = max(1, self.threads // sharing)
        return ModelThread(self.transform, self.device, threads)


# ---- on workers


class ReplicaServer:
    """The worker's end of a replica, which handles its client's requests.

    A round trip over Dask's connections takes 1.0 ms through the scheduler, which every
    client can reach, and 0.6 ms directly. A task takes 12 ms, and a method of an actor
    2.1 ms; besides, an actor would prevent its worker from being retired. A plugin is
    unnecessary, because the client opens replicas on the workers that it chooses. A
    replica closes with its worker, or when its client has been silent for `silence_s`.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        sharing: int,
        transform: Packed[Transform] | None,
        device: str,
        silence_s: float,
    ) -> None:
        self._name = name
        self._worker = worker
        self._silence_s = silence_s
        threads = max(1, worker.state.nthreads // sharing)
        self._model = ModelThread(transform, device, threads)
        self._pending = 0  # requests without an answer
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        worker.handlers[name] = Guard(lambda fields: None).of(self._answer)
        worker.extensions[name] = self
        self._timer = self._loop.call_later(silence_s, self._check_client)

    async def _answer(
        self, call: str, version: Natural, payload: Any, wait: bool
    ) -> Fields:
        """Answer a request of the client; `Guard` refuses malformed requests."""
        if self._model.closed and call in ("ask", "stage", "stage sent"):
            raise GoneError("the replica is closed")
        result: Outputs | ModelFailure | str | None = None
        self._pending += 1
        try:
            match call:
                case "ask":
                    result = await self._model.ask(unwrap(payload))
                case "stage":
                    packed = PackedModel.of(np.asarray(unwrap(payload)), "model")
                    result = await self._model.stage(version, packed)
                case "stage sent":
                    received = await self._received(payload)
                    result = NOT_RECEIVED
                    if received is not None:
                        result = await self._model.stage(version, received)
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
        self._heard_at = self._loop.time()
        return {"result": None if result is None else wrap(result)}

    async def _received(self, key: tuple[int, int]) -> PackedModel | None:
        """Return a model that was sent to several workers; None: it is not here.

        Args:
            key: Run and secret of the copies.
        """
        plugin: ChannelWorkerPlugin | None = self._worker.extensions.get(NAME)
        if plugin is None:  # `prepare_to_receive` has not run here
            return None
        run, secret = key
        copy = plugin.copies.held.get((run, secret))
        if copy is None or not copy.complete:
            return None
        packed = await asyncio.to_thread(copy.values, _packed_model)
        return packed["model"]

    async def close(self) -> None:
        """Stop; Dask calls this when the worker closes."""
        self._timer.cancel()
        await self._model.close(wait=False)

    def _remove(self) -> None:
        self._timer.cancel()
        self._worker.handlers.pop(self._name, None)
        self._worker.extensions.pop(self._name, None)

    def _check_client(self) -> None:
        silent_s = self._loop.time() - self._heard_at
        if silent_s < self._silence_s or self._pending:
            wait_s = max(self._silence_s - silent_s, self._silence_s / 4)
            self._timer = self._loop.call_later(wait_s, self._check_client)
            return
        logger.warning(
            "closing %s: its client has been silent for %.0f s", self._name, silent_s
        )
        self._remove()
        self._closing = self._loop.create_task(self.close())


def _packed_model(_: str, payload: np.ndarray) -> PackedModel:
    return PackedModel.of(payload, "model")


async def start_server(
    name: str,
    sharing: int,
    transform: Packed[Transform] | None,
    device: str,
    silence_s: float,
    dask_worker: Worker,
) -> None:
    """Create a `ReplicaServer`; Dask's `run` calls this on a worker."""
    ReplicaServer(dask_worker, name, sharing, transform, device, silence_s)


async def prepare_to_receive(dask_worker: Worker) -> None:
    """Let a worker receive models and pass them on; Dask's `run` calls this there."""
    if NAME not in dask_worker.extensions:
        set_up(dask_worker)


class RemoteReplica(ModelReplica):
    """The client's end of a replica on a worker; used on the client's event loop."""

    def __init__(
        self,
        client: Client,
        place: str,
        sharing: int,
        transform: Packed[Transform] | None,
        device: str,
        silence_s: float,
    ) -> None:
        self.place = place
        self._client = client
        self._name = f"daskdl-predictor-{uuid.uuid4().hex}"
        self._sharing = sharing
        self._transform = transform
        self._device = device
        self._silence_s = silence_s

    @override
    async def open(self) -> None:
        await self._client.run(
            start_server,
            self._name,
            self._sharing,
            self._transform,
            self._device,
            self._silence_s,
            workers=[self.place],
        )

    @override
    async def stage(
        self, version: int, model: PackedModel, sent: SentModel | None = None
    ) -> ModelFailure | None:
        failure: ModelFailure | None
        if sent is not None and sent.version == version:
            key = [sent.run, sent.secret]
            failure = await self._request("stage sent", version=version, payload=key)
            if failure != NOT_RECEIVED:
                return failure
        payload = wrap(model.payload)
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
        if not isinstance(answer, dict):  # Dask's answer without a handler
            raise ConnectionError(f"worker {self.place} no longer has the replica")
        if answer["status"] == Answer.UNKNOWN:
            raise ConnectionError(f"worker {self.place}: {answer['reason']}")
        if answer["status"] == Answer.REFUSED:
            return ModelFailure(answer["reason"], "the batch did not reach the model")
        return unwrap(answer["result"])


NOT_RECEIVED = "not received"  # answer of a worker without a model that was sent
# If all copies together have fewer bytes, each replica gets its own, in one request.
TOGETHER_BYTES = 2**20

CLIENT_CLOSED = "the client is closed, so no worker can be reached"


@dataclass(frozen=True)
class ClusterHost(Host):
    """The workers of a cluster.

    Replicas close after the timeout ``silence`` without a ping.
    """

    client: Client
    transform: Packed[Transform] | None
    device: str
    timeouts: Timeouts

    @override
    async def places(self) -> list[str]:
        if self.client.status in ("closing", "closed"):
            raise ChannelError(CLIENT_CLOSED)
        return sorted(await self.client.scheduler.ncores())

    @override
    def replica(self, place: str, sharing: int) -> ModelReplica:
        return RemoteReplica(
            self.client,
            place,
            sharing,
            self.transform,
            self.device,
            self.timeouts.silence,
        )

    @override
    @contextlib.asynccontextmanager
    async def sent(
        self, version: int, model: PackedModel, places: Collection[str]
    ) -> AsyncIterator[SentModel | None]:
        workers = sorted(set(places))
        if len(workers) < 2 or len(workers) * model.payload.nbytes < TOGETHER_BYTES:
            yield None
            return
        sent = SentModel(version, secrets.randbits(63), secrets.randbits(63))

        def ask(operation: str, **fields: Any) -> Awaitable[Any]:
            asking = getattr(self.client.scheduler, operation)
            answer: Awaitable[Any] = asking(run=sent.run, secret=sent.secret, **fields)
            return answer

        blob = parts_of({"model": model.payload})
        unsent = list(range(blob.parts))
        try:
            async with asyncio.timeout(self.timeouts.request):
                await self.client.register_plugin(ChannelSchedulerPlugin())
                await self.client.run(
                    prepare_to_receive, workers=workers, on_error="return"
                )
            async with asyncio.timeout(self.timeouts.data):
                failures = await send(
                    ask,
                    blob,
                    unsent,
                    workers,
                    client=self.client.id,
                    timeout_s=self.timeouts.request,
                )
            for worker, why in failures.items():
                logger.info("the model was not sent to %s: %s", worker, why)
        except (OSError, ChannelError) as error:  # a TimeoutError is an OSError
            logger.info("the model was not sent to all workers: %s", error)
        try:
            yield sent
        finally:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(self.timeouts.stop):
                    await ask(CLOSE)


# ---- the pool


LOOK_S = 0.5  # between calls of `look`, each of which is a request to the scheduler


async def _all(awaitables: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the earliest error in their order."""
    for error in await asyncio.gather(*awaitables, return_exceptions=True):
        if error is not None:
            raise error


class ReplicaPool:
    """A fixed number of replicas of one model, used on one event loop.

    The number of places at the start determines how many replicas a place may have. A
    lost replica is replaced where there is room: if a worker dies, its replicas wait
    for a new worker, so that the remaining workers do not become slower permanently.

    Attributes:
        ready: Replicas that accept batches.
        starting: Tasks that start a replica, with its place.
        on_loss: Called with each lost replica.
        on_ready: Called when a replica becomes ready.
        on_end: Called with an error when no replica can ever start again.
    """

    ready: list[ModelReplica]
    starting: dict[asyncio.Task[None], str]
    on_loss: Callable[[ModelReplica], None]
    on_ready: Callable[[], None]
    on_end: Callable[[BaseException], None]

    def __init__(
        self, host: Host, model: PackedModel, wanted: int, timeouts: Timeouts
    ) -> None:
        self.ready, self.starting = [], {}
        self._host = host
        self._version, self._model = 1, model
        self._wanted = wanted
        self._timeouts = timeouts
        self._sharing = wanted  # most replicas at a place; `open` lowers the limit
        self._swapping = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._failures: Counter[str] = Counter()  # of starts and replicas, by place
        self._pinged_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all replicas; raise an OptionError if the cluster has no workers."""
        places = await self._host.places()
        if not places:
            raise OptionError(
                "the cluster has no workers; wait for some with "
                "client.wait_for_workers(1)"
            )
        self._sharing = math.ceil(self._wanted / len(places))
        chosen = itertools.islice(itertools.cycle(places), self._wanted)
        await self._start(*chosen)
        self._pinged_at = asyncio.get_running_loop().time()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    async def close(self, wait: bool) -> None:
        """Close all replicas; see `ModelReplica.close`."""
        if self._watching is not None:
            self._watching.remove_done_callback(self._watched)
            self._watching.cancel()
        if self.starting:  # a replica cannot be closed while it opens
            await asyncio.wait(self.starting, timeout=self._timeouts.stop)
        for task in self.starting:
            task.cancel()
        for replica in self.ready:
            self._in_background(self._close(replica, wait))
        self.ready.clear()
        await asyncio.gather(*self.starting, return_exceptions=True)
        await asyncio.gather(*self._background)

    def lose(self, replica: ModelReplica, reason: object) -> None:
        """Remove a replica that can no longer be reached."""
        if replica not in self.ready:
            return
        logger.warning("lost a replica on %s: %s", replica.place, reason)
        self.ready.remove(replica)
        self._failures[replica.place] += 1
        self._in_background(self._close(replica))
        self.on_loss(replica)

    # ---- models

    async def swap(self, model: PackedModel) -> None:
        """Send a model to all replicas, then answer all later batches with it.

        Raises:
            ModelError: If a replica cannot use the model; all replicas then keep the
                previous model.
        """
        async with self._swapping:
            version = self._version + 1
            places = {replica.place for replica in self.ready}
            async with self._host.sent(version, model, places) as sent:
                refusals = await self._for_each(
                    self.ready,
                    lambda replica: self._stage(replica, version, model, sent),
                )
            if refusals:
                await self._for_each(self.ready, self._use)  # releases the staged model
                raise next(iter(refusals.values()))
            self._version, self._model = version, model
            # Replicas may start during the swap.
            while behind := [r for r in self.ready if r.version != version]:
                refusals = await self._for_each(behind, self._update)
                for replica, error in refusals.items():
                    self.lose(replica, error)

    async def _for_each(
        self,
        replicas: list[ModelReplica],
        function: Callable[[ModelReplica], Awaitable[None]],
    ) -> dict[ModelReplica, ModelError]:
        """Call a function with each replica; return the ModelErrors by replica.

        Replicas that cannot be reached are removed.
        """
        called = list(replicas)
        errors = await asyncio.gather(*map(function, called), return_exceptions=True)
        refusals = {}
        for replica, error in zip(called, errors, strict=True):
            if isinstance(error, ModelError):
                refusals[replica] = error
            elif isinstance(error, OSError):
                self.lose(replica, error)
            elif error is not None:
                raise error
        return refusals

    async def _update(
        self, replica: ModelReplica, sent: SentModel | None = None
    ) -> None:
        """Make a replica use the current model."""
        while replica.version != self._version:  # a swap may happen meanwhile
            if replica.staged != self._version:
                await self._stage(replica, self._version, self._model, sent)
            else:
                await self._use(replica)

    async def _stage(
        self,
        replica: ModelReplica,
        version: int,
        model: PackedModel,
        sent: SentModel | None,
    ) -> None:
        what = f"the model ({model.payload.nbytes} bytes) did not reach {replica.place}"
        bound = self._timeouts.bound("data")
        failure = await within(replica.stage(version, model, sent), bound, what)
        if failure is not None:
            raise failure.error(f"the model cannot be used on {replica.place}")
        replica.staged = version

    async def _use(self, replica: ModelReplica) -> None:
        version, bound = self._version, self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not switch to the model"
        await within(replica.use(version), bound, what)
        replica.version = version

    # ---- membership

    async def _start(self, *places: str) -> None:
        """Start a replica in each place, all or none."""
        replicas = [self._host.replica(place, self._sharing) for place in places]
        try:
            version, model = self._version, self._model
            # A replica that has been opened closes if nobody asks it for a while.
            async with self._host.sent(version, model, places) as sent:
                await _all(map(self._open, replicas))
                await _all(self._update(replica, sent) for replica in replicas)
            self.ready += replicas
        finally:
            for replica in replicas:
                if replica not in self.ready:
                    self._in_background(self._close(replica))
        self.on_ready()

    async def _open(self, replica: ModelReplica) -> None:
        bound, place = self._timeouts.bound("join"), replica.place
        await within(replica.open(), bound, f"no replica started on {place}")

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _close(self, replica: ModelReplica, wait: bool = True) -> None:
        """Close a replica, if it can still be reached."""
        try:
            bound = self._timeouts.bound("stop")
            await within(replica.close(wait), bound, "the replica did not close")
        except OSError as error:
            logger.info("could not close a replica on %s: %s", replica.place, error)

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
                logger.info("could not list the workers: %s", error)
            await asyncio.sleep(LOOK_S)

    def _watched(self, task: asyncio.Task[None]) -> None:
        # A client that closes its event loop cancels all tasks.
        closed = ChannelError(CLIENT_CLOSED) if task.cancelled() else None
        error = closed or task.exception()
        if error is not None:
            self.on_end(error)

    async def look(self) -> None:
        """List the places, start missing replicas, and ping the ready ones."""
        bound = self._timeouts.bound("request")
        places = await within(
            self._host.places(), bound, "the scheduler did not answer"
        )
        for replica in list(self.ready):
            if replica.place not in places:
                self.lose(replica, "its worker has left")
        used = Counter([r.place for r in self.ready] + list(self.starting.values()))
        while used.total() < self._wanted:
            free = [place for place in places if used[place] < self._sharing]
            if not free:
                break
            place = min(free, key=lambda place: (used[place], self._failures[place]))
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
            logger.warning("could not start a replica on %s: %s", place, error)
