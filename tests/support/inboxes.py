"""What the tests of the inbox share: updates, and an inbox filled with them."""

import numpy as np

from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import Message, MessageKind
from daskdl.codec import DenseUpdate, Kind, SparseUpdate, Stamp

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
