"""The command line on clusters."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import dask
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Event, get_worker
from distributed.utils_test import poll_for
from torch import nn

import daskdl
from daskdl.channel.protocol import DESCRIBE
from daskdl.cli import cli
from daskdl.config import Timeouts
from tests.support.clusters import ProcessCluster
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
    """Hangs in its fifth step on one worker until an event is set.

    With a folder, it hangs while it imports a module in it.
    """

    def __init__(self, worker, folder=None):
        super().__init__()
        self.layers, self.worker, self.steps = mlp(), worker, 0
        self.folder = folder

    def forward(self, x):
        self.steps += self.training
        if self.steps == 5 and get_worker().address == self.worker:
            if self.folder is None:
                Event("go on").wait()
            else:
                sys.path.insert(0, self.folder)
                importlib.import_module("slow_layers.attention")
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
        r"run deep \([0-9a-f]{8}\): epoch 0 \(1 of 3\), \d+ of its rows left, "
        r"2 replicas",
        run,
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


SLOW_IMPORT = "from distributed import Event\nEvent('go on').wait()\n"


@pytest.mark.parametrize(
    ("master", "imports"),
    [
        pytest.param(daskdl.GradientSharing(), False, id="sharing"),
        pytest.param(daskdl.ParameterAveraging(), False, id="averaging"),
        pytest.param(daskdl.GradientSharing(), True, id="importing"),
    ],
)
def test_the_step_of_a_lone_replica_and_the_module_that_it_imports_are_shown(
    lone_client, master, imports, tmp_path
):
    scheduler, (worker,) = lone_client.scheduler.address, addresses(lone_client)
    (tmp_path / "slow_layers").mkdir()
    (tmp_path / "slow_layers" / "attention.py").write_text(SLOW_IMPORT)
    model = Stuck(worker, str(tmp_path) if imports else None)
    lone = trainer(lone_client, model=model, master=master)
    fit = threading.Thread(target=lone.fit, args=(X, Y))
    release = Event("go on", client=lone_client)
    doing = "imports slow_layers.attention\n" if imports else "computes in File "
    activity = f"  replica 0 on {worker}: step 4, {doing}"
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


def end_when_asked(dask_scheduler):
    """Let the process of a scheduler end when somebody asks it about runs."""

    async def end():
        os._exit(1)

    dask_scheduler.handlers[DESCRIBE] = end


@pytest.mark.slow
@pytest.mark.parametrize("when", ["asked", "connected"])
def test_the_doctor_leaves_when_its_scheduler_is_lost(tmp_path, monkeypatch, when):
    timeouts = "daskdl.timeouts.request", "distributed.comm.timeouts.connect"
    with ProcessCluster(tmp_path) as cluster:
        address, read = cluster.client.scheduler.address, Timeouts.from_config
        scheduler = cluster.processes[0]

        def end_before_it_is_asked():
            scheduler.kill()
            scheduler.wait()
            return read()

        if when == "asked":
            cluster.client.run_on_scheduler(end_when_asked)
        else:  # read between the connection and the first request
            monkeypatch.setattr(Timeouts, "from_config", end_before_it_is_asked)

        with dask.config.set(dict.fromkeys(timeouts, "1 hour")):
            done = call("doctor", "--scheduler", address)

    assert done.exit_code == 1
    lost = f"Error: the scheduler at {address} was lost: "
    assert done.stderr.splitlines()[-1].startswith(lost)


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
    assert (
        re.findall(r"epoch . \(. of 2\).*(. replicas)", done.stdout)
        == ["2 replicas"] * 2
    )
    assert done.stdout.endswith("saved in model\n")


def trained_until_a_checkpoint(process):
    """Read the lines of epochs; the first checkpoint is complete with the third."""
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[-1].startswith("epoch 2 (3 of 1000000): ")


RUN = ("train", "own_nets:net", "--data", "rows.npz", "--local", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name
)
def test_a_run_that_a_signal_has_ended_is_resumed(folder, number):
    kept = ("--checkpoint", "runs", "--resume")
    with started(*RUN, "--epochs", 10**6, *kept) as process:
        trained_until_a_checkpoint(process)
        if number == signal.SIGINT:  # a terminal sends it to the workers, too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=100)

    assert re.match(r"dashboard: http://\S+/daskdl\n", errors)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130
        assert re.search(  # Dask may log before, see docs/troubleshooting.md
            r"\nThe last checkpoint is \S*runs/checkpoint-\d+; continue with the same "
            r"command and --resume.\nInterrupted.\n$",
            errors,
        )
    done = max(int(name.name.rpartition("-")[2]) for name in folder.glob("runs/*-*"))
    with started(*RUN, "--epochs", 10**6, *kept) as process:
        first = process.stdout.readline()

    assert int(re.match(r"epoch (\d+) \(", first)[1]) in (done, done + 1)


@pytest.mark.slow
def test_the_doctor_names_a_frozen_worker(client):
    pids = client.run(os.getpid)
    frozen, waiting = addresses(client)

    class Freeze(daskdl.Callback):
        def on_epoch_end(self, row):
            if row["epoch"] == 0:
                os.kill(pids[frozen], signal.SIGSTOP)

    sharing = daskdl.GradientSharing(max_staleness=2, exchange_every=1)
    halted = trainer(client, master=sharing, callbacks=[Freeze()])
    fit = threading.Thread(target=halted.fit, args=(X, Y), kwargs={"epochs": 3})
    shown = []

    def look():
        done = call("doctor", "--scheduler", client.scheduler.address)
        assert (done.exit_code, done.stderr) == (0, "")
        shown[:] = done.stdout.splitlines()
        return "does not answer" in done.stdout and "catch up" in done.stdout

    fit.start()
    try:
        poll_for(look, timeout=60, period=0.2)
    finally:
        os.kill(pids[frozen], signal.SIGCONT)
        fit.join()

    _, first, second, why = shown
    silent, held = sorted([first, second], key=lambda line: frozen not in line)
    number = re.match(r"  replica (\d)", silent)[1]
    assert re.fullmatch(
        rf"  replica {number} on {frozen}: step \d+, its worker does not answer; last "
        r"heartbeat \d+\.\d s ago, lost after 60 s",
        silent,
    )
    assert held.startswith(f"  replica {1 - int(number)} on {waiting}: step ")
    assert why == f"  the others wait for: replica {number}"
