"""What one replica sends: updates proposed, framed, and taken out of the residual.

A threshold algorithm decides per parameter group how large a step has to be before it
is sent. Routes and time are elsewhere. Everything here belongs to the training thread:
no method may overlap another one or a step of the optimizer.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from daskdl import codec, kernels
from daskdl.codec import Quantized, Stamp, counts_of, quantize
from daskdl.compression.flat import FlatParameters
from daskdl.compression.replica_vector import (
    MAX_COUNT,
    ModelProgress,
    Residuals,
    Segment,
    segments_of,
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

Counts = npt.NDArray[np.int32]
Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Proposal:
    """Quanta at some positions, of the parameters that one algorithm decides on."""

    pattern: str  # whose algorithm it was
    size: int  # N
    threshold: float  # the quantum: on the grid, exact in float32, parameter units
    rule: float  # what the rule said, within what the grid can express
    count: int  # the quantum in steps of the grid, in [1, 2**22]
    entries_K: Counts  # +(i + 1) or -(i + 1), ascending in i

    @property
    def entries(self) -> int:
        """K; without any there is nothing to send."""
        return len(self.entries_K)

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a frame of the smallest kind."""
        return codec.encode(stamp, self.size, self.threshold, self.entries_K)


@dataclass(frozen=True, eq=False)
class DenseProposal:
    """The whole residual, rounded to eight bits in each block."""

    grid: float  # one step, parameter units
    quantized: Quantized  # steps of the grid
    rules: Mapping[str, float]  # threshold to go on from, by pattern

    @property
    def entries(self) -> int:
        """N; 0 if nothing would move, so that there is nothing to send."""
        values_N = self.quantized.values_N
        return len(values_N) if values_N.any() else 0

    def encode(self, stamp: Stamp) -> Frame:
        """Write it as a DENSE8 frame."""
        return codec.encode_dense8(stamp, self.grid, self.quantized)


class Sample(NamedTuple):
    """Some of the residuals of a section."""

    size: int  # parameters of the section
    residuals: Tensor  # on the CPU, parameter units
    threshold: float  # of the last exchange, parameter units; NaN: there was none


class Section:
    """The parameters of one pattern.

    Args:
        pattern: Of their names.
        threshold: Chooses the threshold of each exchange.
        residual: Limits what is carried over.
        segments: Where they are, ascending; at least one.
        sent: Outcome to carry on from, or None.
    """

    pattern: str
    size: int  # parameters
    sent: Sent | None  # outcome of the last exchange
    exchanges: int

    def __init__(
        self,
        pattern: str,
        threshold: ThresholdAlgorithm,
        residual: ResidualPostProcessor,
        segments: Sequence[Segment],
        sent: Sent | None,
    ) -> None:
        self.pattern = pattern
        self.size = sum(segment.size for segment in segments)
        self.sent = sent
        self.exchanges = 0
        self._threshold = threshold
        self._residual = residual
        self._segments = segments

    def propose(self, size: int, grid: float) -> Proposal:
        """List what would be sent now; nothing is changed.

        Args:
            size: Parameters of the model.
            grid: One step, parameter units.

        Raises:
            OptionError: If the rule returns a threshold that is not finite and > 0.
        """
        rule = self._rule(self.sent, grid)
        count = round(rule / grid)
        entries_K = torch.cat([p.find(count, where) for p, where in self._segments])
        pattern, threshold = self.pattern, count * grid
        return Proposal(pattern, size, threshold, rule, count, entries_K.numpy())

    def _rule(self, sent: Sent | None, grid: float) -> float:
        threshold = self._threshold.next_threshold(Residuals(self._segments), sent)
        if not 0 < threshold < math.inf:
            raise OptionError(
                f"a threshold must be finite and > 0, got {threshold!r} "
                f"from {self._threshold!r}"
            )
        # Or a rule with nothing to send would sink to 0, and take as long to return.
        return min(max(threshold, grid), MAX_COUNT * grid)

    def bound(self, threshold: float) -> float:
        """Return the largest residual that is carried over, parameter units.

        Raises:
            OptionError: If the residual rule returns less than the threshold.
        """
        bound = self._residual.bound(self.exchanges, threshold)
        if not bound >= threshold:
            raise OptionError(
                f"a bound must be >= the threshold {threshold}, got {bound!r} "
                f"from {self._residual!r}"
            )
        return bound

    def note(self, proposal: Proposal) -> None:
        """A proposal was taken."""
        self._note(proposal.rule, proposal.entries / max(self.size, 1))

    def rule_beside_dense(self, grid: float) -> float:
        """Return the threshold that goes on through a dense exchange.

        It has no effect there. So a rule is asked for its first one only: raised at
        each, with nothing that could follow from it, it would be out of reach soon.

        Raises:
            OptionError: If the rule returns a threshold that is not finite and > 0.
        """
        return self._rule(None, grid) if self.sent is None else self.sent.threshold

    def note_dense(self, rule: float) -> None:
        """A dense proposal was taken.

        Args:
            rule: What :meth:`rule_beside_dense` returned.
        """
        self._note(rule, DENSE_DENSITY)

    def _note(self, rule: float, density: float) -> None:
        self.sent = Sent(rule, density, None if self.sent is None else self.sent.link)
        self.exchanges += 1

    def sample(self, most: int) -> Sample:
        """Look at about so many of the residuals, or all if there are no more."""
        threshold = math.nan if self.sent is None else self.sent.threshold
        return Sample(self.size, Residuals(self._segments).sample(most), threshold)

    @property
    def sends_dense(self) -> bool:
        """Whether its rule wants all parameters of the model to be sent dense."""
        rule = self._threshold
        return isinstance(rule, LinkAlgorithm) and rule.sends_dense(self.sent)

    def learn(self, measured: Measured) -> None:
        """Let a rule that follows the link know what the exchange just taken took.

        A dense one that it did not ask for is one of the warm-up. It says nothing of
        what the rule has chosen, and is passed over.
        """
        rule = self._threshold
        if not isinstance(rule, LinkAlgorithm) or self.sent is None:
            return
        if measured.dense == self.sends_dense:
            link = rule.learn(self.sent.link, measured)
            self.sent = self.sent._replace(link=link)


