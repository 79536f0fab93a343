"""The inbox of a replica: pending updates and the progress of peers.

The inbox drops duplicates, tracks gaps and sorts updates into an order that does not
depend on arrival. A full inbox folds pending updates together instead of growing.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskdl import codec
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    ChannelSpec,
    Message,
    MessageKind,
    PeerProgress,
    unwrap,
)
from daskdl.channel.transport import CLOCK, Clock, extended
from daskdl.codec import DenseUpdate, Stamp, Summand, SumUpdate, Update
from daskdl.compression.replica_vector import count_of, fold_, to_grid
from daskdl.errors import CodecError

logger = logging.getLogger(__name__)

# Updates received from one origin: the last before the first gap, and all beyond it.
Received = tuple[int, Sequence[int]]
NOTHING: Received = (0, ())
Name = tuple[int, int]  # of an update: its origin and its sequence number
MAX_AHEAD = 2**20  # updates beyond the first gap; no origin is so far ahead
MAX_REQUESTED = 1000  # updates of one origin in a request


def contains(received: Received, sequence: int) -> bool:
    """Whether an update of an origin has been received."""
    complete, beyond = received
    return sequence <= complete or sequence in beyond


def missing(
    mine: Mapping[int, Received], target: Mapping[int, Received]
) -> dict[int, list[int]]:
    """Updates of a target that one replica lacks, ascending, by origin.

    Example:
        >>> missing({7: (2, (5,))}, {7: (3, (5, 8)), 9: (1, ())})
        {7: [3, 8], 9: [1]}
    """
    gaps: dict[int, list[int]] = {}
    for origin, (complete, beyond) in target.items():
        my_complete, my_beyond = mine.get(origin, NOTHING)
        if my_complete >= complete and not beyond:  # nearly always
            continue
        wanted = {*range(my_complete + 1, complete + 1), *beyond} - {*my_beyond}
        lacking = sorted(sequence for sequence in wanted if sequence > my_complete)
        if lacking:
            gaps[origin] = lacking
    return gaps


class ReceivedSet:
    """The set of received updates, by origin.

    Updates of one origin are numbered from 1. Normally they arrive in order; a retried
    or re-routed update may arrive twice, and a dropped update leaves a gap until it is
    repaired. Memory grows with the updates beyond a gap, not with the size of the gap.
    A skipped update leaves no gap, but does not count as received.
    """

    def __init__(self, received: Mapping[int, Received] | None = None) -> None:
        self._complete: dict[int, int] = {}  # by origin, last update without a gap
        self._beyond: dict[int, set[int]] = {}  # by origin, received after a gap
        self._skipped: dict[int, set[int]] = {}  # by origin, also in the two above
        for origin, (complete, beyond) in (received or {}).items():
            self._complete[origin] = complete
            self._beyond[origin] = set()
            for sequence in beyond:
                self.accept(origin, sequence)

    def accept(self, origin: int, sequence: int) -> bool:
        """Add an update; False if it is a duplicate."""
        complete = self._complete.setdefault(origin, 0)
        beyond = self._beyond.setdefault(origin, set())
        if self._skipped and sequence in self._skipped.get(origin, ()):
            self._skipped[origin].remove(sequence)
            return True
        if sequence <= complete or sequence in beyond:
            return False
        beyond.add(sequence)
        while complete + 1 in beyond:
            complete += 1
            beyond.remove(complete)
        self._complete[origin] = complete
        return True

    def has(self, origin: int, sequence: int) -> bool:
        """Whether an update has been received."""
        is_counted = sequence <= self.complete(origin) or (
            sequence in self._beyond.get(origin, ())
        )
        return is_counted and sequence not in self._skipped.get(origin, ())

    def skip(self, origin: int, sequence: int) -> None:
        """Close the gap of an update that no replica can provide; it may arrive yet."""
        if self.accept(origin, sequence):
            self._skipped.setdefault(origin, set()).add(sequence)

    def complete(self, origin: int) -> int:
        """Return the last update of an origin before the first gap."""
        return self._complete.get(origin, 0)

    def all_complete(self) -> dict[int, int]:
        """Return the last update before the first gap, by origin."""
        return self._complete.copy()

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether there is no gap up to a target."""
        return all(self.complete(origin) >= last for origin, last in target.items())

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the sequence numbers of the gaps up to a target, by origin."""
        counted = {o: (c, [*self._beyond[o]]) for o, c in self._complete.items()}
        return missing(counted, {o: (last, ()) for o, last in target.items()})

    def by_origin(self) -> dict[int, Received]:
        """Return the received updates of each origin, as plain values for the wire.

        Returns:
            By origin, the last update before the first that was not received, and the
            updates received beyond it, ascending.

        Example:
            >>> positions = ReceivedSet()
            >>> [positions.accept(7, sequence) for sequence in (1, 2, 5)]
            [True, True, True]
            >>> positions.by_origin()
            {7: (2, (5,))}
            >>> positions.skip(7, 3)
            >>> positions.skip(7, 4)
            >>> positions.complete(7), positions.by_origin()
            (5, {7: (2, (5,))})
        """
        return {
            origin: self._without_skipped(origin)
            if self._skipped.get(origin)
            else (complete, tuple(sorted(self._beyond[origin])))
            for origin, complete in self._complete.items()
        }

    def _without_skipped(self, origin: int) -> Received:
        complete, skipped = self._complete[origin], self._skipped[origin]
        last = min(complete, min(skipped) - 1)
        later = {*range(last + 1, complete + 1), *self._beyond[origin]} - skipped
        return last, tuple(sorted(later))


class DeliveryBarrier:
    """Decides which updates may be delivered while replicas compare theirs.

    If a survivor applied an update after reporting its received updates, the others
    might lack that update when they continue. Senders repeat held updates after
    `release`, even those of failed replicas; the next comparison covers them. Not
    thread-safe: guarded by the lock of the received set.

    Attributes:
        holding: Whether updates are held back.

    Example:
        >>> barrier = DeliveryBarrier()
        >>> barrier.hold()
        >>> barrier.open({7: (3, (5,))})
        >>> [barrier.admits(7, sequence) for sequence in (3, 4, 5)]
        [True, False, True]
        >>> barrier.release()
        >>> barrier.admits(7, 4)
        True
    """

    holding: bool

    def __init__(self) -> None:
        self.holding = False
        self._target: Mapping[int, Received] = {}

    def hold(self) -> None:
        """Hold back all updates, until `open` or `release`."""
        self.holding = True
        self._target = {}

    def open(self, target: Mapping[int, Received]) -> None:
        """Admit the updates of the agreed target, until `hold` or `release`."""
        self._target = target

    def release(self) -> None:
        """Admit all updates."""
        self.holding = False

    def admits(self, origin: int, sequence: int) -> bool:
        """Whether an update may be delivered."""
        target = self._target.get(origin, NOTHING)
        return not self.holding or contains(target, sequence)


MAX_STEPS = 2  # steps with pending updates, if replicas take each step together
UPDATE_BYTES = 440  # memory overhead of an update, see test_queue_memory


class DrainResult(NamedTuple):
    """Updates to apply, in an order that does not depend on arrival."""

    updates: list[Update]
    folded_N: NDArray[np.int32] | None  # grid counts; None if nothing was folded


class QueuedUpdate(NamedTuple):
    """An update that is not applied yet."""

    bucket: int
    nbytes: int
    update: Update


class PendingUpdates:
    """Updates that have arrived and are not applied yet.

    Beyond the bound, updates are folded into one dense vector of counts. This is exact,
    because sums of whole grid steps do not depend on their order.

    With `in_step`, each step is a bucket with its own bound, and later updates of a
    folded bucket are folded too: folding changes the rounding of local, which must not
    depend on when updates arrive. Replicas that train wait for each other, so at most
    two steps have pending updates. No replica waits for a joining one: beyond two
    steps' worth, the joining replica folds all pending updates together.

    Args:
        size: Parameters of the model.
        grid: Grid of the run, parameter units.
        limit_bytes: Bytes of pending updates, with `in_step` of one step, beyond which
            they are folded.
        in_step: Replicas take each step together.

    Attributes:
        grid: Grid of the run, parameter units.
        folds: Number of times the bound was reached.
    """

    grid: float
    folds: int

    def __init__(
        self, size: int, grid: float, limit_bytes: int, *, in_step: bool = False
    ) -> None:
        self.grid = grid
        self.folds = 0
        self._size = size
        self._limit_bytes = limit_bytes
        self._in_step = in_step
        self._waiting: list[QueuedUpdate] = []
        self._bytes: Counter[int] = Counter()  # by bucket
        self._folded: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of pending updates that are not folded, with their overhead."""
        return self._bytes.total()

    def add(self, update: Update) -> None:
        """Add an update."""
        bucket = update.stamp.step if self._in_step else 0
        arrays = [value for value in update if isinstance(value, np.ndarray)]
        nbytes = UPDATE_BYTES + sum(array.nbytes for array in arrays)
        self._waiting.append(QueuedUpdate(bucket, nbytes, update))
        self._bytes[bucket] += nbytes
        was_folded = self._in_step and bucket in self._folded
        if was_folded or self._bytes[bucket] > self._limit_bytes:
            self.folds += not was_folded
            self._fold(bucket)
        if self._in_step and (
            len(self._folded) > MAX_STEPS or self.nbytes > MAX_STEPS * self._limit_bytes
        ):
            self._merge()

    def take(self, up_to_step: int | None = None) -> DrainResult:
        """Take all updates, or only those up to a step."""
        last = math.inf if up_to_step is None else up_to_step
        due = [q.update for q in self._waiting if q.update.stamp.step <= last]
        self._waiting = [q for q in self._waiting if q.update.stamp.step > last]
        self._bytes.clear()
        for queued in self._waiting:
            self._bytes[queued.bucket] += queued.nbytes
        due_buckets = [bucket for bucket in self._folded if bucket <= last]
        folded = [self._folded.pop(bucket) for bucket in due_buckets]
        for later_N in folded[1:]:
            folded[0] += later_N
        updates = sorted(due, key=attrgetter("stamp"))
        return DrainResult(updates, folded[0] if folded else None)

    def clear(self) -> None:
        """Drop all pending updates."""
        self._waiting.clear()
        self._bytes.clear()
        self._folded.clear()

    def _merge(self) -> None:
        """Fold the updates of all steps into the earliest one."""
        self.folds += 1
        buckets = {queued.bucket for queued in self._waiting} | self._folded.keys()
        for bucket in buckets:
            self._fold(bucket)
        earliest, *later = sorted(buckets)
        for bucket in later:
            self._folded[earliest] += self._folded.pop(bucket)

    def _fold(self, bucket: int) -> None:
        if bucket not in self._folded:
            self._folded[bucket] = np.zeros(self._size, np.int32)
        for queued in self._waiting:
            if queued.bucket == bucket:
                fold_(self._folded[bucket], queued.update, self.grid)
        self._waiting = [queued for queued in self._waiting if queued.bucket != bucket]
        self._bytes[bucket] = 0


