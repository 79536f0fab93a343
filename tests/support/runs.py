"""A run on a network, and what has to hold after it, whatever the network did."""

from daskdl import GradientSharing, KeepResidual
from tests.support.barriers import ATOL, check_barrier
from tests.support.digits import accuracy, images, trainer
from tests.support.recording import Recorded, records

X, X_TEST, Y, Y_TEST = images()
EPOCHS = 3
BATCH_SIZE = 16
LEARNT = 0.5  # of the test images; chance is 0.1


def recorded(client, routing, folder, **options):
    # Two neighbours at most: with four replicas, updates are forwarded.
    sharing = GradientSharing(residual=KeepResidual(), routing=routing, fan_out=2)
    return trainer(client, Recorded(str(folder), sharing, atol=ATOL), **options)


def fit(own):
    return own.fit(X, Y, epochs=EPOCHS, batch_size=BATCH_SIZE)


def check(own, history, replicas, folder):
    """All have trained to the end, agreed at each barrier, and learnt."""
    assert history.column("replicas") == [replicas] * EPOCHS
    assert history.column("examples") == [len(X)] * EPOCHS
    assert history.column("repeated_pieces") == [0] * EPOCHS
    for epoch in range(EPOCHS):
        ends = records(folder, epoch)
        assert sorted(ends) == list(range(replicas))
        check_barrier(ends)
    check_learnt(own)


def check_learnt(own):
    assert accuracy(own.model_, X_TEST, Y_TEST) >= LEARNT
