"""Replicas in turn, in one thread: what is sent arrives a fixed number of steps later.

The compressor, the codec and the models are the real ones; the channel is a list. So
a run depends on its seed alone, and a rule can be tried that the library does not have.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tasks import Split, Task
from daskdl import ResidualClipping, codec
from daskdl.compression.compressor import Compressor, PendingUpdate
from daskdl.compression.flat import (
    FlatParameters,
    Untrained,
    average_untrained,
    load_untrained_,
)
from daskdl.compression.replica_vector import ReplicaVector
from daskdl.residuals import ResidualPostProcessor
from daskdl.thresholds import ThresholdAlgorithm
from daskdl.training.optimizer_step import scaled

Offer = PendingUpdate


class Member(NamedTuple):
    """One replica."""

    module: nn.Module
    flat: FlatParameters
    compressor: Compressor
    optimizer: torch.optim.Optimizer
    rate: float  # factor on the learning rate

    @property
    def vector(self) -> ReplicaVector:
        """What is sent of, and what comes to."""
        return self.compressor.vector


def offer(member: Member) -> Sequence[Offer]:
    """What the library would send."""
    return member.compressor.propose()


def offer_dense(member: Member) -> Sequence[Offer]:
    """What the library sends in a warm-up."""
    return member.compressor.propose(dense=True)


def nothing(_member: Member, _offers: Sequence[Offer]) -> None:
    """After an exchange."""


@dataclass(frozen=True)
class Rules:
    """How replicas exchange.

    Attributes:
        threshold: As of the library.
        residual: As of the library.
        every: Steps between exchanges.
        delay: Steps until what was sent arrives.
        offer: What is sent.
        after: What else is done with a replica once it has sent.
        apply: As of the library.
        scaled_rate: Apply the mean to the learning rate, and not to what is sent.
        rate: One more factor on the learning rate, from the delay.
        gap_aware: Divide each gradient by 1 + the way its parameter went during the
            last `delay` steps, in steps of the mean length.
        clip: Largest norm of a replica's gradients.
        outer: Momentum and rate of a Nesterov optimizer on the sum of what all sent;
            needs a delay of 0.
    """

    threshold: ThresholdAlgorithm
    residual: ResidualPostProcessor = field(default_factory=ResidualClipping)
    every: int = 1
    delay: int = 1
    offer: Callable[[Member], Sequence[Offer]] = offer
    after: Callable[[Member, Sequence[Offer]], None] = nothing
    apply: Literal["eager", "strict"] = "eager"
    scaled_rate: bool = False
    rate: Callable[[int], float] = lambda delay: 1.0
    gap_aware: bool = False
    clip: float | None = None
    outer: tuple[float, float] | None = None


class Simulation:
    """Some replicas of a task's model.

    Args:
        task: What is learned.
        split: Its data.
        optimizer: Name of one of the task's.
        replicas: How many.
        rules: How they exchange.
        seed: Of the start and of the order of rows.
    """

    sent_bytes: int
    exchanges: int

    def __init__(
        self,
        task: Task,
        split: Split,
        optimizer: str,
        replicas: int,
        rules: Rules,
        seed: int,
    ) -> None:
        self._task, self._split, self._rules = task, split, rules
        self._rng = np.random.default_rng(seed)
        self._step = 0
        self.sent_bytes = self.exchanges = 0
        self._members = []
        for _ in range(replicas):
            torch.manual_seed(seed)
            module = task.model()
            flat = FlatParameters(module)
            compressor = Compressor(flat, rules.threshold, rules.residual, rules.apply)
            scale = 1 / replicas
            rate = scale if rules.scaled_rate else compressor.vector.set_scale_(scale)
            rule = task.optimizer(optimizer)(module.parameters())
            self._members.append(Member(module, flat, compressor, rule, rate))
        self._past: list[deque[Tensor]] = [
            deque(maxlen=rules.delay + 1) for _ in self._members
        ]
        self._under_way: list[tuple[int, int, bytes]] = []  # step, origin, frame
        self._velocity_N = np.zeros(flat.size)

    @property
    def size(self) -> int:
        """Parameters of the model."""
        return self._members[0].flat.size

    def run(self) -> Iterator[nn.Module]:
        """Train; after each epoch the model with what all have agreed on."""
        for _ in range(self._task.epochs):
            self._epoch()
            self._deliver(self._step + self._rules.delay)
            parts = [(Untrained(m.module).take(), 1) for m in self._members]
            for member in self._members:
                load_untrained_(member.module, average_untrained(parts))
            first = self._members[0]
            assert len({m.vector.digest() for m in self._members}) == 1
            with first.vector.showing_shared():
                yield first.module

    def returned(self) -> nn.Module:
        """The model with what was not sent added."""
        for i in range(len(self._members)):
            member = self._members[i]
            frame = codec.encode_dense(
                codec.Stamp(0, i, 1, 1),
                member.vector.grid,
                member.vector.flush_residual_(),
            )
            self._under_way.append((self._step, i, frame.tobytes()))
        self._deliver(self._step + self._rules.delay)
        return self._members[0].module

    def train(self, steps: int) -> None:
        """Make the first so many steps of an epoch, and no more."""
        for _ in itertools.islice(self._steps(), steps):
            pass

    def _epoch(self) -> None:
        for _ in self._steps():
            pass

    def _steps(self) -> Iterator[None]:
        task, split, members = self._task, self._split, self._members
        order = torch.from_numpy(self._rng.permutation(len(split.x)))
        for start in range(0, len(order), task.batch_size * len(members)):
            rows = order[start:][: task.batch_size * len(members)]
            for i, own in enumerate(rows.split(task.batch_size)):
                self._train(i, own)
            self._step += 1
            self._deliver(self._step - 1)
            if self._step % self._rules.every == 0:
                self._exchange()
            yield

    def _train(self, number: int, rows: Tensor) -> None:
        rules, member = self._rules, self._members[number]
        module = member.module
        x = torch.from_numpy(self._split.x)[rows]
        y = torch.from_numpy(self._split.y)[rows]
        module.train()
        member.optimizer.zero_grad()
        self._task.loss(module(x), y).backward()
        if rules.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), rules.clip)
        if rules.gap_aware:
            _divide_by_gap_(member, self._past[number])
        with scaled(member.optimizer, member.rate * rules.rate(rules.delay)):
            member.optimizer.step()
        member.vector.sync_from_parameters_()

    def _exchange(self) -> None:
        total_N = np.zeros(self.size)
        for origin, member in enumerate(self._members):
            offers = list(self._rules.offer(member))
            for made in offers:
                if made.entries:
                    frame = made.encode(codec.Stamp(0, origin, 1, self._step)).tobytes()
                    self.sent_bytes += len(frame)
                    self._under_way.append((self._step, origin, frame))
                    if self._rules.outer is not None:
                        _add(total_N, frame)
                member.compressor.commit_(made)
            self._rules.after(member, offers)
            self.exchanges += 1
        if self._rules.outer is not None:
            self._deliver(self._step)
            self._accelerate(total_N, *self._rules.outer)

    def _accelerate(self, total_N: np.ndarray, momentum: float, rate: float) -> None:
        """All move by what a Nesterov step adds to the sum of what was sent."""
        self._velocity_N = momentum * self._velocity_N + total_N
        step_N = rate * (total_N + momentum * self._velocity_N) - total_N
        for member in self._members:
            counts_N = np.round(step_N / member.vector.grid).astype(np.int32)
            member.vector.apply_counts_(counts_N)

    def _deliver(self, step: int) -> None:
        """Let arrive what was sent so long ago."""
        due = [m for m in self._under_way if m[0] <= step - self._rules.delay]
        self._under_way = [
            m for m in self._under_way if m[0] > step - self._rules.delay
        ]
        for _, origin, frame in due:
            update = codec.decode(frame)
            for i, member in enumerate(self._members):
                if i != origin:
                    member.vector.apply_(update)


def _divide_by_gap_(member: Member, past: deque[Tensor]) -> None:
    """Make gradients smaller where parameters have gone far lately.

    Source:
        Barkai et al., "Gap-Aware Mitigation of Gradient Staleness", ICLR 2020. There
        the server knows how far; here a replica takes it to be as far as of late.
    """
    past.append(torch.cat([group.flat for group in member.flat.groups]))
    steps = [(now - before).abs().mean() for before, now in pairwise(past)]
    length = sum(steps) / max(len(steps), 1)
    if not length:
        return
    divisor = 1 + (past[-1] - past[0]).abs() / length
    for name, parameter in member.module.named_parameters():
        where = member.flat.slices[name]
        parameter.grad /= divisor[where].view_as(parameter)


def _add(total_N: np.ndarray, frame: bytes) -> None:
    update = codec.decode(frame)
    if isinstance(update, codec.DenseUpdate):
        total_N += update.counts_N * update.grid
    else:
        entries_K = update.entries_K
        total_N[np.abs(entries_K) - 1] += np.sign(entries_K) * update.threshold
