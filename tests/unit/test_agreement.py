"""What one replica does until all survivors have the same, by what they tell it."""

import concurrent.futures
import dataclasses
import re
from types import SimpleNamespace

import pytest

from daskdl.channel.base import BarrierResult
from daskdl.channel.protocol import Endpoint
from daskdl.channel.remote import RemoteChannel
from daskdl.errors import WaitTimeoutError
from tests.support.inboxes import GRID, SIZE, filled, item_of, sparse
from tests.support.records import TIMEOUTS

BOUNDS = dataclasses.replace(TIMEOUTS, data=0.05, silence=0.05)
ENDPOINT = Endpoint(7, 0, SIZE, GRID, 2**20, 2**20, BOUNDS, routing="mesh")


class End:
    """As much of replica 0's endpoint as agreeing needs; replica 1 keeps one update."""

    def __init__(self, kept=()):
        self.inbox = filled()
        self.routing = SimpleNamespace(relayed=False, workers={})
        self.connection = SimpleNamespace(silent_s=lambda: 0.0, failure=None)
        self.snapshot_requests = []
        self.asked = []
        self._kept = kept

    def pull(self, helper, origin, sequences):
        self.asked.append((helper, origin, list(sequences)))
        for update in self._kept:
            self.inbox.put(item_of(update), update)
        future = concurrent.futures.Future()
        future.set_result(len(self._kept))
        return future


def agree(end):
    """Meet a replica 1 that has the first update of itself, and say how often."""
    keys = []

    def barrier(key, payload, kind):
        keys.append(key)
        return BarrierResult({0: payload, 1: {"received": [[1, 1, []]]}}, {})

    channel = RemoteChannel(SimpleNamespace(open=lambda _: end), ENDPOINT)
    channel.barrier = barrier
    channel.agree("end", {0: 0}, {}, lambda snapshot: None)
    return keys


def test_what_is_missing_is_asked_for_and_told_again():
    end = End(kept=[sparse(1, 1, [1])])

    assert agree(end) == ["end, round 0", "end, round 1"]
    assert end.asked == [(1, 1, [1])]
    assert end.inbox.received.by_origin() == {1: (1, ())}


def test_replicas_that_never_have_the_same_end_the_run():
    end = End()

    with pytest.raises(WaitTimeoutError) as caught:
        agree(end)

    assert re.match(
        r"replicas \[0, 1\] did not come to the same updates within 0\.1 s "
        r"\(daskdl\.timeouts\.data \+ silence\), \d+ rounds; last heard: ",
        str(caught.value),
    )
