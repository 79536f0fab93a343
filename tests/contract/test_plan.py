"""What `daskdl.plan` and `daskdl.Network` refuse."""

import math
import re

import dask.array as da
import pytest
import torch
from torch import nn

import daskdl
from daskdl import DataError, GradientSharing, ModelError, OptionError

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
WORKERS = "workers must be a whole number >= 1, or several such numbers, got "
BANDWIDTH = "bandwidth_bits_per_s must be a number > 0, got "
LATENCY = "latency_s must be seconds >= 0, got "


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"workers": 0}, OptionError, f"{WORKERS}0"),
        ({"workers": [2, 0]}, OptionError, WORKERS),
        ({"workers": [2, 1.5]}, OptionError, WORKERS),
        ({"workers": "2"}, OptionError, WORKERS),
        (
            {"link": 1000},
            *(OptionError, "link must be a daskdl.planning.cost_model.Network, got 10"),
        ),
        ({"threads": 0}, OptionError, "threads must be a whole number >= 1 or None"),
        (
            {"master": "mesh"},
            *(OptionError, "master must be a daskdl.training.gradient_sharing."),
        ),
        (
            {"master": GradientSharing(replicas_per_worker=2)},
            *(OptionError, "the master of a plan must have replicas_per_worker=1, got"),
        ),
        ({"batch": [X, Y]}, OptionError, "batch must be a tuple (X, y), got a list"),
        (
            {"batch": (X, Y[:3])},
            *(DataError, "batch: X and y must have the same length"),
        ),
        (
            {"batch": (da.from_array(X.numpy()), Y)},
            *(
                DataError,
                "batch must be in memory, got a Dask collection; use compute()",
            ),
        ),
        ({"batch": (X[:, :2], Y)}, ModelError, "model failed on 2 rows of X"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_plan_refuses_unusable_arguments(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        daskdl.plan(nn.Linear(6, 3), **{"batch": (X, Y), "workers": 2} | options)


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
def test_a_network_refuses_impossible_numbers(arguments, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        daskdl.Network(*arguments)
