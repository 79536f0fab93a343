"""Whether somebody listens is asked of the host, at once."""

import asyncio
import socket

import pytest

from daskdl.channel.scheduler import is_listening


def asked(address):
    return asyncio.run(is_listening(address, 5))


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_somebody_listens(server, scheme):
    assert asked(f"{scheme}://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_nobody_listens_any_more(server, scheme):
    port = server.getsockname()[1]
    server.close()

    assert not asked(f"{scheme}://127.0.0.1:{port}")


def test_who_says_nothing_in_time_is_not_there(server, monkeypatch):
    async def silence(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silence)

    assert not asyncio.run(is_listening("tcp://127.0.0.1:1", 0.01))


def test_where_it_cannot_be_asked_somebody_may_be():
    assert asked("inproc://127.0.0.1/1/1")
