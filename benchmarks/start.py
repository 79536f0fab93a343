"""How a model gets to the workers of a cluster with slow links.

Question: How long does a fit take to start, beside what the client's link needs for one
          copy of the model?
Counted:  From the call of `fit` until each replica has made its first step. The
          scheduler, the client and each worker are hosts of their own, network
          namespaces of this machine, whose links have one rate in each direction. A fit
          before it has imported and compiled everything. Copy is the bytes of the
          parameters, divided by the rate; unlimited is the same call without limits.
          With `--calls evaluate`, until an evaluation in which every worker takes part
          has returned.
Needs:    Linux and root.
Run:      python -m benchmarks start
"""

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distributed import Client, get_worker
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
        if len(os.listdir(self._folder)) == self._replicas:
            step.stop()


def start_s(client: Client, width: int, workers: int) -> float:
    """Seconds from `fit` until the last replica has made its first step."""
    torch.manual_seed(0)
    rows = 8 * workers
    data = torch.randn(rows, FEATURES), torch.arange(rows) % CLASSES
    with tempfile.TemporaryDirectory() as folder:
        stop = Stop(folder, workers)
        fitted = trainer(client, functools.partial(model, width), callbacks=[stop])
        began = time.time()
        fitted.fit(*data, batch_size=1, epochs=100)
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


CALLS = {"fit": start_s, "evaluate": evaluate_s}


def serve(address: str, width: int, workers: int) -> None:
    """Make the call that each line of the standard input names; print the seconds."""
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(workers, timeout=READY_S)
        for line in sys.stdin:
            print(CALLS[line.strip()](client, width, workers), flush=True)


@contextlib.contextmanager
def cluster(place: Place, width: int) -> Iterator[Any]:
    """A function that lets a client on a host of its own make one of `CALLS`.

    It returns seconds.
    """
    addresses = place.addresses
    port = f"--port={PORT}"
    python = [sys.executable, "-m"]
    scheduler = f"tcp://{addresses[SCHEDULER]}:{PORT}"
    workers = len(addresses) - FIRST_WORKER
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())

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
        for host in range(FIRST_WORKER, FIRST_WORKER + workers):
            options = [f"--host={addresses[host]}", "--nthreads=1", "--no-nanny"]
            options += ["--no-dashboard", f"--local-directory={folder}"]
            program = "distributed.cli.dask_worker"
            begin(host, program, scheduler, *options, **quiet)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        asked = [scheduler, str(width), str(workers)]
        client = begin(CLIENT, "benchmarks.start", *asked, **pipes)

        def call(name: str) -> float:
            client.stdin.write(f"{name}\n")
            client.stdin.flush()
            return float(client.stdout.readline())

        yield call


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    nbytes = 4 * sum(p.numel() for p in model(asked.width).parameters())
    for workers in asked.workers:
        with (
            hosts(FIRST_WORKER + workers, loopback=False) as place,
            cluster(place, asked.width) as call,
        ):
            for name, rate in itertools.product(asked.calls, asked.rates):
                place.limit(UNLIMITED)
                call(name)
                rounds = []
                for _ in range(asked.runs):
                    place.limit(UNLIMITED)
                    unlimited_s = call(name)
                    place.limit(f"{rate}mbit")
                    rounds.append({"unlimited": unlimited_s, "seconds": call(name)})
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
    "call workers:d mbit:d mb:.1f copy:.2f seconds:.2f unlimited:.2f times:.2f",
    {
        "--calls": {"nargs": "+", "choices": CALLS, "default": ["fit"]},
        "--workers": [2, 4, 8],
        "--rates": [10],
        "--width": 640,
        "--runs": 3,
    },
)

if __name__ == "__main__":  # the client, on a host of its own
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
