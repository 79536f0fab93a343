"""Hints and warnings of a fit."""

import pytest
from torch import optim

from daskdl import FixedThreshold, GradientSharing, KeepResidual, ResidualClipping
from tests.support.problems import rows, trainer

X, Y = rows()
CLIPPING = ResidualClipping(multiple=1.0, frequency=1)


def fitted(master, **options):
    fitted = trainer(False, master=master, **options)
    fitted.fit(X, Y, batch_size=60, shuffle=False)
    return fitted


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

    assert caplog.text.count("start with a larger threshold") == hints


ADAPTIVE = [optim.Adam, optim.RMSprop, optim.Adadelta, optim.Adagrad]


def mean_of(replicas, **options):
    return GradientSharing(replicas_per_worker=replicas, **options)


@pytest.mark.parametrize(
    ("kind", "master", "longer"),
    [
        *((kind, mean_of(4), True) for kind in ADAPTIVE),
        (optim.SGD, mean_of(4), False),
        (optim.Adam, mean_of(1), False),
        (optim.Adam, mean_of(4, update_scale="sum"), False),
        (optim.Adam, mean_of(4, adapt_rate=False), False),
    ],
)
def test_replicas_with_adam_make_longer_steps(kind, master, longer):
    fitted = trainer(False, master=master, optimizer=lambda p: kind(p, lr=2e-3))

    factors = fitted.fit(X, Y, batch_size=8).column("rate_factor")

    assert set(factors) == {2.0 if longer else 1.0}
