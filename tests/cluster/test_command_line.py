"""The command line on clusters."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Event, get_worker
from distributed.utils_test import poll_for
from torch import nn

import daskdl
from daskdl.cli import cli
from tests.support.problems import mlp, rows, sgd, trainer

X, Y = rows()


def call(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)], prog_name="daskdl")


def addresses(client):
    return sorted(client.nthreads())


def test_a_cluster_is_checked(client):
    done = call("check", "--scheduler", client.scheduler.address, "--seconds", 0.1)

    assert (done.exit_code, done.stderr) == (0, "")
    heading, *verdicts = done.stdout.splitlines()
    assert heading.startswith(f"the client has daskdl {daskdl.__version__} and torch ")
    pattern = (
        r"worker (tcp://\S+): (?:ok|slow: .*) \(1 thread, .*, no CUDA device, "
        r"sends \d+\.\d\d Gbit/s, \d+\.\d ms a step\)"
    )
    names = [re.fullmatch(pattern, verdict)[1] for verdict in verdicts]
    assert names == addresses(client)


def pretend(version):
    import daskdl.config

    before, daskdl.config.VERSION = daskdl.config.VERSION, version
    return before


def test_a_worker_that_cannot_take_part_is_named(client):
    bad, good = addresses(client)
    (before,) = client.run(pretend, "0.0.9", workers=[bad]).values()
    try:
        done = call("check", "--scheduler", client.scheduler.address)
    finally:
        client.run(pretend, before, workers=[bad])

    assert done.exit_code == 1
    _, *verdicts = done.stdout.splitlines()
    assert verdicts[0] == f"worker {bad}: unusable: daskdl 0.0.9"
    assert verdicts[1].startswith(f"worker {good}: not tried, as others are unusable (")


def test_a_cluster_without_workers_is_refused(no_workers):
    done = call("check", "--scheduler", no_workers.scheduler.address)

    assert (done.exit_code, done.stderr) == (1, "Error: the cluster has no workers\n")


class Stuck(nn.Module):
    """Hangs in its fifth step on one worker until an event is set."""

    def __init__(self, worker):
        super().__init__()
        self.layers, self.worker, self.steps = mlp(), worker, 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 5 and get_worker().address == self.worker:
            Event("go on").wait()
        return self.layers(x)


def test_a_run_that_hangs_is_explained(client):
    worker, _ = addresses(client)
    sharing = daskdl.GradientSharing(max_staleness=2, exchange_every=1)
    fitted = trainer(client, model=Stuck(worker), optimizer=sgd, master=sharing)
    options = {"epochs": 3, "name": "deep"}
    fit = threading.Thread(target=fitted.fit, args=(X, Y), kwargs=options)
    lines = []

    def look():
        done = call("doctor", "--scheduler", client.scheduler.address)
        assert (done.exit_code, done.stderr) == (0, "")
        lines[:] = done.stdout.splitlines()
        return all(part in done.stdout for part in ("in forward", "catch up"))

    release = Event("go on", client=client)
    fit.start()
    try:
        poll_for(look, timeout=60, period=0.2)
    finally:
        release.set()
        fit.join()

    run, first, second, why = lines
    assert re.fullmatch(
        r"run deep \([0-9a-f]{8}\): epoch 1, \d+ of its rows left, 2 replicas", run
    )
    stuck, waiting = sorted([first, second], key=lambda line: worker not in line)
    number = re.match(r"  replica (\d)", stuck)[1]
    here = re.escape(__file__)
    assert re.fullmatch(
        rf"  replica {number} on {worker}: step \d+, computes in File \"{here}\", line "
        rf"\d+, in forward",
        stuck,
    )
    assert re.search(
        r": step \d+, waits \d+\.\d s for other replicas to catch up "
        rf"\(max_staleness\): replica {number}$",
        waiting,
    )
    assert why == f"  the others wait for: replica {number}"
    assert call("doctor", "--scheduler", client.scheduler.address).stdout == (
        f"no run of daskdl on {client.scheduler.address}\n"
    )


@pytest.mark.parametrize(
    "master",
    [daskdl.GradientSharing(), daskdl.ParameterAveraging()],
    ids=["sharing", "averaging"],
)
def test_the_steps_of_a_lone_replica_are_counted(lone_client, master):
    scheduler, (worker,) = lone_client.scheduler.address, addresses(lone_client)
    lone = trainer(lone_client, model=Stuck(worker), master=master)
    fit = threading.Thread(target=lone.fit, args=(X, Y))
    release = Event("go on", client=lone_client)
    activity = f"  replica 0 on {worker}: step 4, computes in "
    release.clear()
    fit.start()
    try:
        poll_for(
            lambda: activity in call("doctor", "--scheduler", scheduler).stdout,
            timeout=60,
            period=0.2,
        )
    finally:
        release.set()
        fit.join()


NETS = """
import signal
import threading

import daskdl
import torch
from torch import nn

# What runs in the background, as the tests may, begins with ignoring it. Workers, which
# import this file in a thread, leave it ignored.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x):
        return self.layer(x)


def net():
    return daskdl.Trainer(
        Net,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(NETS)
    np.savez(tmp_path / "rows.npz", x=X, y=Y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("own_nets", None)


@contextlib.contextmanager
def started(*arguments):
    """``python -m daskdl`` in the current folder, as from a terminal."""
    with subprocess.Popen(
        [sys.executable, "-m", "daskdl", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.usefixtures("ctrl_c")
def test_workers_need_not_have_the_file_of_the_factory(client, folder):
    done = call(
        *("train", "own_nets:net", "--data", folder / "rows.npz", "--epochs", 2),
        *("--scheduler", client.scheduler.address, "--save", "model"),
    )

    assert (done.exit_code, done.stderr) == (0, "")
    assert re.findall(r"epoch ./2.*(. replicas)", done.stdout) == ["2 replicas"] * 2
    assert done.stdout.endswith("saved in model\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_ends_a_run_on_this_machine(folder, number):
    with started(
        *("train", "own_nets:net", "--data", "rows.npz", "--epochs", 10**6),
        *("--local", 1, "--checkpoint", "runs"),
    ) as process:
        # The first checkpoint is complete before the second is written.
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[-1].startswith("epoch 3/1000000: ")
        if number == signal.SIGINT:  # a terminal sends it to the workers, too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=100)

    assert process.returncode == 130
    assert re.fullmatch(
        r"The last checkpoint is \S*runs/checkpoint-\d+; continue with the same "
        r"command and --resume.\nInterrupted.\n",
        errors,
    )
