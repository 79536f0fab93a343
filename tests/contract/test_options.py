"""Options of a trainer, a fit, a master and schedulers: taken, or refused by name."""

import math
import re
import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import Callback, GradientSharing, OptionError, Trainer
from daskdl.errors import ModelError
from daskdl.residuals import ResidualClipping
from daskdl.thresholds import AdaptiveThreshold, FixedThreshold
from daskdl.training.epoch_control import Scheduling
from tests.support.problems import shown


def trainer(**options):
    parts = {
        "model": nn.Linear(2, 1),
        "loss": nn.MSELoss(),
        "optimizer": torch.optim.SGD,
    }
    return Trainer(**{**parts, "client": False, **options})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 2**63 - 1),
        ("device", "cpu"),
        ("device", torch.device("cpu")),
        ("callbacks", (Callback(), Callback())),
        ("progress", True),
        ("progress", False),
        ("telemetry_every", 1),
        ("telemetry_every", None),
        ("max_loss_rise", 3),
        ("max_loss_rise", None),
        ("autocast", torch.bfloat16),
        ("autocast", torch.float16),
        ("accumulate", 64),
        ("clip_grad_norm", 1),
        ("clip_grad_norm", 0.5),
    ],
    ids=shown,
)
def test_an_option_of_a_trainer_is_taken(option, value):
    assert getattr(trainer(**{option: value}), option) is value


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("master", GradientSharing, "master must be a daskdl.TrainingMaster, got <cl"),
        ("seed", -1, "seed must be a whole number in [0, 2**63), got -1"),
        ("seed", 2**63, "in [0, 2**63), got 9223372036854775808"),
        ("seed", True, "seed must be a whole number in [0, 2**63), got True"),
        ("seed", 0.0, "seed must be a whole number in [0, 2**63), got 0.0"),
        ("progress", 1, "progress must be True, False or None, got 1"),
        ("callbacks", Callback(), "callbacks must be a list of daskdl.Callback, got <"),
        ("callbacks", [Callback(), 5], "callbacks must be daskdl.Callback, got 5"),
        ("device", 0, "device must be 'auto' or a torch device, got 0"),
        ("device", None, "device must be 'auto' or a torch device, got None"),
        ("device", "quantum", "device must be 'auto' or a torch device, got 'quantum'"),
        ("optimizer", None, "optimizer must be a function that makes one from param"),
        ("autocast", torch.float64, "torch.float16 or None, got torch.float64"),
        (
            "autocast",
            "bfloat16",
            "must be torch.bfloat16, torch.float16 or None, got '",
        ),
        ("autocast", True, "or None, got True"),
        ("accumulate", 0, "accumulate must be a whole number >= 1, got 0"),
        ("accumulate", 2.0, "accumulate must be a whole number >= 1, got 2.0"),
        ("accumulate", None, "accumulate must be a whole number >= 1, got None"),
        ("clip_grad_norm", 0, "clip_grad_norm must be a number > 0 or None, got 0"),
        ("clip_grad_norm", -1.0, "must be a number > 0 or None, got -1.0"),
        ("clip_grad_norm", math.inf, "must be a number > 0 or None, got inf"),
        ("clip_grad_norm", math.nan, "must be a number > 0 or None, got nan"),
        ("clip_grad_norm", True, "must be a number > 0 or None, got True"),
        ("clip_grad_norm", "1", "must be a number > 0 or None, got '1'"),
        ("telemetry_every", 0, "a whole number >= 1 or 'auto' or None, got 0"),
        ("telemetry_every", 1.5, "a whole number >= 1 or 'auto' or None, got 1.5"),
        ("telemetry_every", True, "a whole number >= 1 or 'auto' or None, got True"),
        ("telemetry_every", "all", "a whole number >= 1 or 'auto' or None, got 'all'"),
        ("max_loss_rise", 0, "max_loss_rise must be a number > 0 or None, got 0"),
        ("max_loss_rise", True, "a number > 0 or None, got True"),
        ("max_loss_rise", math.inf, "a number > 0 or None, got inf"),
        ("max_loss_rise", math.nan, "a number > 0 or None, got nan"),
        ("max_loss_rise", "10", "a number > 0 or None, got '10'"),
    ],
    ids=shown,
)
def test_an_option_of_a_trainer_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        trainer(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("epochs", 0, "epochs must be a whole number >= 1, got 0"),
        ("epochs", 1.5, "epochs must be a whole number >= 1, got 1.5"),
        ("epochs", True, "epochs must be a whole number >= 1, got True"),
        ("shuffle", 1, "shuffle must be True or False, got 1"),
        ("shuffle", None, "shuffle must be True or False, got None"),
        ("drop_last", 1, "drop_last must be True or False, got 1"),
        ("prefetch", -1, "prefetch must be a whole number >= 0, got -1"),
        ("prefetch", 0.5, "prefetch must be a whole number >= 0, got 0.5"),
        ("prefetch", True, "prefetch must be a whole number >= 0, got True"),
        ("approach", "copy", "approach must be 'direct' or 'export', got 'copy'"),
        ("approach", True, "approach must be 'direct' or 'export', got True"),
    ],
    ids=shown,
)
def test_an_option_of_a_fit_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        trainer().fit(torch.zeros(4, 2), torch.zeros(4, 1), **{option: value})


