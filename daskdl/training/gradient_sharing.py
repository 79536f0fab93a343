"""Asynchronous SGD: replicas exchange threshold-compressed updates as they train.

This module decides when updates are due, proposes, publishes and commits them, and
makes replicas agree at sync points.
"""

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from daskdl import codec
from daskdl.channel.inbox import DrainResult
from daskdl.channel.protocol import FAN_OUT, UNSENT_BYTES, BarrierKind
from daskdl.channel.routing import ROUTINGS
from daskdl.compression.compressor import (
    Compressor,
    Frame,
    PendingSparse,
    PendingUpdate,
)
from daskdl.compression.flat import (
    FROZEN,
    FlatParameters,
    average_untrained,
)
from daskdl.compression.replica_vector import (
    MAX_COUNT,
    ResidualView,
    ranges_by_pattern,
)
from daskdl.compression.residuals import KeepResidual, ResidualPostProcessor
from daskdl.compression.thresholds import (
    LayerThresholds,
    SampledThreshold,
    ThresholdAlgorithm,
)
from daskdl.config import check_choice, check_type, check_whole, is_number
from daskdl.errors import DivergedError, OptionError
from daskdl.observe.tables import StepStats
from daskdl.training.base import (
    Exchange,
    ExchangeStats,
    Parameters,
    ReplicaContext,
    TrainingMaster,
    check_places,
    share_of,
)
from daskdl.training.optimizer_step import has_sparse_gradients, is_adaptive
from daskdl.training.pace import (
    ADAPTIVE,
    EACH_STEP,
    EAGER,
    LOCKSTEP,
    ExchangePace,
    MeasuredInterval,
)
from daskdl.training.state import (
    SHARING,
    UNSHARED,
    ExchangeState,
    State,
    check_like,
    decoded,
)
from daskdl.training.telemetry import SAMPLE, mean, norm_of, spread_of

# After fewer exchanges in a sync interval, of about 5 % of the parameters each, much of
# its progress has not been sent: the whole residual follows, in as many bytes. After
# more exchanges, the residual is mostly noise of the last steps.
FEW_EXCHANGES = 20
# On an accelerator, from so many entries on, another thread packs them during the next
# step: on one core packing takes about a millisecond, and starting the thread a tenth.
BESIDE_ENTRIES = 2**16


def least_beside(devices: Collection[torch.device]) -> float:
    """Return from how many entries on another thread packs them during the next step.

    Infinity if all parameters are on the CPU, which seldom has a core to spare while
    replicas train: without one, an exchange in each step then costs 4 % more.
    """
    return BESIDE_ENTRIES if any(d.type != "cpu" for d in devices) else math.inf


@dataclass(eq=False)
class Proposed:
    """The updates of an exchange that has begun."""

    updates: Sequence[PendingUpdate]
    dense: bool
    encode_s: float  # to find them
    packing: Future[float] | None = None  # in another thread, see `pack_beside`


def pack_beside(updates: Sequence[PendingUpdate]) -> float:
    """Pack updates beside a step; return by how many seconds they may have slowed it.

    With a core of its own, this thread never waits. On one core, it computes half of
    the time, and the step is late by as much.
    """
    started, computed = time.perf_counter(), time.thread_time()
    for update in updates:
        if isinstance(update, PendingSparse):
            update.pack()
    computed = time.thread_time() - computed
    return max(min(computed, time.perf_counter() - started - computed), 0.0)


