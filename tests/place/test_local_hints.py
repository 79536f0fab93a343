"""Hints and warnings of a fit."""

import re

import pytest
from torch import optim

from daskdl import FixedThreshold, GradientSharing, KeepResidual, ResidualClipping
from tests.support.problems import rows, trainer

X, Y = rows()
CLIPPING = ResidualClipping(multiple=1.0, frequency=1)


def fitted(master, **options):
    own = trainer(False, master=master, **options)
    own.fit(X, Y, batch_size=60, shuffle=False)


@pytest.mark.parametrize(
    ("threshold", "residual", "hints"),
    [(1e-5, CLIPPING, 1), (1e-5, KeepResidual(), 0), (1e-2, CLIPPING, 0)],
    ids=["too small", "nothing is dropped", "large enough"],
)
def test_a_too_small_threshold_is_logged(caplog, threshold, residual, hints):
    fitted(
        GradientSharing(
            FixedThreshold(threshold), residual, replicas_per_worker=2, max_staleness=0
        )
    )

    assert caplog.text.count("begin with a larger threshold") == hints


ADAPTIVE = [optim.Adam, optim.RMSprop, optim.Adadelta, optim.Adagrad]


def mean_of(replicas, scale="mean"):
    return GradientSharing(replicas_per_worker=replicas, update_scale=scale)


@pytest.mark.parametrize(
    ("kind", "master", "warned"),
    [
        *((kind, mean_of(4), [__file__]) for kind in ADAPTIVE),
        (optim.SGD, mean_of(4), []),
        (optim.Adam, mean_of(1), []),
        (optim.Adam, mean_of(4, "sum"), []),
    ],
)
def test_optimizers_like_adam_are_warned_of(kind, master, warned, recwarn):
    fitted(master, optimizer=lambda parameters: kind(parameters, lr=2e-3))

    # At the line of the user who called `fit`.
    expected = re.compile(r"4 replicas with \w+ may learn slower than .* 2 times as")
    found = [w for w in recwarn if expected.match(str(w.message))]
    assert [w.filename for w in found] == warned
