"""The relay with which other tests delay connections; it needs no namespaces."""

import contextlib
import random
import socket
import time

import pytest
from distributed.utils import open_port

from tests.support.relay import Relay

DELAY_S = 0.02


@pytest.fixture
def relayed():
    """Both ends of a connection through a relay, and the relay."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(30)
        near, far = f"127.0.0.1:{open_port()}", f"127.0.0.1:{server.getsockname()[1]}"
        relay = stack.enter_context(Relay({near: far}))
        client = stack.enter_context(_connect(near))
        other = stack.enter_context(server.accept()[0])
        other.settimeout(30)
        yield client, other, relay


def _connect(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read(source, size=None):
    """Read so many bytes, or all until the end."""
    received = bytearray()
    while len(received) != size and (some := source.recv(65536)):
        received += some
    return bytes(received)


def test_bytes_keep_their_order_whatever_the_jitter(relayed):
    client, other, relay = relayed
    relay.delay(DELAY_S, DELAY_S)
    sent = random.Random(0).randbytes(300_000)

    for start in range(0, len(sent), 1000):  # many pieces, each with its own delay
        client.sendall(sent[start : start + 1000])

    assert read(other, len(sent)) == sent


def test_nothing_arrives_before_the_delay(relayed):
    client, other, relay = relayed
    relay.delay(DELAY_S, 0.0)
    started = time.monotonic()

    client.sendall(b"ping")
    assert read(other, 4) == b"ping"
    other.sendall(b"pong")
    assert read(client, 4) == b"pong"

    assert time.monotonic() - started >= 2 * DELAY_S


def test_the_end_of_one_direction_is_not_that_of_the_other(relayed):
    client, other, _ = relayed

    client.sendall(b"all")
    client.shutdown(socket.SHUT_WR)
    assert read(other) == b"all"
    other.sendall(b"more")
    other.shutdown(socket.SHUT_WR)

    assert read(client) == b"more"


def test_a_reset_of_one_end_ends_the_connection(relayed):
    client, other, _ = relayed

    # A reset instead of an end, as by a process that is killed.
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()

    assert read(client) == b""


def test_a_connection_ends_at_once_if_nobody_listens():
    near, far = (f"127.0.0.1:{open_port()}" for _ in range(2))

    with Relay({near: far}), _connect(near) as client:
        assert read(client) == b""