class Peers:
    """Progress of the other replicas that train.

    Announced progress counts once the replica's updates up to it have arrived: until
    then `progress` lags behind `announced`.

    Args:
        clock: Dates the last announcements, for error messages.

    Attributes:
        failed: Replicas that failed or left, for which no replica waits.
        progress: Progress that counts, by replica.
        announced: Latest announced progress, by replica.
    """

    failed: set[int]
    progress: dict[int, PeerProgress]
    announced: dict[int, PeerProgress]

    def __init__(self, clock: Clock) -> None:
        self.failed = set()
        self.progress = {}
        self.announced = {}
        self._clock = clock
        self._news_at: dict[int, float] = {}

    def record_progress(
        self, origin: int, progress: PeerProgress, complete: float
    ) -> bool:
        """Record progress that a replica announced; return whether it was new.

        Args:
            origin: The replica.
            progress: Its progress.
            complete: Its last update before the first gap; infinite: count in any case.
        """
        if origin in self.failed:
            return False
        former = self.announced.get(origin)
        latest = PeerProgress(*map(max, former or progress, progress))
        if latest != former:
            self._news_at[origin] = self._clock.now()
            self.announced[origin] = latest
        counted = latest if latest.sequence <= complete else progress
        if counted.sequence <= complete:
            before = self.progress.get(origin, counted)
            self.progress[origin] = PeerProgress(*map(max, before, counted))
        return latest != former

    def fail(self, origin: int) -> None:
        """Record that a replica has failed or left."""
        self.failed.add(origin)
        self.announced.pop(origin, None)
        self.progress.pop(origin, None)

    def described(self) -> str:
        """Describe each replica's last announcement and its age, for messages."""
        now = self._clock.now()
        return "; ".join(
            f"replica {origin} at step {announced.step}, update {announced.sequence}, "
            f"{now - self._news_at[origin]:.1f} s ago"
            for origin, announced in sorted(self.announced.items())
        )


