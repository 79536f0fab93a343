"""Asynchronous SGD: replicas exchange threshold-compressed updates as they train.

Hides when updates are due, how they are proposed, published and committed, and how
replicas agree at sync points.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import DrainResult
from daskdl.channel.protocol import FAN_OUT, BarrierKind
from daskdl.channel.routing import ROUTINGS
from daskdl.compression.compressor import (
    Compressor,
    Frame,
    PendingDense,
    PendingUpdate,
)
from daskdl.compression.flat import (
    FROZEN,
    FlatParameters,
    average_untrained,
)
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.config import check_choice, check_type, check_whole, is_number
from daskdl.errors import DivergedError, OptionError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import (
    AdaptiveThreshold,
    LayerThresholds,
    LinkAlgorithm,
    Measured,
    ThresholdAlgorithm,
)
from daskdl.training.base import (
    ALONE,
    SHARING,
    CompressionState,
    Exchange,
    ExchangeResult,
    ExchangeStats,
    Parameters,
    ReplicaContext,
    Resumed,
    State,
    StepStats,
    TrainingMaster,
    check_places,
    restoring,
)
from daskdl.training.telemetry import SAMPLE, mean, spread_of


class GradientSharingExchange(Exchange):
    """One replica's side of gradient sharing.

    If a barrier finds no other replica, this one becomes the sole owner of shared: it
    moves the whole residual into shared and encodes no updates, until it serves a
    snapshot to a joining replica.
    """

    kind = SHARING

    def __init__(self, context: ReplicaContext, options: "GradientSharing") -> None:
        sent, made = context.compression or CompressionState({}, 0)
        super().__init__(context)
        self._options = options
        self._channel = context.channel
        self._untrained = context.untrained
        self._compressor = Compressor(
            FlatParameters(context.module),
            options.threshold,
            options.residual,
            options.apply,
            sent,
        )
        self._vector = self._compressor.vector
        self._in_step = options.max_staleness == 0
        self._now = time.perf_counter
        self._made = made  # steps before `_step` counts: in earlier fits, or alone
        self._step = 0  # steps of this fit, aligned on all replicas at each sync
        self._unshared = 0  # steps since the last accepted exchange
        self._due = False  # steps were made since the last attempted exchange
        self._sole = False  # no other replica uses shared
        self._served = False  # a snapshot was served since the last barrier began
        # For the threshold rules, since the last accepted exchange.
        self._began = self._computed_s = 0.0
        self._chances = 0  # exchanges that were due
        # For the last step.
        self._wait_s = self._encode_s = self._apply_s = 0.0
        self._lead = 0
        self._density = math.nan
        self._frames: list[Frame] = []
        self._clipped_before = 0.0  # at the last `stats`

        self._replicas = 0
        self._scale_for(len(context.members))
        if context.snapshot is not None:
            self._load(context.snapshot)
            self._untrained.load_(context.snapshot)
            self._made, self._step = context.snapshot["made"], context.snapshot["step"]
        if context.resumed is not None and context.resumed.kind == SHARING:
            self._resume(context.resumed)
        if context.residual is not None:
            members = context.members
            place, initial = members.index(context.replica), len(members)
            share_N = context.residual.share_N(place, initial)
            self._vector.add_residual_(share_N, context.residual.grid)

    def _scale_for(self, replicas: int) -> None:
        self._replicas = replicas
        self.update_scale = self._options.scale(replicas)
        self.learning_rate_scale = self._vector.set_scale_(self.update_scale)

    def _resume(self, resumed: Resumed) -> None:
        common, state = resumed.common, self.state()
        # The patterns of the groups may have changed.
        own = {**state.own, "groups": {}}
        resumed.check(state._replace(own=own))
        with restoring(f"{' or '.join(resumed.own_at)}: exchange"):
            self._compressor.restore_(common["compressor"], resumed.own)
            for part in resumed.own[:1]:
                self._unshared, self._due = part["unshared"], part["due"]
        self._replicas = 0  # the restored state has its own scale
        self._made, self._step = common["made"], common["step"]
        self._clipped_before = self._compressor.clipped
        self._channel.sync(self._step, self._vector.grid)

    # ---- a step

    @override
    def before_step(self, interval: int) -> None:
        options, started = self._options, self._now()
        if not self._stats.steps:  # on_epoch_begin has run
            self._vector.sync_from_parameters_()
        replicas = 1 + len(self._channel.peers())
        if replicas != self._replicas:
            self._scale_for(replicas)
        begins = self._step % options.exchange_every == 0
        bound = options.max_staleness if begins else None
        ahead = self._channel.wait_for_peers(self._step, interval, bound)
        waited = self._now()
        self._lead = options.least_lead(self._step, ahead)
        self._stats.lead_sum += self._lead
        self._stats.steps += 1
        self._density, self._frames, self._encode_s = math.nan, [], 0.0
        self._apply(self._channel.drain(self._step if self._in_step else None))
        self._began = self._now()
        self._wait_s, self._apply_s = waited - started, self._began - waited

    def _apply(self, pending: DrainResult) -> None:
        if pending.folded_N is not None:
            self._vector.apply_counts_(pending.folded_N)
        for update in pending.updates:
            self._vector.apply_(update)

    @override
    def after_step(self, interval: int, examples: int) -> None:
        stepped = self._now()
        self._computed_s += stepped - self._began
        self._step += 1
        self._unshared += 1
        self._due = True
        if self._step.bit_count() == 1:
            self._untrained.look()
        self._vector.sync_from_parameters_()
        self._encode_s += self._now() - stepped
        self.exchanged = self._step % self._options.exchange_every == 0
        if self.exchanged:
            self._share()
            self._check_reach(self._compressor.clipped_per_entry)
        if self._options.announces(self._step):
            self._channel.progress(self._step)

    def _share(self) -> None:
        """Publish pending updates; without room, they stay in the residual."""
        self._due = False
        self._chances += 1
        if self._sole:
            if self._vector.strict:  # else the module would not see its own progress
                self._vector.flush_residual_()
            self._unshared, self._computed_s, self._chances = 0, 0.0, 0
            return
        if not self._has_room():
            return
        started = self._now()
        # Progress made in the warm-up is sent densely, even if it is sent later.
        first = self._made + self._step - self._unshared
        updates = self._compressor.propose(dense=first < self._options.warmup_steps)
        waiting = [update for update in updates if update.entries]
        self._encode_s += self._now() - started
        frames = self._publish(waiting)
        if waiting and not frames:
            return
        for update in updates:
            if not update.entries:
                self._compressor.commit_(update)
        entries = sum(update.entries for update in waiting[: len(frames)])
        density = entries / self._vector.size
        self._density, self._frames = density, frames
        self._stats.density_sum += density
        self._stats.exchanges += 1
        if self._compressor.follows_link:
            measured = Measured(
                self._vector.size,
                density,
                sum(frame.nbytes for frame in frames),
                isinstance(updates[0], PendingDense),
                self._computed_s / max(self._chances, 1),
                self._channel.link_stats(),
            )
            self._compressor.learn(measured)
        self._unshared, self._computed_s, self._chances = 0, 0.0, 0

    def _has_room(self) -> bool:
        started = self._now()
        room = self._channel.has_room(wait=self._in_step)
        self._wait_s += self._now() - started
        return room

    def _publish(self, updates: Sequence[PendingUpdate]) -> list[Frame]:
        """Publish until the outbox is full; return the frames of accepted updates."""
        frames: list[Frame] = []
        for update in updates:
            if frames and self._in_step:  # wait: lockstep must publish all updates
                self._has_room()
            started = self._now()
            frame: Frame | None = None

            def encode(stamp: codec.Stamp, update: PendingUpdate = update) -> Frame:
                nonlocal frame
                frame = update.encode(stamp)
                return frame

            partial = update is not updates[-1]
            if not self._channel.publish(encode, self._step, partial=partial):
                break
            # Only published updates leave the residual.
            self._compressor.commit_(update)
            assert frame is not None, "it was published"
            frames.append(frame)
            self._encode_s += self._now() - started
        return frames

    # ---- sync points

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        if ended:
            self._check_reach(self._vector.farthest())
        if self._due:
            self._share()
        self._channel.progress(self._step, interval)
        if not ended:
            return
        self._untrained.look()
        untrained = self._untrained.take()
        frozen = [array for n, array in untrained.items() if n.startswith(FROZEN)]
        self._stats.frozen_bytes = sum(array.nbytes for array in frozen)
        self._served = False
        key = f"sync {interval}"
        met = self._channel.barrier(
            key,
            {
                "sequence": self._channel.published,
                "step": self._step,
                "examples": examples,
                **untrained,
            },
            BarrierKind.AGREE,
        )
        published = {r: own["sequence"] for r, own in met.payloads.items()}
        self._channel.agree(key, published, met.gone, self._load)
        self._apply(self._channel.drain())
        # A replica that joins later gets a later snapshot, unless a snapshot was made
        # during this barrier.
        self._sole = met.counted.get("present") == 1 and not self._served
        if self._sole:
            self._vector.flush_residual_()
        payloads = [met.payloads[replica] for replica in sorted(met.payloads)]
        self._step = max(own["step"] for own in payloads)
        self._channel.sync(self._step, self._vector.regrid_())
        parts = [(own, own["examples"]) for own in payloads]
        self._untrained.load_(average_untrained(parts))

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        """Replace shared by that of another replica; the residual stays."""
        self._vector.replace_shared_(snapshot["counts_N"], snapshot["grid"])

    def _check_reach(self, far: float) -> None:
        if far <= self._vector.reach:
            return
        if not math.isfinite(far):
            raise DivergedError(f"parameters became {far}")
        raise DivergedError(
            f"parameters moved by {far:.4g}, farther than updates can express, which "
            f"is 2**31 - 1 of the largest quanta, {MAX_COUNT * self._vector.grid:g},"
        )

    @override
    def agreed(self) -> Parameters:
        return Parameters(
            shared_N=self._vector.shared_counts(),
            grid=self._vector.grid,
            untrained=self._untrained.take(),
            digest=self._vector.digest(),
        )

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return self._vector.showing_shared()

    # ---- reports and results

    @override
    def stats(self) -> ExchangeStats:
        stats, compressor = super().stats(), self._compressor
        stats.threshold = mean([sent.threshold for sent in compressor.sent.values()])
        stats.clipped = compressor.clipped - self._clipped_before
        self._clipped_before = compressor.clipped
        return stats

    @override
    def step_stats(self) -> StepStats:
        samples = self._compressor.samples(SAMPLE)
        thresholds = [s.threshold for s in samples if not math.isnan(s.threshold)]
        largest = max(self._frames, key=len, default=None)
        norm, p50, p90, p99 = spread_of(samples)
        return StepStats(
            threshold=mean(thresholds),
            density=self._density,
            sent_bytes=sum(frame.nbytes for frame in self._frames),
            kind=None if largest is None else codec.read_kind(largest.data).name,
            residual_norm=norm,
            residual_p50=p50,
            residual_p90=p90,
            residual_p99=p99,
            staleness=self._lead,
            wait_s=self._wait_s,
            encode_s=self._encode_s,
            apply_s=self._apply_s,
        )

    @override
    def snapshot(self) -> dict[str, Any]:
        pending = self._channel.drain()
        self._apply(pending)
        if self._sole:
            self._vector.flush_residual_()
        self._sole, self._served = False, True
        self._untrained.look()
        return {
            "received": [
                [o, last, list(more)] for o, (last, more) in pending.received.items()
            ],
            "counts_N": self._vector.shared_counts(),
            "grid": self._vector.grid,
            "made": self._made,
            "step": self._step,
            **self._untrained.take(),
        }

    @override
    def state(self) -> State:
        shared, own = self._compressor.state()
        common = {"compressor": shared, "made": self._made, "step": self._step}
        return State(
            SHARING, common, {**own, "unshared": self._unshared, "due": self._due}
        )

    @override
    def result(self) -> ExchangeResult:
        compression = CompressionState(self._compressor.sent, self._made + self._step)
        return ExchangeResult(compression, self._vector.residual_counts())

    @override
    def leave(self) -> None:
        self._apply(self._channel.drain())
        grid, counts_N = self._vector.grid, self._vector.flush_residual_()
        self._channel.publish(
            lambda stamp: codec.encode_dense(stamp, grid, counts_N),
            self._step,
            force=True,
        )


# Workers from which "auto" is a mesh: relaying for 8 takes 41% of a scheduler's core,
# for 4 it takes 23% (benchmarks/channel.py). A relay, unlike a mesh, needs no repair.
MESH_FROM = 9


@dataclass(frozen=True)
class GradientSharing(TrainingMaster):
    """Share updates as they happen, compressed by a threshold.

    Args:
        threshold: Chooses the size of a quantum before each exchange. Or a mapping
            from patterns of parameter names (see `fnmatch`) to threshold algorithms:
            the first pattern that matches a name in ``named_parameters`` applies.
        residual: Limits the residual after an exchange.
        apply: ``"eager"``: a replica uses its own progress immediately.
            ``"strict"``: a replica uses it only after it is sent, as in Strom and
            Deeplearning4j.
        update_scale: Weight of each replica's updates: ``"mean"`` is 1 / replicas,
            which behaves like data-parallel training at the same learning rate;
            ``"sum"`` is 1; or a number > 0. With ``apply="strict"`` this is a factor
            on each replica's learning rate.
        max_staleness: Steps a replica may be ahead of the slowest when it starts
            an exchange interval. 0 runs replicas in lockstep, reproducible bit for
            bit; None is unbounded.
        exchange_every: Steps between exchanges.
        warmup_steps: The progress of this many first steps is sent in full, in eight
            bits per parameter and without a threshold. Steps are counted over all fits
            of a trainer; later fits and joining replicas do not start again from 0.
        routing: ``"plain"`` relays through the scheduler; ``"mesh"`` sends from
            worker to worker; ``"auto"`` is mesh from 9 workers on, counted when the
            run starts.
        fan_out: In a mesh, most replicas that one replica forwards an update to. With
            up to ``fan_out + 1`` replicas, each sends directly to all others.
        replicas_per_worker: Replicas in each worker process, or in this process with
            ``client=False``; ``"auto"`` is one per CUDA device of the process, else
            one.
        min_replicas: Training waits while there are fewer replicas. With
            ``client=False`` no replica can join, so fewer are refused at the start.
        rejoin_timeout: Seconds of this wait; None: ``daskdl.timeouts.rejoin``, 300 s.
            No effect with ``client=False``.

    Example:
        >>> GradientSharing(max_staleness=0).synchronous
        True

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015; Deeplearning4j, SharedTrainingMaster.java.
        There, updates are summed and the residual is dropped at each epoch's end.
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
    resumes: ClassVar = (ALONE, SHARING)

    def __post_init__(self) -> None:
        thresholds = self.thresholds  # validates `threshold`
        if isinstance(self.threshold, Mapping):
            # Frozen like the other options, even if the user's mapping changes.
            object.__setattr__(self, "threshold", thresholds)
        check_type("residual", self.residual, ResidualPostProcessor)
        check_choice("apply", self.apply, ("eager", "strict"))
        scale = self.update_scale
        named = scale in ("mean", "sum")
        if not named and not (is_number(scale) and 0 < float(scale) < math.inf):
            raise OptionError(
                f"update_scale must be 'mean', 'sum' or a number > 0, got {scale!r}"
            )
        check_whole("max_staleness", self.max_staleness, 0, None)
        check_whole("exchange_every", self.exchange_every, 1)
        check_whole("warmup_steps", self.warmup_steps, 0)
        check_choice("routing", self.routing, ("auto", *ROUTINGS))
        check_places(self)

    @property
    def thresholds(self) -> LayerThresholds:
        """The threshold algorithms, by pattern of parameter names."""
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
        rule = next(iter(self.thresholds.values()))  # the patterns are for other names
        compressor = Compressor(FlatParameters(small), rule, self.residual, self.apply)
        with torch.no_grad():
            small.weight.add_(1.0)
        compressor.vector.sync_from_parameters_()
        updates = compressor.propose()
        if self.warmup_steps or isinstance(rule, LinkAlgorithm):
            updates += compressor.propose(dense=True)
        for update in updates:
            frame = update.encode(codec.Stamp(0, 0, 1, 1))
            compressor.commit_(update)
            compressor.vector.apply_(codec.decode(frame.tobytes()))

    @property
    @override
    def solo_scale(self) -> float:
        return self.scale(1)

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        return GradientSharingExchange(context, self)

    def announces(self, step: int) -> bool:
        """Return whether replicas announce a completed step, as others may wait for it.

        Other replicas wait only at the start of an exchange interval, for the step that
        is `max_staleness` steps back.

        Example:
            >>> own = GradientSharing(max_staleness=4, exchange_every=16)
            >>> [step for step in range(1, 33) if own.announces(step)]
            [12, 16, 28, 32]
        """
        every, ahead = self.exchange_every, self.max_staleness or 0
        return step % every == 0 or (step + ahead) % every == 0

    def least_lead(self, step: int, known: int) -> int:
        """Return the least lead over a replica that may have unannounced steps.

        Args:
            step: Steps completed by this replica.
            known: Lead over the last step announced by the other replica.

        Example:
            >>> own = GradientSharing(max_staleness=4, exchange_every=16)
            >>> own.least_lead(16, 4), own.least_lead(16, 16)
            (1, 5)
            >>> GradientSharing(max_staleness=8).least_lead(7, 3)
            3
        """
        announced, every = step - known, self.exchange_every
        since = max(announced % every, (announced + (self.max_staleness or 0)) % every)
        return max(0, known - (every - 1 - since))

    def scale(self, replicas: int) -> float:
        """Return the weight of each replica's updates for a number of replicas.

        Example:
            >>> GradientSharing().scale(4), GradientSharing(update_scale=2).scale(4)
            (0.25, 2.0)
        """
        if self.update_scale == "mean":
            return 1.0 / replicas
        return 1.0 if self.update_scale == "sum" else float(self.update_scale)
