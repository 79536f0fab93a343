"""Calls to replicas, answers to callers. On one event loop; no Dask."""

import asyncio
import copy
import itertools
from collections.abc import Iterable

from daskdl.config import Timeouts
from daskdl.data.batching import Tree
from daskdl.errors import ReplicaError, RunError, WaitTimeoutError
from daskdl.serving.answers import Failure, answers_of, inputs_of
from daskdl.serving.calls import Call
from daskdl.serving.crew import Crew
from daskdl.serving.crowd import Crowd
from daskdl.serving.joining import Joining
from daskdl.serving.replica import Replica, within
from daskdl.serving.room import Room

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
