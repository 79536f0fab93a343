"""A run's plan, its state and queued messages, and an inbox filled with updates."""

import dataclasses

import numpy as np

from daskdl.channel.inbox import Inbox
from daskdl.channel.leasing import PartitionSizes, RunSpec
from daskdl.channel.protocol import MESSAGE_BYTES, Message, MessageKind
from daskdl.channel.run_state import RunState
from daskdl.codec import DenseUpdate, Kind, SparseUpdate, Stamp
from daskdl.config import Timeouts

EACH = 100 + MESSAGE_BYTES
TIMEOUTS = Timeouts(join=60, request=30, silence=10, stop=10, rejoin=300, data=600)
KEYS = ("piece-0", "piece-1", "piece-2", "piece-3")


def extents(keys):
    """Parts of one row each, by phase."""
    return {
        phase: PartitionSizes((1,) * len(own), tuple(own), step_rows=1, lease_rows=1)
        for phase, own in keys.items()
    }


def of_one(piece):
    """Number and key of a piece of one part, None if it is none."""
    if piece is None:
        return None
    (one,) = piece.ranges
    return piece.number, piece.keys[one.part]


def plan_of(
    replicas=3, relay_bytes=10 * EACH, synchronous=False, seed=None, relayed=True
):
    return RunSpec(
        run=7,
        replicas={r: f"tcp://worker-{r}" for r in range(replicas)},
        sizes=extents({"train": KEYS, "validation": ("v-0", "v-1", "v-2", "v-3")}),
        seed=seed,
        epochs_before=0,
        synchronous=synchronous,
        relay_bytes=relay_bytes,
        min_replicas=1,
        timeouts=dataclasses.asdict(TIMEOUTS),
        relayed=relayed,
    )


def joined(replicas=3, now=100.0, **options):
    record = RunState(plan_of(replicas, **options))
    for replica in range(replicas):
        record.join(replica, now)
    for box in record.outboxes.values():
        box.drop(len(box))  # all have been told who the members are
    return record


def update(origin, sequence, step=0, nbytes=100):
    kind = MessageKind.UPDATE.value
    return Message(kind, origin, sequence, step, nbytes, f"frame {origin} {sequence}")


def queued(record, replica):
    return record.outboxes[replica].head(10**9)


def waiting(record, replica):
    """What is queued, but for the word who the members are."""
    return [item for item in queued(record, replica) if item.kind != "members"]


def said(record, replica, kind):
    return [item for item in queued(record, replica) if item.kind == kind]


GRID = 2.0**-24
SIZE = 20


def sparse(origin, sequence, entries, count=1, step=None):
    stamp = Stamp(1, origin, sequence, sequence if step is None else step)
    entries_K = np.array(entries, np.int32)
    entries_K.flags.writeable = False  # as decode may return them
    return SparseUpdate(stamp, Kind.RAW32, SIZE, count * GRID, entries_K)


def dense(origin, sequence, counts):
    counts_N = np.array(counts, np.int32)
    return DenseUpdate(Stamp(1, origin, sequence, sequence), SIZE, GRID, counts_N)


def item_of(update, nbytes=64):
    stamp = update.stamp
    kind = MessageKind.UPDATE.value
    return Message(kind, stamp.origin, stamp.sequence, stamp.step, nbytes)


def control(kind, origin=0, step=0, payload=None):
    return Message(kind.value, origin, 0, step, 0, payload)


def filled(*updates, limit_bytes=10**9):
    inbox = Inbox(SIZE, GRID, limit_bytes)
    for update in updates:
        inbox.put(item_of(update), update)
    return inbox
