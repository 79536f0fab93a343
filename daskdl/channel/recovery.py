"""Recovery after losses: repair of missing updates, and agreement of the survivors.

`Repairs` requests missing updates during the run. Pure functions compute the target,
helpers and donors of an agreement from the updates that the survivors have received.
"""

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

from daskdl.channel import protocol
from daskdl.channel.inbox import MAX_REQUESTED, NOTHING, Received, contains, missing
from daskdl.channel.protocol import Message, MessageKind
from daskdl.channel.routing import Routing
from daskdl.channel.transport import time_limit
from daskdl.errors import ChannelError

logger = logging.getLogger(__name__)

# An update delayed for longer counts as dropped. If it arrives before the answer to a
# request, or the answer is late, the link is slow, and requests make it slower: the
# time doubles, up to the timeout of a request. Each answer that brings updates halves
# it.
MISSING_AFTER_S = 1.0
CHECK_S = 0.25  # between two checks for missing updates
# Origins whose updates are requested concurrently: an answer has up to `BATCH_BYTES`,
# so that at most 64 MiB are in flight.
CONCURRENT_ORIGINS = 16

Put = Callable[[Sequence[Message]], Awaitable[list[bool]]]


class Repairs:
    """Requests missing updates from other replicas.

    Attributes:
        repaired: Number of missing updates that arrived on request.
    """

    repaired: int

    def __init__(self, routing: Routing, put: Put) -> None:
        self.repaired = 0
        self._routing = routing
        self._connection = routing.connection
        self._inbox = routing.inbox
        self._put = put
        self._missing_since: dict[tuple[int, int], float] = {}  # or last requested
        self._failures: dict[int, int] = {}  # consecutive requests without updates
        # By origin, after which time its updates count as dropped, seconds.
        self._missing_after_s: dict[int, float] = {}

    async def run(self) -> None:
        """Request missing updates until cancelled.

        Requests for updates of different origins do not wait for each other, so that a
        hanging replica does not delay the others.
        """
        at_once = asyncio.Semaphore(CONCURRENT_ORIGINS)

        async def request(origin: int, sequences: Sequence[int]) -> None:
            async with at_once:
                if origin in self._inbox.unreadable:
                    await self._request_unreadable(origin)
                helper = self._helper(origin)
                if sequences and helper is not None:
                    count = await self.ask(helper, origin, sequences)
                    self._failures[origin] = (
                        0 if count else self._failures.get(origin, 0) + 1
                    )

        asking: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                answered = [o for o, task in asking.items() if task.done()]
                for origin in answered:
                    asking.pop(origin).result()
                due = self._due()
                for origin in sorted({*self._inbox.unreadable, *due} - asking.keys()):
                    requesting = request(origin, due.get(origin, ()))
                    asking[origin] = asyncio.ensure_future(requesting)
        finally:
            for task in asking.values():
                task.cancel()

    def _due(self) -> dict[int, list[int]]:
        """Announced updates that have been missing for `MISSING_AFTER_S`, by origin."""
        now, inbox = self._connection.loop.time(), self._inbox
        with inbox.changed:
            last = {
                origin: min(
                    announced.sequence, inbox.received.complete(origin) + MAX_REQUESTED
                )
                for origin, announced in inbox.peers.announced.items()
            }
            gaps = {} if inbox.awaits_snapshot else inbox.received.behind(last)
        keys = [(origin, s) for origin, sequences in gaps.items() for s in sequences]
        self._missing_since = {k: self._missing_since.get(k, now) for k in keys}
        due: dict[int, list[int]] = {}
        for (origin, sequence), since in self._missing_since.items():
            if now - since >= self._missing_after_s.get(origin, MISSING_AFTER_S):
                self._missing_since[origin, sequence] = now
                due.setdefault(origin, []).append(sequence)
        return due

    async def _request_unreadable(self, origin: int) -> None:
        """Request unreadable updates again from all replicas that may have a copy.

        Updates without a readable copy are skipped: replicas continue without them,
        and agree on their updates when they meet.
        """
        all_answered = await self._collect(
            origin, self._helpers(origin), lambda: self._unreadable(origin)
        )
        if all_answered and (skipped := self._inbox.skip_unreadable(origin)):
            logger.warning(
                "replica %s continues without updates %s of replica %s: no replica has "
                "a readable copy",
                self._connection.spec.replica,
                skipped,
                origin,
            )

    async def request_lacking(self, have: "ReceivedByReplica") -> None:
        """Request updates that survivors of an agreement have and this replica lacks.

        Args:
            have: Received updates of each survivor.
        """
        replica, target = self._connection.spec.replica, target_of(have)
        at_once = asyncio.Semaphore(CONCURRENT_ORIGINS)

        def lacking(origin: int) -> Sequence[int]:
            with self._inbox.changed:
                received = self._inbox.received.by_origin()
            return missing(received, {origin: target[origin]}).get(origin, ())

        async def collect(origin: int, sequences: Sequence[int]) -> None:
            order = helpers(origin, sequences, have, replica)
            async with at_once:
                await self._collect(origin, order, lambda: lacking(origin))

        await asyncio.gather(
            *(
                collect(o, sequences)
                for o, sequences in missing(have[replica], target).items()
            )
        )

    async def _collect(
        self,
        origin: int,
        order: Sequence[int],
        lacking: Callable[[], Sequence[int]],
    ) -> bool:
        """Request updates of one origin from one replica after another.

        Args:
            origin: The origin.
            order: Replicas to request from.
            lacking: Returns the updates that are still missing.

        Returns:
            Whether all requests were answered.
        """
        all_answered = True
        for helper in order:
            former: Sequence[int] = ()
            while (wanted := lacking()) and wanted != former:
                former = wanted
                count = await self.ask(helper, origin, wanted)
                all_answered = all_answered and count is not None
        return all_answered

    def _unreadable(self, origin: int) -> list[int]:
        with self._inbox.changed:
            return sorted(self._inbox.unreadable.get(origin, ()))[:MAX_REQUESTED]

    def _helpers(self, origin: int) -> list[int]:
        """Replicas that may have copies: the origin; in a mesh, then the others."""
        replica = self._connection.spec.replica
        workers = self._routing.workers
        others = [r for r in sorted(workers) if r not in (replica, origin)]
        if self._routing.relayed:
            others = []  # these keep only their own updates
        return [origin, *others] if origin in workers else others

    def _helper(self, origin: int) -> int | None:
        """Choose a replica to ask: the origin, or after failures alternately another.

        Only the origin certainly keeps its updates, but requests to it may get lost.
        """
        failures, here = self._failures.get(origin, 0), origin in self._routing.workers
        others = self._helpers(origin)[here:]
        if here and (failures % 2 == 0 or not others):
            return origin
        turn = failures // 2 if here else failures
        return others[turn % len(others)] if others else None

    async def ask(
        self, helper: int, origin: int, sequences: Sequence[int]
    ) -> int | None:
        """Request updates of an origin from a replica and take those that it has.

        Returns:
            The number of updates in the answer; None if there was no answer.
        """
        worker = self._routing.workers.get(helper)
        if worker is None:
            return None
        logger.info(
            "asking replica %s for updates %s of replica %s", helper, sequences, origin
        )
        messages: list[Message] = []
        asking = self._connection.ask(
            worker,
            protocol.REPAIR,
            replica=helper,
            origin=origin,
            sequences=list(sequences),
        )
        bound_s = self._connection.spec.timeouts.request
        try:
            async with time_limit(bound_s):
                answer = await asking
        except OSError as error:  # a TimeoutError is one
            if isinstance(error, TimeoutError):
                self._adapt(origin, 2)
            return None
        # The answer may be unreadable.
        with contextlib.suppress(TypeError, ValueError, LookupError):
            messages = [Message.from_wire(fields) for fields in answer["messages"]]
        wanted = (MessageKind.UPDATE, origin)
        messages = [m for m in messages if (m.kind, m.origin) == wanted]
        taken = await self._put(messages)  # `repaired` may change meanwhile
        self.repaired += sum(taken)
        if messages:
            self._adapt(origin, 1 / 2 if any(taken) else 2)
        return len(messages)

    def _adapt(self, origin: int, factor: float) -> None:
        """Change the time after which updates of an origin count as dropped."""
        after_s = factor * self._missing_after_s.get(origin, MISSING_AFTER_S)
        longest_s = max(self._connection.spec.timeouts.request, MISSING_AFTER_S)
        self._missing_after_s[origin] = min(max(after_s, MISSING_AFTER_S), longest_s)


