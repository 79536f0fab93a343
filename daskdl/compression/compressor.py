"""The updates of one replica: found, framed, and taken out of the residual.

A threshold algorithm decides per parameter group how large a residual has to be before
it is sent. :meth:`Compressor.propose` lists pending updates, the channel accepts them
or not, and :meth:`Compressor.commit_` takes accepted ones out of the residual. Routing
and time are elsewhere. Only the training thread calls these methods, between steps of
the optimizer.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from daskdl import codec
from daskdl.codec import Quantized, Stamp, counts_of, quantize
from daskdl.compression.flat import FlatParameters
from daskdl.compression.kernels import GUARD
from daskdl.compression.replica_vector import (
    MAX_COUNT,
    Counts,
    ReplicaVector,
    ResidualView,
    ranges_by_pattern,
)
from daskdl.errors import OptionError
from daskdl.residuals import ResidualPostProcessor
from daskdl.thresholds import (
    DENSE_DENSITY,
    LayerThresholds,
    LinkAlgorithm,
    Measured,
    Sent,
    ThresholdAlgorithm,
)

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class PendingSparse:
    """Quanta at some positions of one parameter group, not committed yet."""

    pattern: str  # of the parameter group
    size: int  # N
    grid: float  # one step, parameter units
    count: int  # the quantum in steps of the grid, in [1, 2**22]
    chosen: float  # threshold of the algorithm, within what the grid can express
    entries_K: Counts  # +(i + 1) or -(i + 1), ascending in i

    @cached_property
    def threshold(self) -> float:
        """The quantum: on the grid, exact in float32, parameter units."""
        return self.count * self.grid

    @cached_property
    def entries(self) -> int:
        """K; without any there is nothing to send."""
        return len(self.entries_K)

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a frame of the smallest kind."""
        return codec.encode(stamp, self.size, self.threshold, self.entries_K)


