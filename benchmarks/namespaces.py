"""A network inside this machine: network namespaces as hosts, on one bridge.

Needs Linux and root. It adds interfaces and a network of addresses that RFC 2544
reserves for measurements, and changes nothing else.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil

NETWORKS = 256  # that can be at the same time, on one machine
INNER = "eth0"  # a host's own end of its link
BURST = "64kb"  # 100 Mbit/s need 50 kB at 250 Hz
LATENCY = "50ms"  # packets that would wait longer are dropped


class CommandError(RuntimeError):
    """A command failed; the message has its output."""


def run(command):
    """Run ``ip`` or ``tc``; returns the output."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"`{command}`: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable():
    """Why this machine cannot have such a network; None: it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    try:
        with Network(1) as network:
            network.limit("100mbit")
    except CommandError as error:
        return str(error)
    return None


class Network:
    """A bridge on this host, and more hosts, each with a link to it.

    The name of the bridge has a number and is unique, so processes that create
    networks at the same time get different ones.
    """

    def __init__(self, hosts):
        self._hosts = range(hosts)
        self._limited = False
        self._made = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as undo:  # undone after an error
            self._bridge = self._make_bridge(undo)
            number = self._bridge.removeprefix("daskdl")
            self.address = f"198.18.{number}.1"
            self.addresses = [f"198.18.{number}.{2 + host}" for host in self._hosts]
            run(f"ip address add {self.address}/24 dev {self._bridge}")
            run(f"ip link set {self._bridge} up")
            for host in self._hosts:
                self._make_host(host, undo)
            self._made = undo.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._made.close()

    def _make_bridge(self, undo):
        for more in range(NETWORKS):
            # Not a number that another process has just released.
            number = (os.getpid() + more) % NETWORKS
            try:
                run(f"ip link add daskdl{number} type bridge")
            except CommandError as error:
                if "File exists" not in str(error):
                    raise
            else:
                undo.callback(run, f"ip link delete daskdl{number}")
                return f"daskdl{number}"
        raise CommandError(f"there are {NETWORKS} networks already")

    def _make_host(self, host, undo):
        name, address = self.name(host), self.addresses[host]
        run(f"ip netns add {name}")
        undo.callback(run, f"ip netns delete {name}")
        run(f"ip link add {name} type veth peer name {INNER} netns {name}")
        undo.callback(run, f"ip link delete {name}")
        run(f"ip link set {name} master {self._bridge} up")
        run(f"ip -n {name} address add {address}/24 dev {INNER}")
        run(f"ip -n {name} link set {INNER} up")
        run(f"ip -n {name} link set lo up")

    def name(self, host):
        """Of a host's namespace, and of the bridge's end of its link."""
        return f"{self._bridge}-{host}"

    def on(self, host, *command):
        """The command that runs a command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def limit(self, rate):
        """Limit each link, in each direction, to a rate of ``tc``."""
        way = f"root tbf rate {rate} burst {BURST} latency {LATENCY}"
        for host in self._hosts:
            name = self.name(host)
            run(f"tc qdisc replace dev {name} {way}")
            run(f"tc -n {name} qdisc replace dev {INNER} {way}")
        self._limited = True

    def unplug(self, host):
        """Pull the cable of a host, at the bridge."""
        run(f"ip link set {self.name(host)} down")

    def plug(self, host):
        """Put the cable of a host in."""
        run(f"ip link set {self.name(host)} up")

    def restore(self):
        """Plug in all cables, and remove limits."""
        for host in self._hosts:
            self.plug(host)
            if self._limited:
                name = self.name(host)
                run(f"tc qdisc delete dev {name} root")
                run(f"tc -n {name} qdisc delete dev {INNER} root")
        self._limited = False


UNLIMITED = "unlimited"


class Place(Protocol):
    """Hosts, one for each process."""

    addresses: list[str]
    interface: str  # of each host

    def on(self, host: int, *command: str) -> list[str]:
        """The command that runs a command on a host."""

    def limit(self, rate: str) -> None:
        """Limit each link, in each direction."""

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent so far, with all headers."""

    def first_port(self) -> int:
        """The first of ten free ports."""

    def end(self) -> None:
        """Kill all processes that still run there."""


class Hosts:
    """Network namespaces on one bridge."""

    interface = INNER

    def __init__(self, network: Network) -> None:
        self._network = network
        self.addresses = network.addresses
        self._ports = iter(range(29400, 60000, 10))

    def on(self, host: int, *command: str) -> list[str]:
        # torchft relies on a host's name leading to it, as on a real network.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return self._network.on(host, *named, self.addresses[host], *command)

    def limit(self, rate: str) -> None:
        self._network.restore()
        if rate != UNLIMITED:
            self._network.limit(rate)

    def sent_bytes(self, host: int) -> int:
        counters = f"/sys/class/net/{self._network.name(host)}/statistics"
        return int(Path(counters, "rx_bytes").read_text())  # at the bridge

    def first_port(self) -> int:
        return next(self._ports)

    def end(self) -> None:
        for host in range(len(self.addresses)):
            for pid in run(f"ip netns pids {self._network.name(host)}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


class ThisHost:
    """The loopback interface, without limits."""

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

    def sent_bytes(self, host: int) -> int:
        raise ValueError("processes of one host have no counters; leave out --loopback")

    def first_port(self) -> int:
        return random.randrange(20000, 30000, 10)

    def end(self) -> None:
        """Do nothing: each process is killed by the one that started it."""


@contextlib.contextmanager
def hosts(count: int, *, loopback: bool) -> Iterator[Place]:
    """Hosts for so many processes; removed with all that still runs there."""
    if loopback:
        yield ThisHost(count)
        return
    # A network has to go when a time limit ends this process, too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with Network(count) as network:
            place = Hosts(network)
            try:
                yield place
            finally:
                place.end()
    finally:
        signal.signal(signal.SIGTERM, before)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
