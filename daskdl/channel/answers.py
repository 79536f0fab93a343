"""What the answers to all requests have in common: whether the run goes on."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from daskdl.channel.messages import Answer
from daskdl.channel.run import RunRecord
from daskdl.errors import shown
from daskdl.guard import answered

logger = logging.getLogger(__name__)

LOG_S = 1.0  # least time between two lines about what was refused

Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]
Refused = Callable[..., object]


class GoneError(Exception):
    """A replica that has left, or was given up, still asks for something."""


def check_present(replica: Any, record: RunRecord) -> None:
    """Refuse who does not take part.

    Raises:
        GoneError: If the replica has taken part.
        ValueError: If it never did.
    """
    if replica in record.members.gone:
        raise GoneError(f"replica {replica} is not a member any more")
    if replica not in record.outboxes:
        raise ValueError(f"replica {replica!r} is not a member of this run")


def answer(record: RunRecord, **fields: Any) -> dict[str, Any]:
    """The fields of an answer, and the word to leave if the run was stopped."""
    if record.stopped is not None:
        return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
    return {"status": Answer.OK.value, **fields}


class Guard:
    """Answers whatever comes to a handler of Dask's, and ends nothing.

    Dask logs a traceback for each request whose handler raises; here it is refused and
    counted. Fields have to be of the types that the handler names.
    """

    def __init__(self) -> None:
        self._logged_at = -LOG_S

    def of(self, handler: Handler, refused: Refused) -> Handler:
        """A handler that answers always.

        Args:
            handler: Called with the fields of a message.
            refused: Counts a message; called with the same.
        """
        hints = get_type_hints(handler)

        @functools.wraps(handler)
        async def guarded(*given: Any, **fields: Any) -> Fields:
            async def handle() -> Fields:
                _check_types(fields, hints)
                return await handler(*given, **fields)

            def refuse(error: Exception) -> Fields:
                if isinstance(error, GoneError):
                    return {"status": Answer.UNKNOWN.value, "reason": str(error)}
                what = f"{type(error).__name__}: {error}"
                reason = shown(f"{handler.__name__}: {what}", 500)
                refused(*given, **fields)
                self._log(reason)
                return {"status": Answer.REFUSED.value, "reason": reason}

            return await answered(handle, refuse)

        return guarded

    def _log(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            logger.warning("refused a message: %s", reason)


def _check_types(fields: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuse what is of another type than a handler names.

    Raises:
        TypeError: If a field is.
    """
    for name, value in fields.items():
        if not _fits(value, hints.get(name, Any)):
            raise TypeError(f"{name} must be {hints[name]}, got {type(value)}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if kind is float:
        return isinstance(value, int | float)
    if kind is Sequence:  # of a text the letters would be taken
        return isinstance(value, list | tuple)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)
