"""Every request of a run, and who answers it."""

import functools
from collections.abc import Mapping
from typing import Any

from daskdl.channel import client_requests as client
from daskdl.channel import messages
from daskdl.channel import replica_requests as replica
from daskdl.channel.answers import Fields, GoneError, Handler
from daskdl.channel.live import LiveRun


def of_a_run(runs: Mapping[int, LiveRun], handler: Handler) -> Handler:
    """A handler of requests of a run that looks the run up.

    Args:
        runs: That are open.
        handler: Called with the run and the fields of the message.
    """

    @functools.wraps(handler)
    async def of_run(run: int, **fields: Any) -> Fields:
        if run not in runs:
            raise GoneError(f"no run {run} here")
        return await handler(runs[run], **fields)

    return of_run


REQUESTS: Mapping[str, Handler] = {
    messages.WATCH: client.handle_watch,
    messages.STOP: client.handle_stop,
    messages.SEAT: client.handle_seat,
    messages.UNSEAT: client.handle_unseat,
    messages.RESTORE: client.handle_restore,
    messages.AGREED: client.handle_agreed,
    messages.JOIN: replica.handle_join,
    messages.ACTIVATE: replica.handle_activate,
    messages.PUBLISH: replica.handle_publish,
    messages.LEASE: replica.handle_lease,
    messages.MISSING: replica.handle_missing,
    messages.GATHER: replica.handle_gather,
    messages.FAIL: replica.handle_fail,
    messages.LEAVE: replica.handle_leave,
}
