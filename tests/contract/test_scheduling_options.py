"""Which schedulers of the learning rate are taken, and which are refused."""

import re
import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl.errors import ModelError, OptionError
from daskdl.training.epoch_control import Scheduling


def sgd():
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def on_another(optimizer):
    return lr_scheduler.StepLR(sgd(), 1)


class Locked(lr_scheduler.StepLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, 1)
        self.lock = threading.Lock()


class TestOptions:
    @pytest.mark.parametrize(
        ("make", "every", "message"),
        [
            (3, "epoch", "scheduler must be a function that makes one from an "
             "optimizer, such as lambda optimizer: StepLR(optimizer, step_size=10), "
             "or None; got 3"),
            (lr_scheduler.StepLR(sgd(), 1), "epoch", "or None; got <torch.optim.lr_s"),
            (halved, "batch", "scheduler_every must be 'epoch' or 'step', got 'batch'"),
            (halved, None, "scheduler_every must be 'epoch' or 'step', got None"),
            (None, "step", "scheduler_every='step' needs a scheduler, got None"),
        ],
        ids=["number", "built", "batch", "never", "none"],
    )  # fmt: skip
    def test_what_can_be_seen_at_once_is_refused(self, make, every, message):
        with pytest.raises(OptionError, match=re.escape(message)):
            Scheduling(make, every)

    @pytest.mark.parametrize(
        ("make", "every", "message"),
        [
            (lambda optimizer: optimizer, "epoch", "scheduler must return a torch.optim"
             ".lr_scheduler.LRScheduler, got SGD"),
            (lambda optimizer: None, "epoch", "LRScheduler, got None"),
            (on_another, "epoch", "scheduler works on an optimizer it was not given"),
            (plateau, "step", "scheduler_every must be 'epoch' for ReduceLROnPlateau, "
             "which needs the loss of an epoch, got 'step'"),
            (lambda: None, "epoch", "scheduler failed on a SGD: "),
            (lambda o: lr_scheduler.StepLR(o), "epoch", "scheduler failed on a SGD: "),
        ],
        ids=["optimizer", "nothing", "another", "plateau", "no argument", "fails"],
    )  # fmt: skip
    def test_what_is_seen_when_it_is_made_is_refused(self, make, every, message):
        with pytest.raises(OptionError, match=re.escape(message)):
            Scheduling(make, every).check(sgd_of, nn.Linear(2, 1))

    def test_one_whose_state_cannot_travel_is_refused(self):
        with pytest.raises(ModelError, match=r"scheduler cannot be sent .*lock"):
            Scheduling(Locked).check(sgd_of, nn.Linear(2, 1))

    @pytest.mark.parametrize("make", [halved, plateau, None])
    def test_others_are_taken_and_the_model_is_left_alone(self, make):
        module = nn.Linear(2, 1)
        before = module.weight.clone()

        def rough(parameters):
            parameters[0].data.zero_()
            return sgd_of(parameters)

        Scheduling(make).check(rough, module)

        assert torch.equal(module.weight, before)


def sgd_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
