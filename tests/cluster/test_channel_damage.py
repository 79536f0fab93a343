"""What is not understood is refused and counted, and does no harm."""

import math

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel.base import Stopped
from daskdl.channel.protocol import Message
from daskdl.config import VERSION
from daskdl.errors import ChannelError
from daskdl.training.replica import failure_of
from tests.support.channels import (
    GRID,
    RUN,
    SIZE,
    a_run,
    frame_of,
    in_thread,
    item_of,
    next_stamp,
    publish,
    totals,
    two_workers,
)
from tests.support.run_states import of_one

STAMP = codec.Stamp(RUN, origin=0, sequence=1, step=0)
UPDATE = tuple(Message("update", 0, 1, 0, 0))
GOOD = {"replica": 0, "messages": [], "progress": (0, 0, -1)}

MALFORMED = {
    "items that are a number": {"messages": 5},
    "no items at all": {"messages": None},
    "an item that is a number": {"messages": [5]},
    "an item with missing fields": {"messages": [("update", 0, 1)]},
    "an item with too many fields": {"messages": [(*UPDATE, None)]},
    "a kind that does not exist": {"messages": [("nonsense", *UPDATE[1:])]},
    "a sequence number that is text": {"messages": [("update", 0, "1", 0, 0, None)]},
    "a negative size": {"messages": [("update", 0, 1, 0, -5, None)]},
    "a good item before a bad one": {"messages": [UPDATE, ("update", 0, 1)]},
    "an update of somebody else": {"messages": [("update", 1, 1, 0, 0, None)]},
    "the word to stop": {"messages": [("stop", 0, 0, 0, 4, "stop")]},
    "a loss": {"messages": [("failed", 0, 0, 0, 0, None)]},
    "progress without an epoch": {"messages": [("progress", 0, 0, 0, 0, None)]},
    "a replica that is no member": {"replica": 9},
    "a replica that is a list": {"replica": [0]},
    "a step that is text": {"progress": ["far", 0, -1]},
    "a step without end": {"progress": [math.inf, 0, -1]},
    "an interval that is nothing": {"progress": [1, 0, None]},
    "no progress": {"progress": None},
    "a field that does not exist": {"colour": "red"},
}


@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=MALFORMED)
@two_workers()
async def test_a_malformed_publish_is_refused_and_a_good_one_still_arrives(
    c, s, a, b, wrong
):
    async with a_run(c, s, a, b) as run:
        answer = await run.ask("daskdl_publish", run=RUN, **{**GOOD, **wrong})

        assert answer["status"] == "refused"
        assert answer["reason"].startswith("handle_publish: ")
        assert run.record.refused == 1
        assert publish(run.channels[0], 5)
        await in_thread(run.channels[1].wait_for_updates, {0: 1})
        assert run.channels[1].drain().updates[0].entries_K.tolist() == [5]
        assert run.record.stopped is None


@two_workers()
async def test_who_was_given_up_publishes_to_nobody_and_is_told(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        channel = run.channels.pop(1)
        run.live.lose(1, "cut off")

        assert publish(channel)

        with pytest.raises(Stopped, match="replica 1 is not a member any more"):
            await in_thread(channel.wait_for_updates, {0: 1})
        assert run.record.refused == 0
        assert totals(run.channels[0].drain()) == [0] * SIZE
        await in_thread(channel.leave)


REQUESTS = {
    "lease": (
        "daskdl_lease",
        {"phase": "train", "epoch": 0, "finished": [], "wait": False},
    ),
    "gather": (
        "daskdl_barrier",
        {"key": "end", "payload": None, "client_payload": b"", "kind": "meet"},
    ),
    "fail": ("daskdl_fail", {"failure": failure_of(RuntimeError("boom"), step=3)}),
}


@pytest.mark.parametrize(("operation", "fields"), REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("replica", [9, 1, [1]], ids=["never there", "lost", "list"])
@two_workers()
async def test_only_a_member_can_ask_for_something(
    c, s, a, b, replica, operation, fields
):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        run.vanish(1)
        run.live.lose(1, "cut off")

        answer = await run.ask(operation, run=RUN, replica=replica, **fields)

        lost = replica == 1
        assert answer["status"] == ("unknown" if lost else "refused")
        assert "is not a member" in answer["reason"] or replica == [1]
        assert run.record.refused == (0 if lost else 1)
        assert run.record.stopped is None
        assert of_one(await in_thread(run.channels[0].lease, "train", 0, [])) == (
            0,
            "p",
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "nonsense", "epoch": 0, "finished": [], "wait": False},
        {"phase": "train", "epoch": [0], "finished": [], "wait": False},
        {"phase": "train", "epoch": -1, "finished": [], "wait": False},
        {"phase": "train", "epoch": 0, "finished": [{}], "wait": False},
        {"phase": "train", "epoch": 0, "finished": [1], "wait": False},
    ],
    ids=["phase", "epoch", "no epoch", "no piece", "list"],
)
@two_workers()
async def test_a_malformed_lease_takes_no_piece(c, s, a, b, fields):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        answer = await run.ask("daskdl_lease", run=RUN, replica=0, **fields)

        assert answer["status"] == "refused"
        assert run.record.refused == 1
        assert of_one(await in_thread(run.channels[1].lease, "train", 0, [])) == (
            0,
            "p",
        )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"replica": 0, "version": "0.0"}, "the worker has daskdl 0.0, the scheduler"),
        ({"replica": 9, "version": VERSION}, "no replica 9 in this run"),
    ],
    ids=["version", "replica"],
)
@two_workers()
async def test_who_cannot_take_part_is_told_why(c, s, a, b, fields, reason):
    async with a_run(c, s, a, b) as run:
        answer = await run.ask("daskdl_join", run=RUN, **fields)

        assert answer["status"] == "refused"
        assert reason in answer["reason"]


