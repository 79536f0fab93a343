"""What is tried again, how often, and what is said when it stays in vain."""

import errno

import aiohttp
import botocore.exceptions
import pytest
import yarl

from daskdl.data import storage
from daskdl.data.storage import attempt, is_dropped
from daskdl.errors import DataError


@pytest.fixture
def waits(monkeypatch):
    """The waits that were waited for, at once."""
    waited = []
    monkeypatch.setattr(storage.time, "sleep", waited.append)
    return waited


class Failing:
    """Raises errors, one each time, then returns."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def status(number):
    url = yarl.URL("https://x/a")
    request = aiohttp.RequestInfo(url, "GET", {}, url)
    return aiohttp.ClientResponseError(request, (), status=number)


PASSING = [
    ConnectionResetError(),
    TimeoutError(),
    OSError(errno.EIO, "failed"),
    OSError("no number"),
    OSError(errno.EBUSY, "SlowDown"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError(),
    aiohttp.ClientOSError(errno.EINVAL, "a connection's"),
    status(503),
    status(429),
    botocore.exceptions.EndpointConnectionError(endpoint_url="x"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="x"),
]
LASTING = [
    PermissionError(),
    IsADirectoryError(),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EINVAL, "wrong"),
    status(403),
    botocore.exceptions.NoCredentialsError(),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_dropped_connection_is_tried_again(error, waits):
    action = Failing(error)

    assert attempt(action, "read", "s3://x/a") == "done"
    assert action.calls == 2
    assert waits == [0.1]


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_does_not_pass_is_raised_at_once_with_the_url(error, waits):
    action = Failing(error)

    with pytest.raises(DataError, match="cannot read s3://x/a") as raised:
        attempt(action, "read", "s3://x/a")

    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)
    assert "attempts" not in str(raised.value)
    assert (action.calls, waits) == (1, [])


class BadRequest(OSError):
    """As gcsfs refuses who is unknown."""

    code = 401


@pytest.mark.parametrize(
    "error",
    [PermissionError("Forbidden"), BadRequest(errno.EPERM), *LASTING[-2:]],
    ids=lambda error: type(error).__name__,
)
def test_missing_credentials_are_told_with_the_place_and_the_remedy(error, waits):
    with pytest.raises(DataError) as raised:
        attempt(Failing(error), "read", "s3://x/a")
    with pytest.raises(DataError) as local:
        attempt(Failing(error), "read", "/x/a")

    message = str(raised.value)
    assert message.startswith("cannot read s3://x/a on ")
    assert "storage_options=..., or configure fsspec on the workers" in message
    assert "storage_options" not in str(local.value)


def test_waits_grow_and_the_last_attempt_is_told(waits):
    action = Failing(*[ConnectionResetError(104, "reset")] * 9)

    with pytest.raises(DataError, match=r"cannot read x: .*reset \(attempts: 4\)$"):
        attempt(action, "read", "x")

    assert action.calls == 4
    assert waits == [0.1, 0.4, 1.6]


def test_an_attempt_that_took_long_is_the_last(waits, monkeypatch):
    monkeypatch.setattr(storage, "ENOUGH_S", 0.3)  # less than the second wait
    action = Failing(*[ConnectionResetError()] * 9)

    with pytest.raises(DataError, match=r"\(attempts: 2\)"):
        attempt(action, "read", "x")

    assert waits == [0.1]


def test_a_missing_file_comes_out_as_it_is(waits):
    error = FileNotFoundError("a")

    with pytest.raises(FileNotFoundError) as raised:
        attempt(Failing(error), "read", "x")

    assert raised.value is error
    assert waits == []


def test_an_error_of_the_caller_is_not_taken_for_a_failure():
    with pytest.raises(KeyError):
        attempt(Failing(KeyError("a")), "read", "x")


def test_what_is_no_error_of_a_file_system_is_not_dropped():
    assert not is_dropped(KeyError())
