"""What a predictor may be asked to be.

Calls to replicas, answers to callers. On one event loop; no Dask.

The public face: calls from any thread, or any event loop.
"""

import asyncio
import contextlib
import copy
import itertools
import math
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from numbers import Real
from typing import Any, Literal, Self, TypeVar

from distributed import Client
from torch import nn

from daskdl.cluster import check_installed, client_or_process
from daskdl.config import Timeouts
from daskdl.data.batching import Transform, Tree
from daskdl.data.checks import check_module
from daskdl.errors import (
    BusyError,
    OptionError,
    ReplicaError,
    RunError,
    WaitTimeoutError,
)
from daskdl.inference.batching import (
    Call,
    Crowd,
    Failure,
    Joining,
    Room,
    answers_of,
    call_of,
    inputs_of,
)
from daskdl.inference.pool import (
    Crew,
    Ground,
    LocalGround,
    RemoteGround,
    Replica,
    awaited_by,
    check_elsewhere,
    done_by,
    late,
    loop_thread,
    settled,
    within,
)
from daskdl.serialization import Packed, PackedModel


def check_options(
    replicas: int, batch_limit: int, wait_ms: float, queue_limit: int
) -> None:
    """Refuse options of a predictor that are not allowed, see there.

    Raises:
        OptionError: Naming the first of them.

    Example:
        >>> check_options(2, 32, -1.0, 1024)
        Traceback (most recent call last):
        daskdl.errors.OptionError: wait_ms must be >= 0 and finite, got -1.0
    """
    for name, value in (("replicas", replicas), ("batch_limit", batch_limit)):
        if type(value) is not int or value < 1:
            raise OptionError(f"{name} must be an integer >= 1, got {value!r}")
    if not isinstance(wait_ms, Real) or not 0 <= wait_ms < math.inf:
        raise OptionError(f"wait_ms must be >= 0 and finite, got {wait_ms!r}")
    if type(queue_limit) is not int or queue_limit < batch_limit:
        raise OptionError(
            f"queue_limit must be an integer >= batch_limit={batch_limit}, as one call "
            f"may have so many rows, got {queue_limit!r}"
        )


AHEAD = 2  # batches of one replica: the next is there when it is done with one
MOST_LOSSES = 3  # of a call, as Dask's `allowed-failures`: it may be what ends workers

Asking = asyncio.Task[list[Tree] | Failure]


