"""How a replica's messages leave: queues and their bounds, pace, retries, the meter."""

import asyncio
import contextlib
import dataclasses
import re
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel import routing
from daskdl.channel.protocol import MESSAGE_BYTES, ChannelSpec, Message, MessageKind
from daskdl.channel.routing import LinkMeter
from daskdl.channel.sender import Connection, Outbox, RetransmitBuffer, SendLoop
from daskdl.channel.worker import ReplicaEndpoint
from daskdl.config import Bound
from daskdl.errors import ChannelError, WaitTimeoutError
from tests.support.run_states import GRID, SIZE, TIMEOUTS, filled

EACH = 100 + MESSAGE_BYTES  # what one item of the tests weighs


def update(sequence, nbytes=100, origin=3):
    return Message(MessageKind.UPDATE.value, origin, sequence, 0, nbytes)


def test_items_are_taken_up_to_the_bound_exactly():
    box = Outbox(2 * EACH)

    accepted = [box.offer(update(sequence)) for sequence in (1, 2, 3)]

    assert accepted == [True, True, False]
    assert box.nbytes == 2 * EACH


def test_an_empty_box_takes_one_item_of_any_size():
    box = Outbox(EACH)

    assert box.has_room(10**9)
    assert box.offer(update(1, nbytes=10**9))
    assert not box.has_room(1)


def test_what_is_forced_is_taken_beyond_the_bound_and_what_arrived_makes_room():
    dropped, box = [], Outbox(2 * EACH)
    box.on_drop = lambda: dropped.append(box.nbytes)
    for sequence, origin in ((1, 3), (2, 4), (3, 3)):
        assert box.offer(update(sequence, origin=origin), force=True)
    assert (box.nbytes, box.bytes_of(3)) == (3 * EACH, 2 * EACH)

    box.drop(2)

    assert dropped == [EACH]
    assert (box.bytes_of(3), box.bytes_of(4)) == (EACH, 0)
    assert box.offer(update(4))


@pytest.mark.parametrize(("limit", "count"), [(0, 1), (2 * EACH, 2), (3 * EACH - 1, 2)])
def test_a_request_takes_the_oldest_up_to_its_bound_and_one_at_least(limit, count):
    box = Outbox(10**9)
    for sequence in range(1, 5):
        box.offer(update(sequence))

    head = [message.sequence for message in box.head(limit)]

    assert head == [*range(1, count + 1)]


PATIENCE_S = 20
NEVER = asyncio.Event  # a request that waits for one of these is never answered


class Receiver:
    """The other end: what it was asked, and what it answers, in order.

    An answer is how many items it takes (None: all), an exception, or an event to
    wait for before it takes all. After the last answer it takes all.
    """

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests: asyncio.Queue[list[int]] = asyncio.Queue()
        self.in_flight = 0
        self.most_in_flight = 0

    async def send(self, items: Sequence[Message]) -> int:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
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


def test_a_destination_that_cannot_be_reached_twice_is_an_error():
    async def body():
        receiver = Receiver(OSError("first"), OSError("second"))
        async with pumping(box_of(update(1)), receiver) as task:
            with pytest.raises(OSError, match="second"):
                await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(body())


def test_a_full_destination_is_asked_less_and_less_often_until_it_takes_one(
    monkeypatch,
):
    pauses, sleep = [], asyncio.sleep

    async def noted(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)

    async def body():
        receiver = Receiver(*[0] * 6, 1)
        async with pumping(box_of(*map(update, range(3))), receiver, pace_s=1.0):
            for _ in range(8):
                await receiver.request()

    asyncio.run(body())
    assert pauses[:7] == [2, 4, 8, 16, 16, 16, 1]


def metered(nbytes=100):
    return Message(MessageKind.UPDATE.value, 3, 1, 0, nbytes)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 50.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(routing, "time", clock)
    return clock


def test_time_counts_while_a_request_with_frames_is_under_way(clock):
    meter = LinkMeter()

    with meter.request([metered()]):
        clock.now += 2.0
    clock.now += 10.0  # the pause
    with meter.request([metered()]):
        clock.now += 0.5

    assert meter.take(1).busy_s == 2.5


def test_requests_side_by_side_count_once_and_at_the_end_of_each(clock):
    meter = LinkMeter()

    first, second = meter.request([metered()]), meter.request([metered()])
    first.__enter__()
    clock.now += 1.0
    second.__enter__()
    clock.now += 2.0
    first.__exit__(None, None, None)
    half_way = meter.take(1)
    clock.now += 4.0
    second.__exit__(None, None, None)

    assert (half_way.busy_s, meter.take(1).busy_s) == (3.0, 4.0)


