"""Checks that scheduler and workers have the client's daskdl and torch."""

import contextlib
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading

import dask
import pytest
import torch
from distributed.utils_test import poll_for
from torch import nn

import daskdl
from daskdl.channel.protocol import NAME
from tests.support.clusters import ProcessCluster, Script, enough
from tests.support.problems import mlp, rows, trainer

X, Y = rows()
WITHIN_S = 100.0
REMEDY = "install the same daskdl and the same minor version of torch"


def loaded(packages):
    return [name for name in sys.modules if name.split(".")[0] in packages]


def hide(package):
    """Make a package look as if it were not installed, until `restore`."""
    gone = {"daskdl", package}
    sys.hidden = {name: sys.modules.pop(name) for name in loaded(gone)}
    sys.modules[package] = None


def restore():
    hidden = sys.__dict__.pop("hidden", {})
    for name in loaded({name.split(".")[0] for name in hidden}):
        del sys.modules[name]
    sys.modules.update(hidden)


def age(package, version):
    """Make a package report another version."""
    if package == "torch":
        torch.__version__ = version
        return
    before = importlib.import_module("daskdl.config").VERSION
    for module in list(sys.modules.values()):
        if getattr(module, "VERSION", None) == before:
            module.VERSION = version


@pytest.fixture
def changed(client):
    """Change workers of the client, and restore them afterwards."""

    def change(function, *args, workers=None):
        client.run(function, *args, workers=workers)
        return client

    yield change
    client.run(restore)
    client.run(age, "daskdl", daskdl.__version__)
    client.run(age, "torch", torch.__version__)


def fit(client):
    return trainer(client).fit(X, Y)


def evaluate(client):
    return daskdl.evaluate(mlp(), X, Y, loss=nn.CrossEntropyLoss(), client=client)


def predict(client):
    return daskdl.predict(mlp(), X, client=client)


def score(client):
    unfitted = trainer(client)
    unfitted.model_ = mlp()
    return unfitted.score_examples(X, Y)


def check(client):
    parts = [dask.delayed((X, Y))] * 2
    return daskdl.data.validate(parts, client=client)


def serve(client):
    with daskdl.Predictor(mlp(), client=client) as predictor:
        return predictor(X)


@pytest.mark.parametrize(
    ("change", "what", "count"),
    [
        ((hide, "daskdl"), "ModuleNotFoundError: No module named 'daskdl", 1),
        ((age, "daskdl", "0.0.9"), "daskdl 0.0.9", 2),
        ((hide, "torch"), "ModuleNotFoundError: import of torch halted", 2),
        ((age, "torch", "1.13.1+cu117"), "torch 1.13.1", 1),
    ],
    ids=["daskdl missing", "daskdl older", "torch missing", "torch older"],
)
def test_workers_with_wrong_packages_are_named_before_a_fit(
    client, changed, change, what, count
):
    workers = sorted(client.nthreads())[:count]
    changed(*change, workers=workers)

    with pytest.raises(daskdl.RunError) as caught:
        fit(client)

    message = str(caught.value)
    assert f"the client has daskdl {daskdl.__version__} and torch" in message
    named = ", ".join(f"worker {address}" for address in workers)
    assert re.search(f"\n  {re.escape(named)}: {what}", message)
    assert REMEDY in message


@pytest.mark.parametrize("do", [evaluate, predict, score, check, serve])
def test_workers_with_wrong_packages_are_named_before_a_pass(client, changed, do):
    worker = sorted(client.nthreads())[1]
    changed(hide, "daskdl", workers=[worker])

    with pytest.raises(daskdl.RunError, match=f"{worker}: ModuleNotFoundError"):
        do(client)


@contextlib.contextmanager
def one_hangs(client):
    """Yield the address of the worker."""
    pids = client.run(os.getpid)
    worker = sorted(pids)[1]
    os.kill(pids[worker], signal.SIGSTOP)
    bounds = {"daskdl.timeouts.join": "1s", "daskdl.timeouts.request": "1s"}
    try:
        with dask.config.set(bounds):
            yield worker
    finally:
        os.kill(pids[worker], signal.SIGCONT)


@pytest.mark.parametrize("do", [fit, predict])
def test_a_worker_that_hangs_is_named(client, do):
    with one_hangs(client) as worker, pytest.raises(daskdl.WaitTimeoutError) as caught:
        do(client)

    assert str(caught.value) == (
        f"worker {worker}: no answer within 2 s (daskdl.timeouts.join + request) about "
        "the versions of daskdl and torch; the process hangs, or its imports are slow"
    )


def test_a_model_of_another_shape_is_refused_while_a_worker_hangs(client):
    with one_hangs(client), pytest.raises(daskdl.ModelError, match="19"):
        trainer(client, model=nn.Linear(19, 4)).fit(X, Y)


CHECKS = []  # in the client's process, not on workers


