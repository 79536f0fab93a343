"""What becomes of a replica whose connection to the scheduler fails."""

from types import SimpleNamespace

import pytest

from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.sender import Connection
from daskdl.errors import ChannelError, WaitTimeoutError
from tests.support.inboxes import GRID, SIZE, filled
from tests.support.records import TIMEOUTS

SPEC = ChannelSpec(7, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS)
WORKER = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=None))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError("gone"), ChannelError, "the scheduler cannot be reached: gone"),
        (WaitTimeoutError("too late"), WaitTimeoutError, "too late"),
    ],
    ids=["gone", "silent"],
)
def test_every_wait_ends_with_an_error_of_daskdls_own(error, kind, message):
    inbox = filled()
    connection = Connection(WORKER, SPEC, inbox.stop)

    connection.fail(error)

    assert type(connection.failure) is kind
    assert inbox.stopped == str(connection.failure) == message
