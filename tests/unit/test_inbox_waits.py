import threading

import pytest

from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import MessageKind, PeerProgress
from tests.support.inboxes import control, filled, item_of, sparse

PATIENCE_S = 20


def steps(inbox):
    return {origin: p.step for origin, p in inbox.peers.progress.items()}


def test_an_update_tells_how_far_its_origin_is():
    inbox = filled()
    inbox.announce(1, PeerProgress(0))

    update = sparse(1, 1, [1], step=9)
    inbox.put(item_of(update), update)

    assert inbox.peers.slowest(0) == 9


def test_progress_never_goes_back():
    inbox = filled()
    inbox.note(control(MessageKind.PROGRESS, 1, 7, payload=2))
    inbox.note(control(MessageKind.PROGRESS, 1, 6, payload=1))

    assert steps(inbox) == {1: 7}
    assert inbox.peers.slowest(2) is None


def test_a_lost_replica_is_not_waited_for_any_more():
    inbox = filled()
    inbox.announce(1, PeerProgress(0))
    inbox.announce(2, PeerProgress(0))
    inbox.note(control(MessageKind.PROGRESS, 2, 5, payload=-1))

    inbox.note(control(MessageKind.FAILED, 1, 3))

    assert inbox.peers.slowest(0) == 5


def test_a_lost_replica_stays_lost_when_the_others_meet():
    inbox = filled()
    inbox.announce(1, PeerProgress(0))
    inbox.announce(2, PeerProgress(0))
    inbox.note(control(MessageKind.FAILED, 1, 3))

    inbox.announce(1, PeerProgress(6))
    inbox.announce(2, PeerProgress(6))
    inbox.note(control(MessageKind.PROGRESS, 2, 9, payload=0))

    assert steps(inbox) == {2: 9}
    assert inbox.peers.slowest(0) is None


def test_it_knows_what_it_has_not_received():
    inbox = filled(sparse(1, 1, [1]), sparse(1, 3, [1]))

    assert inbox.received.behind({1: 3, 2: 1}) == {1: [2], 2: [1]}
    assert inbox.received.by_origin() == {1: (1, (3,))}


def test_the_first_word_to_stop_is_the_one_that_counts():
    inbox = filled()
    inbox.note(control(MessageKind.STOP, payload="enough"))
    inbox.stop("its worker closes")
    inbox.note(control(MessageKind.STOP, payload="later"))

    assert inbox.stopped == "enough"


def test_a_wait_for_what_is_there_already_ends_at_once():
    assert filled().wait_for(lambda: True, timeout_s=0) is True


def test_a_wait_for_what_does_not_come_ends_with_its_time():
    assert filled().wait_for(lambda: False, timeout_s=0.01) is False


ENDINGS = {
    "an update": lambda inbox: inbox.put(item_of(sparse(1, 1, [1])), sparse(1, 1, [1])),
    "progress": lambda inbox: inbox.note(
        control(MessageKind.PROGRESS, 1, 2, payload=0)
    ),
    "a loss": lambda inbox: inbox.note(control(MessageKind.FAILED, 1)),
    "a wake": Inbox.wake,
}


@pytest.mark.parametrize("change", ENDINGS.values(), ids=ENDINGS)
def test_a_waiting_thread_looks_again_when_something_arrives(change):
    inbox = filled()
    changed = threading.Event()

    assert waited(inbox, changed.is_set, lambda: (changed.set(), change(inbox))) is True


@pytest.mark.parametrize(
    "stop",
    [
        lambda inbox: inbox.stop("enough"),
        lambda inbox: inbox.note(control(MessageKind.STOP, payload="enough")),
    ],
    ids=["own", "told"],
)
def test_the_word_to_stop_ends_a_wait_that_is_not_ready(stop):
    inbox = filled()

    assert waited(inbox, lambda: False, lambda: stop(inbox)) is True
    assert inbox.stopped == "enough"


def waited(inbox, condition, change):
    """What a wait in another thread gives when a change comes during it."""
    waiting, came = threading.Event(), []

    def ready():
        waiting.set()
        return condition()

    def wait():
        came.append(inbox.wait_for(ready, PATIENCE_S))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    change()
    thread.join(PATIENCE_S / 2)  # sooner than the wait itself would give up
    return came[0] if came else None