class PreSnapshotBuffer:
    """Updates that arrive at a joining replica before its snapshot; first copies only.

    They are not folded, since the snapshot may contain some of them.
    """

    def __init__(self) -> None:
        self._names: list[tuple[Message, Sequence[Name]]] = []
        self._nbytes = 0
        self._received = ReceivedSet()

    @property
    def messages(self) -> list[Message]:
        """Kept messages, oldest first."""
        return [message for message, _ in self._names]

    def keep(
        self, message: Message, limit_bytes: int, names: Sequence[Name] = ()
    ) -> bool | None:
        """Keep a first copy; False if it is a duplicate, None if there is no room.

        Args:
            message: An update, or the sum of several.
            limit_bytes: Bound on the bytes of all messages.
            names: The updates of a sum.
        """
        names = names or [(message.origin, message.sequence)]
        if self._names and self._nbytes >= limit_bytes:
            return None
        accepted = [self._received.accept(*name) for name in names]
        if not any(accepted):
            return False
        self._names.append((message, names))
        self._nbytes += message.nbytes + MESSAGE_BYTES
        return True

    def drop(self, cut: Mapping[int, int]) -> None:
        """Drop the updates of each origin up to a sequence number."""
        self._names = [
            (message, names)
            for message, names in self._names
            if any(sequence > cut.get(origin, 0) for origin, sequence in names)
        ]
        self._nbytes = sum(m.nbytes + MESSAGE_BYTES for m in self.messages)


