"""A model of what the channel costs, fitted to the emulation, for more replicas.

Question: how many replicas does one scheduler carry, and what do they lose by it?
Counted:  CPU time of the scheduler and of all workers, in cores, as a sum of terms with
          coefficients >= 0 by least squares, from the rows of `emulation` with up to
          16 replicas. It is checked on those with more, which it has not seen, where
          the machine was not full: and then extrapolated.

          With n replicas on w workers, r updates a second of each, and m the most
          requests that a pump makes in a second:

          scheduler = a + b n r + c w min(n r, m) + d w n r KB
          workers   = e w + f n r + g w min(n r, m) + h w n r KB + i n n r

          that is: what is always there; what comes in or is made; requests to workers;
          bytes; entries in inboxes.

          Extrapolated rows assume one replica for each worker, each with a core of its
          own that also computes, the scheduler with a core of its own, links that carry
          the bytes named, and routing "plain" whatever the number. A replica then loses
          the share of its core that its worker needs; and beyond one core of the
          scheduler the updates come later, which is told as "full". Not in it: adding
          the entries of others to the model.
Run:      python -m benchmarks cost-model
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.report import lines
from benchmarks.results import Question, load, newest
from daskdl.channel.scheduler import PACE_S

FITTED = 16  # replicas, at most
FULL = 0.9  # share of this machine's cores
FARTHER = (64, 128, 256)
REQUESTS_PER_S = 1 / PACE_S


@dataclass(frozen=True)
class Row:
    replicas: int
    step_ms: float
    exchange_every: int
    seen: str  # "fitted", "held out", "full" or "extrapolated"
    scheduler_cpu: float | None  # measured, of one core
    scheduler_model: float
    workers_cpu: float | None
    workers_model: float
    efficiency: float | None  # predicted, with cores of their own
    megabits_per_s: float  # that each worker receives


def scheduler_terms(row: Mapping[str, Any]) -> list[float]:
    n, w, rate, kilobytes = _of(row)
    requests = w * min(n * rate, REQUESTS_PER_S)
    return [1.0, n * rate, requests, w * n * rate * kilobytes]


def worker_terms(row: Mapping[str, Any]) -> list[float]:
    n, w, rate, kilobytes = _of(row)
    requests = w * min(n * rate, REQUESTS_PER_S)
    return [w, n * rate, requests, w * n * rate * kilobytes, n * n * rate]


def _of(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Replicas, workers, updates a second of each as they were made, and their size."""
    made = row.get("efficiency") or 1.0
    rate = made * 1000 / row["step_ms"] / row["exchange_every"]
    return row["replicas"], row["workers"], rate, row["kilobytes"]


def seen(row: Mapping[str, Any], cores: int) -> str:
    """Whether a row is one to fit, one to check, or of a machine that was full."""
    if row["scheduler_cpu"] + row["workers_cpu"] > FULL * cores:
        return "full"
    return "fitted" if row["replicas"] <= FITTED else "held out"


def farther(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same cases with more replicas, a worker for each."""
    cases = {(row["step_ms"], row["exchange_every"]) for row in measured}
    kilobytes = float(np.median([row["kilobytes"] for row in measured]))
    for step_ms, every in sorted(cases):
        for n in FARTHER:
            yield {
                "replicas": n,
                "workers": n,
                "step_ms": step_ms,
                "exchange_every": every,
                "kilobytes": kilobytes,
            }


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    path = arguments.measured or newest()["emulation"]
    result = load(path)
    arguments.notes.append(f"fitted to {path.name}")
    cores = int(result.hardware["cores"])
    fitted = [row for row in result.rows if seen(row, cores) == "fitted"]
    models = {}
    for name, terms in (("scheduler", scheduler_terms), ("workers", worker_terms)):
        of = np.array([terms(row) for row in fitted])
        models[name], _ = nnls(of, np.array([row[f"{name}_cpu"] for row in fitted]))
        told = ", ".join(f"{each:.3g}" for each in models[name])
        arguments.notes.append(f"coefficients of the {name}: {told}")
    for row in result.rows:
        yield _row(row, seen(row, cores), models)
    for row in farther(result.rows):
        yield _row(row, "extrapolated", models)


def _row(row: Mapping[str, Any], kind: str, models: Mapping[str, Any]) -> Row:
    n, w, rate, kilobytes = _of(row)
    scheduler = float(np.dot(scheduler_terms(row), models["scheduler"]))
    workers = float(np.dot(worker_terms(row), models["workers"]))
    own = workers / w
    return Row(
        int(n),
        row["step_ms"],
        row["exchange_every"],
        kind if kind != "extrapolated" or scheduler < 1 else "extrapolated, full",
        row.get("scheduler_cpu"),
        scheduler,
        row.get("workers_cpu"),
        workers,
        max(0.0, 1 - own) / max(1.0, scheduler) if kind == "extrapolated" else None,
        8e-3 * n * rate * kilobytes,
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", type=Path, help="result of `emulation`; newest")


QUESTION = Question(
    "cost-model",
    __doc__,
    options,
    rows,
    {"replicas": "d", "step_ms": "g", "exchange_every": "d", "seen": ""}
    | {"scheduler_cpu": ".0%", "scheduler_model": ".0%", "workers_cpu": ".0%"}
    | {"workers_model": ".0%", "efficiency": ".3f", "megabits_per_s": ".1f"},
    lambda result: lines(
        result, "replicas", "scheduler_model", "step_ms", "exchange_every"
    ),
)
