"""The channel among replicas on workers of Dask: the training thread's half."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.channel import messages
from daskdl.channel.agreement import Agreement
from daskdl.channel.base import (
    Entry,
    Finished,
    Gathered,
    Last,
    Load,
    Piece,
    Seating,
    Serve,
    Stopped,
    Traffic,
)
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.leases import Range
from daskdl.channel.link import Link
from daskdl.channel.messages import Answer, Barrier, Item
from daskdl.channel.payloads import unwrap_note, wrap, wrap_note
from daskdl.channel.receiver import Receiver
from daskdl.channel.remote_waits import RemoteWaits
from daskdl.errors import WaitTimeoutError
from daskdl.link import Drained
from daskdl.version import VERSION

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
        self._agreement = Agreement(link, self._waits, self.gather)
        self._repaired = 0  # as told by the last `traffic`

    @property
    @override
    def closing(self) -> bool:
        return self._link.closing

    # ---- coming and going

    @override
    def join(self) -> Entry:
        # Updates may come before the answer does.
        self._link.wait_for_snapshot()
        answer = self._join()
        self._link.enter(answer["routes"])
        if answer["members"]:
            self._inbox.meet({r: s for r, s in answer["members"] if r != self._replica})
            self._link.begin({}, self._endpoint.grid)
            self._link.start()
            return Entry([r for r, _ in answer["members"]], None)
        self._link.start()
        snapshot = self._snapshot(answer)
        received = {o: (last, tuple(more)) for o, last, more in snapshot["received"]}
        received.pop(self._replica, None)
        self._link.begin(received, snapshot["grid"])
        return Entry([self._replica], snapshot)

    def _join(self) -> dict[str, Any]:
        bound = self._timeouts.bound("join", "request")
        return self._waits.ask(messages.JOIN, bound, version=VERSION)

    def _snapshot(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Ask the donor that was named, or another one if that has gone."""
        bound = self._timeouts.bound("join")
        deadline = time.monotonic() + bound.seconds
        while answer["donor"] is not None:
            given = self._waits.ask_worker(
                answer["worker"],
                messages.SNAPSHOT,
                replica=answer["donor"],
                cut=answer["cut"],
            )
            if given is not None and given["status"] == Answer.OK:
                return dict(unwrap_note(given["snapshot"]))
            if time.monotonic() > deadline:
                why = "it did not answer" if given is None else given.get("reason")
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {bound} for a snapshot, last of "
                    f"replica {answer['donor']} on {answer['worker']}: {why}; last "
                    f"heard: {self._waits.last_heard()}"
                )
            answer = self._join()
        raise Stopped("nobody is left to begin from")

    @override
    def activate(self, step: int) -> Seating:
        answer = self._waits.ask(messages.ACTIVATE, None, step=step)
        members = dict(answer["members"])
        self._carrier.progress = (step, answer["epoch"] - 1)
        self._inbox.meet({r: s for r, s in members.items() if r != self._replica})
        report = {replica: unwrap_note(said) for replica, said in answer["report"]}
        return Seating(sorted(members), answer["epoch"], report)

    @override
    def serve(self, make: Serve | None) -> None:
        self._waits.make = make

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._waits.tell(messages.FAIL, failure=dict(failure))

    @override
    def leave(self) -> None:
        self._link.stop_sending()
        self._waits.tell(messages.LEAVE)
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
        return self._offer(Item.update(stamp, stamp.step, frame.nbytes, wrap(frame)))

    @override
    def publish_part(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        completed = stamp.step - 1
        return self._offer(Item.update(stamp, completed, frame.nbytes, wrap(frame)))

    def _offer(self, item: Item) -> bool:
        accepted = self._publish(item, force=False)
        self._traffic.withheld += not accepted
        return accepted

    @override
    def publish_last(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> None:
        item = Item.update(stamp, stamp.step, frame.nbytes, wrap(frame))
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
    ) -> Piece | None:
        answer = self._waits.ask(
            messages.LEASE,
            None if wait else self._timeouts.bound("request"),
            phase=phase,
            epoch=epoch,
            finished=[dict(piece) for piece in finished],
            wait=wait,
        )
        if answer["piece"] is None:
            return None
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
        return Gathered(notes, dict(answer["gone"]))

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
        return now
