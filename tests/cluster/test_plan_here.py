"""A plan for processes of this machine, which measure at the same time."""

import os
import signal
import sys
import threading
import time

import dask
import pytest
import torch
from torch import nn

import daskdl
from daskdl.planning import measure
from daskdl.planning.measure import Script, rehearse_together
from daskdl.serialization import Packed

X, Y = torch.randn(16, 6), torch.arange(16) % 3
PATIENCE_S = 60.0


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def script(model=None, loss=nn.functional.cross_entropy):
    model = nn.Linear(6, 3) if model is None else model
    rows = (X.numpy(), Y.numpy())
    sharing = daskdl.GradientSharing()
    return Packed(Script(model, loss, sgd, rows, sharing, 1), "model")


@pytest.fixture
def started(monkeypatch):
    """Processes that were started to rehearse; Dask starts others, to know the CPU."""
    processes = []
    popen = measure.subprocess.Popen

    def start(command, **options):
        process = popen(command, **options)
        if "daskdl.planning.measure" in command:
            processes.append(process)
        return process

    monkeypatch.setattr(measure.subprocess, "Popen", start)
    return processes


@pytest.mark.slow
def test_each_has_costs_of_its_own_and_is_gone_afterwards(started):
    one, other = rehearse_together(script(), 2, PATIENCE_S)

    assert (one.rows, one.threads, one.parameters) == (16, 1, 21)
    assert one.gradients_s > 0
    assert one.gradients_s != other.gradients_s
    assert len(started) == 2
    assert None not in [process.returncode for process in started]


@pytest.mark.slow
def test_what_users_code_prints_there_does_no_harm():
    class Loud(nn.Linear):
        def forward(self, x):
            sys.stdout.write("forward\n")
            os.write(1, b"as a library of C's would\n")
            return super().forward(x)

    assert rehearse_together(script(Loud(6, 3)), 1, PATIENCE_S)[0].rows == 16


@pytest.mark.slow
def test_none_measures_before_all_are_ready(tmp_path):
    first, ready, early = (tmp_path / name for name in ("first", "ready", "early"))
    steps = tmp_path / "steps"

    def loss(output, y):
        measuring = any(t.name == "daskdl-plan" for t in threading.enumerate())
        if measuring and not ready.exists():
            early.touch()
        try:
            first.mkdir()
        except FileExistsError:
            with steps.open("ab") as file:
                file.write(b".")
        else:  # until the other one could have settled, and measured
            deadline = time.monotonic() + PATIENCE_S
            while not steps.exists() or steps.stat().st_size < 450:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            ready.touch()
        return nn.functional.cross_entropy(output, y)

    rehearse_together(script(loss=loss), 2, PATIENCE_S)

    assert ready.exists()
    assert not early.exists()


@pytest.mark.slow
def test_one_that_fails_says_why(started):
    def loss(output, y):
        raise RuntimeError("not on a Saturday")

    with pytest.raises(
        daskdl.RunError, match=r"(?s)ended with status 1: .*not on a Saturday"
    ):
        rehearse_together(script(loss=loss), 1, PATIENCE_S)
    assert started[0].returncode == 1  # by itself: it had not to be killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(3), "ended with status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
    ],
    ids=["exit", "killed"],
)
def test_one_that_ends_meanwhile_is_noticed(end, how):
    def loss(output, y):
        end()

    with pytest.raises(daskdl.RunError, match=rf"{how}: it said nothing"):
        rehearse_together(script(loss=loss), 2, PATIENCE_S)


@pytest.mark.slow
def test_one_that_says_no_more_but_lives_is_ended(started):
    def loss(output, y):
        os.closerange(3, 256)
        threading.Event().wait()

    with (
        dask.config.set({"daskdl.timeouts.stop": "1s"}),
        pytest.raises(daskdl.RunError, match=r"did not end within 1 s \(daskdl.timeo"),
    ):
        rehearse_together(script(loss=loss), 1, PATIENCE_S)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
def test_one_that_hangs_is_not_waited_for_without_an_end(started):
    def loss(output, y):
        threading.Event().wait()

    with (
        dask.config.set({"daskdl.timeouts.join": "5s"}),
        pytest.raises(daskdl.WaitTimeoutError, match=r"within 5\.5 s \(daskdl.timeo"),
    ):
        rehearse_together(script(loss=loss), 1, 0.5)
    assert started[0].returncode is not None


@pytest.mark.slow
def test_two_workers_here_share_its_cores(monkeypatch, started):
    monkeypatch.setattr("daskdl.planning.plan.CPU_COUNT", 2)

    plan = daskdl.plan(nn.Linear(6, 3), (X, Y), 4, threads=1)

    assert len(started) == 2
    assert plan.measured.processes == 2
    assert plan.measured.together.rows == 16
    assert plan.rows[3].samples_per_s < 4 * plan.rows[0].samples_per_s
    assert "processes of this machine" in str(plan)
