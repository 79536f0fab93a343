"""What the relay sends to the replicas of one worker: together, and each frame once.

Each replica has a queue and a pump of its own, so that one that takes nothing holds up
nobody. What their pumps want to send at the same time goes in one request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from daskdl.channel.messages import Answer, Item
from daskdl.channel.pump import BATCH_BYTES
from daskdl.timeouts import Bound

# The pumps of one worker answer to the same request and then pause alike; what is left
# between them are turns of the event loop, and less than a request takes.
TOGETHER_S = 0.002

Share = tuple[int, list[int]]  # a replica, and which of the items are for it
Ask = Callable[[list[Item], list[Share]], Awaitable[Any]]


class Load(NamedTuple):
    """What is to go to one replica."""

    replica: int
    items: Sequence[Item]
    accepted: asyncio.Future[int]


class Courier:
    """Carries what the pumps of one worker's replicas send, a request at a time.

    Args:
        worker: Its address, for messages.
        ask: Sends items with the shares of replicas in them, and returns the answer.
        bound: How long that may take.

    Attributes:
        replicas: Those that it delivers to.
    """

    replicas: set[int]

    def __init__(self, worker: str, ask: Ask, bound: Bound) -> None:
        self.replicas = set()
        self._worker = worker
        self._ask = ask
        self._bound = bound
        self._waiting: list[Load] = []
        self._carrying: asyncio.Task[None] | None = None

    async def deliver(self, replica: int, items: Sequence[Item]) -> int:
        """Deliver items to a replica, with what others of its worker are sent.

        Returns:
            How many were accepted.

        Raises:
            TimeoutError: If the worker did not answer.
            OSError: If it cannot be reached, or does not know the replica.
        """
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(Load(replica, items, accepted))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry())
        try:
            return await accepted
        finally:  # it may have been cancelled before it was carried
            self._waiting = [load for load in self._waiting if not load.accepted.done()]

    def end(self) -> None:
        """Carry nothing more; who still waits is cancelled."""
        if self._carrying is not None:
            self._carrying.cancel()
        for load in self._waiting:
            load.accepted.cancel()

    async def _carry(self) -> None:
        while self._waiting:
            if len(self._waiting) < len(self.replicas):
                await asyncio.sleep(TOGETHER_S)
            await self._carry_one(self._next())

    def _next(self) -> list[Load]:
        """The oldest loads, at least one, up to so many bytes together."""
        nbytes, seen = 0, set[int]()
        for count, load in enumerate(self._waiting):
            for item in load.items:
                nbytes += item.weight() if id(item) not in seen else 0
                seen.add(id(item))
            if count and nbytes > BATCH_BYTES:
                break
        else:
            count = len(self._waiting)
        loads, self._waiting = self._waiting[:count], self._waiting[count:]
        return loads

    async def _carry_one(self, loads: Sequence[Load]) -> None:
        try:
            async with asyncio.timeout(self._bound.seconds):
                answers = self._read(loads, await self._ask(*_shared(loads)))
        # What Dask's pool raises once the scheduler closes is a RuntimeError.
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            answers = [error] * len(loads)
        except asyncio.CancelledError:
            for load in loads:
                load.accepted.cancel()
            raise
        for load, answer in zip(loads, answers, strict=True):
            _tell(load.accepted, answer)

    def _read(self, loads: Sequence[Load], answer: Any) -> Sequence[int | Exception]:
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self._worker} answered {answer!r}")
        answers = answer["answers"]
        if len(answers) != len(loads):
            raise OSError(f"{self._worker} answered {answers!r} to {len(loads)} loads")
        return [self._accepted(own) for own in answers]

    def _accepted(self, answer: Any) -> int | Exception:
        if not isinstance(answer, dict) or answer["status"] != Answer.OK:
            return OSError(f"{self._worker} answered {answer!r}")
        return int(answer["accepted"])


def _shared(loads: Sequence[Load]) -> tuple[list[Item], list[Share]]:
    """Each item once, and who gets which."""
    places: dict[int, int] = {}
    items: list[Item] = []
    shares: list[Share] = []
    for load in loads:
        for item in load.items:
            if id(item) not in places:
                places[id(item)] = len(items)
                items.append(item)
        shares.append((load.replica, [places[id(item)] for item in load.items]))
    return items, shares


def _tell(accepted: asyncio.Future[int], answer: int | Exception) -> None:
    if accepted.done():  # it did not wait so long
        return
    if isinstance(answer, Exception):
        accepted.set_exception(answer)
    else:
        accepted.set_result(answer)
