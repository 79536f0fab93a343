"""The channel between threads of one process, on the scheduler's run state.

Hides that there is no network: one condition guards the run, and a sender puts its
updates directly into the inboxes of all others.
"""

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import (
    ActivateResult,
    BarrierResult,
    Channel,
    ChannelStats,
    Frame,
    JoinResult,
    MakeSnapshot,
)
from daskdl.channel.inbox import Inbox, on_grid, refuse
from daskdl.channel.leasing import Finished, Lease, RunSpec, SyncPoint
from daskdl.channel.protocol import (
    Arrays,
    BarrierKind,
    ChannelSpec,
    Message,
    MessageKind,
    PeerProgress,
    WaitCause,
    Work,
    run_id,
)
from daskdl.channel.run_state import RunState
from daskdl.channel.transport import CLOCK, Clock, Outbox
from daskdl.config import Bound
from daskdl.errors import ChannelError, CodecError, WaitTimeoutError


class LocalRun:
    """A run in this process, shared by its client and its replicas' channels.

    Attributes:
        state: State of the run; guarded by `changed`.
        changed: Notified after every change.
        blobs: Published blobs of each replica, by name.
        fetched_bytes: Bytes fetched of each replica's blobs since its last `stats`.
        now: The time, seconds.
    """

    state: RunState
    changed: threading.Condition
    blobs: defaultdict[int, dict[str, Arrays]]
    fetched_bytes: Counter[int]
    now: Callable[[], float]

    def __init__(self, spec: RunSpec, clock: Clock = CLOCK) -> None:
        self.state = RunState(spec, clock.now())
        self.changed = clock.condition()
        self.now = clock.now
        self._clock = clock
        self.blobs = defaultdict(dict)
        self.fetched_bytes = Counter()
        self._inboxes: dict[int, Inbox] = {}

    def enter(self, spec: ChannelSpec) -> Inbox:
        """Make the inbox of a replica."""
        replica = spec.replica
        with self.changed:
            if replica in self._inboxes:
                raise ChannelError(
                    f"replica {replica} of run {run_id(spec.run)} is already open"
                )
            inbox = Inbox(
                spec.size,
                spec.grid,
                spec.inbox_bytes,
                in_step=spec.in_step,
                changed=self.changed,
                clock=self._clock,
                replica=replica,
            )
            inbox.stopped = self.state.stopped
            self._inboxes[replica] = inbox
        return inbox

    def leave(self, replica: int) -> None:
        """Remove a replica; the others no longer wait for it."""
        with self.changed:
            self.blobs.pop(replica, None)
            if self._inboxes.pop(replica, None) is not None:
                self.state.leave(replica, self.now())
                self.notify()

    @contextlib.contextmanager
    def waiting(self, replica: int) -> Iterator[None]:
        """Exempt a replica from the timeout while it waits for others."""
        member = self.state.members.replicas[replica]
        member.heartbeat_at = math.inf
        try:
            yield
        finally:
            member.heartbeat_at = self.now()

    def patience_s(self, bound: Bound) -> float:
        """Seconds until the first replica may time out, at most the bound."""
        members = self.state.members
        oldest = min(members.replicas[r].heartbeat_at for r in members.present)
        return max(min(oldest + bound.seconds - self.now(), bound.seconds), 0.0)

    def check_heartbeats(self, bound: Bound) -> None:
        """Give up the run if a replica has timed out.

        No replica takes over: the thread cannot be ended and may go on with its lease.
        """
        members, now = self.state.members, self.now()
        timed_out = members.timed_out(now - bound.seconds)
        if timed_out:
            silent = members.describe(timed_out, now)
            with self.changed:
                self.state.give_up(
                    WaitTimeoutError(f"no heartbeat for {bound} of {silent}")
                )
                self.notify()

    def describe(self, replica: int) -> str:
        """Describe a replica: worker, progress, age of the heartbeat."""
        with self.changed:
            return self.state.members.describe([replica], self.now())

    def watch(
        self, timeout_s: float, over: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Any]]:
        """Wait for new events and return them; none after a timeout."""
        with self.changed:
            self.changed.wait_for(lambda: self.state.events or over(), timeout_s)
            return self.state.take_events()

    def stop(self, reason: str) -> None:
        """Stop the run: every replica has to leave."""
        with self.changed:
            self.state.stop(reason)
            self.notify()

    def notify(self) -> None:
        """Wake every waiting replica; call with `changed` held."""
        if self.state.stopped is not None:  # also for replicas that have not joined
            for inbox in self._inboxes.values():
                inbox.stop(self.state.stopped)
        self.changed.notify_all()


class DirectOutbox(Outbox):
    """Delivers messages to a replica at once, in the thread of their sender."""

    def __init__(self, spec: ChannelSpec, inbox: Inbox) -> None:
        super().__init__(math.inf)
        self._spec = spec
        self._inbox = inbox

    @override
    def append(self, message: Message) -> None:
        if message.kind != MessageKind.UPDATE:
            if message.kind not in (MessageKind.MEMBERS, MessageKind.MEMBER):
                self._inbox.process_control(message)
        elif isinstance(message.payload, Exception):
            refuse(message, message.payload, self._spec, self._inbox)
            self._inbox.skip_unreadable(message.origin)  # there is no other copy
        else:
            self._inbox.put(message, message.payload)


