import asyncio
import dataclasses

import pytest

from daskdl.errors import ModelError, ReplicaError, RunError, WaitTimeoutError
from tests.support.replicas import TIMEOUTS, serving, soon, turns, values


def on_a_loop(test):
    """Run a coroutine as a test."""

    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_who_calls_alone_waits_for_nobody():
    async with serving("a") as desk:
        answer = desk.call(1)

        (await desk.asked()).answer()

        assert await values(answer) == [10]


@on_a_loop
async def test_calls_that_come_meanwhile_are_joined_and_each_gets_its_own_rows():
    async with serving("a") as desk:
        first = desk.call(1)
        others = [desk.call(2, 3), desk.call(4, 5)]
        (await desk.asked()).answer()
        joined = await desk.asked()
        joined.answer()

        assert joined.values == [2, 3, 4, 5]
        assert await values(first) == [10]
        assert [await values(other) for other in others] == [[20, 30], [40, 50]]


@on_a_loop
async def test_answers_share_no_memory():
    async with serving("a") as desk:
        desk.call(1)
        one, other = desk.call(2, 2), desk.call(3, 3)
        (await desk.asked()).answer()
        (await desk.asked()).answer()

        (await soon(asyncio.wrap_future(one)))[:] = 0

        assert await values(other) == [30, 30]
        assert one.result().base is None


@on_a_loop
async def test_a_crowd_is_waited_for_until_all_are_there():
    async with serving("a") as desk:
        desk.call(1)
        desk.call(2)  # two are there at once
        (await desk.asked()).answer()
        await turns()
        assert desk.ground.made[0].asked.empty()

        desk.call(3)

        assert (await desk.asked()).values == [2, 3]


@on_a_loop
async def test_a_call_waits_for_others_no_longer_than_it_should():
    async with serving("a", wait_s=0.001) as desk:
        desk.call(1)
        desk.call(2)
        first, second = await desk.asked(), await desk.asked()

        assert (first.values, second.values) == ([1], [2])


@on_a_loop
async def test_batches_go_to_the_replica_with_the_fewest():
    async with serving("a", "b") as desk:
        desk.call(1)
        desk.call(2)

        first, second = await desk.asked(0), await desk.asked(1)
        second.answer()
        await turns()
        desk.call(3, 4, 5, 6)

        assert (first.values, second.values) == ([1], [2])
        assert (await desk.asked(1)).values == [3, 4, 5, 6]


@on_a_loop
async def test_a_replica_has_two_batches_at_most_and_the_others_wait():
    async with serving("a") as desk:
        for first in range(0, 12, 4):
            desk.call(*range(first, first + 4))
        batches = [await desk.asked(), await desk.asked()]
        await turns()
        assert desk.ground.made[0].asked.empty()

        batches[0].answer()

        assert (await desk.asked()).values == [8, 9, 10, 11]


@on_a_loop
async def test_a_model_that_fails_fails_for_the_call_that_made_it_and_no_other():
    async with serving("a") as desk:
        desk.call(0)
        calls = [desk.call(1), desk.call(2), desk.call(3), desk.call(4)]
        (await desk.asked()).answer()
        (await desk.asked()).refuse()
        for _ in calls:
            batch = await desk.asked()
            assert len(batch.x) == 1
            if batch.values == [2]:
                batch.refuse("ValueError: two is too much")
            else:
                batch.answer()

        assert await values(calls[0]) == [10]
        assert await values(calls[2]) == [30]
        assert await values(calls[3]) == [40]
        with pytest.raises(ModelError, match=r"on 1 rows, X: .* two is too") as error:
            await values(calls[1])
        assert "Traceback: ..." in error.value.__notes__[0]


@on_a_loop
async def test_what_a_lost_replica_had_goes_to_another_one():
    async with serving("a", "b") as desk:
        calls = [desk.call(1), desk.call(2)]
        (await desk.asked(1)).answer()
        (await desk.asked(0)).lose()

        (await desk.asked(1)).answer()

        assert [await values(call) for call in calls] == [[10], [20]]
        assert [replica.place for replica in desk.crew.ready] == ["b"]
        assert ("close", "a") in desk.ground.log


@on_a_loop
async def test_a_second_batch_of_a_lost_replica_is_not_waited_for():
    async with serving("a") as desk:
        calls = [desk.call(1, 2, 3, 4), desk.call(5, 6, 7, 8)]
        lost, _ = await desk.asked(), await desk.asked()
        lost.lose()
        await turns()
        await desk.new_replicas()

        for _ in calls:
            (await desk.asked(1)).answer()

        assert await values(calls[0]) == [10, 20, 30, 40]
        assert await values(calls[1]) == [50, 60, 70, 80]


