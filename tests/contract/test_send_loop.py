"""Requests of a send loop: their pace, and answers that are lost."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from daskdl.channel.protocol import MESSAGE_BYTES, Message, MessageKind
from daskdl.channel.sender import Outbox, SendLoop
from daskdl.config import Bound
from daskdl.errors import WaitTimeoutError

PATIENCE_S = 20
NEVER = asyncio.Event  # a request that waits for one of these is never answered


def update(sequence, nbytes=100):
    return Message(MessageKind.UPDATE.value, 3, sequence, 0, nbytes)


class Receiver:
    """The other end: what it was asked, and what it answers, in order.

    An answer is how many items it takes (None: all), an exception, or an event to
    wait for before it takes all. After the last answer it takes all.
    """

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests: asyncio.Queue[list[int]] = asyncio.Queue()
        self.times: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def send(self, items: Sequence[Message]) -> int:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.times.append(asyncio.get_running_loop().time())
        self.requests.put_nowait([item.sequence for item in items])
        try:
            return await self._answer(items)
        finally:
            self.in_flight -= 1

    async def _answer(self, items: Sequence[Message]) -> int:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = None
        return len(items) if answer is None else answer

    async def request(self) -> list[int]:
        return await asyncio.wait_for(self.requests.get(), PATIENCE_S)


def box_of(*items):
    box = Outbox(10**12)
    for item in items:
        assert box.offer(item)
    return box


@contextlib.asynccontextmanager
async def pumping(box, receiver, *, pace_s=0.0, beat_s=PATIENCE_S, timeout_s=5.0):
    pump = SendLoop(
        box,
        receiver.send,
        pace_s=pace_s,
        beat_s=beat_s,
        bound=Bound(timeout_s, ("request",)),
        destination="replica 7",
    )
    box.on_offer = pump.wake
    pump.wake()
    task = asyncio.ensure_future(pump.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_one_request_is_in_flight_and_what_comes_meanwhile_goes_together():
    async def body():
        answered = asyncio.Event()
        box, receiver = box_of(update(1)), Receiver(answered)
        async with pumping(box, receiver):
            assert await receiver.request() == [1]
            box.offer(update(2))
            box.offer(update(3))
            assert receiver.requests.empty()
            answered.set()
            assert await receiver.request() == [2, 3]
        assert receiver.most_in_flight == 1

    asyncio.run(body())


@pytest.mark.parametrize("lost", [NEVER, OSError("reset")], ids=["silent", "broken"])
def test_a_lost_answer_is_asked_for_once_more_with_the_same_items(lost):
    async def body():
        answer = lost() if lost is NEVER else lost
        box, receiver = box_of(update(1)), Receiver(answer)
        async with pumping(box, receiver, timeout_s=0.05):
            assert await receiver.request() == [1]
            assert await receiver.request() == [1]
            box.offer(update(2))
            assert await receiver.request() == [2]

    asyncio.run(body())


def test_two_lost_answers_are_an_error_that_says_who_and_what_waits():
    async def body():
        box = box_of(update(1), update(2))
        async with pumping(box, Receiver(NEVER(), NEVER()), timeout_s=0.02) as task:
            with pytest.raises(WaitTimeoutError) as caught:
                await asyncio.wait_for(task, PATIENCE_S)
        waiting = 2 * (100 + MESSAGE_BYTES)
        assert str(caught.value) == (
            "replica 7 did not answer within 0.02 s (daskdl.timeouts.request), 2 "
            f"times, to 2 items ({waiting} bytes waiting); it never answered before"
        )

    asyncio.run(body())


def test_one_that_is_woken_and_cancelled_at_once_ends():
    async def body():
        async with pumping(box_of(), receiver := Receiver()) as task:
            assert await receiver.request() == []
            await asyncio.sleep(0)
            pump = task.get_coro().cr_frame.f_locals["self"]
            pump.wake()
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.cancelled()

    asyncio.run(body())


def test_who_answered_before_is_said_to_have_and_when():
    async def body():
        box = box_of(update(1))
        receiver = Receiver(1, NEVER(), NEVER())
        async with pumping(box, receiver, timeout_s=0.02) as task:
            await receiver.request()
            box.offer(update(2))
            with pytest.raises(WaitTimeoutError) as caught:
                await asyncio.wait_for(task, PATIENCE_S)
        assert re.search(r"; its last answer was \d+\.\d s ago$", str(caught.value))

    asyncio.run(body())


def test_a_destination_that_cannot_be_reached_twice_is_an_error():
    async def body():
        receiver = Receiver(OSError("first"), OSError("second"))
        async with pumping(box_of(update(1)), receiver) as task:
            with pytest.raises(OSError, match="second"):
                await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(body())


def test_another_error_is_not_tried_again():
    async def body():
        receiver = Receiver(ValueError("refused"))
        async with pumping(box_of(update(1)), receiver) as task:
            with pytest.raises(ValueError, match="refused"):
                await asyncio.wait_for(task, PATIENCE_S)
        assert receiver.requests.qsize() == 1

    asyncio.run(body())


def test_requests_keep_their_distance():
    async def body():
        box, receiver = box_of(update(1), update(2), update(3)), Receiver(1, 1, 1)
        async with pumping(box, receiver, pace_s=0.03):
            for _ in range(3):
                await receiver.request()
        gaps = [later - former for former, later in pairwise(receiver.times)]
        assert min(gaps) >= 0.029  # a clock tick less than the pace

    asyncio.run(body())


def test_a_full_destination_is_asked_less_and_less_often_until_it_takes_something():
    async def body():
        box, receiver = box_of(update(1), update(2)), Receiver(0, 0, 1, 1)
        async with pumping(box, receiver, pace_s=0.02):
            for _ in range(4):
                await receiver.request()
        first, second, after = (b - a for a, b in pairwise(receiver.times))
        assert first >= 0.039
        assert second >= 0.079
        assert after < second

    asyncio.run(body())
