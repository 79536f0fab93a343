"""Options of a trainer, a fit, a master and schedulers: taken, or refused by name."""

import functools
import math
import re
import threading
from typing import NamedTuple

import dask
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from daskdl import (
    Callback,
    EarlyStopping,
    GradientSharing,
    OptionError,
    ParameterAveraging,
    Trainer,
)
from daskdl.compression.thresholds import AdaptiveThreshold, FixedThreshold
from daskdl.errors import ModelError
from tests.support.problems import shown


def sgd(parameters=None):
    parameters = nn.Linear(2, 1).parameters() if parameters is None else parameters
    return torch.optim.SGD(parameters, lr=0.1)


class Locked(StepLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, 1)
        self.lock = threading.Lock()


def trainer(**options):
    parts = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": sgd}
    return Trainer(**{**parts, "client": False, **options})


def fit(options, **fit_options):
    trainer(**options).fit(torch.zeros(4, 2), torch.zeros(4, 1), **fit_options)


WHOLE = "a whole number >= 1"
RATIO = "a number > 0 or None"
NOT_WHOLE = 0, 1.5, True, None, "1"
NOT_ABOVE_0 = 0, -1.0, math.inf, math.nan, True, "1"


class Each(NamedTuple):
    """Several values that one message refuses."""

    values: tuple


def cases(table):
    """The table with a row for each value."""
    return [
        (option, value, message)
        for option, value_or_each, message in table
        for value in (
            value_or_each.values
            if isinstance(value_or_each, Each)
            else (value_or_each,)
        )
    ]


OF_OPTIM = "optimizer must be a class of torch.optim or its name, with lr=..., or "
EXISTING = StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1), 1)
TRAINER = cases([
    ("master", "sharing", "master must be a daskdl.TrainingMaster"),
    ("master", GradientSharing, "; create one, GradientSharing()"),
    ("seed", Each((-1, 2**63, True, 0.0)), "seed must be a whole number in [0, 2**63)"),
    ("progress", 1, "progress must be True, False or None"),
    ("callbacks", 3, "callbacks must be a daskdl.Callback or a list of them, got 3"),
    ("callbacks", [Callback(), 5], "callbacks must be daskdl.Callback, got 5"),
    ("callbacks", [EarlyStopping], "; create one, EarlyStopping()"),
    ("device", Each((0, "quantum")),
     "device must be 'auto' or a torch device, such as 'cpu' or 'cuda:0'"),
    ("optimizer", None, f"{OF_OPTIM}a function that makes one from parameters, such as "
     "lambda params: torch.optim.SGD(params, lr=0.1)"),
    ("optimizer", 0.1, OF_OPTIM),
    ("optimizer", ["sgd", "adam"], "; to train several models, such as generator and"),
    ("optimizer", sgd(), "optimizer must be made by each replica, got a SGD; give the "
     "class and the rate, optimizer=torch.optim.SGD, lr=..."),
    ("optimizer", "adamm", "the name of a class of torch.optim, such as 'adamw',"),
    ("optimizer", "adamm", "got 'adamm'; did you mean 'adam"),
    ("optimizer", "lion", "got 'lion'; choose of "),
    ("lr", 0.1, "lr=0.1 is for an optimizer that is a class or its name, got the func"),
    ("autocast", Each((torch.float64, "bfloat16", True)),
     "must be torch.bfloat16, torch.float16 or None"),
    ("accumulate", Each(NOT_WHOLE), f"accumulate must be {WHOLE}"),
    ("clip_grad_norm", Each(NOT_ABOVE_0), f"clip_grad_norm must be {RATIO}"),
    ("telemetry_every", Each((0, 1.5, True, "all")),
     f"telemetry_every must be {WHOLE} or 'auto' or None"),
    ("max_loss_rise", Each(NOT_ABOVE_0), f"max_loss_rise must be {RATIO}"),
    ("step", print, "loss must be None with step=, which computes the loss, got"),
    ("scheduler", 3, "scheduler must be a function that makes one from an optimizer"),
    ("scheduler", EXISTING, "lambda optimizer: StepLR(optimizer, step_size=10)"),
    ("scheduler_every", "day", "scheduler_every must be 'epoch' or 'step'"),
    ("scheduler_every", "step", "scheduler_every='step' needs a scheduler, got None"),
    ("scheduler_monitor", "kl", "scheduler_monitor='kl' needs a scheduler, got None"),
])  # fmt: skip


@pytest.mark.parametrize("lr", [0, -1.0, math.inf, math.nan, True, "0.1"])
def test_a_rate_that_is_no_number_above_0_is_refused(lr):
    with pytest.raises(OptionError, match=r"lr must be a number > 0 or None, got "):
        trainer(optimizer="sgd", lr=lr)


def test_a_rate_is_given_once():
    twice = functools.partial(torch.optim.SGD, lr=0.1)

    with pytest.raises(
        OptionError, match=r"lr is given twice, as lr=0\.2 and in functo"
    ):
        trainer(optimizer=twice, lr=0.2)


