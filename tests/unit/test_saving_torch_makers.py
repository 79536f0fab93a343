"""Optimizers and schedulers of torch are made again from one that was just made."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import OptionError
from daskdl.saving.json_values import optimizer_maker, scheduler_maker

PARAMETERS = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]


def sgd(parameters=PARAMETERS):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, 0.1, weight_decay=1e-3, maximize=True),
    lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, centered=True),
    lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RAdam(p),
    lambda p: torch.optim.Rprop(p, etas=(0.4, 1.3)),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adafactor(p),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda f: type(f(PARAMETERS)).__name__)
def test_an_optimizer_is_made_again(make):
    made = make(PARAMETERS)

    again = optimizer_maker(made, PARAMETERS)(PARAMETERS)

    assert type(again) is type(made)
    groups = again.state_dict()["param_groups"]
    assert groups == made.state_dict()["param_groups"]
    assert again.defaults == made.defaults


class Own(torch.optim.SGD):
    pass


def changed():
    made = sgd()
    made.param_groups[0]["nesterov"] = True
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Own(PARAMETERS, lr=0.1), "Own, which is not one of torch's own"),
        (
            torch.optim.SGD([{"params": [p]} for p in PARAMETERS], lr=0.1),
            "with 2 groups of parameters",
        ),
        (torch.optim.SGD(PARAMETERS[:1], lr=0.1), "only one group of all"),
        (torch.optim.SGD(PARAMETERS[::-1], lr=0.1), "only one group of all"),
        (
            torch.optim.SGD([{"params": PARAMETERS, "lr": 0.5}], lr=0.1),
            "not all arguments can be read back",
        ),
        (changed(), "not all arguments can be read back"),
    ],
    ids=["own", "groups", "some", "order", "group lr", "changed"],
)
def test_an_optimizer_that_is_more_than_its_defaults_is_refused(made, message):
    with pytest.raises(OptionError, match=message):
        optimizer_maker(made, PARAMETERS)


SCHEDULERS = [
    lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 8]),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.ConstantLR(o, 0.5, 7),
    lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=9),
    lambda o: lr_scheduler.PolynomialLR(o, 9, power=2.0),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-3),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=1e-4, mode="max"),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=lambda f: type(f(sgd())).__name__)
def test_a_scheduler_is_made_again(make):
    made = make(sgd())

    again = scheduler_maker(made, sgd)(sgd())

    assert type(again) is type(made)
    for step in range(12):
        for one in (made, again):
            one.optimizer.step()
            judges = isinstance(one, lr_scheduler.ReduceLROnPlateau)
            one.step(1.0) if judges else one.step()
        assert again.get_last_lr() == made.get_last_lr(), step


class OwnLR(lr_scheduler.StepLR):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: OwnLR(o, 3), "OwnLR, which is not one of torch's own"),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), "is not made again"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), "is not made again"),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2), "is not made again"),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.StepLR(o, 3), lr_scheduler.StepLR(o, 4)], [5]
            ),
            "is not made again",
        ),
    ],
    ids=["own", "LambdaLR", "OneCycleLR", "CyclicLR", "SequentialLR"],
)
def test_a_scheduler_that_does_not_keep_its_arguments_is_refused(make, message):
    with pytest.raises(OptionError, match=message):
        scheduler_maker(make(sgd()), sgd)


def test_a_scheduler_of_which_an_argument_reads_otherwise_is_refused():
    made = lr_scheduler.StepLR(sgd(), 3)
    made.base_lrs = [0.5]

    with pytest.raises(OptionError, match="not all arguments can be read back"):
        scheduler_maker(made, sgd)


def test_what_makes_an_optimizer_is_a_partial_of_its_class():
    maker = optimizer_maker(sgd(), PARAMETERS)

    assert type(maker) is functools.partial
    assert maker.func is torch.optim.SGD
