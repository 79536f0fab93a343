"""The channel as a replica sees it, and what its methods return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl import codec
from daskdl.channel.leasing import Finished, Lease, SyncPoint
from daskdl.channel.protocol import Arrays, BarrierKind, WaitCause
from daskdl.thresholds import Drained


class JoinResult(NamedTuple):
    """How a replica enters a run.

    An initial replica finds all others there. A joining replica gets a snapshot: the
    state of another replica, to be loaded before `activate`.
    """

    members: Sequence[int]  # ascending, itself included; of a joining one only itself
    snapshot: Mapping[str, Any] | None


class ActivateResult(NamedTuple):
    """Where a joining replica begins."""

    members: Sequence[int]  # that train, ascending, itself included
    epoch: int  # counted from 0
    report: Mapping[int, Any]  # payloads of the end of the epoch before, if any
    interval: int = 0  # sync interval, counted from 0 over all epochs


# What was received of one origin: all up to a number, and those beyond a gap.
Received = tuple[int, Sequence[int]]
Last = Mapping[int, int]  # sequence number of the last update of each replica


class BarrierResult(NamedTuple):
    """The payloads of all members at a barrier."""

    payloads: Mapping[int, Any]  # by replica; of failed ones too, if they had arrived
    gone: Last  # of those that left or failed
    # At a ``REPORT``, by the run in this epoch: "refused", "repeated" and "departed".
    # At a ``SYNC``: "departed", of all but those whose parts a checkpoint has.
    # At an ``AGREE``: "present", how many replicas there are, joining ones included.
    counted: Mapping[str, Any] = {}


@dataclass
class ChannelStats:
    """Counters of a channel since the epoch began.

    Attributes:
        sent_bytes: Of published frames, and of arrays in payloads; each counts once.
        received_bytes: Of frames and arrays that came from others.
        frames: Published.
        withheld: Exchanges skipped because the outbox was full.
        refused: Frames that could not be decoded.
        folds: How often the inbox folded its updates into one vector.
        repaired: Updates that arrived only because they were requested again.
        waits_s: Seconds waited, by :class:`~daskdl.channel.protocol.WaitCause`.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    frames: int = 0
    withheld: int = 0
    refused: int = 0
    folds: int = 0
    repaired: int = 0
    waits_s: dict[str, float] = field(default_factory=dict)


class DrainResult(NamedTuple):
    """Updates to apply, in an order that does not depend on arrival."""

    updates: list[codec.Update]
    folded_N: NDArray[np.int32] | None  # counts of the grid; None if nothing folded
    received: Mapping[int, Received] = {}  # by origin: what has been received in all


class Stopped(BaseException):  # not an error: the way out of a wait
    """The run was stopped; leave now. Not an `Exception`, as `KeyboardInterrupt`."""


Frame = NDArray[np.uint8]
Encode = Callable[[codec.Stamp], Frame]
Snapshot = Callable[[], dict[str, Any]]
Load = Callable[[Mapping[str, Any]], object]


