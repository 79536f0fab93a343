"""What one replica sends, and the outcome of its last exchange.

Decides on it, and takes it out of the residual; bytes, routes and time are elsewhere.
The vectors are :mod:`daskdl.model_progress`'s, which applies what comes. Everything
here belongs to the thread that trains: no method may overlap another one or a step of
the optimizer.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from daskdl import kernels
from daskdl.codec import counts_of, quantize
from daskdl.errors import OptionError
from daskdl.layers import LayerThresholds
from daskdl.model_progress import ModelProgress
from daskdl.proposals import DenseProposal, Proposal
from daskdl.residuals import ResidualPostProcessor
from daskdl.sections import Section, Sections
from daskdl.segments import segments_of
from daskdl.thresholds import Sent, ThresholdAlgorithm
from daskdl.vectors import FlatParameters


class Accumulator:
    """One replica's decisions: propose what to send, and take it out.

    A quantum is 1 to 2**22 steps of the grid (2**-2 at most while no parameter starts
    above 1): thresholds beyond are limited.

    Args:
        parameters: The module's flat parameters, changed in place from now on; see
            :class:`daskdl.model_progress.ModelProgress`.
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
        >>> accumulator.progress.residual_norm()
        0.5
    """

    progress: ModelProgress  # what there is to send, and what is shared
    sections: Sections  # parameters with an algorithm each
    clipped: float  # mass removed so far, parameter units
    cut: float  # by the last exchange, of each entry in the mean, parameter units

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
        self.clipped = self.cut = 0.0
        thresholds = LayerThresholds.of(threshold)
        assigned = thresholds.assign(parameters.slices)  # before anything is changed
        self.progress = ModelProgress(parameters, apply == "strict")
        segments = segments_of(parameters, self.progress.groups, assigned)
        sent = {} if last is None else last
        self.sections = Sections(
            Section(p, thresholds[p], residual, segments[p], sent.get(p))
            for p in thresholds
        )

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
        self.progress.absorb_()
        size, grid = self.progress.size, self.progress.grid
        return [section.propose(size, grid) for section in self.sections.by_exchanges()]

    def propose_dense(self) -> DenseProposal:
        """Round the whole residual to eight bits; see :func:`daskdl.codec.quantize`.

        As with entries, shared is not moved beyond ``2**30`` steps; what would be
        stays in the residual.

        Raises:
            OptionError: If a rule returns a threshold that is not finite and > 0.
        """
        counts_N = self.progress.residual_counts(kernels.GUARD)
        grid = self.progress.grid
        rules = self.sections.rules_beside_dense(grid)
        return DenseProposal(grid, quantize(counts_N), rules)

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
        threshold, count, grid = proposal.threshold, proposal.count, self.progress.grid
        if threshold != count * grid:
            raise OptionError(
                f"threshold must be {count} steps of {grid}, got {threshold}; "
                "propose again after a change of grid"
            )
        section = self.sections[proposal.pattern]
        bound = section.bound(threshold)
        removed = self.progress.take_(proposal.entries_K, count, bound)
        self.clipped += removed
        self.cut = removed / max(proposal.entries, 1)
        section.note(proposal)

    def _take_dense_(self, proposal: DenseProposal) -> None:
        if proposal.grid != self.progress.grid:
            raise OptionError(
                f"the grid must be {self.progress.grid}, got {proposal.grid}; propose "
                "again after a change of grid"
            )
        self.progress.take_counts_(counts_of(proposal.quantized))
        self.sections.note_dense(proposal.rules)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is shared, and what is this replica's own: plain values and tensors.

        The tensors are those that go on changing: copy them.
        """
        shared, own = self.progress.state()
        return shared, {
            **own,
            "clipped": self.clipped,
            "sections": self.sections.state(),
        }

    def restore_(
        self, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on from what `state` made: of one replica exactly, or of several.

        Args:
            shared: The same for all.
            parts: What was their own. Of one, all is as it was; of more, residuals and
                what was clipped add up; of none, there is no residual.
        """
        self.progress.restore_(shared, parts)
        self.clipped = sum(part["clipped"] for part in parts)
        for part in parts[:1]:
            self.sections.restore_(part["sections"])
