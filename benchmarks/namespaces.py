"""A network inside this machine: hosts that are namespaces, on one bridge.

Linux only, and for root only. Of this machine nothing is changed but that there are
more interfaces, and a network of addresses that is nobody's: RFC 2544 keeps it for
measurements.
"""

import contextlib
import functools
import os
import shutil
import subprocess

NETWORKS = 256  # that can be at the same time, on one machine
INNER = "eth0"  # a host's own end of its link
BURST = "64kb"  # what passes at once; 100 Mbit/s need 50 kB at 250 Hz
LATENCY = "50ms"  # what would wait longer is dropped


class CommandError(RuntimeError):
    """A command was refused; says what it said."""


def run(command):
    """Run ``ip`` or ``tc`` with arguments; returns what it says.

    Raises:
        CommandError: If that fails.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"`{command}`: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable():
    """Why there cannot be such a network on this machine; None: there can."""
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
    """A bridge that is on this host, and further hosts, each with a link to it.

    Its number is in the name of the bridge. There cannot be two bridges of one name,
    so processes that make networks at the same time get different ones.

    Args:
        hosts: How many, beside this one.

    Attributes:
        address: Of this host, as the others see it.
        addresses: Of the others.
    """

    def __init__(self, hosts):
        self._hosts = range(hosts)
        self._limited = False
        self._made = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as made:  # undone if not all of it can be made
            self._bridge = self._make_bridge(made)
            number = self._bridge.removeprefix("daskdl")
            self.address = f"198.18.{number}.1"
            self.addresses = [f"198.18.{number}.{2 + host}" for host in self._hosts]
            run(f"ip address add {self.address}/24 dev {self._bridge}")
            run(f"ip link set {self._bridge} up")
            for host in self._hosts:
                self._make_host(host, made)
            self._made = made.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._made.close()

    def _make_bridge(self, made):
        for more in range(NETWORKS):
            # Not what another process has just given back: it may still look at it.
            number = (os.getpid() + more) % NETWORKS
            try:
                run(f"ip link add daskdl{number} type bridge")
            except CommandError as error:
                if "File exists" not in str(error):
                    raise
            else:
                made.callback(run, f"ip link delete daskdl{number}")
                return f"daskdl{number}"
        raise CommandError(f"there are {NETWORKS} networks already")

    def _make_host(self, host, made):
        name, address = self.name(host), self.addresses[host]
        run(f"ip netns add {name}")
        made.callback(run, f"ip netns delete {name}")
        run(f"ip link add {name} type veth peer name {INNER} netns {name}")
        made.callback(run, f"ip link delete {name}")
        run(f"ip link set {name} master {self._bridge} up")
        run(f"ip -n {name} address add {address}/24 dev {INNER}")
        run(f"ip -n {name} link set {INNER} up")
        run(f"ip -n {name} link set lo up")

    def name(self, host):
        """Of a host's namespace, and of its link's end at the bridge."""
        return f"{self._bridge}-{host}"

    def on(self, host, *command):
        """A command as it has to be called to run on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def limit(self, rate):
        """Let each link carry no more than a rate, as ``tc`` has it, each way."""
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
        """All cables are in, and carry what they can."""
        for host in self._hosts:
            self.plug(host)
            if self._limited:
                name = self.name(host)
                run(f"tc qdisc delete dev {name} root")
                run(f"tc -n {name} qdisc delete dev {INNER} root")
        self._limited = False
