"""The channel among replicas on workers of Dask: the training thread's half."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.channel import messages
from daskdl.channel.agreement import Agreement
from daskdl.channel.base import Load, Serve
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.entrance import Entrance
from daskdl.channel.entry import Entry, Seating
from daskdl.channel.fetching import Fetching
from daskdl.channel.gathered import Gathered, Last
from daskdl.channel.leases import Range
from daskdl.channel.link import Link
from daskdl.channel.messages import Barrier, Item
from daskdl.channel.parcel import Arrays, Parcel
from daskdl.channel.pause import Pause
from daskdl.channel.payloads import compact, unwrap_note, wrap_note
from daskdl.channel.piece import Finished, Piece
from daskdl.channel.receiver import Receiver
from daskdl.channel.remote_waits import RemoteWaits
from daskdl.channel.traffic import Traffic
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)


class RemoteChannel(Receiver):
    """The channel of one replica, over Dask's connections.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.
        forget: Called when the replica has left.
    """

    _waits: RemoteWaits

    def __init__(
        self, link: Link, endpoint: Endpoint, forget: Callable[[], object]
    ) -> None:
        super().__init__(link.inbox, RemoteWaits(link, endpoint), endpoint)
        self._link = link
        self._carrier = link.carrier
        self._forget = forget
        self._entrance = Entrance(link, self._waits, endpoint)
        self._fetching = Fetching(self._waits, self._worker_of)
        self._note: Any = None  # while it waits for a lease
        self._agreement = Agreement(link, self._waits, self.gather)
        self._repaired = 0  # as told by the last `traffic`

    @property
    @override
    def closing(self) -> bool:
        return self._link.closing

    # ---- coming and going

    @override
    def join(self) -> Entry:
        return self._entrance.enter()

    @override
    def activate(self, step: int) -> Seating:
        answer = self._waits.ask(messages.ACTIVATE, None, step=step)
        members = dict(answer["members"])
        self._carrier.progress = (step, answer["lap"] - 1)
        self._inbox.meet({r: s for r, s in members.items() if r != self._replica})
        report = {replica: unwrap_note(said) for replica, said in answer["report"]}
        epoch, lap = answer["epoch"], answer["lap"]
        return Seating(sorted(members), epoch, report, lap)

    @override
    def serve(self, make: Serve | None) -> None:
        self._waits.make = make

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._waits.tell(messages.FAIL, failure=dict(failure))

    @override
    def leave(self, *, retires: bool = False) -> None:
        self._link.stop_sending()
        self._waits.tell(messages.LEAVE, retires=retires)
        self._forget()
        self._link.end()

    # ---- updates

    @override
    def has_room(self) -> bool:
        room = self._carrier.has_room()
        self._traffic.withheld += not room
        return room

    @override
    def publish(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        return self._offer(Item.update(stamp, stamp.step, frame.nbytes, compact(frame)))

    @override
    def publish_part(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        completed = stamp.step - 1
        return self._offer(Item.update(stamp, completed, frame.nbytes, compact(frame)))

    def _offer(self, item: Item) -> bool:
        accepted = self._publish(item, force=False)
        self._traffic.withheld += not accepted
        return accepted

    @override
    def publish_last(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> None:
        item = Item.update(stamp, stamp.step, frame.nbytes, compact(frame))
        self._publish(item, force=True)
        bound = self._timeouts.bound("stop")
        if not self._carrier.wait_until_sent(bound.seconds):
            logger.warning(
                "replica %s leaves after %s; %s updates (%s bytes) could not be passed "
                "to %s; last heard: %s",
                self._replica,
                bound,
                *self._carrier.backlog(),
                self._waits.last_heard(),
            )

    def _publish(self, item: Item, *, force: bool) -> bool:
        if not self._carrier.offer(item, force=force):
            return False
        self._traffic.sent_bytes += item.nbytes
        self._traffic.frames += 1
        return True

    @override
    def published(self) -> int:
        return self._carrier.sequence

    @override
    def complete(self, step: int, done: int = -1) -> None:
        self._carrier.complete(step, done)

    @override
    def align(self, step: int, grid: float) -> None:
        self._carrier.progress = (step, self._carrier.progress[1])
        self._inbox.align(self._inbox.others(), step, grid)

    @override
    def drained(self) -> Drained:
        return self._carrier.drained()

    # ---- waiting

    @override
    def wait_for_room(self) -> None:
        self._waits.until_sent("room", self._carrier.ready)

    # ---- requests

    @override
    def lease(
        self, phase: str, epoch: int, finished: Finished, *, wait: bool = False
    ) -> Piece | Pause | None:
        answer = self._waits.ask(
            messages.LEASE,
            None if wait else self._timeouts.bound("request"),
            phase=phase,
            epoch=epoch,
            finished=[dict(piece) for piece in finished],
            wait=wait,
            note=wrap_note(self._note) if wait else None,
        )
        if wait:
            self._note = None
        if answer["piece"] is None:
            return None if answer["pause"] is None else Pause.of(answer["pause"])
        ranges = tuple(Range(*one) for one in answer["ranges"])
        return Piece(answer["piece"], ranges, dict(answer["keys"]), answer["ahead"])

    def missing(self, phase: str, part: int, key: str) -> str:
        """A part does not come: is it lost with the worker that held it?

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Of a piece that was leased.
            key: Under which it does not come.

        Returns:
            The same key if it is not lost; else, once it has been started again, its
            new key.
        """
        answer = self._waits.ask(
            messages.MISSING,
            self._timeouts.bound("data"),
            phase=phase,
            part=part,
            key=key,
        )
        return str(answer["key"])

    @override
    def gather(
        self, key: str, note: Any, kind: Barrier = Barrier.MEET, told: bytes = b""
    ) -> Gathered:
        if kind == Barrier.AGREE and self._endpoint.routing == "plain":
            # What is still here would be held back with what others hand over.
            self._waits.until_sent("flush", self._carrier.sent)
        answer = self._waits.ask(
            messages.GATHER,
            None,
            key=key,
            note=wrap_note(note),
            told=told,
            kind=kind.value,
        )
        if kind != Barrier.AGREE:
            self._inbox.release()
        notes = {replica: unwrap_note(said) for replica, said in answer["notes"]}
        self._count_notes(notes)
        return Gathered(notes, dict(answer["gone"]), answer["counted"])

    @override
    def stand_by(self, note: Any) -> None:
        self._note = note

    @override
    def offer(self, name: str, arrays: Arrays) -> None:
        self._link.shelf.put(name, Parcel(arrays))

    @override
    def withdraw(self, but: str = "") -> None:
        self._link.shelf.clear(but)

    @override
    def keep(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        self._link.newest.keep(epoch, make)

    @override
    def fetch(self, replica: int, name: str) -> Arrays | None:
        arrays = self._fetching.fetch(replica, name)
        if arrays is not None:
            self._traffic.received_bytes += sum(a.nbytes for a in arrays.values())
        return arrays

    def _worker_of(self, replica: int) -> str | None:
        gone = replica in self._inbox.lost()
        return None if gone else self._link.repairs.workers.get(replica)

    @override
    def agree(self, key: str, published: Last, gone: Last, load: Load) -> None:
        if self._endpoint.routing == "plain":
            super().agree(key, published, gone, load)
        else:
            self._agreement.reach(key, published, gone, load)

    @override
    def traffic(self) -> Traffic:
        now = super().traffic()
        former, self._repaired = self._repaired, self._link.repairs.repaired
        now.repaired = self._repaired - former
        now.sent_bytes += self._link.shelf.count_off()
        return now
