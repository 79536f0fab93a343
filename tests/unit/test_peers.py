from daskdl.channel.inbox import Peers
from daskdl.channel.protocol import PeerProgress


def test_progress_counts_at_once_where_nothing_can_overtake_it():
    peers = Peers()

    peers.announce(1, PeerProgress(7, 4, 0))

    assert peers.progress[1].step == 7
    assert peers.slowest(interval=0) is None
    assert peers.slowest(interval=1) == 7


def test_progress_that_overtook_its_updates_counts_when_they_are_here():
    peers = Peers()
    peers.announce(1, PeerProgress(3, 2), complete=2)

    peers.announce(1, PeerProgress(7, 4), complete=2)
    assert peers.progress[1].step == 3
    peers.catch_up(1, complete=3)
    assert peers.progress[1].step == 3
    peers.catch_up(1, complete=4)

    assert peers.progress[1].step == 7


def test_the_last_update_is_known_from_the_announcement_alone():
    peers = Peers()

    peers.announce(1, PeerProgress(7, 4), complete=0)

    assert peers.announced[1].sequence == 4
    assert peers.progress == {}


def test_only_what_says_more_is_news():
    peers = Peers()

    assert peers.announce(1, PeerProgress(7, 4), complete=0)
    assert not peers.announce(1, PeerProgress(7, 4), complete=0)
    assert not peers.announce(1, PeerProgress(6, 3), complete=0)
    assert peers.announce(1, PeerProgress(7, 4, 0), complete=0)


def test_the_last_news_of_each_is_described_with_its_age():
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
    peers.fail(1)
    assert peers.described() == "replica 2 at step 6, update 1, 0.5 s ago"


def test_progress_never_goes_back():
    peers = Peers()
    peers.announce(1, PeerProgress(7, 4, 1))

    peers.announce(1, PeerProgress(3, 2, -1))

    assert peers.progress[1].step == 7
    assert peers.slowest(interval=1) is None


def test_nobody_waits_for_one_that_failed_whoever_names_it():
    peers = Peers()
    peers.announce(1, PeerProgress(2, 1))
    peers.announce(2, PeerProgress(5, 1))

    peers.fail(1)
    assert not peers.announce(1, PeerProgress(9, 9))

    assert list(peers.progress) == [2]
    assert peers.slowest(interval=0) == 5
    assert list(peers.announced) == [2]