# By replica and origin. A replica's own updates count as received.
ReceivedByReplica = Mapping[int, Mapping[int, Received]]


def target_of(have: ReceivedByReplica) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The target of all survivors: every update that any of them has received.

    Args:
        have: Received updates of the survivors only: no replica could provide updates
            that a failed replica alone had.

    Returns:
        By origin, in the form of :meth:`ReceivedSet.by_origin`. Depends on `have`
        alone, so all survivors compute the same target.

    Example:
        >>> target_of({0: {7: (5, (7,))}, 1: {7: (6, ())}, 2: {7: (2, (9,))}})
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


def helpers(
    origin: int,
    sequences: Collection[int],
    have: ReceivedByReplica,
    asker: int,
) -> list[int]:
    """Replicas from which to request updates of one origin, in order.

    The origin comes first if it survives, as it keeps its own updates. Replicas with
    more of the requested updates precede replicas with fewer. Among equals, each asker
    starts with a different replica, so that equal requests are spread.

    Returns:
        The origin if it survives, and replicas with at least one of the updates.

    Example:
        >>> have = {0: {}, 1: {7: (5, ())}, 2: {7: (5, ())}, 3: {7: (4, ())}}
        >>> helpers(7, [4, 5], have, asker=0)
        [1, 2, 3]
        >>> helpers(7, [4, 5], {**have, 7: {}}, asker=3)
        [7, 2, 1]
    """
    tiers: dict[int, list[int]] = {}
    for replica in sorted(have.keys() - {asker, origin}):
        received = have[replica].get(origin, NOTHING)
        held = sum(contains(received, sequence) for sequence in sequences)
        tiers.setdefault(held, []).append(replica)
    order = [origin] if origin in have and origin != asker else []
    for held in sorted(tiers.keys() - {0}, reverse=True):
        order += _rotated(tiers[held], asker)
    return order


