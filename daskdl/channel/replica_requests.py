"""What replicas ask of their run, and what the scheduler answers."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from daskdl.channel.answers import answer, check_present
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer, Barrier, Item, ItemKind
from daskdl.channel.payloads import check_size
from daskdl.channel.standings import Standing
from daskdl.version import VERSION

logger = logging.getLogger(__name__)


async def handle_join(live: LiveRun, replica: int, version: str) -> dict[str, Any]:
    """A replica is on its worker.

    Before the start it is answered when all founders are here. A newcomer learns
    at once whose state to take over, and what that has to contain: everything
    that was passed on before now, since what comes later it is sent.
    """
    record, members = live.record, live.record.members
    if version != VERSION:
        raise ValueError(
            f"the worker has daskdl {version}, the scheduler {VERSION}; "
            "install the same version on all"
        )
    if replica not in members.seats or not members.here(replica):
        raise ValueError(f"no replica {replica} in this run")
    newcomer = members.started and replica not in record.plan.replicas
    live.relay_to(replica)
    if newcomer:
        cut = await _cut(live, replica)
        donor = members.donor()
        return answer(
            record,
            members=[],
            routes=record.routes(),
            donor=donor,
            worker=None if donor is None else members.seats[donor],
            cut=list(cut.items()),
        )
    await live.notify()
    await live.until(lambda: members.started, None)
    present = [[r, 0] for r in members.present]
    return answer(record, members=present, routes=record.routes(), donor=None)


async def _cut(live: LiveRun, newcomer: int) -> dict[int, int]:
    """What a newcomer's snapshot has to contain.

    The relay knows what it passed on. In a mesh each replica says up to which of
    its updates it did not know the newcomer; then the newcomer is told.
    """
    record, members = live.record, live.record.members
    if record.plan.routing == "plain":
        return record.cut()
    generation, progress = members.generation, members.progress[newcomer]
    progress.heard_at = math.inf  # it waits here, and can say nothing
    await live.until(
        lambda: not members.here(newcomer) or record.adopted(generation), None
    )
    check_present(newcomer, record)
    progress.heard_at = live.now()
    return record.exact_cut(newcomer)


async def handle_activate(live: LiveRun, replica: int, step: int) -> dict[str, Any]:
    """A newcomer has the common state; answered between two barriers."""
    record = live.record
    check_present(replica, record)
    await live.until(lambda: not record.holding, None)
    record.activate(replica, int(step))
    worker = record.members.seats[replica]
    record.events.post("joined", replica=replica, worker=worker)
    await live.notify()
    members = [[r, record.members.step_of(r)] for r in record.members.expected]
    where = {"epoch": record.epoch, "lap": record.lap}
    return answer(record, members=members, **where, report=record.report)


async def handle_publish(
    live: LiveRun,
    origin: int,
    items: Sequence[Sequence[Any]],
    step: int,
    done: int,
    standing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A replica has updates for all others, or only a sign of life.

    In a mesh there are no updates, but how the replica stands. The answer says how
    the others do.
    """
    record = live.record
    check_present(origin, record)
    if standing is not None:
        record.members.progress[origin].heard_at = live.now()
        sequence, told = _standing_of(standing)
        if record.hear(origin, int(step), int(done), sequence, told):
            await live.notify()
        stable, words = record.stable(origin), record.words()
        return answer(record, accepted=0, stable=stable, words=words)
    updates = [_update_of(origin, fields) for fields in items]
    record.members.progress[origin].heard_at = live.now()
    accepted = record.publish(origin, updates, int(step), int(done))
    return answer(record, accepted=accepted)


