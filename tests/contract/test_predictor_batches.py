"""Batches, retries, membership and swaps of a predictor, on simulated replicas."""

import asyncio
import dataclasses
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from daskdl.channel.protocol import wrap
from daskdl.errors import (
    BusyError,
    ChannelError,
    ModelError,
    OptionError,
    ReplicaError,
    RunError,
    WaitTimeoutError,
)
from daskdl.inference import predictor
from daskdl.inference.pool import ModelFailure, start_server
from daskdl.inference.predictor import BatchQueue, Call
from daskdl.serialization import PackedModel
from tests.support.replicas import MODEL, TIMEOUTS, serving, soon, turns, values

LONG_S = 1000.0  # longer than any test


class TestBatches:
    async def test_a_full_batch_leaves_at_once_and_each_call_gets_its_own_rows(self):
        async with serving("a", wait_s=LONG_S) as desk:
            calls = [desk.call(1), desk.call(2, 3), desk.call(4)]
            batch = await desk.asked()
            batch.answer()

            assert batch.values == [1, 2, 3, 4]
            assert [await values(call) for call in calls] == [[10], [20, 30], [40]]
            calls[1].result()[:] = 0  # they share no memory
            assert calls[0].result().base is None
            assert await values(calls[2]) == [40]

            desk.call(1, 2, 3), desk.call(4, 5)  # too many rows for one batch
            assert (await desk.asked()).values == [1, 2, 3]
            await turns()
            assert desk.host.replicas[0].asked.empty()

    @pytest.mark.parametrize(("wait_s", "rows"), [(0.001, [1]), (LONG_S, [1, 2, 3, 4])])
    async def test_a_batch_waits_for_more_rows_no_longer_than_wait_s(
        self, wait_s, rows
    ):
        async with serving("a", wait_s=wait_s) as desk:
            desk.call(1)
            if wait_s == LONG_S:
                await turns()
                assert desk.host.replicas[0].asked.empty()
                desk.call(2, 3, 4)

            assert (await desk.asked()).values == rows

    async def test_callers_that_were_answered_together_share_the_next_batch(
        self, monkeypatch
    ):
        async with serving("a") as desk:
            desk.call(0), desk.call(1)
            (await desk.asked()).answer()
            monkeypatch.setattr(predictor, "GATHER_S", LONG_S)
            await turns()
            desk.call(2)
            await turns()
            desk.call(3)
            batch = await desk.asked()
            batch.answer()
            assert batch.values == [2, 3]

            monkeypatch.setattr(predictor, "GATHER_S", 0.001)
            await turns()
            desk.call(4)  # the other caller stays away

            assert (await desk.asked()).values == [4]

    async def test_a_full_batch_waits_for_no_timer_after_an_answer(self, monkeypatch):
        monkeypatch.setattr(predictor, "GATHER_S", LONG_S)
        async with serving("a", "b", wait_s=LONG_S) as desk:
            for value in range(5):
                desk.call(value)
            (await desk.asked(0)).answer()
            await turns()
            for value in range(5, 8):  # one of those answered is not back yet
                desk.call(value)

            asked = [asyncio.ensure_future(desk.asked(number)) for number in (0, 1)]
            done, others = await asyncio.wait(asked, return_when="FIRST_COMPLETED")
            assert [task.result().values for task in done] == [[4, 5, 6, 7]]
            for task in others:
                task.cancel()

    async def test_after_a_full_batch_the_next_one_waits_for_the_other_callers(
        self, monkeypatch
    ):
        monkeypatch.setattr(predictor, "GATHER_S", LONG_S)
        async with serving("a", "b") as desk:
            for value in range(8):
                desk.call(value)
            for replica in (0, 1):
                (await desk.asked(replica)).answer()
            await turns()

            for value in range(4):
                desk.call(value)
            first = await desk.asked(0)
            for value in range(4, 8):
                assert desk.host.replicas[1].asked.empty()
                desk.call(value)
                await asyncio.sleep(0.001)

            assert first.values == [0, 1, 2, 3]
            assert (await desk.asked(1)).values == [4, 5, 6, 7]

    async def test_a_batch_goes_to_the_replica_with_the_fewest(self):
        async with serving("a", "b") as desk:
            desk.call(1)
            first = await desk.asked(0)
            desk.call(2)
            second = await desk.asked(1)
            second.answer()
            await turns()

            desk.call(3)

            assert (first.values, second.values) == ([1], [2])
            assert (await desk.asked(1)).values == [3]

    async def test_a_busy_replica_gets_one_full_batch_and_waiting_calls_are_joined(
        self,
    ):
        async with serving("a") as desk:
            desk.call(0)
            first = await desk.asked()
            for value in range(1, 11):
                desk.call(value)
            ahead = await desk.asked()
            await turns()
            assert ahead.values == [1, 2, 3, 4]
            assert desk.host.replicas[0].asked.empty()

            first.answer()
            next_one = await desk.asked()
            ahead.answer()
            await turns()
            assert next_one.values == [5, 6, 7, 8]
            assert desk.host.replicas[0].asked.empty()  # the rest is not a full batch
            next_one.answer()

            assert (await desk.asked()).values == [9, 10]


