"""What `daskdl.plan` and `daskdl.Network` refuse."""

import math
import re

import dask.array as da
import pytest
import torch
from torch import nn

import daskdl

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
WORKERS = "workers must be a whole number >= 1, or several of them, got "
BANDWIDTH = "bandwidth_bits_per_s must be a number > 0, got "
LATENCY = "latency_s must be seconds >= 0, got "


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, f"{WORKERS}0"),
        (([2, 0],), {}, WORKERS),
        (([2, 1.5],), {}, WORKERS),
        (("2",), {}, WORKERS),
        ((2, 1e9), {}, "link must be a daskdl.planning.cost_model.Network, got 1000"),
        ((2, None), {"threads": 0}, "threads must be a whole number >= 1 or None"),
        (
            (2, None),
            {"master": "mesh"},
            "master must be a daskdl.training.gradient_sharing.",
        ),
        (
            (2, None),
            {"master": daskdl.GradientSharing(replicas_per_worker=2)},
            "replicas_per_worker must be 1 in the master of a plan, got 2; plan ",
        ),
        (
            (2, None),
            {"master": daskdl.GradientSharing(daskdl.LinkThreshold())},
            "threshold must not follow the link in the master of a plan, which ",
        ),
    ],
    ids=str,
)
def test_options_that_are_not_allowed(arguments, options, message):
    with pytest.raises(daskdl.OptionError, match=f"^{re.escape(message)}"):
        daskdl.plan(nn.Linear(6, 3), (X, Y), *arguments, **options)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ([X, Y], daskdl.OptionError, "batch must be a tuple (X, y), got a list"),
        ((X, Y[:3]), daskdl.DataError, "batch: X and y must have the same length"),
        (
            (da.from_array(X.numpy()), Y),
            daskdl.DataError,
            "batch must be in memory, got a dask.array; use compute()",
        ),
        ((X[:, :2], Y), daskdl.ModelError, "model failed on 2 rows of X"),
    ],
    ids=["list", "lengths", "dask", "shape"],
)
def test_batches_that_cannot_be_trained_on(batch, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        daskdl.plan(nn.Linear(6, 3), batch, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.0), f"{BANDWIDTH}0"),
        ((math.nan, 0.0), f"{BANDWIDTH}nan"),
        (("1 Gbit/s", 0.0), f"{BANDWIDTH}'1 Gbit/s'"),
        ((1e9, -0.1), f"{LATENCY}-0.1"),
        ((1e9, math.inf), f"{LATENCY}inf"),
    ],
    ids=str,
)
def test_networks_that_do_not_exist(arguments, message):
    with pytest.raises(daskdl.OptionError, match=f"^{re.escape(message)}$"):
        daskdl.Network(*arguments)
