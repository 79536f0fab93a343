import asyncio
import dataclasses

import pytest

from daskdl.config import Bound
from daskdl.errors import ChannelError, ModelError, OptionError, WaitTimeoutError
from daskdl.inference.batching import Failure
from daskdl.inference.pool import Crew, within
from tests.contract.test_serving_dispatcher import on_a_loop
from tests.support.replicas import MODEL, TIMEOUTS, FakeGround, soon, turns

NEW = MODEL


class Watched:
    """A crew, and what it says."""

    def __init__(self, ground, wanted, timeouts=TIMEOUTS):
        self.ground = ground
        self.crew = Crew(ground, MODEL, wanted, timeouts)
        self.said = []
        self.crew.lost = lambda replica: self.said.append(f"lost {replica.place}")
        self.crew.changed = lambda: self.said.append("changed")
        self.crew.ended = lambda error: self.said.append(error)

    async def __aenter__(self):
        await self.crew.open()
        return self

    async def __aexit__(self, *error):
        await self.crew.close(wait=True)

    def places(self):
        return sorted(replica.place for replica in self.crew.ready)

    async def look(self):
        await self.crew.look()
        started = list(self.crew._starting)
        await soon(asyncio.gather(*started, return_exceptions=True))
        await turns()


def watched(*places, wanted=2, timeouts=TIMEOUTS):
    return Watched(FakeGround(*places), wanted, timeouts)


@on_a_loop
async def test_replicas_are_spread_over_the_places():
    async with watched("a", "b", wanted=3) as own:
        assert own.places() == ["a", "a", "b"]
        assert own.ground.log.count(("use", "a", 1)) == 2


@on_a_loop
async def test_all_go_in_the_end():
    async with watched("a", "b") as own:
        pass

    assert [entry for entry in own.ground.log if entry[0] == "close"] == [
        ("close", "a"),
        ("close", "b"),
    ]
    assert own.crew.ready == []


@on_a_loop
async def test_without_a_place_nothing_is_opened():
    with pytest.raises(OptionError, match="the cluster has no workers; wait for some"):
        await watched().crew.open()


@on_a_loop
async def test_a_model_that_cannot_be_used_is_refused_and_nothing_stays():
    own = watched("a", "b")
    own.ground.faults["stage", "b"] = Failure("no module named nets", "Traceback")

    with pytest.raises(ModelError, match="cannot be used on b: no module named nets"):
        await own.crew.open()
    await own.crew.close(wait=True)

    assert {entry for entry in own.ground.log if entry[0] == "close"} == {
        ("close", "a"),
        ("close", "b"),
    }


@on_a_loop
async def test_one_that_is_just_being_made_goes_too():
    async with watched("a", "b") as own:
        own.crew.lose(own.crew.ready[0], "it hangs")
        slow = own.ground.faults["open", "a"] = asyncio.Event()
        await own.crew.look()
        await turns()
        closing = asyncio.create_task(own.crew.close(wait=True))
        await turns()
        own.ground.log.clear()

        slow.set()
        await soon(closing)

    assert ("close", "a") in own.ground.log


@on_a_loop
async def test_one_that_is_made_too_late_goes():
    impatient = dataclasses.replace(TIMEOUTS, join=0.01)
    own = watched("a", wanted=1, timeouts=impatient)
    slow = own.ground.faults["open", "a"] = asyncio.Event()
    with pytest.raises(WaitTimeoutError, match=r"no replica was made on a .*\.join"):
        await own.crew.open()

    slow.set()
    await own.crew.close(wait=True)

    assert own.ground.log == [("close", "a")]


@on_a_loop
async def test_a_replica_whose_place_is_gone_is_lost_and_another_started():
    async with watched("a", "b") as own:
        own.ground.there = ["b", "c"]

        await own.look()

        assert own.places() == ["b", "c"]
        assert own.said == ["changed", "changed", "lost a", "changed"]


@on_a_loop
async def test_no_place_gets_more_than_at_the_start_and_one_that_comes_gets_one():
    async with watched("a", "b") as own:
        own.ground.there = ["b"]
        await own.look()
        assert own.places() == ["b"]

        own.ground.there = ["b", "new"]
        await own.look()
        await own.look()

        assert own.places() == ["b", "new"]


@on_a_loop
async def test_one_that_is_lost_comes_back_where_the_fewest_were_lost():
    async with watched("a", "b") as own:
        own.ground.there = ["a", "b", "c"]
        replica = next(r for r in own.crew.ready if r.place == "a")

        own.crew.lose(replica, "it hangs")
        own.crew.lose(replica, "it hangs")  # twice is once
        await own.look()

        assert own.places() == ["b", "c"]
        assert own.said.count("lost a") == 1


