"""The command line, where no cluster is needed."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import dask
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import daskdl
from daskdl.channel.protocol import WaitCause
from daskdl.cli import WAITS, cli

ROOT = Path(__file__).parents[2]

NETS = """
import daskdl
import numpy as np
import torch
from daskdl.saving.checkpoints import Series
from torch import nn

SETTINGS = {}
READER = daskdl.data.Npz(x="features", y="label")


class Interrupt(daskdl.Callback):  # once there is a checkpoint, or after two epochs
    def __init__(self, checkpoints):
        self.checkpoints = checkpoints

    def on_epoch_end(self, row):
        written = self.checkpoints and Series.at(self.checkpoints, None).newest()
        if written or (row["epoch"] == 1 and not self.checkpoints):
            raise KeyboardInterrupt


def linear(interrupt=None, **settings):
    SETTINGS.update(settings)
    return daskdl.Trainer(
        nn.Linear(64, 32),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        client=False,
        callbacks=[] if interrupt is None else [Interrupt(interrupt)],
    )


class Tiring(nn.Linear):
    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps > 3:
            raise ArithmeticError("no more")
        return super().forward(x)


def tiring():
    trainer = linear()
    trainer.model = Tiring(64, 32)
    return trainer


def stepping():
    return daskdl.Trainer(
        nn.Linear(64, 32),
        optimizer=torch.optim.SGD,
        step=lambda model, batch: model(batch[0]).sum(),
        client=False,
    )


def checkpointed():
    trainer = linear()
    trainer.callbacks = [daskdl.Checkpoint("there")]
    return trainer


def rows():
    x = np.random.default_rng(0).normal(size=(128, 64)).astype("float32")
    return x, x[:, :32].argmax(axis=1)


def faulty():
    return {}["x"]


def out_of_range():
    return daskdl.Trainer(nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD, accumulate=0)
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder with a module of the user and data, which is the current one."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "unfinished.py").write_text("import nowhere.to_be_found")
    rng = np.random.default_rng(0)
    for i in range(2):
        x = rng.normal(size=(64, 64)).astype("float32")
        y = x[:, :32].argmax(axis=1)
        np.savez(tmp_path / f"{i}.npz", x=x, y=y)
        np.savez(tmp_path / f"{i}.named.npz", features=x, label=y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("nets", None)


def call(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)], prog_name="daskdl")


def test_a_trainer_is_trained_on_files_and_saved(nets):
    done = call("train", "nets:linear", "--data", "[01].npz", "--save", "model")

    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(
        r"epoch 0 \(1 of 1\): loss \d.*, 1 replica\nsaved in model\n", done.stdout
    )
    model = torch.nn.Linear(64, 32)
    loaded = daskdl.Trainer.load(nets / "model", model=model, client=False)
    assert loaded.callbacks == []


@pytest.mark.parametrize("data", [["some"], ["0.npz", "1.npz"]], ids=str)
def test_data_are_a_folder_or_several_files(nets, data):
    (nets / "some").mkdir()
    for i in range(2):
        (nets / "some" / f"{i}.npz").write_bytes((nets / f"{i}.npz").read_bytes())
    words = [part for path in data for part in ("--data", path)]

    done = call("train", "nets:linear", *words, "--save", "model")

    assert done.exit_code == 0, done.stderr
    model = torch.nn.Linear(64, 32)
    loaded = daskdl.Trainer.load(nets / "model", model=model, client=False)
    assert loaded.history_.column("examples") == [128]


def test_arguments_are_json_or_text(nets):
    settings = ["rate=1e-3", "sizes=[3, 4]", "quick=true", "name=a=b", "none="]
    words = [part for setting in settings for part in ("--arg", setting)]

    done = call("train", "nets:linear", "--data", "nets:rows", *words)

    assert done.exit_code == 0
    assert sys.modules["nets"].SETTINGS == {
        "rate": 0.001,
        "sizes": [3, 4],
        "quick": True,
        "name": "a=b",
        "none": "",
    }
    assert done.stderr == "Neither --save nor --checkpoint: no model will be kept.\n"


