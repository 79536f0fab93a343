"""A long way between two hosts: a process that passes bytes on, later.

What ``netem`` does where the kernel has it. Bytes of a connection keep their order,
whatever the jitter, as TCP's do.
"""

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
from dataclasses import dataclass, field

READ_BYTES = 2**16
MOST_READS = 256  # that are on their way at once, for each direction: 16 MiB


@dataclass
class Way:
    """How long bytes take: ``delay_s``, give or take ``jitter_s``."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def latency_s(self):
        return self.delay_s + self.chance.uniform(-self.jitter_s, self.jitter_s)


async def carry(source, sink, way):
    """Pass on what comes, and its end."""
    underway = asyncio.Queue(MOST_READS)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_take(source, underway, way))
        tasks.create_task(_hand_over(underway, sink))


async def _take(source, underway, way):
    clock, due = asyncio.get_running_loop().time, 0.0
    some = True
    while some:
        some = await source.read(READ_BYTES)
        due = max(due, clock() + way.latency_s())
        await underway.put((due, some))


async def _hand_over(underway, sink):
    clock, some = asyncio.get_running_loop().time, True
    while some:
        due, some = await underway.get()
        await asyncio.sleep(due - clock())
        if some:
            sink.write(some)
            await sink.drain()
    sink.write_eof()


async def listen(address, target, way):
    """Listen at an address; each connection goes on to the target."""

    async def connect(source, back):
        with contextlib.closing(back):
            try:
                forth_source, forth = await asyncio.open_connection(*_parse(target))
            except OSError:
                return
            with contextlib.closing(forth):
                await _both(carry(source, forth, way), carry(forth_source, back, way))

    return await asyncio.start_server(connect, *_parse(address))


async def _both(*directions):
    try:
        async with asyncio.TaskGroup() as tasks:
            for direction in directions:
                tasks.create_task(direction)
    except* OSError:  # one end is gone: the connection is, both ways
        pass


def _parse(address):
    host, port = address.rsplit(":", 1)
    return host, int(port)


def _obey(way):
    """Change the way as each line of the input says."""
    for line in sys.stdin:
        way.delay_s, way.jitter_s = map(float, line.split())
        print(line, end="", flush=True)  # noqa: T201 - the answer


async def serve(routes):
    """Relay until the input ends."""
    way = Way()
    for route in routes:
        await listen(*route.split("="), way)
    await asyncio.to_thread(_obey, way)


class Relay:
    """The process of a relay.

    Args:
        routes: Addresses to listen at, ``"host:port"``, and where each leads.
    """

    def __init__(self, routes):
        self._routes = [f"{address}={target}" for address, target in routes.items()]

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._routes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.delay(0.0, 0.0)  # when it answers, it listens
        return self

    def __exit__(self, *exc_info):
        self._process.communicate(timeout=30)

    def delay(self, delay_s, jitter_s):
        """From now on bytes take so long, each way."""
        line = f"{delay_s} {jitter_s}\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        assert self._process.stdout.readline() == line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("routes", nargs="+", help="host:port=host:port")
    asyncio.run(serve(parser.parse_args().routes))