class GradientSharingExchange(Exchange):
    """One replica's side of gradient sharing.

    A run that begins with one replica has a `SoloExchange` instead, until a second one
    joins. Later, if a barrier finds no other replica, this one becomes the sole owner
    of shared: it moves the whole residual into shared and encodes no updates, until it
    serves a snapshot to a joining replica.
    """

    kind = SHARING

    def __init__(self, context: ReplicaContext, options: "GradientSharing") -> None:
        super().__init__(context)
        self._options = options
        self.momentum = options.momentum
        self._channel = context.channel
        self._untrained = context.untrained
        parameters = FlatParameters(context.module)
        self._compressor = Compressor(
            parameters,
            options.threshold,
            options.residual,
            options.apply,
            options.momentum,
            summed=context.channel.merges,
        )
        self._vector = self._compressor.vector
        names = {name: name for name in parameters.slices}
        self._places = ranges_by_pattern(parameters, self._vector, names)  # by name
        self._in_step = options.max_staleness == 0
        self._least_beside = least_beside({g.flat.device for g in parameters.groups})
        adaptive = context.optimizer is not None and is_adaptive(context.optimizer)
        self._adaptive = adaptive
        self._exchange_interval = MeasuredInterval(options.pace(adaptive=adaptive))
        self._adapts = (
            adaptive and options.adapt_rate and options.update_scale == "mean"
        )
        # Replicas hardly ever touch the same rows of an embedding at the same time:
        # their steps add up.
        self.adds_up = self._adapts and has_sparse_gradients(context.module)
        self._now = context.channel.clock.now
        self._steps_before = 0  # steps before `_step` counts: in earlier fits, or alone
        self._step = 0  # steps of this fit, aligned on all replicas at each sync
        self._unshared = 0  # steps since the last accepted exchange
        self._due = False  # steps were made since the last attempted exchange
        self._proposed: Proposed | None = None  # being packed during a step
        self._exchanges = 0  # in this sync interval; a dense one counts as many
        self._sole = False  # no other replica uses shared
        self._served = False  # a snapshot was served since the last barrier began
        # Seconds since the last accepted exchange.
        self._began = self._computed_s = self._spent_s = 0.0
        # For the last step.
        self._wait_s = self._encode_s = self._apply_s = 0.0
        self._lead = 0
        self._density = math.nan
        self._frames: list[Frame] = []
        self._clipped_before = 0.0  # at the last `stats`

        self._replicas = 0
        self._scale_for(len(context.members))
        self._begin()

    def _begin(self) -> None:
        if not self.context.joins:
            # The module may not be that of which the client computed the grid.
            self._channel.sync(self._step, self._vector.grid)
        self._exchange_interval.choose_(self._steps_before + self._step)

    def _scale_for(self, replicas: int) -> None:
        self._replicas = replicas
        self.update_scale = 1.0 if self.adds_up else self._options.scale(replicas)
        self.learning_rate_scale = self._vector.set_scale_(self.update_scale)
        rises = self._adapts and not self.adds_up
        self.rate_factor = math.sqrt(replicas) if rises else 1.0

    @override
    def load_(self, common: State, per_replica: Sequence[State]) -> None:
        if "compressor" in common:
            fresh = self.state()
            check_like(fresh.common, common, "exchange")
            for part in per_replica:
                # The patterns of groups may have changed.
                check_like({**fresh.per_replica, "groups": {}}, part, "exchange")
            self._compressor.restore_(common["compressor"], per_replica)
            for part in per_replica[:1]:
                self._unshared, self._due = part["unshared"], part["due"]
            self._replicas = 0  # the restored state has its own scale
            self._steps_before, self._step = common["steps_before"], common["step"]
            self._clipped_before = self._compressor.clipped
        else:  # of a replica that was alone, or of an earlier fit
            check_like({"steps_made": 0, "sent": {}}, common, "exchange")
            self._steps_before = common["steps_made"]
            self._compressor.continue_(common["sent"])
        if "residual" in common:
            members, replica = self.context.members, self.context.replica
            counts_N = common["residual"].numpy()
            share_N = share_of(counts_N, members.index(replica), len(members))
            self._vector.add_residual_(share_N, common["grid"])
        self._begin()

    # ---- a step

    @override
    def before_step(self, interval: int) -> None:
        options, started = self._options, self._now()
        # Before the first step of an epoch, `on_epoch_begin` may change parameters.
        if not self._stats.steps:
            self._vector.sync_from_parameters_()
        replicas = 1 + len(self._channel.peers())
        if replicas != self._replicas:
            self._scale_for(replicas)
        begins = self._step % self._exchange_interval.steps == 0
        steps_made = self._steps_before + self._step
        # An adaptive optimizer learns less from stale updates, so the bound follows the
        # exchange interval of this replica, not the longest one that is allowed.
        every = self._exchange_interval.steps if self._adaptive else 0
        bound = options.staleness_bound(steps_made, every) if begins else None
        ahead = self._channel.wait_for_peers(self._step, interval, bound)
        waited = self._now()
        self._lead = 0
        if ahead > 0:
            self._lead = options.least_lead(self._step, ahead, self._steps_before)
        self._stats.lead_sum += self._lead
        self._stats.steps += 1
        self._stats.rate_rise_sum += self.rate_factor - 1
        self._density, self._frames, self._encode_s = math.nan, [], 0.0
        if not self._in_step:
            self._apply(self._channel.drain())
        elif begins:  # otherwise some updates may still be in flight
            self._apply(self._channel.drain(self._step))
        self._began = self._now()
        self._wait_s, self._apply_s = waited - started, self._began - waited
        self._spent_s += self._apply_s

    def _apply(self, pending: DrainResult) -> None:
        if pending.folded_N is not None:
            self._vector.apply_counts_(pending.folded_N)
        self._vector.apply_(*pending.updates)

    @override
    def after_step(self, interval: int, examples: int) -> None:
        stepped = self._now()
        self._computed_s += stepped - self._began
        self._step += 1
        self._unshared += 1
        self._due = True
        if self._step.bit_count() == 1:
            self._untrained.find_changed()
        self._vector.sync_from_parameters_()
        self._encode_s += self._now() - stepped
        self._exchange_interval.choose_(self._steps_before + self._step)
        due = self._step % self._exchange_interval.steps == 0
        self.exchanged = self._proposed is not None
        self._send_proposed()
        if due:
            self._exchange(beside=not self._in_step)
            self.exchanged |= self._proposed is None
        if self.exchanged:
            # Clipping hides from `sync` how far a parameter has moved.
            self._check_reach(self._compressor.clipped_per_entry)
        if self.exchanged or self._options.announces(self._step):
            self._channel.progress(self._step)

    def _exchange(self, *, beside: bool = False) -> None:
        """Publish pending updates; without room, they stay in the residual.

        Args:
            beside: Many entries may be packed during the next step and published after
                it. What shared and the residual are until then does not matter: nothing
                is committed before it is published.
        """
        self._due = False
        if self._sole:
            if self._vector.strict:  # the module computes with shared: move shared now
                self._vector.flush_residual_()
            self._unshared, self._computed_s, self._spent_s = 0, 0.0, 0.0
            return
        if not self._has_room():
            return
        started = self._now()
        # Progress made in the warm-up is sent densely, even if it is sent later.
        begin = self._steps_before + self._step - self._unshared
        dense = begin < self._options.warmup_steps
        updates = self._compressor.propose(dense=dense)
        encode_s = self._now() - started
        self._encode_s += encode_s
        proposed = Proposed(updates, dense, encode_s)
        self._proposed = proposed
        entries = sum(update.entries for update in updates)
        if beside and not dense and entries >= self._least_beside:
            pool = ThreadPoolExecutor(1, "daskdl-pack")
            proposed.packing = pool.submit(pack_beside, updates)
            pool.shutdown(wait=False)  # its thread ends with the packing
        else:
            self._send_proposed()

    def _send_proposed(self) -> None:
        """Publish and commit what was proposed, as far as there is room."""
        proposed, self._proposed = self._proposed, None
        if proposed is None:
            return
        updates, cost_s = proposed.updates, 0.0
        if proposed.packing is not None:
            started = self._now()
            cost_s = proposed.encode_s + proposed.packing.result()
            self._encode_s += self._now() - started
        waiting = [update for update in updates if update.entries]
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
        self._exchanges += FEW_EXCHANGES if proposed.dense else 1
        self._exchange_interval.note(
            self._spent_s + self._encode_s + cost_s,
            self._computed_s / max(self._unshared, 1),
        )
        self._unshared, self._computed_s, self._spent_s = 0, 0.0, 0.0

    def _send_residual(self) -> None:
        """Publish the whole residual, once there is room."""
        self._due = False
        self._unshared, self._computed_s, self._spent_s = 0, 0.0, 0.0
        update = self._compressor.whole_residual()
        if update.entries:
            self._channel.has_room(wait=True)
            self._publish([update])

    def _has_room(self) -> bool:
        started = self._now()
        unsent = UNSENT_BYTES if self._options.exchange_every == "auto" else math.inf
        room = self._channel.has_room(wait=self._in_step, unsent=unsent)
        self._wait_s += self._now() - started
        return room

    def _publish(self, updates: Sequence[PendingUpdate]) -> list[Frame]:
        """Publish until the outbox is full; return the frames of accepted updates."""
        frames: list[Frame] = []
        for update in updates:
            if frames and self._in_step:  # wait: lockstep must publish all updates
                self._has_room()
            started = self._now()
            frame = self._channel.publish(
                update.encode, self._step, partial=update is not updates[-1]
            )
            if frame is None:
                break
            # Only published updates leave the residual.
            self._compressor.commit_(update)
            frames.append(frame)
            self._encode_s += self._now() - started
        return frames

    # ---- sync points

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        self._send_proposed()
        if ended:
            self._check_reach(self._vector.farthest())
        few = self._exchanges < FEW_EXCHANGES
        # In strict mode, all steps start from shared, and their sum goes too far.
        if ended and few and not (self._sole or self._vector.strict):
            self._send_residual()
        elif self._due:
            self._exchange()
        self._channel.progress(self._step, interval)
        if not ended:
            return
        self._exchanges = 0
        self._untrained.find_changed()
        untrained = self._untrained.take()
        frozen = [array for n, array in untrained.items() if n.startswith(FROZEN)]
        self._stats.frozen_bytes = sum(array.nbytes for array in frozen)
        self._served = False
        key = f"sync {interval}"
        gathered = self._channel.barrier(
            key,
            {
                "sequence": self._channel.published,
                "step": self._step,
                "examples": examples,
                **untrained,
            },
            BarrierKind.AGREE,
        )
        published = {r: payload["sequence"] for r, payload in gathered.payloads.items()}
        self._channel.agree(key, published, gathered.gone, self._load)
        self._apply(self._channel.drain())
        # A replica that joins after the barrier gets a new snapshot. One that was sent
        # a snapshot during the barrier depends on the updates that follow.
        present = gathered.counted.get("present")
        self._sole = present == 1 and not self._served
        if self._sole:
            self._vector.flush_residual_()
        payloads = [gathered.payloads[replica] for replica in sorted(gathered.payloads)]
        self._step = max(payload["step"] for payload in payloads)
        if present == len(gathered.payloads.keys() - gathered.gone.keys()):
            self._vector.regrid_()  # else somebody joins, with a snapshot of this grid
        self._channel.sync(self._step, self._vector.grid)
        parts = [(payload, payload["examples"]) for payload in payloads]
        self._untrained.load_(average_untrained(parts))

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        """Replace shared by that of another replica; the residual stays."""
        shared = decoded(snapshot).common["exchange"]["compressor"]
        counts_N = torch.cat(shared["shared"]).numpy()
        self._vector.replace_shared_(counts_N, shared["grid"])

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
    def residual_norms(self) -> Mapping[str, float]:
        return {
            name: norm_of(ResidualView(self._vector, places).tensor())
            for name, places in self._places.items()
        }

    @override
    def admit(self) -> dict[str, Any]:
        pending, received = self._channel.drain_for_snapshot()
        self._apply(pending)
        if self._sole:
            self._vector.flush_residual_()
        self._sole, self._served = False, True
        return {"received": received, "grid": self._vector.grid, "step": self._step}

    @override
    def state(self) -> ExchangeState:
        shared, residuals = self._compressor.state()
        common = {
            "compressor": shared,
            "steps_before": self._steps_before,
            "step": self._step,
        }
        waiting = {"unshared": self._unshared, "due": self._due}
        return ExchangeState(common, {**residuals, **waiting})

    @override
    def carried(self, *, ended: bool) -> State:
        sent = {
            pattern: (outcome.threshold, outcome.density)
            for pattern, outcome in self._compressor.sent.items()
        }
        carried = {"steps_made": self._steps_before + self._step, "sent": sent}
        if not ended:
            return carried
        residual = torch.from_numpy(self._vector.residual_counts())
        return {**carried, "residual": residual, "grid": self._vector.grid}

    @override
    def leave(self) -> None:
        self._apply(self._channel.drain())
        grid, counts_N = self._vector.grid, self._vector.flush_residual_()
        self._channel.publish(
            lambda stamp: codec.encode_dense(stamp, grid, counts_N),
            self._step,
            force=True,
        )


