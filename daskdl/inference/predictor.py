"""A predictor: calls from any thread wait in a bounded queue and leave in batches.

The queue decides which calls share a batch. The dispatcher decides which replica gets a
batch, and retries calls after an error of their batch or the loss of their replica.
"""

import asyncio
import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from dask.base import is_dask_collection
from distributed import Client
from torch import Tensor, nn
from typing_extensions import override

from daskdl.config import Timeouts, check_count, check_whole, is_number
from daskdl.data import batching
from daskdl.data.batching import Transform, Tree
from daskdl.data.checks import check_module
from daskdl.data.inputs import ReadOptions
from daskdl.data.named_columns import NO_COLUMNS, Columns, NamedRows, columns_in
from daskdl.data.tables import (
    array_of,
    as_numpy,
    check_array,
    check_structure,
)
from daskdl.errors import (
    BusyError,
    DataError,
    OptionError,
    ReplicaError,
    RunError,
    WaitTimeoutError,
)
from daskdl.inference.pool import (
    ClusterHost,
    LocalHost,
    ModelFailure,
    ModelReplica,
    Outputs,
    ReplicaPool,
    within,
)
from daskdl.inference.predict import check_output
from daskdl.objective import OneOutput
from daskdl.process_settings import device_name
from daskdl.serialization import Packed, PackedModel
from daskdl.util import check_installed, client_or_process

T = TypeVar("T")


# ---- calls


@dataclass(eq=False)
class Call:
    """A copy of the rows of one call, and the future of its outputs."""

    x: Tree
    rows: int
    kind: str  # calls of the same kind may share a batch
    tensors: bool  # whether the caller gets tensors
    arrived: float  # time.monotonic
    answer: Future[Tree] = field(default_factory=Future)
    losses: int = 0  # number of replicas that were lost with this call
    begun: bool = False  # sent to a replica, so it can no longer be cancelled

    @classmethod
    def of(cls, x: Any, most: int, columns: Columns | None = None) -> "Call":
        """Check and copy the rows of a call.

        Args:
            x: As for `Predictor.__call__`.
            most: Maximum number of rows.
            columns: Columns that the model was trained on; None: unknown.
        """
        check_structure(x, None)
        names, rows = columns_in(x, None), {}
        x = batching.with_leaves(
            x,
            [array_of(leaf, name) for name, leaf in batching.named_leaves(x, "X")],
        )
        for name, leaf in batching.named_leaves(x, "X"):
            if is_dask_collection(leaf):
                raise DataError(
                    f"{name} must be in memory, got a Dask collection; use predict"
                )
            rows[name] = int(check_array(leaf, name))
        if len(set(rows.values())) > 1:
            raise DataError(
                f"all arrays in X must have the same number of rows, got {rows}"
            )
        count = next(iter(rows.values()))
        if count > most:
            raise DataError(
                f"X has {count} rows, but a call may have at most batch_limit={most}; "
                "split it into several calls, or use predict"
            )
        copied = batching.tree_map(lambda leaf: np.array(as_numpy(leaf), order="C"), x)
        named = NamedRows.of((copied, None), names)
        named.warn_of_positions(columns or NO_COLUMNS, columns)
        copied, _ = named.arranged(columns or NO_COLUMNS)
        tensors = all(isinstance(leaf, Tensor) for leaf in batching.leaves(x))
        kind = batching.tree_map(lambda leaf: [leaf.shape[1:], leaf.dtype.str], copied)
        return cls(copied, count, repr(kind), tensors, time.monotonic())

    def begin(self) -> bool:
        """Prevent cancellation; return False if the call is already cancelled."""
        if not self.begun:
            self.begun = self.answer.set_running_or_notify_cancel()
        return self.begun

    def separate(self) -> None:
        """Put the call into a batch of its own."""
        self.kind = str(id(self))

    @override
    def __str__(self) -> str:
        leaves = ", ".join(
            f"{name}: shape {leaf.shape} and dtype {leaf.dtype}"
            for name, leaf in batching.named_leaves(self.x, "X")
        )
        return f"{self.rows} rows, {leaves}"


def answers_of(outputs: Outputs, calls: Sequence[Call]) -> list[Tree]:
    """Return the outputs for each call, in separate memory."""
    answers, start = [], 0
    for call in calls:
        rows = batching.rows(outputs.tree, slice(start, start + call.rows))
        start += call.rows
        if len(calls) > 1:
            rows = batching.tree_map(np.copy, rows)
        if call.tensors:
            leaves = zip(batching.leaves(rows), outputs.dtypes, strict=True)
            rows = batching.with_leaves(
                rows, [torch.from_numpy(x).to(d) for x, d in leaves]
            )
        answers.append(rows)
    return answers