WRONG = [
    *[
        (
            "threshold",
            value,
            "must be a daskdl.ThresholdAlgorithm, or a mapping from patterns of "
            "parameter names to such",
        )
        for value in (
            *(1e-3, None, AdaptiveThreshold, {}, {"*": 1e-3}, {1: FixedThreshold()}),
            [("*", FixedThreshold())],
        )
    ],
    ("residual", 5.0, "must be a daskdl.residuals.ResidualPostProcessor"),
    ("residual", None, "must be a daskdl.residuals.ResidualPostProcessor"),
    *[
        ("apply", value, "must be 'eager' or 'strict'")
        for value in ("lazy", None, True, ["eager"])
    ],
    *[
        ("update_scale", value, "must be 'mean', 'sum' or a number > 0")
        for value in (0, -1.0, math.nan, math.inf, True, "max", None, [1.0])
    ],
    *[
        ("max_staleness", value, "must be a whole number >= 0 or None")
        for value in (-1, 1.0, True, "8", [8])
    ],
    *[
        ("exchange_every", value, "must be a whole number >= 1")
        for value in (0, -1, 2.0, True, None, "1")
    ],
    *[
        ("warmup_steps", value, "must be a whole number >= 0")
        for value in (-1, 2.0, True, None, "1")
    ],
    *[
        ("routing", value, "must be 'auto', 'plain' or 'mesh'")
        for value in ("tree", None, ["plain"])
    ],
    *[
        ("replicas_per_worker", value, "must be a whole number >= 1 or 'auto'")
        for value in (0, -2, 1.5, True, None, "all")
    ],
    *[
        ("min_replicas", value, "must be a whole number >= 1")
        for value in (0, 1.5, True, None, "1")
    ],
    *[
        ("rejoin_timeout", value, "must be seconds > 0 or None")
        for value in (0, -1.0, math.nan, math.inf, True, "30s")
    ],
    *[
        ("fan_out", value, "must be a whole number >= 1")
        for value in (0, -1, 2.0, True, None, "8")
    ],
]


def test_the_defaults_are_those_that_are_documented():
    assert GradientSharing() == GradientSharing(
        threshold=AdaptiveThreshold(initial=None),
        residual=ResidualClipping(),
        apply="eager",
        update_scale="mean",
        max_staleness=8,
        exchange_every=1,
        warmup_steps=0,
        routing="auto",
        replicas_per_worker=1,
        min_replicas=1,
        rejoin_timeout=None,
        fan_out=8,
    )


@pytest.mark.parametrize(
    ("option", "value", "allowed"), WRONG, ids=[f"{o}={v!r}" for o, v, _ in WRONG]
)
def test_a_wrong_value_is_refused_by_name(option, value, allowed):
    message = f"{option} {allowed}, got {value!r}"

    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        GradientSharing(**{option: value})


@pytest.mark.parametrize(
    ("routing", "workers", "expected"),
    [
        ("auto", 8, "plain"),
        ("auto", 9, "mesh"),
        ("plain", 64, "plain"),
        ("mesh", 2, "mesh"),
    ],
)
def test_auto_is_a_mesh_from_nine_workers_on(routing, workers, expected):
    assert GradientSharing(routing=routing).routing_for(workers) == expected


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


def sgd_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
