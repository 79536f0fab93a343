"""What a fit logs or warns of, so that the user can act."""

import re

import dask.array as da
import pytest
from torch import optim

from daskdl import FixedThreshold, GradientSharing, KeepResidual, ResidualClipping
from tests.support.problems import rows, trainer

X, Y = rows()
SMALL = "too small for the steps of this model, and a mass of"


def fitted(master, **options):
    own = trainer(False, master=master, **options)
    own.fit(X, Y, batch_size=60, shuffle=False)
    return own


@pytest.mark.parametrize(
    ("threshold", "residual", "hints"),
    [
        (1e-5, ResidualClipping(multiple=1.0, frequency=1), 1),
        (1e-5, KeepResidual(), 0),
        (1e-2, ResidualClipping(multiple=1.0, frequency=1), 0),
    ],
    ids=["too small", "nothing is dropped", "large enough"],
)
def test_the_log_says_if_the_threshold_is_too_small(caplog, threshold, residual, hints):
    master = GradientSharing(
        FixedThreshold(threshold), residual, replicas_per_worker=2, max_staleness=0
    )

    fitted(master)

    found = [m for m in caplog.messages if SMALL in m]
    assert len(found) == hints
    assert all("begin with a larger threshold" in message for message in found)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ((100, 60, 3, 12, 11), "5 parts of 3 to 100 rows and are leased in pieces of "),
        ((93, 93), "2 parts of 93 to 93 rows and are leased in pieces of "),
    ],
    ids=["uneven", "even"],
)
def test_the_log_says_how_parts_are_leased(caplog, chunks, said):
    count, batch, step = sum(chunks), 4, 8
    x, y = X[:count], Y[:count]
    own = trainer(False, master=GradientSharing(replicas_per_worker=2), accumulate=2)

    with caplog.at_level("INFO", "daskdl.training.backend"):
        own.fit(
            da.from_array(x, chunks=(chunks, 20)),
            da.from_array(y, chunks=(chunks,)),
            batch_size=batch,
            validation=(x[:40], y[:40]),
        )

    # Eight leases for each replica, in whole steps.
    piece = -(-count // (8 * 2 * step)) * step
    small, large = (sum(c < piece for c in chunks), sum(c > piece for c in chunks))
    train, other = (m for m in caplog.messages if "are leased in pieces" in m)
    assert train == (
        f"the train data have {said}{piece}: {small} smaller parts are put together, "
        f"{large} larger ones are split"
    )
    assert other.startswith("the validation data have ")
    assert f"leased in pieces of {batch}: " in other


ADAPTIVE = [
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.RMSprop, optim.Adadelta, optim.Adagrad),
]


def mean_of(replicas, scale="mean"):
    return GradientSharing(replicas_per_worker=replicas, update_scale=scale)


def shorter_steps(recwarn):
    expected = re.compile(r"4 replicas with \w+ may learn slower than .* 2 times as")
    return [w for w in recwarn if expected.match(str(w.message))]


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_steps_that_noise_makes_shorter_are_warned_of(kind, recwarn):
    fitted(mean_of(4), optimizer=lambda parameters: kind(parameters, lr=2e-3))

    # At the line of the user who called `fit`.
    assert [w.filename for w in shorter_steps(recwarn)] == [__file__]


@pytest.mark.parametrize(
    ("kind", "master"),
    [
        (optim.SGD, mean_of(4)),
        (optim.ASGD, mean_of(4)),
        (optim.Adam, mean_of(1)),
        (optim.Adam, mean_of(4, "sum")),
    ],
    ids=["sgd", "asgd", "one replica", "the sum counts"],
)
def test_other_steps_are_not(kind, master, recwarn):
    fitted(master, optimizer=lambda parameters: kind(parameters, lr=2e-3))

    assert shorter_steps(recwarn) == []
