"""Unreadable requests and frames are refused and counted, and do no harm."""

import dataclasses
import math

import numpy as np
import pytest
from distributed.protocol import to_serialize
from torch import nn

from daskdl import codec
from daskdl.channel.base import Stopped
from daskdl.channel.protocol import Message
from daskdl.config import VERSION
from daskdl.errors import ChannelError
from daskdl.training.replica import failure_of
from daskdl.training.telemetry import EpochTotals
from tests.support.channels import (
    RUN,
    a_run,
    flipped,
    frame_of,
    in_thread,
    item_of,
    lease,
    publish,
    settings,
    token_of,
    totals,
    workers,
)
from tests.support.problems import replica_spec
from tests.support.run_states import GRID, SIZE, SPEC

FAILURE = failure_of(RuntimeError("boom"), step=3)
WORK = EpochTotals().to_wire()
UPDATE = tuple(Message("update", 0, 1, 0, 0))
GOOD = {
    "publish": {"messages": [], "progress": (0, 0, -1)},
    "lease": {
        "phase": "train",
        "epoch": 0,
        "finished": [],
        "wait": False,
    },
    "barrier": {
        "key": "end",
        "payload": None,
        "client_payload": b"",
        "kind": "meet",
    },
    "fail": {"failure": FAILURE},
    "join": {"version": VERSION},
    "activate": {"step": 9},
    "missing": {"phase": "train", "part": 0, "key": "p"},
    "leave": {},
}
OF_REPLICA_0 = {"replica": 0, "token": token_of(0)}
GOOD = {name: {**OF_REPLICA_0, **fields} for name, fields in GOOD.items()}
REFUSED = [
    ("publish", {"messages": 5}),
    ("publish", {"messages": None}),
    ("publish", {"messages": [5]}),
    ("publish", {"messages": [("update", 0, 1)]}),
    ("publish", {"messages": [(*UPDATE, None)]}),
    ("publish", {"messages": [("nonsense", *UPDATE[1:])]}),
    ("publish", {"messages": [("update", 0, "1", 0, 0, None)]}),
    ("publish", {"messages": [("update", 0, 1, 0, -5, None)]}),
    ("publish", {"messages": [UPDATE, ("update", 0, 1)]}),
    ("publish", {"messages": [("update", 1, 1, 0, 0, None)]}),  # of another origin
    ("publish", {"messages": [("update", 0, 10**9, 0, 4, b"junk")]}),  # after none
    ("publish", {"messages": [("stop", 0, 0, 0, 4, "stop")]}),
    ("publish", {"messages": [("failed", 0, 0, 0, 0, None)]}),
    ("publish", {"messages": [("progress", 0, 0, 0, 0, None)]}),
    ("publish", {"progress": ["far", 0, -1]}),
    ("publish", {"progress": [math.inf, 0, -1]}),
    ("publish", {"progress": [1, 0, None]}),
    ("publish", {"progress": None}),
    ("publish", {"colour": "red"}),
    ("lease", {"phase": "nonsense"}),
    ("lease", {"epoch": [0]}),
    ("lease", {"epoch": -1}),
    ("lease", {"finished": [{}]}),
    ("lease", {"finished": [1]}),
    ("lease", {"work": {**WORK, "loss_sum": "low"}}),
    ("lease", {"work": {**WORK, "measured": b"pickled"}}),
    *(
        ("barrier", {"kind": "resume", "payload": payload})
        for payload in (None, {}, {"work": None}, {"work": {**WORK, "examples": -1}})
    ),
    ("fail", {"failure": {**FAILURE, "pickled": b"code"}}),
    ("join", {"version": "0.0"}),
    *((name, {"replica": wrong}) for name in GOOD for wrong in (9, [0])),
    *((name, {"token": wrong}) for name in GOOD for wrong in (token_of(1), "x")),
    *((name, {"secret": wrong}) for name in GOOD for wrong in (0, None, "x")),
]


async def check_unharmed(run):
    """An update from replica 0 arrives at replica 1, and the first part is leased."""
    assert publish(run.channels[0], 5)
    await in_thread(run.channels[1].wait_for_updates, {0: 1})
    assert run.channels[1].drain().updates[0].entries_K.tolist() == [5]
    assert await lease(run.channels[1]) == (0, "p")


