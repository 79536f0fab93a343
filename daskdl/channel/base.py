"""The channel as a replica sees it, and how its waits are bounded."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.channel.inbox import Arrived, Inbox, Received
from daskdl.channel.leasing import Finished, Lease, SyncPoint
from daskdl.channel.protocol import Arrays, Barrier, Endpoint
from daskdl.codec import Stamp
from daskdl.config import Bound
from daskdl.errors import WaitTimeoutError
from daskdl.thresholds import Drained


class Entry(NamedTuple):
    """How a replica comes into a run.

    A founder finds all others there. A newcomer brings a snapshot with it: what
    another replica's `serve` made, which it has to load before it is activated.
    """

    members: Sequence[int]  # ascending, itself included; of a newcomer only itself
    snapshot: Mapping[str, Any] | None


class Seating(NamedTuple):
    """Where a newcomer begins."""

    members: Sequence[int]  # that train, ascending, itself included
    epoch: int  # counted from 0
    report: Mapping[int, Any]  # what all said at the end of the epoch before, if any
    lap: int = 0  # counted from 0 over all epochs


Last = Mapping[int, int]  # sequence number of the last update of each replica


class Gathered(NamedTuple):
    """What all members said at a barrier."""

    notes: Mapping[int, Any]  # by replica, lost ones included if they had arrived
    gone: Last  # of those that left or were lost
    # At a ``REPORT``, by the run in this epoch: "refused", "repeated" and "departed".
    # At a ``PAUSE``: "departed", of all but those whose parts a checkpoint has.
    # At an ``AGREE``: "present", how many replicas there are, newcomers included.
    counted: Mapping[str, Any] = {}


@dataclass
class Traffic:
    """What a channel has carried since the epoch began.

    Attributes:
        sent_bytes: Of frames published, and of arrays in notes; each is counted once.
        received_bytes: Of those that came from others.
        frames: Published.
        withheld: Exchanges skipped because the outbox was full.
        refused: Frames that could not be read.
        folds: How often the inbox was folded.
        repaired: Updates that came only when they were asked for.
        waits_s: Seconds waited, by cause.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    frames: int = 0
    withheld: int = 0
    refused: int = 0
    folds: int = 0
    repaired: int = 0
    waits_s: dict[str, float] = field(default_factory=dict)


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
    ) -> Lease | SyncPoint | None:
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


