"""What the answers to all requests have in common: whether the run goes on."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from daskdl.channel.messages import Answer
from daskdl.channel.run import RunRecord
from daskdl.channel.shapes import Identity, check, hints_of
from daskdl.errors import shown
from daskdl.guard import answered

logger = logging.getLogger(__name__)

LOG_S = 1.0  # least time between two lines about what was refused

Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]
Refused = Callable[[Fields], object]


class GoneError(Exception):
    """Who is asked is not here, or who asks has left: it may have been in time."""


def check_present(replica: int, record: RunRecord) -> None:
    """Refuse who does not take part.

    Raises:
        GoneError: If the replica has taken part.
        ValueError: If it never did.
    """
    if replica in record.members.gone:
        raise GoneError(f"replica {replica} is not a member any more")
    if replica not in record.outboxes:
        raise ValueError(f"replica {replica} is not a member of this run")


def check_seated(replica: int, record: RunRecord) -> None:
    """Refuse a number that no replica of the run has had.

    Raises:
        ValueError: If there is none.
    """
    if replica not in record.members.seats:
        raise ValueError(f"there is no replica {replica} in this run")


def answer(record: RunRecord, **fields: Any) -> dict[str, Any]:
    """The fields of an answer, and the word to leave if the run was stopped."""
    if record.stopped is not None:
        return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
    return {"status": Answer.OK.value, **fields}


class Guard:
    """Answers whatever comes to a handler of Dask's, and ends nothing.

    Dask logs a traceback for each request whose handler raises; here it is refused and
    counted. Fields have to be what the annotations of the handler say.

    Args:
        refused: Counts a message; called with its fields, which may be anything.
    """

    def __init__(self, refused: Refused) -> None:
        self._refused = refused
        self._logged_at = -LOG_S

    def of(self, handler: Handler) -> Handler:
        """A handler that answers always."""
        hints = {"run": Identity, **hints_of(handler)}

        @functools.wraps(handler)
        async def guarded(**fields: Any) -> Fields:
            async def handle() -> Fields:
                check(fields, hints)
                return await handler(**fields)

            def refuse(error: Exception) -> Fields:
                if isinstance(error, GoneError):
                    return {"status": Answer.UNKNOWN.value, "reason": str(error)}
                what = f"{type(error).__name__}: {error}"
                reason = shown(f"{handler.__name__}: {what}", 500)
                self._refused(fields)
                self._log(reason)
                return {"status": Answer.REFUSED.value, "reason": reason}

            return await answered(handle, refuse)

        return guarded

    def _log(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            logger.warning("refused a message: %s", reason)