class BatchQueue:
    """Calls that wait for a replica, in one line per kind, oldest first.

    A batch is the beginning of a line, so calls of one kind keep their order. A batch
    is due when it is full, or when its first call has waited for `wait_s`. The queue
    has neither a clock nor an event loop.
    """

    _lines: dict[str, deque[Call]]  # no line is empty

    def __init__(self, batch_limit: int, wait_s: float, queue_limit: int) -> None:
        self._batch_limit = batch_limit
        self._wait_s = wait_s
        self._queue_limit = queue_limit
        self._lines = {}
        self._lock = threading.Lock()
        self._rows = 0  # admitted, but not yet sent to a replica
        self._waiters: list[Future[None]] = []  # of callers that wait for room

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    # ---- any thread

    def admit(self, rows: int) -> None:
        """Reserve room for the rows of a call; raise a BusyError if there is none."""
        with self._lock:
            if self._rows + rows > self._queue_limit:
                raise BusyError(
                    f"the predictor is busy: {self._rows} rows are waiting, and {rows} "
                    f"more would exceed queue_limit={self._queue_limit}; call again "
                    "later, pass timeout_s to wait for room, or use more replicas"
                )
            self._rows += rows

    def room(self, rows: int) -> Future[None]:
        """Return a future that is done when a call of `admit` may succeed."""
        waiter: Future[None] = Future()
        with self._lock:
            if self._rows + rows > self._queue_limit:
                self._waiters.append(waiter)
                return waiter
        waiter.set_result(None)
        return waiter

    def _release(self, calls: Iterable[Call]) -> None:
        """Free the room of calls that are sent to a replica for the first time."""
        with self._lock:
            self._rows -= sum(call.rows for call in calls if not call.begun)
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    # ---- event loop

    def add(self, call: Call) -> None:
        """Append an admitted call to its line."""
        self._lines.setdefault(call.kind, deque()).append(call)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Put calls back at the front of their line, in the same order."""
        for call in reversed(calls):
            call.arrived = -math.inf  # due at once
            self._lines.setdefault(call.kind, deque()).appendleft(call)

    def withdraw(self, call: Call) -> None:
        """Remove a cancelled call, if it is still waiting."""
        line = self._lines.get(call.kind, deque())
        if call in line:
            self._remove(line, [call])

    def take(self, by: float) -> list[Call]:
        """Remove the oldest batch that is due at time `by`; -inf: only a full batch."""
        lines = [line for line in self._lines.values() if self._due(line) <= by]
        if not lines:
            return []
        line = min(lines, key=lambda line: line[0].arrived)
        calls = self._batch(line)
        self._remove(line, calls)
        return calls

    def due(self) -> float:
        """Return when the next batch is due; inf: no call is waiting."""
        return min(map(self._due, self._lines.values()), default=math.inf)

    def clear(self) -> list[Call]:
        """Remove all calls."""
        calls = [call for line in self._lines.values() for call in line]
        self._lines.clear()
        self._release(calls)
        return calls

    def _due(self, line: deque[Call]) -> float:
        batch = self._batch(line)
        full = len(batch) < len(line) or sum(c.rows for c in batch) == self._batch_limit
        return -math.inf if full else line[0].arrived + self._wait_s

    def _batch(self, line: deque[Call]) -> list[Call]:
        batch, room = [], self._batch_limit
        for call in line:
            room -= call.rows
            if room < 0:
                break
            batch.append(call)
        return batch

    def _remove(self, line: deque[Call], calls: list[Call]) -> None:
        for call in calls:
            line.remove(call)
        if not line:
            del self._lines[calls[0].kind]
        self._release(calls)


# ---- batches


GATHER_S = 0.0005  # longest wait for further calls of callers that were just answered
BATCHES_PER_REPLICA = 2  # a replica then has its next batch when it finishes one
MAX_LOSSES = 3  # of a call that may be the cause, like Dask's `allowed-failures`

BatchTask = asyncio.Task[list[Tree] | ModelFailure]


class Dispatcher:
    """Sends batches to replicas until each call has an answer or an error.

    All methods are called on the event loop of the pool.
    """

    def __init__(
        self, pool: ReplicaPool, queue: BatchQueue, timeouts: Timeouts
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._timeouts = timeouts
        self._in_flight: dict[BatchTask, tuple[ModelReplica, list[Call]]] = {}
        self._failure: BaseException | None = None  # of all later calls
        self._closing = False
        self._returning = 0  # callers that were just answered and may call again
        self._idle = asyncio.Event()  # set when all calls have their answers
        self._send_timer: asyncio.TimerHandle | None = None
        self._rejoin_timer: asyncio.TimerHandle | None = None  # while without replicas
        pool.on_loss = self._handle_loss
        pool.on_ready = self._handle_ready
        pool.on_end = self._end

    def add(self, call: Call) -> None:
        """Add a call that the queue has admitted."""
        self._queue.add(call)
        if self._failure is not None or self._closing:
            self._queue.withdraw(call)
            self._fail([call], self._failure or RunError("the predictor is closed"))
            return
        self._idle.clear()
        # Callers that were answered together call again at about the same time.
        self._returning = max(0, self._returning - 1)
        gathers = self._returning and self._queue.due() > -math.inf
        self._send_within(GATHER_S if gathers else 0.0)

    def withdraw(self, call: Call) -> None:
        """Remove a call, if it is still waiting."""
        self._queue.withdraw(call)
        self._send()

    async def drain(self, seconds: float) -> None:
        """Accept no more calls, and wait for the earlier ones, at most `seconds`."""
        self._closing = True
        self._send()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    def close(self) -> None:
        """Fail all calls that have no answer yet."""
        self._closing = True
        self._end(RunError("the predictor was closed before this call was answered"))
        for timer in (self._send_timer, self._rejoin_timer):
            if timer is not None:
                timer.cancel()

    # ---- sending

    def _send(self) -> None:
        """Send due batches to the replicas that accept another batch."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        clock = asyncio.get_running_loop().time
        while (replica := self._least_loaded()) is not None:
            # A busy replica gets only full batches; others may still grow.
            idle = not self._load(replica)
            now = math.inf if self._closing else clock()
            calls = self._queue.take(now if idle else -math.inf)
            if not calls:
                due = self._queue.due()
                if idle and due < math.inf:
                    self._send_within(due - now)
                break
            calls = [call for call in calls if call.begin()]  # without cancelled calls
            if calls:
                task = asyncio.create_task(self._ask(replica, calls))
                self._in_flight[task] = (replica, calls)
                task.add_done_callback(self._finish)
        if self._in_flight or len(self._queue):
            self._idle.clear()
        else:
            self._idle.set()

    def _send_within(self, seconds: float) -> None:
        """Send due batches in at most `seconds`."""
        loop = asyncio.get_running_loop()
        if self._send_timer is not None:
            if self._send_timer.when() <= loop.time() + seconds:
                return
            self._send_timer.cancel()
        self._send_timer = loop.call_later(seconds, self._send_now)

    def _send_now(self) -> None:
        if self._queue.due() > -math.inf:  # after a full batch, more calls may follow
            self._returning = 0
        self._send()

    def _least_loaded(self) -> ModelReplica | None:
        """Return the replica with the fewest batches, if it accepts another batch."""
        replica = min(self._pool.ready, key=self._load, default=None)
        if replica is None or self._load(replica) >= BATCHES_PER_REPLICA:
            return None
        return replica

    def _load(self, replica: ModelReplica) -> int:
        return sum(busy is replica for busy, _ in self._in_flight.values())

    async def _ask(
        self, replica: ModelReplica, calls: list[Call]
    ) -> list[Tree] | ModelFailure:
        bound = self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not answer"
        rows = batching.joined([call.x for call in calls])
        outputs = await within(replica.ask(rows), bound, what)
        if isinstance(outputs, ModelFailure):
            return outputs
        return answers_of(outputs, calls)

    # ---- outcomes

    def _finish(self, task: BatchTask) -> None:
        """Answer, retry or fail the calls of a batch."""
        replica, calls = self._in_flight[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):
            self._pool.lose(replica, error)
        del self._in_flight[task]
        if task.cancelled() or isinstance(error, OSError):
            self._retry(calls, error)
        elif error is not None:  # a bug in daskdl; callers must not wait forever
            self._fail(calls, error)
        elif not isinstance(outcome := task.result(), ModelFailure):
            self._returning += len(calls)
            for call, answer in zip(calls, outcome, strict=True):
                call.answer.set_result(answer)
        elif len(calls) == 1:
            self._fail(calls, outcome.error(f"the model failed on {calls[0]}"))
        else:  # retried one by one, so that only the faulty call fails
            for call in calls:
                call.separate()
            self._queue.put_back(calls)
        self._send()

    def _retry(self, calls: list[Call], error: BaseException | None) -> None:
        """Retry calls on another replica; fail calls that lost too many replicas."""
        for call in calls:
            if call.losses > MAX_LOSSES:
                lost = ReplicaError(
                    f"a call was lost with its replica {call.losses} times, last "
                    f"error: {error}. Does this call crash the workers? Its input has "
                    f"{call}"
                )
                self._fail([call], lost)
        self._queue.put_back([call for call in calls if call.losses <= MAX_LOSSES])

    def _fail(self, calls: Iterable[Call], error: BaseException) -> None:
        for call in calls:
            if call.begin():
                # Each thread gets a copy, because raising extends the traceback.
                call.answer.set_exception(copy.copy(error))

    # ---- events of the pool

    def _handle_loss(self, replica: ModelReplica) -> None:
        """Retry the batches of a lost replica, which was computing only the oldest."""
        batches = [
            (task, calls)
            for task, (busy, calls) in self._in_flight.items()
            if busy is replica
        ]
        for task, _ in batches:
            task.cancel()
        for _, calls in batches[:1]:
            for call in calls:
                call.losses += 1
                if call.losses > 1:
                    call.separate()
        if not self._pool.ready and self._rejoin_timer is None:
            loop = asyncio.get_running_loop()
            self._rejoin_timer = loop.call_later(self._timeouts.rejoin, self._give_up)

    def _handle_ready(self) -> None:
        if self._rejoin_timer is not None:
            self._rejoin_timer.cancel()
            self._rejoin_timer = None
        self._failure = None
        self._send()

    def _give_up(self) -> None:
        bound = self._timeouts.bound("rejoin")
        self._end(
            WaitTimeoutError(
                f"all replicas are lost, and no new one started within {bound}; does "
                "the cluster have workers?"
            )
        )

    def _end(self, error: BaseException) -> None:
        """Fail all calls, and those that follow."""
        self._failure = error
        calls = self._queue.clear()
        for task, (_, begun) in self._in_flight.items():
            task.remove_done_callback(self._finish)
            task.cancel()
            calls += begun
        self._in_flight.clear()
        self._fail(calls, error)
        self._idle.set()


