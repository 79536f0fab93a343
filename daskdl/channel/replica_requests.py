"""What replicas ask of their run, and what the scheduler answers."""

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from daskdl import errors
from daskdl.channel.answers import answer, check_present, check_seated
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer, Barrier, Item, ItemKind
from daskdl.channel.payloads import check_size
from daskdl.channel.shapes import FromMinusOne, Whole
from daskdl.channel.standings import Standing
from daskdl.errors import shown
from daskdl.version import VERSION

# Of what a client can raise: nobody else's errors are known to it.
ERRORS = frozenset(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DaskDLError)
)


class Told(TypedDict):
    """How a replica of a mesh stands, see `Standing`."""

    generation: Whole
    adopted_at: Whole
    sequence: Whole  # of its last update
    received: Sequence[tuple[Whole, Whole]]


class Finished(TypedDict):
    """A piece that a replica gives back."""

    piece: Whole
    examples: Whole
    loss: float  # mean of the epoch so far


class Failed(TypedDict):
    """What a replica tells of an exception that ends it."""

    type: Annotated[str, ERRORS]
    summary: str
    traceback: str
    step: Whole
    pickled: bytes


async def handle_join(live: LiveRun, replica: Whole, version: str) -> dict[str, Any]:
    """A replica is on its worker.

    It is answered when all founders are here. A newcomer then learns whose state to
    take over, and what that has to contain: everything that was passed on before now,
    since what comes later it is sent.
    """
    record, members = live.record, live.record.members
    if version != VERSION:
        raise ValueError(
            f"the worker has daskdl {version}, the scheduler {VERSION}; "
            "install the same version on all"
        )
    newcomer = replica not in record.plan.replicas
    if newcomer:  # no founder must take it for one
        await live.until(lambda: members.started, None)
    if replica not in members.seats or not members.here(replica):
        raise ValueError(f"no replica {replica} in this run")
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
    present = [[r, 0] for r in members.present if r in members.expected]
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


async def handle_activate(live: LiveRun, replica: Whole, step: Whole) -> dict[str, Any]:
    """A newcomer has the common state; answered between two barriers."""
    record = live.record
    check_present(replica, record)
    await live.until(lambda: not record.holding, None)
    if replica not in record.members.expected:
        record.activate(replica, step)
        worker = record.members.seats[replica]
        record.events.post("joined", replica=replica, worker=worker)
        await live.notify()
    members = [[r, record.members.step_of(r)] for r in record.members.expected]
    where = {"epoch": record.epoch, "lap": record.lap}
    return answer(record, members=members, **where, report=record.report)


async def handle_publish(
    live: LiveRun,
    origin: Whole,
    items: Sequence[Sequence[Any]],
    step: Whole,
    done: FromMinusOne,
    standing: Told | None = None,
) -> dict[str, Any]:
    """A replica has updates for all others, or only a sign of life.

    In a mesh there are no updates, but how the replica stands. The answer says how
    the others do.
    """
    record = live.record
    check_present(origin, record)
    if standing is not None:
        record.members.progress[origin].heard_at = live.now()
        told = Standing(
            standing["generation"],
            standing["adopted_at"],
            dict(standing["received"]),
        )
        if record.hear(origin, step, done, standing["sequence"], told):
            await live.notify()
        stable, words = record.stable(origin), record.words()
        return answer(record, accepted=0, stable=stable, words=words)
    updates = [_update_of(origin, fields) for fields in items]
    record.members.progress[origin].heard_at = live.now()
    accepted = record.publish(origin, updates, step, done)
    return answer(record, accepted=accepted)


async def handle_lease(
    live: LiveRun,
    replica: Whole,
    phase: str,
    epoch: Whole,
    finished: Sequence[Finished],
    wait: bool,
    note: Any = None,
) -> dict[str, Any]:
    """A replica gives finished pieces back and takes the next one.

    If it waits, then until there is one, or nobody has anything left to do. With a
    note no round waits for it meanwhile.
    """
    record = live.record
    check_present(replica, record)
    if epoch > record.epoch:
        raise ValueError(f"epoch {epoch} has not begun, this is {record.epoch}")
    record.work.leases(phase, epoch)  # before anything is changed: there are such
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
    live: LiveRun, replica: Whole, phase: str, part: Whole, key: str
) -> dict[str, Any]:
    """A part does not come. If it is lost, answered when the client has another."""
    check_present(replica, live.record)
    schedule = live.record.schedule
    schedule.check_held(phase, part)
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
    live: LiveRun, replica: Whole, key: str, note: Any, told: bytes, kind: str
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


async def handle_fail(live: LiveRun, replica: Whole, failure: Failed) -> dict[str, Any]:
    """A replica cannot go on: the run ends, and the client learns why."""
    if replica in live.record.members.waiting:  # a newcomer ends nobody's run
        summary = shown(failure["summary"], 500)
        live.record.events.post("not joined", replica=replica, summary=summary)
        await live.notify()
        return {"status": Answer.OK.value}
    # One that was cut off and comes back must not end the others' run.
    check_present(replica, live.record)
    live.record.fail(replica, failure)
    await live.notify()
    return {"status": Answer.OK.value}


async def handle_leave(
    live: LiveRun, replica: Whole, retires: bool = False
) -> dict[str, Any]:
    """A replica has delivered everything and goes."""
    check_seated(replica, live.record)
    await live.leave(replica, retires=retires)
    return {"status": Answer.OK.value}


def _update_of(origin: int, fields: Sequence[Any]) -> Item:
    item = Item.of(fields)
    if item.kind != ItemKind.UPDATE or item.origin != origin:
        raise ValueError(f"replica {origin} must not publish {item[:3]}")
    check_size(item)
    return item
