"""Trying again when a connection was dropped, and naming the URL when it stays so.

Here is decided which errors may pass by themselves. What is done is up to the caller:
it must be harmless when it is done twice.
"""

import errno
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from daskdl.errors import DataError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Seconds before each further attempt. Most drops are over at once; a server that is
# away for longer is a matter for who runs it, and a run must not hang on one file.
WAITS_S = (0.1, 0.4, 1.6)

# No further attempt begins after so many seconds: s3fs and botocore try again too, and
# by default spend half a minute on it, which must not be multiplied by ours.
ENOUGH_S = 20.0

# What file systems raise besides OSError. Their modules are looked up, not imported:
# an error can only have come if its module is there.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("urllib3.exceptions", "HTTPError"),
    ("http.client", "HTTPException"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
# Of these, those that say that a connection failed.
_DROPPED = (
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("aiohttp", "ClientError"),
    ("urllib3.exceptions", "HTTPError"),
    ("http.client", "HTTPException"),
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
_LASTING_NUMBERS = {
    errno.EINVAL,  # s3fs: the request itself is wrong
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
}
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500


def attempt(action: Callable[[], T], what: str) -> T:
    """Do something, and again after each of `WAITS_S` while its connection drops.

    After `ENOUGH_S` it is not tried again, however often it has been.

    Args:
        action: What to do; harmless when done twice.
        what: What it does to which URL, for the message: ``read s3://bucket/x``.

    Returns:
        What the action returned.

    Raises:
        FileNotFoundError: As it came; what that means is for the caller to say.
        DataError: If it failed otherwise, or was dropped at every attempt.

    Example:
        >>> attempt(lambda: 7, "read memory://x")
        7
    """
    began = time.monotonic()
    for times, wait_s in enumerate((*WAITS_S, math.inf), 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except _failures() as error:
            dropped = is_dropped(error)
            if not dropped or time.monotonic() - began + wait_s > ENOUGH_S:
                shown = f"{type(error).__name__}: {error}".removesuffix(": ")
                count = f" (attempts: {times})" if dropped else ""
                raise DataError(f"cannot {what}: {shown}{count}") from error
            logger.debug("attempt to %s failed, again in %s s", what, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def is_dropped(error: BaseException) -> bool:
    """Whether an error may be gone at the next attempt.

    Example:
        >>> is_dropped(ConnectionResetError()), is_dropped(PermissionError())
        (True, False)
    """
    if isinstance(error, OSError) and not isinstance(error, _loaded(_DROPPED)):
        lasting = isinstance(error, _LASTING) or error.errno in _LASTING_NUMBERS
        return not lasting
    status = getattr(error, "status", _SERVER_ERRORS)
    passing = status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS
    return isinstance(error, _loaded(_DROPPED)) and passing


def _failures() -> tuple[type[Exception], ...]:
    return OSError, *_loaded(_FOREIGN)


def _loaded(names: tuple[tuple[str, str], ...]) -> tuple[type[Exception], ...]:
    """The classes of those modules that somebody has imported."""
    return tuple(_present(names))


def _present(names: tuple[tuple[str, str], ...]) -> Iterator[type[Exception]]:
    for module, name in names:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            yield kind
