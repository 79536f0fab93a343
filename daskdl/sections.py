"""The parameters on which one threshold algorithm decides, and what it did last.

Where they are in the vectors, their outcome and their count of exchanges; the vectors
themselves are :mod:`daskdl.progress`'s.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from daskdl.errors import OptionError
from daskdl.progress import Progress
from daskdl.proposals import Proposal
from daskdl.quanta import MAX_COUNT
from daskdl.residuals import ResidualPostProcessor
from daskdl.thresholds import DENSE_DENSITY, Sent, ThresholdAlgorithm
from daskdl.vectors import FlatParameters


class Segment(NamedTuple):
    """Neighbouring positions of one vector."""

    progress: Progress
    where: slice  # within it

    @property
    def size(self) -> int:
        """How many positions."""
        return int(self.where.stop - self.where.start)


class Residuals:
    """The residual of some segments, for rules that look at it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments

    def tensor(self) -> Tensor:
        """See :class:`daskdl.thresholds.Residual`."""
        device = self._segments[0].progress.flat.device
        parts = [progress.residual(where) for progress, where in self._segments]
        return torch.cat([part.to(device) for part in parts])


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
        self.sent = Sent(proposal.rule, proposal.entries / max(self.size, 1))
        self.exchanges += 1

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
        self.sent = Sent(rule, DENSE_DENSITY)
        self.exchanges += 1


def segments_of(
    parameters: FlatParameters,
    vectors: Sequence[Progress],
    assigned: Mapping[str, str],
) -> dict[str, list[Segment]]:
    """Find the positions of each pattern, neighbours joined.

    Args:
        parameters: Of the model.
        vectors: One for each of its groups.
        assigned: The pattern of each parameter.
    """
    found: dict[str, list[Segment]] = {}
    for group, progress in zip(parameters.groups, vectors, strict=True):
        at, former = 0, None
        for name, numel in zip(group.names, group.numels, strict=True):
            pattern, where = assigned[name], slice(at, at + numel)
            segments = found.setdefault(pattern, [])
            if pattern == former:
                where = slice(segments.pop().where.start, where.stop)
            segments.append(Segment(progress, where))
            at, former = where.stop, pattern
    return found
