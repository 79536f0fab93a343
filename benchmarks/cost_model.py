"""A model of the channel's cost, fitted to the emulation, for more replicas.

Question: How many replicas can one scheduler serve, and how much speed do they lose?
Counted:  CPU time of the scheduler and of all workers, in cores, as sums of terms with
          coefficients >= 0, fitted by least squares to the rows of `emulation` with up
          to 64 replicas, checked on rows with more, where the machine was not full, and
          then extrapolated. Each routing has its own coefficients.

          With n replicas on w workers, r updates per second of each, at most m requests
          per second to a worker, and s heartbeats per second of all replicas:

          plain:  scheduler = a + b n r + c w min(n r, m) + d w n r KB
                  workers   = e w + f n r + g w min(n r, m) + h w n r KB + i n n r
          mesh:   scheduler = a + b s + c s n
                  workers   = e w + f n r + g n n r + h n n r KB
          merged: scheduler = a + b n + c n r + d n r KB
                  workers   = e w + f n + g n r

          The terms are: a constant; updates made; requests to workers, or heartbeats
          and the replicas that their answers name; bytes, or with merged those of the
          updates that are added up; entries in inboxes. With merged, n replicas have as
          many heartbeats, and each gets one sum for all updates.

          Extrapolated rows assume one replica per worker, each with a core of its own
          that also computes, a core for the scheduler, and links that carry the bytes.
          A replica then loses the share of its core that its worker needs. Beyond one
          core of the scheduler ("full") updates arrive later. Applying the entries of
          others is left out.
Run:      python -m benchmarks cost-model
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.results import Question, load, newest
from daskdl.channel.routing import beat_s
from daskdl.channel.scheduler import PACE_S
from daskdl.config import Timeouts

FITTED = 64  # replicas, at most
FULL = 0.9  # share of this machine's cores
EXTRAPOLATED = (64, 128, 256, 512)  # replicas


def terms_of(row: Mapping[str, Any]) -> tuple[dict[str, list[float]], float]:
    """The terms of the scheduler and of the workers, and updates/s of a replica."""
    n, w, kilobytes = row["replicas"], row["workers"], row["kilobytes"]
    speed = row.get("efficiency") or 1.0
    rate = speed * 1000 / row["step_ms"] / row["exchange_every"]
    if row["routing"] == "mesh":
        beats = n / beat_s(n, Timeouts.from_config())
        received = n * (n - 1) * rate
        scheduler = [1.0, beats, beats * n]
        workers = [w, n * rate, received, received * kilobytes]
    elif row["routing"] == "merged":
        scheduler = [1.0, n, n * rate, n * rate * kilobytes]
        workers = [w, n, n * rate]
    else:
        requests = w * min(n * rate, 1 / PACE_S)
        scheduler = [1.0, n * rate, requests, w * n * rate * kilobytes]
        workers = [w, *scheduler[1:], n * n * rate]
    return {"scheduler": scheduler, "workers": workers}, rate


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    path = asked.measured or newest()["emulation"]
    result = load(path)
    asked.notes.append(f"fitted to {path.name}")
    most = FULL * int(result.hardware["cores"])

    def kind_of(row: Mapping[str, Any]) -> str:
        if row["scheduler_cpu"] + row["workers_cpu"] > most:
            return "full"
        return "fitted" if row["replicas"] <= FITTED else "held out"

    fitted: dict[str, list[Mapping[str, Any]]] = {}
    for row in result.rows:
        if kind_of(row) == "fitted":
            fitted.setdefault(row["routing"], []).append(row)
    coefficients: dict[tuple[str, str], Any] = {}
    for routing, name in itertools.product(fitted, ("scheduler", "workers")):
        terms = np.array([terms_of(row)[0][name] for row in fitted[routing]])
        cpu = np.array([row[f"{name}_cpu"] for row in fitted[routing]])
        coefficients[routing, name], _ = nnls(terms, cpu)
        shown = ", ".join(f"{each:.3g}" for each in coefficients[routing, name])
        asked.notes.append(f"coefficients of the {name}, {routing}: {shown}")

    def predicted(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
        terms, rate = terms_of(row)
        scheduler, workers = (
            float(np.dot(terms[name], coefficients[row["routing"], name]))
            for name in ("scheduler", "workers")
        )
        efficiency = None
        if kind == "extrapolated":
            left_to_train = max(0.0, 1 - workers / row["workers"])
            efficiency = left_to_train / max(1.0, scheduler)
            kind += ", full" * (scheduler >= 1)
        return dict(row) | {
            "seen": kind,
            "scheduler_model": scheduler,
            "workers_model": workers,
            "efficiency": efficiency,
            "megabits_per_s": 8e-3 * row["replicas"] * rate * row["kilobytes"],
        }

    for row in result.rows:
        if row["routing"] in fitted:
            yield predicted(row, kind_of(row))
    kilobytes = float(np.median([row["kilobytes"] for row in result.rows]))
    cases = {(row["step_ms"], row["exchange_every"]) for row in result.rows}
    for routing, (step_ms, every), n in itertools.product(
        fitted, sorted(cases), EXTRAPOLATED
    ):
        case = {"replicas": n, "workers": n, "kilobytes": kilobytes}
        case |= {"step_ms": step_ms, "exchange_every": every, "routing": routing}
        yield predicted(case, "extrapolated")


QUESTION = Question(
    "cost-model",
    __doc__,
    rows,
    "routing replicas:d step_ms:g exchange_every:d seen scheduler_cpu:.0% "
    "scheduler_model:.0% workers_cpu:.0% workers_model:.0% efficiency:.3f "
    "megabits_per_s:.1f",
    {"--measured": {"type": Path, "help": "a result of `emulation`; default: newest"}},
)