@dataclass(frozen=True, eq=False)
class PendingDense:
    """The whole residual, rounded to eight bits in each block, not committed yet."""

    grid: float  # one step, parameter units
    quantized: Quantized  # steps of the grid
    thresholds: Mapping[str, float]  # to go on from, by pattern

    @cached_property
    def entries(self) -> int:
        """N; 0 if nothing would move, so that there is nothing to send."""
        values_N = self.quantized.values_N
        return len(values_N) if values_N.any() else 0

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a DENSE8 frame."""
        return codec.encode_dense(stamp, self.grid, self.quantized)


PendingUpdate = PendingSparse | PendingDense


class Sample(NamedTuple):
    """Some of the residuals of a parameter group."""

    size: int  # parameters of the group
    residuals: Tensor  # on the CPU, parameter units
    threshold: float  # of the last exchange, parameter units; NaN: there was none


@dataclass(eq=False)
class ParameterGroup:
    """The parameters whose names match one pattern."""

    algorithm: ThresholdAlgorithm
    residual: ResidualView
    sent: Sent | None  # outcome of the last exchange
    exchanges: int = 0

    def next_threshold(self, last: Sent | None, grid: float) -> float:
        """Ask the algorithm, and limit its threshold to what the grid can express.

        Raises:
            OptionError: If it returns a threshold that is not finite and > 0.
        """
        threshold = self.algorithm.next_threshold(self.residual, last)
        if not 0 < threshold < math.inf:
            raise OptionError(
                f"a threshold must be finite and > 0, got {threshold!r} "
                f"from {self.algorithm!r}"
            )
        # Or that of an algorithm with nothing to send would sink to 0, and take as long
        # to return.
        return min(max(threshold, grid), MAX_COUNT * grid)

    def record(self, threshold: float, density: float) -> None:
        """Remember the outcome of an exchange."""
        link = None if self.sent is None else self.sent.link
        self.sent = Sent(threshold, density, link)
        self.exchanges += 1


class Compressor:
    """One replica's updates: propose some to send, and commit those accepted.

    A quantum is 1 to 2**22 steps of the grid (2**-2 at most while no parameter starts
    above 1): thresholds beyond are limited.

    Args:
        parameters: The module's flat parameters, changed in place from now on; see
            :class:`daskdl.compression.replica_vector.ReplicaVector`.
        threshold: Chooses the threshold of each exchange; or several that do, by
            pattern of parameter names.
        residual: Limits the residual after an exchange.
        apply: "eager" (the module computes with local) or "strict" (with shared).
        last: Outcomes to carry on from, of an earlier run, by pattern.

    Raises:
        OptionError: If ``apply`` is neither, or patterns and parameters do not match.

    Example:
        >>> import torch
        >>> from daskdl import FixedThreshold, KeepResidual
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> parameters = FlatParameters(layer)
        >>> compressor = Compressor(parameters, FixedThreshold(0.25), KeepResidual())
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.75, 0.0]]))  # a step
        >>> compressor.vector.sync_from_parameters_()
        >>> [update] = compressor.propose()
        >>> compressor.commit_(update)
        >>> compressor.vector.farthest()
        0.5
    """

    vector: ReplicaVector
    groups: Mapping[str, ParameterGroup]  # by pattern, in the order of the patterns
    clipped: float  # mass removed so far, parameter units
    clipped_per_entry: float  # by the last exchange, in the mean, parameter units
    follows_link: bool  # an algorithm wants `learn` after each exchange

    def __init__(
        self,
        parameters: FlatParameters,
        threshold: ThresholdAlgorithm | Mapping[str, ThresholdAlgorithm],
        residual: ResidualPostProcessor,
        apply: Literal["eager", "strict"] = "eager",
        last: Mapping[str, Sent] | None = None,
    ) -> None:
        if apply not in {"eager", "strict"}:
            raise OptionError(f"apply must be 'eager' or 'strict', got {apply!r}")
        self.clipped = self.clipped_per_entry = 0.0
        thresholds = LayerThresholds.of(threshold)
        assigned = thresholds.assign(parameters.slices)  # before anything is changed
        self.vector = ReplicaVector(parameters, apply == "strict")
        self._residual = residual
        ranges = ranges_by_pattern(parameters, self.vector, assigned)
        self.groups = {
            pattern: ParameterGroup(
                algorithm,
                ResidualView(self.vector, ranges[pattern]),
                (last or {}).get(pattern),
            )
            for pattern, algorithm in thresholds.items()
        }
        self._linked = [
            (group, group.algorithm)
            for group in self.groups.values()
            if isinstance(group.algorithm, LinkAlgorithm)
        ]
        self.follows_link = bool(self._linked)

    @property
    def sent(self) -> dict[str, Sent]:
        """Outcome of the last exchange of each pattern that has had one."""
        return {p: g.sent for p, g in self.groups.items() if g.sent is not None}

    def propose(self, *, dense: bool = False) -> list[PendingUpdate]:
        """List the updates to send now; nothing changes before :meth:`commit_`.

        Quanta that would move shared beyond ``2**30`` steps stay in the residual.

        Args:
            dense: Send everything in eight bits, whatever the algorithms say.

        Returns:
            One update for each pattern, first those that were committed least often; or
            a single dense one, of the whole residual.

        Raises:
            OptionError: If an algorithm returns a threshold that is not finite and > 0.
        """
        grid = self.vector.grid
        if dense or any(rule.sends_dense(group.sent) for group, rule in self._linked):
            # A threshold has no effect here, so an algorithm is asked for its first one
            # only: raised at each, with nothing that could follow from it, it would be
            # out of reach soon.
            thresholds = {
                pattern: group.sent.threshold
                if group.sent
                else group.next_threshold(None, grid)
                for pattern, group in self.groups.items()
            }
            counts_N = self.vector.residual_counts(GUARD)
            return [PendingDense(grid, quantize(counts_N), thresholds)]
        size = self.vector.size
        updates: list[PendingUpdate] = []
        for pattern, group in sorted(
            self.groups.items(), key=lambda item: item[1].exchanges
        ):
            chosen = group.next_threshold(group.sent, grid)
            count = round(chosen / grid)
            entries_K = group.residual.find(count)
            updates.append(PendingSparse(pattern, size, grid, count, chosen, entries_K))
        return updates

    def commit_(self, update: PendingUpdate) -> None:
        """Take an update out of the residual, once the channel has accepted it.

        Shared moves by it. After a sparse one the residual is clipped, and the removed
        mass is added to ``clipped``; a dense one leaves rounding errors only. An update
        that was not accepted is dropped.

        Args:
            update: One of the last ones proposed, committed once; empty ones count as
                exchanges too.

        Raises:
            OptionError: If the grid has changed since, or the residual rule returns a
                bound below the threshold; nothing is changed.
        """
        if update.grid != self.vector.grid:
            raise OptionError(
                f"the grid must be {self.vector.grid}, got {update.grid}; propose "
                "again after a change of grid"
            )
        if isinstance(update, PendingDense):
            self.vector.apply_counts_(counts_of(update.quantized), own=True)
            for pattern, threshold in update.thresholds.items():
                self.groups[pattern].record(threshold, DENSE_DENSITY)
            return
        group, threshold = self.groups[update.pattern], update.threshold
        bound = self._residual.bound(group.exchanges, threshold)
        if not bound >= threshold:
            raise OptionError(
                f"a bound must be >= the threshold {threshold}, got {bound!r} "
                f"from {self._residual!r}"
            )
        removed = self.vector.commit_(update.entries_K, update.count, bound)
        self.clipped += removed
        self.clipped_per_entry = removed / max(update.entries, 1)
        group.record(update.chosen, update.entries / max(group.residual.size, 1))

    def learn(self, measured: Measured) -> None:
        """Give algorithms that follow the link the measurements of the last exchange.

        A dense exchange that they did not ask for is one of the warm-up and is left
        out, as it does not depend on their choice.
        """
        for group, rule in self._linked:
            sent = group.sent
            if sent is not None and measured.dense == rule.sends_dense(sent):
                group.sent = sent._replace(link=rule.learn(sent.link, measured))

    def samples(self, most: int) -> list[Sample]:
        """Sample about ``most`` residuals of the model, from each group its share."""
        samples = []
        for group in self.groups.values():
            size = group.residual.size
            own = group.residual.sample(max(most * size // self.vector.size, 1))
            threshold = math.nan if group.sent is None else group.sent.threshold
            samples.append(Sample(size, own, threshold))
        return samples

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return values and tensors: those shared by all, and this replica's own.

        The tensors go on changing: copy them. Measurements of a link are left out.
        """
        shared, own = self.vector.state()
        groups = {
            pattern: {
                "exchanges": group.exchanges,
                "threshold": group.sent and group.sent.threshold,
                "density": group.sent and group.sent.density,
            }
            for pattern, group in self.groups.items()
        }
        return shared, {**own, "clipped": self.clipped, "groups": groups}

    def restore_(
        self, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Restore what `state` returned, of one replica exactly or of several combined.

        Args:
            shared: The shared part, the same for all.
            parts: The own parts. One is restored as it was; of several, residuals and
                clipped mass add up, and thresholds are those of the first; with none,
                there is no residual. New patterns begin without an outcome.
        """
        self.vector.restore_(shared, parts)
        self.clipped = sum(part["clipped"] for part in parts)
        groups = parts[0]["groups"] if parts else {}
        for pattern in self.groups.keys() & groups.keys():
            group, own = self.groups[pattern], groups[pattern]
            group.exchanges = operator.index(own["exchanges"])
            if own["threshold"] is not None:
                group.sent = Sent(float(own["threshold"]), float(own["density"]))
