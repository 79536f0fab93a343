"""What a replica is told when its scheduler or its own event loop fails it."""

import asyncio
import dataclasses
import re
from types import SimpleNamespace

import pytest

from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.sender import Connection
from daskdl.channel.worker import ReplicaEndpoint
from daskdl.errors import ChannelError, WaitTimeoutError
from tests.support.run_states import GRID, SIZE, TIMEOUTS, filled

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


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("gone"), ChannelError, "the scheduler cannot be reached: gone"),
        (WaitTimeoutError("too late"), WaitTimeoutError, "too late"),
    ],
    ids=["gone", "silent"],
)
def test_every_wait_ends_with_an_error_of_daskdls_own(loop, error, kind, message):
    worker = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    inbox = filled()
    connection = Connection(worker, SPEC, inbox.stop)

    connection.fail(error)

    assert type(connection.failure) is kind
    assert inbox.stopped == str(connection.failure) == message
