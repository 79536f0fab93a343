"""Time to find and take the entries of an update, and to apply one.

Question: How many passes over memory does an exchange add to a step?
Counted:  ``find``, with levels, and ``commit_`` of the kernels on normally distributed
          residuals; ``apply_`` of 25,000 entries. Packing and sending are not included.
Baseline: ``np.add(r, u, out=r)`` over as many float32: the update of a residual alone.
Run:      python -m benchmarks encode --size 25_000_000
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.report import bars
from benchmarks.results import Question, in_turns, medians
from daskdl.compression.flat import empty
from daskdl.compression.kernels import VectorGroup
from daskdl.compression.kernels_numba import NumbaGroup

GRID = 2.0**-24
DENSITIES = (1e-4, 1e-3, 7e-3, 2.5e-2, 5e-2)
ENTRIES = 25_000
ROUNDS = 11


def timed(work: Callable[[], Any]) -> dict[str, float]:
    began = time.perf_counter()
    work()
    return {"ms": 1e3 * (time.perf_counter() - began)}


class Vector:
    """A replica's vectors, with a share of the residual above the threshold."""

    def __init__(
        self, size: int, density: float, kind: type[VectorGroup] = NumbaGroup
    ) -> None:
        cpu = torch.device("cpu")
        local = empty(size, torch.float32, cpu)
        local.normal_(0, 1e-2, generator=torch.Generator().manual_seed(0))
        self.shared = empty(size, torch.int32, cpu).fill_(1)
        self.group = kind(local, local, self.shared, 0)
        sample = local[:1_000_000].abs()
        threshold = sample.kthvalue(int(sample.numel() * (1 - density))).values.item()
        self.count = round(threshold / GRID)

    def find(self) -> Any:
        return self.group.find(self.count, GRID)

    def exchange(self, multiple: float = math.inf) -> dict[str, float]:
        """Find and commit; shared is restored outside of the measured time."""
        bound = multiple * self.count * GRID

        def both() -> None:
            entries, levels = self.find()
            self.group.commit_(entries, self.count, GRID, bound, levels_K=levels)

        found = timed(both)
        self.shared.fill_(1)
        return found


def cases(size: int) -> dict[tuple[str, float], Callable[[], dict[str, float]]]:
    """By name and density."""
    residual, update = (np.ones(size, np.float32) for _ in range(2))
    found: dict[tuple[str, float], Callable[[], dict[str, float]]] = {
        ("np.add(r, u, out=r) (baseline)", 1.0): lambda: timed(
            lambda: np.add(residual, update, out=residual)
        )
    }
    for density in DENSITIES:
        own = Vector(size, density)
        found["find", density] = lambda own=own: timed(own.find)
        found["find + commit_", density] = own.exchange
        found["find + commit_, clipped at 5", density] = lambda own=own: own.exchange(
            multiple=5.0
        )
    reference = Vector(size, 1e-3, VectorGroup)
    found["find + commit_, torch operations", 1e-3] = reference.exchange
    own = Vector(size, 1e-3)
    chosen = np.random.default_rng(0).choice(size, ENTRIES, replace=False)
    entries = torch.from_numpy(np.sort(chosen).astype(np.int32) + 1)
    found[f"apply_ of {ENTRIES:,} entries", ENTRIES / size] = lambda: timed(
        lambda: own.group.apply_(entries, 1, GRID)
    )
    return found


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    taken = in_turns(cases(asked.size), ROUNDS + 1)
    ms = {case: medians(rounds[1:])["ms"] for case, rounds in taken.items()}
    baseline, *_ = ms.values()
    for (name, density), own in ms.items():
        yield {"case": name, "density": density, "ms": own, "ratio": own / baseline}


QUESTION = Question(
    "encode",
    __doc__,
    rows,
    "case density:.1e ms:.2f ratio:.2f",
    {"--size": {"type": int, "default": 25_000_000, "help": "parameters"}},
    lambda result: bars(result, "ratio", "case", "density"),
)
