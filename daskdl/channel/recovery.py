"""After losses: missing updates are asked for again, or agreed to be lost."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from daskdl.channel import protocol
from daskdl.channel.connection import Connection
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import Answer, Message, MessageKind

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0  # what is late for longer than this was dropped somewhere
MOST = 1000  # asked for at once, of one origin


class Gaps:
    """What is missing, and since when, or since it was last asked for.

    Example:
        >>> gaps = Gaps()
        >>> gaps.due({7: [3, 4]}, now=10.0), gaps.due({7: [4]}, now=11.0)
        ({}, {7: [4]})
        >>> gaps.due({7: [4]}, now=11.5)
        {}
    """

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}

    def due(
        self, missing: Mapping[int, Sequence[int]], now: float
    ) -> dict[int, list[int]]:
        """What has been missing for so long that it is asked for now.

        Args:
            missing: Sequence numbers by origin.
            now: Seconds, on any clock.
        """
        keys = [(origin, s) for origin, gaps in missing.items() for s in gaps]
        self._since = {key: self._since.get(key, now) for key in keys}
        due: dict[int, list[int]] = {}
        for key, since in self._since.items():
            if now - since >= PATIENCE_S:
                self._since[key] = now
                due.setdefault(key[0], []).append(key[1])
        return due


LOOK_S = 0.25  # between two looks for what is missing

Take = Callable[[Message], Awaitable[bool]]


class Repairs:
    """Asks others for updates that did not come.

    Args:
        connection: Of this replica.
        inbox: Knows what is missing.
        take: Called with each update that was asked for and came.

    Attributes:
        workers: Address of the worker of each replica; set as members change.
        repaired: Updates that came, and were missing, in all.
        paused: A newcomer misses nothing before it has a snapshot.
    """

    workers: Mapping[int, str]
    repaired: int
    paused: bool

    def __init__(self, connection: Connection, inbox: Inbox, take: Take) -> None:
        self.workers = {}
        self.repaired = 0
        self.paused = False
        self._connection = connection
        self._inbox = inbox
        self._take = take
        self._gaps = Gaps()
        self._vain: dict[int, int] = {}  # times asked for nothing, by origin

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._connection.loop.time()
            missed = {} if self.paused else self._inbox.gaps(MOST)
            for origin, missing in self._gaps.due(missed, now).items():
                helper = self._helper(origin)
                if helper is not None:
                    came = await self.ask(helper, origin, missing)
                    self._vain[origin] = 0 if came else self._vain.get(origin, 0) + 1

    def _helper(self, origin: int) -> int | None:
        """The origin at first, which has it for sure; if in vain, others in turn."""
        own = self._connection.endpoint.replica
        others = [r for r in sorted(self.workers) if r not in (own, origin)]
        helpers = [origin, *others] if origin in self.workers else others
        return helpers[self._vain.get(origin, 0) % len(helpers)] if helpers else None

    async def ask(self, helper: int, origin: int, sequences: Sequence[int]) -> int:
        """Ask a replica for updates of an origin, and take what it has.

        Returns:
            How many came.
        """
        worker = self.workers.get(helper)
        if worker is None:
            return 0
        logger.info("asking replica %s for %s of %s", helper, sequences, origin)
        items: list[Message] = []
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            asking = self._connection.tell(
                worker,
                protocol.REPAIR,
                replica=helper,
                origin=origin,
                sequences=list(sequences),
            )
            bound = self._connection.endpoint.timeouts.request
            async with asyncio.timeout(bound):  # keeps that it was cancelled; see Pump
                items = _items_of(await asking, origin)
        for item in items:
            self.repaired += await self._take(item)
        return len(items)


def _items_of(answer: Any, origin: int) -> list[Message]:
    """The updates in an answer; what is not understood is nothing."""
    if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
        return []
    items: list[Message] = []
    with contextlib.suppress(TypeError, ValueError):
        items += [Message.from_wire(fields) for fields in answer["messages"]]
    return [i for i in items if i.kind == MessageKind.UPDATE and i.origin == origin]
