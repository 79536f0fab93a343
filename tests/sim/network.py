"""A simulated cluster: servers, the requests between them, and what goes wrong there.

Each request and each answer takes a time of its own, so that they overtake each other.
Where a server's bandwidth is limited, the frames and arrays of messages share it, see
`Link`.
Over a cut, messages wait until it heals, as TCP repeats them. If a connection breaks,
requests or their answers are lost and the senders get an error.
"""

import enum
import functools
import itertools

import numpy as np
from distributed.protocol import Serialized, deserialize
from typing_extensions import override

from daskdl.channel.protocol import NAME
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.transport import SchedulerTransport, TaskPlaces, Transport
from daskdl.channel.worker import ChannelWorkerPlugin
from tests.sim.world import Process

CONNECT_S = 30.0  # Dask tries to connect for so long
AGAIN_S = 0.5  # between two of these attempts
KEPT_S = 30.0  # until TCP notices that a machine is gone
LATENCY_S = 2e-3  # mean
MAX_DELAY_S = 1.0
LATE, LATE_TIMES = 0.01, 30  # share of messages that take so many times as long


def carried(value, unpack):
    """A value as it arrives over a connection of Dask.

    Args:
        value: What is sent.
        unpack: Whether the receiver unpacks arrays, as a worker does.
    """
    kind = type(value)
    if kind in (str, int, float, bool, bytes, type(None)):
        return value
    if isinstance(value, tuple | list):
        return tuple([carried(inner, unpack) for inner in value])
    if kind is dict:
        return {key: carried(inner, unpack) for key, inner in value.items()}
    if kind is Serialized:
        frames = [bytes(frame) for frame in value.frames]
        if unpack:
            return deserialize(value.header, frames)
        return Serialized(value.header, frames)
    if isinstance(value, enum.StrEnum):
        return str(value)
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"{kind} cannot be sent")


def size_of(value):
    """Bytes of the frames and arrays of a message."""
    if isinstance(value, Serialized):
        return sum(len(frame) for frame in value.frames)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes) else 0


HIDDEN = "run", "secret", "token"


def shown(fields):
    """The fields of a request, for the trace."""
    words = []
    for name, value in fields.items():
        if name == "messages":
            value = [message[:4] for message in value]
            words += [f"{k} {o}.{s} at {step}" for k, o, s, step in value]
        elif isinstance(value, int | str) and name not in HIDDEN:
            words.append(f"{name}={value}"[:60])
    return ", ".join(words)


class Link:
    """The link of a server, whose bandwidth the messages on it share equally.

    Dask has a connection for each request that waits for its answer, so no message
    waits for another one to pass, and a small one passes soon.

    Args:
        network: The network.
        bandwidth: Bytes per second, in both directions together.
    """

    def __init__(self, network, bandwidth):
        self.bandwidth = bandwidth
        self.network = network
        self.world = network.world
        self.proceeded_at = self.world.now  # when `passed_bytes` was right
        self.passed_bytes = 0.0  # bytes of a message that was on the link all the time
        self.messages = {}  # by number: `passed_bytes` at its end, what is done then
        self.numbers = itertools.count()
        self.planned = 0  # changes of the messages

    def carry(self, nbytes, passed):
        """Put a message on the link; return what takes it off again.

        Args:
            nbytes: Its size.
            passed: Called once it has passed.
        """
        number = next(self.numbers)
        self.proceed()
        self.messages[number] = self.passed_bytes + nbytes, passed
        self.plan()

        def take_off():
            self.proceed()
            self.messages.pop(number, None)
            self.plan()

        return take_off

    def proceed(self):
        before, self.proceeded_at = self.proceeded_at, self.world.now
        if self.messages:
            carried_bytes = (self.proceeded_at - before) * self.bandwidth
            self.passed_bytes += carried_bytes / len(self.messages)

    def plan(self):
        """Let the next message pass at its time, unless the messages change before."""
        self.planned += 1
        if self.messages:
            end = min(end for end, _ in self.messages.values())
            left_bytes = max(0.0, end - self.passed_bytes) * len(self.messages)
            over = functools.partial(self.end, self.planned)
            process = self.network.process
            self.world.after(left_bytes / self.bandwidth, process, over)

    def end(self, plan):
        if plan != self.planned:
            return
        self.proceed()
        number = min(self.messages, key=lambda number: self.messages[number][0])
        end, passed = self.messages.pop(number)
        self.passed_bytes = max(self.passed_bytes, end)
        self.plan()
        passed()


class Request:
    """A request, from its server until the answer is there."""

    def __init__(self, number, source, address, operation, fields):
        self.number = number
        self.source = source
        self.address = address
        self.operation = operation
        self.fields = fields
        self.answer = source.process.loop.create_future()
        self.target = None  # once it is on its way
        self.answered = False
        self.lost = False  # with its connection
        self.give_up = lambda: None  # takes the answer off the links

    def fail(self, error):
        if not self.answer.done():
            self.answer.set_exception(error)


