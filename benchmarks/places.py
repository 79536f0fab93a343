"""Where a contestant's processes run: on hosts of their own, or all on this one."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Protocol

import psutil

from benchmarks.namespaces import INNER, Network, run

UNLIMITED = "unlimited"


class Place(Protocol):
    """Hosts, one for each process."""

    addresses: list[str]
    interface: str  # of each host, that has its address

    def on(self, host: int, *command: str) -> list[str]:
        """A command as it has to be called to run on a host."""

    def limit(self, rate: str) -> None:
        """Let each link carry no more, each way; "unlimited": what it can."""

    def first_port(self) -> int:
        """The first of ten that nobody uses."""

    def end(self) -> None:
        """End what still runs there."""


class Hosts:
    """Network namespaces on one bridge."""

    interface = INNER

    def __init__(self, network: Network) -> None:
        self._network = network
        self.addresses = network.addresses
        self._ports = iter(range(29400, 60000, 10))

    def on(self, host: int, *command: str) -> list[str]:
        # A host's name leads to it, as on a real network; torchft relies on that.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return self._network.on(host, *named, self.addresses[host], *command)

    def limit(self, rate: str) -> None:
        self._network.restore()
        if rate != UNLIMITED:
            self._network.limit(rate)

    def first_port(self) -> int:
        return next(self._ports)  # nobody else is there; no connection is met again

    def end(self) -> None:
        for host in range(len(self.addresses)):
            for pid in run(f"ip netns pids {self._network.name(host)}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


class ThisHost:
    """All on the loopback interface, which carries what it can."""

    interface = "lo"

    def __init__(self, hosts: int) -> None:
        self.addresses = ["127.0.0.1"] * hosts

    def on(self, host: int, *command: str) -> list[str]:
        return list(command)

    def limit(self, rate: str) -> None:
        if rate != UNLIMITED:
            raise ValueError(
                f"rate must be 'unlimited' with --loopback, got {rate!r}; "
                "leave out --loopback"
            )

    def first_port(self) -> int:
        return random.randrange(20000, 30000, 10)

    def end(self) -> None:
        """Nothing is there that whoever started it does not end."""


@contextlib.contextmanager
def hosts(count: int, *, loopback: bool) -> Iterator[Place]:
    """Hosts for so many processes, removed again with all that runs there.

    Raises:
        CommandError: If there cannot be namespaces.
    """
    if loopback:
        yield ThisHost(count)
        return
    with _exit_when_terminated(), Network(count) as network:
        place = Hosts(network)
        try:
            yield place
        finally:
            place.end()


@contextlib.contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """As by a time limit: a network has to go then too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, and those have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