@on_a_loop
async def test_what_a_hanging_replica_has_goes_to_another_one():
    impatient = dataclasses.replace(TIMEOUTS, request=0.01)
    async with serving("a", "b", timeouts=impatient) as desk:
        answer = desk.call(1)
        await desk.asked(0)

        (await desk.asked(1)).answer()

        assert await values(answer) == [10]


@on_a_loop
async def test_a_call_that_ends_every_replica_is_given_up_and_no_other_with_it():
    async with serving("a") as desk:
        desk.call(0)
        bad, *others = [desk.call(value) for value in (666, 1, 2, 3)]
        replica, batches = 0, []
        while not (bad.done() and all(other.done() for other in others)):
            batches.append(await desk.asked(replica))
            if 666 not in batches[-1].values:
                batches[-1].answer()
                await turns()
                continue
            batches[-1].lose()
            await turns()
            await desk.new_replicas()
            replica += 1

        with pytest.raises(ReplicaError, match="4 times, at last: connection lost; is"):
            await values(bad)
        assert [await values(other) for other in others] == [[10], [20], [30]]
        fatal = [batch.values for batch in batches if 666 in batch.values]
        assert fatal == [[666, 1, 2, 3], [666, 1, 2, 3], [666], [666]]


@on_a_loop
async def test_without_a_replica_calls_wait_for_one_and_then_for_none():
    hopeless = dataclasses.replace(TIMEOUTS, rejoin=0.01)
    async with serving("a", timeouts=hopeless) as desk:
        waiting = desk.call(1)
        (await desk.asked()).lose()
        with pytest.raises(WaitTimeoutError, match=r"no replica is left.*\.rejoin"):
            await values(waiting)

        later = desk.call(2)
        with pytest.raises(WaitTimeoutError, match="no replica is left"):
            await values(later)
        await desk.new_replicas()
        again = desk.call(3)
        (await desk.asked(1)).answer()

        assert await values(again) == [30]


@on_a_loop
async def test_calls_wait_for_a_replica_that_comes_back():
    async with serving("a") as desk:
        waiting = desk.call(1)
        (await desk.asked()).lose()
        await turns()
        await desk.new_replicas()

        (await desk.asked(1)).answer()

        assert await values(waiting) == [10]


@on_a_loop
async def test_a_call_that_was_cancelled_is_not_asked_and_makes_room():
    async with serving("a", queue=4) as desk:
        desk.call(0)
        cancelled = desk.call(1)
        cancelled.cancel()
        desk.call(2, 3, 4)
        (await desk.asked()).answer()

        assert (await desk.asked()).values == [2, 3, 4]
        desk.room.enter(4)


@on_a_loop
async def test_only_what_waits_for_a_replica_takes_room():
    async with serving("a", queue=4) as desk:
        desk.call(1, 2, 3, 4)
        desk.call(5, 6, 7, 8)
        desk.call(9, 10, 11, 12)
        for _ in range(2):
            (await desk.asked()).answer()
        await desk.asked()

        desk.room.enter(4)


@on_a_loop
async def test_closing_fails_whoever_waits():
    async with serving("a") as desk:
        waiting = [desk.call(1), desk.call(2)]
        await desk.asked()

        desk.dispatcher.close()
        late = desk.call(3)

        for call in (*waiting, late):
            with pytest.raises(RunError, match="closed before this call was answered"):
                await values(call)
        desk.room.enter(100)


@on_a_loop
async def test_draining_answers_whoever_waits_and_nobody_else():
    async with serving("a") as desk:
        waiting = [desk.call(1), desk.call(2)]
        draining = asyncio.create_task(desk.dispatcher.drain(10.0))
        await turns()
        late = desk.call(3)
        for _ in waiting:
            (await desk.asked()).answer()
        await soon(draining)

        assert [await values(call) for call in waiting] == [[10], [20]]
        with pytest.raises(RunError, match="the predictor is closed"):
            await values(late)


@on_a_loop
async def test_draining_ends_though_a_replica_does_not_answer():
    async with serving("a") as desk:
        waiting = desk.call(1)
        await soon(desk.dispatcher.drain(0.01))

        assert not waiting.done()


@on_a_loop
async def test_nobody_waits_for_ever_because_of_a_fault_of_ours():
    async with serving("a") as desk:
        answer = desk.call(1)
        (await desk.asked()).outcome.set_result("nonsense")

        with pytest.raises(AttributeError):
            await values(answer)