class LocalChannel(Channel):
    """The channel of one replica among threads.

    No replica joins later. Updates arrive before `publish` returns; an update that
    cannot be decoded is skipped.
    """

    def __init__(self, run: LocalRun, spec: ChannelSpec) -> None:
        super().__init__(run.enter(spec), spec)
        self._run = run
        self._state = run.state
        self._changed = run.changed

    @property
    @override
    def closing(self) -> bool:
        return False

    @override
    def _block(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        # No watchdog removes an inactive replica here, so a wait without a bound ends
        # once a replica is inactive for longer than a lease and a step may take.
        run = self._run
        with run.changed, run.waiting(self._replica):
            if timeout_s is not None:
                return super()._block(ready, timeout_s)
            while not super()._block(ready, run.patience_s(self._patience)):
                run.check_heartbeats(self._patience)
            return True  # ready, or the run was given up

    # ---- joining and leaving

    @override
    def join(self) -> JoinResult:
        state = self._state
        with self._changed:
            self.check()
            delivery = DirectOutbox(self._spec, self._inbox)
            state.join(self._replica, self._run.now(), delivery)
            self._changed.notify_all()
            bound = self._timeouts.bound("join")
            if not self._wait_until(
                WaitCause.JOIN, lambda: state.members.started, bound.seconds
            ):
                state.give_up_late(bound, self._run.now())
                self._run.notify()
                self.check()
            members = state.members.present
            for peer in members:
                if peer != self._replica:
                    self._inbox.record_progress(peer, PeerProgress())
        return JoinResult(members, None)

    @override
    def activate(self, step: int) -> ActivateResult:
        raise ChannelError("a run in one process has no joining replicas")

    @override
    def serve_snapshot(self, make: MakeSnapshot | None) -> None:
        pass  # no replica joins later

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        with self._changed:
            self._state.fail(self._replica, failure)
            self._run.notify()

    @override
    def leave(self, *, retires: bool = False) -> None:
        self._run.leave(self._replica)

    # ---- updates

    @override
    def has_room(self, *, wait: bool = False, unsent: float = math.inf) -> bool:
        if wait:
            self.check()
        return True

    @override
    def _queue(self, message: Message, frame: Frame, force: bool) -> bool:
        spec, inbox = self._spec, self._inbox
        try:  # decoded once for all replicas, outside the lock
            update = codec.decode(frame.data, run=spec.run, size=spec.size)
            payload: Any = on_grid(update, message, inbox.pending.grid)
        except CodecError as error:
            payload = error
        with self._changed:
            inbox.advance(message)
            self._publish([message._replace(payload=payload)])
        return True

    @override
    def count_steps(self, steps: int) -> None:
        member = self._state.members.replicas[self._replica]
        member.steps, member.heartbeat_at = steps, self._run.now()

    @override
    def _announce(self, progress: PeerProgress) -> None:
        with self._changed:
            self._inbox.progress = progress
            self._publish([])

    def _publish(self, messages: Sequence[Message]) -> None:
        self._state.members.replicas[self._replica].heartbeat_at = self._run.now()
        self._state.publish(self._replica, messages, self._inbox.progress)

    # ---- requests

    @override
    def lease(
        self,
        phase: str,
        epoch: int,
        finished: Finished,
        *,
        wait: bool = False,
        work: Work | None = None,
    ) -> Lease | SyncPoint | None:
        state, replica, now = self._state, self._replica, self._run.now()
        with self._changed:
            self.check()
            state.members.replicas[replica].heartbeat_at = now
            idle = self._idle_payload if wait else None
            state.give_back(replica, phase, epoch, finished, now, work, idle)
            self._changed.notify_all()
            if wait:
                ready = lambda: state.can_lease(replica, phase, epoch)  # noqa: E731
                self._wait_until(WaitCause.LEASE, ready, None)
                self._idle_payload = None
            return state.lease(replica, phase, epoch, lambda key: False)

    @override
    def barrier(
        self,
        key: str,
        payload: Any,
        kind: BarrierKind = BarrierKind.MEET,
        client_payload: bytes = b"",
    ) -> BarrierResult:
        state = self._state
        with self._changed:
            self.check()
            barrier = state.arrive(key, self._replica, payload, client_payload, kind)
            self._changed.notify_all()
            self._wait_until(WaitCause.GATHER, lambda: barrier.complete, None)
            payloads = dict(sorted(barrier.payloads.items()))
            self._count_arrays(payloads)
            return BarrierResult(payloads, dict(barrier.gone or {}), barrier.counted)

    @override
    def publish_blob(self, name: str, arrays: Arrays) -> None:
        with self._changed:
            self._run.blobs[self._replica].setdefault(name, arrays)
            self._changed.notify_all()

    @override
    def drop_blobs(self, keep: str = "") -> None:
        with self._changed:
            blobs = self._run.blobs[self._replica]
            for name in blobs.keys() - {keep}:
                del blobs[name]

    @override
    def fetch_blob(self, replica: int, name: str) -> Arrays | None:
        blobs, members = self._run.blobs, self._state.members
        with self._changed:
            self._wait_until(
                WaitCause.FETCH,
                lambda: name in blobs[replica] or not members.is_here(replica),
                None,
            )
            arrays = blobs[replica].get(name)
            nbytes = sum(array.nbytes for array in (arrays or {}).values())
            self._run.fetched_bytes[replica] += nbytes
        self._stats.received_bytes += nbytes
        return arrays

    @override
    def stats(self) -> ChannelStats:
        stats = super().stats()
        with self._changed:
            stats.sent_bytes += self._run.fetched_bytes.pop(self._replica, 0)
        return stats
