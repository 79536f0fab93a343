"""The model on its way to all workers: who sends what to whom, and what may be lost."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest

from daskdl.channel import broadcast, protocol
from daskdl.channel.broadcast import WINDOW, parts_of, routes_of, send
from daskdl.channel.protocol import NAME
from daskdl.channel.run_state import MAX_READERS
from tests.sim.cluster import run_simulated, simulated
from tests.sim.network import SCHEDULER
from tests.support.channels import held_up, recorded, wait_until

RUN, SECRET = 7, 11
IDENTITY = {"run": RUN, "secret": SECRET}
PARTS = 12


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(broadcast, "MIN_PART_BYTES", 1)
    monkeypatch.setattr(broadcast, "PARTS", PARTS)


def model():
    """Two arrays, whose border is inside of a part."""
    return {
        "model": np.arange(10 * PARTS - 7, dtype=np.uint8),
        "train": np.arange(7, dtype=np.uint8)[::-1],
    }


class Sending:
    """A client that sends a model to workers.

    Attributes:
        sent: Parts that each server has sent, by its address.
    """

    def __init__(self, client, scheduler, workers, monkeypatch):
        self.client = client
        self.scheduler = scheduler
        self.workers = workers
        self.blob = parts_of(model())
        self.unsent = list(range(self.blob.parts))
        self.sent = Counter()
        for server in (scheduler, *workers):
            self._count(server, monkeypatch)

    def _count(self, server, monkeypatch):
        answer = server.handlers[protocol.PART]

        async def counting(**fields):
            answered = await answer(**fields)
            self.sent[server.address] += answered.get("bytes") is not None
            return answered

        monkeypatch.setitem(server.handlers, protocol.PART, counting)

    def ask(self, operation, **fields):
        return getattr(self.client.scheduler, operation)(**IDENTITY, **fields)

    async def offer(self):
        blob = self.blob
        fields = {"client": self.client.id, "timeout_s": 3.0}
        return await self.ask(
            protocol.OFFER, forms=blob.forms, parts=blob.parts, **fields
        )

    async def put(self, *numbers):
        for number in numbers:
            payload = protocol.wrap(self.blob.part(number))
            await self.ask(protocol.PUT, number=number, payload=payload)

    async def spread(self, *workers):
        addresses = [worker.address for worker in workers]
        answer = await self.ask(protocol.SPREAD, workers=addresses)
        return answer["failures"]

    async def all(self, *workers):
        """Send it all to these workers; return the failures."""
        addresses = [worker.address for worker in workers]
        fields = {"client": self.client.id, "timeout_s": 3.0}
        return await send(self.ask, self.blob, self.unsent, addresses, **fields)

    def release(self):
        """What the opening of the run does."""
        self.scheduler.plugin.copies.release((RUN, SECRET))

    def parts_on(self, worker):
        copy = worker.extensions[NAME].copies.held.get((RUN, SECRET))
        return (
            []
            if copy is None
            else [n for n, p in enumerate(copy.parts) if p is not None]
        )

    def check(self, *workers):
        for worker in workers:
            copy = worker.extensions[NAME].copies.held[RUN, SECRET]
            lists = copy.values(lambda name, array: (name, array.tolist()))
            assert lists == {name: (name, a.tolist()) for name, a in model().items()}

    async def gone(self):
        """Wait until nothing of it is on the scheduler or a worker, nor on its way."""
        copies = [
            server.extensions[NAME].copies
            for server in (self.scheduler, *self.workers)
            if server.process.alive
        ]
        await wait_until(lambda: not any(c.held for c in copies))
        assert not self.scheduler.plugin.copies.broadcasts


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 31, 64, 100])
def test_no_worker_sends_more_than_one_copy_and_routes_grow_with_the_logarithm(count):
    workers = [f"w{number}" for number in range(count)]

    routes = routes_of(workers)

    assert list(routes) == workers
    successors = {worker: Counter() for worker in [*workers, SCHEDULER]}
    for worker, both in routes.items():
        for half, route in enumerate(both):
            assert worker not in route
            assert len(route) <= math.log2(count)
            source = route[0] if route else SCHEDULER
            successors[source][half] += 1
            if route:  # it is the route of the source, with the source before it
                assert routes[source][half] == route[1:]
    assert successors.pop(SCHEDULER) == {0: 1, 1: 1}
    for counts in successors.values():
        assert len(counts) <= 1  # it passes on one half of the parts
        assert sum(counts.values()) <= 2


@simulated(8)
async def test_each_worker_gets_it_and_none_sends_more_than_one_copy(
    c, s, *workers, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    puts = recorded(s.handlers, protocol.PUT, monkeypatch)

    failures = await sending.all(*workers)

    assert failures == {}
    sending.check(*workers)
    assert len(puts) == PARTS  # the client has sent it once
    assert max(sending.sent.values()) <= PARTS
    assert sum(sending.sent.values()) == len(workers) * PARTS


@simulated(8)
async def test_workers_pass_a_part_on_before_they_have_the_next(
    c, s, *workers, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    await sending.offer()
    spreading = asyncio.ensure_future(sending.spread(*workers))

    for number in range(PARTS):
        await sending.put(number)
        expected = [*range(number + 1)]
        await wait_until(
            lambda e=expected: all(sending.parts_on(w) == e for w in workers)
        )

    assert await spreading == {}
    sending.check(*workers)


@simulated(8)
async def test_the_successors_of_a_worker_that_is_lost_ask_the_one_before_it(
    c, s, *workers, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    await sending.offer()
    spreading = asyncio.ensure_future(sending.spread(*workers))
    await sending.put(0, 1)
    await wait_until(lambda: all(sending.parts_on(w) == [0, 1] for w in workers))

    s.network.end(workers[1], 0.0)  # two others get the even parts from it
    s.worker_gone(workers[1])
    await sending.put(*range(2, PARTS))
    failures = await spreading

    left = [worker for worker in workers if worker is not workers[1]]
    assert failures.keys() == {workers[1].address}
    sending.check(*left)


@simulated(4)
async def test_the_successors_of_a_worker_that_hangs_ask_another(
    c, s, *workers, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    hanging, *others = workers

    async def hang(**fields):
        await asyncio.Event().wait()

    monkeypatch.setitem(hanging.handlers, protocol.PART, hang)
    monkeypatch.setitem(hanging.handlers, protocol.RECEIVE, hang)

    spreading = asyncio.ensure_future(sending.all(*workers))
    await wait_until(lambda: all(len(sending.parts_on(w)) == PARTS for w in others))

    assert not spreading.done()
    spreading.cancel()
    sending.check(*others)
    assert await sending.all(*others) == {}  # without the worker that hangs
    await sending.ask("daskdl_close")
    s.network.end(hanging, 0.0)
    await sending.gone()


async def released(c, s, holders, later, monkeypatch):
    """A model that some workers have, and others load from them as they come."""
    sending = Sending(c, s, (*holders, *later), monkeypatch)
    assert await sending.all(*holders) == {}
    sending.release()
    return sending


def lost_at_part_4(scheduler, worker, monkeypatch):
    """Lose a worker as it is asked for a part; return a list that has it then."""
    answer, lost = worker.handlers[protocol.PART], []

    async def ending(**fields):
        if fields["number"] == 4 and not lost:
            lost.append(worker)
            scheduler.network.end(worker, 0.0)
            scheduler.worker_gone(worker)
            await asyncio.Event().wait()
        return await answer(**fields)

    monkeypatch.setitem(worker.handlers, protocol.PART, ending)
    return lost


@simulated(17)
async def test_workers_that_come_later_load_it_from_each_other(
    c, s, first, *later, monkeypatch
):
    sending = await released(c, s, (first,), later, monkeypatch)
    sending.sent.clear()
    loading = Counter()  # by source, at this moment
    most = Counter()
    for worker in later:
        receive = worker.handlers[protocol.RECEIVE]

        async def counting(routes, *, receive=receive, **fields):
            ((source, *_),) = routes
            loading[source] += 1
            most[source] = max(most[source], loading[source])
            answer = await receive(routes=routes, **fields)
            loading[source] -= 1
            return answer

        monkeypatch.setitem(worker.handlers, protocol.RECEIVE, counting)

    failures = await asyncio.gather(*(sending.spread(worker) for worker in later))

    assert failures == [{}] * len(later)
    sending.check(*later)
    assert sending.sent[SCHEDULER] == 0
    assert max(most.values()) <= MAX_READERS
    rounds = math.ceil(math.log(17, 1 + MAX_READERS))
    assert max(sending.sent.values()) <= MAX_READERS * rounds * PARTS


@pytest.mark.parametrize("count", [4, 16, 64])
def test_the_time_in_which_workers_load_it_grows_with_the_logarithm_of_their_number(
    count, monkeypatch
):
    """All links have one bandwidth, which both of their directions share."""
    part_s = 0.1
    depth = math.ceil(math.log2(count + 2)) - 1

    async def load_all(c, s, holder, *later):
        sending = await released(c, s, (holder,), later, monkeypatch)
        world, bandwidth = s.network.world, s.network.bandwidth
        for server in (s, holder, *later):
            bandwidth[server.address] = sending.blob.nbytes / PARTS / part_s
        began_at = world.now

        failures = await asyncio.gather(*(sending.spread(w) for w in later))

        took_s = world.now - began_at
        bandwidth.clear()
        assert failures == [{}] * count
        copies = 1 + MAX_READERS  # that the link of a worker carries
        assert took_s < copies * (PARTS + WINDOW * depth) * part_s  # virtual

    run_simulated(load_all, 1 + count)


@simulated(4)
async def test_the_readers_of_a_worker_that_is_lost_load_it_from_one_that_has_it(
    c, s, holder, *later, monkeypatch
):
    sending = await released(c, s, (holder,), later, monkeypatch)
    source = later[0]  # the last one loads it from this one
    lost = lost_at_part_4(s, source, monkeypatch)

    failures = await asyncio.gather(*(sending.spread(w) for w in later))

    assert lost
    assert [*map(len, failures)] == [1, 0, 0]
    sending.check(*later[1:])
    broadcast_ = s.plugin.copies.broadcasts[RUN, SECRET]
    survivors = [worker.address for worker in (holder, *later[1:])]
    assert broadcast_.readers == {survivor: set() for survivor in survivors}


@simulated(3)
async def test_a_worker_that_comes_back_has_no_readers_from_before(
    c, s, first, second, late, monkeypatch
):
    sending = await released(c, s, (first, second), (late,), monkeypatch)
    released_ = held_up(late.handlers, protocol.RECEIVE, monkeypatch)
    spreading = asyncio.ensure_future(sending.spread(late))
    readers = s.plugin.copies.broadcasts[RUN, SECRET].readers
    await wait_until(lambda: readers[first.address])

    s.worker_gone(first)
    s.workers[first.address] = first
    assert await sending.spread(first) == {}
    before = set(readers[first.address])
    released_.set()

    assert await spreading == {}
    assert before == set()
    addresses = [worker.address for worker in (first, second, late)]
    assert readers == {address: set() for address in addresses}


@simulated(3)
async def test_a_worker_that_comes_later_loads_it_from_another_if_the_first_is_lost(
    c, s, first, second, late, monkeypatch
):
    sending = await released(c, s, (first, second), (late,), monkeypatch)
    lost = lost_at_part_4(s, first, monkeypatch)

    assert await sending.spread(late) == {}

    assert lost
    sending.check(late)


@simulated(2)
async def test_a_worker_gets_the_reason_if_no_worker_has_it_any_more(
    c, s, first, late, monkeypatch
):
    sending = await released(c, s, (first,), (late,), monkeypatch)
    s.network.end(first, 0.0)
    s.worker_gone(first)

    failures = await sending.spread(late)

    assert failures == {late.address: "no worker has the model any more"}


@simulated(3)
async def test_nothing_is_left_after_a_run_that_has_not_opened(
    c, s, *workers, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    assert await sending.all(*workers) == {}

    await sending.ask("daskdl_close")

    await sending.gone()


@pytest.mark.parametrize("cause", ["it is closed", "its client is gone"])
@simulated(3)
async def test_nothing_is_left_of_a_model_that_has_not_arrived(
    c, s, *workers, cause, monkeypatch
):
    sending = Sending(c, s, workers, monkeypatch)
    await sending.offer()
    spreading = asyncio.ensure_future(sending.spread(*workers))
    await sending.put(0, 1)
    await wait_until(lambda: all(sending.parts_on(w) == [0, 1] for w in workers))

    if cause == "it is closed":
        await sending.ask("daskdl_close")
    else:
        s.client_gone(c.id)

    assert (await spreading).keys() == {worker.address for worker in workers}
    await sending.gone()
    answer = await sending.ask(protocol.PUT, number=2, payload=b"")
    assert answer["status"] == "unknown"


@simulated(1)
async def test_a_model_is_for_those_who_know_the_secret(c, s, a, monkeypatch):
    sending = Sending(c, s, [a], monkeypatch)
    assert await sending.all(a) == {}

    answer = await s.rpc(a.address).daskdl_part(run=RUN, secret=SECRET + 1, number=0)

    assert answer["status"] == "unknown"
    refused = await c.scheduler.daskdl_offer(
        run=RUN, secret=1, client="another", forms=[], parts=1, timeout_s=1.0
    )
    assert refused["status"] == "refused"
