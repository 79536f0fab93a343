"""Time to find and take the entries of an update, and to apply one.

Question: How many passes over memory does an exchange add to a step?
Counted:  ``find``, with levels, and ``commit_`` of the kernels on normally distributed
          residuals; ``apply_`` of 25,000 entries. Packing and sending are not included.
Baseline: ``r.add_(u)`` of as many float32: the update of a residual alone.
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
from daskdl.compression.replica_vector import kernels_for

GRID = 2.0**-24
DENSITIES = (1e-4, 1e-3, 7e-3, 2.5e-2, 5e-2)
ENTRIES = 25_000
ROUNDS = 11


def timed(work: Callable[[], Any]) -> dict[str, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return {"ms": 1e3 * (time.perf_counter() - began)}


class Vector:
    """A replica's vectors, with a share of the residual above the threshold."""

    def __init__(
        self, size: int, density: float, device: torch.device, kind: type[VectorGroup]
    ) -> None:
        local = empty(size, torch.float32, device)
        local.normal_(0, 1e-2, generator=torch.Generator(device).manual_seed(0))
        self.shared = empty(size, torch.int32, device).fill_(1)
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

        measured = timed(both)
        self.shared.fill_(1)
        return measured


def cases(
    size: int, device: torch.device
) -> dict[tuple[str, float], Callable[[], dict[str, float]]]:
    """By name and density."""
    residual, update = (empty(size, torch.float32, device).fill_(1) for _ in range(2))
    kind = kernels_for(device)
    measurements: dict[tuple[str, float], Callable[[], dict[str, float]]] = {
        ("r.add_(u) (baseline)", 1.0): lambda: timed(lambda: residual.add_(update))
    }
    for density in DENSITIES:
        vector = Vector(size, density, device, kind)
        measurements["find", density] = lambda vector=vector: timed(vector.find)
        measurements["find + commit_", density] = vector.exchange
        measurements["find + commit_, clipped at 5", density] = lambda vector=vector: (
            vector.exchange(multiple=5.0)
        )
    reference = Vector(size, 1e-3, device, VectorGroup)
    measurements["find + commit_, torch operations", 1e-3] = reference.exchange
    vector = Vector(size, 1e-3, device, kind)
    chosen = np.random.default_rng(0).choice(size, ENTRIES, replace=False)
    entries = torch.from_numpy(np.sort(chosen).astype(np.int32) + 1).to(device)
    measurements[f"apply_ of {ENTRIES:,} entries", ENTRIES / size] = lambda: timed(
        lambda: vector.group.apply_(entries, 1, GRID)
    )
    return measurements


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    taken = in_turns(cases(asked.size, torch.device(asked.device)), ROUNDS + 1)
    ms = {case: medians(rounds[1:])["ms"] for case, rounds in taken.items()}
    baseline, *_ = ms.values()
    for (name, density), values in ms.items():
        yield {
            "case": name,
            "density": density,
            "ms": values,
            "ratio": values / baseline,
        }


QUESTION = Question(
    "encode",
    __doc__,
    rows,
    "case density:.1e ms:.2f ratio:.2f",
    {
        "--size": {"type": int, "default": 25_000_000, "help": "parameters"},
        "--device": {"default": "cpu", "help": "of the vectors, such as cuda"},
    },
    lambda result: bars(result, "ratio", "case", "density"),
)
