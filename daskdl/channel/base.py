"""The channel of a replica: its interface, its receiving half, and bounded waits.

Hides whether replicas are threads of one process or run on Dask workers.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl import codec
from daskdl.channel.inbox import DrainResult, Inbox, Received
from daskdl.channel.leasing import Finished, Lease, SyncPoint
from daskdl.channel.protocol import (
    Arrays,
    BarrierKind,
    ChannelSpec,
    LiveReport,
    Message,
    PeerProgress,
    WaitCause,
    Work,
)
from daskdl.errors import WaitTimeoutError


class JoinResult(NamedTuple):
    """Members and snapshot for a replica that enters a run.

    Initial replicas join together, without a snapshot. A joining replica receives a
    snapshot of another replica's state, to be loaded before `activate`.
    """

    members: Sequence[int]  # ascending, with this replica; if it joins: only itself
    snapshot: Mapping[str, Any] | None


class ActivateResult(NamedTuple):
    """Where a joining replica starts to train."""

    members: Sequence[int]  # training replicas including this one, ascending
    epoch: int  # counted from 0
    report: Mapping[str, Any]  # see `RunState.report`
    interval: int = 0  # sync interval, counted from 0 over all epochs


LastUpdates = Mapping[int, int]  # sequence number of each replica's last update


class BarrierResult(NamedTuple):
    """The payloads of all members at a barrier."""

    payloads: Mapping[int, Any]  # by replica; some may have failed after arrival
    gone: LastUpdates  # of replicas that left or failed
    # ``REPORT``: the run's counters of this epoch, "refused" and "repeated", and
    # "departed", the work by phase of replicas without a payload.
    # ``SYNC``: "departed", the training work of replicas without a payload.
    # ``AGREE``: "present", the number of replicas, including joining ones.
    counted: Mapping[str, Any] = {}


@dataclass
class ChannelStats:
    """Counters of a channel since they were last read.

    Attributes:
        sent_bytes: Bytes of published frames and of arrays in payloads, each counted
            once, and of blobs that other replicas fetched.
        received_bytes: Bytes of frames, arrays and blobs from other replicas.
        frames: Published frames.
        withheld: Updates not published because an outbox was full.
        refused: Frames that could not be decoded.
        folds: How often the inbox folded its updates into one vector.
        repaired: Missing updates that arrived after a repair request.
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

    def __add__(self, addend: "ChannelStats") -> "ChannelStats":
        ours, theirs = self.waits_s, addend.waits_s
        waits_s = {c: ours.get(c, 0.0) + theirs.get(c, 0.0) for c in ours | theirs}
        counts = {
            name: count + getattr(addend, name)
            for name, count in vars(self).items()
            if name != "waits_s"
        }
        return ChannelStats(**counts, waits_s=waits_s)


class Stopped(BaseException):  # not an error: unwinds a wait
    """This replica must leave. Like `KeyboardInterrupt`, not an `Exception`.

    The run was stopped, the worker closes, or the scheduler has removed the replica.
    """


Frame = NDArray[np.uint8]
Encode = Callable[[codec.Stamp], Frame]
MakeSnapshot = Callable[[], dict[str, Any]]
Load = Callable[[Mapping[str, Any]], object]