@pytest.mark.parametrize(("option", "value", "message"), TRAINER, ids=shown)
def test_an_option_of_a_trainer_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        trainer(**{option: value})
    assert "got " in str(caught.value)


FIT = cases([
    ("epochs", Each(NOT_WHOLE), f"epochs must be {WHOLE}"),
    ("batch_size", Each((0, 1.0, True)), f"batch_size must be {WHOLE}"),
    ("on_bad_batch", Each(("ignore", None)), "on_bad_batch must be 'raise' or 'skip'"),
    ("transform", 3, "transform must be a function or None"),
    ("shuffle", 1, "shuffle must be True or False"),
    ("drop_last", 1, "drop_last must be True or False"),
    ("prefetch", Each((-1, 0.5, True)), "prefetch must be a whole number >= 0"),
    ("approach", Each(("copy", True)), "approach must be 'direct' or 'export'"),
    ("name", Each(("", "  ", "two\nlines", 3, "x" * 201)),
     "name must be one line of 1 to 200 characters"),
])  # fmt: skip


@pytest.mark.parametrize(("option", "value", "message"), FIT, ids=shown)
def test_an_option_of_a_fit_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(f"{message}, got {value!r}")):
        fit({}, **{option: value})


def test_an_invalid_timeout_is_refused():
    with (
        dask.config.set({"daskdl.timeouts.silence": "soon"}),
        pytest.raises(OptionError, match=r"daskdl\.timeouts\.silence must .* 'soon'"),
    ):
        fit({})


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_missing_cuda_is_refused_at_once(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = (
        f"device '{device}' does not exist: torch finds 0 CUDA devices in this pro"
    )

    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        fit({"device": device, "optimizer": lambda p: pytest.fail("too late")})


def halves(kind):
    return lambda p: kind([torch.optim.SGD(p[:1], 0.1), torch.optim.Adam(p[1:])])


def logging(**logs):
    return lambda model, batch: (model(batch[0]).mean(), logs)


# What the client sees when it tries them.
TRIED = [
    *[
        (
            {"optimizer": halves(kind)},
            ModelError,
            "got several (SGD, Adam); make one of parameter groups, as in "
            "torch.optim.SGD([{'params': a, 'lr': 0.1}, {'params': b, 'lr': 0.01}]); "
            "to train several models, such as generator and",
        )
        for kind in (list, tuple, lambda two: dict(zip("ab", two, strict=True)))
    ],
    *[
        ({"optimizer": make}, ModelError, f"optimizer failed on {message}")
        for make, message in (
            (
                lambda m: torch.optim.SGD(m.parameters(), 0.1),
                "a list of 2 parameters: 'list' object has no attribute 'parameters'; "
                "to get the model, call its argument module: lambda module: ...",
            ),
            (
                lambda model: torch.optim.SGD(model, 0.1),
                "the Linear: 'Linear' object is not iterable; its first argument is",
            ),
        )
    ],
    *[
        (
            {"model": kind},
            ModelError,
            "; to train several models, such as generator and",
        )
        for kind in (
            (nn.Linear(2, 2), nn.Linear(2, 1)),
            [nn.Linear(2, 1)],
            {"g": nn.Linear(2, 1)},
        )
    ],
    (
        {"autocast": torch.float16, "model": lambda: nn.Linear(2, 1).half()},
        OptionError,
        "autocast=torch.float16 needs a model with float32 parameters, got 'weight'",
    ),
    *[
        ({"loss": None, "step": step}, ModelError, message)
        for step, message in (
            (lambda model, batch: model(batch), "step failed on two rows, x being sha"),
            (lambda model, batch: model(batch[0]), "step must return one floating num"),
            (lambda model, batch: 1.0, "step must return a tensor, got 1.0"),
            (logging(kl=torch.ones(2)), "one element, got 'kl': shape (2,); return"),
            (logging(density=1.0), "step cannot log 'density', which is already a col"),
            (
                logging(val_kl=1.0),
                "step cannot log 'val_kl': the prefix val_ is res",
            ),
            (
                lambda model, batch: {"kl": batch[0].mean()},
                "step must return a dict with 'loss', got the keys ['kl']",
            ),
        )
    ],
    *[
        ({"master": GradientSharing(threshold=mapping)}, OptionError, message)
        for mapping, message in (
            ({"*s": FixedThreshold()}, "no pattern that parameter 'weight' matches"),
            (
                {"3.*": FixedThreshold(), "*": FixedThreshold()},
                "pattern '3.*' matches no trainable",
            ),
        )
    ],
    *[
        ({"scheduler": make, "scheduler_every": every}, OptionError, message)
        for make, every, message in (
            (
                lambda o: o,
                "epoch",
                "scheduler must return a torch.optim.lr_scheduler.L",
            ),
            (
                lambda o: StepLR(sgd(), 1),
                "epoch",
                "must use the optimizer passed to it",
            ),
            (ReduceLROnPlateau, "step", "must be 'epoch' for ReduceLROnPlateau, which"),
            (
                StepLR,
                "epoch",
                "scheduler failed on a SGD: StepLR.__init__() missing 1 required "
                "positional argument: 'step_size'; write lambda optimizer: "
                "StepLR(optimizer, ...)",
            ),
        )
    ],
    (
        {"scheduler": lambda o: StepLR(o, 1), "scheduler_monitor": "loss"},
        OptionError,
        "scheduler_monitor='loss' is for ReduceLROnPlateau, which needs a score, got a",
    ),
    (
        {"scheduler": ReduceLROnPlateau, "scheduler_monitor": "kl"},
        OptionError,
        "scheduler_monitor must be one of 'loss' or another column of the history, got",
    ),
    ({"scheduler": lambda o: Locked(o)}, ModelError, "scheduler cannot be sent"),
]


@pytest.mark.parametrize(("options", "error", "message"), TRIED)
def test_arguments_that_fail_in_the_dry_run_are_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fit(options)


def test_names_that_a_step_cannot_log_are_refused_before_the_training():
    # A replica would begin its message with its number.
    with pytest.raises(ModelError, match=r"^step cannot log 'density'"):
        fit({"loss": None, "step": logging(density=1.0)})


SHARING = cases([
    ("threshold", Each((1e-3, None, AdaptiveThreshold, {}, {"*": 1e-3},
                        {1: FixedThreshold()}, [("*", FixedThreshold())])),
     "must be a daskdl.ThresholdAlgorithm, such as FixedThreshold(1e-3), or a mapping "
     "from patterns of parameter names to such"),
    ("residual", Each((5.0, None)),
     "must be a daskdl.compression.residuals.ResidualPostProcessor"),
    ("apply", Each(("lazy", None, True, ["eager"])), "must be 'eager' or 'strict'"),
    ("update_scale", Each((*NOT_ABOVE_0, "max", None, [1.0])),
     "must be 'mean', 'sum' or a number > 0"),
    ("momentum", Each((-0.1, 1.0, 1, True, None, math.nan, "0.5")),
     "must be a number in [0, 1)"),
    ("max_staleness", Each((-1, 1.0, True, "8", [8])),
     "must be a whole number >= 0 or 'auto' or None"),
    ("exchange_every", Each((*NOT_WHOLE, -1)), f"must be {WHOLE} or 'auto'"),
    ("warmup_steps", Each((-1, 2.0, True, None, "1")), "must be a whole number >= 0"),
    ("routing", Each(("tree", None, ["plain"])),
     "must be one of 'auto', 'plain', 'merged', 'mesh'"),
    ("replicas_per_worker", Each((*NOT_WHOLE, "all")), f"must be {WHOLE} or 'auto'"),
    ("min_replicas", Each(NOT_WHOLE), f"must be {WHOLE}"),
    ("rejoin_timeout", Each(NOT_ABOVE_0), "must be seconds > 0 or None"),
    ("fan_out", Each((*NOT_WHOLE, -1)), f"must be {WHOLE}"),
])  # fmt: skip
AVERAGING = [
    ("frequency", 0, f"must be {WHOLE}"),
    ("average_optimizer", 1, "must be True or False"),
    ("outer", 0.7, "must be a function that makes an optimizer from parameters, such "
     "as lambda params: torch.optim.SGD(params, lr=0.7), or None"),
    ("compression", "gzip", "must be 'dense8' or None"),
    ("replicas_per_worker", 0, f"must be {WHOLE} or 'auto'"),
    ("min_replicas", 0, f"must be {WHOLE}"),
    ("fan_out", 0, f"must be {WHOLE}"),
    ("rejoin_timeout", 0, "must be seconds > 0 or None"),
]  # fmt: skip
MASTERS = [
    *[(GradientSharing, *case) for case in SHARING],
    *[(ParameterAveraging, *case) for case in AVERAGING],
]


@pytest.mark.parametrize(
    ("master", "option", "value", "allowed"),
    MASTERS,
    ids=[f"{master.__name__}-{o}={v!r}" for master, o, v, _ in MASTERS],
)
def test_an_option_of_a_master_is_refused_by_name(master, option, value, allowed):
    before, after = re.escape(f"{option} {allowed}"), re.escape(f" got {value!r}")

    with pytest.raises(OptionError, match=f"^{before}[,;]{after}$"):
        master(**{option: value})


def test_updates_are_merged_only_between_replicas_that_run_ahead():
    with pytest.raises(OptionError, match="routing='mesh' with max_staleness=0"):
        GradientSharing(routing="merged", max_staleness=0)


@pytest.mark.parametrize(
    ("options", "workers", "expected"),
    [
        ({}, 8, "plain"),
        ({}, 9, "merged"),
        ({"max_staleness": 0}, 8, "plain"),
        ({"max_staleness": 0}, 9, "mesh"),
        ({"routing": "plain"}, 64, "plain"),
        ({"routing": "mesh"}, 2, "mesh"),
        ({"routing": "merged"}, 2, "merged"),
    ],
)
def test_auto_depends_on_the_number_of_workers(options, workers, expected):
    assert GradientSharing(**options).routing_for(workers) == expected