class TestFailures:
    async def test_after_a_failure_each_call_of_the_batch_is_retried_alone(self):
        async with serving("a", wait_s=LONG_S) as desk:
            calls = [desk.call(1), desk.call(2), desk.call(3), desk.call(4)]
            (await desk.asked()).refuse()
            for _ in calls:
                batch = await desk.asked()
                assert len(batch.x) == 1
                if batch.values == [2]:
                    batch.refuse("ValueError: two is too much")
                else:
                    batch.answer()

            assert [await values(calls[i]) for i in (0, 2, 3)] == [[10], [30], [40]]
            with pytest.raises(ModelError, match=r"on 1 rows, X: .* two is") as error:
                await values(calls[1])
            assert "Traceback: ..." in error.value.__notes__[0]

    @pytest.mark.parametrize("lost", [True, False], ids=["lost", "hanging"])
    async def test_calls_of_a_lost_or_hanging_replica_go_to_another(self, lost):
        timeouts = TIMEOUTS if lost else dataclasses.replace(TIMEOUTS, request=0.01)
        async with serving("a", "b", timeouts=timeouts) as desk:
            call = desk.call(1)
            batch = await desk.asked(0)
            if lost:
                batch.lose()

            (await desk.asked(1)).answer()

            assert await values(call) == [10]
            assert places(desk) == ["b"]
            assert ("close", "a") in desk.host.log
            desk.queue.admit(100)
            with pytest.raises(BusyError):  # a retried call makes room only once
                desk.queue.admit(1)

    async def test_a_call_that_ends_every_replica_fails_and_no_other_does(self):
        async with serving("a", wait_s=LONG_S) as desk:
            bad, *others = [desk.call(value) for value in (666, 1, 2, 3)]
            replica, fatal = 0, []
            while not (bad.done() and all(call.done() for call in others)):
                batch = await desk.asked(replica)
                if 666 not in batch.values:
                    batch.answer()
                    await turns()
                    continue
                fatal.append(batch.values)
                batch.lose()
                await turns()
                await desk.new_replicas()
                replica += 1

            with pytest.raises(
                ReplicaError, match="4 times, last error: connection lost"
            ):
                await values(bad)
            assert [await values(call) for call in others] == [[10], [20], [30]]
            assert fatal == [[666, 1, 2, 3], [666, 1, 2, 3], [666], [666]]

    async def test_without_a_replica_calls_wait_for_rejoin_and_then_fail(self):
        hopeless = dataclasses.replace(TIMEOUTS, rejoin=0.01)
        async with serving("a", timeouts=hopeless) as desk:
            waiting = desk.call(1)
            (await desk.asked()).lose()
            with pytest.raises(
                WaitTimeoutError, match=r"all replicas are lost.*\.rejoin"
            ):
                await values(waiting)
            with pytest.raises(WaitTimeoutError, match="all replicas are lost"):
                await values(desk.call(2))

            await desk.new_replicas()
            again = desk.call(3)
            (await desk.asked(1)).answer()

            assert await values(again) == [30]

    async def test_an_unexpected_error_reaches_the_caller(self):
        async with serving("a") as desk:
            answer = desk.call(1)
            (await desk.asked()).outcome.set_result("nonsense")

            with pytest.raises(AttributeError):
                await values(answer)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), st.sampled_from("ab")),
        st.tuples(st.just("take"), st.booleans(), st.floats(0, 3)),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_call_leaves_once_in_order_with_its_kind_within_the_limit(steps):
    queue, now = BatchQueue(4, 2.0, 200), 0.0
    came, left = [], []
    for verb, *arguments in steps:
        if verb == "add":
            rows, kind = arguments
            queue.admit(rows)
            call = Call(np.zeros(rows), rows, kind, tensors=False, arrived=now)
            came.append(call)
            queue.add(call)
            continue
        at_once, elapsed_s = arguments
        now += elapsed_s
        batch = queue.take(math.inf if at_once else now)
        assert sum(call.rows for call in batch) <= 4
        assert len({call.kind for call in batch}) <= 1
        left += batch
    while batch := queue.take(math.inf):
        left += batch

    for kind in "ab":
        of_kind = [call for call in came if call.kind == kind]
        assert [call for call in left if call.kind == kind] == of_kind
    queue.admit(200)