# ---- public


CHECK_S = 1.0  # seconds between checks that the event loop still runs


class Predictor:
    """A model that answers calls from many threads, with replicas on workers.

    Calls that arrive at about the same time, with rows of the same shape, are joined
    into one batch. Each batch goes to the replica with the fewest batches, and each
    caller gets the outputs for its own rows. If a worker dies, its calls go to another
    replica, and a new replica starts as soon as a worker has room for it.

    Any thread may use a predictor. A predictor is also a context manager;
    :meth:`close` removes the replicas.

    Args:
        model: Returns a tensor, or tuples and dicts of tensors, with one row for each
            row of its input. The model is copied; :meth:`swap` replaces it later.
        replicas: Number of models in the workers' memory, >= 1, spread evenly over the
            workers that exist at the start.
        batch_limit: Maximum number of rows in a batch, and in a call, >= 1.
        wait_ms: Maximum time that a batch waits for more rows, milliseconds, >= 0.
            While all replicas are busy, rows wait in any case.
        queue_limit: Maximum number of rows that may wait for a replica, >= batch_limit.
        transform: Applied to each batch before the model, as in ``Trainer``.
        output: Name or position of the only output to return. None: all outputs.
        client: Synchronous client. None: the default client, or a `LocalCluster` for
            this predictor if there is none. False: replicas are threads of this
            process.
        device: Device of the models: a torch device; or ``"auto"``: CUDA. Workers
            without CUDA use their CPU.

    Attributes:
        columns: Names of the columns of tables, in the order that the model expects,
            such as ``{"X": ("age", "height")}``: the columns that the trainer's model
            was trained on, or that a `Normalization` as transform was fitted on. None:
            unknown. Empty: the trainer's model was trained on arrays.

    Raises:
        OptionError: If an option is not allowed, or there are no workers.
        ModelError: If a worker cannot use the model.
        OSError: If a replica does not start.

    Example:
        >>> import numpy as np
        >>> with Predictor(nn.Identity(), client=False) as predictor:
        ...     predictor(np.array([[1.0], [2.0]], np.float32))
        array([[1.],
               [2.]], dtype=float32)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int = 2,
        batch_limit: int = 32,
        wait_ms: float = 0.0,
        queue_limit: int = 1024,
        transform: Transform | None = None,
        output: str | int | None = None,
        client: Client | Literal[False] | None = None,
        device: str | torch.device = "auto",
    ) -> None:
        device = device_name(device)
        check_count("replicas", replicas)
        check_count("batch_limit", batch_limit)
        # The queue must have room for the largest call.
        check_whole("queue_limit", queue_limit, batch_limit)
        if not is_number(wait_ms) or not 0 <= wait_ms < math.inf:
            raise OptionError(f"wait_ms must be >= 0 and finite, got {wait_ms!r}")
        check_output(output)
        self._output = output
        expected = ReadOptions(transform=transform).expected_columns
        self.columns: Columns | None = expected or None
        packed = self._packed(model, here=client is False)
        packed_transform = None if transform is None else Packed(transform, "transform")
        self._batch_limit = batch_limit
        self._timeouts = Timeouts.from_config()
        self._queue = BatchQueue(batch_limit, wait_ms / 1e3, queue_limit)
        self._closing = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as starting:
            cluster = starting.enter_context(client_or_process(client))
            host: LocalHost | ClusterHost
            if cluster is False:
                self._loop = starting.enter_context(_loop_thread())
                host = LocalHost(packed_transform, device)
            else:
                check_installed(cluster)
                self._loop = cluster.loop.asyncio_loop
                host = ClusterHost(cluster, packed_transform, device, self._timeouts)
            self._here = cluster is False
            self._pool = ReplicaPool(host, packed, replicas, self._timeouts)
            self._dispatcher = Dispatcher(self._pool, self._queue, self._timeouts)
            starting.callback(self._end, wait=False)
            self._run(self._pool.open())
            self._resources = starting.pop_all()

    # ---- calls, from any thread

    def __call__(self, x: Any, timeout_s: float | None = None) -> Any:
        """Call the model, and wait for its outputs.

        Args:
            x: A numpy array, a torch tensor, a table of pandas or pyarrow, or tuples
                and dicts of these, with 1 to `batch_limit` rows. Copied. The columns of
                tables are matched by name with `columns`.
            timeout_s: Maximum time to wait for room and for the answer, seconds. None:
                do not wait for room, and wait for the answer while there are replicas.

        Returns:
            Outputs for these rows, in the structure that the model returns: tensors if
            `x` consists of tensors, else numpy arrays.

        Raises:
            DataError: If `x` cannot be used.
            BusyError: If the queue is full, and still full after the timeout.
            ModelError: If the model or the transform fails on these rows.
            ReplicaError: If every worker that computes the call dies.
            WaitTimeoutError: If no answer arrives in time, or all replicas are lost.
            RunError: If the predictor is closed.
        """
        _check_may_block(self._loop)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        call = Call.of(x, self._batch_limit, self.columns)
        while True:
            try:
                self._enter(call)
                break
            except BusyError:
                room = self._queue.room(call.rows)
                if deadline is None or not self._done(room, deadline):
                    raise
        try:
            if self._done(call.answer, deadline):
                return call.answer.result()
        finally:
            call.answer.cancel()  # has no effect if the call is finished
        raise _timeout_error(timeout_s)

    async def acall(self, x: Any, timeout_s: float | None = None) -> Any:
        """Call the model from any event loop; raises the errors of :meth:`__call__`.

        Args:
            x: As for :meth:`__call__`.
            timeout_s: As for :meth:`__call__`.

        Returns:
            Outputs for these rows, as from :meth:`__call__`.
        """
        call = Call.of(x, self._batch_limit, self.columns)
        busy: BusyError | None = None
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                while True:
                    try:
                        self._enter(call)
                        break
                    except BusyError as error:
                        if timeout_s is None:
                            raise
                        busy = error
                        await self._outcome(self._queue.room(call.rows))
                busy = None
                return await self._outcome(call.answer)
        except TimeoutError:
            if not timeout.expired():  # all replicas are lost
                raise
            raise busy or _timeout_error(timeout_s) from None

    def submit(self, x: Any) -> Future[Any]:
        """Call the model without waiting; see :meth:`__call__`.

        Args:
            x: As for :meth:`__call__`.

        Returns:
            A future of the outputs, which can be cancelled until the call is sent to a
            replica. It raises the errors of :meth:`__call__`.

        Raises:
            DataError: If `x` cannot be used.
            BusyError: If the queue is full.
            RunError: If the predictor is closed.
        """
        call = Call.of(x, self._batch_limit, self.columns)
        self._enter(call)
        return call.answer

    # ---- swap and close

    def swap(self, model: nn.Module) -> None:
        """Replace the model without a pause.

        Either model may answer calls made before `swap` returns; the new model answers
        later calls. The workers then release the old model.

        Args:
            model: The new model, copied. Its inputs and outputs may differ from those
                of the old model.

        Raises:
            ModelError: If a worker cannot use the model; the old model stays in use.
            RunError: If the predictor is closed.
        """
        _check_may_block(self._loop)
        packed = self._packed(model, self._here)
        self._check_open()
        self._run(self._pool.swap(packed))

    def close(self, *, wait: bool = True) -> None:
        """Remove the replicas; a second call has no effect.

        Args:
            wait: Whether to wait for the answers to earlier calls, for at most
                ``daskdl.timeouts.stop``. Calls without an answer by then raise a
                RunError.
        """
        _check_may_block(self._loop)
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with self._resources:  # closes without waiting after an interrupt
                if wait and self._loop.is_running():
                    self._run(self._dispatcher.drain(self._timeouts.stop))
                self._end(wait)

    def _packed(self, model: nn.Module, here: bool) -> PackedModel:
        check_module(model)
        if self._output is not None:
            model = OneOutput(model, self._output)
        return PackedModel(model, here=here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is None)

    def _end(self, wait: bool) -> None:
        """Fail calls that are still waiting, and close all replicas."""

        async def end() -> None:
            self._dispatcher.close()
            await self._pool.close(wait)

        if self._loop.is_running():
            self._run(end())
        else:  # the client, and with it the replicas, were closed first
            self._dispatcher.close()

    # ---- the event loop, from other threads

    def _enter(self, call: Call) -> None:
        """Queue a call."""
        self._check_open()
        self._queue.admit(call.rows)

        def withdraw(answer: Future[Any]) -> None:
            if answer.cancelled():
                with contextlib.suppress(RunError):  # the client is closed
                    self._call_soon(self._dispatcher.withdraw, call)

        call.answer.add_done_callback(withdraw)
        self._call_soon(self._dispatcher.add, call)

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the predictor is closed")

    def _call_soon(self, function: Callable[[Call], None], call: Call) -> None:
        try:
            self._loop.call_soon_threadsafe(function, call)
        except RuntimeError as error:  # the event loop is closed
            raise RunError("the predictor's client is closed") from error

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine whose waits are all bounded, and return its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect unless this thread was interrupted

    def _done(self, future: Future[Any], deadline: float | None) -> bool:
        """Wait in this thread; return whether the future is done by the deadline."""
        while not future.done():
            wait_s = CHECK_S if deadline is None else deadline - time.monotonic()
            if wait_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                future.exception(min(wait_s, CHECK_S))
            self._check_running(future)
        return True

    async def _outcome(self, future: Future[T]) -> T:
        """Wait in the caller's event loop, which may differ from the replicas' loop."""
        outcome = asyncio.wrap_future(future)
        try:
            while not outcome.done():
                await asyncio.wait([outcome], timeout=CHECK_S)
                self._check_running(future)
            return outcome.result()
        finally:
            outcome.cancel()  # has no effect if the future is done

    def _check_running(self, future: Future[Any]) -> None:
        if not self._loop.is_running() and not future.done():
            raise RunError("the predictor's client is closed")


def _timeout_error(timeout_s: float | None) -> WaitTimeoutError:
    return WaitTimeoutError(
        f"no answer within timeout_s={timeout_s}; is the model slow, or do more calls "
        "arrive than the replicas can answer?"
    )


def _check_may_block(loop: asyncio.AbstractEventLoop) -> None:
    """Raise a RunError in the thread of this event loop, which must not be blocked."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:  # this thread runs no event loop
        return
    if running is loop:
        raise RunError(
            "this thread runs the predictor's event loop and the callbacks of its "
            "futures, so it must not wait for answers; use submit, or another thread"
        )


@contextlib.contextmanager
def _loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a new thread."""
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
