"""How a replica's messages leave: queues and their bounds, pace, retries, the meter."""

import asyncio
import contextlib
import dataclasses
import gc
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.protocol import MESSAGE_BYTES
from daskdl.channel.transport import (
    CLOCK,
    Connection,
    Outbox,
    RetransmitBuffer,
    SendLoop,
    is_listening,
)
from daskdl.channel.worker import KeptSums, ReplicaEndpoint
from daskdl.config import Bound
from daskdl.errors import ChannelError, WaitTimeoutError
from tests.support.run_states import EACH, GRID, SPEC, TIMEOUTS, filled, update

# ---- outboxes


def box_of(*messages, limit_bytes=10**12):
    box = Outbox(limit_bytes)
    for message in messages:
        box.append(message)
    return box


def test_an_outbox_has_room_up_to_its_bound_exactly():
    box = box_of(update(3, 1), limit_bytes=2 * EACH)

    assert box.has_room(EACH)
    assert not box.has_room(EACH + 1)

    box.append(update(3, 2))

    assert box.nbytes == 2 * EACH
    assert not box.has_room(1)


def test_an_empty_outbox_has_room_for_one_message_of_any_size():
    box = Outbox(EACH)
    assert box.has_room(10**9)

    box.append(update(3, 1, nbytes=10**9))

    assert not box.has_room(1)


def test_appended_messages_may_exceed_the_bound_and_delivered_ones_make_room():
    dropped = []
    box = box_of(update(3, 1), update(4, 2), update(3, 3), limit_bytes=EACH)
    box.on_drop = lambda: dropped.append(box.nbytes)
    assert (box.nbytes, box.bytes_of(3)) == (3 * EACH, 2 * EACH)

    box.drop(3)

    assert dropped == [0]
    assert (box.bytes_of(3), box.bytes_of(4)) == (0, 0)
    assert box.has_room(EACH)


@pytest.mark.parametrize(("limit", "count"), [(0, 1), (2 * EACH, 2), (3 * EACH - 1, 2)])
def test_a_batch_has_the_oldest_up_to_its_bound_and_at_least_one(limit, count):
    box = box_of(*(update(3, sequence) for sequence in range(1, 5)))

    batch = [message.sequence for message in box.head(limit)]

    assert batch == [*range(1, count + 1)]


# ---- send loops

PATIENCE_S = 20
NEVER = asyncio.Event  # a request that waits for one of these is never answered


