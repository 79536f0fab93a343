"""What every contestant is told, and its command line."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.tasks import Task
from benchmarks.work import WORKS


@dataclass(frozen=True)
class Arguments:
    """One process of one contestant, and its work.

    Attributes:
        rank: Of this process, from 0.
        world: How many there are, one on each host.
        address: Of the host of rank 0, where the processes meet.
        port: The first of ten there that are the contestant's.
        own: Address of this process's host.
        interface: The network interface of this host that has it.
        work: Name of the work.
        seed: Of the model's start and of the order of the data.
        optimizer: Name of the rule.
        rate_factor: Times the learning rate that suits one process.
        warm_up: Seconds of training that are not counted.
        seconds: Seconds of training that are; with a target, at most.
        target: Score at which training ends; None: none is computed.
        began: When the contestant was started, seconds since 1970.
    """

    rank: int
    world: int
    address: str
    port: int
    own: str
    interface: str
    work: str
    seed: int
    optimizer: str
    rate_factor: float
    warm_up: float
    seconds: float
    target: float | None
    began: float

    @property
    def task(self) -> Task:
        return WORKS[self.work]

    def rule(self) -> Callable[[Any], torch.optim.Optimizer]:
        """Makes the optimizer, of parameters."""
        own = self.task.optimizer(self.optimizer)
        rate = self.rate_factor * own.keywords["lr"]  # type: ignore[attr-defined]
        return lambda parameters: own(parameters, lr=rate)

    def model(self) -> nn.Module:
        """The same on all ranks."""
        torch.manual_seed(self.seed)
        return self.task.model()


def parser(text: str) -> argparse.ArgumentParser:
    """Of a contestant's script, which may add options of its own."""
    made = argparse.ArgumentParser(description=text.splitlines()[0])
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--world", type=int, default=1)
    made.add_argument("--address", default="127.0.0.1")
    made.add_argument("--port", type=int, default=29400)
    made.add_argument("--own", default="127.0.0.1")
    made.add_argument("--interface", default="lo")
    made.add_argument("--work", choices=WORKS, default="mlp")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--optimizer", default="SGD")
    made.add_argument("--rate-factor", type=float, default=1.0)
    made.add_argument("--warm-up", type=float, default=2.0)
    made.add_argument("--seconds", type=float, default=5.0)
    made.add_argument("--target", type=float)
    made.add_argument("--began", type=float, default=time.time())
    return made


def read(made: argparse.ArgumentParser) -> tuple[Arguments, argparse.Namespace]:
    """What all have, and what this script has besides."""
    found = vars(made.parse_args())
    common = {name: found.pop(name) for name in Arguments.__dataclass_fields__}
    torch.set_num_threads(1)
    return Arguments(**common), argparse.Namespace(**found)
