"""One replica's vectors and the outcome of its last exchange.

Decides what to send and applies what comes; bytes, routes and time are elsewhere, the
vectors themselves in :mod:`daskdl.progress`. Everything here belongs to the thread
that trains: no method may overlap another one or a step of the optimizer.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from daskdl import kernels
from daskdl.codec import DenseUpdate, Update, counts_of, quantize
from daskdl.errors import CodecError, OptionError, RunError
from daskdl.layers import LayerThresholds
from daskdl.progress import Counts, Progress, join_counts, split_counts, split_entries
from daskdl.proposals import DenseProposal, Proposal
from daskdl.quanta import count_of
from daskdl.residuals import ResidualPostProcessor
from daskdl.sections import Section, Sections
from daskdl.segments import segments_of
from daskdl.thresholds import Sent, ThresholdAlgorithm
from daskdl.vectors import FlatParameters, grid_for

REGRID_ABOVE = 2**28  # a quarter of where the kernels stop sending
REGRID_BELOW = 2**25


class Accumulator:
    """One replica's progress: propose what to send, take it out, apply what comes.

    Building it rounds the parameters to the grid once, so that all replicas that start
    from the same module share the same counts. Extra memory: 4 bytes per parameter;
    strict or half types 8; strict float64 12. A quantum is 1 to 2**22 steps of the grid
    (2**-2 at most while no parameter starts above 1): thresholds beyond are limited.

    Args:
        parameters: The module's flat parameters, changed in place from now on.
        threshold: Chooses the threshold of each exchange; or several that do, by
            pattern of parameter names.
        residual: Limits what is carried over.
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
        >>> accumulator = Accumulator(parameters, FixedThreshold(0.25), KeepResidual())
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.75, 0.0]]))  # a step
        >>> [proposal] = accumulator.propose()
        >>> accumulator.take_(proposal)
        >>> accumulator.residual_norm()
        0.5
    """

    size: int  # N
    grid: float  # one step of shared, parameter units, a power of two
    sections: Sections  # parameters with an algorithm each
    clipped: float  # mass removed so far, parameter units

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
        self.size = parameters.size
        self.grid = grid_for(parameters)
        self.clipped = 0.0
        self._showing = False
        self._strict = apply == "strict"
        thresholds = LayerThresholds.of(threshold)
        assigned = thresholds.assign(parameters.slices)  # before anything is changed
        self._groups = [
            Progress(group, self.grid, self._strict) for group in parameters.groups
        ]
        segments = segments_of(parameters, self._groups, assigned)
        sent = {} if last is None else last
        self.sections = Sections(
            Section(p, thresholds[p], residual, segments[p], sent.get(p))
            for p in thresholds
        )

    def absorb_(self) -> None:
        """Take notice of a step of the optimizer; needed where no exchange follows.

        Nothing to do for eager float32 and float64; a second call finds nothing.
        """
        for group in self._free():
            group.absorb_()

    def scale_(self, scale: float) -> float:
        """Let a replica's own updates count so many times for the group.

        Eager: the module goes on at the whole learning rate, as if the others went the
        same way, and what is sent is scaled. Strict: the learning rate itself is. What
        is in the residual already has been scaled.

        Args:
            scale: > 0; 1 / replicas: shared moves by the mean of what all do.

        Returns:
            Factor on the learning rate.
        """
        if self._strict:
            return scale
        for group in self._free():
            if group.weight != 1.0 / scale:
                group.weigh_(1.0 / scale)
        return 1.0

    @property
    def weight(self) -> float:
        """How many times the residual local is ahead of shared."""
        return self._groups[0].weight

    def propose(self) -> list[Proposal] | list[DenseProposal]:
        """List what would be sent now; nothing is taken out before :meth:`take_`.

        Returns:
            One for each pattern, first those that were taken least often; a dense one
            alone where a rule wants that.

        Raises:
            OptionError: If a rule returns a threshold that is not finite and > 0.
        """
        if self.sections.send_dense:
            return [self.propose_dense()]
        self.absorb_()
        sections = self.sections.by_exchanges()
        return [section.propose(self.size, self.grid) for section in sections]

    def propose_dense(self) -> DenseProposal:
        """Round the whole residual to eight bits; see :func:`daskdl.codec.quantize`.

        As with entries, shared is not moved beyond ``2**30`` steps; what would be
        stays in the residual.

        Raises:
            OptionError: If a rule returns a threshold that is not finite and > 0.
        """
        self.absorb_()
        rules = self.sections.rules_beside_dense(self.grid)
        counts = [group.residual_counts(kernels.GUARD) for group in self._groups]
        return DenseProposal(self.grid, quantize(join_counts(counts)), rules)

    def take_(self, proposal: Proposal | DenseProposal) -> None:
        """Take a proposal out of the residual, once the channel has accepted it.

        Shared moves by it. Of a sparse one the residual is then limited, and what that
        removes is added to ``clipped``; a dense one leaves nothing to limit, but what
        rounding left. A refused proposal is just forgotten.

        Args:
            proposal: Of the last ones made, taken once; empty ones count as exchanges
                too.

        Raises:
            OptionError: If the grid has changed since, or the residual rule returns a
                bound below the threshold; nothing is changed.
        """
        if isinstance(proposal, DenseProposal):
            self._take_dense_(proposal)
            return
        threshold, count = proposal.threshold, proposal.count
        if threshold != count * self.grid:
            raise OptionError(
                f"threshold must be {count} steps of {self.grid}, got {threshold}; "
                "propose again after a change of grid"
            )
        section = self.sections[proposal.pattern]
        bound = section.bound(threshold)
        for group, entries_K in split_entries(self._free(), proposal.entries_K):
            self.clipped += group.take_(entries_K, count, bound)
        section.note(proposal)

    def _take_dense_(self, proposal: DenseProposal) -> None:
        if proposal.grid != self.grid:
            raise OptionError(
                f"the grid must be {self.grid}, got {proposal.grid}; propose again "
                "after a change of grid"
            )
        counts_N = counts_of(proposal.quantized)
        for group, part_N in split_counts(self._free(), counts_N):
            group.take_counts_(part_N)
        self.sections.note_dense(proposal.rules)

    def apply_(self, update: Update) -> None:
        """Move local and shared by another replica's update; the residual stays.

        Raises:
            CodecError: If it is for another size or grid, or its entries are not
                ascending positions of this model; nothing is changed.
        """
        if isinstance(update, DenseUpdate):
            if update.grid != self.grid:
                raise CodecError(f"grid must be {self.grid}, got {update.grid}")
            self.apply_counts_(update.counts_N)
            return
        if update.size != self.size:
            raise CodecError(f"model has {self.size} parameters, got {update.size}")
        count = count_of(update.threshold, self.grid)
        for group, entries_K in split_entries(self._free(), update.entries_K):
            group.apply_(entries_K, count)

    def apply_counts_(self, counts_N: Counts) -> None:
        """Move local and shared by many updates at once, as a full inbox folds them.

        Args:
            counts_N: Their sum, int32, shape (N,), steps of the grid.

        Raises:
            CodecError: If it has another size; nothing is changed.
        """
        for group, part_N in split_counts(self._free(), counts_N):
            group.apply_counts_(part_N)

    def residual_counts(self) -> Counts:
        """Return the residual in whole steps of the grid, int32, shape (N,).

        Rounded, and limited so that shared plus it stays within int32; NaN counts as 0.
        """
        self.absorb_()
        return join_counts([group.residual_counts() for group in self._groups])

    def hand_over_(self) -> Counts:
        """Move shared by :meth:`residual_counts` and return it, to be sent dense.

        What is left in the residual is below half a step.
        """
        self.absorb_()
        return join_counts([group.hand_over_() for group in self._groups])

    def shared_counts(self) -> Counts:
        """Return a copy of shared in steps of the grid, int32, shape (N,)."""
        return join_counts([group.shared_N.cpu() for group in self._groups])

    def replace_shared_(self, counts_N: Counts, grid: float) -> None:
        """Start from a snapshot, or repair: shared is replaced, the residual stays.

        Args:
            counts_N: Another replica's :meth:`shared_counts`.
            grid: The other replica's grid.

        Raises:
            CodecError: If the counts have another size; nothing is changed.
        """
        for group, part_N in split_counts(self._free(), counts_N):
            group.replace_shared_(part_N, grid)
        self.grid = grid

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is shared, and what is this replica's own: plain values and tensors.

        The tensors are those that go on changing: copy them.
        """
        self.absorb_()
        shared = {"grid": self.grid, "shared": [g.shared_N for g in self._groups]}
        own = {
            "local": [group.local_N for group in self._groups],
            "weight": self.weight,
            "clipped": self.clipped,
            "sections": self.sections.state(),
        }
        return shared, own

    def restore_(
        self, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from what `state` made: of one replica exactly, or of several.

        Args:
            shared: The same for all.
            parts: What was their own. Of one, all is as it was; of more, the residuals
                add up; of none, there is no residual.
        """
        grid = shared["grid"]
        for i, group in enumerate(self._groups):
            shared_N = shared["shared"][i].to(group.flat.device)
            sent_N = shared_N.to(group.local_N.dtype) * grid
            first = parts[0]["local"][i] if parts else sent_N
            weight = parts[0]["weight"] if parts else group.weight
            group.restore_(shared_N, first, grid, weight)
            for part in parts[1:]:
                group.add_residual_(
                    part["local"][i], shared["shared"][i], part["weight"]
                )
        self.grid = grid
        self.clipped = sum(part["clipped"] for part in parts)
        for part in parts[:1]:
            self.sections.restore_(part["sections"])

    def residual_norm(self) -> float:
        """Return the Euclidean length of the residual, parameter units."""
        self.absorb_()
        return math.sqrt(sum(group.squares() for group in self._groups))

    def digest(self) -> int:
        """Return a CRC-32 of grid and shared: equal on replicas that agree."""
        checksum = zlib.crc32(struct.pack("<d", self.grid))
        for group in self._groups:
            checksum = group.checksum(checksum)
        return checksum

    def regrid_(self) -> float:
        """Coarsen the grid if shared has grown far beyond the start; at a barrier.

        Above ``2**28`` steps the grid is multiplied by the smallest power of two that
        brings shared below ``2**25``. It depends on shared alone, so that replicas that
        agree go on agreeing. Local is unchanged: the residual keeps what is rounded.

        Returns:
            The grid from now on, parameter units.
        """
        self.absorb_()
        largest = max(group.largest_count() for group in self._groups)
        if largest > REGRID_ABOVE:
            shift = 1
            while (largest + (1 << shift >> 1)) >> shift >= REGRID_BELOW:
                shift += 1
            for group in self._groups:
                group.regrid_(shift)
            self.grid *= 2**shift
        return self.grid

    @contextlib.contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Let the module show shared, as in validation, and then what it showed before.

        What it showed comes back bit for bit; eager float32 and float64 keep a copy.
        What needs or moves local raises RunError inside.
        """
        self.absorb_()
        self._showing = True
        try:
            with contextlib.ExitStack() as stack:
                for group in self._groups:
                    stack.enter_context(group.showing_shared())
                yield
        finally:
            self._showing = False

    def _free(self) -> list[Progress]:
        if self._showing:
            raise RunError("the module shows shared; leave showing_shared() first")
        return self._groups
