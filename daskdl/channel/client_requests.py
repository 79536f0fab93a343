"""What the client asks of its run, and what the scheduler answers."""

import contextlib
from collections.abc import Sequence
from typing import Any

from daskdl.channel.answers import answer, check_seated
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer
from daskdl.channel.shapes import Whole

MOST_REPLICAS = 1000  # of a worker
LONGEST_S = 3600.0  # that news are waited for; clients ask every few seconds


async def handle_watch(live: LiveRun, seen: Whole, timeout_s: float) -> dict[str, Any]:
    """A client asks what is new since the `seen` first events."""
    events = live.record.events
    if seen > len(events) or not 0 <= timeout_s <= LONGEST_S:
        raise ValueError(f"got seen={seen} of {len(events)}, timeout_s={timeout_s}")
    with contextlib.suppress(TimeoutError):
        await live.until(lambda: len(events) > seen, timeout_s)
    return {"status": Answer.OK.value, "events": events.since(seen)}


async def handle_stop(live: LiveRun, reason: str) -> dict[str, Any]:
    """A client wants every replica to leave."""
    await live.stop(reason)
    return {"status": Answer.OK.value}


async def handle_seat(live: LiveRun, worker: str, replicas: Whole) -> dict[str, Any]:
    """A client wants so many replicas on a worker; answered with the new ones."""
    if replicas > MOST_REPLICAS:
        raise ValueError(f"replicas must be <= {MOST_REPLICAS}, got {replicas}")
    members = live.record.members
    missing = replicas - len(members.seated_on(worker)) if live.has(worker) else 0
    return answer(live.record, replicas=[members.seat(worker) for _ in range(missing)])


async def handle_unseat(live: LiveRun, replica: Whole) -> dict[str, Any]:
    """A replica could not be started: its seat is free again."""
    check_seated(replica, live.record)
    if replica not in live.record.members.progress:
        await live.lose(replica, "it was not started")
    return {"status": Answer.OK.value}


async def handle_restore(
    live: LiveRun, phase: str, part: Whole, key: str
) -> dict[str, Any]:
    """A client has started a lost part again, under another key."""
    live.record.schedule.check_held(phase, part)
    live.record.schedule.replace(phase, part, key)
    await live.notify()
    return {"status": Answer.OK.value}


async def handle_agreed(
    live: LiveRun,
    epoch: Whole,
    part: Whole,
    avoid: Sequence[Whole],
    replica: Whole | None,
) -> dict[str, Any]:
    """A client wants a part of the newest state that all have agreed on.

    Args:
        live: The run.
        epoch: At the end of which, or of a later one; after the first part: that one.
        part: Counted from 0.
        avoid: Replicas that are not asked.
        replica: That is asked; None: any.
    """
    members = live.record.members
    if replica is None:
        there = [r for r in members.expected if r not in set(avoid)]
        replica = there[0] if there else None
    if replica is None:
        return {"status": Answer.OK.value, "replica": None}
    check_seated(replica, live.record)
    return {**await live.agreed(replica, epoch, part), "replica": replica}