def donors(have: ReceivedByReplica, asker: int) -> list[int]:
    """Replicas whose state to take over, in order, if requests did not help.

    Donors lack no survivor's own updates. Among such replicas they have the most
    updates, and all donors have the same. Every other replica loads a donor's state
    and so drops updates of failed replicas that the donors lack.

    Returns:
        Donors, in a different order for each asker; empty if the asker has the same
        updates as the donors.

    Raises:
        ChannelError: If every state lacks an update of a survivor, which cannot happen
            while each survivor keeps its updates until all replicas have them.

    Example:
        >>> have = {0: {0: (4, ()), 1: (2, ())}, 1: {0: (4, ()), 1: (2, ())}, 2: {}}
        >>> donors(have, asker=2), donors(have, asker=0)
        ([0, 1], [])
    """
    published = {replica: have[replica].get(replica, NOTHING) for replica in have}
    groups: dict[Hashable, list[int]] = {}
    for replica in sorted(have):
        groups.setdefault(_comparable(have[replica]), []).append(replica)
    fit = [group for group in groups.values() if not missing(have[group[0]], published)]
    if not fit:
        raise ChannelError(
            "updates are out of reach: no replica has received all published updates, "
            f"{published}, and their publishers no longer keep them; if the "
            "fit writes checkpoints, continue from the last one with fit(resume=...)"
        )
    same = max(fit, key=lambda group: _count(have[group[0]]))
    return [] if asker in same else _rotated(same, asker)


def _count(received: Mapping[int, Received]) -> int:
    return sum(complete + len(beyond) for complete, beyond in received.values())


def _comparable(received: Mapping[int, Received]) -> Hashable:
    """Equal for equal updates, whatever sequence types the wire has produced."""
    return frozenset(
        (origin, complete, tuple(beyond))
        for origin, (complete, beyond) in received.items()
        if complete or beyond
    )


def _rotated(replicas: Sequence[int], turn: int) -> list[int]:
    start = turn % len(replicas)
    return [*replicas[start:], *replicas[:start]]
