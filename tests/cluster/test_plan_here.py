"""A plan for processes of this machine, which measure at the same time."""

import os
import signal
import threading

import dask
import pytest
import torch
from torch import nn

import daskdl
from daskdl.planning import measure
from daskdl.planning.measure import BenchmarkSpec
from daskdl.serialization import Packed

pytestmark = pytest.mark.slow

X, Y = torch.randn(16, 6), torch.arange(16) % 3


def spec(loss=nn.functional.cross_entropy):
    rows = (X.numpy(), Y.numpy())
    return Packed(
        BenchmarkSpec(
            nn.Linear(6, 3),
            loss,
            lambda params: torch.optim.SGD(params, lr=0.01),
            rows,
            daskdl.GradientSharing(),
            1,
        ),
        "model",
    )


def test_each_process_has_costs_of_its_own():
    one, other = measure.measure(spec(), 2, 60.0)

    assert (one.rows, one.threads, one.parameters) == (16, 1, 21)
    assert one.gradients_s > 0
    assert one.gradients_s != other.gradients_s


def test_an_error_of_the_loss_is_raised():
    def loss(output, y):
        raise RuntimeError("not on a Saturday")

    with pytest.raises(RuntimeError, match="not on a Saturday"):
        measure.measure(spec(loss), 2, 60.0)


def test_a_process_that_ends_is_noticed():
    parent = os.getpid()

    def loss(output, y):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(daskdl.RunError, match="a process that measures costs has end"):
        measure.measure(spec(loss), 2, 60.0)


def test_a_process_that_hangs_is_not_waited_for_without_an_end():
    def loss(output, y):
        threading.Event().wait()

    with (
        dask.config.set({"daskdl.timeouts.join": "5s"}),
        pytest.raises(daskdl.WaitTimeoutError, match=r"within 5\.5 s \(daskdl.timeo"),
    ):
        measure.measure(spec(loss), 2, 0.5)


def test_workers_of_this_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("daskdl.planning.plan.CPU_COUNT", 2)

    plan = daskdl.plan(nn.Linear(6, 3), (X, Y), 4, threads=1)

    assert plan.measured.processes == 2
    assert plan.measured.together.rows == 16
    assert plan.rows[3].samples_per_s < 4 * plan.rows[0].samples_per_s
    assert "processes of this machine" in str(plan)
