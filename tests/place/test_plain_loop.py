"""One replica trains like a plain PyTorch loop, bit for bit."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import ParameterAveraging
from tests.support.problems import (
    adam,
    halved,
    kept,
    mlp,
    normalised,
    parameters_of,
    plain_loop,
    rows,
    sgd,
    trainer,
)

X, Y = rows(count=424)
MASTERS = {
    "sharing": kept(),
    "averaging": ParameterAveraging(frequency=3),
    "compressed": ParameterAveraging(frequency=3, compression="dense8"),
}


def check_plain(fitted, loop, fits=1, threads=1):
    """Compare with a plain loop, in batches of 28; the last one has 4 rows."""
    for _ in range(fits):
        fitted.fit(X, Y, epochs=4 // fits, batch_size=28, shuffle=False)

    loop = {"model": mlp, "optimizer": sgd, "seed": 0, "threads": threads, **loop}
    expected = plain_loop(epochs=4, batch_size=28, x=X, y=Y, **loop)
    for name, value in parameters_of(fitted.model_).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_with_every_master_and_as_many_threads(master, optimizer, threads):
    fitted = trainer(False, master=master, optimizer=optimizer)

    check_plain(fitted, {"optimizer": optimizer}, threads=threads)


# A group of three batches is left with two, the second of which is not full.
STEPS = {
    "accumulate": {"accumulate": 3},
    "clip": {"clip_grad_norm": 0.3},
    "bfloat16": {"autocast": torch.bfloat16},
    "float16": {"autocast": torch.float16},
    "all": {"accumulate": 3, "clip_grad_norm": 0.3, "autocast": torch.bfloat16},
    "all float16": {"accumulate": 3, "clip_grad_norm": 0.3, "autocast": torch.float16},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("model", [mlp, normalised])
def test_with_options_of_a_step(one_thread, model, options):
    loop = {"model": model, "optimizer": adam, "seed": 3}

    check_plain(trainer(False, **loop, **options), {**loop, "more": options})


def warmed(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 8))


def cycled(optimizer):
    """A schedule that also changes the momentum."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=70)


SCHEDULES = {
    "epoch": {"scheduler": halved},
    "step": {"scheduler": warmed, "scheduler_every": "step"},
    "momentum": {"scheduler": cycled, "scheduler_every": "step"},
    "accumulated": {"scheduler": warmed, "scheduler_every": "step", "accumulate": 2},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("fits", [1, 2])
def test_with_a_schedule_which_a_second_fit_continues(one_thread, options, fits):
    check_plain(trainer(False, **options), {"more": options}, fits)


class Looking(nn.Linear):
    """Records the memory of its parameters."""

    seen = frozenset()

    def forward(self, x):
        for parameter in self.parameters():
            memory = parameter.untyped_storage().nbytes()
            Looking.seen |= {(parameter.nbytes, memory)}
        return super().forward(x)


@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_parameters_keep_their_own_memory(master, monkeypatch):
    """Products with unaligned views may differ."""
    monkeypatch.setattr(Looking, "seen", frozenset())
    fitted = trainer(False, master=master, model=functools.partial(Looking, 20, 4))

    fitted.fit(X, Y, batch_size=16)

    assert Looking.seen == {(320, 320), (16, 16)}  # each has its own
