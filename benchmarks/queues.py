"""What the queues of a replica and of the scheduler take, each filled to its bound.

Question: is a queue that counts so many MiB that large?
Counted:  items, the bytes that the queue counts, and how many more pages are resident
          in a process of its own that fills it with what comes over a wire, after
          as much again went through (not the inbox: that is emptied whole). Of a
          queue of 1 MiB sixteen are filled, of 8 MiB two, and divided.
Run:      python -m benchmarks queues

Small frames are the worst case: most of what they take is around them.
"""

import argparse
import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
from distributed.protocol import dumps, loads

from benchmarks.results import Question
from daskdl import codec
from daskdl.channel.inbox import PendingUpdates
from daskdl.channel.protocol import Message, compact, owned
from daskdl.channel.sender import Outbox, RetransmitBuffer
from daskdl.training.dask_backend import RELAY_BYTES
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES

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


def resident_bytes(line: str = "VmRSS:") -> int:
    for text in open("/proc/self/status"):  # noqa: SIM115
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {line}")


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
ENTRIES = (1, 5000)


def measured(name: str, entries: int) -> tuple[float, float, float]:
    """Items, MiB counted and MiB resident; in this process, which should be fresh."""
    make, fill, source, bound = QUEUES[name]
    items = source(entries)
    for _ in range(4 * BATCH):  # what is imported and compiled for the first
        codec.decode(owned(next(items).payload))
    gc.collect()
    before = resident_bytes()
    # Pages of one small queue would be lost among those of what comes and goes.
    queues = [make(bound) for _ in range(max(1, 16 * 2**20 // bound))]
    count = sum(fill(queue, items, bound) for queue in queues)
    gc.collect()
    resident = (resident_bytes() - before) / len(queues)
    counted = sum(queue.nbytes for queue in queues) / len(queues)
    return count / len(queues), counted / 2**20, resident / 2**20


def rows(asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    for name, (*_, bound) in QUEUES.items():
        for entries in ENTRIES:
            program = "from benchmarks.queues import measured; "
            program += f"print(*measured({name!r}, {entries}))"
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            )
            count, counted, resident = map(float, done.stdout.split())
            yield {
                "queue": name,
                "frame_bytes": frame_of(entries).nbytes,
                "bound_mib": bound / 2**20,
                "items": count,
                "counted_mib": counted,
                "resident_mib": resident,
                "ratio": resident / counted,
            }


QUESTION = Question(
    "queues",
    __doc__,
    lambda parser: None,
    rows,
    {"queue": "", "frame_bytes": ",", "bound_mib": ".0f", "items": ",.0f"}
    | {"counted_mib": ".1f", "resident_mib": ".1f", "ratio": ".2f"},
)
