"""What an inbox takes in around barriers and losses, and what ends its waits."""

import threading

import pytest

from daskdl.channel.inbox import Inbox, Peers, ReceivedSet
from daskdl.channel.protocol import MessageKind, PeerProgress
from tests.support.run_states import GRID, SIZE, control, filled, item_of, sparse

PATIENCE_S = 20


def steps(inbox):
    return {origin: p.step for origin, p in inbox.peers.progress.items()}


def put(inbox, origin, sequence, step=None):
    update = sparse(origin, sequence, [1], step=step)
    return inbox.put(item_of(update), update)


class TestBarrier:
    def test_holding_takes_in_nothing_but_what_all_settled_on(self):
        inbox = filled(sparse(1, 1, [1]))

        assert inbox.hold([]) == {1: (1, ())}
        inbox.barrier.open({1: (2, ())})

        assert [put(inbox, 1, sequence) for sequence in (2, 3)] == [True, False]
        # What was received, or is not wanted, need not come again.
        items = [item_of(sparse(1, sequence, [1])) for sequence in (1, 2, 3)]
        assert [inbox.holds_back(item) for item in items] == [False, False, True]

    def test_afterwards_only_failed_replicas_are_kept_out(self):
        inbox = filled()
        inbox.hold([7])

        inbox.barrier.release()

        assert [put(inbox, origin, 1) for origin in (1, 7)] == [True, False]
        assert not inbox.holds_back(item_of(sparse(7, 1, [1])))

    def test_a_snapshot_takes_the_place_of_what_waits(self):
        inbox = filled(sparse(1, 1, [1]), sparse(1, 2, [2]), limit_bytes=0)

        inbox.begin({1: (5, (7,))}, GRID / 2)
        put(inbox, 1, 6)

        assert inbox.received.by_origin() == {1: (7, ())}
        assert inbox.pending.take()[1][:2].tolist() == [2, 0]


class TestProgress:
    def test_a_step_counts_when_no_update_before_it_is_missing(self):
        inbox = Inbox(SIZE, GRID, 10**9, in_order=False)
        put(inbox, 1, 1, step=1)
        put(inbox, 1, 3, step=3)
        assert steps(inbox) == {1: 1}
        assert inbox.received.behind({1: 3}) == {1: [2]}

        put(inbox, 1, 2, step=2)

        assert steps(inbox) == {1: 3}

    def test_or_when_a_snapshot_contains_those_updates(self):
        inbox = Inbox(SIZE, GRID, 10**9, in_order=False)
        inbox.note(control(MessageKind.PROGRESS, 1, 9, payload=0)._replace(sequence=4))
        assert steps(inbox) == {}

        inbox.begin({1: (4, ())}, GRID)

        assert steps(inbox) == {1: 9}

    def test_it_never_goes_back(self):
        inbox = filled()
        inbox.note(control(MessageKind.PROGRESS, 1, 7, payload=2))
        inbox.note(control(MessageKind.PROGRESS, 1, 6, payload=1))

        assert steps(inbox) == {1: 7}
        assert inbox.peers.slowest(2) is None

    def test_a_late_message_takes_nothing_back(self):
        inbox = Inbox(SIZE, GRID, 10**9, in_order=False)
        for sequence in (1, 2):
            put(inbox, 1, sequence)
        inbox.announce(1, PeerProgress(9, 4))  # those updates are under way

        inbox.announce(1, PeerProgress(1, 1))

        assert steps(inbox) == {1: 2}

    def test_a_failed_replica_has_none_any_more(self):
        inbox = filled()
        for origin in (1, 2):
            inbox.announce(origin, PeerProgress(0))
        inbox.note(control(MessageKind.FAILED, 1, 3))

        for origin in (1, 2):
            inbox.announce(origin, PeerProgress(6))

        assert steps(inbox) == {2: 6}

    def test_the_last_of_each_is_described_with_its_age(self):
        now = 10.0
        peers = Peers(clock=lambda: now)
        peers.announce(2, PeerProgress(5, 1))
        peers.announce(1, PeerProgress(7, 4))
        now = 12.0
        peers.announce(1, PeerProgress(7, 4))  # says nothing new
        peers.announce(2, PeerProgress(6, 1))
        now = 12.5

        assert peers.described() == (
            "replica 1 at step 7, update 4, 2.5 s ago; "
            "replica 2 at step 6, update 1, 0.5 s ago"
        )


def test_what_a_snapshot_has_received_is_not_received_again():
    received = ReceivedSet({0: (2, (4,)), 1: [3, []]})  # lists as from the wire

    assert [received.accept(0, s) for s in (1, 2, 4, 3)] == [False] * 3 + [True]
    assert received.by_origin() == {0: (4, ()), 1: (3, ())}


@pytest.mark.parametrize(
    "stop",
    [
        lambda inbox: inbox.stop("enough"),
        lambda inbox: inbox.note(control(MessageKind.STOP, payload="enough")),
    ],
    ids=["own", "message"],
)
def test_the_first_reason_to_stop_ends_a_wait_and_stays(stop):
    inbox, waiting, came = filled(), threading.Event(), []

    def never():
        waiting.set()
        return False

    thread = threading.Thread(
        target=lambda: came.append(inbox.wait_for(never, PATIENCE_S))
    )
    thread.start()
    assert waiting.wait(PATIENCE_S)
    stop(inbox)
    thread.join(PATIENCE_S / 2)  # sooner than the wait itself would give up
    inbox.stop("later")

    assert came == [True]
    assert inbox.stopped == "enough"
