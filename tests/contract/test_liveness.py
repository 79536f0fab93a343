"""Whether a process listens at an address is asked of its operating system, at once."""

import asyncio
import socket

import pytest

from daskdl.channel.transport import is_listening


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_closed_port_does_not_listen(scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        before = asyncio.run(is_listening(address, 5))

    assert before
    assert not asyncio.run(is_listening(address, 5))


def test_a_host_without_an_answer_in_time_does_not_listen(monkeypatch):
    async def silence(host, port):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silence)

    assert not asyncio.run(is_listening("tcp://127.0.0.1:1", 0.01))


def test_an_address_that_cannot_be_checked_may_listen():
    assert asyncio.run(is_listening("inproc://127.0.0.1/1/1", 5))