@pytest.mark.parametrize(
    "validation",
    [("nets:rows",), ("0.named.npz", "--loader", "nets:READER")],
    ids=["function", "files"],
)
def test_validation_data_are_read_like_data(nets, validation):
    expected = "nets:rows" if validation[1:] == () else "1.named.npz"

    done = call("train", "nets:linear", "--data", expected, "--validation", *validation)

    assert done.exit_code == 0, done.stderr
    assert "val_accuracy" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("nets --data 0.npz", 2, "'nets' is not of the form MODULE:NAME"),
        (
            "gone:f --data 0.npz",
            2,
            "no module 'gone' in this folder or among the installed packages",
        ),
        (
            "unfinished:f --data 0.npz",
            2,
            "importing 'unfinished' raised ModuleNotFoundError: No module named "
            "'nowhere' (*unfinished.py, line 1)",
        ),
        ("nets:gone --data 0.npz", 2, "module 'nets' has no 'gone'"),
        (
            "nets:SETTINGS --data 0.npz",
            2,
            "nets:SETTINGS must be a function, got a dict",
        ),
        (
            "nets:rows --data 0.npz",
            2,
            "nets:rows must return a daskdl.Trainer, got a tuple",
        ),
        (
            "nets:rows --data 0.npz --arg n=1",
            2,
            "nets:rows cannot be called: got an unexpected keyword argument 'n'",
        ),
        (
            "nets:faulty --data 0.npz",
            1,
            "nets:faulty raised KeyError: 'x' (*, line 70)",
        ),
        (
            "nets:out_of_range --data 0.npz",
            2,
            "accumulate must be a whole number >= 1, got 0",
        ),
        ("nets:linear --data missing", 2, "there are no files at *missing"),
        (
            "nets:linear --data nets.py",
            2,
            "without a loader, all files must have * one of *, got '.py', *",
        ),
        (
            "nets:linear --data nets:rows --loader nets:READER",
            2,
            "--loader needs URLs, but --data is a function",
        ),
        ("nets:linear --data 0.npz --resume", 2, "--resume needs --checkpoint"),
        ("nets:linear --data 0.npz --every 5", 2, "--every needs --checkpoint"),
        (
            "nets:linear --data 0.npz --checkpoint there --every sometimes",
            2,
            "every must be 'epoch', *, got 'sometimes'",
        ),
        (
            "nets:checkpointed --data 0.npz --checkpoint there",
            2,
            "--checkpoint cannot be used: the factory's trainer has a Checkpoint",
        ),
        (
            "nets:faulty --data missing --local 1 --slurm 1",
            2,
            "use only one of --scheduler, --slurm and --local",
        ),
        (
            "nets:faulty --data missing --scheduler tcp://127.0.0.1:1 --local 1",
            2,
            "use only one of --scheduler, --slurm and --local",
        ),
        (
            "nets:linear --data 0.npz --scheduler tcp://127.0.0.1:1 --save there",
            1,
            "cannot connect to the scheduler at 'tcp://127.0.0.1:1': *",
        ),
        (
            "nets:linear --data 0.npz --scheduler nonsense://x --save there",
            1,
            "cannot connect to the scheduler at 'nonsense://x': *",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(nets, arguments, code, message):
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        done = call("train", *arguments.split())

    pattern = re.escape(message).replace(r"\*", ".*")
    assert re.fullmatch(f"Error: {pattern}\n", done.stderr), done.stderr
    assert done.exit_code == code
    assert not (nets / "there").exists()


def test_a_full_disk_is_said_in_one_line(nets):
    # A file of 8 kB that cannot grow beyond 4: what a full disk does to it.
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        done = call("train", "nets:linear", "--data", "0.npz", "--save", "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    assert done.exit_code == 1
    assert re.fullmatch(r"Error: .*File too large.*\n", done.stderr)
    assert "saved" not in done.stdout


def test_an_error_of_the_model_comes_with_its_traceback(nets):
    done = call("train", "nets:tiring", "--data", "0.npz", "--epochs", 3, "--save", "m")

    assert done.exit_code == 1
    assert "ArithmeticError: no more" in done.stderr.splitlines()[0]
    assert 'nets.py", line 39, in forward' in done.stderr


def test_the_traceback_of_an_error_can_be_seen(nets):
    done = call("--traceback", "train", "nets:linear", "--data", "missing")

    assert isinstance(done.exception, daskdl.DataError)


def test_a_run_is_resumed(nets):
    same = ("train", "nets:linear", "--data", "0.npz", "--checkpoint", "runs")

    first = call(*same, "--resume", "--epochs", 1)
    then = call(*same, "--resume", "--epochs", 3, "--every", "2")

    assert first.stdout.startswith("epoch 0 (1 of 1): ")
    assert re.findall(r"epoch (. \(. of 3\))", then.stdout) == [
        "1 (2 of 3)",
        "2 (3 of 3)",
    ]


def test_an_interrupted_run_says_where_to_resume(nets):
    same = ("train", "nets:linear", "--data", "0.npz", "--epochs", 10_000, "--arg")

    kept = call(*same, "interrupt=runs", "--checkpoint", "runs")
    lost = call(*same, "interrupt=", "--save", "model")

    assert kept.exit_code == lost.exit_code == 130
    assert re.fullmatch(
        r"The last checkpoint is \S*runs/checkpoint-\d{6}; continue with the same "
        r"command and --resume.\nInterrupted.\n",
        kept.stderr,
    )
    assert lost.stderr == (
        "This run has no checkpoint, because --checkpoint was not used.\nInterrupted.\n"
    )
    assert not (nets / "model").exists()


def test_a_run_is_reported_at_its_end_and_from_its_save(nets):
    same = ("train", "nets:linear", "--data", "0.npz", "--save", "model")

    done = call(*same, "--report", "now.html")
    later = call("report", "model", "later.html")

    assert done.stdout.endswith("saved in model\nreport in now.html\n")
    assert (later.exit_code, later.output) == (0, "")
    assert (nets / "later.html").read_text() == (nets / "now.html").read_text()


def test_a_run_that_fails_is_reported_too(nets):
    failing = ("train", "nets:tiring", "--data", "0.npz", "--epochs", 3, "--save", "m")

    done = call(*failing, "--report", "run.html")
    nowhere = call(*failing, "--report", "nowhere/run.html")

    assert done.exit_code == nowhere.exit_code == 1
    assert "ArithmeticError: no more" in (nets / "run.html").read_text()
    missing, failed = nowhere.stderr.splitlines()[:2]
    assert missing.startswith("The report was not written: [Errno 2] No such file")
    assert "ArithmeticError: no more" in failed


def test_what_is_no_save_cannot_be_reported(nets):
    done = call("report", "missing", "run.html")

    assert done.exit_code == 1
    assert re.fullmatch(r"Error: .*missing.*\n", done.stderr)


def test_workers_are_planned(nets, monkeypatch):
    monkeypatch.setattr("daskdl.planning.measure.TIMED_S", 0.0)
    network = ("--workers", 2, "--bandwidth", 1, "--batch-size", 100)

    done = call("plan", "nets:linear", "--data", "[01].npz", *network)

    assert (done.exit_code, done.stderr) == (0, "")
    heading, columns, first, second, *advice = done.stdout.splitlines()
    assert "2,080 parameters, 100 rows a step" in heading
    assert "1 Gbit/s, 0.5 ms one way" in heading
    assert columns.split()[:2] == ["workers", "efficiency"]
    assert (first.split()[:2], second.split()[0]) == (["1", "1.00"], "2")
    assert advice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nets:linear --latency 1", "--latency needs --bandwidth"),
        (
            "nets:stepping --bandwidth 1",
            "plan needs a trainer with loss=, got one without",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(nets, arguments, message):
    done = call("plan", *arguments.split(), "--data", "0.npz")

    assert (done.exit_code, done.stderr) == (2, f"Error: {message}\n")


def test_every_cause_of_waits_has_words():
    assert WAITS.keys() == {cause.value for cause in WaitCause}


SHOW = """
import sys
from daskdl.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "distributed") if name in sys.modules])
"""


def test_help_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-Werror", "-c", SHOW, "train", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert "MODULE:FACTORY" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["scripts"] == {"daskdl": "daskdl.cli:main"}
    assert "main()" in (ROOT / "daskdl" / "__main__.py").read_text()
