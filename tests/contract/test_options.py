"""Options of a trainer and of a fit; test_sharing_options.py has those of a master."""

import math
import re

import pytest
import torch
from torch import nn

from daskdl import Callback, GradientSharing, OptionError, Trainer
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
