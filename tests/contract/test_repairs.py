"""When missing updates are requested, and of whom; time passes as the tests say."""

import asyncio
import contextlib
import functools
from types import SimpleNamespace

from daskdl.channel import recovery
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import ChannelSpec, MessageKind
from daskdl.channel.recovery import PATIENCE_S, Repairs
from tests.support.run_states import GRID, SIZE, TIMEOUTS, control, item_of, sparse


class Peers:
    """The other replicas, 1 and 2, which have nothing to give; and the clock."""

    def __init__(self):
        self.spec = ChannelSpec(1, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS)
        self.loop = SimpleNamespace(time=lambda: self.now)
        self.now = 0.0
        self.requests = []  # whom, and for which updates of replica 1

    async def ask(self, worker, operation, *, replica, origin, sequences, **fields):
        assert (worker, operation, origin) == (f"on {replica}", "daskdl_repair", 1)
        self.requests.append((replica, sequences))
        return {"status": "ok", "messages": []}

    async def at(self, now):
        """What was requested until then."""
        self.now = now
        for _ in range(10):  # of the event loop, several looks
            await asyncio.sleep(0)
        requests, self.requests = self.requests, []
        return requests


def with_repairs(test):
    """Call a test with an inbox that lacks update 2 of replica 1, and the peers."""

    @functools.wraps(test)
    def run(self, monkeypatch):
        monkeypatch.setattr(recovery, "LOOK_S", 0)

        async def body():
            inbox, peers = Inbox(SIZE, GRID, 10**9, in_order=False), Peers()
            for sequence in (1, 3):
                update = sparse(1, sequence, [1])
                inbox.put(item_of(update), update)
            workers = {replica: f"on {replica}" for replica in range(3)}
            routing = SimpleNamespace(connection=peers, inbox=inbox, workers=workers)
            repairs = asyncio.ensure_future(Repairs(routing, take=None).run())
            try:
                await test(self, inbox, peers)
            finally:
                repairs.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await repairs

        asyncio.run(body())

    del run.__wrapped__  # or pytest looks for what the test is called with
    return run


class TestRequests:
    @with_repairs
    async def test_what_is_late_is_requested_and_not_sooner(self, inbox, peers):
        assert await peers.at(0) == []
        assert await peers.at(0.9 * PATIENCE_S) == []
        assert await peers.at(PATIENCE_S) == [(1, [2])]

    @with_repairs
    async def test_what_came_meanwhile_is_not_requested(self, inbox, peers):
        await peers.at(0)
        update = sparse(1, 2, [1])
        inbox.put(item_of(update), update)

        assert await peers.at(PATIENCE_S) == []

    @with_repairs
    async def test_what_was_announced_is_missed_without_a_later_update(
        self, inbox, peers
    ):
        message = control(MessageKind.PROGRESS, 1, 9, payload=0)
        inbox.note(message._replace(sequence=5))
        await peers.at(0)

        assert await peers.at(PATIENCE_S) == [(1, [2, 4, 5])]

    @with_repairs
    async def test_it_is_requested_again_as_late_of_others_in_turn(self, inbox, peers):
        await peers.at(0)
        asked = [await peers.at(turn * PATIENCE_S / 2) for turn in range(2, 9)]

        assert asked == [[(1, [2])], [], [(2, [2])], [], [(1, [2])], [], [(2, [2])]]

    @with_repairs
    async def test_a_joining_replica_misses_nothing(self, inbox, peers):
        inbox.joining = True
        await peers.at(0)

        assert await peers.at(PATIENCE_S) == []

    @with_repairs
    async def test_nothing_of_a_failed_replica_is_requested(self, inbox, peers):
        await peers.at(0)
        inbox.note(control(MessageKind.FAILED, 1))

        assert await peers.at(PATIENCE_S) == []