class Sections(Mapping[str, Section]):
    """All parameters of a model, by pattern; what they do together.

    Args:
        sections: In the order of their patterns.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self._sections = {section.pattern: section for section in sections}

    @property
    def sent(self) -> dict[str, Sent]:
        """Outcome of the last exchange of each pattern that has had one."""
        outcomes = {p: section.sent for p, section in self.items()}
        return {p: sent for p, sent in outcomes.items() if sent is not None}

    def samples(self, most: int) -> list[Sample]:
        """Look at about so many residuals of the model, of each section its share."""
        size = max(sum(section.size for section in self.values()), 1)
        return [s.sample(max(most * s.size // size, 1)) for s in self.values()]

    @property
    def send_dense(self) -> bool:
        """Whether what comes next is to be sent dense."""
        return any(section.sends_dense for section in self.values())

    def by_exchanges(self) -> list[Section]:
        """List them, first those that were taken least often."""
        return sorted(self.values(), key=lambda section: section.exchanges)

    def rules_beside_dense(self, grid: float) -> dict[str, float]:
        """Return :meth:`Section.rule_beside_dense` of each."""
        return {p: section.rule_beside_dense(grid) for p, section in self.items()}

    def note_dense(self, rules: Mapping[str, float]) -> None:
        """A dense proposal was taken, of these thresholds to go on from."""
        for pattern, rule in rules.items():
            self[pattern].note_dense(rule)

    def learn(self, measured: Measured) -> None:
        """Tell each what the exchange just taken took, see :meth:`Section.learn`."""
        for section in self.values():
            section.learn(measured)

    def state(self) -> dict[str, Any]:
        """What each goes on from, as plain values; measurements of a link are not."""
        return {
            pattern: {
                "exchanges": section.exchanges,
                "threshold": section.sent and section.sent.threshold,
                "density": section.sent and section.sent.density,
            }
            for pattern, section in self.items()
        }

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` made; a pattern that is new begins anew."""
        for pattern in self.keys() & state.keys():
            section, own = self[pattern], state[pattern]
            section.exchanges = operator.index(own["exchanges"])
            if own["threshold"] is not None:
                section.sent = Sent(float(own["threshold"]), float(own["density"]))

    @override
    def __getitem__(self, pattern: str) -> Section:
        return self._sections[pattern]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    @override
    def __len__(self) -> int:
        return len(self._sections)


class Accumulator:
    """One replica's decisions: propose what to send, and take it out.

    A quantum is 1 to 2**22 steps of the grid (2**-2 at most while no parameter starts
    above 1): thresholds beyond are limited.

    Args:
        parameters: The module's flat parameters, changed in place from now on; see
            :class:`daskdl.compression.replica_vector.ModelProgress`.
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