class Inbox:
    """Received updates of one replica, and progress of its peers.

    The event loop fills the inbox and the training thread empties it. Methods may be
    called from any thread; `changed` guards the attributes listed after it.

    Args:
        size: Parameters of the model.
        grid: Grid of the run, parameter units.
        limit_bytes: Bytes of pending updates beyond which they are folded.
        in_order: Messages of one origin arrive in order. If False, a step counts once
            its updates have arrived.
        in_step: Replicas take each step together; see :class:`PendingUpdates`.
        changed: A condition shared with other objects; None: a new one.
        clock: Times the waits and announcements.
        replica: Number of this replica.

    Attributes:
        replica: As passed.
        in_order: As passed; False if the replica joins, or got an unreadable update.
        stopped: Reason why the replica has to leave; None while the run continues.
        awaits_snapshot: Whether the replica has not joined, or waits for its snapshot.
            Until then no update counts as received or missing.
        waiting: Cause of the training thread's current wait, and the clock's time at
            which it began; None while the thread computes.
        progress: Progress of this replica.
        steps: Steps that this replica has taken, for messages about it.
        clock: Times the waits and announcements.
        changed: Notified after each change; reentrant.
        passed_on: Number of the last ``AGREE`` barrier before which a relay has
            forwarded all updates to this replica.
        received: Received updates.
        unreadable: Updates that arrived unreadable and have to be requested again: the
            step that each completes, by origin and sequence number.
        barrier: Decides which updates may be delivered.
        pending: Updates that are not applied yet.
        peers: Progress of the other replicas.
        received_bytes: Bytes of received frames since the counters were read.
        refused: Undecodable frames since the counters were read.
    """

    replica: int
    in_order: bool
    stopped: str | None
    awaits_snapshot: bool
    waiting: tuple[str, float] | None
    progress: PeerProgress
    steps: int
    clock: Clock
    changed: threading.Condition
    passed_on: int
    received: ReceivedSet
    unreadable: dict[int, dict[int, int]]
    barrier: DeliveryBarrier
    pending: PendingUpdates
    peers: Peers
    received_bytes: int
    refused: int

    def __init__(
        self,
        size: int,
        grid: float,
        limit_bytes: int,
        *,
        in_order: bool = True,
        in_step: bool = False,
        changed: threading.Condition | None = None,
        clock: Clock = CLOCK,
        replica: int = -1,
    ) -> None:
        self.replica = replica
        self.stopped = None
        self.awaits_snapshot = False
        self.waiting = None
        self.progress = PeerProgress()
        self.steps = 0
        self.clock = clock
        self.passed_on = 0
        self.changed = clock.condition() if changed is None else changed
        self.received = ReceivedSet()
        self.unreadable = {}
        self.barrier = DeliveryBarrier()
        self.pending = PendingUpdates(size, grid, limit_bytes, in_step=in_step)
        self.peers = Peers(clock)
        self.received_bytes = 0
        self.refused = 0
        self.in_order = in_order

    def put(self, message: Message, update: Update) -> bool:
        """Add a pending update, once.

        Returns:
            False if the update is a duplicate, if it must not be delivered now, or if
            its number is implausibly high, which counts as refused.
        """
        origin, sequence = message.origin, message.sequence
        with self.changed:
            if not self.barrier.admits(origin, sequence):
                return False
            if sequence - self.received.complete(origin) > MAX_AHEAD:
                self.refused += 1
                return False
            if not self.received.accept(origin, sequence):
                return False
            if self.unreadable:
                self.unreadable.get(origin, {}).pop(sequence, None)
            self.pending.add(update)
            self.received_bytes += message.nbytes
            self.record_progress(origin, PeerProgress(message.step, sequence))
            return True

    def divide(self, summands: Iterable[Summand]) -> tuple[list[Summand], list[Name]]:
        """Divide the updates of a sum into new ones and those that were received.

        This replica's own updates count as received.
        """
        new: list[Summand] = []
        received: list[Name] = []
        with self.changed:
            for summand in summands:
                origin, sequence, _ = summand
                if origin == self.replica or self.received.has(origin, sequence):
                    received.append((origin, sequence))
                else:
                    new.append(summand)
        return new, received

    def put_sum(self, new: Sequence[Summand], update: Update, nbytes: int) -> bool:
        """Add the sum of pending updates, all of them or none.

        Args:
            new: The updates, from :meth:`divide`.
            update: Their sum.
            nbytes: Bytes of the frame.

        Returns:
            False if one of them has been received meanwhile, or must not be delivered
            now.
        """
        with self.changed:
            if self.divide(new)[1] or not self.admits(new):
                return False
            for origin, sequence, step in new:
                self.received.accept(origin, sequence)
                if self.unreadable:
                    self.unreadable.get(origin, {}).pop(sequence, None)
                self.record_progress(origin, PeerProgress(step, sequence))
            self.pending.add(update)
            self.received_bytes += nbytes
            return True

    def admits(self, summands: Iterable[Summand]) -> bool:
        """Whether a barrier lets all updates of a sum be delivered."""
        with self.changed:
            return all(self.barrier.admits(*summand[:2]) for summand in summands)

    def add_unreadable(self, message: Message) -> None:
        """Record that an update arrived unreadable and has to be requested again.

        Later progress of its origin counts once the update has arrived or is skipped.
        Updates of unknown replicas and updates far ahead do not belong to the run; a
        joining replica does not know the others yet.
        """
        origin, sequence = message.origin, message.sequence
        with self.changed:
            gone, received = origin in self.peers.failed, self.received
            ahead = sequence - received.complete(origin)
            is_known = gone or self.awaits_snapshot or origin in self.peers.announced
            is_duplicate = contains(received.by_origin().get(origin, NOTHING), sequence)
            if not is_known or is_duplicate or ahead > MAX_REQUESTED:
                return
            self.in_order = False
            self.unreadable.setdefault(origin, {})[sequence] = message.step
            if gone:
                self.skip_unreadable(origin)

    def advance(self, message: Message) -> None:
        """Advance this replica's progress by its next update."""
        step, _, interval = self.progress
        self.progress = PeerProgress(
            max(step, message.step), message.sequence, interval
        )

    def skip_unreadable(self, origin: int) -> list[int]:
        """Stop waiting for unreadable updates of an origin; return their numbers."""
        with self.changed:
            skipped = sorted(self.unreadable.pop(origin, {}).items())
            for sequence, step in skipped:
                self.received.skip(origin, sequence)
                self.record_progress(origin, PeerProgress(step, sequence))
            return [sequence for sequence, _ in skipped]

    def holds_back(self, message: Message) -> bool:
        """Whether a barrier holds an update back, so that it must be sent again."""
        origin, sequence = message.origin, message.sequence
        with self.changed:
            if self.barrier.admits(origin, sequence):
                return False
            received = self.received.by_origin().get(origin, NOTHING)
            return not contains(received, sequence)

    def process_control(self, message: Message) -> bool:
        """Process a control message; False if its progress is not new."""
        if message.kind == MessageKind.STOP:
            self.stop(str(message.payload))
        elif message.kind == MessageKind.FAILED:
            with self.changed:
                self.peers.fail(message.origin)
                self.skip_unreadable(message.origin)
                self.changed.notify_all()
        elif message.kind == MessageKind.PASSED_ON:
            with self.changed:
                self.passed_on = max(self.passed_on, message.sequence)
                self.changed.notify_all()
        else:
            interval = message.payload if message.kind == MessageKind.PROGRESS else -1
            progress = PeerProgress(message.step, message.sequence, interval)
            return self.record_progress(message.origin, progress)
        return True

    def record_progress(self, origin: int, progress: PeerProgress) -> bool:
        """Record the progress of another replica; return whether it was new."""
        with self.changed:
            counts = self.in_order and not self.awaits_snapshot
            complete = math.inf if counts else self.received.complete(origin)
            is_new = self.peers.record_progress(origin, progress, complete)
            self.changed.notify_all()
            return is_new

    def lead(self, step: int, interval: int) -> int:
        """Return the number of steps ahead of the slowest peer; 0 if behind it.

        Args:
            step: Completed steps.
            interval: Ignore peers that have completed this sync interval.
        """
        with self.changed:
            progress = self.peers.progress.values()
            steps = [p.step for p in progress if p.interval < interval]
        return max(step - min(steps, default=step), 0)

    def begin(
        self, received: Mapping[int, Received], grid: float, cut: Mapping[int, int]
    ) -> None:
        """Start from a snapshot: adopt its grid and its received updates.

        No replica sends updates up to the `cut` to this replica again, so it has to
        request those that the snapshot lacks, like unreadable updates.
        """
        with self.changed:
            self.pending.grid = grid
            self.pending.clear()
            self.received = ReceivedSet(received)
            lacking = missing(received, {o: (last, ()) for o, last in cut.items()})
            self.unreadable = {o: dict.fromkeys(gaps, 0) for o, gaps in lacking.items()}
            for origin in self.peers.failed:
                self.skip_unreadable(origin)
            for origin, announced in self.peers.announced.items():
                self.record_progress(origin, announced)

    def hold(self) -> dict[int, Received]:
        """Hold back all updates from now on; return the updates received so far."""
        with self.changed:
            self.barrier.hold()
            return self.received.by_origin()

    def stop(self, reason: str) -> None:
        """End every wait on this inbox; later reasons are ignored."""
        with self.changed:
            self.stopped = self.stopped or reason
            self.changed.notify_all()

    def wake(self) -> None:
        """Make all waits check their conditions again."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None,
        *,
        even_if_stopped: bool = False,
    ) -> bool:
        """Block until ready or stopped; return False on timeout, see `extended`."""

        def ended() -> bool:
            return (self.stopped is not None and not even_if_stopped) or ready()

        with self.changed:
            began = self.clock.now()
            if self.changed.wait_for(ended, timeout_s):
                return True
            assert timeout_s is not None
            now = self.clock.now()
            left_s = extended(began + timeout_s, now) - now
            return left_s > 0 and self.changed.wait_for(ended, left_s)


class SharedFrame:
    """A received frame for several replicas of a run, decoded once.

    Attributes:
        payload: The frame as it arrived.
        result: What was decoded, or the error; None: not decoded yet.
    """

    payload: Any
    result: Update | CodecError | None

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.result = None


def undecoded_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of the frames that have not been decoded yet."""
    return sum(
        m.nbytes
        for m in messages
        if not (isinstance(m.payload, SharedFrame) and m.payload.result is not None)
    )