class Network:
    """The connections between servers.

    Args:
        world: The world.
        shared: The process of all servers; None: each has its own.

    Attributes:
        servers: Those that listen, by address.
        cuts: Pairs of addresses between which nothing passes, in this direction.
        slow: How many times as long messages from or to a server take, by address.
        latency_s: Mean time of a message.
        bandwidth: Bytes per second to and from a server, by address; others: unlimited.
        process: Where the network itself runs.
        damage: Called with the messages of each request; returns what arrives.
        damage_sum: The same with each sum in an answer.
    """

    def __init__(self, world, shared=None):
        self.world = world
        self.shared = shared
        self.servers = {}
        self.cuts = set()
        self.slow = {}
        self.latency_s = LATENCY_S
        self.bandwidth = {}
        self.damage = lambda messages: messages
        self.damage_sum = lambda frame: frame
        self.process = Process(world, "network")
        self._links = {}  # by address
        self._held = []  # source, target, action, content
        self._requests = {}
        self._numbers = itertools.count()

    def latency(self, source, target):
        chance = self.world.random
        mean_s = self.latency_s * max(
            self.slow.get(source.address, 1.0), self.slow.get(target.address, 1.0)
        )
        if chance.random() < LATE:
            mean_s *= LATE_TIMES
        delay_s = chance.uniform(0.1, 1.0) * mean_s + chance.expovariate(2 / mean_s)
        return min(delay_s, MAX_DELAY_S)

    async def ask(self, source, address, operation, fields):
        number = next(self._numbers)
        carried_fields = carried(fields, unpack=address != SCHEDULER)
        if carried_fields.get("messages"):
            carried_fields["messages"] = self.damage(carried_fields["messages"])
        request = Request(number, source, address, operation, carried_fields)
        self._requests[number] = request
        self._connect(request, self.world.now + CONNECT_S)
        try:
            return await request.answer
        finally:
            self._requests.pop(number, None)
            request.give_up()

    def _connect(self, request, deadline):
        """Send a request as soon as somebody listens."""
        world, source = self.world, request.source
        target = self.servers.get(request.address)
        if request.answer.done():  # it was given up
            return
        if target is None and world.now >= deadline:
            request.fail(OSError(f"timed out trying to connect to {request.address}"))
        elif target is None:
            again = functools.partial(self._connect, request, deadline)
            world.after(AGAIN_S, source.process, again)
        else:
            request.target = target
            arrive = functools.partial(self._arrive, request)
            self._transmit(source, target, arrive, request.fields)

    def _transmit(self, source, target, action, content):
        """Let a message arrive; return what takes it off the links on its way."""
        if (source.address, target.address) in self.cuts:
            self._held.append((source, target, action, content))
            return lambda: None
        delay_s = self.latency(source, target)
        arrive = functools.partial(self.world.after, delay_s, target.process, action)
        ends = {source.address, target.address} & self.bandwidth.keys()
        nbytes = size_of(content) if ends else 0
        if not nbytes:
            arrive()
            return lambda: None
        carrying = set(ends)

        def passed(end):
            carrying.remove(end)
            if not carrying:
                arrive()

        # A slow link at one end does not occupy that at the other.
        take_off = [
            self._link(end).carry(nbytes, functools.partial(passed, end))
            for end in sorted(ends)
        ]
        return lambda: [end() for end in take_off]

    def _link(self, address):
        bandwidth = self.bandwidth[address]
        link = self._links.get(address)
        if link is None or link.bandwidth != bandwidth:
            link = self._links[address] = Link(self, bandwidth)
        return link

    def _arrive(self, request):
        target = request.target
        if request.lost:
            return
        what = f"{request.operation} {shown(request.fields)}"
        self.world.note(target.name, f"<- {request.source.name}: {what}")
        target.process.loop.create_task(self._handle(request))

    async def _handle(self, request):
        handler = request.target.handlers.get(request.operation)
        answer = error = None
        try:
            if handler is not None:  # else Dask answers None
                answer = await handler(**request.fields)
        except Exception as caught:
            error = caught
            what = f"{request.operation} raised {caught!r}"
            self.world.errors.append(f"{request.target.name}: {what}")
        answer = carried(answer, unpack=request.source.address != SCHEDULER)
        if isinstance(answer, dict) and "frame" in answer:
            answer["frame"] = self.damage_sum(answer["frame"])
        request.answered = True

        def arrive():
            if error is not None:
                request.fail(error)
            elif not request.answer.done():
                request.answer.set_result(answer)

        take_off = self._transmit(request.target, request.source, arrive, answer)
        if request.number in self._requests:
            # Dask sends all of a request even if it is given up, but not its answer.
            request.give_up = take_off
        else:
            take_off()

    # ---- faults

    def heal(self):
        """End all cuts; what was held arrives."""
        self.cuts.clear()
        held, self._held = self._held, []
        for source, target, action, content in held:
            self._transmit(source, target, action, content)

    def break_between(self, first, second):
        """Break the connections of two servers; return how many requests were lost."""
        lost = 0
        for request in list(self._requests.values()):
            ends = {request.source.address, request.address}
            if ends == {first, second}:
                self._lose(request, 0.0)
                lost += 1
        return lost

    def end(self, server, notice_s):
        """Break all connections of a server that has ended."""
        if self.servers.get(server.address) is server:
            del self.servers[server.address]
        for request in list(self._requests.values()):
            if request.target is server and not request.answered:
                self._lose(request, notice_s)

    def _lose(self, request, notice_s):
        """The sender gets an error; the request may still arrive, or be lost too."""
        request.lost = self.world.random.random() < 0.5
        error = OSError(f"the connection to {request.address} was closed")
        self.world.after(
            notice_s + self.latency_s,
            request.source.process,
            lambda: request.fail(error),
        )


