"""The bounds of queues are bounds on memory, not on frames alone."""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest
from distributed.protocol import dumps, loads

from daskdl import codec
from daskdl.channel.inbox import PendingUpdates
from daskdl.channel.merging import merged
from daskdl.channel.protocol import MESSAGE_BYTES, Message, copied, for_queue
from daskdl.channel.transport import Outbox, RetransmitBuffer
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES
from tests.support.processes import in_a_fork

BOUND = 2**19
SIZE = 2**24  # parameters
THRESHOLD = 2.0**-10
BATCH = 64  # messages in one request


def published():
    """Messages as the replica that makes them keeps them, with one entry each."""
    entries_K = np.array([SIZE // 2], np.int32)
    frame = codec.encode(codec.Stamp(1, 1, 1, 1), SIZE, THRESHOLD, entries_K)
    for sequence in itertools.count(1000):  # Python caches smaller numbers
        stamp = codec.Stamp(1, 1, sequence, sequence + 1)
        yield Message.update(stamp, sequence + 2, frame.nbytes, for_queue(frame.copy()))


def arrived(deserialize):
    """Messages as they come out of a request, in batches."""
    source = published()
    while True:
        sent = dumps({"items": [next(source).to_wire() for _ in range(BATCH)]})
        ends = np.cumsum([memoryview(frame).nbytes for frame in sent])
        view = memoryview(bytearray().join(sent))
        starts = [0, *ends[:-1]]
        frames = [view[a:b] for a, b in zip(starts, ends, strict=True)]
        request = loads(frames, deserialize=deserialize)
        for fields in request["items"]:
            message = Message.from_wire(fields)
            yield (
                message._replace(payload=copied(message.payload))
                if deserialize
                else message
            )


def fill_buffer(buffer, messages):
    """Until as many went through as stay, or there is no room."""
    for count, message in enumerate(messages, start=1):
        buffer.keep(message)
        if count == 2 * len(buffer) or not buffer.has_room():
            return


def fill_outbox(outbox, messages):
    for message in messages:
        if not outbox.has_room(message.nbytes + MESSAGE_BYTES):
            return
        outbox.append(message)


def fill_inbox(pending, messages):
    for count, message in enumerate(messages, start=1):
        pending.add(codec.decode(message.payload))
        if pending.nbytes + pending.nbytes // count >= BOUND:
            return


def from_worker():
    return arrived(deserialize=True)


def from_scheduler():
    return arrived(deserialize=False)


def unacknowledged():
    return RetransmitBuffer(BOUND, evicts=False)


QUEUES = {
    "recent updates of others": (
        lambda: RetransmitBuffer(BOUND),
        fill_buffer,
        from_worker,
        INBOX_BYTES,
    ),
    "own recent updates": (
        lambda: RetransmitBuffer(BOUND),
        fill_buffer,
        published,
        OUTBOX_BYTES,
    ),
    "own unacknowledged updates": (
        unacknowledged,
        fill_buffer,
        published,
        OUTBOX_BYTES,
    ),
    "outbox of a replica": (
        lambda: Outbox(BOUND),
        fill_outbox,
        published,
        OUTBOX_BYTES,
    ),
    "outbox of the scheduler": (
        lambda: Outbox(BOUND),
        fill_outbox,
        from_scheduler,
        RELAY_BYTES,
    ),
    "pending updates": (
        lambda: PendingUpdates(SIZE, THRESHOLD, BOUND),
        fill_inbox,
        from_worker,
        INBOX_BYTES,
    ),
}


def sizes(name):
    """The bytes that a full queue counts, and those that Python allocated for it."""
    make, fill, source, _ = QUEUES[name]
    messages = source()
    next(messages)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        queue = make()
        fill(queue, messages)
        gc.collect()
        return queue.nbytes, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def all_sizes():
    codec.decode(next(from_worker()).payload)  # loads the compiled reader
    return {name: sizes(name) for name in QUEUES}


@pytest.fixture(scope="module")
def measured():
    """The sizes of all queues, in a process where no other thread allocates."""
    return in_a_fork(all_sizes)


@pytest.mark.parametrize("name", QUEUES)
def test_a_full_queue_takes_the_memory_that_it_counts(name, measured):
    counted, taken = measured[name]

    assert QUEUES[name][-1] >= BOUND
    assert 0.9 * BOUND < counted < 1.1 * BOUND
    assert counted / 1.4 < taken < 1.2 * counted


def merging_peak(count):
    """The most bytes that Python allocates to merge so many updates."""
    size, messages, generator = 2**18, [], np.random.default_rng(0)
    for origin in range(count):
        chosen = generator.random(size) < 1 / 8
        entries_K = (1 + np.flatnonzero(chosen)).astype(np.int32)
        stamp = codec.Stamp(1, origin, 1, 1)
        frame = codec.encode(stamp, size, THRESHOLD, entries_K)
        messages.append(Message.update(stamp, 1, frame.nbytes, frame))
    tracemalloc.start()
    try:
        assert len(merged(messages, 1)) == 1
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def merging_peaks(few, many):
    return [merging_peak(count) for count in (few, few, many)][1:]  # the first compiles


def test_the_memory_for_merging_does_not_grow_with_the_number_of_updates():
    few, many = in_a_fork(merging_peaks, 8, 40)

    assert many < 1.5 * few  # decoded together, the updates take thrice as much
