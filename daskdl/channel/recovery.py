"""After losses: which updates are missing, who has them, and what all settle on."""

import asyncio
import contextlib
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Mapping,
    Sequence,
)
from typing import Any

from daskdl.channel import protocol
from daskdl.channel.base import Received
from daskdl.channel.inbox import NOTHING, contains
from daskdl.channel.protocol import Answer, Message, MessageKind
from daskdl.channel.routing import Routing
from daskdl.errors import ChannelError

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0  # what is late for longer than this was dropped somewhere
MOST = 1000  # asked for at once, of one origin


LOOK_S = 0.25  # between two looks for what is missing

Take = Callable[[Message], Awaitable[bool]]


class Repairs:
    """Asks others for updates that did not come.

    Args:
        routing: Of this replica; knows the workers of the others.
        take: Called with each update that was asked for and came.

    Attributes:
        repaired: Updates that came, and were missing, in all.
    """

    repaired: int

    def __init__(self, routing: Routing, take: Take) -> None:
        self.repaired = 0
        self._routing = routing
        self._connection = routing.connection
        self._inbox = routing.inbox
        self._take = take
        self._missing_since: dict[tuple[int, int], float] = {}  # or asked for last
        self._vain: dict[int, int] = {}  # times asked for nothing, by origin

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for origin, missing in self._due().items():
                helper = self._helper(origin)
                if helper is not None:
                    came = await self.ask(helper, origin, missing)
                    self._vain[origin] = 0 if came else self._vain.get(origin, 0) + 1

    def _due(self) -> dict[int, list[int]]:
        """Announced updates that have been missing for so long, by origin."""
        now, inbox = self._connection.loop.time(), self._inbox
        with inbox.changed:
            last = {
                origin: min(announced.sequence, inbox.received.complete(origin) + MOST)
                for origin, announced in inbox.peers.announced.items()
            }
            gaps = {} if inbox.joining else inbox.received.behind(last)
        keys = [(origin, s) for origin, sequences in gaps.items() for s in sequences]
        self._missing_since = {k: self._missing_since.get(k, now) for k in keys}
        due: dict[int, list[int]] = {}
        for (origin, sequence), since in self._missing_since.items():
            if now - since >= PATIENCE_S:
                self._missing_since[origin, sequence] = now
                due.setdefault(origin, []).append(sequence)
        return due

    def _helper(self, origin: int) -> int | None:
        """The origin at first, which has it for sure; if in vain, others in turn."""
        own = self._connection.spec.replica
        workers = self._routing.workers
        others = [r for r in sorted(workers) if r not in (own, origin)]
        helpers = [origin, *others] if origin in workers else others
        return helpers[self._vain.get(origin, 0) % len(helpers)] if helpers else None

    async def ask(self, helper: int, origin: int, sequences: Sequence[int]) -> int:
        """Ask a replica for updates of an origin, and take what it has.

        Returns:
            How many came.
        """
        worker = self._routing.workers.get(helper)
        if worker is None:
            return 0
        logger.info("asking replica %s for %s of %s", helper, sequences, origin)
        messages: list[Message] = []
        with contextlib.suppress(OSError, TimeoutError):
            asking = self._connection.ask(
                worker,
                protocol.REPAIR,
                replica=helper,
                origin=origin,
                sequences=list(sequences),
            )
            bound = self._connection.spec.timeouts.request
            async with asyncio.timeout(bound):  # see SendLoop
                messages = _messages_of(await asking, origin)
        for message in messages:
            self.repaired += await self._take(message)
        return len(messages)


def _messages_of(answer: Any, origin: int) -> list[Message]:
    """The updates in an answer; what is not understood is nothing."""
    if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
        return []
    messages: list[Message] = []
    with contextlib.suppress(TypeError, ValueError, LookupError):
        messages += [Message.from_wire(fields) for fields in answer["messages"]]
    return [i for i in messages if i.kind == MessageKind.UPDATE and i.origin == origin]


# By replica and origin. Everyone's own updates count as received by itself.
Have = Mapping[int, Mapping[int, Received]]


