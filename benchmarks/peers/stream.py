"""One TCP stream from rank 1 to rank 0: the rate that the link carries."""

import json
import socket
import time

from benchmarks.peers.loop import Arguments, parser, read

PIECE = 2**16
PATIENCE_S = 60


def receive(arguments: Arguments) -> float:
    """Mbit/s received, from the first byte on."""
    with socket.create_server((arguments.host, arguments.port)) as server:
        server.settimeout(PATIENCE_S)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(PATIENCE_S)
            total, began = len(peer.recv(PIECE)), time.perf_counter()
            while some := peer.recv(PIECE):
                total += len(some)
    return 8e-6 * total / (time.perf_counter() - began)


def send(arguments: Arguments) -> None:
    """Send for so many seconds, as soon as rank 0 listens."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            peer = socket.create_connection(
                (arguments.address, arguments.port), PATIENCE_S
            )
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            break
    with peer:
        until, piece = time.monotonic() + arguments.seconds, bytes(PIECE)
        while time.monotonic() < until:
            peer.sendall(piece)


def main() -> None:
    arguments, _ = read(parser(__doc__))
    if arguments.rank == 0:
        print(json.dumps({"mbit_per_s": receive(arguments)}), flush=True)
    elif arguments.rank == 1:
        send(arguments)


if __name__ == "__main__":
    main()
