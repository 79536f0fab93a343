"""The public face: calls from any thread, or any event loop."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar

from distributed import Client
from torch import nn

from daskdl.cluster import check_installed, client_or_process
from daskdl.config import Timeouts
from daskdl.data.batching import Transform
from daskdl.data.models import check_module
from daskdl.errors import BusyError, RunError
from daskdl.serialization import Packed, PackedModel
from daskdl.serving.calls import Call, call_of
from daskdl.serving.crew import Crew
from daskdl.serving.dispatcher import Dispatcher
from daskdl.serving.joining import Joining
from daskdl.serving.local import LocalGround
from daskdl.serving.loops import check_elsewhere, loop_thread
from daskdl.serving.options import check_options
from daskdl.serving.remote import RemoteGround
from daskdl.serving.replica import Ground
from daskdl.serving.room import Room
from daskdl.serving.waits import awaited_by, done_by, late, settled

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
