"""Options of a trainer and of a fit; test_sharing_options.py has those of a master."""

import re

import pytest
import torch

from daskdl.callbacks import Callback
from daskdl.data.options import ReadOptions
from daskdl.errors import OptionError
from daskdl.training.fit import FitOptions, TrainerOptions
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.names import shown

TRAINER = {
    "master": GradientSharing(),
    "device": "auto",
    "seed": 0,
    "callbacks": [],
    "progress": None,
}
READ = ReadOptions(1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 2**63 - 1),
        ("device", "cpu"),
        ("device", torch.device("cpu")),
        ("callbacks", (Callback(), Callback())),
        ("progress", True),
        ("progress", False),
    ],
    ids=shown,
)
def test_an_option_of_a_trainer_is_taken(option, value):
    assert getattr(TrainerOptions(**{**TRAINER, option: value}), option) is value


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
    ],
    ids=shown,
)
def test_an_option_of_a_trainer_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        TrainerOptions(**{**TRAINER, option: value})


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
        FitOptions(READ, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"), [("epochs", 1), ("prefetch", 0), ("approach", "export")]
)
def test_an_option_of_a_fit_is_taken(option, value):
    assert getattr(FitOptions(READ, **{option: value}), option) == value
