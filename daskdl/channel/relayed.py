"""The training thread's half of a replica's channel, routing ``plain``.

Updates go to the scheduler plugin, which relays them to all other replicas.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.channel import messages
from daskdl.channel.base import Channel, Gathered, Stopped, Traffic
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Arrived
from daskdl.channel.link import Link
from daskdl.channel.messages import Barrier, Item, ItemKind
from daskdl.channel.payloads import unwrap_note, wrap, wrap_note
from daskdl.errors import ChannelError, WaitTimeoutError
from daskdl.version import VERSION

logger = logging.getLogger(__name__)


class RelayedChannel(Channel):
    """The channel of one replica, over the relay of the scheduler plugin.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.
        forget: Called when the replica has left.
    """

    def __init__(
        self, link: Link, endpoint: Endpoint, forget: Callable[[], object]
    ) -> None:
        self._link = link
        self._inbox = link.inbox
        self._outbox = link.outbox
        self._endpoint = endpoint
        self._timeouts = endpoint.timeouts
        self._replica = endpoint.replica
        self._forget = forget
        self._others: list[int] = []
        self._sequence = 0
        self._published_step = 0
        self._traffic = Traffic()

    @property
    @override
    def closing(self) -> bool:
        return self._link.closing

    # ---- coming and going

    @override
    def join(self) -> Sequence[int]:
        bound = self._timeouts.join + self._timeouts.request
        answer = self._ask(messages.JOIN, bound, version=VERSION)
        self._others = [r for r in answer["members"] if r != self._replica]
        self._inbox.align(self._others, 0, self._inbox.grid)
        self._link.start()
        return sorted(answer["members"])

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._tell(messages.FAIL, failure=dict(failure))

    @override
    def leave(self) -> None:
        self._link.stop_sending()
        self._tell(messages.LEAVE)
        self._forget()
        self._link.end()

    @override
    def check(self) -> None:
        if self._inbox.stopped is None:
            return
        if self._link.failure is not None:
            raise self._link.failure
        raise Stopped(self._inbox.stopped)

    # ---- updates

    @override
    def next_stamp(self, step: int) -> codec.Stamp:
        return codec.Stamp(self._endpoint.run, self._replica, self._sequence + 1, step)

    @override
    def has_room(self) -> bool:
        outbox = self._outbox
        room = len(outbox) == 0 or outbox.nbytes < outbox.limit_bytes
        self._traffic.withheld += not room
        return room

    @override
    def publish(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        accepted = self._publish(stamp, frame, force=False)
        self._traffic.withheld += not accepted
        return accepted

    @override
    def publish_last(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> None:
        self._publish(stamp, frame, force=True)
        if not self._outbox.wait_for(lambda box: len(box) == 0, self._timeouts.stop):
            logger.warning("replica %s leaves with updates unsent", self._replica)

    def _publish(
        self, stamp: codec.Stamp, frame: NDArray[np.uint8], *, force: bool
    ) -> bool:
        kind = ItemKind.UPDATE.value
        item = Item(kind, *stamp[1:], frame.nbytes, wrap(frame))
        if not self._outbox.offer(item, force=force):
            return False
        self._published_step = stamp.step
        self._sequence = stamp.sequence
        self._traffic.sent_bytes += frame.nbytes
        self._traffic.frames += 1
        return True

    @override
    def published(self) -> int:
        return self._sequence

    @override
    def complete(self, step: int, done: int = -1) -> None:
        former = self._link.progress
        self._link.progress = (step, max(done, former[1]))
        # A published update of this step says the same, and has woken the pump.
        if done > former[1] or step != self._published_step:
            self._outbox.on_offer()

    @override
    def receive(self, up_to_step: int | None = None) -> Arrived:
        return self._inbox.take(up_to_step)

    @override
    def lead(self, step: int, epoch: int) -> int:
        slowest = self._inbox.slowest(epoch)
        return 0 if slowest is None else max(0, step - slowest)

    @override
    def align(self, step: int, grid: float) -> None:
        self._link.progress = (step, self._link.progress[1])
        self._inbox.align(self._others, step, grid)

    # ---- waiting

    @override
    def wait_for_others(self, step: int, epoch: int, max_staleness: int) -> None:
        def near_enough() -> bool:
            slowest = self._inbox.slowest(epoch)
            return slowest is None or step - slowest <= max_staleness

        if not near_enough():
            self._wait("staleness", near_enough, self._inbox.steps)

    @override
    def wait_for_room(self) -> None:
        self._wait_until_sent("room")

    def _wait_until_sent(self, cause: str) -> None:
        started = time.perf_counter()
        bound = self._timeouts.silence
        came = self._outbox.wait_for(
            lambda box: self._inbox.stopped is not None or len(box) == 0, bound
        )
        self._count_wait(cause, started)
        self.check()
        if not came:
            raise WaitTimeoutError(
                f"replica {self._replica} waited {bound:g} s for {cause}: "
                f"{len(self._outbox)} updates ({self._outbox.nbytes} bytes) could not "
                "be passed to the scheduler"
            )

    @override
    def wait_for_updates(self, target: Mapping[int, int]) -> None:
        others = {o: s for o, s in target.items() if o != self._replica}
        self._wait(
            "updates",
            lambda: not self._inbox.behind(others),
            lambda: self._inbox.behind(others),
        )

    def _wait(
        self, cause: str, ready: Callable[[], bool], state: Callable[[], Any]
    ) -> None:
        started = time.perf_counter()
        # The scheduler ends a run in which somebody is silent; this bound is for
        # a scheduler that says nothing either.
        bound = self._timeouts.silence + self._timeouts.request
        came = self._inbox.wait_for(ready, bound)
        self._count_wait(cause, started)
        self.check()
        if not came:
            raise WaitTimeoutError(
                f"replica {self._replica} waited {bound:g} s for {cause}; by replica: "
                f"{state()}"
            )

    def _count_wait(self, cause: str, started: float) -> None:
        waits = self._traffic.waits_s
        waits[cause] = waits.get(cause, 0.0) + time.perf_counter() - started

    # ---- requests

    @override
    def lease(
        self, phase: str, epoch: int, finished: Mapping[str, Any] | None
    ) -> int | None:
        answer = self._ask(
            messages.LEASE,
            self._timeouts.request,
            phase=phase,
            epoch=epoch,
            finished=None if finished is None else dict(finished),
        )
        piece = answer["piece"]
        return None if piece is None else int(piece)

    @override
    def gather(self, key: str, note: Any, kind: Barrier = Barrier.MEET) -> Gathered:
        if kind == Barrier.AGREE:
            # What is still here would be held back with what others hand over.
            self._wait_until_sent("flush")
        # No bound of its own: whoever is awaited and silent ends the run at the
        # scheduler, which also knows who that is; a scheduler that is silent is
        # noticed by the link.
        answer = self._ask(
            messages.GATHER, None, key=key, note=wrap_note(note), kind=kind.value
        )
        notes = {replica: unwrap_note(said) for replica, said in answer["notes"]}
        return Gathered(notes, dict(answer["gone"]))

    def _ask(
        self, operation: str, timeout_s: float | None, **fields: Any
    ) -> dict[str, Any]:
        started = time.perf_counter()
        future = self._link.request(
            operation, self._inbox.wake, replica=self._replica, **fields
        )
        self._inbox.wait_for(future.done, timeout_s)
        self._count_wait(operation.removeprefix("daskdl_"), started)
        if not future.done():
            future.cancel()
            self.check()
            raise WaitTimeoutError(
                f"the scheduler did not answer {operation} of replica {self._replica} "
                f"within {timeout_s} s"
            )
        try:
            answer = self._link.understand(future.result())
        except OSError as error:
            raise ChannelError(f"the scheduler cannot be reached: {error}") from error
        self.check()
        return answer

    def _tell(self, operation: str, **fields: Any) -> None:
        """A last word, whether the run goes on or not."""
        future = self._link.request(
            operation, lambda: None, replica=self._replica, **fields
        )
        try:
            future.result(self._timeouts.request)
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            logger.info("%s of replica %s: %s", operation, self._replica, error)

    @override
    def traffic(self) -> Traffic:
        now, self._traffic = self._traffic, Traffic()
        now.received_bytes, now.refused, now.folds = self._inbox.count_off()
        return now
