"""Simulated replicas of a predictor, whose batches a test answers."""

import asyncio
import contextlib
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from daskdl.config import Timeouts
from daskdl.inference.pool import Host, ModelFailure, ModelReplica, Outputs, ReplicaPool
from daskdl.inference.predictor import BatchQueue, Call, Dispatcher
from daskdl.serialization import PackedModel

WITHIN_S = 30.0
TIMEOUTS = Timeouts(60.0, 30.0, 60.0, 10.0, 300.0, 600.0)
MODEL = PackedModel(nn.Identity())


class Asked(NamedTuple):
    """One batch."""

    x: np.ndarray
    outcome: asyncio.Future

    @property
    def values(self):
        """The first column."""
        return self.x[:, 0].tolist()

    def answer(self):
        """Answer with ten times the input."""
        self.outcome.set_result(Outputs(self.x * 10, (torch.float32,)))

    def refuse(self, summary="ValueError: no"):
        self.outcome.set_result(ModelFailure(summary, "Traceback: ..."))

    def lose(self):
        self.outcome.set_exception(ConnectionError("connection lost"))


class FakeReplica(ModelReplica):
    """Logs its calls."""

    def __init__(self, place, log, faults):
        self.place = place
        self.asked = asyncio.Queue()
        self.log = log
        self.faults = faults

    async def does(self, what, *more):
        self.log.append((what, self.place, *more))
        fault = self.faults.pop((what, self.place), None)
        if isinstance(fault, asyncio.Event):
            await fault.wait()
        elif isinstance(fault, Exception):
            raise fault
        return fault if isinstance(fault, ModelFailure) else None

    @override
    async def open(self):
        await self.does("open")

    @override
    async def stage(self, version, model, sent=None):
        return await self.does("stage", version)

    @override
    async def use(self, version):
        await self.does("use", version)

    @override
    async def ping(self):
        await self.does("ping")

    @override
    async def close(self, wait):
        await self.does("close")

    @override
    async def ask(self, x):
        outcome = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Asked(x, outcome))
        return await outcome


class FakeHost(Host):
    """Places that a test may change.

    `log` lists the calls of all replicas: a verb, a place, and a version if there is
    one. `faults` holds the outcome of the next call, by verb and place: an error, a
    `ModelFailure`, or an event to wait for. `log_as_sent` is the log at the moment at
    which models were sent to places.
    """

    def __init__(self, *there):
        self.there = list(there)
        self.replicas = []
        self.log = []
        self.log_as_sent = []
        self.faults = {}
        self.raises = None

    @override
    async def places(self):
        if self.raises is not None:
            raise self.raises
        return list(self.there)

    @override
    def replica(self, place, sharing):
        self.replicas.append(FakeReplica(place, self.log, self.faults))
        return self.replicas[-1]

    @override
    @contextlib.asynccontextmanager
    async def sent(self, version, model, places):
        self.log_as_sent.append(list(self.log))
        yield None


class Desk(NamedTuple):
    """A dispatcher with its host, pool and queue."""

    host: FakeHost
    pool: ReplicaPool
    dispatcher: Dispatcher
    queue: BatchQueue

    def call(self, *values) -> Future:
        """Call with a row for each of these values."""
        x = np.array([[value, 0] for value in values], np.float32)
        call = Call.of(x, 4)
        self.queue.admit(call.rows)
        self.dispatcher.add(call)
        return call.answer

    async def asked(self, replica=0):
        """The next batch that a replica gets."""
        return await soon(self.host.replicas[replica].asked.get())

    async def new_replicas(self):
        """Start the missing replicas."""
        await self.pool.look()
        await soon(asyncio.gather(*self.pool.starting, return_exceptions=True))
        await turns()


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, WITHIN_S)


async def values(answer):
    """Wait for an answer; return its first column."""
    return (await soon(asyncio.wrap_future(answer)))[:, 0].tolist()


async def turns():
    """Run the event loop until nothing is ready."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(
    *places,
    replicas=None,
    wait_s=0.0,
    timeouts=TIMEOUTS,
    queue=100,
    faults=(),
    host=None,
    there=None,
):
    """A desk with one replica in each place; a batch has 4 rows at most.

    `host` is a list that gets the host; `there` is raised when the host is asked for
    its places after the start.
    """
    fake_host = FakeHost(*places)
    fake_host.faults.update(faults)
    if host is not None:
        host.append(fake_host)
    pool = ReplicaPool(fake_host, MODEL, replicas or max(len(places), 1), timeouts)
    batches = BatchQueue(4, wait_s, queue)
    dispatcher = Dispatcher(pool, batches, timeouts)
    try:
        await pool.open()
        fake_host.raises = there
        yield Desk(fake_host, pool, dispatcher, batches)
    finally:
        dispatcher.close()
        await pool.close(wait=True)
