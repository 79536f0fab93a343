"""How many steps it takes to learn, whatever a step costs.

Question: After how many steps of each replica is the model as good as that of one
          process, with and without momentum on what replicas send?
Counted:  Steps of a replica until the mean of three successive scores, one after each
          exchange, reaches the target; the median of the seeds if all reach it, in at
          most `--steps`. The replicas are in lockstep, in one thread of one process:
          nothing depends on time. "synchronous" adds up the gradients of all replicas
          in each step; "DiLoCo" averages the models at each exchange, with the outer
          rate (0.7) and the Nesterov momentum (0.9) of its authors. Each replica
          trains on rows of its own.
Baseline: synchronous training, and DiLoCo.
Run:      python -m benchmarks lockstep --momentum 0 0.5 0.8 0.9 --seeds 0 1
"""

import argparse
import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.results import Question
from benchmarks.work import OPTIMIZERS, WORKS, Task, batches, plain_step
from daskdl import KeepResidual, SampledThreshold, codec
from daskdl.compression.compressor import Compressor
from daskdl.compression.flat import FlatParameters

IN_MEAN = 3  # scores in the mean that has to reach the target
STAMP = codec.Stamp(run=1, origin=0, sequence=1, step=1)

Step = Callable[[torch.Tensor, torch.Tensor], None]


class Replicas:
    """Copies of a model that train on different rows, and exchange what they learn."""

    def __init__(self, task: Task, count: int, asked: argparse.Namespace, seed: int):
        torch.manual_seed(seed)
        model = task.model()
        self.models = [copy.deepcopy(model) for _ in range(count)]
        new_optimizer = task.optimizer(asked.optimizer, asked.rate_factor)
        self.optimizers = [new_optimizer(m.parameters()) for m in self.models]
        self.task = task
        self.agreed = model  # what a user would get

    def step(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for model, optimizer, (x, y) in zip(
            self.models, self.optimizers, rows, strict=True
        ):
            plain_step(self.task.loss, model, optimizer)(x, y)

    def exchange(self) -> None:
        raise NotImplementedError


class Synchronous(Replicas):
    """One model, whose gradient is the mean of those of all replicas."""

    def step(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        model, optimizer = self.models[0], self.optimizers[0]
        optimizer.zero_grad()
        for x, y in rows:
            (self.task.loss(model(x), y) / len(rows)).backward()
        optimizer.step()

    def exchange(self) -> None:
        self.agreed.load_state_dict(self.models[0].state_dict())


class DiLoCo(Replicas):
    """Local steps, and an outer optimizer of the mean of all models."""

    def __init__(self, task: Task, count: int, asked: argparse.Namespace, seed: int):
        super().__init__(task, count, asked, seed)
        self._outer = torch.optim.SGD(
            self.agreed.parameters(), lr=0.7, momentum=0.9, nesterov=True
        )

    def exchange(self) -> None:
        with torch.no_grad():
            locals_ = zip(*(model.parameters() for model in self.models), strict=True)
            for parameter, local in zip(self.agreed.parameters(), locals_, strict=True):
                parameter.grad = parameter - torch.stack(local).mean(0)
            self._outer.step()
        for model in self.models:
            model.load_state_dict(self.agreed.state_dict())


class Sharing(Replicas):
    """Gradient sharing: what `daskdl.GradientSharing(max_staleness=0)` computes."""

    def __init__(self, task: Task, count: int, asked: argparse.Namespace, seed: int):
        super().__init__(task, count, asked, seed)
        self._compressors = [
            Compressor(
                FlatParameters(model),
                SampledThreshold(asked.density),
                KeepResidual(),
                momentum=asked.coefficient,
            )
            for model in self.models
        ]
        for compressor in self._compressors:
            compressor.vector.set_scale_(1 / count)

    def exchange(self) -> None:
        sent = []
        for compressor in self._compressors:
            compressor.vector.sync_from_parameters_()
            (update,) = compressor.propose()
            sent.append(codec.decode(update.encode(STAMP).tobytes()))
            compressor.commit_(update)
        for receiver, compressor in enumerate(self._compressors):
            for origin, received in enumerate(sent):
                if origin != receiver:
                    compressor.vector.apply_(received)
        with self._compressors[0].vector.showing_shared():
            self.agreed.load_state_dict(self.models[0].state_dict())


WAYS: dict[str, type[Replicas]] = {
    "synchronous": Synchronous,
    "DiLoCo": DiLoCo,
    "daskdl": Sharing,
}


def steps_until(
    way: str, count: int, every: int, asked: argparse.Namespace, seed: int
) -> int | None:
    """Steps of each replica until the target; None if it was not reached."""
    task = WORKS[asked.work]
    x, y, x_test, y_test = map(torch.from_numpy, task.split())
    order = np.random.default_rng(seed).permutation(len(x))
    rows = [
        batches(x[part], y[part], task.batch_size, np.random.default_rng((seed, rank)))
        for rank, part in enumerate(np.array_split(order, count))
    ]
    replicas, scores = WAYS[way](task, count, asked, seed), []
    for step in range(1, asked.steps + 1):
        replicas.step([next(some) for some in rows])
        if step % every:
            continue
        replicas.exchange()
        scores.append(task.test(replicas.agreed, x_test, y_test))
        if not math.isfinite(scores[-1]):
            return None
        if len(scores) >= IN_MEAN and task.better(
            statistics.fmean(scores[-IN_MEAN:]), asked.target
        ):
            return step
    return None


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    ways = [(way, 0.0) for way in WAYS if way != "daskdl"]
    ways += [("daskdl", coefficient) for coefficient in asked.momentum]
    for count, every, (way, coefficient) in itertools.product(
        asked.replicas, asked.every, ways
    ):
        asked.coefficient = coefficient
        steps = [steps_until(way, count, every, asked, seed) for seed in asked.seeds]
        counts = [float(number) for number in steps if number is not None]
        yield {
            "replicas": count,
            "every": every,
            "way": f"{way}, momentum={coefficient:g}" if way == "daskdl" else way,
            "steps": statistics.median(counts) if None not in steps else math.nan,
            "seeds": ", ".join(str(number or "-") for number in steps),
            "reached": f"{len(counts)} of {len(steps)}",
        }


QUESTION = Question(
    "lockstep",
    __doc__,
    rows,
    "replicas every way steps:,.0f seeds reached",
    {
        "--work": {"choices": WORKS, "default": "mlp"},
        "--optimizer": {"choices": OPTIMIZERS, "default": "SGD"},
        "--rate-factor": {"type": float, "default": 8.0, "help": "on the task's rate"},
        "--target": {"type": float, "default": 0.9585, "help": "a score"},
        "--replicas": [2, 8],
        "--every": [8],
        "--momentum": {"nargs": "+", "type": float, "default": [0.0, 0.9]},
        "--density": {"type": float, "default": 0.05},
        "--steps": 400,
        "--seeds": [0, 1],
    },
)