GATE = threading.Event()


class Gated(nn.Module):
    """Blocks while it is unpacked."""

    def __setstate__(self, state):
        assert GATE.wait(30)
        super().__setstate__(state)


def places(desk):
    return sorted(replica.place for replica in desk.pool.ready)


def lose(desk, place):
    replica = next(r for r in desk.pool.ready if r.place == place)
    for _ in range(2):  # the second has no effect
        desk.pool.lose(replica, "it hangs")


class TestReplicas:
    async def test_replicas_are_spread_over_the_places_and_closed_at_the_end(self):
        async with serving("a", "b", replicas=3) as desk:
            assert places(desk) == ["a", "a", "b"]
            assert desk.host.log.count(("use", "a", 1)) == 2

        closed = [entry[1] for entry in desk.host.log if entry[0] == "close"]
        assert sorted(closed) == ["a", "a", "b"]

    @pytest.mark.parametrize(
        ("verb", "fault", "error", "message"),
        [
            ("open", None, WaitTimeoutError, r"no replica started on a .*\.join"),
            ("stage", None, WaitTimeoutError, r"did not reach a within .*\.data"),
            (
                *(
                    "stage",
                    ModelFailure("no module named nets", "Traceback"),
                    ModelError,
                ),
                "cannot be used on a: no module named nets",
            ),
            ("use", None, WaitTimeoutError, r"did not switch to the model .*\.request"),
        ],
        ids=["open", "stage", "refused", "use"],
    )
    async def test_a_start_that_fails_is_an_error_and_leaves_nothing(
        self, verb, fault, error, message
    ):
        impatient = dataclasses.replace(TIMEOUTS, join=0.01, data=0.01, request=0.01)
        faults, host = {(verb, "a"): fault or asyncio.Event()}, []

        with pytest.raises(error, match=message):
            async with serving("a", timeouts=impatient, faults=faults, host=host):
                pass
        with pytest.raises(OptionError, match="the cluster has no workers; wait for"):
            async with serving():
                pass

        assert [event for event in host[0].log if event[0] == "close"] == [
            ("close", "a")
        ]

    async def test_closing_closes_a_replica_that_is_being_started(self):
        async with serving("a", "b") as desk:
            lose(desk, "a")
            slow = desk.host.faults["open", "a"] = asyncio.Event()
            await desk.pool.look()
            await turns()
            closing = asyncio.create_task(desk.pool.close(wait=True))
            await turns()
            desk.host.log.clear()

            slow.set()
            await soon(closing)

            assert ("close", "a") in desk.host.log

    async def test_a_replica_of_a_lost_place_is_replaced_where_there_is_room(self):
        async with serving("a", "b") as desk:
            desk.host.there = ["b"]
            await desk.new_replicas()
            assert places(desk) == ["b"]  # no place gets more than at the start

            desk.host.there = ["b", "new"]
            await desk.new_replicas()
            await desk.new_replicas()

            assert places(desk) == ["b", "new"]

    async def test_a_lost_replica_is_replaced_where_the_fewest_were_lost(self):
        async with serving("a", "b") as desk:
            desk.host.there = ["a", "b", "c"]
            lose(desk, "a")
            await desk.new_replicas()
            assert places(desk) == ["b", "c"]

            desk.host.there = ["a", "c"]
            desk.host.faults["open", "a"] = ConnectionError("gone")
            await desk.new_replicas()
            assert places(desk) == ["c"]
            await desk.new_replicas()  # a failed start is repeated
            assert places(desk) == ["a", "c"]

    async def test_a_replica_that_does_not_answer_a_ping_is_lost(self):
        often = dataclasses.replace(TIMEOUTS, silence=1e-9)
        async with serving("a", "b", timeouts=often) as desk:
            desk.host.faults["ping", "b"] = ConnectionError("gone")
            await turns()

            await desk.pool.look()
            await turns()

            assert ("ping", "a") in desk.host.log
            assert ("close", "b") in desk.host.log

    async def test_calls_fail_if_there_will_be_no_place(self):
        async with serving("a", there=ChannelError("closed")) as desk:
            waiting = desk.call(1)

            with pytest.raises(ChannelError, match="closed"):
                await values(waiting)

    async def test_calls_that_come_too_late_say_that_it_was_closed(self):
        async with serving("a") as desk:
            desk.dispatcher.close()
            await desk.pool.close(wait=True)
            await turns()

            with pytest.raises(RunError, match="the predictor was closed"):
                await values(desk.call(1))


