"""Who is warned that several replicas make shorter steps."""

import re

import pytest
import torch
from torch import nn, optim

from daskdl import GradientSharing
from daskdl.training.fit import divides_by_noise, warn_of_short_steps
from tests.support.problems import rows, trainer

DIVIDING = [
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.RMSprop, optim.Adadelta, optim.Adagrad),
]
X, Y = rows()


def made(kind):
    return kind([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize("kind", DIVIDING)
def test_steps_of_these_are_shorter_where_gradients_are_noisy(kind):
    assert divides_by_noise(made(kind))
    message = f"9 replicas with {kind.__name__} may learn slower than one process .* 3 "
    with pytest.warns(UserWarning, match=message):
        warn_of_short_steps(made(kind), 9)


@pytest.mark.parametrize("kind", [optim.SGD, optim.ASGD, optim.Rprop])
def test_those_of_others_are_not(kind):
    assert not divides_by_noise(made(kind))
    warn_of_short_steps(made(kind), 9)


def test_one_replica_is_no_reason():
    warn_of_short_steps(made(optim.Adam), 1)


def adam(parameters):
    return optim.Adam(parameters, lr=2e-3)


@pytest.mark.parametrize(("scale", "warned"), [("mean", True), ("sum", False)])
def test_a_fit_warns_where_the_mean_counts(scale, warned, recwarn):
    master = GradientSharing(replicas_per_worker=4, update_scale=scale)

    trainer(False, optimizer=adam, master=master).fit(X, Y, batch_size=60)

    expected = re.compile("4 replicas with Adam may learn slower")
    shown = [w for w in recwarn if expected.match(str(w.message))]
    # At the line of the user who called `fit`.
    assert [w.filename for w in shown] == [__file__] * warned
