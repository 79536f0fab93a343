"""Many callers of one model: a predictor against calling the model one by one.

Question: how many calls a second are answered, and how long does one take, by so many
          callers at once; with replicas on workers, with replicas in this process, and
          with the model called directly, under a lock, by the same callers?
Counted:  time from the call to its answer; each caller is a thread that calls again as
          soon as it has one, with one row of its own each time. Throughput is all
          answers through the time from the first call to the last answer. All three
          in one run, one after the other, after calls to warm up; workers are processes
          of this machine with one thread each, torch has one thread everywhere. "proxy"
          goes through Dask's scheduler, "direct" to the workers. The median of
          `--rounds` rounds, which alternate.
Run:      python -m benchmarks predictor --calls 1500
"""

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question

CALLERS = (1, 8, 64)
MODELS = {
    "small": (64, 128, 10),  # 10,000 parameters: a row takes a small part of a request
    "large": (1024, 4096, 1024),  # 8 M: a row takes nearly as long as 32
}
WORKERS = 2

Call = Callable[[np.ndarray], object]


@dataclass(frozen=True)
class Row:
    case: str
    callers: int
    calls_per_s: float
    p50_ms: float
    p99_ms: float


def perceptron(name: str) -> nn.Module:
    inner, hidden, outer = MODELS[name]
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inner, hidden), nn.ReLU(), nn.Linear(hidden, outer)
    ).eval()


def one_by_one(model: nn.Module) -> Call:
    """What a server does that has one model and many threads."""
    lock = threading.Lock()

    def call(x: np.ndarray) -> np.ndarray:
        with lock, torch.inference_mode():
            return model(torch.from_numpy(x)).numpy()

    return call


def measure(call: Call, callers: int, calls: int, width: int) -> tuple[float, list]:
    """Calls per second, and the seconds of each call."""
    rows = np.random.default_rng(0).normal(size=(callers, 1, width)).astype(np.float32)
    taken: list[list[float]] = [[] for _ in range(callers)]
    start = threading.Barrier(callers + 1)

    def work(number: int) -> None:
        start.wait()
        for _ in range(max(1, calls // callers)):
            begun = time.perf_counter()
            call(rows[number])
            taken[number].append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    every = sorted(s for own in taken for s in own)
    return len(every) / seconds, every


def rows_of(name: str, ways: dict[str, Call], calls: int, rounds: int) -> list[Row]:
    width, found = MODELS[name][0], {}
    for callers in CALLERS:
        for way in ways.values():
            measure(way, callers, max(64, calls // 10), width)  # warm
        for _ in range(rounds):
            for how, way in ways.items():
                per_s, taken = measure(way, callers, calls, width)
                p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
                found.setdefault((how, callers), []).append((per_s, p50, p99))
    return [
        Row(f"{name}, {how}", callers, *map(statistics.median, zip(*own, strict=True)))
        for (how, callers), own in found.items()
    ]


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    with (
        local_cluster(WORKERS) as cluster,
        Client(cluster, set_as_default=False) as proxy,
        Client(cluster, set_as_default=False, direct_to_workers=True) as direct,
    ):
        for name in MODELS:
            model = perceptron(name)
            with contextlib.ExitStack() as ending:
                ways: dict[str, Call] = {"one by one": one_by_one(model)}
                clients = {"threads": False, "proxy": proxy, "direct": direct}
                for how, client in clients.items():
                    own = daskdl.Predictor(model, replicas=WORKERS, client=client)
                    ways[f"predictor, {how}"] = ending.enter_context(own)
                yield from rows_of(name, ways, asked.calls, asked.rounds)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=1500, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)


QUESTION = Question(
    "predictor",
    __doc__,
    options,
    rows,
    {"case": "", "callers": "d", "calls_per_s": ",.0f"}
    | {"p50_ms": ".2f", "p99_ms": ".2f"},
)
