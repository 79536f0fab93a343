"""Asynchronous SGD: replicas send threshold-compressed updates and never meet."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import BarrierResult, Channel
from daskdl.channel.inbox import DrainResult
from daskdl.channel.protocol import FAN_OUT, Barrier
from daskdl.compression.compressor import (
    Compressor,
    Frame,
    PendingDense,
    PendingUpdate,
)
from daskdl.compression.flat import (
    Buffers,
    FlatParameters,
    average_buffers,
    average_frozen,
    load_buffers_,
    pack_buffers,
)
from daskdl.compression.replica_vector import MAX_COUNT
from daskdl.config import check_type, check_whole
from daskdl.errors import OptionError
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
    SHARER,
    CompressionState,
    Excess,
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
from daskdl.training.telemetry import SAMPLE, Observer, StepClock


class Pace(NamedTuple):
    """When a replica waits, when it shares, and until when it does so densely."""

    max_staleness: int | None  # steps it may be ahead of the slowest; None: any
    exchange_every: int  # steps between exchanges
    warmup_steps: int  # what was made in these is sent whole

    def says(self, step: int) -> bool:
        """Tell whether others are told when a step is made: they may wait for it.

        They do so only when they begin an interval, for what was made
        ``max_staleness`` steps before.

        Example:
            >>> [step for step in range(1, 33) if Pace(4, 16, 0).says(step)]
            [12, 16, 28, 32]
        """
        return any((step + ahead) % self.exchange_every == 0 for ahead in self._ahead)

    def lead(self, step: int, known: int) -> int:
        """Steps ahead of another at least: what it may not have said counts as made.

        Args:
            step: Steps made here.
            known: How many more these are than the other has said it made.

        Example:
            >>> Pace(4, 16, 0).lead(16, 4), Pace(4, 16, 0).lead(16, 16)
            (1, 5)
            >>> Pace(8, 1, 0).lead(7, 3)
            3
        """
        said, every = step - known, self.exchange_every
        unsaid = min(every - 1 - (said + ahead) % every for ahead in self._ahead)
        return max(0, known - unsaid)

    @property
    def _ahead(self) -> tuple[int, ...]:
        """How far others are from beginning an interval when a step matters to them."""
        return (0,) if self.max_staleness is None else (0, self.max_staleness)

    @property
    def in_step(self) -> bool:
        """Whether everybody makes each step together."""
        return self.max_staleness == 0


class Sender:
    """Gives a channel what a compressor proposes, and takes out what it accepted.

    Args:
        compressor: Of the replica's module.
        channel: The replica's end of the run.
        pace: When to wait, and when to share.
        observer: Is told of each exchange.
    """

    due: bool  # steps were made since the last exchange was tried
    unshared: int  # steps since the last one that was accepted

    def __init__(
        self,
        compressor: Compressor,
        channel: Channel,
        pace: Pace,
        observer: Observer,
    ) -> None:
        self._compressor = compressor
        self._channel = channel
        self._pace = pace
        self._observer = observer
        self._clock = StepClock()
        self.due = False
        self.unshared = 0

    def begin_step(self) -> None:
        """The replica waits for nobody now, and trains."""
        self._clock.begin()

    def end_step(self) -> None:
        """The replica has made a step."""
        self._clock.end()
        self.unshared += 1
        with self._observer.encoding:
            self._compressor.vector.sync_from_parameters_()
        self.due = True

    def share(self, step: int, made: int) -> None:
        """Send what is to be sent now; without room for it, all stays as it is.

        Args:
            step: Number of the last step, of all replicas alike.
            made: Steps in all, with those of earlier fits.
        """
        self.due = False
        self._clock.chance()
        if not self._has_room():
            return
        with self._observer.encoding:
            # All that was made in the warm-up goes densely, however late it can.
            dense = made - self.unshared < self._pace.warmup_steps
            updates = self._compressor.propose(dense=dense)
        self._exchange(updates, step)

    def pass_over(self) -> None:
        """Nobody is there to send to; what was to be shared is dealt with."""
        self.due = False
        self.unshared = 0
        self._clock.chance()
        self._clock.take()

    def _has_room(self) -> bool:
        if not self._pace.in_step:
            return self._channel.has_room()
        with self._observer.waiting:
            return self._channel.has_room(wait=True)

    def _exchange(self, updates: Sequence[PendingUpdate], step: int) -> None:
        """Send what there is to send, a frame each, as far as there is room."""
        waiting = [update for update in updates if update.entries]
        frames = self._send_all(waiting, step)
        if waiting and not frames:
            return
        for update in updates:
            if not update.entries:
                self._compressor.commit_(update)
        self.unshared = 0
        entries = sum(update.entries for update in waiting[: len(frames)])
        density = entries / self._compressor.vector.size
        self._observer.exchanged(density, frames)
        self._learn(density, frames, isinstance(updates[0], PendingDense))

    def _learn(self, density: float, frames: Sequence[Frame], dense: bool) -> None:
        """Tell the rules what the exchange took."""
        measured = Measured(
            self._compressor.vector.size,
            density,
            sum(frame.nbytes for frame in frames),
            dense,
            self._clock.take(),
            self._channel.link_stats(),
        )
        self._compressor.learn(measured)

    def _send_all(self, waiting: Sequence[PendingUpdate], step: int) -> list[Frame]:
        """Return the frames that were accepted, of the first of these."""
        frames: list[Frame] = []
        for update in waiting:
            if frames and self._pace.in_step:  # all, or it could not be repeated
                self._has_room()

            def encode(stamp: codec.Stamp, update: PendingUpdate = update) -> Frame:
                frames.append(update.encode(stamp))
                return frames[-1]

            before, partial = len(frames), update is not waiting[-1]
            with self._observer.encoding:
                if not self._channel.publish(encode, step, partial=partial):
                    return frames[:before]
                # Only what is on its way leaves the residual.
                self._compressor.commit_(update)
        return frames

    def state(self) -> dict[str, Any]:
        """What it goes on from, as plain values; its clock begins anew."""
        return {"unshared": self.unshared, "due": self.due}

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` made; other keys are another's."""
        self.unshared, self.due = state["unshared"], state["due"]