SPEC = ChannelSpec(7, 3, SIZE, GRID, 2**20, 2**20, TIMEOUTS)


@pytest.fixture
def loop():
    """One that stands still; at the end it does what it was asked to."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_an_event_loop_that_does_nothing_is_not_waited_for_without_end(loop):
    worker = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    bounds = dataclasses.replace(TIMEOUTS, request=0.05)
    link = ReplicaEndpoint(worker, dataclasses.replace(SPEC, timeouts=bounds))

    with pytest.raises(
        WaitTimeoutError,
        match=re.escape(
            "replica 3 waited 0.05 s (daskdl.timeouts.request) for the event loop of "
            "its own worker"
        ),
    ):
        link.begin({}, GRID)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("gone"), ChannelError, "the scheduler cannot be reached: gone"),
        (WaitTimeoutError("too late"), WaitTimeoutError, "too late"),
    ],
    ids=["gone", "silent"],
)
def test_every_wait_ends_with_an_error_of_daskdls_own(loop, error, kind, message):
    worker = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    inbox = filled()
    connection = Connection(worker, SPEC, inbox.stop)

    connection.fail(error)

    assert type(connection.failure) is kind
    assert inbox.stopped == str(connection.failure) == message


WEIGHT = 36 + MESSAGE_BYTES
KEYS = st.tuples(st.integers(0, 2), st.integers(1, 6))
KEPT = st.lists(st.tuples(KEYS, st.integers(0, 150)), max_size=40)


def kept_update(origin, sequence, nbytes=36, payload=None):
    return Message(MessageKind.UPDATE.value, origin, sequence, 0, nbytes, payload)


def ring_of(*keys, limit_bytes=10**6):
    ring = RetransmitBuffer(limit_bytes)
    for key in keys:
        ring.keep(kept_update(*key))
    return ring


def bytes_of(items):
    return sum(item.nbytes + MESSAGE_BYTES for item in items)


def kept(ring, origin, sequences=range(1, 10)):
    return [item.sequence for item in ring.find(origin, sequences)]


def test_one_larger_than_the_bound_is_not_kept_and_displaces_nothing():
    ring = ring_of((0, 1), limit_bytes=WEIGHT)

    ring.keep(kept_update(0, 2, 37))

    assert kept(ring, 0) == [1]
    assert ring.nbytes == WEIGHT


def test_one_that_is_here_counts_once_and_stays_as_old_as_it_is():
    ring = ring_of((0, 1), (0, 2), (0, 1), (0, 3), limit_bytes=2 * WEIGHT)

    assert kept(ring, 0) == [2, 3]
    assert ring.nbytes == 2 * WEIGHT


@given(KEPT, st.integers(0, 1000))
def test_it_holds_the_latest_that_fit_and_counts_them(updates, limit_bytes):
    ring, expected = RetransmitBuffer(limit_bytes), []

    for key, nbytes in updates:
        item = kept_update(*key, nbytes)
        ring.keep(item)
        if item.nbytes + MESSAGE_BYTES <= limit_bytes and key not in {
            i[1:3] for i in expected
        }:
            expected.append(item)
        while bytes_of(expected) > limit_bytes:
            expected.pop(0)

    held = [item for origin in range(3) for item in ring.find(origin, range(1, 7))]
    assert held == sorted(expected, key=lambda item: item[1:3])
    assert ring.nbytes == bytes_of(expected)
    assert len(ring) == len(expected)


def test_two_threads_lose_no_count():
    ring = RetransmitBuffer(50 * WEIGHT)

    def fill(origin):
        for sequence in range(1, 3000):
            ring.keep(kept_update(origin, sequence))
            ring.find(1 - origin, [sequence])

    threads = [threading.Thread(target=fill, args=(origin,)) for origin in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    held = [item for origin in (0, 1) for item in ring.find(origin, range(3000))]
    assert len(held) == len(ring)
    assert ring.nbytes == len(held) * WEIGHT <= 50 * WEIGHT


class TestUntilAcknowledged:
    def test_what_all_have_is_forgotten_and_nothing_else(self):
        ring = RetransmitBuffer(10**6, evicts=False)
        for sequence in (1, 2, 3):
            ring.keep(kept_update(0, sequence))

        assert [ring.acknowledge(2), ring.acknowledge(2)] == [True, False]

        assert kept(ring, 0) == [3]
        assert ring.nbytes == WEIGHT

    def test_one_of_any_size_is_taken_while_there_is_nothing(self):
        ring = RetransmitBuffer(1, evicts=False)

        assert ring.has_room()
        ring.keep(kept_update(0, 1))
        assert not ring.has_room()
