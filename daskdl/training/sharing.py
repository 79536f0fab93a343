"""Asynchronous training with threshold-compressed updates.

After each step a replica looks how far it has moved from what all know, and
sends one quantum for every coordinate that is at least a threshold away. The
rest stays where it is, in the replica, and is sent later.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from daskdl import codec
from daskdl.accumulator import Accumulator
from daskdl.buffers import Buffers, average_buffers, load_buffers_, pack_buffers
from daskdl.channel.base import Gathered
from daskdl.channel.inbox import Arrived
from daskdl.channel.messages import Barrier
from daskdl.channel.routes import FAN_OUT
from daskdl.errors import OptionError
from daskdl.residuals import ResidualClipping, ResidualPostProcessor
from daskdl.thresholds import AdaptiveThreshold, Sent, ThresholdAlgorithm
from daskdl.training.alone import Alone
from daskdl.training.base import Exchange, Parameters, Seat, Statistics, TrainingMaster
from daskdl.vectors import FlatParameters

# Where "auto" changes over. A choice, not a measurement: with fewer, a mesh sends each
# update as often as the relay does, and the relay needs no repair.
MESH_FROM = 9


@dataclass(frozen=True)
class GradientSharing(TrainingMaster):
    """Share updates as they happen, compressed by a threshold.

    Args:
        threshold: Chooses the size of a quantum before each exchange.
        residual: Limits what is carried over.
        apply: ``"eager"``: a replica uses its own progress at once.
            ``"strict"``: only once it has been sent, as Strom and
            Deeplearning4j have it.
        update_scale: Factor on each replica's learning rate: ``"mean"`` is 1 /
            replicas, so that the group moves like data-parallel training at the
            same learning rate; ``"sum"`` is 1; or a number > 0.
        max_staleness: Steps a replica may be ahead of the slowest when it starts
            an exchange interval. 0 goes in step and makes a run repeatable bit
            for bit; None is unbounded.
        exchange_every: Steps between exchanges.
        routing: ``"plain"`` relays through the scheduler; ``"mesh"`` sends from
            worker to worker; ``"auto"`` is mesh from 9 replicas on, counted when
            the run starts.
        fan_out: In a mesh, most replicas that one passes an update on to. While
            there are at most one more than these, each sends to all others.
        replicas_per_worker: Replicas in each worker process; ``"auto"`` is one
            for each of its CUDA devices, else one.
        min_replicas: With fewer than these, training waits for more.
        rejoin_timeout: How long, seconds; None: ``daskdl.timeouts.rejoin``, 300 s.

    Example:
        >>> GradientSharing(max_staleness=0).synchronous
        True

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015; Deeplearning4j, SharedTrainingMaster.java.
        There updates are summed and the residual is dropped at each epoch's end.
    """

    threshold: ThresholdAlgorithm = field(default_factory=AdaptiveThreshold)
    residual: ResidualPostProcessor = field(default_factory=ResidualClipping)
    apply: Literal["eager", "strict"] = "eager"
    update_scale: Literal["mean", "sum"] | float = "mean"
    max_staleness: int | None = 8
    exchange_every: int = 1
    routing: Literal["auto", "plain", "mesh"] = "auto"
    replicas_per_worker: int | Literal["auto"] = 1
    min_replicas: int = 1
    rejoin_timeout: float | None = None
    fan_out: int = FAN_OUT

    def __post_init__(self) -> None:
        _check_type("threshold", self.threshold, ThresholdAlgorithm)
        _check_type("residual", self.residual, ResidualPostProcessor)
        if self.apply not in ("eager", "strict"):
            raise OptionError(f"apply must be 'eager' or 'strict', got {self.apply!r}")
        self._check_scale()
        if self.max_staleness is not None:
            _check_whole("max_staleness", self.max_staleness, 0, "or None")
        _check_whole("exchange_every", self.exchange_every, 1)
        if self.routing not in ("auto", "plain", "mesh"):
            raise OptionError(
                f"routing must be 'auto', 'plain' or 'mesh', got {self.routing!r}"
            )
        if self.replicas_per_worker != "auto":
            _check_whole(
                "replicas_per_worker", self.replicas_per_worker, 1, "or 'auto'"
            )

        _check_whole("min_replicas", self.min_replicas, 1)
        _check_whole("fan_out", self.fan_out, 1)
        _check_bound("rejoin_timeout", self.rejoin_timeout)

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
    @override
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    @override
    def routing_for(self, replicas: int) -> str:
        if self.routing != "auto":
            return self.routing
        return "mesh" if replicas >= MESH_FROM else "plain"

    @override
    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        small = nn.Linear(8, 8, device=device, dtype=dtype)
        accumulator = Accumulator(
            FlatParameters(small), self.threshold, self.residual, self.apply, None
        )
        with torch.no_grad():
            small.weight.add_(1.0)
        accumulator.absorb_()
        proposal = accumulator.propose()
        frame = codec.encode(
            codec.Stamp(0, 0, 1, 1),
            accumulator.size,
            proposal.threshold,
            proposal.entries_K,
        )
        accumulator.take_(proposal)
        accumulator.apply_(codec.decode(frame.tobytes()))

    @override
    def attach(self, seat: Seat) -> Exchange:
        if len(seat.members) == 1 and seat.snapshot is None:
            return Alone(seat, self.scale(1), lambda: Sharing(self, seat))
        return Sharing(self, seat)

    def scale(self, replicas: int) -> float:
        """Factor on the learning rate of each of so many replicas.

        Example:
            >>> GradientSharing().scale(4), GradientSharing(update_scale=2).scale(4)
            (0.25, 2.0)
        """
        if self.update_scale == "mean":
            return 1.0 / replicas
        return 1.0 if self.update_scale == "sum" else float(self.update_scale)


class Sharing(Exchange):
    """One replica's part in sharing updates.

    Args:
        master: The options.
        seat: Where to work; the module's parameters become views of flat vectors.
    """

    learning_rate_scale: float

    def __init__(self, master: GradientSharing, seat: Seat) -> None:
        self._master = master
        self._module = seat.module
        self._channel = seat.channel
        self._replica = seat.replica
        self._accumulator = Accumulator(
            FlatParameters(seat.module),
            master.threshold,
            master.residual,
            master.apply,
            seat.last,
        )
        self.learning_rate_scale = master.scale(len(seat.members))
        self._step = 0
        self._due = False  # steps were made since the last exchange
        if seat.snapshot is not None:
            self._begin(seat.snapshot)
        self._agreed: tuple[NDArray[np.int32], float, Buffers]
        self._keep_agreed()
        self._clear_statistics()

    def _begin(self, snapshot: Mapping[str, Any]) -> None:
        self._accumulator.replace_shared_(snapshot["counts_N"], snapshot["grid"])
        load_buffers_(
            self._module, Buffers(snapshot["floating_F"], snapshot["integer_I"])
        )
        self._step = snapshot["step"]

    @override
    def before_step(self, epoch: int) -> None:
        master = self._master
        self.learning_rate_scale = master.scale(1 + len(self._channel.others()))
        if master.max_staleness is not None and self._step % master.exchange_every == 0:
            self._channel.wait_for_others(self._step, epoch, master.max_staleness)
        self._lead_sum += self._channel.lead(self._step, epoch)
        self._take_in(self._step if master.synchronous else None)

    @override
    def after_step(self, epoch: int) -> None:
        self._step += 1
        self._steps += 1
        self._accumulator.absorb_()
        self._due = True
        if self._step % self._master.exchange_every == 0:
            self._share()
        self._channel.complete(self._step)

    def _share(self) -> None:
        self._due = False
        if self._master.synchronous:
            self._channel.wait_for_room()
        elif not self._channel.has_room():
            return
        proposal = self._accumulator.propose()
        if proposal.entries_K.size and not self._send(proposal):
            return
        # Only what is on its way leaves the residual.
        self._accumulator.take_(proposal)
        self._exchanges += 1
        self._density_sum += proposal.entries_K.size / self._accumulator.size

    def _send(self, proposal: Any) -> bool:
        stamp = self._channel.next_stamp(self._step)
        frame = codec.encode(
            stamp, self._accumulator.size, proposal.threshold, proposal.entries_K
        )
        return self._channel.publish(stamp, frame)

    def _take_in(self, up_to_step: int | None = None) -> None:
        self._apply(self._channel.receive(up_to_step))

    def _apply(self, arrived: Arrived) -> None:
        updates, folded_N = arrived
        if folded_N is not None:
            self._accumulator.apply_counts_(folded_N)
        for update in updates:
            self._accumulator.apply_(update)

    @override
    def rest(self, epoch: int) -> None:
        if self._due:
            self._share()
        self._channel.complete(self._step, done=epoch)

    @override
    def end_epoch(self, epoch: int, examples: int) -> None:
        self.rest(epoch)
        buffers = pack_buffers(self._module)
        key = f"end of epoch {epoch}"
        gathered = self._channel.gather(
            key,
            {
                "sequence": self._channel.published(),
                "step": self._step,
                "examples": examples,
                "floating": buffers.floating_F,
                "integer": buffers.integer_I,
            },
            Barrier.AGREE,
        )
        self._agree(key, gathered)

    def _agree(self, key: str, gathered: Gathered) -> None:
        notes = gathered.notes
        published = {r: note["sequence"] for r, note in notes.items()}
        self._channel.agree(key, published, gathered.gone, self._load)
        self._take_in()
        self._step = max(note["step"] for note in notes.values())
        self._channel.align(self._step, self._accumulator.regrid_())
        parts = [
            (Buffers(note["floating"], note["integer"]), note["examples"])
            for _, note in sorted(notes.items())
        ]
        load_buffers_(self._module, average_buffers(parts))
        self._keep_agreed()

    def _load(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of another replica; what only this one has stays."""
        self._accumulator.replace_shared_(snapshot["counts_N"], snapshot["grid"])

    def _keep_agreed(self) -> None:
        accumulator = self._accumulator
        self._agreed = (
            accumulator.shared_counts(),
            accumulator.grid,
            pack_buffers(self._module),
        )

    @override
    def showing_agreed(self) -> AbstractContextManager[None]:
        return self._accumulator.showing_shared()

    @override
    def digest(self) -> int:
        return self._accumulator.digest()

    @override
    def statistics(self) -> Statistics:
        accumulator = self._accumulator
        now = Statistics(
            self._exchanges,
            self._density_sum,
            accumulator.sent.threshold if accumulator.sent else math.nan,
            accumulator.clipped - self._clipped_before,
            self._lead_sum,
            self._steps,
        )
        self._clear_statistics()
        return now

    def _clear_statistics(self) -> None:
        self._exchanges = self._steps = self._lead_sum = 0
        self._density_sum = 0.0
        self._clipped_before = self._accumulator.clipped

    @override
    def opened(self) -> Exchange:
        return self

    @override
    def snapshot(self) -> dict[str, Any]:
        arrived, received = self._channel.take_all()
        self._apply(arrived)
        buffers = pack_buffers(self._module)
        return {
            "received": [[o, last, list(more)] for o, (last, more) in received.items()],
            "counts_N": self._accumulator.shared_counts(),
            "grid": self._accumulator.grid,
            "step": self._step,
            "floating_F": buffers.floating_F,
            "integer_I": buffers.integer_I,
        }

    @override
    def hand_over(self) -> None:
        self._take_in()
        grid = self._accumulator.grid
        stamp = self._channel.next_stamp(self._step)
        frame = codec.encode_dense(stamp, grid, self._accumulator.hand_over_())
        self._channel.publish_last(stamp, frame)

    @override
    def final(self) -> Parameters:
        shared_N, grid, buffers = self._agreed
        residual_N = self._accumulator.residual_counts()
        return Parameters(None, shared_N, residual_N, grid, buffers)

    @override
    def agreed(self) -> Parameters:
        shared_N, grid, buffers = self._agreed
        return Parameters(None, shared_N, None, grid, buffers)

    @override
    def outcome(self) -> Sent | None:
        return self._accumulator.sent


def _check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        hint = f"{wanted.__module__}.{wanted.__qualname__}"
        raise OptionError(f"{name} must be a {hint}, got {value!r}")


def _check_whole(name: str, value: object, least: int, other: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = f"a whole number >= {least} {other}".rstrip()
        raise OptionError(f"{name} must be {allowed}, got {value!r}")


def _check_bound(name: str, value: Any) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise OptionError(f"{name} must be seconds > 0 or None, got {value!r}")
