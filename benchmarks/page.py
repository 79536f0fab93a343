"""What the page on Dask's dashboard costs training.

Question: How much do training and the scheduler compute for the page `/daskdl`, and
          how much when somebody looks at it?
Counted:  CPU time, which other work on the machine changes less than the speed: of both
          worker processes, per step, and of the scheduler's process, as a share of a
          core; both during a `fit`, for a network of 5.8 million parameters and batches
          of 64. Baseline: the same fit while replicas report nothing to the page.
          looked at: another process opens the page, and asks for the runs and for the
          section of this one each second, as a browser does; crowd: four of these. Also
          the longest pause of the scheduler's event loop during the fit. All run in
          turn, each on a new cluster, `--rounds` times; medians.
Run:      python -m benchmarks page --rounds 7
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from distributed import Client

from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, median_ratio, medians
from benchmarks.work import BATCH, samples
from daskdl.channel.remote import RemoteChannel

ROWS = 6_400
CASES = {  # whether replicas report, and the number of viewers
    "no reports": (False, 0),
    "page": (True, 0),
    "looked at": (True, 1),
    "crowd": (True, 4),
}
LOOK_S = 0.002


def reporting(enabled: bool) -> None:
    """On a worker: let replicas report to the page, or not."""
    RemoteChannel.has_dashboard = enabled


VIEWER = """
import json, sys, time, urllib.request

def get(path):
    with urllib.request.urlopen(sys.argv[1] + path) as answer:
        return answer.read()

get("daskdl")
print("open", flush=True)
while True:
    for run in json.loads(get("daskdl/runs"))["runs"]:
        if run["ended"] is None:
            get("daskdl/runs/" + run["id"])
    time.sleep(1)
"""


@contextlib.contextmanager
def looking(client: Client) -> Iterator[None]:
    """Have the page open, as a browser has."""
    port = client.scheduler_info()["services"]["dashboard"]
    command = [sys.executable, "-c", VIEWER, f"http://127.0.0.1:{port}/"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as viewer:
        assert viewer.stdout is not None
        try:
            if viewer.stdout.readline() != b"open\n":
                raise SystemExit(f"the page of {client} could not be opened")
            yield
        finally:
            viewer.kill()


@contextlib.contextmanager
def pauses_of(client: Client) -> Iterator[list[float]]:
    """Measure for how long the event loop of the scheduler pauses, seconds."""
    pauses: list[float] = []

    async def watch() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.perf_counter()
            pauses.append(now - before - LOOK_S)
            before = now

    loop = client.cluster.loop.asyncio_loop
    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    try:
        yield pauses
    finally:
        watching.cancel()


def measured(client: Client, case: str, epochs: int) -> dict[str, float]:
    reports, viewers = CASES[case]
    client.run(reporting, reports)
    x, y = samples(ROWS)
    with contextlib.ExitStack() as stack:
        for _ in range(viewers):
            stack.enter_context(looking(client))
        pauses = stack.enter_context(pauses_of(client))
        before, scheduler_cpu_s = client.run(time.process_time), time.process_time()
        began = time.perf_counter()
        history = trainer(client).fit(x, y, epochs=epochs, batch_size=BATCH)
        seconds = time.perf_counter() - began
        scheduler_cpu_s = time.process_time() - scheduler_cpu_s
        after = client.run(time.process_time)
    steps = sum(history.column("examples")) / BATCH
    return {
        "samples_per_s": history[-1]["examples_per_s"],
        "worker_ms": 1e3 * (sum(after.values()) - sum(before.values())) / steps,
        "scheduler_cores": scheduler_cpu_s / seconds,
        "longest_pause_ms": 1e3 * max(pauses),
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rounds_of: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(asked.rounds):
        for case, rounds in rounds_of.items():
            with local_client(2) as client:
                measured(client, "no reports", 1)  # begins the page, and compiles
                rounds.append(measured(client, case, asked.epochs))
    base = rounds_of["no reports"]
    for case, rounds in rounds_of.items():
        ratio = median_ratio(rounds, base, "worker_ms")
        yield {"case": case, **medians(rounds), "ratio": ratio, "rounds": rounds}


QUESTION = Question(
    "page",
    __doc__,
    rows,
    "case worker_ms:.2f ratio:.3f scheduler_cores:.3f longest_pause_ms:.0f "
    "samples_per_s:,.0f",
    {"--rounds": 7, "--epochs": 3},
)