class Channel(ABC):
    """One replica's end of a run. All methods belong to its training thread.

    Methods that wait raise :class:`Stopped` once the run is stopped, and
    :class:`~daskdl.errors.ChannelError` or
    :class:`~daskdl.errors.WaitTimeoutError` if the replica cannot go on.
    """

    @property
    @abstractmethod
    def run(self) -> int:
        """Identity of the run, as in stamps."""

    @property
    @abstractmethod
    def closing(self) -> bool:
        """Whether the replica has to hand over and leave while the run goes on."""

    @property
    @abstractmethod
    def published(self) -> int:
        """Sequence number of the last published update, 0 if there is none."""

    # ---- joining and leaving

    @abstractmethod
    def join(self) -> JoinResult:
        """Wait for all initial replicas, or for the snapshot of another replica."""

    @abstractmethod
    def activate(self, step: int) -> ActivateResult:
        """Train from now on; a joining replica has loaded its snapshot.

        Args:
            step: Steps that the snapshot's replica had completed.
        """

    @abstractmethod
    def serve_snapshot(self, make: Snapshot | None) -> None:
        """Set how joining replicas get this replica's state.

        Args:
            make: Called by the training thread in waits and in `check`; returns plain
                values and arrays, with "received" and "grid" among them. None: not
                now.
        """

    @abstractmethod
    def fail(self, failure: Mapping[str, Any]) -> None:
        """End the run: this replica cannot go on.

        Args:
            failure: Plain values; "type" and "summary" at least.
        """

    @abstractmethod
    def leave(self, *, retires: bool = False) -> None:
        """Leave the run; nothing of this replica stays in the channel.

        Args:
            retires: Its worker closes, and the run goes on without it.
        """

    # ---- updates

    @abstractmethod
    def has_room(self, *, wait: bool = False) -> bool:
        """Whether an update could be published now; counted as withheld if not.

        Args:
            wait: Block until the last update was passed on.
        """

    @abstractmethod
    def publish(
        self, encode: Encode, step: int, *, partial: bool = False, force: bool = False
    ) -> bool:
        """Send an update to all others; False if the outbox is full.

        Args:
            encode: Makes the frame for a stamp, in vain if the outbox is full: ask
                :meth:`has_room` first. Nobody may write to the frame any more.
            step: Steps completed; receivers take them for completed too.
            partial: More updates of this step follow, so receivers do not.
            force: Publish whatever the bounds, and wait until it is on its way. For a
                replica that leaves: it works even if the run was stopped here.
        """

    @abstractmethod
    def progress(self, step: int, interval: int = -1) -> None:
        """Announce how far this replica is.

        Args:
            step: Steps completed.
            interval: The last sync interval completed.
        """

    @abstractmethod
    def drain(self, up_to_step: int | None = None) -> DrainResult:
        """Drain pending updates; also return the set of updates received so far.

        Args:
            up_to_step: Only updates up to this step, so that replicas in step do not
                apply an update of a later step early.
        """

    @abstractmethod
    def sync(self, step: int, grid: float) -> None:
        """All replicas have met at a barrier.

        Args:
            step: Steps completed, from now on the same for all.
            grid: Of the run from now on, parameter units.
        """

    @abstractmethod
    def agree(self, key: str, published: Last, gone: Last, load: Load) -> None:
        """Return when all have the same updates, after an ``AGREE`` barrier.

        Until the next barrier of another kind no other update is accepted.

        Args:
            key: Name of the barrier.
            published: Last update of each replica that arrived there.
            gone: Replicas that left or failed, from the barrier's result.
            load: Called with another replica's snapshot if this one has to take over
                its state.
        """

    # ---- other replicas

    @abstractmethod
    def peers(self) -> Sequence[int]:
        """The other replicas that train now, as far as is known here."""

    @abstractmethod
    def wait_for_peers(
        self, step: int, interval: int, max_staleness: int | None
    ) -> int:
        """Wait while more than `max_staleness` steps ahead of the slowest peer.

        Args:
            step: Steps completed.
            interval: Peers that have completed this sync interval do not count.
            max_staleness: None: do not wait.

        Returns:
            Steps ahead of the slowest peer, 0 if behind it.
        """

    @abstractmethod
    def wait(self, cause: WaitCause, future: Any, timeout_s: float) -> bool:
        """Wait for a future of another thread, but leave if the run is stopped.

        Args:
            cause: What the wait counts as.
            future: Has `done` and `add_done_callback`.
            timeout_s: Seconds.

        Returns:
            Whether it is done.
        """

    @abstractmethod
    def barrier(
        self,
        key: str,
        payload: Any,
        kind: BarrierKind = BarrierKind.MEET,
        client_payload: bytes = b"",
    ) -> BarrierResult:
        """Wait for all members, and exchange payloads.

        Args:
            key: Name of the barrier; once it is complete, it may be used again.
            payload: Plain values, or arrays, which nobody in between unpacks.
            kind: ``AGREE``: all that was published is passed on first, and what is
                published later is held back until the next barrier is complete.
                ``REPORT``: the client reads the payloads too. ``ROUND``: see
                `set_idle`; others may come for ``AGREE``.
            client_payload: With ``REPORT``, for the client alone.
        """

    @abstractmethod
    def set_idle(self, payload: Any) -> None:
        """During the next wait for a lease ``ROUND`` barriers do not wait for this one.

        Args:
            payload: Taken as this replica's at those barriers.
        """

    # ---- work and blobs

    @abstractmethod
    def lease(
        self, phase: str, epoch: int, finished: Finished, *, wait: bool = False
    ) -> Lease | SyncPoint | None:
        """Give finished pieces back and take the next; None: none free.

        Between two sync intervals of an epoch there is a sync point instead, for all,
        until they have met at a ``SYNC`` barrier.

        Args:
            phase: ``"train"`` or ``"validation"``.
            epoch: Counted from 0.
            finished: Of each ``{"lease": ..., "examples": ..., "loss": ...}``.
            wait: Until there is one, or all pieces are finished, by whomever.
        """

    @abstractmethod
    def publish_blob(self, name: str, arrays: Arrays) -> None:
        """Let other replicas fetch arrays, until they are dropped.

        Args:
            name: Not used before.
            arrays: Not changed any more.
        """

    @abstractmethod
    def drop_blobs(self, keep: str = "") -> None:
        """Drop all published blobs but the one of this name."""

    @abstractmethod
    def fetch_blob(self, replica: int, name: str) -> Arrays | None:
        """Wait for a blob of another replica.

        Returns:
            The arrays, not to be changed; None: the replica is gone.
        """

    def keep_state(  # noqa: B027
        self, epoch: int, make: Callable[[], Arrays] | None
    ) -> None:
        """Let the client fetch the agreed state, where replicas can fail.

        Args:
            epoch: That has ended, counted from 0.
            make: Makes it in another thread when it is fetched, any number of times
                until the next call. None: there is none for now, and the former one is
                released.
        """

    # ---- counters

    @abstractmethod
    def stats(self) -> ChannelStats:
        """Counters since the last call."""

    @abstractmethod
    def link_stats(self) -> Drained:
        """Bytes and frames delivered since the last call, and how long that took.

        A frame counts when it has arrived at its first destination: the relay, or each
        neighbour. Among threads that is when `publish` returns, without a request.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`Stopped` if the run was stopped. Cheap."""
