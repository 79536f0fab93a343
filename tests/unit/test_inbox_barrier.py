"""The inbox of a mesh: what it takes in around a barrier, and what it misses."""

from daskdl.channel.inbox import UPDATE_BYTES, Inbox
from daskdl.channel.protocol import MessageKind
from tests.support.inboxes import GRID, SIZE, control, filled, item_of, sparse


def steps(inbox):
    return {origin: p.step for origin, p in inbox.peers.progress.items()}


def put(inbox, origin, sequence, step=None):
    update = sparse(origin, sequence, [1], step=step)
    return inbox.put(item_of(update), update)


def mesh(limit_bytes=10**9):
    return Inbox(SIZE, GRID, limit_bytes, in_order=False)


def test_holding_says_what_was_received_and_takes_nothing_more():
    inbox = filled(sparse(1, 1, [1]))

    assert inbox.hold([]) == {1: (1, ())}
    assert not put(inbox, 1, 2)

    assert inbox.received.by_origin() == {1: (1, ())}
    assert inbox.holds_back(item_of(sparse(1, 2, [1])))
    assert not inbox.holds_back(item_of(sparse(1, 1, [1])))  # it need not come again


def test_what_all_settled_on_is_taken_meanwhile():
    inbox = filled()
    inbox.hold([])

    inbox.barrier.open({1: (1, ())})

    assert not inbox.holds_back(item_of(sparse(1, 1, [1])))
    assert put(inbox, 1, 1)
    assert not put(inbox, 1, 2)


def test_afterwards_only_the_lost_are_kept_out_and_are_not_asked_to_come_again():
    inbox = filled()
    inbox.hold([7])

    inbox.barrier.release()

    assert put(inbox, 1, 1)
    assert not put(inbox, 7, 1)
    assert not inbox.holds_back(item_of(sparse(7, 1, [1])))


def test_a_state_of_another_takes_the_place_of_what_waits():
    inbox = filled(sparse(1, 1, [1]), sparse(1, 2, [2]), limit_bytes=UPDATE_BYTES + 4)
    assert inbox.pending.folds == 1

    inbox.begin({1: (5, (7,))}, GRID)

    assert inbox.pending.take() == ([], None)
    assert inbox.received.by_origin() == {1: (5, (7,))}


def test_a_step_counts_when_no_update_before_it_is_missing():
    inbox = mesh()
    put(inbox, 1, 1, step=1)
    put(inbox, 1, 3, step=3)
    assert steps(inbox) == {1: 1}

    put(inbox, 1, 2, step=2)

    assert steps(inbox) == {1: 3}


def test_a_step_counts_when_a_state_has_the_updates_before_it():
    inbox = mesh()
    inbox.note(control(MessageKind.PROGRESS, 1, 9, payload=0)._replace(sequence=4))
    assert steps(inbox) == {}

    inbox.begin({1: (4, ())}, GRID)

    assert steps(inbox) == {1: 9}


def test_news_are_told_from_what_is_known():
    inbox = mesh()
    item = control(MessageKind.PROGRESS, 1, 7, payload=-1)

    assert inbox.note(item) is True
    assert inbox.note(item) is False
