"""The event loop's half of a channel, as the training thread finds it."""

import asyncio
import dataclasses
import re
from types import SimpleNamespace

import pytest

from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.worker import ReplicaEndpoint
from daskdl.errors import WaitTimeoutError
from tests.support.inboxes import GRID, SIZE
from tests.support.records import TIMEOUTS

SPEC = ChannelSpec(7, 3, SIZE, GRID, 2**20, 2**20, TIMEOUTS)


@pytest.fixture
def loop():
    """One that stands still; at the end it does what it was asked to."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_an_event_loop_that_does_nothing_is_not_waited_for_without_end(loop):
    worker = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    bounds = dataclasses.replace(TIMEOUTS, request=0.05)
    link = ReplicaEndpoint(worker, dataclasses.replace(SPEC, timeouts=bounds))

    with pytest.raises(
        WaitTimeoutError,
        match=re.escape(
            "replica 3 waited 0.05 s (daskdl.timeouts.request) for the event loop of "
            "its own worker"
        ),
    ):
        link.begin({}, GRID)