class Receiver:
    """The other end: its requests, and its answers in order.

    An answer is the number of accepted messages (None: all), an exception, or an event
    to wait for before all are accepted. After the last answer all are accepted.
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = asyncio.Queue()
        self.in_flight = self.most_in_flight = 0

    async def send(self, messages):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.requests.put_nowait([message.sequence for message in messages])
        try:
            answer = self.answers.pop(0) if self.answers else None
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, asyncio.Event):
                await answer.wait()
                answer = None
            return len(messages) if answer is None else answer
        finally:
            self.in_flight -= 1

    async def request(self):
        return await asyncio.wait_for(self.requests.get(), PATIENCE_S)


@contextlib.asynccontextmanager
async def sending(box, receiver, *, pace_s=0.0, timeout_s=5.0):
    loop = SendLoop(
        box,
        receiver.send,
        pace_s=pace_s,
        beat_s=PATIENCE_S,
        bound=Bound(timeout_s, ("request",)),
        destination="replica 7",
    )
    box.on_append = loop.wake
    loop.wake()
    task = asyncio.ensure_future(loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_one_request_is_in_flight_and_later_messages_go_together():
    async def body():
        answered = asyncio.Event()
        box, receiver = box_of(update(3, 1)), Receiver(answered)
        async with sending(box, receiver):
            assert await receiver.request() == [1]
            box.append(update(3, 2))
            box.append(update(3, 3))
            assert receiver.requests.empty()
            answered.set()
            assert await receiver.request() == [2, 3]
        assert receiver.most_in_flight == 1

    asyncio.run(body())


@pytest.mark.parametrize("lost", [NEVER, OSError("reset")], ids=["silent", "broken"])
def test_a_request_without_an_answer_is_sent_once_more(lost):
    async def body():
        answer = lost() if lost is NEVER else lost
        box, receiver = box_of(update(3, 1)), Receiver(answer)
        async with sending(box, receiver, timeout_s=0.05):
            assert await receiver.request() == [1]
            assert await receiver.request() == [1]
            box.append(update(3, 2))
            assert await receiver.request() == [2]

    asyncio.run(body())


def test_two_lost_answers_are_an_error_that_names_the_destination_and_the_backlog():
    async def body():
        box = box_of(update(3, 1), update(3, 2))
        async with sending(box, Receiver(NEVER(), NEVER()), timeout_s=0.02) as task:
            with pytest.raises(WaitTimeoutError) as caught:
                await asyncio.wait_for(task, PATIENCE_S)
        assert str(caught.value) == (
            "replica 7 did not answer within 0.02 s (daskdl.timeouts.request), 2 "
            f"times; 2 messages ({2 * EACH} bytes) are queued; it never answered before"
        )

    asyncio.run(body())


def test_a_destination_that_cannot_be_reached_twice_is_an_error():
    async def body():
        receiver = Receiver(OSError("first"), OSError("second"))
        async with sending(box_of(update(3, 1)), receiver) as task:
            with pytest.raises(OSError, match="second"):
                await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(body())


def test_the_send_loop_backs_off_while_the_destination_is_full(monkeypatch):
    pauses, sleep = [], asyncio.sleep

    async def noted(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)

    async def body():
        receiver = Receiver(*[0] * 6, 1)
        box = box_of(*(update(3, sequence) for sequence in range(3)))
        async with sending(box, receiver, pace_s=1.0):
            for _ in range(8):
                await receiver.request()

    asyncio.run(body())
    assert pauses[:7] == [2, 4, 8, 16, 16, 16, 1]


# ---- the event loop and the scheduler


@pytest.fixture
def transport():
    """That of a worker whose event loop stands still until the end of the test."""
    loop = asyncio.new_event_loop()
    yield SimpleNamespace(loop=loop, clock=CLOCK)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_the_wait_for_an_event_loop_that_hangs_is_bounded(transport):
    timeouts = dataclasses.replace(TIMEOUTS, request=0.05)
    spec = dataclasses.replace(SPEC, timeouts=timeouts)
    sums = KeptSums(spec.inbox_bytes, spec.timeouts.request)
    endpoint = ReplicaEndpoint(transport, spec, sums)

    with pytest.raises(WaitTimeoutError, match=r"0\.05 s .* event loop of its own"):
        endpoint.start_from_snapshot({}, GRID, {})


def test_each_answer_of_the_scheduler_counts_as_news():
    now = [10.0]
    clock = SimpleNamespace(now=lambda: now[0])
    connection = Connection(SimpleNamespace(loop=None, clock=clock), SPEC, print)
    now[0] += 5.0
    silent_s = connection.since_answer_s()

    connection.checked({"status": "ok"})

    assert (silent_s, connection.since_answer_s()) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("gone"), ChannelError, "the scheduler cannot be reached: gone"),
        (WaitTimeoutError("too late"), WaitTimeoutError, "too late"),
        (KeyError(7), ChannelError, "a task of the channel failed: KeyError(7)"),
    ],
    ids=["gone", "silent", "bug"],
)
def test_a_task_that_fails_ends_every_wait(transport, error, kind, message):
    inbox = filled()
    connection = Connection(transport, SPEC, inbox.stop)

    async def lost():
        raise error

    asyncio.run(connection.guard(lost))

    assert type(connection.failure) is kind
    assert inbox.stopped == str(connection.failure) == message


def test_a_task_that_is_cancelled_before_it_begins_leaves_nothing(transport, recwarn):
    async def forever():
        await asyncio.Event().wait()

    async def body():
        connection = Connection(transport, SPEC, filled().stop)
        task = asyncio.ensure_future(connection.guard(forever))
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(body())
    gc.collect()

    assert [warning.message for warning in recwarn] == []  # "was never awaited"


# ---- retransmission


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 150)),
        max_size=40,
    ),
    st.integers(0, 2000),
)
def test_the_latest_updates_that_fit_are_kept_once(updates, limit_bytes):
    buffer, expected = RetransmitBuffer(limit_bytes), []

    for origin, sequence, nbytes in updates:
        message = update(origin, sequence, nbytes=nbytes)
        buffer.keep(message)
        if nbytes + MESSAGE_BYTES <= limit_bytes and not [
            m for m in expected if m[1:3] == message[1:3]
        ]:
            expected.append(message)
        while sum(m.nbytes + MESSAGE_BYTES for m in expected) > limit_bytes:
            expected.pop(0)

    messages = [message for o in range(3) for message in buffer.find(o, range(1, 7))]
    assert messages == sorted(expected, key=lambda message: message[1:3])
    assert buffer.nbytes == sum(m.nbytes + MESSAGE_BYTES for m in expected)
    assert len(buffer) == len(expected)


def test_a_buffer_that_evicts_nothing_accepts_one_update_of_any_size():
    buffer = RetransmitBuffer(limit_bytes=0, evicts=False)

    assert buffer.has_room()
    buffer.keep(update(0, 1))
    assert not buffer.has_room()


def test_an_acknowledged_update_is_kept_no_more():
    buffer = RetransmitBuffer(limit_bytes=1, evicts=False)
    for sequence in (1, 2, 3):
        buffer.keep(update(0, sequence))

    assert [buffer.acknowledge(sequence) for sequence in (2, 2)] == [True, False]
    assert [message.sequence for message in buffer.find(0, [1, 2, 3])] == [3]
    assert buffer.acknowledge(3)
    assert buffer.has_room()


# ---- whether a process listens at an address is asked of its operating system, at once


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_closed_port_does_not_listen(scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        before = asyncio.run(is_listening(address, 5))

    assert before
    assert not asyncio.run(is_listening(address, 5))


def test_a_host_without_an_answer_in_time_does_not_listen(monkeypatch):
    async def silence(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silence)

    assert not asyncio.run(is_listening("tcp://127.0.0.1:1", 0.01))


def test_an_address_that_cannot_be_checked_may_listen():
    assert asyncio.run(is_listening("inproc://127.0.0.1/1/1", 5))
