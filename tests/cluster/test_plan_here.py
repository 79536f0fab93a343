"""A plan for processes of this machine, which measure beside each other."""

import sys
import time

import pytest
import torch
from torch import nn

import daskdl
from daskdl.packed import Packed
from daskdl.planning import company as company_module
from daskdl.planning.company import company
from daskdl.planning.scene import Script

X, Y = torch.randn(16, 6), torch.arange(16) % 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def script(model=None, loss=nn.functional.cross_entropy):
    model = nn.Linear(6, 3) if model is None else model
    rows = (X.numpy(), Y.numpy())
    sharing = daskdl.GradientSharing()
    return Packed(Script(model, loss, sgd, rows, sharing, 1), "model")


@pytest.fixture
def started(monkeypatch):
    """Processes that were started."""
    processes = []
    popen = company_module.subprocess.Popen

    def start(*arguments, **options):
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(company_module.subprocess, "Popen", start)
    return processes


def test_others_rehearse_meanwhile_and_are_gone_afterwards(started):
    with company(script(), 2):
        assert [process.poll() for process in started] == [None, None]

    assert [process.returncode for process in started] == [0, 0]


def test_what_users_code_prints_there_does_no_harm():
    class Loud(nn.Linear):
        def forward(self, x):
            sys.stdout.write("forward\n")
            return super().forward(x)

    with company(script(Loud(6, 3)), 1):
        pass


def test_one_that_fails_says_why(started):
    def loss(output, y):
        raise RuntimeError("not on a Saturday")

    with (
        pytest.raises(daskdl.RunError, match="not on a Saturday"),
        company(script(loss=loss), 1),
    ):
        pass
    assert started[0].returncode == 1


def test_one_that_ends_meanwhile_is_noticed(started):
    def kill():
        with company(script(), 1):
            started[0].kill()
            started[0].wait()

    with pytest.raises(daskdl.RunError, match="ended: it said nothing"):
        kill()


def test_they_end_when_what_they_are_for_fails(started):
    with pytest.raises(ZeroDivisionError), company(script(), 1):
        raise ZeroDivisionError

    assert started[0].returncode == 0


def test_two_workers_here_share_its_cores(monkeypatch, started):
    monkeypatch.setattr("daskdl.planning.planner.CPU_COUNT", 2)
    began = time.perf_counter()

    plan = daskdl.plan(nn.Linear(6, 3), (X, Y), 4, threads=1)

    assert time.perf_counter() - began < 100
    assert len(started) == 1
    assert plan.measured.processes == 2
    assert plan.measured.together.rows == 16
    assert plan.rows[3].samples_per_s < 4 * plan.rows[0].samples_per_s
    assert "processes of this machine" in str(plan)