def decode_all(
    messages: Sequence[Message], spec: ChannelSpec, grid: float
) -> list[Update | CodecError]:
    """Decode the frames of messages together.

    Returns:
        For each message its update, in steps of the grid, which must not be changed; or
        the error, if its frame is invalid, or not the update of the message.
    """
    frames = [
        m.payload if isinstance(m.payload, SharedFrame) else SharedFrame(m.payload)
        for m in messages
    ]
    unread: list[SharedFrame] = []
    views: list[memoryview] = []
    for frame in frames:
        if frame.result is None:
            try:
                views.append(memoryview(unwrap(frame.payload)))
            except (TypeError, ValueError, LookupError) as error:  # not bytes
                frame.result = CodecError(str(error))
            else:
                unread.append(frame)
    results = codec.decode_all(views, run=spec.run, size=spec.size)
    for frame, result in zip(unread, results, strict=True):
        frame.result = result
    return [
        _of_message(frame.result, message, grid)
        for frame, message in zip(frames, messages, strict=True)
    ]


def _of_message(
    result: Update | CodecError | None, message: Message, grid: float
) -> Update | CodecError:
    assert result is not None
    if isinstance(result, CodecError):
        return result
    try:
        return on_grid(result, message, grid)
    except CodecError as error:
        return error


