"""Measuring for a plan: the costs, the side effects, and the errors."""

import copy
import functools
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.planning import measure
from daskdl.serialization import Packed

pytestmark = pytest.mark.slow

NETWORK = daskdl.Network(1e9, 1e-3)
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


class Net(nn.Module):
    """Has buffers, and draws from all generators."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )

    def forward(self, x):
        random.random()
        np.random.random()
        return self.layers(x)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure few steps and requests."""
    monkeypatch.setattr(measure, "TIMED_S", 0.0)
    monkeypatch.setattr(measure, "REQUESTS", 3)
    monkeypatch.setattr(measure, "WARM_REQUESTS", 1)
    monkeypatch.setattr(measure, "PAUSE_S", 0.0)


def costs(model=Net, batch=(X, Y), workers=2, **options):
    return daskdl.plan(model, batch, workers, NETWORK, **options).measured.alone


def test_a_plan_changes_neither_model_nor_batch_nor_generators_nor_threads():
    def state():
        generators = torch.get_rng_state().tolist(), random.getstate()
        numpy_state = [str(part) for part in np.random.get_state()]
        return generators, numpy_state, torch.get_num_threads()

    model = nn.Sequential(nn.ReLU(inplace=True), Net())
    weights, before = copy.deepcopy(model.state_dict()), state()
    x, y = X.clone(), Y.clone()

    costs(model, (x, y), threads=torch.get_num_threads() + 1)

    assert state() == before
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_costs_are_those_of_the_batch_and_the_model():
    plan = daskdl.plan(Net, (X.numpy(), Y.numpy()), 4, NETWORK, threads=3)

    alone = plan.measured.alone
    assert [row.workers for row in plan.rows] == [1, 2, 3, 4]
    assert plan.measured.together is None
    assert (alone.rows, alone.threads) == (16, 3)
    assert alone.parameters == sum(p.numel() for p in Net().parameters())
    times = {n: v for n, v in vars(alone).items() if n.endswith("_s") and n != "item_s"}
    assert {n: v for n, v in times.items() if not 0 < v < 1} == {}
    assert costs().threads == torch.get_num_threads()


def test_loss_optimizer_and_threads_are_used():
    def loss(output, y):
        if torch.get_num_threads() != 3:
            raise ValueError(f"{torch.get_num_threads()} threads")
        return output.square().mean()

    class Refusing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("the optimizer was called")

    # The dry run uses the threads of this process.
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        costs(loss=loss, threads=3)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="the optimizer was called"):
        costs(optimizer=lambda params: Refusing(params, lr=0.1))
    assert costs(batch=(X, torch.rand(16, 3))).rows == 16  # the loss for regression
    assert costs(optimizer=torch.optim.Adam).adaptive
    assert not costs().adaptive


now = [0.0]


def slow_loss(output, y):
    now[0] += 1.01 * measure.SETTLING_S
    return nn.functional.cross_entropy(output, y)


@pytest.mark.parametrize("loss", [None, slow_loss], ids=["steps", "last one repeated"])
def test_a_threshold_settles_inside_its_band(loss, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=time.thread_time)
    monkeypatch.setattr(measure, "time", clock if loss else time)
    monkeypatch.setattr(measure, "MIN_STEPS", 20)
    rule = daskdl.AdaptiveThreshold(initial=1e-9, min_density=0.2, max_density=0.5)
    master = daskdl.GradientSharing(rule)

    measured = costs(nn.Linear(6, 3), master=master, loss=loss)

    assert 0.1 < measured.density < 0.6


@pytest.mark.parametrize(
    "options",
    [
        {"exchange_every": 3, "max_staleness": 0},
        {"max_staleness": None, "update_scale": "sum"},
        {"warmup_steps": 1000, "apply": "strict"},
        {
            "threshold": {
                "*.bias": daskdl.FixedThreshold(1e-6),
                "*": daskdl.FixedThreshold(1e-5),
            }
        },
    ],
    ids=str,
)
def test_all_options_of_gradient_sharing_are_measured(options):
    fine = {"threshold": daskdl.FixedThreshold(1e-6)}

    measured = costs(master=daskdl.GradientSharing(**fine | options))

    assert 0.5 < measured.density <= 1
    assert measured.update_bytes >= 64 * len(options.get("threshold", "1"))  # headers
    assert measured.apply_s > 0


def test_a_loss_that_diverges_is_an_error():
    with pytest.raises(daskdl.DivergedError, match="within a few steps; lower the"):
        costs(
            batch=(X, X[:, :3]),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e30),
        )


# ---- processes on this machine, which measure at the same time


def failures():
    """Losses that fail in a measuring process, and the errors."""
    parent = os.getpid()

    def failing(output, y):
        raise RuntimeError("not on a Saturday")

    def ending(output, y):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    def hanging(output, y):
        threading.Event().wait()

    return {
        "fails": (failing, 60.0, RuntimeError, "not on a Saturday"),
        "ends": (ending, 60.0, daskdl.RunError, "a process that measures costs died: "),
        "hangs": (
            hanging,
            0.5,
            daskdl.WaitTimeoutError,
            r"within 5\.5 s \(daskdl.time",
        ),
    }


@pytest.mark.parametrize("failure", ["fails", "ends", "hangs"])
def test_a_process_that_fails_to_measure_is_an_error(failure):
    loss, patience_s, error, message = failures()[failure]
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    rows, master = (X.numpy(), Y.numpy()), daskdl.GradientSharing()
    spec = measure.BenchmarkSpec(nn.Linear(6, 3), loss, sgd, rows, master, 1)

    with (
        dask.config.set(
            {"daskdl.timeouts.join": "5s" if failure == "hangs" else "60s"}
        ),
        pytest.raises(error, match=message),
    ):
        measure.measure(Packed(spec, "model"), 2, patience_s)


def test_workers_of_this_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("daskdl.planning.plan.CPU_COUNT", 2)

    plan = daskdl.plan(nn.Linear(6, 3), (X, Y), 4, threads=1)

    assert plan.measured.processes == 2
    assert plan.measured.together.rows == 16
    assert plan.rows[3].samples_per_s < 4 * plan.rows[0].samples_per_s
    assert "processes on this machine" in str(plan)