class Waits:
    """The waits of one replica's training thread.

    Args:
        inbox: Woken by whatever may end a wait.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        patience: For what others do.
        waited_s: Seconds waited since the last `count_off`, by cause.
    """

    patience: Bound
    waited_s: dict[str, float]

    def __init__(self, inbox: Inbox, endpoint: Endpoint) -> None:
        self.waited_s = {}
        # The longest that a piece and a step of another may take.
        self.patience = endpoint.timeouts.bound("data", "silence")
        self._inbox = inbox
        self._timeouts = endpoint.timeouts
        self._replica = endpoint.replica

    def check(self) -> None:
        """Raise if the run was stopped."""
        if self._inbox.stopped is not None:
            raise Stopped(self._inbox.stopped)

    def until(
        self, cause: str, ready: Callable[[], bool], state: Callable[[], Any]
    ) -> None:
        """Wait for what others do.

        Args:
            cause: For messages and counters.
            ready: Checked whenever something arrives.
            state: By replica, for the message.

        Raises:
            WaitTimeoutError: If it takes too long. Where there is a scheduler it gives
                up who is silent; the bound is for one that says nothing either.
        """
        if not self.until_true(cause, ready, self.patience.seconds):
            raise WaitTimeoutError(
                f"replica {self._replica} waited {self.patience} for {cause}; by "
                f"replica: {state()}; last heard: {self.last_heard()}"
            )

    def until_done(self, cause: str, future: Any, timeout_s: float) -> bool:
        """Wait for a future that wakes the inbox; returns whether it is done."""
        self.until_true(cause, future.done, timeout_s)
        return bool(future.done())

    def until_true(
        self, cause: str, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Wait, leave if the run is stopped, and say whether it was in time.

        Args:
            cause: For counters.
            ready: Checked whenever something arrives.
            timeout_s: Seconds. None: others have to do something first.
        """
        came = self._wait(cause, ready, timeout_s)
        self.check()
        return came

    def last_heard(self) -> str:
        """Of the other replicas, for messages."""
        return "; ".join(self._inbox.last_words())

    def count_off(self) -> dict[str, float]:
        """Seconds waited since the last call, by cause."""
        waited_s, self.waited_s = self.waited_s, {}
        return waited_s

    def _wait(
        self, cause: str, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        started = time.perf_counter()
        came = self._until(ready, timeout_s)
        more = time.perf_counter() - started
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + more
        return came

    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._inbox.wait_for(ready, timeout_s)


class Receiver(Channel):
    """The receiving half of a replica's channel; how it sends is a subclass's matter.

    Args:
        inbox: What has arrived.
        waits: Where it waits.
        endpoint: Which replica it is, and the bounds.
    """

    def __init__(self, inbox: Inbox, waits: Waits, endpoint: Endpoint) -> None:
        self._inbox = inbox
        self._waits = waits
        self._endpoint = endpoint
        self._timeouts = endpoint.timeouts
        self._replica = endpoint.replica
        self._traffic = Traffic()

    @override
    def others(self) -> Sequence[int]:
        return self._inbox.others()

    @override
    def next_stamp(self, step: int) -> codec.Stamp:
        return codec.Stamp(
            self._endpoint.run, self._replica, self.published() + 1, step
        )

    @override
    def receive(self, up_to_step: int | None = None) -> Arrived:
        return self._inbox.take(up_to_step)

    @override
    def take_all(self) -> tuple[Arrived, Mapping[int, Received]]:
        arrived, received = self._inbox.take_all()
        return arrived, {**received, self._replica: (self.published(), ())}

    @override
    def lead(self, step: int, lap: int) -> int:
        slowest = self._inbox.slowest(lap)
        return 0 if slowest is None else max(0, step - slowest)

    @override
    def wait_for_others(self, step: int, lap: int, max_staleness: int) -> None:
        def near_enough() -> bool:
            slowest = self._inbox.slowest(lap)
            return slowest is None or step - slowest <= max_staleness

        if not near_enough():
            self._waits.until("staleness", near_enough, self._inbox.steps)

    @override
    def wait_for_updates(self, target: Mapping[int, int]) -> None:
        others = {o: s for o, s in target.items() if o != self._replica}
        self._waits.until(
            "updates",
            lambda: not self._inbox.behind(others),
            lambda: self._inbox.behind(others),
        )

    @override
    def wait_for_data(self, future: Any, timeout_s: float) -> bool:
        future.add_done_callback(lambda _: self._inbox.wake())
        return self._waits.until_done("data", future, timeout_s)

    @override
    def wait_for_checkpoint(self, future: Any, timeout_s: float) -> bool:
        future.add_done_callback(lambda _: self._inbox.wake())
        return self._waits.until_done("checkpoint", future, timeout_s)

    @override
    def agree(self, key: str, published: Last, gone: Last, load: Load) -> None:
        # Of one that left since it arrived here, what it handed over counts too.
        self.wait_for_updates({**published, **gone})

    def _count_notes(self, notes: Mapping[int, Any]) -> None:
        """Count the arrays in the notes of a barrier, which travel as frames do."""
        for replica, note in notes.items():
            nbytes = _nbytes(note) if isinstance(note, Mapping) else 0
            if replica == self._replica:
                self._traffic.sent_bytes += nbytes
            else:
                self._traffic.received_bytes += nbytes

    @override
    def traffic(self) -> Traffic:
        now, self._traffic = self._traffic, Traffic()
        now.waits_s = self._waits.count_off()
        received_bytes, now.refused, now.folds = self._inbox.count_off()
        now.received_bytes += received_bytes
        return now

    @override
    def check(self) -> None:
        self._waits.check()


def _nbytes(note: Mapping[str, Any]) -> int:
    return sum(v.nbytes for v in note.values() if isinstance(v, np.ndarray))