def flipped(frame):
    """The frame with one bit of its payload changed."""
    damaged = frame.copy()
    damaged[-1] ^= 4
    return damaged


def offgrid():
    entries_K = np.array([1], np.int32)
    return codec.encode(STAMP, SIZE, 1.5 * GRID, entries_K)


DAMAGED = {
    "random bytes": np.random.default_rng(0).integers(0, 256, 200, np.uint8),
    "a frame cut short": frame_of(STAMP, 1, 2)[:-1],
    "a flipped bit": flipped(frame_of(STAMP, 1, 2)),
    "another run": frame_of(STAMP._replace(run=8), 1),
    "another size": frame_of(STAMP, 1, size=SIZE + 1),
    "a threshold off the grid": offgrid(),
    "another origin in its stamp": frame_of(STAMP._replace(origin=1), 1),
    "another sequence in its stamp": frame_of(STAMP._replace(sequence=2), 1),
    "counts of another grid": codec.encode_dense(
        STAMP, 2 * GRID, np.ones(SIZE, np.int32)
    ),
}


@pytest.mark.parametrize("frame", DAMAGED.values(), ids=DAMAGED)
@two_workers()
async def test_a_damaged_frame_is_refused_and_a_good_one_still_arrives(
    c, s, a, b, frame
):
    async with a_run(c, s, a, b) as run:
        stamp = next_stamp(run.channels[0], 0)
        assert stamp == STAMP

        answer = await run.deliver(1, item_of(stamp, frame))

        assert answer == {"status": "ok", "accepted": 1}
        assert run.channels[1].stats().refused == 1
        assert publish(run.channels[0], 5)
        await in_thread(run.channels[1].wait_for_updates, {0: 1})
        assert run.channels[1].drain().updates[0].entries_K.tolist() == [5]
        assert s.workers.keys() == {a.address, b.address}


@pytest.mark.parametrize(
    "items", [[5], [("update", 0)], [("progress", 0, 0, 0, 0, None)]], ids=repr
)
@two_workers()
async def test_a_malformed_delivery_is_refused_and_counted(c, s, a, b, items):
    async with a_run(c, s, a, b) as run:
        answer = await run.deliver(1, *items)

        assert answer["status"] == "refused"
        assert run.channels[1].stats().refused == 1
        assert publish(run.channels[0])
        await in_thread(run.channels[1].wait_for_updates, {0: 1})


@pytest.mark.parametrize(
    ("run_id", "replica", "status"),
    [
        (8, 1, "unknown"),
        (RUN, 0, "unknown"),
        (RUN, [1], "refused"),
        ("7", 1, "refused"),
    ],
    ids=repr,
)
@two_workers()
async def test_a_delivery_for_nobody_here_is_counted(
    c, s, a, b, run_id, replica, status
):
    async with a_run(c, s, a, b) as run:
        answer = await s.rpc(b.address).daskdl_deliver(
            run=run_id, replica=replica, messages=[]
        )

        assert answer["status"] == status
        assert run.worker_plugin(1).refused + run.channels[1].stats().refused == 1


@two_workers()
async def test_a_replica_learns_that_the_scheduler_has_no_plugin(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, join=False) as run:
        monkeypatch.delitem(s.handlers, "daskdl_join")

        with pytest.raises(ChannelError, match="is daskdl installed there"):
            await in_thread(run.channels[0].join)
