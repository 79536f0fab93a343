"""When missing updates are requested and of whom, and how survivors agree."""

import asyncio
import contextlib
import functools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel import recovery
from daskdl.channel.inbox import ReceivedSet, missing
from daskdl.channel.protocol import MessageKind, PeerProgress
from daskdl.channel.recovery import (
    MAX_REQUESTED,
    MISSING_AFTER_S,
    Repairs,
    donors,
    helpers,
    target_of,
)
from tests.support.run_states import SPEC, control, filled, item_of, put, sparse


class Peers:
    """The other replicas, 1 and 2, their answers, and the clock."""

    def __init__(self):
        self.spec = SPEC
        self.loop = SimpleNamespace(time=lambda: self.now)
        self.now = 0.0
        self.requests = []  # replica, and the updates of replica 1 requested of it
        self.answered = []  # messages in the answers
        self.taken = []

    async def ask(self, worker, operation, *, replica, origin, sequences, **fields):
        assert (worker, operation, origin) == (f"on {replica}", "daskdl_repair", 1)
        self.requests.append((replica, sequences))
        return {"status": "ok", "messages": self.answered}

    async def at(self, now):
        """The requests up to a time."""
        self.now = now
        for _ in range(10):  # turns of the event loop: several looks
            await asyncio.sleep(0)
        requests, self.requests = self.requests, []
        return requests


def with_repairs(test):
    """Call a test with an inbox that lacks update 2 of replica 1, and the peers."""

    @functools.wraps(test)
    def run(monkeypatch):
        monkeypatch.setattr(recovery, "CHECK_S", 0)

        async def body():
            inbox, peers = filled((1, 1), (1, 3), in_order=False), Peers()
            workers = {replica: f"on {replica}" for replica in range(3)}
            routing = SimpleNamespace(
                connection=peers, inbox=inbox, workers=workers, relayed=False
            )

            async def take(messages):
                peers.taken += [(m.origin, m.sequence) for m in messages]
                return [m.sequence == 2 for m in messages]

            peers.routing, peers.repairs = routing, Repairs(routing, take)
            running = asyncio.ensure_future(peers.repairs.run())
            try:
                await peers.at(0)
                await test(inbox, peers)
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

        asyncio.run(body())

    del run.__wrapped__  # or pytest looks for the test's own arguments
    return run


@with_repairs
async def test_a_late_update_is_requested_repeatedly_of_each_replica_in_turn(
    inbox, peers
):
    assert await peers.at(0.9 * MISSING_AFTER_S) == []

    asked = [await peers.at(turn * MISSING_AFTER_S / 2) for turn in range(2, 9)]

    assert asked == [[(1, [2])], [], [(2, [2])], [], [(1, [2])], [], [(2, [2])]]


@with_repairs
async def test_the_origin_is_asked_every_second_time(inbox, peers):
    peers.routing.workers = {replica: f"on {replica}" for replica in range(5)}

    asked = [await peers.at(turn * MISSING_AFTER_S) for turn in range(1, 8)]

    assert [replica for [(replica, _)] in asked] == [1, 2, 1, 3, 1, 4, 1]


@with_repairs
async def test_the_others_are_asked_in_turn_for_updates_of_a_replica_without_a_worker(
    inbox, peers
):
    peers.routing.workers = {replica: f"on {replica}" for replica in (0, 2, 3)}

    asked = [await peers.at(turn * MISSING_AFTER_S) for turn in range(1, 5)]

    assert [replica for [(replica, _)] in asked] == [2, 3, 2, 3]


@with_repairs
async def test_an_update_that_arrives_meanwhile_is_not_requested(inbox, peers):
    put(inbox, 1, 2)

    assert await peers.at(MISSING_AFTER_S) == []


@with_repairs
async def test_updates_that_arrive_before_the_answer_are_requested_less_often(
    inbox, peers
):
    """So it is while a link is slow."""
    peers.answered = [item_of(sparse(1, 4, [1])).to_wire()]  # it is not taken
    turns = [await peers.at(turn * MISSING_AFTER_S) for turn in range(1, 8)]
    peers.answered = [item_of(sparse(1, 2, [1])).to_wire()]
    turns += [await peers.at(turn * MISSING_AFTER_S) for turn in range(8, 20)]

    asked_at = [turn for turn, asked in enumerate(turns, 1) if asked]
    assert asked_at == [1, 3, 7, 15, 19]  # the time doubles, and halves


@with_repairs
async def test_an_announced_update_is_missed_without_a_later_update(inbox, peers):
    inbox.process_control(control(MessageKind.PROGRESS, 1, 9, payload=0, sequence=5))
    await peers.at(0)

    assert await peers.at(MISSING_AFTER_S) == [(1, [2, 4, 5])]


