"""Every request of a run, and who answers it.

What cannot be understood is answered too: foreign bytes must not end a run.
"""

import functools
from collections.abc import Mapping
from typing import Any

from daskdl.channel import client_requests as client
from daskdl.channel import messages
from daskdl.channel import replica_requests as replica
from daskdl.channel.answers import Fields, Guard, Handler
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer
from daskdl.errors import shown


def of_a_run(guard: Guard, runs: Mapping[int, LiveRun], handler: Handler) -> Handler:
    """Look the run up; answer what cannot be understood instead of raising.

    Args:
        guard: Refuses it.
        runs: That are open; the one that is meant counts it.
        handler: Called with the run and the fields of the message.
    """

    def count(live: LiveRun, **_: Any) -> None:
        live.record.refused += 1

    guarded = guard.of(handler, count)

    @functools.wraps(handler)
    async def of_run(run: Any = None, **fields: Any) -> Fields:
        live = runs.get(run) if isinstance(run, int) else None
        if live is None:
            reason = f"no run {shown(repr(run))} here"
            return {"status": Answer.UNKNOWN.value, "reason": reason}
        return await guarded(live, **fields)

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