@on_a_loop
async def test_a_start_that_fails_is_tried_again():
    async with watched("a", "b") as own:
        own.crew.lose(own.crew.ready[0], "it hangs")
        own.ground.faults["open", "a"] = ConnectionError("gone")
        await own.look()
        assert own.places() == ["b"]

        await own.look()

        assert own.places() == ["a", "b"]


@on_a_loop
async def test_replicas_hear_from_time_to_time_and_those_that_do_not_are_lost():
    often = dataclasses.replace(TIMEOUTS, silence=1e-9)
    async with watched("a", "b", timeouts=often) as own:
        own.ground.faults["hear", "b"] = ConnectionError("gone")
        await turns()
        own.ground.log.clear()

        await own.crew.look()
        await turns()

        assert ("hear", "a") in own.ground.log
        assert "lost b" in own.said


@on_a_loop
async def test_if_nobody_will_ever_be_there_that_is_said():
    async with watched("a") as own:

        async def places():
            raise ChannelError("the client is closed")

        own.ground.places = places
        own.crew._watching.cancel()
        own.crew._watching = asyncio.create_task(own.crew._watch())
        own.crew._watching.add_done_callback(own.crew._watched)
        await soon(asyncio.wait({own.crew._watching}))
        await turns()

        assert isinstance(own.said[-1], ChannelError)


# ---- another model


@on_a_loop
async def test_a_swap_stages_everywhere_before_the_first_takes_it():
    async with watched("a", "b") as own:
        own.ground.log.clear()

        await own.crew.swap(NEW)

        assert own.ground.log == [
            ("stage", "a", 2),
            ("stage", "b", 2),
            ("use", "a", 2),
            ("use", "b", 2),
        ]
        assert [replica.version for replica in own.crew.ready] == [2, 2]


@on_a_loop
async def test_a_model_that_one_refuses_is_taken_by_none():
    async with watched("a", "b") as own:
        own.ground.faults["stage", "b"] = Failure("no module named nets", "Traceback")
        own.ground.log.clear()

        with pytest.raises(ModelError, match="on b: no module named nets"):
            await own.crew.swap(NEW)

        assert ("use", "a", 2) not in own.ground.log
        assert own.ground.log[-2:] == [("discard", "a"), ("discard", "b")]
        await own.crew.swap(NEW)
        assert [replica.version for replica in own.crew.ready] == [2, 2]


@pytest.mark.parametrize("verb", ["stage", "use"])
def test_a_replica_that_is_lost_in_a_swap_does_not_stop_it(verb):
    async def check():
        async with watched("a", "b") as own:
            own.ground.faults[verb, "a"] = ConnectionError("gone")

            await own.crew.swap(NEW)
            await own.look()

            assert [r.version for r in own.crew.ready] == [2, 2]
            assert "lost a" in own.said

    asyncio.run(check())


@on_a_loop
async def test_a_replica_that_starts_during_a_swap_has_the_new_model():
    async with watched("a", "b") as own:
        own.crew.lose(own.crew.ready[0], "it hangs")
        slow = own.ground.faults["use", "a"] = asyncio.Event()
        await own.crew.look()
        await turns()

        await own.crew.swap(NEW)
        slow.set()
        await soon(asyncio.gather(*own.crew._starting))

        assert [replica.version for replica in own.crew.ready] == [2, 2]
        assert ("use", "a", 2) in own.ground.log


@on_a_loop
async def test_a_replica_that_does_not_take_the_model_in_time_is_lost():
    impatient = dataclasses.replace(TIMEOUTS, request=0.01)
    async with watched("a", "b", timeouts=impatient) as own:
        own.ground.faults["use", "a"] = asyncio.Event()

        await own.crew.swap(NEW)

        assert "lost a" in own.said
        assert own.places() == ["b"]


@on_a_loop
async def test_a_replica_that_does_not_start_in_time_is_said():
    impatient = dataclasses.replace(TIMEOUTS, data=0.01)
    own = watched("a", wanted=1, timeouts=impatient)
    own.ground.faults["stage", "a"] = asyncio.Event()

    with pytest.raises(WaitTimeoutError, match=r"was not on a within .*timeouts\.data"):
        await own.crew.open()
    await own.crew.close(wait=True)


@on_a_loop
async def test_what_is_not_waited_for_any_more_is_cancelled():
    doing = asyncio.get_running_loop().create_future()

    with pytest.raises(WaitTimeoutError, match=r"it came not within 0\.01 s"):
        await within(doing, Bound(0.01, ("request",)), "it came not")

    assert doing.cancelled()