# From so many workers on, "auto" is not "plain": with 8, receiving each update takes a
# replica as much time as receiving their sum (benchmarks/emulation.py).
MANY_WORKERS = 9


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
        momentum: Part of each update that a replica keeps in its residual and sends
            again with later exchanges, in [0, 1): heavy-ball momentum on the shared
            model, without a further vector or byte. Progress is multiplied by up to
            ``1 / (1 - momentum)``, as if the learning rate were; no effect with one
            replica.
        max_staleness: Most steps that a replica may be ahead of the slowest one when
            it starts an exchange interval, the steps between two exchanges. 0: replicas
            run in lockstep, and results are reproducible bit for bit. None: no limit.
            ``"auto"``: two exchange intervals, or three where updates are merged, at
            least 8 steps. The longest interval allowed so far counts or, with an
            adaptive optimizer, the present one.
        exchange_every: Steps between exchanges. ``"auto"``: a power of two, at most 64
            and at most `max_staleness`, such that exchanges take up to about 3 % of a
            replica's time, or 10 % with an adaptive optimizer. An interval longer than
            1/32 of the steps made so far is used only if exchanges would otherwise take
            more than 10 %, and is at most 16; with an adaptive optimizer, it is also at
            most 1/8 of the steps made so far. In lockstep, the interval depends only on
            the steps made so far, and is at most 16. In lockstep with an adaptive
            optimizer, and with ``apply="strict"``, it is 1. At the end of an epoch with
            fewer than 20 exchanges, a replica sends all progress that is left, in eight
            bits per parameter; with ``apply="strict"``, it is sent later.
        warmup_steps: Number of first steps whose progress is sent in dense updates, in
            eight bits per parameter and without a threshold. Steps are counted over all
            fits of a trainer; later fits and joining replicas do not restart at 0.
        adapt_rate: With adaptive optimizers, multiply the learning rate by the root of
            the number of replicas, as for one batch of all replicas (the square-root
            scaling rule). If more than half of the parameters belong to embeddings with
            ``sparse=True``, the learning rate stays, and the updates of replicas are
            summed instead, since replicas rarely change the same rows. Only with
            ``update_scale="mean"``.
        routing: ``"plain"`` relays through the scheduler; ``"mesh"`` sends from
            worker to worker. ``"merged"`` relays through the scheduler, which adds up
            the updates of all replicas: what a replica receives and decodes then hardly
            grows with their number. Updates wait there for those of the other replicas,
            up to 10 s and no longer than a replica that waits for them. Not in
            lockstep. ``"auto"``: plain for up to 8 workers, counted when the run starts
            (or `min_replicas`, if that is more); merged for more, or mesh in lockstep.
            No effect with ``client=False``.
        fan_out: In a mesh, most replicas that one replica forwards an update to. With
            up to ``fan_out + 1`` replicas, each sends directly to all others.
        replicas_per_worker: Replicas in each worker process, or in this process with
            ``client=False``; ``"auto"`` is one per CUDA device of the process, else
            one; always one if the trainer's `device` is one, such as ``"cuda:1"``.
        min_replicas: Training waits while there are fewer replicas. With
            ``client=False`` no replica can join, so fewer are refused at the start.
        rejoin_timeout: Most seconds to wait for `min_replicas`, or for a worker after
            the loss of all replicas. None: ``daskdl.timeouts.rejoin``, 300 s. No effect
            with ``client=False``.

    Example:
        >>> GradientSharing(max_staleness=0).synchronous
        True

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015; Deeplearning4j, SharedTrainingMaster.java.
        Deeplearning4j sums updates, and drops the residual at the end of each epoch.
        Malladi and others, "On the SDEs and Scaling Rules for Adaptive Gradient
        Algorithms", NeurIPS 2022, for `adapt_rate`.
    """

    threshold: ThresholdAlgorithm | Mapping[str, ThresholdAlgorithm] = field(
        default_factory=SampledThreshold
    )
    residual: ResidualPostProcessor = field(default_factory=KeepResidual)
    apply: Literal["eager", "strict"] = "eager"
    update_scale: Literal["mean", "sum"] | float = "mean"
    momentum: float = 0.0
    max_staleness: int | Literal["auto"] | None = "auto"
    exchange_every: int | Literal["auto"] = "auto"
    warmup_steps: int = 0
    adapt_rate: bool = True
    routing: Literal["auto", "plain", "mesh", "merged"] = "auto"
    replicas_per_worker: int | Literal["auto"] = 1
    min_replicas: int = 1
    rejoin_timeout: float | None = None
    fan_out: int = FAN_OUT
    resumes: ClassVar = (UNSHARED, SHARING)

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
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise OptionError(
                f"momentum must be a number in [0, 1), got {self.momentum!r}"
            )
        check_whole("max_staleness", self.max_staleness, 0, "auto", None)
        check_whole("exchange_every", self.exchange_every, 1, "auto")
        check_whole("warmup_steps", self.warmup_steps, 0)
        check_type("adapt_rate", self.adapt_rate, bool)
        check_choice("routing", self.routing, ("auto", *ROUTINGS))
        if self.routing == "merged" and self.synchronous:
            raise OptionError(
                "routing='merged' rounds quanta to powers of two, which lockstep does "
                "not; use routing='mesh' with max_staleness=0"
            )
        check_places(self)

    @property
    def thresholds(self) -> LayerThresholds:
        """The threshold algorithms, by pattern of parameter names."""
        return LayerThresholds.of(self.threshold)

    @property
    @override
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @override
    def routing_for(self, workers: int) -> Literal["plain", "mesh", "merged"]:
        if self.routing != "auto":
            return self.routing
        if workers < MANY_WORKERS:
            return "plain"
        return "mesh" if self.synchronous else "merged"

    @override
    def check(self, parameters: FlatParameters) -> None:
        self.thresholds.assign(parameters.slices)

    @override
    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        small = nn.Linear(8, 8, device=device, dtype=dtype)
        rule = next(iter(self.thresholds.values()))  # the patterns are for other names
        compressor = Compressor(
            FlatParameters(small), rule, self.residual, self.apply, self.momentum
        )
        with torch.no_grad():
            small.weight.add_(1.0)
        compressor.vector.sync_from_parameters_()
        for update in (*compressor.propose(), *compressor.propose(dense=True)):
            frame = update.encode(codec.Stamp(0, 0, 1, 1))
            compressor.commit_(update)
            received = codec.decode(frame.tobytes())
            compressor.vector.apply_(received)
            compressor.vector.apply_(received, received)  # has a loop of its own

    @property
    @override
    def solo_scale(self) -> float:
        return self.scale(1)

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        merges = context.channel.merges  # not between threads
        routing = self.routing
        if merges != (routing == "merged"):
            routing = "merged" if merges else "plain"
        options = dataclasses.replace(self, routing=routing)
        return GradientSharingExchange(context, options)

    def pace(self, *, adaptive: bool = False) -> ExchangePace:
        """Return how often replicas exchange.

        Args:
            adaptive: Whether the optimizer is adaptive, as Adam is.
        """
        if self.exchange_every != "auto":
            return ExchangePace.fixed(self.exchange_every)
        # In lockstep, the cost of an exchange must not decide: an adaptive optimizer
        # learns most if replicas exchange after each step.
        if self.apply == "strict" or (self.max_staleness == 0 and adaptive):
            return EACH_STEP
        if self.max_staleness == 0:
            return LOCKSTEP
        pace = ADAPTIVE if adaptive else EAGER
        if self.max_staleness is None or self.max_staleness == "auto":
            return pace
        return pace.at_most(self.max_staleness)

    def staleness_bound(self, steps_made: int, every: int = 0) -> int | None:
        """Return the largest lead at the start of an interval, None: any.

        Args:
            steps_made: Steps made, over all fits.
            every: Steps between exchanges; 0: the longest interval after `steps_made`.
        """
        if self.max_staleness != "auto":
            return self.max_staleness
        intervals = 3 if self.routing == "merged" else 2
        return max(8, intervals * (every or self.longest_interval(steps_made)))

    def longest_interval(self, steps_made: int) -> int:
        """Return the most steps between two exchanges of any replica.

        Args:
            steps_made: Steps made, over all fits.

        Example:
            >>> sharing = GradientSharing()
            >>> [sharing.longest_interval(steps) for steps in (0, 10**6)]
            [16, 64]
            >>> GradientSharing(exchange_every=12).longest_interval(10**6)
            12
        """
        if self.exchange_every != "auto":
            return self.exchange_every
        return self.pace().longest_after(steps_made)

    def announces(self, step: int) -> bool:
        """Return whether replicas announce a completed step, as others may wait for it.

        A replica announces the last step of each exchange interval. Others wait only at
        the start of an interval, for the step `max_staleness` before it.

        Example:
            >>> sharing = GradientSharing(max_staleness=4, exchange_every=16)
            >>> [step for step in range(1, 33) if sharing.announces(step)]
            [12, 16, 28, 32]
        """
        if self.exchange_every == "auto":
            return False  # except after an exchange
        every, ahead = self.exchange_every, self.staleness_bound(step) or 0
        return step % every == 0 or (step + ahead) % every == 0

    def least_lead(self, step: int, known: int, steps_before: int = 0) -> int:
        """Return the least lead over a replica that may have unannounced steps.

        Args:
            step: Steps completed by this replica.
            known: Lead over the last step announced by the other replica.
            steps_before: Steps of earlier fits.

        Example:
            >>> sharing = GradientSharing(max_staleness=4, exchange_every=16)
            >>> sharing.least_lead(16, 4), sharing.least_lead(16, 16)
            (1, 5)
            >>> GradientSharing(exchange_every=1).least_lead(7, 3)
            3
        """
        every = self.longest_interval(steps_before + step)
        if self.exchange_every == "auto":
            return max(0, known - (every - 1))
        announced, ahead = step - known, self.staleness_bound(step) or 0
        since = max(announced % every, (announced + ahead) % every)
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
