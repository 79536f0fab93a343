"""Updates of one replica: found in the residual, encoded, and committed.

A threshold algorithm chooses the quantum of each parameter group.
:meth:`Compressor.propose` lists pending updates, and :meth:`Compressor.commit_` takes
accepted updates out of the residual. Routing and time are elsewhere. Only the training
thread calls these methods, between optimizer steps.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl import codec
from daskdl.codec import Quantized, Stamp, counts_of, quantize
from daskdl.compression.flat import FlatParameters
from daskdl.compression.kernels import GUARD
from daskdl.compression.replica_vector import (
    MAX_COUNT,
    Counts,
    GroupEntries,
    ReplicaVector,
    ResidualView,
    on_host,
    ranges_by_pattern,
)
from daskdl.compression.residuals import ResidualPostProcessor
from daskdl.compression.thresholds import (
    DENSE_DENSITY,
    LayerThresholds,
    Outcome,
    ThresholdAlgorithm,
    summable,
)
from daskdl.errors import OptionError

Frame = npt.NDArray[np.uint8]


@dataclass(eq=False)
class PendingSparse:
    """Quanta at some positions of one parameter group, not committed yet.

    :meth:`pack` may run in another thread, while the vectors change.
    """

    pattern: str  # pattern of the parameter group
    grid: float  # one step, parameter units
    quantum_count: int  # the quantum in steps of the grid, in [1, 2**22]
    threshold: float  # of the algorithm, not rounded, within the range of the grid
    parts: Sequence[GroupEntries]  # on the devices, ascending in position
    size: int  # N
    entries_K: Counts  # the same in the host's memory
    levels_K: npt.NDArray[np.uint8]
    threads: int = field(default_factory=torch.get_num_threads)  # that may pack
    _body: codec.Body | None = None  # once it is packed

    @property
    def quantum(self) -> float:
        """The quantum: on the grid, exact in float32, parameter units."""
        return self.quantum_count * self.grid

    @property
    def entries(self) -> int:
        """K; an update without entries is not sent."""
        return len(self.entries_K)

    def pack(self) -> codec.Body:
        """Pack the entries once, and choose how many quanta each has."""
        if self._body is None:
            self._body = codec.pack(
                self.size, self.entries_K, self.levels_K, threads=self.threads
            )
        return self._body

    def encode(self, stamp: Stamp) -> Frame:
        """Encode the update as a frame of the kind that carries most for its bytes."""
        return codec.framed(stamp, self.quantum, self.pack())


@dataclass(frozen=True, eq=False)
class PendingDense:
    """The whole residual in eight bits per parameter, not committed yet."""

    grid: float  # one step, parameter units
    quantized: Quantized  # steps of the grid
    # By pattern, to continue from; empty: those of the last exchange.
    thresholds: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def entries(self) -> int:
        """N; 0 if all values are 0, so that the update is not sent."""
        values_N = self.quantized.values_N
        return len(values_N) if values_N.any() else 0

    def encode(self, stamp: Stamp) -> Frame:
        """Encode the update as a DENSE8 frame."""
        return codec.encode_dense(stamp, self.grid, self.quantized)


PendingUpdate = PendingSparse | PendingDense


class Sample(NamedTuple):
    """A sample of the residual of a parameter group."""

    size: int  # parameters of the group
    residuals: Tensor  # on the CPU, parameter units
    threshold: float  # of the last exchange, parameter units; NaN before the first


@dataclass(eq=False)
class ParameterGroup:
    """The parameters whose names match one pattern."""

    algorithm: ThresholdAlgorithm
    residual: ResidualView
    sent: Outcome | None = None  # outcome of the last exchange
    exchanges: int = 0

    def next_threshold(self, last: Outcome | None, grid: float) -> float:
        """Return the algorithm's next threshold, limited to the range of the grid."""
        threshold = self.algorithm.next_threshold(self.residual, last)
        if not 0 < threshold < math.inf:
            raise OptionError(
                f"a threshold must be finite and > 0, got {threshold!r} "
                f"from {self.algorithm!r}"
            )
        # Without limits, the threshold would fall towards 0 while the residual is zero,
        # and need as many exchanges to rise again.
        return min(max(threshold, grid), MAX_COUNT * grid)

    def record(self, threshold: float, density: float) -> None:
        """Record the outcome of an exchange."""
        self.sent = Outcome(threshold, density)
        self.exchanges += 1


