"""What a replica sees of the channel, whatever carries it.

Guarantee: every update that `publish` accepted reaches every other member of
the run exactly once, in the order of its origin, or the run fails and says
why. Between origins there is no order; none is needed, because updates are
whole steps of one grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskdl.channel.entry import Entry, Seating
from daskdl.channel.gathered import Gathered, Last
from daskdl.channel.messages import Barrier
from daskdl.channel.parcel import Arrays
from daskdl.channel.pause import Pause
from daskdl.channel.piece import Finished, Piece
from daskdl.channel.pile import Arrived
from daskdl.channel.positions import Received
from daskdl.channel.traffic import Traffic
from daskdl.codec import Stamp
from daskdl.thresholds import Drained


class Stopped(BaseException):  # not an error: the way out of a wait
    """The run was stopped; leave now. Not an `Exception`, as `KeyboardInterrupt`."""


Serve = Callable[[], dict[str, Any]]
Load = Callable[[Mapping[str, Any]], object]


class Channel(ABC):
    """One replica's end of a run. All methods belong to its training thread.

    Each may raise :class:`Stopped` where it waits, and
    :class:`~daskdl.errors.ChannelError` or
    :class:`~daskdl.errors.WaitTimeoutError` where it cannot go on.
    """

    @property
    @abstractmethod
    def closing(self) -> bool:
        """Whether the replica has to hand over and leave, and the run goes on."""

    @abstractmethod
    def join(self) -> Entry:
        """Wait for all founders of the run, or for the snapshot of another replica."""

    @abstractmethod
    def activate(self, step: int) -> Seating:
        """A newcomer has loaded its snapshot: it trains from now on.

        Args:
            step: Steps that the snapshot's replica had completed.
        """

    @abstractmethod
    def serve(self, make: Serve | None) -> None:
        """Say how newcomers get this replica's state.

        Args:
            make: Called by the training thread where it waits or in `check`; returns
                plain values and arrays, among them what `take_all` said. None: not
                now.
        """

    @abstractmethod
    def others(self) -> Sequence[int]:
        """The other replicas that train now, as far as is known here."""

    @abstractmethod
    def next_stamp(self, step: int) -> Stamp:
        """The stamp that the next published update must carry."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether an update could be published now. If not, keep it."""

    @abstractmethod
    def publish(self, stamp: Stamp, frame: NDArray[np.uint8]) -> bool:
        """Send an encoded update to all others; False if the outbox is full.

        Who receives it takes its step for completed.

        Args:
            stamp: From :meth:`next_stamp`, as encoded in the frame.
            frame: Bytes that the caller will not touch again.
        """

    @abstractmethod
    def publish_part(self, stamp: Stamp, frame: NDArray[np.uint8]) -> bool:
        """Send one of several updates of a step, but the last; see :meth:`publish`.

        Who receives it expects more of its step.
        """

    @abstractmethod
    def publish_last(self, stamp: Stamp, frame: NDArray[np.uint8]) -> None:
        """Send an update whatever the bounds, and wait until it is on its way.

        For a replica that has to leave: it works after the run was stopped here.
        """

    @abstractmethod
    def published(self) -> int:
        """Sequence number of the last published update, 0 if there is none."""

    @abstractmethod
    def complete(self, step: int, done: int = -1) -> None:
        """Tell the others how far this replica is.

        Args:
            step: Steps completed.
            done: The last lap it is done with.
        """

    @abstractmethod
    def receive(self, up_to_step: int | None = None) -> Arrived:
        """What has arrived and is not applied yet; see :meth:`Inbox.take`."""

    @abstractmethod
    def take_all(self) -> tuple[Arrived, Mapping[int, Received]]:
        """What has arrived and is not applied yet, and all that then has been.

        The second includes this replica's own updates.
        """

    @abstractmethod
    def lead(self, step: int, lap: int) -> int:
        """Steps ahead of the slowest other replica, 0 if behind it."""

    @abstractmethod
    def align(self, step: int, grid: float) -> None:
        """All replicas have met at a barrier.

        Args:
            step: Steps completed, from now on the same for all.
            grid: Of the run, from now on.
        """

    @abstractmethod
    def wait_for_others(self, step: int, lap: int, max_staleness: int) -> None:
        """Block while more than `max_staleness` steps ahead of the slowest."""

    @abstractmethod
    def wait_for_room(self) -> None:
        """Block until an update can be published."""

    @abstractmethod
    def wait_for_updates(self, target: Mapping[int, int]) -> None:
        """Block until all updates up to the target have been received."""

    @abstractmethod
    def lease(
        self, phase: str, epoch: int, finished: Finished, *, wait: bool = False
    ) -> Piece | Pause | None:
        """Give finished pieces back and take the next; None: none free.

        Between two laps of an epoch there is a pause instead, for all, until they have
        met at a ``PAUSE`` barrier.

        Args:
            phase: ``"train"`` or ``"validation"``.
            epoch: Counted from 0.
            finished: Of each ``{"piece": ..., "examples": ..., "loss": ...}``.
            wait: Until there is one, or all pieces are finished, by whomever.
        """

    @abstractmethod
    def wait_for_data(self, future: Any, timeout_s: float) -> bool:
        """Wait for a future that another thread completes, but leave when told to.

        Args:
            future: Has `done` and `add_done_callback`.
            timeout_s: Seconds.

        Returns:
            Whether it is done.
        """

    @abstractmethod
    def wait_for_checkpoint(self, future: Any, timeout_s: float) -> bool:
        """The same, for one that is read or written; it counts as another wait."""

    @abstractmethod
    def gather(
        self, key: str, note: Any, kind: Barrier = Barrier.MEET, told: bytes = b""
    ) -> Gathered:
        """Wait at a barrier for all members, and read what each has to say.

        Args:
            key: Name of the barrier; once it is complete, it may be used again.
            note: Plain values, or arrays, which nobody between unpacks.
            kind: ``AGREE``: everything published is passed on first, and what is
                published later is held back until the next barrier is complete.
                ``REPORT``: the client reads the notes too. ``ROUND``: see `stand_by`;
                some may come for this and others for ``AGREE``.
            told: With ``REPORT``, what the client reads and nobody else.
        """

    @abstractmethod
    def stand_by(self, note: Any) -> None:
        """While this replica waits for a lease next, ``ROUND`` barriers do not wait.

        Args:
            note: Which they take for its own meanwhile.
        """

    @abstractmethod
    def offer(self, name: str, arrays: Arrays) -> None:
        """Let other replicas fetch arrays, until they are withdrawn.

        Args:
            name: Not offered before.
            arrays: Not changed any more.
        """

    @abstractmethod
    def withdraw(self, but: str = "") -> None:
        """Keep nothing of what was offered, but what has this name."""

    def keep(  # noqa: B027
        self, epoch: int, make: Callable[[], Arrays] | None
    ) -> None:
        """Let the client fetch what all have agreed on, where replicas can be lost.

        Args:
            epoch: That has ended, counted from 0.
            make: Makes it, in another thread, if it is wanted; called any number of
                times until the next call of this. None: there is nothing for now, and
                what was before is not held any more.
        """

    @abstractmethod
    def fetch(self, replica: int, name: str) -> Arrays | None:
        """Wait for what another replica offers.

        Args:
            replica: Which.
            name: Of the offer.

        Returns:
            The arrays, not to be changed; None: the replica is gone.
        """

    @abstractmethod
    def agree(self, key: str, published: Last, gone: Last, load: Load) -> None:
        """All have met at an ``AGREE`` barrier: return when all have the same updates.

        Until the next barrier of another kind nothing else is taken in.

        Args:
            key: Name of the barrier.
            published: Last update of each replica that arrived there.
            gone: Replicas that left or were lost, as the barrier had it.
            load: Called if this replica has to take the state of another one: with
                what that one's `serve` made.
        """

    @abstractmethod
    def fail(self, failure: Mapping[str, Any]) -> None:
        """Tell everybody that this replica cannot go on: the run ends.

        Args:
            failure: Plain values; "type" and "summary" at least.
        """

    @abstractmethod
    def leave(self, *, retires: bool = False) -> None:
        """Be a member no more; nothing of this replica stays in the channel.

        Args:
            retires: Its worker closes, and the run goes on without it.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """Counters since the last call."""

    @abstractmethod
    def drained(self) -> Drained:
        """What has left since the last call, and how long that took.

        A frame counts when it has arrived where it goes first: at the relay, or at
        each neighbour. Among threads it has when `publish` returns, without a request.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`Stopped` if the run was stopped. Cheap."""
