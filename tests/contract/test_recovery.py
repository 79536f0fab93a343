"""When missing updates are requested and of whom, and how survivors agree."""

import asyncio
import contextlib
import functools
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel import recovery
from daskdl.channel.inbox import DeliveryBarrier, Inbox, ReceivedSet
from daskdl.channel.protocol import ChannelSpec, MessageKind, PeerProgress
from daskdl.channel.recovery import (
    MOST,
    PATIENCE_S,
    Repairs,
    donors,
    helpers,
    missing,
    settle,
)
from tests.support.run_states import GRID, SIZE, TIMEOUTS, control, item_of, sparse


class Peers:
    """The other replicas, 1 and 2, what they give; and the clock."""

    def __init__(self):
        self.spec = ChannelSpec(1, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS)
        self.loop = SimpleNamespace(time=lambda: self.now)
        self.now = 0.0
        self.requests = []  # whom, and for which updates of replica 1
        self.given = []  # updates in their answers
        self.taken = []

    async def ask(self, worker, operation, *, replica, origin, sequences, **fields):
        assert (worker, operation, origin) == (f"on {replica}", "daskdl_repair", 1)
        self.requests.append((replica, sequences))
        return {"status": "ok", "messages": self.given}

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

            async def take(message):
                peers.taken.append((message.origin, message.sequence))
                return message.sequence == 2

            peers.repairs = Repairs(routing, take)
            running = asyncio.ensure_future(peers.repairs.run())
            try:
                await test(self, inbox, peers)
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

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
    async def test_of_an_answer_only_what_was_requested_is_taken(self, inbox, peers):
        updates = [sparse(1, 2, [1]), sparse(1, 4, [1]), sparse(2, 1, [1])]
        peers.given = [item_of(update).to_wire() for update in updates]
        peers.given.append(control(MessageKind.STOP, 1).to_wire())
        await peers.at(0)
        await peers.at(PATIENCE_S)

        assert peers.taken == [(1, 2), (1, 4)]
        assert peers.repairs.repaired == 1

    @with_repairs
    async def test_only_so_many_are_requested_at_once(self, inbox, peers):
        inbox.announce(1, PeerProgress(10**5, 10**5))
        await peers.at(0)

        [(_, sequences)] = await peers.at(PATIENCE_S)
        assert sequences == [2, *range(4, MOST + 2)]

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


UPDATES = st.sets(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20)
HAVE = st.dictionaries(st.integers(0, 5), UPDATES, min_size=1)


def received(updates):
    positions = ReceivedSet()
    for update in sorted(updates):
        positions.accept(*update)
    return positions.by_origin()


def updates_in(received):
    return {
        (origin, sequence)
        for origin, (complete, beyond) in received.items()
        for sequence in [*range(1, complete + 1), *beyond]
    }


def told(have):
    return {replica: received(updates) for replica, updates in have.items()}


# ---- the target


def test_what_is_beyond_a_gap_nobody_can_fill_is_in_the_target_without_the_gap():
    have = {0: {7: (5, (7, 8))}, 1: {7: (3, ())}}
    target = settle(have)

    assert target == {7: (5, (7, 8))}
    assert missing(have[1], target) == {7: [4, 5, 7, 8]}
    assert missing(have[0], target) == {}


@given(HAVE)
def test_the_target_is_what_anybody_has(have):
    target = settle(told(have))

    assert updates_in(target) == set().union(*have.values())
    assert target == received(updates_in(target))  # in the same form


# ---- helpers


def test_who_has_all_is_asked_before_who_has_some_and_who_has_none_is_not():
    have = {0: {}, 1: {9: (4, ())}, 2: {9: (4, (6,))}, 3: {9: (6, ())}, 4: {9: (3, ())}}

    assert helpers(9, [4, 5, 6], have, alive=range(5), asker=0) == [3, 2, 1]


@given(UPDATES, UPDATES)
def test_missing_is_the_difference(mine, target):
    lacking = missing(received(mine), received(target))

    assert {(o, s) for o, gaps in lacking.items() for s in gaps} == target - mine
    assert all(gaps == sorted(gaps) for gaps in lacking.values())


@given(HAVE)
def test_after_all_took_a_state_they_are_the_same(have):
    have = {n: {(o, s) for o, s in u if o not in have} for n, u in have.items()}
    notes = told(have)

    after = {n: have[(donors(notes, n) or [n])[0]] for n in have}

    assert len({frozenset(updates) for updates in after.values()}) == 1
    everything = set().union(*have.values())
    if everything in have.values():
        assert after == dict.fromkeys(have, everything)


@given(HAVE, UPDATES, st.integers(0, 5))
def test_helpers_are_exactly_those_who_have_some_of_it(have, wanted, asker):
    for origin in range(10, 12):  # no replica of `have`
        moved = {n: {(10 + o, s) for o, s in u} for n, u in have.items()}
        sequences = [s for o, s in wanted if 10 + o == origin]
        held = {
            n: sum((origin, s) in updates for s in sequences)
            for n, updates in moved.items()
        }

        order = helpers(origin, sequences, told(moved), list(have), asker)

        assert sorted(order) == sorted(n for n in have if n != asker and held[n])
        amounts = [held[n] for n in order]
        assert amounts == sorted(amounts, reverse=True)


# ---- donors


def test_who_has_the_whole_target_gives_and_who_is_behind_takes():
    full, less = {7: (5, ()), 8: (2, ())}, {7: (5, ()), 8: (1, ())}
    have = {0: full, 1: less, 2: full, 3: less}

    assert sorted(donors(have, asker=1)) == [0, 2]
    assert donors(have, asker=0) == donors(have, asker=2) == []
    assert donors(have, asker=1)[0] != donors({**have, 4: less}, asker=4)[0]


def test_no_state_is_taken_that_lacks_an_update_of_a_survivor():
    # Replica 1 has more, but nothing of what replica 0 has published.
    have = {0: {0: (1, ()), 1: (1, ())}, 1: {1: (1, ()), 7: (9, ())}}

    assert donors(have, asker=1) == [0]
    assert donors(have, asker=0) == []


# ---- the fence


def test_after_a_release_only_the_lost_are_kept_out():
    fence = DeliveryBarrier()
    fence.close([7])
    fence.holding = True
    fence.open({7: (2, ())})

    fence.release()

    assert not fence.holding
    assert fence.admits(8, 1)
    assert not fence.admits(7, 1)


# ---- all of it


@pytest.mark.parametrize("seed", range(30))
def test_after_settling_and_asking_all_survivors_have_the_same(seed):
    chance = random.Random(seed)
    published = {(o, s) for o in range(6) for s in range(1, 9)}
    have = {
        n: {u for u in published if u[0] == n or chance.random() < 0.6}
        for n in range(4)  # of the origins, 4 and 5 are lost
    }
    notes = told(have)
    target = settle(notes)

    for asker in have:
        for origin, sequences in missing(notes[asker], target).items():
            asked = set()
            for helper in helpers(origin, sequences, notes, list(have), asker):
                asked |= {u for u in have[helper] if u[0] == origin}
            have[asker] = have[asker] | {u for u in asked if u[1] in sequences}

    assert all(updates == updates_in(target) for updates in have.values())
    assert all(donors(told(have), asker) == [] for asker in have)
