"""Asynchronous training with threshold-compressed updates.

After each step a replica looks how far it has moved from what all know, and
sends one quantum for every coordinate that is at least a threshold away. The
rest stays where it is, in the replica, and is sent later.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from daskdl import codec
from daskdl.channel.protocol import FAN_OUT
from daskdl.compression.compressor import Accumulator, DenseProposal, Proposal
from daskdl.compression.flat import FlatParameters
from daskdl.errors import OptionError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    AdaptiveThreshold,
    LayerThresholds,
    LinkAlgorithm,
    ThresholdAlgorithm,
)
from daskdl.training.alone import Alone, may_be_alone
from daskdl.training.base import TrainingMaster
from daskdl.training.exchange import Exchange
from daskdl.training.options import check_places, check_type, check_whole
from daskdl.training.pace import Pace
from daskdl.training.seat import Seat
from daskdl.training.sharer import Sharer
from daskdl.training.states import ALONE, SHARER

# Where "auto" changes over: relaying for 8 takes 41% of a scheduler's core, for 4 it
# takes 23% (benchmarks/channel.py). With fewer, a relay needs no repair.
MESH_FROM = 9


@dataclass(frozen=True)
class GradientSharing(TrainingMaster):
    """Share updates as they happen, compressed by a threshold.

    Args:
        threshold: Chooses the size of a quantum before each exchange. Or a mapping
            from patterns of parameter names, as of `fnmatch`, to such: each parameter
            has the first one that matches its name in ``named_parameters``.
        residual: Limits what is carried over.
        apply: ``"eager"``: a replica uses its own progress at once.
            ``"strict"``: only once it has been sent, as Strom and
            Deeplearning4j have it.
        update_scale: How much of each replica's updates the group gets: ``"mean"`` is
            1 / replicas, so that it moves like data-parallel training at the same
            learning rate; ``"sum"`` is 1; or a number > 0. With ``apply="strict"``
            this is a factor on each replica's learning rate.
        max_staleness: Steps a replica may be ahead of the slowest when it starts
            an exchange interval. 0 goes in step and makes a run repeatable bit
            for bit; None is unbounded.
        exchange_every: Steps between exchanges.
        warmup_steps: What the first so many steps make is sent whole, in eight bits
            per parameter, and without a threshold. They are counted over all fits of
            a trainer, so that a later one does not begin again, nor does a newcomer.
        routing: ``"plain"`` relays through the scheduler; ``"mesh"`` sends from
            worker to worker; ``"auto"`` is mesh from 9 workers on, counted when the
            run starts.
        fan_out: In a mesh, most replicas that one passes an update on to. While
            there are at most one more than these, each sends to all others.
        replicas_per_worker: Replicas in each worker process, or in this one with
            ``client=False``; ``"auto"`` is one for each of its CUDA devices, else one.
        min_replicas: With fewer than these, training waits for more; with
            ``client=False`` nobody would come, so it is refused.
        rejoin_timeout: How long, seconds; None: ``daskdl.timeouts.rejoin``, 300 s.
            No effect with ``client=False``.

    Example:
        >>> GradientSharing(max_staleness=0).synchronous
        True

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015; Deeplearning4j, SharedTrainingMaster.java.
        There updates are summed and the residual is dropped at each epoch's end.
    """

    threshold: ThresholdAlgorithm | Mapping[str, ThresholdAlgorithm] = field(
        default_factory=lambda: AdaptiveThreshold(initial=None)
    )
    residual: ResidualPostProcessor = field(default_factory=ResidualClipping)
    apply: Literal["eager", "strict"] = "eager"
    update_scale: Literal["mean", "sum"] | float = "mean"
    max_staleness: int | None = 8
    exchange_every: int = 1
    warmup_steps: int = 0
    routing: Literal["auto", "plain", "mesh"] = "auto"
    replicas_per_worker: int | Literal["auto"] = 1
    min_replicas: int = 1
    rejoin_timeout: float | None = None
    fan_out: int = FAN_OUT
    resumes: ClassVar = (ALONE, SHARER)

    def __post_init__(self) -> None:
        thresholds = self.thresholds  # refuses what is none
        if isinstance(self.threshold, Mapping):
            # Frozen like the rest, whatever becomes of the user's mapping.
            object.__setattr__(self, "threshold", thresholds)
        check_type("residual", self.residual, ResidualPostProcessor)
        if self.apply not in ("eager", "strict"):
            raise OptionError(f"apply must be 'eager' or 'strict', got {self.apply!r}")
        self._check_scale()
        if self.max_staleness is not None:
            check_whole("max_staleness", self.max_staleness, 0, "or None")
        check_whole("exchange_every", self.exchange_every, 1)
        check_whole("warmup_steps", self.warmup_steps, 0)
        if self.routing not in ("auto", "plain", "mesh"):
            raise OptionError(
                f"routing must be 'auto', 'plain' or 'mesh', got {self.routing!r}"
            )
        check_places(self)

    def _check_scale(self) -> None:
        scale = self.update_scale
        if scale in ("mean", "sum"):
            return
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not number or not 0 < float(scale) < math.inf:
            raise OptionError(
                f"update_scale must be 'mean', 'sum' or a number > 0, got {scale!r}"
            )

    @property
    def thresholds(self) -> LayerThresholds:
        """The algorithm, or all of them, by pattern of parameter names."""
        return LayerThresholds.of(self.threshold)

    @property
    @override
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @property
    @override
    def averages(self) -> bool:
        return self.update_scale == "mean"

    @override
    def routing_for(self, workers: int) -> str:
        if self.routing != "auto":
            return self.routing
        return "mesh" if workers >= MESH_FROM else "plain"

    @override
    def check(self, parameters: FlatParameters) -> None:
        self.thresholds.assign(parameters.slices)

    @override
    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        small = nn.Linear(8, 8, device=device, dtype=dtype)
        rule = next(iter(self.thresholds.values()))  # the names are not its own
        accumulator = Accumulator(
            FlatParameters(small), rule, self.residual, self.apply
        )
        with torch.no_grad():
            small.weight.add_(1.0)
        accumulator.progress.absorb_()
        proposals: list[Proposal | DenseProposal] = [*accumulator.propose()]
        if self.warmup_steps or isinstance(rule, LinkAlgorithm):
            proposals.append(accumulator.propose_dense())
        for proposal in proposals:
            frame = proposal.encode(codec.Stamp(0, 0, 1, 1))
            accumulator.take_(proposal)
            accumulator.progress.apply_(codec.decode(frame.tobytes()))

    @override
    def attach(self, seat: Seat) -> Exchange:
        if may_be_alone(seat):
            later = dataclasses.replace(seat, residual=None)  # it is delivered by then
            return Alone(seat, self.scale(1), lambda made: self._share(later, made))
        return self._share(seat, 0 if seat.last is None else seat.last.steps)

    def _share(self, seat: Seat, made: int) -> Exchange:
        accumulator = Accumulator(
            FlatParameters(seat.module),
            self.threshold,
            self.residual,
            self.apply,
            None if seat.last is None else seat.last.sent,
        )
        pace = Pace(self.max_staleness, self.exchange_every, self.warmup_steps)
        return Sharer(seat, accumulator, pace, self.scale, made)

    def scale(self, replicas: int) -> float:
        """How much of its updates the group gets from each of so many replicas.

        Example:
            >>> GradientSharing().scale(4), GradientSharing(update_scale=2).scale(4)
            (0.25, 2.0)
        """
        if self.update_scale == "mean":
            return 1.0 / replicas
        return 1.0 if self.update_scale == "sum" else float(self.update_scale)
