"""A model of the channel's cost, fitted to the emulation, for more replicas.

Question: How many replicas can one scheduler serve, and how much speed do they lose?
Counted:  CPU time of the scheduler and of all workers, in cores, as sums of terms with
          coefficients >= 0, fitted by least squares to the rows of `emulation` with up
          to 16 replicas, checked on rows with more, where the machine was not full, and
          then extrapolated.

          With n replicas on w workers, r updates per second of each, and at most m
          requests per second to a worker:

          scheduler = a + b n r + c w min(n r, m) + d w n r KB
          workers   = e w + f n r + g w min(n r, m) + h w n r KB + i n n r

          The terms are: a constant; updates received or made; requests to workers;
          bytes; entries in inboxes.

          Extrapolated rows assume one replica per worker, each with a core of its own
          that also computes, a core for the scheduler, links that carry the bytes, and
          routing "plain". A replica then loses the share of its core that its worker
          needs. Beyond one core of the scheduler ("full") updates arrive later.
          Applying the entries of others is left out.
Run:      python -m benchmarks cost-model
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.results import Question, load, newest
from daskdl.channel.scheduler import PACE_S

FITTED = 16  # replicas, at most
FULL = 0.9  # share of this machine's cores
EXTRAPOLATED = (64, 128, 256)  # replicas


def terms_of(row: Mapping[str, Any]) -> tuple[dict[str, list[float]], float]:
    """The terms of the scheduler and of the workers, and updates/s of a replica."""
    n, w, kilobytes = row["replicas"], row["workers"], row["kilobytes"]
    speed = row.get("efficiency") or 1.0
    rate = speed * 1000 / row["step_ms"] / row["exchange_every"]
    common = [n * rate, w * min(n * rate, 1 / PACE_S), w * n * rate * kilobytes]
    return {"scheduler": [1.0, *common], "workers": [w, *common, n * n * rate]}, rate


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    path = asked.measured or newest()["emulation"]
    result = load(path)
    asked.notes.append(f"fitted to {path.name}")
    most = FULL * int(result.hardware["cores"])

    def kind_of(row: Mapping[str, Any]) -> str:
        if row["scheduler_cpu"] + row["workers_cpu"] > most:
            return "full"
        return "fitted" if row["replicas"] <= FITTED else "held out"

    fitted = [row for row in result.rows if kind_of(row) == "fitted"]
    coefficients = {}
    for name in ("scheduler", "workers"):
        terms = np.array([terms_of(row)[0][name] for row in fitted])
        cpu = np.array([row[f"{name}_cpu"] for row in fitted])
        coefficients[name], _ = nnls(terms, cpu)
        shown = ", ".join(f"{each:.3g}" for each in coefficients[name])
        asked.notes.append(f"coefficients of the {name}: {shown}")

    def predicted(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
        terms, rate = terms_of(row)
        scheduler, workers = (
            float(np.dot(terms[name], values)) for name, values in coefficients.items()
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
        yield predicted(row, kind_of(row))
    kilobytes = float(np.median([row["kilobytes"] for row in result.rows]))
    cases = {(row["step_ms"], row["exchange_every"]) for row in result.rows}
    for step_ms, every in sorted(cases):
        for n in EXTRAPOLATED:
            case = {"replicas": n, "workers": n, "kilobytes": kilobytes}
            case |= {"step_ms": step_ms, "exchange_every": every}
            yield predicted(case, "extrapolated")


QUESTION = Question(
    "cost-model",
    __doc__,
    rows,
    "replicas:d step_ms:g exchange_every:d seen scheduler_cpu:.0% scheduler_model:.0% "
    "workers_cpu:.0% workers_model:.0% efficiency:.3f megabits_per_s:.1f",
    {"--measured": {"type": Path, "help": "a result of `emulation`; default: newest"}},
)