def settle(have: Have) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Everything that any survivor has received: what all must have.

    Args:
        have: What each survivor has received, and nobody else: with what a failed
            replica said it had, the target could be out of reach.

    Returns:
        By origin, in the form of :meth:`ReceivedSet.received`. It depends on
        nothing but `have`, so that all come to the same.

    Example:
        >>> settle({0: {7: (5, (7,))}, 1: {7: (6, ())}, 2: {7: (2, (9,))}})
        {7: (7, (9,))}
    """
    origins = sorted({origin for received in have.values() for origin in received})
    return {
        origin: _union([received.get(origin, NOTHING) for received in have.values()])
        for origin in origins
    }


def _union(parts: Sequence[Received]) -> tuple[int, tuple[int, ...]]:
    complete = max(part[0] for part in parts)
    later = sorted({s for _, beyond in parts for s in beyond if s > complete})
    filled = 0
    while filled < len(later) and later[filled] == complete + 1:
        complete += 1
        filled += 1
    return complete, tuple(later[filled:])


def missing(
    mine: Mapping[int, Received], target: Mapping[int, Received]
) -> dict[int, list[int]]:
    """What one replica lacks of a target, ascending, by origin.

    Unlike :meth:`ReceivedSet.behind` it does not ask for what the target leaves out.

    Example:
        >>> missing({7: (2, (5,))}, {7: (3, (5, 8)), 9: (1, ())})
        {7: [3, 8], 9: [1]}
    """
    lacking: dict[int, list[int]] = {}
    for origin, (complete, beyond) in target.items():
        done, taken = mine.get(origin, NOTHING)
        if done >= complete and not beyond:  # nearly always
            continue
        wanted = [*range(done + 1, complete + 1), *(s for s in beyond if s > done)]
        gaps = sorted(set(wanted) - set(taken))
        if gaps:
            lacking[origin] = gaps
    return lacking


def helpers(
    origin: int,
    sequences: Collection[int],
    have: Have,
    alive: Collection[int],
    asker: int,
) -> list[int]:
    """Whom to ask for updates of one origin, one after the other.

    The origin first, if it is alive: it keeps its own. Then those that have
    received most of what is asked for. Among equals each asker begins with another
    one, so that not all who miss the same ask the same.

    Args:
        origin: Whose updates are missing.
        sequences: Their numbers.
        have: What each replica has received, as far as it said.
        alive: Replicas that can be asked.
        asker: Replica that misses them; it is not among the helpers.

    Returns:
        Replicas that have received at least one of them; empty if nobody has.

    Example:
        >>> have = {0: {}, 1: {7: (5, ())}, 2: {7: (5, ())}, 3: {7: (4, ())}}
        >>> helpers(7, [4, 5], have, alive=[0, 1, 2, 3], asker=0)
        [1, 2, 3]
        >>> helpers(7, [4, 5], have, alive=[0, 1, 2, 3, 7], asker=3)
        [7, 2, 1]
    """
    tiers: dict[int, list[int]] = {}
    for replica in sorted(set(alive) - {asker, origin}):
        received = have.get(replica, {}).get(origin, NOTHING)
        held = sum(contains(received, sequence) for sequence in sequences)
        tiers.setdefault(held, []).append(replica)
    order = [origin] if origin in alive and origin != asker else []
    for held in sorted(tiers.keys() - {0}, reverse=True):
        order += _rotated(tiers[held], asker)
    return order


def donors(have: Have, asker: int) -> list[int]:
    """Whose state to take, in order, when no retransmit buffer has what is missing.

    The reference is the replica with most updates; if anybody has the whole target,
    it does. All who have what it has are donors; everybody else takes their state,
    and with it goes back on what it alone has (of failed replicas, see above).

    Args:
        have: What each survivor has received, after they have asked each other.
        asker: Whose turn it is.

    Returns:
        Replicas, each asker beginning with another; empty if it has what they
        have and needs nothing.

    Raises:
        ChannelError: If every state lacks an update of a survivor. That does not
            happen while each keeps its own until all have them.

    Example:
        >>> have = {0: {0: (4, ()), 1: (2, ())}, 1: {0: (4, ()), 1: (2, ())}, 2: {}}
        >>> donors(have, asker=2), donors(have, asker=0)
        ([0, 1], [])
    """
    own = {replica: have[replica].get(replica, NOTHING) for replica in have}
    groups: dict[Hashable, list[int]] = {}
    for replica in sorted(have):
        groups.setdefault(_comparable(have[replica]), []).append(replica)
    fit = [group for group in groups.values() if not missing(have[group[0]], own)]
    if not fit:
        raise ChannelError(
            "updates are out of reach: no replica has received all that the others "
            f"have published, {own}, and those do not keep them any more"
        )
    same = max(fit, key=lambda group: _count(have[group[0]]))
    return [] if asker in same else _rotated(same, asker)


def _count(received: Mapping[int, Received]) -> int:
    return sum(complete + len(beyond) for complete, beyond in received.values())


def _comparable(received: Mapping[int, Received]) -> Hashable:
    """Equal if the updates are, whatever the wire made of them."""
    return frozenset(
        (origin, complete, tuple(beyond))
        for origin, (complete, beyond) in received.items()
        if complete or beyond
    )


def _rotated(replicas: Sequence[int], turn: int) -> list[int]:
    start = turn % len(replicas)
    return [*replicas[start:], *replicas[:start]]