class Compressor:
    """Proposes updates of one replica, and commits the accepted ones.

    A quantum is 1 to 2**22 steps of the grid, and thresholds are limited to that range.
    If no parameter is above 1 at the start, the largest quantum is 0.25.

    Args:
        parameters: The module's flat parameters, changed in place from now on; see
            :class:`daskdl.compression.replica_vector.ReplicaVector`.
        threshold: Threshold algorithm, or algorithms by pattern of parameter names.
        residual: Limits the residual after an exchange.
        apply: "eager" (the module computes with local) or "strict" (with shared).
        momentum: Part of each committed update that the residual keeps, in [0, 1).
        summed: Updates are summed with those of other replicas on their way, so that
            quanta are rounded, see :func:`~daskdl.compression.thresholds.summable`.

    Example:
        >>> import torch
        >>> from daskdl import FixedThreshold, KeepResidual
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> parameters = FlatParameters(layer)
        >>> compressor = Compressor(parameters, FixedThreshold(0.25), KeepResidual())
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.875, 0.0]]))  # a step
        >>> compressor.vector.sync_from_parameters_()
        >>> [update] = compressor.propose()
        >>> compressor.commit_(update)
        >>> compressor.vector.farthest()
        0.125
    """

    vector: ReplicaVector
    groups: Mapping[str, ParameterGroup]  # by pattern, in the order of the patterns
    clipped: float  # mass removed so far, parameter units
    clipped_per_entry: float  # mean mass removed by the last exchange, parameter units

    def __init__(
        self,
        parameters: FlatParameters,
        threshold: ThresholdAlgorithm | Mapping[str, ThresholdAlgorithm],
        residual: ResidualPostProcessor,
        apply: Literal["eager", "strict"] = "eager",
        momentum: float = 0.0,
        *,
        summed: bool = False,
    ) -> None:
        self.momentum = momentum
        self._summed = summed
        self.clipped = self.clipped_per_entry = 0.0
        thresholds = LayerThresholds.of(threshold)
        assigned = thresholds.assign(parameters.slices)  # before anything is changed
        self.vector = ReplicaVector(parameters, apply == "strict")
        self._residual = residual
        ranges = ranges_by_pattern(parameters, self.vector, assigned)
        self.groups = {
            pattern: ParameterGroup(
                algorithm, ResidualView(self.vector, ranges[pattern])
            )
            for pattern, algorithm in thresholds.items()
        }

    @property
    def sent(self) -> dict[str, Outcome]:
        """Outcome of the last exchange by pattern, without patterns that had none."""
        return {p: g.sent for p, g in self.groups.items() if g.sent is not None}

    def propose(self, *, dense: bool = False) -> list[PendingUpdate]:
        """Return the updates to send now; nothing changes before :meth:`commit_`.

        Quanta that would move shared beyond ``2**30`` steps stay in the residual.

        Returns:
            One update for each pattern, least often committed patterns first; or a
            single dense update of the whole residual.
        """
        grid = self.vector.grid
        if dense:
            # A dense update needs no threshold, so the last one is kept: an algorithm
            # would raise it after every dense update, because of DENSE_DENSITY.
            thresholds = {
                pattern: group.sent.threshold
                if group.sent
                else group.next_threshold(None, grid)
                for pattern, group in self.groups.items()
            }
            return [replace(self.whole_residual(), thresholds=thresholds)]
        size = self.vector.size
        updates: list[PendingUpdate] = []
        for pattern, group in sorted(
            self.groups.items(), key=lambda item: item[1].exchanges
        ):
            threshold = group.next_threshold(group.sent, grid)
            steps = threshold / grid
            count = round(summable(steps) if self._summed else steps)
            parts = group.residual.find(count)
            updates.append(
                PendingSparse(
                    pattern, grid, count, threshold, parts, size, *on_host(parts)
                )
            )
        return updates

    def whole_residual(self) -> PendingDense:
        """Return the whole residual as an update that leaves thresholds as they are."""
        counts_N = self.vector.residual_counts(GUARD)
        return PendingDense(self.vector.grid, quantize(counts_N))

    def commit_(self, update: PendingUpdate) -> None:
        """Take an update out of the residual, once the channel has accepted it.

        Steps and updates of others may have come since it was proposed: the residual
        is then what they made of it, less the update.

        Shared moves by the update, and the residual keeps ``momentum`` times as much,
        which is sent again with later updates. A sparse update then clips the residual
        and adds the removed mass to ``clipped``; a dense one leaves only what momentum
        keeps, and rounding errors. An update that the channel did not accept is
        simply dropped.

        Args:
            update: Returned by :meth:`propose` since the last commit, committed once;
                empty updates count as exchanges too.
        """
        if update.grid != self.vector.grid:
            raise OptionError(
                f"the grid must be {self.vector.grid}, got {update.grid}; propose "
                "again after a change of grid"
            )
        if isinstance(update, PendingDense):
            counts_N = counts_of(update.quantized)
            self.vector.apply_counts_(
                counts_N, from_residual=True, momentum=self.momentum
            )
            for pattern, threshold in update.thresholds.items():
                self.groups[pattern].record(threshold, DENSE_DENSITY)
            return
        group, quantum = self.groups[update.pattern], update.quantum
        bound = self._residual.bound(group.exchanges, quantum)
        if not bound >= quantum:
            raise OptionError(
                f"a bound must be >= the quantum {quantum}, got {bound!r} "
                f"from {self._residual!r}"
            )
        removed = self.vector.commit_(
            update.parts,
            update.quantum_count,
            bound,
            leveled=update.pack().levels_K is not None,
            momentum=self.momentum,
        )
        self.clipped += removed
        self.clipped_per_entry = removed / max(update.entries, 1)
        group.record(update.threshold, update.entries / max(group.residual.size, 1))

    def samples(self, most: int) -> list[Sample]:
        """Sample about ``most`` residuals, from each group its share by size."""
        samples = []
        for group in self.groups.values():
            size = group.residual.size
            residuals = group.residual.sample(max(most * size // self.vector.size, 1))
            threshold = math.nan if group.sent is None else group.sent.threshold
            samples.append(Sample(size, residuals, threshold))
        return samples

    def continue_(self, sent: Mapping[str, tuple[float, float]]) -> None:
        """Continue from thresholds and densities of an earlier run, by pattern."""
        for pattern in self.groups.keys() & sent.keys():
            threshold, density = sent[pattern]
            self.groups[pattern].sent = Outcome(float(threshold), float(density))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state shared by all replicas, and this replica's own state.

        The tensors are not copies and change later.
        """
        shared, replica_state = self.vector.state()
        groups = {
            pattern: {
                "exchanges": group.exchanges,
                "threshold": group.sent and group.sent.threshold,
                "density": group.sent and group.sent.density,
            }
            for pattern, group in self.groups.items()
        }
        return shared, {**replica_state, "clipped": self.clipped, "groups": groups}

    def restore_(
        self, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Restore the state of one replica, or the combined state of several.

        Args:
            shared: Shared state from `state`.
            parts: Own states from `state`. One is restored exactly; with several,
                residuals and clipped mass add up and thresholds are those of the first;
                with none, the residual is 0. New patterns start without an outcome.
        """
        self.vector.restore_(shared, parts)
        self.clipped = sum(part["clipped"] for part in parts)
        groups = parts[0]["groups"] if parts else {}
        for pattern in self.groups.keys() & groups.keys():
            group, saved = self.groups[pattern], groups[pattern]
            group.exchanges = operator.index(saved["exchanges"])
            if saved["threshold"] is not None:
                group.sent = Outcome(float(saved["threshold"]), float(saved["density"]))