def on_grid(update: Update, message: Message, grid: float) -> Update:
    """Return a decoded update in steps of a grid.

    Raises:
        CodecError: If it is not the update of the message, or not on the grid.
    """
    if update.stamp[1:3] != (message.origin, message.sequence):
        raise CodecError(
            f"(replica, sequence) {message[1:3]} sent, {update.stamp[1:3]} in frame"
        )
    if isinstance(update, codec.SparseUpdate):
        count_of(update.threshold, grid)
        return update
    return to_grid(update, grid)


def sum_on_grid(
    total: SumUpdate, originals: Iterable[Update], grid: float
) -> DenseUpdate:
    """Return a sum without some of its updates, in steps of a grid.

    Raises:
        CodecError: If it is not on the grid.
    """
    counts_N = np.zeros(total.size, np.int32)
    total.add_(counts_N, count_of(total.threshold, grid))
    for original in originals:
        if isinstance(original, DenseUpdate):
            counts_N -= to_grid(original, grid).counts_N
            continue
        levels_K = original.levels_K
        levels_K = np.empty(0, np.uint8) if levels_K is None else levels_K
        steps = -count_of(original.threshold, grid)
        codec.add_entries_(counts_N, original.entries_K, levels_K, steps)
    return DenseUpdate(Stamp(total.run, 0, 0, 0), total.size, grid, counts_N)


def refuse(message: Message, error: Exception, spec: ChannelSpec, inbox: Inbox) -> None:
    """Count and log an update that could not be decoded, to be requested again."""
    with inbox.changed:
        inbox.refused += 1
        inbox.add_unreadable(message)
    logger.warning(
        "replica %s refused update %s of replica %s: %s",
        spec.replica,
        message.sequence,
        message.origin,
        error,
    )