SCHEDULER = "tcp://scheduler:1"


class Server:
    """A process that answers requests."""

    def __init__(self, network, address, name):
        self.network = network
        self.address = address
        self.name = name
        self.process = network.shared or Process(network.world, name)
        self.handlers = {}
        self.extensions = {}
        network.servers[address] = self

    def rpc(self, address):
        """As `distributed.core.Server.rpc`."""
        return Peer(self, address)

    def start(self, work):
        """Start a coroutine on its event loop; an error of it is a violation."""
        errors = self.network.world.errors

        def ended(task):
            if not task.cancelled() and task.exception() is not None:
                errors.append(f"{self.name}: {task.exception()!r}")

        def start():
            self.process.loop.create_task(work).add_done_callback(ended)

        self.process.run(start)


class Peer:
    """Requests to a server, as methods."""

    def __init__(self, source, address):
        self._source = source
        self._address = address

    def __getattr__(self, operation):
        def ask(**fields):
            source = self._source
            return source.network.ask(source, self._address, operation, fields)

        return ask


class OverNetwork(Transport):
    """The transport of a simulated server."""

    def __init__(self, server):
        self.loop, self.clock = server.process.loop, server.process.clock
        self.handlers = server.handlers
        self._server = server

    @override
    async def ask(self, address, operation, **fields):
        address = SCHEDULER if address is None else address
        return await self._server.network.ask(self._server, address, operation, fields)

    @override
    async def is_listening(self, address, timeout_s):
        return address in self._server.network.servers


class SchedulerOverNetwork(OverNetwork, SchedulerTransport):
    """The transport of the simulated scheduler."""

    @override
    def has_worker(self, address):
        return address in self._server.workers

    @override
    def has_client(self, client):
        return client in self._server.clients

    @override
    def places(self, key):
        held = self._server.tasks.get(key)
        return None if held is None else TaskPlaces(set(held), set())


class SimScheduler(Server):
    """The scheduler, with the real plugin.

    Attributes:
        workers: Connected workers, by address.
        clients: Ids of connected clients.
        tasks: Addresses that hold the result of a task, by key.
    """

    def __init__(self, network):
        super().__init__(network, SCHEDULER, "scheduler")
        self.workers = {}
        self.clients = set()
        self.tasks = {}
        self.plugin = ChannelSchedulerPlugin()
        self.extensions[NAME] = self.plugin
        self.process.run(lambda: self.plugin.attach(SchedulerOverNetwork(self)))

    def worker_gone(self, worker):
        """Dask removes a worker."""
        if self.process.alive and self.workers.get(worker.address) is worker:
            del self.workers[worker.address]
            self.network.world.note("scheduler", f"removes {worker.name}")
            self.plugin.worker_removed(worker.address)

    def client_gone(self, client):
        self.clients.discard(client)
        self.network.world.note("scheduler", f"removes {client}")
        self.plugin.client_removed(client)


class SimWorker(Server):
    """A worker, with the real plugin."""

    def __init__(self, network, scheduler, address, name):
        super().__init__(network, address, name)
        self.scheduler = scheduler
        self.closing = False
        self.plugin = ChannelWorkerPlugin()
        self.extensions[NAME] = self.plugin
        self.process.run(lambda: self.plugin.attach(OverNetwork(self)))
        scheduler.workers[address] = self

    def kill(self, notice_s=0.0):
        """End it at once.

        Args:
            notice_s: Until others notice: `KEPT_S` if its machine is gone.
        """
        network, scheduler = self.network, self.scheduler
        network.world.note(self.name, "is killed")
        self.process.kill()
        network.end(self, notice_s)
        gone = functools.partial(scheduler.worker_gone, self)
        network.world.after(notice_s + network.latency_s, scheduler.process, gone)

    async def close(self):
        """Let its replicas leave, and end it, as a worker that retires."""
        if self.closing:
            return
        self.closing = True
        network, world = self.network, self.network.world
        world.note(self.name, "closes")
        gone = functools.partial(self.scheduler.worker_gone, self)
        if early := world.random.random() < 0.5:
            world.after(network.latency_s, self.scheduler.process, gone)
        await self.plugin.retire()
        world.note(self.name, "has closed")
        if not early:
            world.after(network.latency_s, self.scheduler.process, gone)
        world.after(0.0, self.scheduler.process, self._end)

    def _end(self):
        if self.process.alive:
            self.process.kill()
            self.network.end(self, 0.0)
