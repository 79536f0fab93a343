from daskdl.channel.inbox import Peers
from daskdl.channel.protocol import PeerProgress


def test_progress_that_overtook_its_updates_counts_when_they_are_here():
    peers = Peers()
    peers.announce(1, PeerProgress(3, 2), complete=2)

    peers.announce(1, PeerProgress(7, 4), complete=2)
    assert peers.progress[1].step == 3
    peers.announce(1, PeerProgress(), complete=3)
    assert peers.progress[1].step == 3
    peers.announce(1, PeerProgress(), complete=4)

    assert peers.progress[1].step == 7


def test_the_last_news_of_each_is_described_with_its_age():
    now = 10.0
    peers = Peers(clock=lambda: now)
    peers.announce(2, PeerProgress(5, 1), complete=9)
    peers.announce(1, PeerProgress(7, 4), complete=9)
    now = 12.0
    peers.announce(1, PeerProgress(7, 4), complete=9)  # says nothing new
    peers.announce(2, PeerProgress(6, 1), complete=9)
    now = 12.5

    assert peers.described() == (
        "replica 1 at step 7, update 4, 2.5 s ago; "
        "replica 2 at step 6, update 1, 0.5 s ago"
    )
    peers.fail(1)
    assert peers.described() == "replica 2 at step 6, update 1, 0.5 s ago"
