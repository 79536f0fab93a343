"""The parameters on which one threshold algorithm decides, and what it did last.

Their outcome and their count of exchanges; where they are is
:mod:`daskdl.segments`'s, the vectors themselves are :mod:`daskdl.progress`'s.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.link import Measured
from daskdl.proposals import Proposal
from daskdl.quanta import MAX_COUNT
from daskdl.residuals import ResidualPostProcessor
from daskdl.segments import Residuals, Segment
from daskdl.thresholds import DENSE_DENSITY, LinkAlgorithm, Sent, ThresholdAlgorithm


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
