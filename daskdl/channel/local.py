"""The channel among replicas that are threads of one process: no Dask, no queue.

What is published is in the inboxes of the others when `publish` returns, so there
is always room: what bounds memory is that a full inbox is folded. The run's record,
the one a scheduler keeps, and all inboxes are guarded by one condition.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import Serve
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.entry import Entry, Seating
from daskdl.channel.gathered import Gathered
from daskdl.channel.local_run import LocalRun
from daskdl.channel.local_waits import LocalWaits
from daskdl.channel.messages import Barrier, Item, ItemKind
from daskdl.channel.outbox import Outbox
from daskdl.channel.parcel import Arrays
from daskdl.channel.pause import Pause
from daskdl.channel.piece import Finished, Piece
from daskdl.channel.reading import UNREADABLE, Reader, SharedFrame
from daskdl.channel.receiver import Receiver
from daskdl.channel.traffic import Traffic
from daskdl.errors import ChannelError
from daskdl.thresholds import Drained


class LocalChannel(Receiver):
    """The channel of one replica among threads.

    There are no newcomers: the replicas of a run are those it begins with. Nothing
    is dropped on purpose either: an update is there before its sender goes on.

    Args:
        run: That all are in.
        endpoint: Which replica it is, and the bounds.

    Raises:
        ChannelError: If the replica has a channel already.
        OptionError: If updates are to be dropped on purpose.
    """

    def __init__(self, run: LocalRun, endpoint: Endpoint) -> None:
        inbox = run.enter(endpoint)
        super().__init__(inbox, LocalWaits(run, inbox, endpoint), endpoint)
        self._run = run
        self._record = run.record
        self._changed = run.changed
        self._reader = Reader(endpoint, inbox)
        self._drained = Drained()
        self._note: Any = None  # while it waits for a lease
        self._step, self._done, self._sequence = 0, -1, 0

    @property
    @override
    def closing(self) -> bool:
        return False

    # ---- coming and going

    @override
    def join(self) -> Entry:
        record = self._record
        with self._changed:
            self.check()
            outbox = record.join(self._replica, self._run.now())
            outbox.on_offer = lambda: self._deliver(outbox)
            self._deliver(outbox)
            self._changed.notify_all()
            bound = self._timeouts.bound("join")
            if not self._waits.until_true("join", lambda: self._met, bound.seconds):
                self._run.give_up(record.members.late(bound, self._run.now()))
                self.check()
            members = record.members.present
            self._inbox.meet({r: 0 for r in members if r != self._replica})
        return Entry(members, None)

    @property
    def _met(self) -> bool:
        return self._record.members.started

    def _deliver(self, outbox: Outbox) -> None:
        """Put what others send where it is read; called by whoever sends it."""
        for item in outbox.head(outbox.nbytes):
            if item.kind == ItemKind.UPDATE:
                self._put(item)
            elif item.kind != ItemKind.ROUTES:
                self._inbox.note(item)
            outbox.drop(1)

    def _put(self, item: Item) -> None:
        if isinstance(item.payload, Exception):
            self._reader.refuse(item, item.payload)
        else:
            self._inbox.put(item, item.payload)

    @override
    def activate(self, step: int) -> Seating:
        raise ChannelError("a run in one process has no newcomers")

    @override
    def serve(self, make: Serve | None) -> None:
        pass  # nobody will ask

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._run.fail(self._replica, failure)

    @override
    def leave(self, *, retires: bool = False) -> None:
        self._run.forget(self._replica)

    # ---- updates

    @override
    def has_room(self) -> bool:
        return True

    @override
    def publish(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        return self._publish(stamp.step, stamp, frame)

    @override
    def publish_part(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        return self._publish(stamp.step - 1, stamp, frame)

    def _publish(
        self, completed: int, stamp: codec.Stamp, frame: NDArray[np.uint8]
    ) -> bool:
        # Read once for all, and outside of the lock.
        item = Item.update(stamp, completed, frame.nbytes)
        item = item._replace(payload=self._read(item, frame))
        with self._changed:
            self._run.hear(self._replica)
            self._record.publish(self._replica, [item], self._step, self._done)
        self._sequence = stamp.sequence
        nbytes, frames = self._drained.nbytes + frame.nbytes, self._drained.frames + 1
        self._drained = Drained(nbytes, frames)
        self._traffic.sent_bytes += frame.nbytes
        self._traffic.frames += 1
        return True

    def _read(self, item: Item, frame: NDArray[np.uint8]) -> codec.Update | Exception:
        try:
            return self._reader.read_now(item, SharedFrame(frame))
        except UNREADABLE as error:
            return error

    @override
    def publish_last(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> None:
        self.publish(stamp, frame)

    @override
    def published(self) -> int:
        return self._sequence

    @override
    def complete(self, step: int, done: int = -1) -> None:
        self._step, self._done = step, max(done, self._done)
        with self._changed:
            self._run.hear(self._replica)
            self._record.publish(self._replica, [], self._step, self._done)

    @override
    def align(self, step: int, grid: float) -> None:
        self._step = step
        self._inbox.align(self._inbox.others(), step, grid)

    @override
    def wait_for_room(self) -> None:
        self.check()

    @override
    def drained(self) -> Drained:
        drained, self._drained = self._drained, Drained()
        return drained

    # ---- requests

    @override
    def lease(
        self, phase: str, epoch: int, finished: Finished, *, wait: bool = False
    ) -> Piece | Pause | None:
        record, replica = self._record, self._replica

        def settled() -> bool:
            return record.work.settled(replica, phase, epoch)

        with self._changed:
            self.check()
            self._run.hear(replica)
            record.work.give_back(replica, phase, epoch, finished)
            record.work.look(self._run.now())
            if wait and self._note is not None:
                record.barriers.stand_by(replica, self._note)
            self._changed.notify_all()
            if wait:
                self._waits.until_true("lease", settled, None)
                record.barriers.resume(replica)
                self._note = None
            lease = record.work.lease(replica, phase, epoch, lambda key: False)
            if lease is None:
                return record.work.pause(replica, phase, epoch)
            keys = record.schedule.keys(phase, lease)
            return Piece(lease.number, lease.ranges, keys, lease.ahead)

    @override
    def gather(
        self, key: str, note: Any, kind: Barrier = Barrier.MEET, told: bytes = b""
    ) -> Gathered:
        record = self._record
        with self._changed:
            self.check()
            gathering = record.barriers.arrive(key, self._replica, note, told, kind)
            self._changed.notify_all()
            self._waits.until_true("gather", lambda: record.over(gathering), None)
            if record.complete(key, gathering):
                self._changed.notify_all()
            notes = {r: gathering.notes[r] for r in sorted(gathering.notes)}
            self._count_notes(notes)
            return Gathered(notes, dict(gathering.gone or {}), gathering.counted)

    @override
    def stand_by(self, note: Any) -> None:
        self._note = note

    @override
    def offer(self, name: str, arrays: Arrays) -> None:
        self._run.offer(self._replica, name, arrays)

    @override
    def withdraw(self, but: str = "") -> None:
        self._run.withdraw(self._replica, but)

    @override
    def fetch(self, replica: int, name: str) -> Arrays | None:
        run, key = self._run, (replica, name)

        def there_or_gone() -> bool:
            return key in run.offers or not self._record.members.here(replica)

        with self._changed:
            self._waits.until_true("fetch", there_or_gone, None)
            arrays = run.offers.get(key)
            nbytes = sum(array.nbytes for array in (arrays or {}).values())
            run.fetched_bytes[replica] += nbytes
        self._traffic.received_bytes += nbytes
        return arrays

    @override
    def traffic(self) -> Traffic:
        now = super().traffic()
        with self._changed:
            now.sent_bytes += self._run.fetched_bytes.pop(self._replica, 0)
        return now
