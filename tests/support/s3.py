"""A real S3 server on loopback, and a door before a server that drops connections."""

import contextlib
import socket
import socketserver
import threading
import uuid

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

# Botocore would try again by itself: nearly everything is then up to us.
CONFIG = {"connect_timeout": 5, "read_timeout": 5, "retries": {"max_attempts": 0}}


def options(endpoint):
    """Storage options for a server."""
    return {
        "key": "id",
        "secret": "secret",
        "endpoint_url": endpoint,
        "config_kwargs": CONFIG,
    }


@contextlib.contextmanager
def server():
    """The URL of a server in this process."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        yield "http://{}:{}".format(*moto.get_host_and_port())
    finally:
        moto.stop()


def new_bucket(endpoint):
    """Its URL."""
    name = f"bucket-{uuid.uuid4().hex}"
    S3FileSystem(**options(endpoint)).mkdir(name)
    return f"s3://{name}"


class Door(socketserver.ThreadingTCPServer):
    """Passes connections on to a server, once it has closed some of them."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, endpoint, closed):
        host, port = endpoint.removeprefix("http://").split(":")
        self.behind = host, int(port)
        self.to_close = closed
        self.visits = 0
        self._inside = set()  # connections that were let through
        super().__init__(("127.0.0.1", 0), _Visit)

    def drop(self, closed):
        """Close all connections that there are, and so many that come."""
        self.to_close = self.visits + closed
        for connection in list(self._inside):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def let_in(self, connection):
        """It is dropped with all others while it is inside."""
        self._inside.add(connection)
        try:
            yield
        finally:
            self._inside.discard(connection)

    @property
    def endpoint(self):
        return "http://{}:{}".format(*self.server_address)


class _Visit(socketserver.BaseRequestHandler):
    """One connection: closed at its first byte, or copied both ways."""

    def handle(self):
        self.request.recv(1, socket.MSG_PEEK)
        self.server.visits += 1
        if self.server.visits <= self.server.to_close:
            return
        with (
            self.server.let_in(self.request),
            socket.create_connection(self.server.behind) as behind,
        ):
            back = threading.Thread(target=_copy, args=(behind, self.request))
            back.start()
            _copy(self.request, behind)
            back.join()


def _copy(source, target):
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def door(endpoint, closed):
    """A door that closes so many connections before it lets one through."""
    with Door(endpoint, closed) as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        try:
            yield opened
        finally:
            opened.shutdown()
            thread.join()