async def test_a_model_is_sent_before_replicas_open_as_idle_replicas_close():
    async with serving("a", "b") as desk:
        assert desk.host.log_as_sent == [[]]
        assert [place for _, place, *_ in desk.host.log[:2]] == ["a", "b"]


class TestSwap:
    async def test_all_replicas_stage_the_model_before_the_first_uses_it(self):
        async with serving("a", "b") as desk:
            desk.host.log.clear()

            await desk.pool.swap(MODEL)

            assert desk.host.log == [
                *(("stage", "a", 2), ("stage", "b", 2)),
                *(("use", "a", 2), ("use", "b", 2)),
            ]

    async def test_a_model_that_one_replica_refuses_is_used_by_none(self):
        async with serving("a", "b") as desk:
            desk.host.faults["stage", "b"] = ModelFailure(
                "no module named nets", "Trace"
            )
            desk.host.log.clear()

            with pytest.raises(ModelError, match="on b: no module named nets"):
                await desk.pool.swap(MODEL)

            assert desk.host.log[-2:] == [("use", "a", 1), ("use", "b", 1)]
            await desk.pool.swap(MODEL)
            assert [replica.version for replica in desk.pool.ready] == [2, 2]

    @pytest.mark.parametrize(
        ("verb", "fault"),
        [("stage", ConnectionError("gone")), ("use", asyncio.Event())],
        ids=["lost", "hangs"],
    )
    async def test_a_replica_that_is_lost_meanwhile_does_not_stop_it(self, verb, fault):
        impatient = dataclasses.replace(TIMEOUTS, data=0.01, request=0.01)
        async with serving("a", "b", timeouts=impatient) as desk:
            desk.host.faults[verb, "a"] = fault

            await desk.pool.swap(MODEL)
            assert places(desk) == ["b"]
            await desk.new_replicas()

            assert [replica.version for replica in desk.pool.ready] == [2, 2]

    async def test_a_replica_that_starts_meanwhile_gets_the_new_model(self):
        async with serving("a", "b") as desk:
            lose(desk, "a")
            slow = desk.host.faults["use", "a"] = asyncio.Event()
            await desk.pool.look()
            await turns()

            await desk.pool.swap(MODEL)
            slow.set()
            await desk.new_replicas()

            assert [replica.version for replica in desk.pool.ready] == [2, 2]
            assert ("use", "a", 2) in desk.host.log


class Handlers(dict):
    """Sets an event when one is removed."""

    def __init__(self):
        self.gone = asyncio.Event()

    def pop(self, name, default=None):
        self.gone.set()
        return super().pop(name, default)


async def opened(silence_s):
    """A worker with a replica."""
    state = SimpleNamespace(nthreads=1)
    worker = SimpleNamespace(handlers=Handlers(), extensions={}, state=state)
    await start_server("replica", 1, None, "cpu", silence_s, dask_worker=worker)
    return worker


async def requested(worker, call, payload=None):
    request = worker.handlers["replica"]
    return await request(call=call, version=1, payload=payload, wait=False)


class TestOnAWorker:
    async def test_a_replica_closes_when_its_client_is_silent(self):
        worker = await opened(silence_s=0.001)

        await soon(worker.handlers.gone.wait())

        assert not worker.handlers
        assert not worker.extensions

    async def test_a_replica_stays_open_while_it_computes(self):
        GATE.clear()
        worker = await opened(silence_s=0.001)
        payload = wrap(PackedModel(Gated()).payload)
        answer = asyncio.create_task(requested(worker, "stage", payload=payload))
        for _ in range(3):
            await asyncio.to_thread(GATE.wait, 0.002)
        assert worker.handlers

        GATE.set()

        assert (await soon(answer))["status"] == "ok"
        await soon(worker.handlers.gone.wait())

    async def test_a_replica_stops_with_its_worker(self):
        worker = await opened(silence_s=1000.0)

        for extension in worker.extensions.values():
            await extension.close()

        assert (await requested(worker, "ask"))["status"] == "unknown"
