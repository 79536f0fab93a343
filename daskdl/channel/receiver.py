"""What a channel does with its inbox, however updates come there."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import Channel, Load
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.gathered import Last
from daskdl.channel.inbox import Inbox
from daskdl.channel.pile import Arrived
from daskdl.channel.positions import Received
from daskdl.channel.traffic import Traffic
from daskdl.channel.waits import Waits


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