class Channel(ABC):
    """One replica's connection to its run; for the training thread only.

    Methods that wait raise :class:`Stopped` once this replica must leave, and
    :class:`~daskdl.errors.ChannelError` or
    :class:`~daskdl.errors.WaitTimeoutError` if the replica cannot continue. The
    receiving half and the waits are the same for all channels; subclasses send.

    Args:
        inbox: Inbox of the replica; every event that may end a wait wakes it.
        spec: Settings of the replica.

    Attributes:
        has_dashboard: Whether a dashboard shows what `report_live` sends.
        has_client: Whether a client on another machine may fetch from `keep_state`.
        merges: Whether updates are sent as sums with those of other replicas.
        clock: Times the waits and the exchanges.
        on_wait: Called after each wait with its cause, start and end.
    """

    has_dashboard: ClassVar[bool] = False
    has_client: ClassVar[bool] = False
    merges: bool = False

    def __init__(self, inbox: Inbox, spec: ChannelSpec) -> None:
        self._inbox = inbox
        self.clock = inbox.clock
        self.on_wait: Callable[[WaitCause, float, float], object] = lambda *wait: None
        self._spec = spec
        self._timeouts = spec.timeouts
        self._replica = spec.replica
        # Longest time that another replica may take for a lease and a step.
        self._patience = spec.timeouts.bound("data", "silence")
        self._stats = ChannelStats()
        self._idle_payload: Any = None  # during the next wait for a lease

    @property
    def run(self) -> int:
        """Id of the run, as in stamps."""
        return self._spec.run

    @property
    @abstractmethod
    def closing(self) -> bool:
        """Whether the worker closes: publish a last update and leave."""

    @property
    def published(self) -> int:
        """Sequence number of the last published update; 0 before the first."""
        return self._inbox.progress.sequence

    # ---- joining and leaving

    @abstractmethod
    def join(self) -> JoinResult:
        """Wait for all initial replicas, or for another replica's snapshot."""

    @abstractmethod
    def activate(self, step: int) -> ActivateResult:
        """Start to train as a joining replica that has loaded its snapshot.

        Args:
            step: Completed steps of the replica that made the snapshot.
        """

    @abstractmethod
    def serve_snapshot(self, make: MakeSnapshot | None) -> None:
        """Set the function that makes snapshots of this replica.

        Replicas that join load a snapshot, and survivors that cannot obtain missing
        updates.

        Args:
            make: Called by the training thread in waits and in `check`; returns plain
                values and arrays, including "received" and "grid". None: no snapshots
                for now.
        """

    @abstractmethod
    def fail(self, failure: Mapping[str, Any]) -> None:
        """Report a failure of this replica; ends the run unless it is still joining.

        Args:
            failure: Plain values; at least "type" and "summary".
        """

    @abstractmethod
    def leave(self, *, retires: bool = False) -> None:
        """Leave the run and release this replica's resources in the channel.

        Args:
            retires: The worker closes, and the run continues without this replica.
        """

    # ---- updates

    @abstractmethod
    def has_room(self, *, wait: bool = False, unsent: float = math.inf) -> bool:
        """Whether an update can be published now; counted as withheld if not.

        Args:
            wait: Block until there is room; with a relay, until the outbox is empty.
            unsent: No room if more than this many bytes of this replica's updates wait
                for one destination.
        """

    def publish(
        self, encode: Encode, step: int, *, partial: bool = False, force: bool = False
    ) -> Frame | None:
        """Publish an update to all other replicas.

        Args:
            encode: Makes the frame for a stamp; the frame must not change afterwards
                and is discarded if the outbox is full, so check :meth:`has_room`.
            step: Step of this update, counted from 1; receivers count it as completed.
            partial: More updates of this step follow; receivers count `step - 1` steps.
            force: Ignore the bounds and wait until the update is sent. For a leaving
                replica; works even after the run was stopped.

        Returns:
            The frame; None if the outbox is full.
        """
        sequence = self._inbox.progress.sequence + 1
        stamp = codec.Stamp(self._spec.run, self._replica, sequence, step)
        frame = encode(stamp)
        completed = step - 1 if partial else step
        if not self._queue(
            Message.update(stamp, completed, frame.nbytes), frame, force
        ):
            self._stats.withheld += 1
            return None
        self._stats.sent_bytes += frame.nbytes
        self._stats.frames += 1
        return frame

    def progress(self, step: int, interval: int = -1) -> None:
        """Announce the progress of this replica.

        Args:
            step: Completed steps.
            interval: Last completed sync interval.
        """
        former = self._inbox.progress
        progress = PeerProgress(step, former.sequence, max(interval, former.interval))
        if progress != former:  # else the last update carries it
            self._announce(progress)

    def count_steps(self, steps: int) -> None:
        """Note the steps that this replica has taken, for messages about it.

        Unlike `progress`, no other replica waits for them: the next heartbeat has them.
        """
        self._inbox.steps = steps

    def drain(self, up_to_step: int | None = None) -> DrainResult:
        """Drain pending updates.

        Args:
            up_to_step: Last step to drain, so that replicas in step do not apply
                updates of later steps early. None: all.
        """
        with self._inbox.changed:
            return self._inbox.pending.take(up_to_step)

    def drain_for_snapshot(self) -> tuple[DrainResult, dict[int, Received]]:
        """Drain pending updates; also return all updates received so far, by origin."""
        inbox = self._inbox
        with inbox.changed:  # no update may arrive in between
            received = {
                **inbox.received.by_origin(),
                self._replica: (self.published, ()),
            }
            return inbox.pending.take(), received

    def sync(self, step: int, grid: float) -> None:
        """Adopt the step and grid that all replicas begin with or agreed on.

        Args:
            step: Completed steps, now the same for all replicas.
            grid: Grid of the run from now on, parameter units.
        """
        inbox = self._inbox
        with inbox.changed:
            inbox.progress = inbox.progress._replace(step=step)
            inbox.pending.grid = grid
            for peer in list(inbox.peers.progress):
                inbox.record_progress(peer, PeerProgress(step))

    def agree(
        self, key: str, published: LastUpdates, gone: LastUpdates, load: Load
    ) -> None:
        """Wait, after an ``AGREE`` barrier, until all replicas have the same updates.

        No other update is accepted until a barrier of another kind is complete.

        Args:
            key: Name of the barrier.
            published: Last update of each replica that arrived at the barrier.
            gone: Replicas that left or failed, from the barrier's result.
            load: Called with the snapshot if this replica has to take over another
                replica's state.
        """
        # A replica that left after it arrived has published more since.
        self.wait_for_updates({**published, **gone})

    # ---- other replicas

    def peers(self) -> Sequence[int]:
        """The other replicas known to train now, ascending."""
        with self._inbox.changed:
            return sorted(self._inbox.peers.progress)

    def wait_for_peers(
        self, step: int, interval: int, max_staleness: int | None
    ) -> int:
        """Wait while more than `max_staleness` steps ahead of the slowest peer.

        Args:
            step: Completed steps.
            interval: Ignore peers that have completed this sync interval.
            max_staleness: Steps; None: do not wait.

        Returns:
            Steps ahead of the slowest peer; 0 if behind it.
        """
        inbox = self._inbox
        lead = inbox.lead(step, interval)
        if max_staleness is None or lead <= max_staleness:
            return lead
        with self._announcing_need(step - max_staleness):
            self._wait_for_others(
                WaitCause.STALENESS,
                lambda: inbox.lead(step, interval) <= max_staleness,
                lambda: {peer: p.step for peer, p in inbox.peers.progress.items()},
            )
        return inbox.lead(step, interval)

    def _announcing_need(self, step: int) -> AbstractContextManager[None]:
        """Let a relay that merges updates know that this replica waits for a step."""
        return contextlib.nullcontext()

    def wait(self, cause: WaitCause, future: Any, timeout_s: float | None) -> bool:
        """Wait for a future of another thread.

        Args:
            cause: Counter that the wait is added to.
            future: Has `done` and `add_done_callback`.
            timeout_s: Seconds; None: no bound.

        Returns:
            Whether the future is done.
        """
        future.add_done_callback(lambda _: self._inbox.wake())
        self._wait_until(cause, future.done, timeout_s)
        return bool(future.done())

    @abstractmethod
    def barrier(
        self,
        key: str,
        payload: Any,
        kind: BarrierKind = BarrierKind.MEET,
        client_payload: bytes = b"",
    ) -> BarrierResult:
        """Wait for all members and exchange payloads.

        Args:
            key: Name of the barrier; may be used again once the barrier is complete.
            payload: Plain values, or arrays, which the scheduler does not unpack.
            kind: ``AGREE``: a relay first passes on all published updates, then holds
                later ones back until a barrier of another kind is complete.
                ``REPORT``: the client reads the payloads too. ``ROUND``: see
                `set_idle`; other replicas may arrive with ``AGREE``.
            client_payload: For the client alone, with ``REPORT``.
        """

    def set_idle(self, payload: Any) -> None:
        """Exempt this replica from ``ROUND`` barriers during its next wait for a lease.

        Args:
            payload: Counts as this replica's payload at these barriers.
        """
        self._idle_payload = payload

    # ---- work and blobs

    @abstractmethod
    def lease(
        self,
        phase: str,
        epoch: int,
        finished: Finished,
        *,
        wait: bool = False,
        work: Work | None = None,
    ) -> Lease | SyncPoint | None:
        """Return finished leases and take the next one; None if no rows are free.

        Between two sync intervals of an epoch every replica gets a sync point instead,
        until a ``SYNC`` barrier is complete.

        Args:
            phase: ``"train"`` or ``"validation"``.
            epoch: Counted from 0.
            finished: One ``{"lease": ..., "examples": ..., "loss": ...}`` per lease.
            wait: Block until there is a lease or sync point, or all rows are finished.
            work: Work over all finished leases of the phase and epoch, used if the
                replica is lost before it reports. With a reason to stop the fit, no
                replica gets more rows in this epoch.
        """

    @abstractmethod
    def publish_blob(self, name: str, arrays: Arrays) -> None:
        """Publish arrays for other replicas to fetch, until they are dropped.

        Args:
            name: A second blob of the same name is ignored until the first is dropped.
            arrays: Must not change afterwards.
        """

    @abstractmethod
    def drop_blobs(self, keep: str = "") -> None:
        """Drop all published blobs except the one named `keep`."""

    @abstractmethod
    def fetch_blob(self, replica: int, name: str) -> Arrays | None:
        """Wait for a blob of another replica.

        Returns:
            The arrays, which must not be changed; None if the replica is gone.
        """

    def keep_state(  # noqa: B027
        self, epoch: int, make: Callable[[], Arrays] | None
    ) -> None:
        """Let the client fetch the agreed state, in runs where replicas can fail.

        Args:
            epoch: Epoch that has ended, counted from 0.
            make: Makes the state; called in another thread on each fetch until the next
                `keep_state`. None: serve no state and release the former one.
        """

    # ---- counters

    def stats(self) -> ChannelStats:
        """Counters since the last call."""
        stats, self._stats = self._stats, ChannelStats()
        inbox = self._inbox
        with inbox.changed:
            stats.received_bytes += inbox.received_bytes
            stats.refused, stats.folds = inbox.refused, inbox.pending.folds
            inbox.received_bytes = inbox.refused = inbox.pending.folds = 0
        return stats

    def stats_so_far(self) -> ChannelStats:
        """Counters since the last `stats`, not reset; without bytes of blobs."""
        return self._stats + ChannelStats(received_bytes=self._inbox.received_bytes)

    def report_live(self, live: LiveReport) -> None:  # noqa: B027
        """Send live numbers with the next request; they replace numbers not sent.

        Without `has_dashboard`, nothing is sent.
        """

    def check(self) -> None:
        """Raise :class:`Stopped` if this replica must leave; send no request.

        Makes a snapshot if another replica waits for one, see `serve_snapshot`.
        """
        if self._inbox.stopped is not None:
            raise Stopped(self._inbox.stopped)

    # ---- for subclasses

    @abstractmethod
    def _queue(self, message: Message, frame: Frame, force: bool) -> bool:
        """Queue a message with the frame as its payload; False if there is no room.

        If it is accepted, it advances this replica's progress in the inbox.
        """

    @abstractmethod
    def _announce(self, progress: PeerProgress) -> None:
        """Set this replica's progress in the inbox, and announce it to the others."""

    def _wait_until(
        self, cause: WaitCause, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Wait until ready; return False on timeout."""
        is_ready = self._timed(cause, ready, timeout_s)
        self.check()
        return is_ready

    def _timed(
        self, cause: WaitCause, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Time a wait of `_block` as its cause."""
        waits_s, started = self._stats.waits_s, self.clock.now()
        self._inbox.waiting = cause.value, started
        try:
            is_ready = self._block(ready, timeout_s)
        finally:
            self._inbox.waiting = None
        ended = self.clock.now()
        waits_s[cause.value] = waits_s.get(cause.value, 0.0) + (ended - started)
        self.on_wait(cause, started, ended)
        return is_ready

    def _block(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until ready or stopped; return False on timeout."""
        return self._inbox.wait_for(ready, timeout_s)

    def _wait_for_others(
        self, cause: WaitCause, ready: Callable[[], bool], state: Callable[[], Any]
    ) -> None:
        """Wait for other replicas.

        Raises:
            WaitTimeoutError: On timeout, if no update has arrived meanwhile: many may
                wait for a slow link. The scheduler, if any, removes replicas without
                heartbeats; the bound is for an unresponsive scheduler.
        """
        inbox = self._inbox
        while True:
            before = inbox.received_bytes
            if self._wait_until(cause, ready, self._patience.seconds):
                return
            if inbox.received_bytes != before:
                continue
            with inbox.changed:
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {self._patience} for other "
                    f"replicas ({cause}); state by replica: {state()}; last seen: "
                    f"{self._last_seen()}"
                )

    def _last_seen(self) -> str:
        with self._inbox.changed:
            return self._inbox.peers.described()

    def wait_for_updates(self, target: Mapping[int, int]) -> None:
        """Block until all updates of others up to the target have been received."""
        others = {r: last for r, last in target.items() if r != self._replica}
        inbox = self._inbox
        self._wait_for_others(
            WaitCause.UPDATES,
            lambda: inbox.received.reached(others),
            lambda: inbox.received.behind(others),
        )

    def _count_arrays(self, payloads: Mapping[int, Any]) -> None:
        """Count the bytes of arrays in barrier payloads, like those of frames."""
        for replica, payload in payloads.items():
            values = payload.values() if isinstance(payload, Mapping) else ()
            nbytes = sum(v.nbytes for v in values if isinstance(v, np.ndarray))
            if replica == self._replica:
                self._stats.sent_bytes += nbytes
            else:
                self._stats.received_bytes += nbytes
