"""How a model gets to the workers of a cluster with slow links.

Question: How long does a fit take to start, beside what the client's link needs for one
          copy of the model? How long do workers take to join it?
Counted:  From the call of `fit` until each replica has made its first step. The
          scheduler, the client and each worker are hosts of their own, network
          namespaces of this machine, whose links have one rate in each direction. A fit
          before it has imported and compiled everything. Copy is the bytes of the
          parameters, divided by the rate; unlimited is the same call without limits.
          With `--calls evaluate`, until an evaluation in which every worker takes part
          has returned; with `predictor`, until a predictor has a replica on each worker
          and has answered.
          With `--calls join`, so many workers come at once to a fit that trains on two
          others: from their start as workers of Dask, by processes that have imported
          everything, until each has made its first step. Each loads the model and a
          snapshot, and the others send updates meanwhile, which are merged. Sent:
          megabytes that the busiest worker, and the scheduler, have sent in this time,
          headers included.
Needs:    Linux and root.
Run:      python -m benchmarks start
          python -m benchmarks start --calls join --workers 1 4 16
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import math
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distributed import Client, Worker, get_worker
from torch import nn

import daskdl
from benchmarks.clusters import trainer
from benchmarks.first_step import FirstStep
from benchmarks.namespaces import UNLIMITED, Place, end_tree, hosts
from benchmarks.results import ROOT, Question, medians
from benchmarks.work import perceptron

SCHEDULER, CLIENT, FIRST_WORKER = range(3)  # hosts
FEATURES, CLASSES = 16, 4
PORT = 8786
READY_S = 240.0
TRAINING = 2  # workers to which others come
PAUSE_S = 0.25  # in each step while they come


def model(width: int) -> nn.Module:
    """A model of about `width` squared parameters."""
    return perceptron(FEATURES, width, width, CLASSES)


class Stop(FirstStep):
    """Ends the fit when so many replicas have made their first step."""

    def __init__(self, folder: str, replicas: int) -> None:
        super().__init__(folder)
        self._replicas = replicas

    def on_step_end(self, step: daskdl.Step) -> None:
        super().on_step_end(step)
        if len(os.listdir(self._folder)) >= self._replicas:
            step.stop()


def start_s(client: Client, width: int, workers: int) -> float:
    """Seconds from `fit` until the last replica has made its first step."""
    torch.manual_seed(0)
    rows = 8 * workers
    x, y = torch.randn(rows, FEATURES), torch.arange(rows) % CLASSES
    with tempfile.TemporaryDirectory() as folder:
        stop = Stop(folder, workers)
        fitted = trainer(client, functools.partial(model, width), callbacks=[stop])
        began = time.time()
        fitted.fit(x, y, batch_size=1, epochs=100)
        times = [float(path.read_text()) for path in Path(folder).iterdir()]
        assert len(times) == workers
        return max(times) - began


class Meet:
    """A transform that waits until all workers have come to it."""

    def __init__(self, folder: str, workers: int) -> None:
        self._folder, self._workers = folder, workers

    def __call__(self, batch: Any) -> Any:
        try:
            place = get_worker().address.replace("/", "-")
        except ValueError:  # the client tries it, too
            return batch
        Path(self._folder, place).touch()
        until = time.monotonic() + READY_S
        while len(os.listdir(self._folder)) < self._workers:
            assert time.monotonic() < until, "a worker has no rows"
            time.sleep(0.005)
        return batch


def evaluate_s(client: Client, width: int, workers: int) -> float:
    """Seconds of an evaluation of few rows, in which all workers take part."""
    torch.manual_seed(0)
    rows = 8 * workers
    x, y = torch.randn(rows, FEATURES), torch.arange(rows) % CLASSES
    options = {"loss": nn.CrossEntropyLoss(), "client": client, "batch_size": 8}
    evaluated = model(width)
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        daskdl.evaluate(evaluated, x, y, transform=Meet(folder, workers), **options)
        return time.time() - began


class Signs(NamedTuple):
    """Where processes see how far the others are.

    Attributes:
        steps: Has a file of each replica that has made its first step.
        gate: A file that exists while workers come to the fit, or are there.
    """

    steps: Path
    gate: Path

    @classmethod
    def under(cls, folder: str) -> "Signs":
        return cls(Path(folder, "steps"), Path(folder, "gate"))


class Gather(Stop):
    """Lets the others come once those that train have made a step."""

    def __init__(self, signs: Signs, replicas: int) -> None:
        super().__init__(str(signs.steps), replicas)
        self._signs = signs

    def on_step_end(self, step: daskdl.Step) -> None:
        time.sleep(PAUSE_S)
        super().on_step_end(step)
        if len(os.listdir(self._signs.steps)) >= TRAINING:
            with contextlib.suppress(FileExistsError):
                self._signs.gate.touch(exist_ok=False)


def gather(client: Client, width: int, workers: int, signs: Signs) -> None:
    """Fit on two workers until others have come and each has made a step."""
    wait_until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == TRAINING)
    torch.manual_seed(0)
    rows = 2**10
    x, y = torch.randn(rows, FEATURES), torch.arange(rows) % CLASSES
    callbacks = [Gather(signs, TRAINING + workers)]
    fitted = trainer(
        client,
        functools.partial(model, width),
        callbacks=callbacks,
        master=daskdl.GradientSharing(routing="merged"),
    )
    fitted.fit(x, y, batch_size=1, epochs=100)


def wait_until(ready: Callable[[], bool], longest_s: float = READY_S) -> None:
    until = time.monotonic() + longest_s
    while not ready():
        assert time.monotonic() < until, "nothing happens"
        time.sleep(0.01)


async def come_and_go(scheduler: str, host: str, signs: Signs) -> None:
    """Be a worker whenever the gate is open, in a process that stays."""
    is_open = signs.gate.exists
    while True:
        await asyncio.to_thread(wait_until, is_open, math.inf)
        async with Worker(scheduler, host=host, nthreads=1, dashboard=False):
            await asyncio.to_thread(wait_until, lambda: not is_open(), math.inf)


def predictor_s(client: Client, width: int, workers: int) -> float:
    """Seconds until a predictor with a replica on each worker has answered."""
    torch.manual_seed(0)
    served, x = model(width), torch.randn(1, FEATURES)
    began = time.time()
    with daskdl.Predictor(served, replicas=workers, client=client) as predictor:
        predictor(x)
        return time.time() - began


CALLS = {"fit": start_s, "evaluate": evaluate_s, "predictor": predictor_s}
JOIN = "join"


def serve(address: str, width: int, workers: int, signs: Signs) -> None:
    """Make the call that each line of the standard input names; print the seconds."""
    with Client(address, set_as_default=False) as client:
        for line in sys.stdin:
            name = line.strip()
            if name == JOIN:
                gather(client, width, workers, signs)
                print(flush=True)
            else:
                client.wait_for_workers(workers, timeout=READY_S)
                print(CALLS[name](client, width, workers), flush=True)


@contextlib.contextmanager
def cluster(place: Place, width: int, workers: int, *, join: bool) -> Iterator[Any]:
    """A function that lets a client on a host of its own make a call.

    It returns seconds and, if workers join, the megabytes that were sent meanwhile.
    """
    addresses = place.addresses
    port = f"--port={PORT}"
    python = [sys.executable, "-m"]
    scheduler = f"tcp://{addresses[SCHEDULER]}:{PORT}"
    hosts_of_workers = range(FIRST_WORKER, len(addresses))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        signs = Signs.under(folder)
        signs.steps.mkdir()

        def begin(host: int, *command: str, **pipes: Any) -> Any:
            process = subprocess.Popen(
                place.on(host, *python, *command), env=environment, cwd=ROOT, **pipes
            )
            ends.callback(end_tree, process)
            return process

        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        where = f"--host={addresses[SCHEDULER]}"
        options = [where, port, "--no-dashboard"]
        begin(SCHEDULER, "distributed.cli.dask_scheduler", *options, **quiet)
        for host in hosts_of_workers:
            if join and host >= FIRST_WORKER + TRAINING:
                begin(
                    host,
                    "benchmarks.start",
                    scheduler,
                    addresses[host],
                    folder,
                    **quiet,
                )
                continue
            options = [f"--host={addresses[host]}", "--nthreads=1", "--no-nanny"]
            options += ["--no-dashboard", f"--local-directory={folder}"]
            program = "distributed.cli.dask_worker"
            begin(host, program, scheduler, *options, **quiet)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        asked = [scheduler, str(width), str(workers), folder]
        client = begin(CLIENT, "benchmarks.start", *asked, **pipes)

        def sent_mb() -> list[float]:
            places = (SCHEDULER, *hosts_of_workers)
            return [place.sent_bytes(host) / 1e6 for host in places]

        def ask(name: str) -> None:
            client.stdin.write(f"{name}\n")
            client.stdin.flush()

        def call(name: str) -> dict[str, float]:
            ask(name)
            if name != JOIN:
                return {"seconds": float(client.stdout.readline())}
            wait_until(signs.gate.exists)
            began_at, before = signs.gate.stat().st_mtime, sent_mb()
            replicas = TRAINING + workers
            wait_until(lambda: len(os.listdir(signs.steps)) >= replicas)
            by_scheduler, *by_workers = map(operator.sub, sent_mb(), before)
            assert client.stdout.readline()
            paths = list(signs.steps.iterdir())
            ended_at = max(float(path.read_text()) for path in paths)
            for path in (*paths, signs.gate):
                path.unlink()
            return {
                "seconds": ended_at - began_at,
                "sent_mb": max(by_workers),
                "scheduler_mb": by_scheduler,
            }

        yield call


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    nbytes = 4 * sum(p.numel() for p in model(asked.width).parameters())
    for name, workers in itertools.product(asked.calls, asked.workers):
        join = name == JOIN
        count = workers + TRAINING if join else workers
        with (
            hosts(FIRST_WORKER + count, loopback=False) as place,
            cluster(place, asked.width, workers, join=join) as call,
        ):
            for rate in asked.rates:
                place.limit(UNLIMITED)
                call(name)
                rounds = []
                for _ in range(asked.runs):
                    place.limit(UNLIMITED)
                    unlimited_s = call(name)["seconds"]
                    place.limit(f"{rate}mbit")
                    rounds.append({"unlimited": unlimited_s, **call(name)})
                copy_s = nbytes * 8 / (rate * 1e6)
                numbers = medians(rounds)
                yield {
                    "call": name,
                    "workers": workers,
                    "mbit": rate,
                    "mb": nbytes / 1e6,
                    "copy": copy_s,
                    **numbers,
                    "times": numbers["seconds"] / copy_s,
                }


QUESTION = Question(
    "start",
    __doc__,
    rows,
    "call workers:d mbit:d mb:.1f copy:.2f seconds:.2f unlimited:.2f times:.2f "
    "sent_mb:.1f scheduler_mb:.1f",
    {
        "--calls": {"nargs": "+", "choices": [*CALLS, JOIN], "default": ["fit"]},
        "--workers": [2, 4, 8],
        "--rates": [10],
        "--width": 640,
        "--runs": 3,
    },
)

if __name__ == "__main__":  # on a host of its own
    address, *arguments, folder_of_signs = sys.argv[1:]
    if len(arguments) == 1:
        (host,) = arguments
        asyncio.run(come_and_go(address, host, Signs.under(folder_of_signs)))
    else:
        serve(address, *map(int, arguments), Signs.under(folder_of_signs))