async def handle_lease(
    live: LiveRun,
    replica: int,
    phase: str,
    epoch: int,
    finished: Sequence[dict[str, Any]],
    wait: bool,
    note: Any = None,
) -> dict[str, Any]:
    """A replica gives finished pieces back and takes the next one.

    If it waits, then until there is one, or nobody has anything left to do. With a
    note no round waits for it meanwhile.
    """
    record = live.record
    check_present(replica, record)
    record.work.give_back(replica, phase, epoch, finished)
    record.work.look(live.now())
    if note is not None:
        record.barriers.stand_by(replica, note)
    if finished or note is not None:
        await live.notify()
    if wait:
        await live.until(lambda: record.work.settled(replica, phase, epoch), None)
        record.barriers.resume(replica)
        check_present(replica, record)
    worker = record.members.seats[replica]
    is_near = functools.partial(live.holds, worker)
    lease = record.work.lease(replica, phase, epoch, is_near)
    if lease is None:
        pause = record.work.pause(replica, phase, epoch)
        values = None if pause is None else pause.values()
        return answer(record, piece=None, pause=values)
    return answer(
        record,
        piece=lease.number,
        ranges=[list(one) for one in lease.ranges],
        keys=list(record.schedule.keys(phase, lease).items()),
        ahead=lease.ahead,
    )


async def handle_missing(
    live: LiveRun, replica: int, phase: str, part: int, key: str
) -> dict[str, Any]:
    """A part does not come. If it is lost, answered when the client has another."""
    check_present(replica, live.record)
    schedule = live.record.schedule
    if schedule.key(phase, part) == key and not live.reachable(key):
        live.record.events.post(
            "missing",
            phase=phase,
            part=part,
            key=key,
            worker=live.record.members.seats[replica],
            avoid=sorted(live.hanging),
        )
        await live.notify()
        await live.until(lambda: schedule.key(phase, part) != key, None)
    return answer(live.record, key=schedule.key(phase, part))


async def handle_gather(
    live: LiveRun, replica: int, key: str, note: Any, told: bytes, kind: str
) -> dict[str, Any]:
    """A replica is at a barrier; answered with all notes when all are."""
    record = live.record
    check_present(replica, record)
    gathering = record.barriers.arrive(key, replica, note, told, Barrier(kind))
    await live.notify()

    await live.until(lambda: record.over(gathering), None)
    if record.stopped is None and record.complete(key, gathering):
        await live.notify()
    notes = [[r, gathering.notes[r]] for r in sorted(gathering.notes)]
    gone = [[r, sequence] for r, sequence in (gathering.gone or {}).items()]
    return answer(record, notes=notes, gone=gone, counted=dict(gathering.counted))


async def handle_fail(
    live: LiveRun, replica: int, failure: dict[str, Any]
) -> dict[str, Any]:
    """A replica cannot go on: the run ends, and the client learns why."""
    said = failure.get("type"), failure.get("summary")
    if not all(isinstance(text, str) for text in said):
        raise ValueError(f"a failure needs a type and a summary, got {said!r}")
    # One that was cut off and comes back must not end the others' run.
    check_present(replica, live.record)
    if replica not in live.record.members.expected:
        logger.warning("a newcomer failed: %s", failure["summary"])
        return {"status": Answer.OK.value}
    live.record.fail(replica, failure)
    await live.notify()
    return {"status": Answer.OK.value}


async def handle_leave(
    live: LiveRun, replica: int, retires: bool = False
) -> dict[str, Any]:
    """A replica has delivered everything and goes."""
    await live.leave(replica, retires=bool(retires))
    return {"status": Answer.OK.value}


def _update_of(origin: int, fields: Sequence[Any]) -> Item:
    item = Item.of(fields)
    if item.kind != ItemKind.UPDATE or item.origin != origin:
        raise ValueError(f"replica {origin} must not publish {item[:3]}")
    check_size(item)
    return item


def _standing_of(fields: Mapping[str, Any]) -> tuple[int, Standing]:
    received = {int(o): int(sequence) for o, sequence in fields["received"]}
    generation, adopted_at = int(fields["generation"]), int(fields["adopted_at"])
    return int(fields["sequence"]), Standing(generation, adopted_at, received)