@with_repairs
async def test_only_updates_of_the_origin_are_taken_from_an_answer(inbox, peers):
    updates = [sparse(1, 2, [1]), sparse(1, 4, [1]), sparse(2, 1, [1])]
    peers.answered = [item_of(update).to_wire() for update in updates]
    peers.answered.append(control(MessageKind.STOP, 1).to_wire())
    await peers.at(MISSING_AFTER_S)

    assert peers.taken == [(1, 2), (1, 4)]
    assert peers.repairs.repaired == 1


@with_repairs
async def test_the_number_of_updates_in_a_request_is_bounded(inbox, peers):
    inbox.record_progress(1, PeerProgress(10**5, 10**5))
    await peers.at(0)

    [(_, sequences)] = await peers.at(MISSING_AFTER_S)
    assert sequences == [2, *range(4, MAX_REQUESTED + 2)]


@pytest.mark.parametrize("reason", ["it is joining", "the origin has failed"])
def test_nothing_is_requested_while(reason, monkeypatch):
    @with_repairs
    async def body(inbox, peers):
        if reason == "it is joining":
            inbox.awaits_snapshot = True
        else:
            inbox.process_control(control(MessageKind.FAILED, 1))
        assert await peers.at(MISSING_AFTER_S) == []

    body(monkeypatch)


# ---- agreement

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


@given(HAVE)
def test_the_target_is_every_update_that_any_survivor_has(have):
    target = target_of(told(have))

    assert updates_in(target) == set().union(*have.values())
    assert target == received(updates_in(target))  # in the same form


@given(UPDATES, UPDATES)
def test_missing_is_the_difference(mine, target):
    lacking = missing(received(mine), received(target))

    assert {(o, s) for o, gaps in lacking.items() for s in gaps} == target - mine
    assert all(gaps == sorted(gaps) for gaps in lacking.values())


@given(HAVE, UPDATES, st.integers(0, 5))
def test_helpers_have_some_of_the_updates_and_those_with_most_come_first(
    have, wanted, asker
):
    for origin in range(10, 12):  # no replica of `have`
        moved = {n: {(10 + o, s) for o, s in u} for n, u in have.items()}
        sequences = [s for o, s in wanted if 10 + o == origin]
        held = {
            n: sum((origin, s) in updates for s in sequences)
            for n, updates in moved.items()
        }

        order = helpers(origin, sequences, told(moved), asker)

        assert sorted(order) == sorted(n for n in have if n != asker and held[n])
        amounts = [held[n] for n in order]
        assert amounts == sorted(amounts, reverse=True)


def test_a_replica_does_not_ask_itself_for_its_own_updates():
    have = {0: {}, 1: {0: (5, ())}}

    assert helpers(0, [4, 5], have, asker=0) == [1]


def test_the_origin_comes_first_and_lost_replicas_are_not_asked():
    have = {replica: {0: (5, ())} for replica in range(4)}

    del have[2]
    assert helpers(0, [4], have, asker=3) == [0, 1]

    del have[0]
    assert helpers(0, [4], have, asker=3) == [1]


@with_repairs
async def test_in_a_relay_only_the_origin_keeps_its_updates(inbox, peers):
    peers.routing.relayed = True

    asked = [await peers.at(turn * MISSING_AFTER_S) for turn in (1, 2, 3)]

    assert asked == [[(1, [2])]] * 3


@given(HAVE)
def test_all_replicas_have_the_same_updates_after_taking_a_donors_state(have):
    have = {n: {(o, s) for o, s in u if o not in have} for n, u in have.items()}
    notes = told(have)

    after = {n: have[(donors(notes, n) or [n])[0]] for n in have}

    assert len({frozenset(updates) for updates in after.values()}) == 1
    everything = set().union(*have.values())
    if everything in have.values():
        assert after == dict.fromkeys(have, everything)


def test_askers_begin_with_different_donors():
    full, less = {7: (5, ())}, {7: (4, ())}
    have = {0: full, 1: less, 2: full, 4: less}

    assert {donors(have, asker)[0] for asker in (1, 4)} == {0, 2}


def test_an_origin_without_updates_makes_no_difference_between_states():
    have = {0: {7: (5, ()), 8: (0, ())}, 1: {7: (5, ())}}

    assert [donors(have, asker) for asker in (0, 1)] == [[], []]


def test_no_donor_lacks_an_update_of_a_survivor():
    # Replica 1 has more, but no update of replica 0.
    have = {0: {0: (1, ()), 1: (1, ())}, 1: {1: (1, ()), 7: (9, ())}}

    assert donors(have, asker=1) == [0]
    assert donors(have, asker=0) == []
