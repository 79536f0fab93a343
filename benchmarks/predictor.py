"""Many callers of one model: a predictor, and the model behind a lock.

Question: With many callers at once, how many calls per second are answered, and how
          long does each take: by replicas on workers, by replicas in this process, and
          by the model itself behind a lock?
Counted:  Time from the call to its answer; each caller is a thread that calls again as
          soon as it has an answer, with one row. Throughput is all answers divided by
          the time from the first call to the last answer. Workers are processes of this
          machine; torch has one thread everywhere. "proxy" goes through Dask's
          scheduler, "direct" to the workers. Medians of `--rounds` rounds, in turns,
          after calls to warm up.
Run:      python -m benchmarks predictor --calls 1500
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_client
from benchmarks.results import Question, in_turns, medians
from benchmarks.work import perceptron

CALLERS = (1, 8, 64)
MODELS = {
    "small": (64, 128, 10),  # 10,000 parameters: much less time than a request
    "large": (1024, 4096, 1024),  # 8 million: one row takes nearly as long as 32
}
WORKERS = 2

Call = Callable[[np.ndarray], object]


def one_by_one(model: nn.Module) -> Call:
    """A server with one model and many threads."""
    lock = threading.Lock()

    def call(x: np.ndarray) -> np.ndarray:
        with lock, torch.inference_mode():
            return model(torch.from_numpy(x)).numpy()

    return call


def measure(call: Call, callers: int, calls: int, width: int) -> dict[str, float]:
    rows = np.random.default_rng(0).normal(size=(callers, 1, width)).astype(np.float32)
    start = threading.Barrier(callers + 1)

    def work(row: np.ndarray) -> list[float]:
        taken = []
        start.wait()
        for _ in range(max(1, calls // callers)):
            began = time.perf_counter()
            call(row)
            taken.append(time.perf_counter() - began)
        return taken

    with ThreadPoolExecutor(callers) as threads:
        futures = [threads.submit(work, row) for row in rows]
        start.wait()
        began = time.perf_counter()
        taken = [seconds for future in futures for seconds in future.result()]
        elapsed = time.perf_counter() - began
    p50, p99 = 1e3 * np.quantile(taken, [0.5, 0.99])
    return {"calls_per_s": len(taken) / elapsed, "p50_ms": p50, "p99_ms": p99}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    with (
        local_client(WORKERS) as proxy,
        Client(proxy.cluster, set_as_default=False, direct_to_workers=True) as direct,
    ):
        for name, widths in MODELS.items():
            torch.manual_seed(0)
            model = perceptron(*widths).eval()
            with contextlib.ExitStack() as ends:
                ways: dict[str, Call] = {"one by one": one_by_one(model)}
                clients = {"threads": False, "proxy": proxy, "direct": direct}
                for how, client in clients.items():
                    predictor = daskdl.Predictor(model, replicas=WORKERS, client=client)
                    ways[f"predictor, {how}"] = ends.enter_context(predictor)
                for callers in CALLERS:
                    for call in ways.values():
                        measure(call, callers, max(64, asked.calls // 10), widths[0])
                    cases = {
                        how: partial(measure, call, callers, asked.calls, widths[0])
                        for how, call in ways.items()
                    }
                    for how, rounds in in_turns(cases, asked.rounds).items():
                        case = {"case": f"{name}, {how}", "callers": callers}
                        yield case | medians(rounds)


QUESTION = Question(
    "predictor",
    __doc__,
    rows,
    "case callers:d calls_per_s:,.0f p50_ms:.2f p99_ms:.2f",
    {
        "--calls": {"type": int, "default": 1500, "help": "of each measurement"},
        "--rounds": 3,
    },
)