class Dispatcher:
    """Sends calls to replicas in batches, until each has its answer or an error.

    Args:
        crew: The replicas.
        joining: Which calls leave together.
        room: That calls leave when they are with a replica for the first time.
        timeouts: Of the waits.
    """

    def __init__(
        self, crew: Crew, joining: Joining, room: Room, timeouts: Timeouts
    ) -> None:
        self._crew = crew
        self._joining = joining
        self._room = room
        self._timeouts = timeouts
        self._crowd = Crowd()
        self._asking: dict[Asking, tuple[Replica, list[Call]]] = {}
        self._failure: BaseException | None = None  # of all calls, from now on
        self._closing = False
        self._empty = asyncio.Event()  # set when no call is without an answer
        self._empty.set()
        self._due: asyncio.TimerHandle | None = None
        self._alone: asyncio.TimerHandle | None = None  # since there is no replica
        crew.lost, crew.changed, crew.ended = self._lost, self._changed, self._end

    def add(self, call: Call) -> None:
        """A call has come in, for which there was room."""
        if self._failure is not None or self._closing:
            self._refuse([call], self._failure or RunError("the predictor is closed"))
            return
        self._empty.clear()
        self._joining.add(call)
        self._crowd.came(self._unanswered())
        self._send()

    def withdraw(self, call: Call) -> None:
        """Whoever called does not wait any more."""
        if self._joining.withdraw(call):
            self._left([call])
            self._rest()

    async def drain(self, seconds: float) -> None:
        """Answer all that wait, without waiting for more; then nothing is accepted."""
        self._closing = True
        self._send()
        empty = asyncio.ensure_future(self._empty.wait())
        await asyncio.wait({empty}, timeout=seconds)
        empty.cancel()

    def close(self) -> None:
        """Whoever still waits gets an error."""
        self._closing = True
        self._end(RunError("the predictor was closed before this call was answered"))
        for timer in (self._due, self._alone):
            if timer is not None:
                timer.cancel()

    # ---- sending

    def _send(self) -> None:
        """Give replicas that can take a batch what is due."""
        now = asyncio.get_running_loop().time()
        while (replica := self._freest()) is not None:
            calls = self._joining.take(now, hurry=self._hurry(replica))
            if not calls:
                break
            self._crowd.left()
            self._begin(replica, calls)
        self._rest()
        self._wake(now)

    def _begin(self, replica: Replica, calls: list[Call]) -> None:
        self._left(call for call in calls if not call.begun)
        wanted = [call for call in calls if call.begin()]
        if not wanted:
            return
        task = asyncio.create_task(self._ask(replica, wanted))
        self._asking[task] = (replica, wanted)
        task.add_done_callback(self._asked)

    async def _ask(self, replica: Replica, calls: list[Call]) -> list[Tree] | Failure:
        bound = self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not answer"
        outputs = await within(replica.ask(inputs_of(calls)), bound, what)
        return outputs if isinstance(outputs, Failure) else answers_of(outputs, calls)

    def _freest(self) -> Replica | None:
        """The replica with the fewest batches, if it may have one more."""
        replica = min(self._crew.ready, key=self._load, default=None)
        return replica if replica and self._load(replica) < AHEAD else None

    def _load(self, replica: Replica) -> int:
        return sum(busy is replica for busy, _ in self._asking.values())

    def _hurry(self, replica: Replica) -> bool:
        idle = not self._load(replica)
        return self._closing or (idle and self._crowd.complete(self._unanswered()))

    def _unanswered(self) -> int:
        asked = sum(len(calls) for _, calls in self._asking.values())
        return len(self._joining) + asked

    def _wake(self, now: float) -> None:
        """Look again when the next batch is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        wait_s = self._joining.due_in(now)
        if wait_s is not None and self._freest() is not None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(wait_s, self._send)

    # ---- what came of it

    def _asked(self, task: Asking) -> None:
        replica, calls = self._asking[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):
            self._crew.lose(replica, error)
        del self._asking[task]
        if task.cancelled() or isinstance(error, OSError):
            self._again(calls, error)
        elif error is not None:  # a fault of ours: nobody may wait for ever
            self._fail(calls, error)
        elif isinstance(outcome := task.result(), Failure):
            self._failed(calls, outcome)
        else:
            for call, answer in zip(calls, outcome, strict=True):
                call.answer.set_result(answer)
        self._send()

    def _failed(self, calls: list[Call], failure: Failure) -> None:
        """The model raised: whichever of the calls it is, the others are answered."""
        if len(calls) == 1:
            self._fail(calls, failure.error(f"the model failed on {calls[0]}"))
            return
        for call in calls:
            call.alone = True
        self._joining.put_back(calls)

    def _again(self, calls: list[Call], error: BaseException | None) -> None:
        """Their replica was lost: another one answers, if it is not what they do."""
        spent = [call for call in calls if call.losses > MOST_LOSSES]
        for call in spent:
            lost = ReplicaError(
                f"a call was lost with its replica {call.losses} times, at last: "
                f"{error}; is it what ends the workers? It has {call}"
            )
            self._fail([call], lost)
        self._joining.put_back([call for call in calls if call not in spent])

    def _fail(self, calls: Iterable[Call], error: BaseException) -> None:
        for call in calls:
            if call.begin():
                # Each raises in a thread of its own, which adds to its traceback.
                call.answer.set_exception(copy.copy(error))

    def _refuse(self, calls: list[Call], error: BaseException) -> None:
        """Calls that wait get an error."""
        self._left(call for call in calls if not call.begun)
        self._fail(calls, error)

    def _left(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._room.leave(call.rows)

    def _rest(self) -> None:
        if not self._unanswered():
            self._empty.set()

    # ---- of the crew

    def _lost(self, replica: Replica) -> None:
        """Nobody answers what it was asked; it was at the oldest."""
        asked = [(t, own) for t, (r, own) in self._asking.items() if r is replica]
        for task, _ in asked:
            task.cancel()
        for _, calls in asked[:1]:
            for call in calls:
                call.losses += 1
                call.alone |= call.losses > 1
        if not self._crew.ready and self._alone is None:
            bound = self._timeouts.bound("rejoin")
            loop = asyncio.get_running_loop()
            self._alone = loop.call_later(bound.seconds, self._give_up)

    def _changed(self) -> None:
        """A replica has come."""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self._failure = None
        self._send()

    def _give_up(self) -> None:
        """No replica has come for so long."""
        bound = self._timeouts.bound("rejoin")
        self._end(
            WaitTimeoutError(
                f"no replica is left, and none could be started within {bound}; are "
                "there workers?"
            )
        )

    def _end(self, error: BaseException) -> None:
        """Nobody will answer; what is with replicas goes, too."""
        self._failure = error
        asked = list(self._asking.items())
        self._asking.clear()
        for task, _ in asked:
            task.remove_done_callback(self._asked)
            task.cancel()
        self._refuse(self._joining.clear(), error)
        self._fail(
            itertools.chain.from_iterable(calls for _, (_, calls) in asked), error
        )
        self._empty.set()


T = TypeVar("T")


class Predictor:
    """A model that answers calls from many threads, with replicas on workers.

    Calls that come at about the same time, with rows of the same shape, are joined into
    one batch. Each batch goes to the replica with the fewest, and each caller gets the
    outputs for its own rows. A call whose worker dies goes to another replica, and
    another one is started as soon as there is a worker for it.

    It may be used from any thread, and is a context manager. What it has on the cluster
    goes with :meth:`close`.

    Args:
        model: Gives one tensor, or tuples and dicts of tensors, whose first axis is
            that of its input. Copied: a model that is trained later is given to
            :meth:`swap`.
        replicas: Models in the workers' memory, >= 1. Spread evenly over the workers
            that are there at the start.
        batch_limit: Rows of a batch, and of one call, >= 1.
        wait_ms: How long a call waits for others to come at most, >= 0. It does not
            wait when the batch is full, nor when as many calls are there as lately
            were at once: whoever calls alone is answered at once.
        queue_limit: Rows that may wait for a replica, >= batch_limit.
        transform: What is made of each batch before, as of ``Trainer``.
        client: Synchronous; None: the default client, or a cluster of its own; False:
            replicas are threads of this process.

    Raises:
        OptionError: If an option is not allowed, or there are no workers.
        ModelError: If the model cannot be used by a worker.
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
        wait_ms: float = 2.0,
        queue_limit: int = 1024,
        transform: Transform | None = None,
        client: Client | Literal[False] | None = None,
    ) -> None:
        check_options(replicas, batch_limit, wait_ms, queue_limit)
        check_module(model)
        packed = PackedModel(model, here=client is False)
        made = None if transform is None else Packed(transform, "transform")
        self._batch_limit = batch_limit
        self._timeouts = Timeouts.from_config()
        self._room = Room(queue_limit)
        self._closing = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as starting:
            ground = self._ground(client, made, starting)
            self._crew = Crew(ground, packed, replicas, self._timeouts)
            joining = Joining(batch_limit, wait_ms / 1e3)
            self._dispatcher = Dispatcher(
                self._crew, joining, self._room, self._timeouts
            )
            with contextlib.ExitStack() as unless_open:
                unless_open.callback(self._leave, wait=False)
                self._do(self._crew.open())
                unless_open.pop_all()
            self._ending = starting.pop_all()

    def _ground(
        self,
        client: Client | Literal[False] | None,
        transform: Packed[Transform] | None,
        starting: contextlib.ExitStack,
    ) -> Ground:
        """Where the replicas are to be, and whose event loop that is."""
        found = starting.enter_context(client_or_process(client))
        if found is False:
            self._client = None
            self._loop = starting.enter_context(loop_thread())
            return LocalGround(transform)
        self._client = found
        check_installed(found)
        self._loop = found.loop.asyncio_loop
        return RemoteGround(found, transform, self._timeouts.silence)

    # ---- calls, from any thread

    def __call__(self, x: Any, timeout_s: float | None = None) -> Any:
        """Ask the model, and wait for its outputs.

        Args:
            x: Rows first: a numpy array or a torch tensor, or tuples and dicts of
                such; at most `batch_limit` rows. Copied.
            timeout_s: Seconds to wait, for room and for the answer. None: for room not
                at all, and for the answer as long as there are replicas.

        Returns:
            Outputs for these rows; numpy for numpy, tensors for tensors, in tuples and
            dicts if the model gives such.

        Raises:
            DataError: If x cannot be used.
            BusyError: If as many rows wait as may, and still do after the time-out.
            ModelError: If the model, or the transform, fails on these rows.
            ReplicaError: If it ends every worker it comes to.
            WaitTimeoutError: If there is no answer in time, or no replica is left.
            RunError: If the predictor is closed.
        """
        check_elsewhere(self._loop)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            freed = self._room.freed()
            try:
                answer = self.submit(x)
                break
            except BusyError:
                if deadline is None or not done_by(deadline, freed):
                    raise
        try:
            if deadline is None:
                settled(answer, self._loop)
            if deadline is None or done_by(deadline, answer):
                return answer.result()
        finally:
            answer.cancel()  # if nobody waits any more; what is done stays so
        raise late(timeout_s)

    async def acall(self, x: Any, timeout_s: float | None = None) -> Any:
        """Ask the model from an event loop, any one; see :meth:`__call__`.

        Args:
            x: Rows, see there.
            timeout_s: Seconds, see there.

        Returns:
            Outputs, see there.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            freed = self._room.freed()
            try:
                answer = self.submit(x)
                break
            except BusyError:
                if deadline is None or not await awaited_by(deadline, freed):
                    raise
        try:
            if deadline is None or await awaited_by(deadline, answer):
                return await asyncio.wrap_future(answer)
        finally:
            answer.cancel()  # if nobody waits any more; what is done stays so
        raise late(timeout_s)

    def submit(self, x: Any) -> Future[Any]:
        """Ask the model, and do not wait.

        Args:
            x: Rows, see :meth:`__call__`; copied.

        Returns:
            What becomes the outputs, or raises what a call raises. As long as no
            replica has it, it can be cancelled.

        Raises:
            DataError: If x cannot be used.
            BusyError: If as many rows wait as may.
            RunError: If the predictor is closed.
        """
        call = call_of(x, self._batch_limit, time.monotonic())
        self._check_open()
        self._room.enter(call.rows)
        call.answer.add_done_callback(lambda answer: self._resolved(call))
        self._soon(self._dispatcher.add, call)
        return call.answer

    # ---- what is done to it

    def swap(self, model: nn.Module) -> None:
        """Answer by another model, without a pause.

        Calls made before this returns are answered by the old or by the new model, each
        by one of them; those made afterwards by the new one. The old one leaves the
        workers' memory.

        Args:
            model: Copied. It may have other inputs and outputs.

        Raises:
            ModelError: If a worker cannot use it; all then go on with the old one.
            RunError: If the predictor is closed.
        """
        check_elsewhere(self._loop)
        check_module(model)
        packed = PackedModel(model, here=self._client is None)
        self._check_open()
        self._do(self._crew.swap(packed))

    def close(self, *, wait: bool = True) -> None:
        """Take the replicas from the workers; may be called again.

        Args:
            wait: For calls to be answered that were made before, for
                ``daskdl.timeouts.stop`` at most; without, and after it, they get a
                RunError.
        """
        check_elsewhere(self._loop)
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with self._ending:
                try:
                    if wait and self._loop.is_running():
                        self._do(self._dispatcher.drain(self._timeouts.stop))
                finally:
                    self._leave(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is None)

    def _leave(self, wait: bool) -> None:
        """No call waits afterwards, and no replica can be reached anywhere."""
        if self._loop.is_running():
            self._do(self._left(wait))
        else:  # its client was closed first, and took them away
            self._dispatcher.close()

    async def _left(self, wait: bool) -> None:
        self._dispatcher.close()
        await self._crew.close(wait)

    # ---- the event loop

    def _do(self, doing: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, whose waits all have time-outs."""
        future = asyncio.run_coroutine_threadsafe(doing, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted; what is done stays so

    def _resolved(self, call: Call) -> None:
        if call.answer.cancelled():
            self._soon(self._dispatcher.withdraw, call)

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the predictor is closed")

    def _soon(self, function: Any, call: Call) -> None:
        """Called on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, call)
        except RuntimeError as error:  # the loop is closed
            raise RunError("the predictor's client is closed") from error
