"""Where parameters are in the vectors of their groups, and their residual."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from daskdl.progress import Progress
from daskdl.vectors import FlatParameters

RUN = 16  # values that a sample takes together: a cache line of float32


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

    def sample(self, most: int) -> Tensor:
        """See :class:`daskdl.thresholds.Residual`."""
        size = sum(segment.size for segment in self._segments)
        apart = RUN * max(-(-size // most), 1)
        parts, since = [], 0  # positions since the last run began
        for segment in self._segments:  # evenly over all of them, as if they were one
            parts.append(_runs(segment, since, apart))
            since = (since + segment.size) % apart
        return torch.cat(parts)


def _runs(segment: Segment, since: int, apart: int) -> Tensor:
    progress, where = segment
    starts = torch.arange(where.start - since, where.stop, apart)
    positions = (starts[:, None] + torch.arange(RUN)).flatten()
    positions = positions[(positions >= where.start) & (positions < where.stop)]
    return progress.residual(positions.to(progress.flat.device)).cpu()


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
