"""The bounds of queues are of memory, not of frames alone."""

import gc
import itertools
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from distributed.protocol import dumps, loads

from daskdl import codec
from daskdl.channel.inbox import PendingUpdates
from daskdl.channel.protocol import Message, compact, owned
from daskdl.channel.sender import Outbox, RetransmitBuffer
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES

BOUND = 2**20
ROOT = Path(__file__).parents[2]


SIZE = 2**24  # parameters
THRESHOLD = 2.0**-10
BATCH = 64  # items of one message


def frame_of(entries: int):
    rng = np.random.default_rng(0)
    positions_K = np.sort(rng.choice(SIZE, entries, replace=False)).astype(np.int32)
    stamp = codec.Stamp(1, 1, 1, 1)
    return codec.encode(stamp, SIZE, THRESHOLD, positions_K + np.int32(1))


def published(entries: int):
    """Items as the replica keeps them that makes them."""
    frame = frame_of(entries)
    for sequence in itertools.count(1000):  # numbers that Python has no object for yet
        stamp = codec.Stamp(1, 1, sequence, sequence + 1)
        yield Message.update(stamp, sequence + 2, frame.nbytes, compact(frame.copy()))


def arrived(entries: int, deserialize: bool):
    """Items as they come out of a message, in batches."""
    source = published(entries)
    while True:
        fields = [next(source).to_wire() for _ in range(BATCH)]
        sent = dumps({"items": fields})
        ends = np.cumsum([memoryview(frame).nbytes for frame in sent])
        view = memoryview(bytearray().join(sent))
        starts = [0, *ends[:-1]]
        frames = [view[a:b] for a, b in zip(starts, ends, strict=True)]
        message = loads(frames, deserialize=deserialize)
        yield from (Message.from_wire(item) for item in message["items"])


def from_worker(entries: int):
    for item in arrived(entries, deserialize=True):
        yield item._replace(payload=owned(item.payload))


def from_scheduler(entries: int):
    return arrived(entries, deserialize=False)


def fill_ring(ring: RetransmitBuffer, items, bound: int) -> int:
    for count, item in enumerate(items, start=1):
        ring.keep(item)
        if count == 2 * len(ring):  # as much again went through
            return len(ring)
    raise AssertionError("items have no end")


def fill_outbox(outbox: Outbox, items, bound: int) -> int:
    full = 0
    for item in items:
        if outbox.offer(item):
            continue
        full += 1
        if full == 2:
            return len(outbox)
        outbox.drop(len(outbox))
    raise AssertionError("items have no end")


def fill_unconfirmed(own: RetransmitBuffer, items, bound: int) -> int:
    full = 0
    for item in items:
        own.keep(item)
        if own.has_room():
            continue
        full += 1
        if full == 2:
            return len(own)
        own.acknowledge(item.sequence)
    raise AssertionError("items have no end")


def fill_pile(pile: PendingUpdates, items, bound: int) -> int:
    for count, item in enumerate(items, start=1):
        pile.add(codec.decode(item.payload))
        if pile.nbytes + pile.nbytes // count >= bound:
            return count
    raise AssertionError("items have no end")


QUEUES = {
    "mesh: recent updates of others": (
        lambda bound: RetransmitBuffer(bound),
        fill_ring,
        from_worker,
        INBOX_BYTES,
    ),
    "mesh: own, until all have them": (
        lambda bound: RetransmitBuffer(bound, evicts=False),
        fill_unconfirmed,
        published,
        OUTBOX_BYTES,
    ),
    "relayed: own recent updates": (
        lambda bound: RetransmitBuffer(bound),
        fill_ring,
        published,
        OUTBOX_BYTES,
    ),
    "outbox of a replica": (
        lambda bound: Outbox(bound),
        fill_outbox,
        published,
        OUTBOX_BYTES,
    ),
    "scheduler: for one replica": (
        lambda bound: Outbox(bound),
        fill_outbox,
        from_scheduler,
        RELAY_BYTES,
    ),
    "inbox: waiting to be applied": (
        lambda bound: PendingUpdates(SIZE, THRESHOLD, bound),
        fill_pile,
        from_worker,
        INBOX_BYTES,
    ),
}


def sizes(name):
    """What a full queue counts, and what Python has allocated for it; bytes."""
    make, fill, source, _ = QUEUES[name]
    items = source(1)
    next(items)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        queue = make(BOUND)
        fill(queue, items, BOUND)
        gc.collect()
        return queue.nbytes, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def measured():
    """Of all queues, in a process where no other thread allocates anything."""
    own = __name__
    code = f"import json, {own} as t; "
    code += "print(json.dumps({n: t.sizes(n) for n in t.QUEUES}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", QUEUES)
def test_a_full_queue_takes_what_it_counts(name, measured):
    counted, taken = measured[name]

    assert QUEUES[name][-1] >= BOUND
    assert 0.9 * BOUND < counted < 1.1 * BOUND
    assert counted / 1.4 < taken < 1.2 * counted
