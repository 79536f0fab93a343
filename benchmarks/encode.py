"""Cost of finding and taking one update, and of applying one.

Question: what does an exchange add to a step, in passes over memory?
Counted:  ``find`` and ``commit_`` of the kernels on residuals of a normal
          distribution; ``apply_`` of 25,000 entries. Not packing, not sending.
Baseline: ``np.add(r, u, out=r)`` over as many float32, what Strom's update of the
          residual costs before anything is searched.
Run:      python -m benchmarks encode --size 25_000_000
"""

import argparse
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import bars
from benchmarks.results import Question
from daskdl.compression.flat import empty
from daskdl.compression.kernels import VectorGroup
from daskdl.compression.kernels_numba import NumbaGroup

GRID = 2.0**-24
CPU = torch.device("cpu")
DENSITIES = (1e-4, 1e-3, 7e-3, 2.5e-2)
ROUNDS = 11  # the median of so many, cases taken in turn


@dataclass(frozen=True)
class Row:
    case: str
    density: float  # entries / parameters
    ms: float  # median, milliseconds
    ratio: float  # to the baseline of the same run


class Case:
    """A replica whose residual has so many entries above the threshold."""

    def __init__(self, size, density, kind=NumbaGroup):
        self.density = density
        # Allocated as a replica's own vectors are.
        local = empty(size, torch.float32, CPU)
        local.normal_(0, 1e-2, generator=torch.Generator().manual_seed(0))
        self.shared = empty(size, torch.int32, CPU).fill_(1)
        self.group = kind(local, local, self.shared, 0)
        sample = local[:1_000_000].abs()
        threshold = sample.kthvalue(int(sample.numel() * (1 - density))).values.item()
        self.count = round(threshold / GRID)

    def find(self):
        return self.group.find(self.count, GRID)

    def commit(self, entries, multiple):
        bound = multiple * self.count * GRID
        self.group.commit_(entries, self.count, GRID, bound)


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def encode_ms(case, multiple=math.inf) -> float:
    """Find and take once; shared is put back outside of the time."""
    ms = timed(lambda: case.commit(case.find(), multiple))
    case.shared.fill_(1)
    return ms


def cases(size):
    """(name, density, work); work returns milliseconds."""
    residual, update = (np.ones(size, np.float32) for _ in range(2))
    yield (
        "np.add(r, u, out=r) (baseline)",
        1.0,
        lambda: timed(lambda: np.add(residual, update, out=residual)),
    )
    for density in DENSITIES:
        case = Case(size, density)
        yield "find", density, lambda case=case: timed(case.find)
        yield "find + commit_", density, lambda case=case: encode_ms(case)
        yield (
            "find + commit_, clipped at 5",
            density,
            lambda case=case: encode_ms(case, multiple=5.0),
        )
    plain = Case(size, 1e-3, VectorGroup)
    yield "find + commit_, torch operations", 1e-3, lambda: encode_ms(plain)
    case = Case(size, 1e-3)
    chosen = np.random.default_rng(0).choice(size, 25_000, replace=False)
    entries = torch.from_numpy(np.sort(chosen).astype(np.int32) + 1)
    yield (
        "apply_ of 25,000 entries",
        25_000 / size,
        lambda: timed(lambda: case.group.apply_(entries, 1, GRID)),
    )


def rows(asked):
    torch.set_num_threads(1)
    table = list(cases(asked.size))
    taken = [[work() for _, _, work in table] for _ in range(ROUNDS + 1)][1:]
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    for (name, density, _), ms in zip(table, medians, strict=True):
        yield Row(name, density, ms, ms / medians[0])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=25_000_000, help="parameters")


QUESTION = Question(
    "encode",
    __doc__,
    options,
    rows,
    {"case": "", "density": ".1e", "ms": ".2f", "ratio": ".2f"},
    lambda result: bars(result, "ratio", "case", "density"),
)
