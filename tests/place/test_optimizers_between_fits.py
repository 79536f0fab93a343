"""The optimizer's state when the next fit has another optimizer."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from daskdl import GradientSharing
from tests.support.problems import check_shows_what_was_validated, rows, trainer

X, Y = rows()


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.05, **options})


def adam(**options):
    return lambda parameters: torch.optim.Adam(parameters, **{"lr": 2e-3, **options})


@pytest.fixture(params=[1, 2])
def replicas(request):
    return request.param


def fitted(replicas, **options):
    master = GradientSharing(replicas_per_worker=replicas)
    fitted = trainer(False, master=master, **options)
    fit(fitted)
    return fitted


def fit(trained, **options):
    return trained.fit(X, Y, **{"batch_size": 16, **options})


def steps(trained):
    return [int(s["step"]) for s in trained.optimizer_.state_dict()["state"].values()]


def test_a_new_learning_rate_is_used_and_the_moments_stay(replicas):
    trained = fitted(replicas, optimizer=adam())
    before = max(steps(trained))

    trained.optimizer = adam(lr=1e-3, weight_decay=0.01)
    history = fit(trained)

    assert history.column("learning_rate") == [1e-3]
    assert min(steps(trained)) > before
    assert trained.optimizer_.param_groups[0]["weight_decay"] == 0.01


def test_a_new_learning_rate_restarts_its_schedule(replicas, caplog):
    schedule = {"scheduler": lambda optimizer: StepLR(optimizer, 1, gamma=0.5)}
    trained = fitted(replicas, optimizer=sgd(), **schedule)

    trained.optimizer = sgd(lr=0.01)
    with caplog.at_level(logging.WARNING, logger="daskdl"):
        history = fit(trained, epochs=2)

    assert history.column("learning_rate") == [0.01, 0.005]
    assert "its schedule starts over" in caplog.text


def test_another_class_starts_over(replicas, caplog):
    trained = fitted(replicas, optimizer=sgd(momentum=0.9))

    trained.optimizer = adam()
    with caplog.at_level(logging.WARNING, logger="daskdl"):
        history = fit(trained)

    assert history.column("learning_rate") == [2e-3]
    assert "optimizer is now of class Adam" in caplog.text
    assert type(trained.optimizer_) is torch.optim.Adam


@pytest.mark.parametrize("flag", ["foreach", "fused", "maximize"])
def test_another_implementation_keeps_the_state(replicas, flag, caplog):
    trained = fitted(replicas, optimizer=adam())

    for now in ({flag: True}, {}):  # on, and off again
        before = max(steps(trained))
        trained.optimizer = adam(**now)
        with caplog.at_level(logging.INFO, logger="daskdl"):
            fit(trained)

        assert min(steps(trained)) > before
        assert bool(trained.optimizer_.param_groups[0][flag]) == bool(now)
    assert caplog.text.count("continues with its state") == 2


def thawed(model):
    return model.requires_grad_(True)


def grown(model):
    return nn.Sequential(model, nn.Linear(4, 4))


def first_frozen():
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("change", [thawed, grown])
def test_other_parameters_start_over_and_drop_the_residual(replicas, change, caplog):
    refitted = fitted(replicas, model=first_frozen, optimizer=adam())
    refitted.model_ = change(refitted.model_)
    before = {name: p.clone() for name, p in refitted.model_.named_parameters()}

    with caplog.at_level(logging.WARNING, logger="daskdl"):
        fit(refitted, validation=(X, Y))

    assert "optimizer has other parameters or groups than before" in caplog.text
    dropped = "unsent residuals are dropped"
    assert (dropped in caplog.text) == (replicas == 2)
    trained = dict(refitted.model_.named_parameters())
    assert all(p.equal(before[n]) != p.requires_grad for n, p in trained.items())
    check_shows_what_was_validated(refitted, (X, Y))