@workers(2)
async def test_invalid_requests_are_refused_and_change_nothing(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        for count, (operation, wrong) in enumerate(REFUSED, start=1):
            fields = {**GOOD[operation], **wrong}
            answer = await run.ask(f"daskdl_{operation}", run=RUN, **fields)

            assert answer["status"] == "refused", (operation, wrong)
            assert answer["reason"].startswith(f"handle_{operation}: ")
            assert run.record.refused == count
            assert run.record.barriers == {}
        assert run.record.stopped is None
        await check_unharmed(run)


@workers(2)
async def test_payloads_beyond_the_bound_of_the_run_are_refused(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        bounded = dataclasses.replace(run.record.spec, payload_bytes=1000)
        run.record.spec = bounded
        arrays = {"buffer": to_serialize(np.zeros(200))}
        for operation, wrong in (
            ("barrier", {"payload": b"x" * 1000}),
            ("barrier", {"payload": arrays}),
            ("barrier", {"client_payload": b"x" * 1000}),
            ("lease", {"idle_payload": arrays}),
            ("lease", {"work": {**WORK, "reason": "x" * 1000}}),
        ):
            fields = {**GOOD[operation], **wrong}
            answer = await run.ask(f"daskdl_{operation}", run=RUN, **fields)
            assert "payloads must have at most 1000 bytes" in answer["reason"]
        assert run.record.barriers == {}
        await check_unharmed(run)


@workers(2)
async def test_requests_of_a_lost_replica_are_answered_and_change_nothing(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        run.lose(1)

        for operation in GOOD.keys() - {"join", "leave"}:
            fields = {**GOOD[operation], "replica": 1, "token": token_of(1)}
            answer = await run.ask(f"daskdl_{operation}", run=RUN, **fields)
            assert answer["status"] == "unknown", operation
            assert "replica 1 is no longer a member" in answer["reason"]

        assert (run.record.refused, run.record.stopped) == (0, None)
        assert await lease(run.channels[0]) == (0, "p")


@workers(2)
async def test_a_replica_that_was_removed_has_to_stop(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        channel = run.channels.pop(1)
        run.live.lose(1, "cut off")

        assert publish(channel)

        with pytest.raises(Stopped, match="replica 1 is no longer a member"):
            await in_thread(channel.wait_for_updates, {0: 1})
        assert totals(run.channels[0].drain()) == [0] * SIZE
        await in_thread(channel.leave)


STAMP = codec.Stamp(RUN, origin=0, sequence=1, step=0)


DAMAGED = {
    "random bytes": np.random.default_rng(0).integers(0, 256, 200, np.uint8),
    "a frame cut short": frame_of(STAMP, 1, 2)[:-1],
    "a flipped bit": flipped(frame_of(STAMP, 1, 2)),
    "another run": frame_of(STAMP._replace(run=8), 1),
    "another size": frame_of(STAMP, 1, size=SIZE + 1),
    "a threshold off the grid": frame_of(STAMP, 1, count=1.5),
    "another origin in its stamp": frame_of(STAMP._replace(origin=1), 1),
    "another sequence in its stamp": frame_of(STAMP._replace(sequence=2), 1),
    "another grid": codec.encode_dense(STAMP, 2 * GRID, np.ones(SIZE, np.int32)),
}


@workers(2)
async def test_damaged_frames_are_refused_and_a_good_one_still_arrives(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        for name, frame in DAMAGED.items():
            answer = await run.deliver(1, item_of(STAMP, frame))
            assert answer == {"status": "ok", "accepted": 1}
            assert run.channels[1].stats().refused == 1, name
        await check_unharmed(run)


OF_CLIENTS = {
    "watch": {"timeout_s": 0.0},
    "stop": {"reason": "mine"},
    "assign": {"worker": "tcp://worker", "replicas": 2},
    "unassign": {"replica": 0},
    "restore": {"phase": "train", "part": 0, "key": "other"},
    "agreed": {"epoch": 0, "part": 0, "avoid": [], "replica": None},
    "close": {},
}
OF_WORKERS = {
    "deliver": {"replica": 1, "messages": [("stop", 0, 0, 0, 4, "stop")]},
    "deliver_batches": {
        "messages": [("stop", 0, 0, 0, 4, "stop")],
        "shares": [(1, [0])],
    },
    "snapshot": {"replica": 1, "cut": [], "reader": 0},
    "repair": {"replica": 1, "origin": 1, "sequences": [1]},
    "fetch": {"replica": 1, "name": "state", "part": 0},
    "agreed": {"replica": 1, "epoch": 0, "part": 0},
    "describe": {},
}
FOREIGN = ({}, {"secret": 0}, {"secret": SPEC.secret + 1})


@workers(2)
async def test_a_client_without_the_secret_of_a_run_is_refused(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        for operation, fields in OF_CLIENTS.items():
            request = getattr(c.scheduler, f"daskdl_{operation}")
            for wrong in FOREIGN:
                answer = await request(run=RUN, **fields, **wrong)

                assert answer["status"] == "refused", (operation, wrong)
                assert "the secret of its run" in answer["reason"]
        assert run.record.refused == len(OF_CLIENTS) * len(FOREIGN)
        assert (run.record.stopped, [*run.live.state.members.gone]) == (None, [])
        await check_unharmed(run)


@workers(2)
async def test_a_replica_from_before_the_run_opened_again_hears_that_it_is_gone(
    c, s, a, b
):
    async with a_run(c, s, a) as run:
        former = run.channels[0]
        await run.shut()
        await in_thread(former.leave)
        run.spec, plan = settings({1: b.address}, secret=SPEC.secret + 1)
        plan = dataclasses.replace(plan, secret=run.spec.secret)

        await run.ask("daskdl_open", spec=vars(plan), client=c.id)

        for operation, fields in GOOD.items():
            request = getattr(c.scheduler, f"daskdl_{operation}")
            answer = await request(run=RUN, secret=SPEC.secret, **fields)
            assert answer["status"] == "unknown", operation
            assert answer["reason"] == f"run {RUN:08x} has lost this replica"
        assert (run.record.refused, run.record.stopped) == (0, None)


@workers(2)
async def test_a_worker_answers_no_request_without_the_secret_of_the_run(c, s, a, b):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}) as run:
        assert publish(run.channels[1])
        for operation, fields in OF_WORKERS.items():
            request = getattr(s.rpc(b.address), f"daskdl_{operation}")
            for wrong in FOREIGN:
                answer = await request(run=RUN, **fields, **wrong)

                assert answer.keys() == {"status", "reason"}, (operation, wrong)
                assert answer["status"] == "refused"
                assert "the secret of its run" in answer["reason"]
        assert run.channels[1].stats().refused
        await check_unharmed(run)


@workers(2)
async def test_the_secrets_of_a_run_are_not_shown(c, s, a, b, caplog):
    secret, token = str(SPEC.secret), str(token_of(0))
    with caplog.at_level("DEBUG", logger="daskdl"):
        async with a_run(c, s, a, b) as run:
            shown = [
                await c.scheduler.daskdl_describe(),
                await run.ask("daskdl_watch", run=RUN, timeout_s=0.0),
                await run.ask(
                    "daskdl_stop", run=RUN, secret=SPEC.secret + 1, reason=""
                ),
                run.record.spec,
                dataclasses.replace(run.spec, token=token_of(0)),
                replica_spec(nn.Linear(2, 2), secret=SPEC.secret),
                vars(run.live.record),
            ]

    for text in (*map(str, shown), caplog.text):
        assert secret not in text
        assert f"{token}," not in text
        assert f"{token})" not in text


UNDELIVERED = [
    ({"messages": [5]}, "refused"),
    ({"messages": [("update", 0)]}, "refused"),
    ({"messages": [("progress", 0, 0, 0, 0, None)]}, "refused"),
    ({"run": 8}, "unknown"),
    ({"replica": 0}, "unknown"),
    ({"replica": [1]}, "refused"),
    ({"run": "7"}, "refused"),
]


@workers(2)
async def test_invalid_deliveries_are_refused_and_counted(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        plugin, refused = b.extensions["daskdl-channel"], 0
        for count, (wrong, status) in enumerate(UNDELIVERED, start=1):
            fields = {"replica": 1, "messages": [], **wrong}
            answer = await run.ask_worker(1, "daskdl_deliver", **fields)

            assert answer["status"] == status, wrong
            refused += run.channels[1].stats().refused
            assert plugin.refused + refused == count


@workers(2)
async def test_a_scheduler_without_the_plugin_is_an_error(c, s, a, b, monkeypatch):
    async with a_run(c, s, a, b, join=False) as run:
        monkeypatch.delitem(s.handlers, "daskdl_join")

        with pytest.raises(ChannelError, match="is daskdl installed there"):
            await in_thread(run.channels[0].join)
