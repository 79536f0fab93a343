"""Operation names and the one thing that travels between replicas.

Requests are answered; everything here is a request, because a Dask stream has
neither a bound nor an answer. What goes to a replica goes through one queue in
one order: updates, progress and the word to stop.
"""

import enum
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from daskdl.channel.shapes import COUNTS, FromMinusOne, Whole, fits
from daskdl.codec import Stamp

# requests to the scheduler, from a client
OPEN, WATCH, STOP, CLOSE = "daskdl_open", "daskdl_watch", "daskdl_stop", "daskdl_close"
SEAT, UNSEAT, RESTORE = "daskdl_seat", "daskdl_unseat", "daskdl_restore"
# the same; the scheduler passes it on to a worker, and does not unpack the answer
AGREED = "daskdl_agreed"
# request to the scheduler, from a worker that has just come
ARRIVE = "daskdl_arrive"
# requests to the scheduler, from a replica
JOIN, ACTIVATE, PUBLISH = "daskdl_join", "daskdl_activate", "daskdl_publish"
LEASE, MISSING = "daskdl_lease", "daskdl_missing"
GATHER, FAIL, LEAVE = "daskdl_gather", "daskdl_fail", "daskdl_leave"
# request to a worker, from the scheduler or from a replica on another one
DELIVER = "daskdl_deliver"
# the same to a worker with several replicas, from the scheduler
SHARE = "daskdl_share"
# requests to a worker, from a replica on another one
SNAPSHOT, REPAIR, FETCH = "daskdl_snapshot", "daskdl_repair", "daskdl_fetch"

WIRE_BYTES = 32  # of msgpack around the frame of an item, measured: 24 to 32
# Of memory around that frame: the item, its numbers and its place in a queue or a ring.
# Measured by `benchmarks/queues.py`.
ITEM_BYTES = 304


# The generation, and each replica with its worker.
Members = tuple[Whole, Sequence[tuple[Whole, str]]]


class ItemKind(enum.StrEnum):
    """What an item says; plain strings on the wire, as the scheduler demands."""

    UPDATE = "update"  # payload: an encoded frame
    PROGRESS = "progress"  # origin has completed `step`; payload: last lap done
    JOINED = "joined"  # origin trains too from now on, at `step`
    ROUTES = "routes"  # payload: `Members`
    LOST = "lost"  # origin is gone; nothing more comes from it
    STOP = "stop"  # payload: why


class Item(NamedTuple):
    """One entry of a queue between replicas, in order for each origin."""

    kind: str  # an ItemKind
    origin: int  # replica it speaks of
    sequence: int  # of an update, from 1; with progress, of the last one; else 0
    step: int  # steps the origin had completed
    nbytes: int  # of the payload
    payload: Any = None  # a frame, never unpacked by the scheduler; or plain values
    generation: int = 0  # in which the origin sent it, replica to replica

    @classmethod
    def update(
        cls, stamp: Stamp, completed: int, nbytes: int, payload: Any = None
    ) -> "Item":
        """Make the item of a frame.

        Args:
            stamp: Of the frame.
            completed: Steps the origin has completed with it: without the one of the
                stamp, if others of that step follow.
            nbytes: Of the frame.
            payload: The frame, as it is carried.
        """
        kind = ItemKind.UPDATE.value
        return cls(kind, stamp.origin, stamp.sequence, completed, nbytes, payload)

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Item":
        """Read an item as it came over the wire.

        Raises:
            ValueError: If its fields are not those of an item.
        """
        item = cls(*fields)
        numbers = (*item[1:5], item.generation)
        if not all(type(n) is int and n in COUNTS for n in numbers):  # no bool
            raise ValueError(
                f"an item needs whole numbers >= 0, got {reprlib.repr(numbers)}"
            )
        if item.kind == ItemKind.PROGRESS and not fits(item.payload, FromMinusOne):
            raise ValueError(f"progress needs a lap, got {reprlib.repr(item.payload)}")
        if item.kind == ItemKind.ROUTES and not fits(item.payload, Members):
            raise ValueError(f"routes need members, got {reprlib.repr(item.payload)}")
        return item._replace(kind=ItemKind(item.kind).value)

    def weight(self) -> int:
        """Bytes of memory that this item counts in a queue."""
        return self.nbytes + ITEM_BYTES


class Barrier(enum.StrEnum):
    """What a barrier is for."""

    AGREE = "agree"  # afterwards updates are held, until the next one
    REPORT = "report"  # the client reads the notes too; an epoch is over
    PAUSE = "pause"  # a lap is over, and not the epoch
    MEET = "meet"
    ROUND = "round"  # who waits for a lease is not waited for, see `stand_by`


class Answer(enum.StrEnum):
    """The `status` of every answer."""

    OK = "ok"
    STOPPED = "stopped"  # the run was stopped; `reason` says why
    UNKNOWN = "unknown"  # no such run or replica here
    REFUSED = "refused"  # the message was not understood; `reason` says why
