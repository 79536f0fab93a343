"""Every request of a run, and who answers it.

What cannot be understood is answered too: foreign bytes must not end a run.
"""

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from daskdl.channel import client_requests as client
from daskdl.channel import messages
from daskdl.channel import replica_requests as replica
from daskdl.channel.answers import GoneError
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer

logger = logging.getLogger(__name__)

Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]


def of_a_run(runs: Mapping[int, LiveRun], handler: Handler) -> Handler:
    """Look the run up; answer what cannot be understood instead of raising.

    Such a message is counted and logged; an exception would fill the scheduler's log
    with tracebacks.

    Args:
        runs: That are open.
        handler: Called with the run and the fields of the message.
    """

    @functools.wraps(handler)
    async def guarded(run: Any = None, **fields: Any) -> Fields:
        live = runs.get(run) if isinstance(run, int) else None
        if live is None:
            return {"status": Answer.UNKNOWN.value, "reason": f"no run {run!r} here"}
        try:
            return await handler(live, **fields)
        except GoneError as error:
            return {"status": Answer.UNKNOWN.value, "reason": str(error)}
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            live.record.refused += 1
            reason = f"{handler.__name__}: {type(error).__name__}: {error}"
            logger.warning("run %s refused a message: %s", run, reason)
            return {"status": Answer.REFUSED.value, "reason": reason}

    return guarded


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