class Checked(nn.Linear):
    def forward(self, x):
        for check in CHECKS:
            check()
        return super().forward(x)


def test_workers_import_daskdl_while_the_client_tries_the_model(client, monkeypatch):
    name = "daskdl.training.parameter_averaging"

    def take_out():
        sys.taken_out = sys.modules.pop(name, None)

    def put_back():
        if (module := sys.__dict__.pop("taken_out")) is not None:
            sys.modules[name] = module

    def imported():
        return all(client.run(lambda: name in sys.modules).values())

    monkeypatch.setitem(globals(), "CHECKS", [lambda: poll_for(imported, 30)])
    client.run(take_out)

    try:
        trainer(client, model=Checked(20, 4)).fit(X, Y)
    finally:
        client.run(put_back)


@pytest.fixture
def apart(tmp_path):
    """A scheduler in a process of its own, and a worker."""
    with ProcessCluster(tmp_path) as cluster:
        cluster.grow()
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ((hide, "daskdl"), "ModuleNotFoundError"),
        ((age, "daskdl", "0.0.9"), "daskdl 0.0.9"),
    ],
    ids=["missing", "older"],
)
def test_a_scheduler_with_wrong_packages_is_named(apart, change, what):
    apart.client.run_on_scheduler(*change)

    with pytest.raises(daskdl.RunError) as caught:
        fit(apart.client)

    where = re.escape(f"the scheduler, {apart.client.scheduler.address}: {what}")
    assert re.search(where, str(caught.value))
    assert "worker" not in str(caught.value).split("\n")[1]


# ---- workers that come during a fit

OLD_DASKDL = "import daskdl.config; daskdl.config.VERSION = '0.0.9'"
OLD_TORCH = "import torch; torch.__version__ = '1.13.1+cu117'"
NO_DASKDL = "import sys; sys.modules['daskdl'] = None"
# In which threads modules are looked for: what is imported before is not.
WATCHED = """
import sys, threading

class Watch:
    def find_spec(self, name, path=None, target=None):
        sys.imported.append((name, threading.current_thread().name))

sys.imported = []
sys.meta_path.insert(0, Watch())
"""


MANY, LABELS = rows(count=960)


@pytest.fixture
def logged():
    """Warnings of the client so far that match a pattern."""
    messages = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("daskdl")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield lambda pattern: [m for m in messages if re.search(pattern, m)]
    logger.removeHandler(handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preload", "what"),
    [
        (OLD_DASKDL, r"daskdl 0\.0\.9"),
        (OLD_TORCH, r"torch 1\.13\.1\+cu117"),
        (NO_DASKDL, r"ModuleNotFoundError: .*daskdl"),
    ],
    ids=["older daskdl", "older torch", "no daskdl"],
)
def test_a_worker_with_other_versions_takes_no_part_and_is_reported(
    apart, logged, preload, what
):
    first = set(apart.client.nthreads())
    script = Script(
        (1, lambda: apart.grow(preload)),
        (lambda row: logged(what) or row["epoch"] > 2000, apart.grow),  # one with all
        (2, enough),
    )
    script.run(trainer(apart.client), MANY, LABELS)

    (message,) = logged(what)
    workers = set(apart.client.nthreads())
    (address,) = (worker for worker in workers - first if worker in message)
    assert f"worker {address} has joined the cluster, but is not used" in message
    assert f"the client has daskdl {daskdl.__version__} and torch" in message
    assert "install the same daskdl" in message
    assert max(row["replicas"] for row in script.rows) == 2
    assert len(workers) == 3


@pytest.mark.slow
def test_a_new_worker_imports_daskdl_in_a_thread(apart):
    script = Script((1, lambda: apart.grow(WATCHED)), (2, enough))

    script.run(trainer(apart.client), MANY, LABELS)

    def imported():
        return getattr(sys, "imported", None), threading.main_thread().name

    answers = apart.client.run(imported).values()
    ((modules, of_the_loop),) = (answer for answer in answers if answer[0] is not None)
    threads = dict(reversed(modules))  # where each was looked for first
    assert {"daskdl", "torch", "daskdl.training.dask_backend"} <= threads.keys()
    packages = ("daskdl", "torch", "numba")
    on_the_loop = [
        name
        for name, thread in threads.items()
        if name.split(".")[0] in packages and thread == of_the_loop
    ]
    assert on_the_loop == []


PRELOADED = """
import asyncio, sys
from distributed import Scheduler

async def show():
    preloaded = {"preload": "daskdl.channel.scheduler"}
    async with Scheduler(port=0, dashboard=False, **preloaded) as scheduler:
        print("daskdl.training.dask_backend" in sys.modules)
        print([name for name in scheduler.plugins if "daskdl" in name])

asyncio.run(show())
"""


def test_a_scheduler_that_preloads_daskdl_has_what_the_first_fit_needs():
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert done.stdout == f"True\n[{NAME!r}]\n", done.stderr
