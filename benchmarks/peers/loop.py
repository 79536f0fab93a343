"""The training loop of the contestants that have one of their own."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import line
from benchmarks.peers.arguments import Arguments
from benchmarks.peers.gauge import Gauge, Least
from benchmarks.peers.meeting import Meeting
from benchmarks.work import batches, score

Step = Callable[[Tensor, Tensor], None]


def meet(own: Arguments) -> Meeting:
    """The processes of the contestant, its store on rank 0."""
    return Meeting(own.address, own.port, own.world, hosts=own.rank == 0)


def plain_step(
    own: Arguments, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Step:
    """A step as PyTorch's documentation has it."""
    loss = own.task.loss

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def train(
    own: Arguments,
    meeting: Meeting,
    model: nn.Module,
    step: Step,
    block: int | None,
    least: Least = Least(),  # noqa: B008 - a value
) -> None:
    """Train on this rank's rows until the gauge says it is enough.

    Args:
        own: Of this process.
        meeting: With the others.
        model: That is scored.
        step: Makes one.
        block: Steps after which all processes meet; None: they never do.
        least: Steps there have to be, however long they take.
    """
    x, y, x_test, y_test = map(torch.from_numpy, own.task.split())
    rng = np.random.default_rng((own.seed, own.rank))
    mine = slice(own.rank, None, own.world)
    some = batches(x[mine], y[mine], own.task.batch_size, rng)
    gauge = Gauge(
        own,
        meeting,
        block,
        lambda: score(own.task, model, x_test, y_test),
        least,
    )
    gauge.begin()
    while gauge.goes_on(own.task.batch_size):
        step(*next(some))


def report(own: Arguments, meeting: Meeting) -> None:
    """On rank 0 print what all have found; the others wait: the store is there."""
    if own.rank == 0:
        line.put(own, meeting)
    meeting.wait_for_all("end")