class Sharer(Exchange):
    """One replica's part in sharing updates.

    If a barrier finds it the only one that is there, shared is its own from then on: it
    takes in the residual as a whole, and nothing is encoded. With the first snapshot
    that it gives to a newcomer that ends.

    Args:
        context: Of the replica.
        compressor: Of the module there.
        pace: When to wait, and when to share.
        scale: How much an update of each of so many replicas counts.
        made: Steps that were made before those that are counted here: in earlier
            fits, or alone. A newcomer learns it from its snapshot.
    """

    kind = SHARER

    def __init__(
        self,
        context: ReplicaContext,
        compressor: Compressor,
        pace: Pace,
        scale: Callable[[int], float],
        made: int,
    ) -> None:
        self.context = context
        self._pace = pace
        self._scale = scale
        self._module = context.module
        self._frozen = context.frozen
        self._channel = context.channel
        self._compressor = compressor
        self._vector = compressor.vector
        self._weigh(len(context.members))
        self._made = made
        self._step = 0
        self._observer = Observer()
        self._sender = Sender(compressor, context.channel, pace, self._observer)
        self._frozen_bytes = 0  # in the last note
        self._clipped_before = 0.0  # at the last `statistics`
        self._own = False  # nobody else has shared, or will have what it was before
        self._served = False  # a snapshot was given since the last barrier began
        if context.snapshot is not None:
            self._begin(context.snapshot)
        if context.resumed is not None and context.resumed.kind == SHARER:
            self._resume(context.resumed)
        if context.residual is not None:
            members = context.members
            place, founders = members.index(context.replica), len(members)
            share_N = context.residual.share_N(place, founders)
            self._vector.add_residual_(share_N, context.residual.grid)
        self.keep_agreed()

    def _weigh(self, replicas: int) -> None:
        self.update_scale = self._scale(replicas)
        self.learning_rate_scale = self._vector.set_scale_(self.update_scale)

    def _begin(self, snapshot: Mapping[str, Any]) -> None:
        self._vector.replace_shared_(snapshot["counts_N"], snapshot["grid"])
        load_buffers_(
            self._module, Buffers(snapshot["floating_F"], snapshot["integer_I"])
        )
        self._frozen.load_(snapshot)
        self._made, self._step = snapshot["made"], snapshot["step"]

    def _resume(self, resumed: Resumed) -> None:
        common, state = resumed.common, self.state()
        # Patterns may be other ones.
        own = {**state.own, "sections": {}}
        resumed.check(state._replace(own=own))
        with restoring(f"{' or '.join(resumed.own_at)}: exchange"):
            self._compressor.restore_(common["accumulator"], resumed.own)
            for part in resumed.own[:1]:
                self._sender.restore_(part)
        self._made, self._step = common["made"], common["step"]
        self._clipped_before = self._compressor.clipped
        self._channel.sync(self._step, self._vector.grid)

    @override
    def before_step(self, interval: int) -> None:
        pace = self._pace
        self._observer.begin_step()
        self._weigh(1 + len(self._channel.peers()))
        bound = pace.max_staleness if self._step % pace.exchange_every == 0 else None
        with self._observer.waiting:
            lead = self._channel.wait_for_peers(self._step, interval, bound)
        self._observer.leads(pace.lead(self._step, lead))
        self._take_in(self._step if pace.in_step else None)
        self._sender.begin_step()

    @override
    def after_step(self, interval: int, examples: int) -> None:
        pace = self._pace
        self._step += 1
        self._frozen.after_step()
        self._sender.end_step()
        self.exchanged = self._step % pace.exchange_every == 0
        if self.exchanged:
            self._share()
        if pace.says(self._step):
            self._channel.progress(self._step)

    def _share(self) -> None:
        if self._own:
            if self._vector.strict:  # else it would not see its own progress
                self._vector.flush_residual_()
            self._sender.pass_over()
            return
        self._sender.share(self._step, self._made + self._step)

    def _take_in(self, up_to_step: int | None = None) -> None:
        self._apply(self._channel.drain(up_to_step))

    def _apply(self, arrived: DrainResult) -> None:
        with self._observer.applying:
            if arrived.folded_N is not None:
                self._vector.apply_counts_(arrived.folded_N)
            for update in arrived.updates:
                self._vector.apply_(update)

    @override
    def sync(self, interval: int, examples: int, *, ended: bool) -> None:
        if self._sender.due:
            self._share()
        self._channel.progress(self._step, interval)
        if ended:
            self._meet(interval, examples)

    def _meet(self, interval: int, examples: int) -> None:
        self._frozen.look()
        buffers, frozen = pack_buffers(self._module), self._frozen.take()
        self._frozen_bytes = sum(array.nbytes for array in frozen.values())
        key = f"sync {interval}"
        self._served = False
        gathered = self._channel.barrier(
            key,
            {
                "sequence": self._channel.published,
                "step": self._step,
                "examples": examples,
                "floating": buffers.floating_F,
                "integer": buffers.integer_I,
                **frozen,
            },
            Barrier.AGREE,
        )
        self._agree(key, gathered)

    def _agree(self, key: str, gathered: BarrierResult) -> None:
        notes = gathered.payloads
        published = {r: note["sequence"] for r, note in notes.items()}
        self._channel.agree(key, published, gathered.gone, self._load)
        self._take_in()
        # Whoever joins later begins with a snapshot that is made later, unless one was
        # made while this replica was on its way here.
        self._own = gathered.counted.get("present") == 1 and not self._served
        if self._own:
            self._vector.flush_residual_()
        self._step = max(note["step"] for note in notes.values())
        self._channel.sync(self._step, self._vector.regrid_())
        parts = [
            (Buffers(note["floating"], note["integer"]), note["examples"])
            for _, note in sorted(notes.items())
        ]
        load_buffers_(self._module, average_buffers(parts))
        changed = [(note, note["examples"]) for _, note in sorted(notes.items())]
        self._frozen.load_(average_frozen(changed))
        self.keep_agreed()

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of another replica; what only this one has stays."""
        self._vector.replace_shared_(snapshot["counts_N"], snapshot["grid"])

    @override
    def keep_agreed(self) -> None:
        vector, buffers = self._vector, pack_buffers(self._module)
        counts_N, frozen = vector.shared_counts(), self._frozen.take()
        self.agreed = Parameters(None, counts_N, None, vector.grid, buffers, frozen)

    @override
    def excess(self, *, whole: bool) -> Excess | None:
        far = self._vector.farthest() if whole else self._compressor.cut
        if far <= self._vector.reach:
            return None
        return Excess(far, MAX_COUNT * self._vector.grid)

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return self._vector.showing_shared()

    @override
    def digest(self) -> int:
        return self._vector.digest()

    @override
    def stats(self) -> ExchangeStats:
        compressor = self._compressor
        thresholds = [sent.threshold for sent in compressor.sent.values()]
        before, self._clipped_before = self._clipped_before, compressor.clipped
        done = self._observer.statistics(thresholds, compressor.clipped - before)
        return done._replace(frozen_bytes=self._frozen_bytes)

    @override
    def step_stats(self) -> StepStats:
        return self._observer.step(self._compressor.samples(SAMPLE))

    @override
    def snapshot(self) -> dict[str, Any]:
        arrived = self._channel.drain()
        self._apply(arrived)
        if self._own:
            self._vector.flush_residual_()
        self._own, self._served = False, True
        self._frozen.look()
        buffers = pack_buffers(self._module)
        return {
            "received": [
                [o, last, list(more)] for o, (last, more) in arrived.received.items()
            ],
            "counts_N": self._vector.shared_counts(),
            "grid": self._vector.grid,
            "made": self._made,
            "step": self._step,
            "floating_F": buffers.floating_F,
            "integer_I": buffers.integer_I,
            **self._frozen.take(),
        }

    @override
    def state(self) -> State:
        shared, own = self._compressor.state()
        common = {"accumulator": shared, "made": self._made, "step": self._step}
        return State(SHARER, common, {**own, **self._sender.state()})

    @override
    def leave(self) -> None:
        self._take_in()
        grid, counts_N = self._vector.grid, self._vector.flush_residual_()
        self._channel.publish(
            lambda stamp: codec.encode_dense(stamp, grid, counts_N),
            self._step,
            force=True,
        )

    @override
    def result(self) -> ExchangeResult:
        residual_N = self._vector.residual_counts()
        parameters = dataclasses.replace(self.agreed, residual_N=residual_N)
        steps = self._made + self._step
        sent = self._compressor.sent
        return ExchangeResult(parameters, CompressionState(sent, steps))


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
        sent, made = context.compression or CompressionState({}, 0)
        compressor = Compressor(
            FlatParameters(context.module),
            self.threshold,
            self.residual,
            self.apply,
            sent,
        )
        pace = Pace(self.max_staleness, self.exchange_every, self.warmup_steps)
        return Sharer(context, compressor, pace, self.scale, made)

    def scale(self, replicas: int) -> float:
        """How much of its updates the group gets from each of so many replicas.

        Example:
            >>> GradientSharing().scale(4), GradientSharing(update_scale=2).scale(4)
            (0.25, 2.0)
        """
        if self.update_scale == "mean":
            return 1.0 / replicas
        return 1.0 if self.update_scale == "sum" else float(self.update_scale)
