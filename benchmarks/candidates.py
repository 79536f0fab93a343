"""Which rules that others have published earn a place in daskdl?

Question: on the same budget of density, does the rule bring the loss down further?
Counted:  accuracy or loss on rows that were not trained on, mean and deviation over
          seeds; bytes published over what whole updates would take. A simulation:
          four replicas in turn in one thread, with the real compressor and codec, and
          what is sent arrives one step later (`delay`). Each rule against the row
          named "base" above it, which sends one entry in a thousand of the parameters.
Run:      python -m benchmarks.candidates --tasks digits text --seeds 3 --jobs 2
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.convergence import score
from benchmarks.simulation import Member, Offer, Rules, Simulation, offer_dense
from benchmarks.tasks import TASKS
from daskdl import KeepResidual, ResidualClipping, TargetSparsityThreshold
from daskdl.compression.compressor import PendingSparse
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.thresholds import Residual, Sent, ThresholdAlgorithm

DENSITY = 1e-3


@dataclass(frozen=True)
class Sampled(ThresholdAlgorithm):
    """The quantile of a sample of the residual, kept while it serves.

    Source:
        After Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression
        Technique", MLSys 2021 (SIDCo), which fits a distribution to all values; and
        Lin et al., "Deep Gradient Compression", ICLR 2018, which samples 1 %.
    """

    initial: float = 1e-3
    target: float = DENSITY
    share: float = 0.01

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is not None and self.target / 2 <= last.density <= 2 * self.target:
            return last.threshold
        values = residual.tensor().abs()
        every = round(1 / self.share) if len(values) > 2**20 else 1
        sample = values[::every]
        rank = max(1, round(len(sample) * self.target))
        found = float(torch.topk(sample, rank).values[-1])
        return found or self.initial


@dataclass(frozen=True)
class Fitted(Sampled):
    """The threshold that a Laplace distribution of the same mean would have.

    Source:
        Abdelmoniem et al., MLSys 2021 (SIDCo), one stage, exponential magnitudes.
    """

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is not None and self.target / 2 <= last.density <= 2 * self.target:
            return last.threshold
        mean = float(residual.tensor().abs().mean())
        return mean * float(np.log(1 / self.target)) or self.initial


def by_sign(member: Member, density: float = DENSITY) -> Sequence[Offer]:
    """A share of the positive and one of the negative, with their mean magnitude each.

    Source:
        Dryden et al., "Communication Quantization for Data-Parallel Training of Deep
        Neural Networks", MLHPC 2016.
    """
    member.vector.sync_from_parameters_()
    residual_N = member.vector.residual_counts()
    offers = []
    for sign in (1, -1):
        own = np.flatnonzero(sign * residual_N > 0)
        if not len(own):
            continue
        sizes = np.abs(residual_N[own])
        most = max(1, round(density / 2 * len(residual_N)))
        if len(own) > most:
            least = np.partition(sizes, len(sizes) - most)[len(sizes) - most]
            own = own[sizes >= least]
        count = min(max(1, round(np.abs(residual_N[own]).mean())), MAX_COUNT)
        grid = member.vector.grid
        entries_K = (sign * (own + 1)).astype(np.int32)
        offers.append(
            PendingSparse("*", len(residual_N), grid, count, count * grid, entries_K)
        )
    return offers


def masked(member: Member, offers: Sequence[Offer]) -> None:
    """Forget the momentum where something was sent.

    Source:
        Lin et al., "Deep Gradient Compression", ICLR 2018 (momentum factor masking).
    """
    sent = np.concatenate([np.abs(o.entries_K) - 1 for o in offers])
    names = dict(member.module.named_parameters())
    for name, where in member.flat.slices.items():
        own = torch.from_numpy(sent[(sent >= where.start) & (sent < where.stop)])
        for value in member.optimizer.state[names[name]].values():
            if isinstance(value, Tensor) and value.numel() == where.stop - where.start:
                value.view(-1)[own.long() - where.start] = 0


def by_age(delay: int) -> float:
    """The learning rate over the age of what is known of the others.

    Source:
        Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2015.
    """
    return 1 / (1 + delay)


BASE = Rules(TargetSparsityThreshold(target=DENSITY, decay=0.8), KeepResidual())
DENSE = replace(BASE, offer=offer_dense)


OUTER = (0.9, 0.7)  # momentum and rate, as DiLoCo and SparseLoCo have them
EVERY = (4, 16, 64)
CANDIDATES: Mapping[str, Rules] = {
    "base": BASE,
    "dense": DENSE,
    "scale on the rate": replace(BASE, scaled_rate=True),
    "dense, scale on the rate": replace(DENSE, scaled_rate=True),
    "strict": replace(BASE, apply="strict"),
    "clipped residual": replace(BASE, residual=ResidualClipping()),
    "momentum masking": replace(BASE, after=masked),
    "local clipping 1": replace(BASE, clip=1.0),
    "sampled threshold": replace(BASE, threshold=Sampled()),
    "fitted threshold": replace(BASE, threshold=Fitted()),
    "magnitude by sign": replace(BASE, offer=by_sign),
    **{f"delay {d}": replace(BASE, delay=d) for d in (0, 4, 8)},
    "delay 8, 1/age": replace(BASE, delay=8, rate=by_age),
    "delay 8, gap-aware": replace(BASE, delay=8, gap_aware=True),
    "delay 8, scale on the rate": replace(BASE, delay=8, scaled_rate=True),
    **{f"dense, delay {d}": replace(DENSE, delay=d) for d in (0, 4, 8)},
    "dense, delay 8, 1/age": replace(DENSE, delay=8, rate=by_age),
    "dense, delay 8, gap-aware": replace(DENSE, delay=8, gap_aware=True),
    **{f"every {k}": replace(BASE, every=k) for k in EVERY},
    "every 16, scale on the rate": replace(BASE, every=16, scaled_rate=True),
    **{f"dense, every {k}": replace(DENSE, every=k, delay=0) for k in EVERY},
    **{
        f"dense, every {k}, Nesterov": replace(DENSE, every=k, delay=0, outer=OUTER)
        for k in EVERY
    },
}


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    optimizer: str
    candidate: str
    seed: int
    agreed: float
    returned: float
    sent: float
    seconds: float


def one(
    task_name: str, optimizer: str, candidate: str, seed: int, replicas: int
) -> Row:
    torch.set_num_threads(1)
    task = TASKS[task_name]
    split = task.split()
    began = time.perf_counter()
    simulation = Simulation(
        task, split, optimizer, replicas, CANDIDATES[candidate], seed
    )
    for module in simulation.run():
        agreed = score(task, module, split)
    returned = score(task, simulation.returned(), split)
    whole = 4 * simulation.size * simulation.exchanges
    seconds = time.perf_counter() - began
    sent = simulation.sent_bytes / whole
    return Row(task_name, optimizer, candidate, seed, agreed, returned, sent, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--optimizers", nargs="+", default=["momentum"])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="file to which each run is added")
    a = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(a.jobs, mp_context=get_context("spawn")) as pool:
        keys = itertools.product(a.tasks, a.optimizers, range(a.seeds), a.candidates)
        under_way = [pool.submit(one, t, o, c, s, a.replicas) for t, o, s, c in keys]
        for done in under_way:
            rows.append(done.result())
            print(f"# {rows[-1]}", flush=True)
            if a.rows:
                with a.rows.open("a") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    print(table(rows))


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, a line for each task and candidate."""
    lines = [
        f"{'task':9} {'optimizer':9} {'candidate':28} {'agreed':>7} {'+-':>6} "
        f"{'returned':>8} {'sent':>8}"
    ]
    for key in dict.fromkeys((r.task, r.optimizer, r.candidate) for r in rows):
        own = [r for r in rows if (r.task, r.optimizer, r.candidate) == key]
        mean = statistics.mean
        agreed = [r.agreed for r in own]
        lines.append(
            f"{key[0]:9} {key[1]:9} {key[2]:28} {mean(agreed):7.4f} "
            f"{statistics.pstdev(agreed):6.4f} {mean(r.returned for r in own):8.4f} "
            f"{mean(r.sent for r in own):8.2e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
