"""The vectors of one replica: local, shared, and the residual between them.

``flat`` is what the module computes with, ``local`` the replica's own progress,
``shared`` (int32, steps of the grid) what all replicas have in common. Local is shared
plus ``weight`` times the residual, which has yet to be sent. Between steps of the
optimizer flat shows local (eager) or shared (strict). Eager float32 and float64: local
*is* flat. Otherwise local is a vector of its own (float32 for half types, so that
quanta below their resolution add up), and what the optimizer changed in flat is
absorbed into local first.

Everything here belongs to the training thread: no method may overlap another one or a
step of the optimizer. What is sent is decided in :mod:`daskdl.compression.compressor`.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import contextlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl import kernels
from daskdl.codec import DenseUpdate, Update
from daskdl.compression.flat import (
    FlatParameters,
    Group,
    empty,
    grid_for,
    working_dtype,
)
from daskdl.errors import CodecError, RunError

# 22 of float32's 24 bits: a quantum times a small multiple stays exact.
MAX_COUNT = 2**22


def count_of(threshold: float, grid: float) -> int:
    """Return how many steps of the grid a received quantum is.

    Raises:
        CodecError: If it is not a whole number of steps in [1, 2**22].

    Example:
        >>> count_of(0.75, grid=0.25)
        3
    """
    count = threshold / grid
    if not (1 <= count <= MAX_COUNT and count == int(count)):
        raise CodecError(
            f"threshold must be 1 to {MAX_COUNT} whole steps of {grid}, got {threshold}"
        )
    return int(count)


Counts = npt.NDArray[np.int32]
Where = slice | Tensor  # positions within the group

INT32_MAX = 2**31 - 1
# Passes over whole vectors go piece by piece: 8 MiB of float64 at a time.
PIECE = 2**20


class Progress:
    """Flat, local and shared of one group; shared starts as flat, on the grid.

    Args:
        group: Its flat vector is rounded to the grid.
        grid: Size of one step of shared, parameter units, a power of two.
        strict: Flat shows shared instead of local.

    Example:
        >>> from daskdl.compression.flat import FlatParameters
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(layer.weight, 0.75)
        >>> group = FlatParameters(layer).groups[0]
        >>> progress = Progress(group, grid=0.5, strict=False)
        >>> progress.shared_N, layer.weight.item()
        (tensor([2], dtype=torch.int32), 1.0)
    """

    flat: Tensor  # shape (N,), the parameters' dtype
    local_N: Tensor  # float32, or float64 for float64 parameters
    shared_N: Tensor  # int32, steps of the grid
    start: int  # position of the first parameter in the model
    grid: float  # parameter units
    weight: float  # local is shared plus so many times the residual

    def __init__(self, group: Group, grid: float, strict: bool) -> None:
        self.flat = group.flat
        self.start = group.start
        self.grid = grid
        self.weight = 1.0
        self._strict = strict
        dtype = working_dtype(group.flat.dtype)
        self._aliased = not strict and dtype == group.flat.dtype
        size, device = self.flat.numel(), self.flat.device
        self.shared_N = empty(size, torch.int32, device)
        self.local_N = self.flat if self._aliased else empty(size, dtype, device)
        for piece in self._pieces():
            # On the CPU, as not every device has float64.
            counts = torch.round(self.flat[piece].cpu().double() / grid)
            self.shared_N[piece] = counts.to(torch.int32)
            self.local_N[piece] = self.sent(piece)
            self._show_(piece)

    @property
    def stop(self) -> int:
        """Position after the last parameter in the model."""
        return self.start + self.flat.numel()

    def sent(self, where: Where) -> Tensor:
        """Return shared in parameter units, in local's dtype; a fresh tensor."""
        return self.shared_N[where].to(self.local_N.dtype) * self.grid

    def residual(self, where: Where) -> Tensor:
        """Return the progress not sent yet, parameter units; a fresh tensor."""
        return self._ahead(where) / self.weight

    def _ahead(self, where: Where) -> Tensor:
        return self.local_N[where] - self.sent(where)

    def weigh_(self, weight: float) -> None:
        """Let local be so many times the residual ahead; the residual stays."""
        self.absorb_()
        for piece in self._pieces():
            ahead = self._ahead(piece) * (weight / self.weight)
            self.local_N[piece] = self.sent(piece) + ahead
        self.weight = weight
        self._show_all_()

    def absorb_(self) -> None:
        """Move what the optimizer changed in flat to local; show what is to be shown.

        Without a step in between, a second call finds nothing.
        """
        if not self._aliased:
            for piece in self._pieces():
                self._absorb_(piece)

    def find(self, count: int, where: slice) -> Tensor:
        """List entries there, on the CPU; see :func:`daskdl.kernels.find`."""
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        base = self.start + int(where.start)
        return kernels.find(
            local_N, shared_N, count, self.grid, base, self.weight
        ).cpu()

    def take_(self, entries_K: Tensor, count: int, bound: float) -> float:
        """Take own entries out of the residual; see :func:`daskdl.kernels.take_`."""
        back = (1.0 - self.weight) * count * self.grid
        with self._showing_(entries_K):
            if back:
                kernels.move_(self.local_N, entries_K, back, self.start)
            removed = kernels.take_(
                self.local_N,
                self.shared_N,
                entries_K,
                count,
                self.grid,
                self.weight * bound,
                self.start,
            )
        return removed / self.weight

    def apply_(self, entries_K: Tensor, count: int) -> None:
        """Apply another replica's entries; see :func:`daskdl.kernels.apply_`."""
        with self._showing_(entries_K):
            kernels.apply_(
                self.local_N, self.shared_N, entries_K, count, self.grid, self.start
            )

    def apply_counts_(self, counts_N: Tensor) -> None:
        """Apply a dense update; see :func:`daskdl.kernels.apply_counts_`."""
        self.absorb_()
        kernels.apply_counts_(self.local_N, self.shared_N, counts_N, self.grid)
        self._show_all_()

    def residual_counts(self, most: int = INT32_MAX) -> Tensor:
        """Return the residual in whole steps; see the kernel of this name."""
        counts_N = torch.empty_like(self.shared_N, device="cpu")
        for piece in self._pieces():
            local_N, shared_N = self.local_N[piece], self.shared_N[piece]
            counts_N[piece] = kernels.residual_counts(
                local_N, shared_N, self.grid, most, self.weight
            )
        return counts_N

    def take_counts_(self, counts_N: Tensor) -> None:
        """Take counts out of the residual: shared moves by them, the sum stays."""
        self.absorb_()
        factor = 1.0 - self.weight
        kernels.apply_counts_(self.local_N, self.shared_N, counts_N, self.grid, factor)
        self._show_all_()

    def hand_over_(self) -> Tensor:
        """Return :meth:`residual_counts` and take them."""
        counts_N = self.residual_counts()
        self.take_counts_(counts_N)
        return counts_N

    def replace_shared_(self, shared_N: Tensor, grid: float) -> None:
        """Take another replica's shared, and keep the own residual."""
        self.absorb_()
        for piece in self._pieces():
            ahead = self._ahead(piece)
            counts = shared_N[piece].to(self.flat.device)
            self.shared_N[piece] = counts
            self.local_N[piece] = counts.to(ahead.dtype) * grid + ahead
        self.grid = grid
        self._show_all_()

    def restore_(
        self, shared_N: Tensor, local_N: Tensor, grid: float, weight: float
    ) -> None:
        """Take both vectors as they were, exactly."""
        self.shared_N.copy_(shared_N)
        self.local_N.copy_(local_N)
        self.grid, self.weight = grid, weight
        self._show_all_()

    def add_residual_(self, local_N: Tensor, shared_N: Tensor, weight: float) -> None:
        """Add the residual of vectors that others had, of the same grid."""
        for piece in self._pieces():
            sent = shared_N[piece].to(self.local_N.dtype) * self.grid
            ahead = (local_N[piece].to(sent.dtype) - sent) * (self.weight / weight)
            self.local_N[piece] += ahead.to(self.flat.device)
        self._show_all_()

    def add_counts_(self, counts_N: Tensor, grid: float) -> None:
        """Add steps of a grid, which may be another one, to the residual."""
        self.absorb_()
        for piece in self._pieces():
            counts = counts_N[piece].to(self.flat.device)
            self.local_N[piece] += counts.to(self.local_N.dtype) * (grid * self.weight)
        self._show_all_()

    def regrid_(self, shift: int) -> None:
        """Coarsen the grid to ``2**shift`` of its steps; local stays.

        Halves are rounded up, in integers, so that all replicas get the same.
        """
        half = 1 << shift >> 1
        for piece in self._pieces():
            self.shared_N[piece] = ((self.shared_N[piece].long() + half) >> shift).int()
        self.grid *= 2**shift
        self._show_all_()

    def largest_count(self) -> int:
        """Return the largest ``|shared|``, in steps."""
        if self.shared_N.numel() == 0:
            return 0
        return max(-int(self.shared_N.min()), int(self.shared_N.max()))

    def squares(self) -> float:
        """Return the sum of the squares of the residual, summed in float64."""
        norms = (self.residual(piece).cpu().double() for piece in self._pieces())
        return sum(float(residual.square().sum()) for residual in norms)

    def farthest(self) -> float:
        """Return the largest ``|residual|``, parameter units; NaN and infinity win."""
        pieces = [self.residual(piece).abs().max() for piece in self._pieces()]
        return float(torch.stack(pieces).max()) if pieces else 0.0

    def checksum(self, before: int) -> int:
        """Continue a CRC-32 over shared."""
        for piece in self._pieces():
            before = zlib.crc32(self.shared_N[piece].cpu().numpy().data, before)
        return before

    @contextlib.contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Let flat show shared; local comes back bit for bit.

        Eager float32 and float64 keep a copy of local meanwhile.
        """
        kept = self.flat.clone() if self._aliased else None
        for piece in self._pieces():
            self.flat[piece] = self.sent(piece).to(self.flat.dtype)
        try:
            yield
        finally:
            if kept is not None:
                self.flat.copy_(kept)
            self._show_all_()

    def _pieces(self) -> Iterator[slice]:
        for start in range(0, self.flat.numel(), PIECE):
            yield slice(start, min(start + PIECE, self.flat.numel()))

    def _shown(self, where: Where) -> Tensor:
        source = self.sent(where) if self._strict else self.local_N[where]
        return source.to(self.flat.dtype)

    def _show_(self, where: Where) -> None:
        if not self._aliased:
            self.flat[where] = self._shown(where)

    def _show_all_(self) -> None:
        for piece in self._pieces():
            self._show_(piece)

    def _absorb_(self, where: Where) -> None:
        dtype = self.local_N.dtype
        changed = self.flat[where].to(dtype) - self._shown(where).to(dtype)
        self.local_N[where] += changed
        self._show_(where)

    @contextlib.contextmanager
    def _showing_(self, entries_K: Tensor) -> Iterator[None]:
        """Absorb and show around a change at a few positions, and only there."""
        if self._aliased:
            yield
            return
        where = entries_K.to(self.flat.device).long().abs() - 1 - self.start
        self._absorb_(where)
        yield
        self._show_(where)


def cut_entries(
    groups: Sequence[Progress], entries_K: Counts
) -> list[tuple[Progress, Tensor]]:
    """Cut the entries of a model by group; groups without entries are left out.

    Raises:
        CodecError: If an entry is not an ascending position of the model.
    """
    entries = kernels.from_counts(entries_K)
    kernels.check(entries, 0, groups[-1].stop)
    ends = np.searchsorted(np.abs(entries_K), [g.stop for g in groups], "right")
    parts = zip(groups, [0, *ends[:-1]], ends, strict=True)
    return [(group, entries[a:b]) for group, a, b in parts if a < b]


def cut_counts(
    groups: Sequence[Progress], counts_N: Counts
) -> list[tuple[Progress, Tensor]]:
    """Cut a dense vector of a model by group.

    Raises:
        CodecError: If it is not int32 with one number per parameter.
    """
    size = groups[-1].stop
    if counts_N.shape != (size,) or counts_N.dtype != np.int32:
        raise CodecError(
            f"need {size} counts of int32, got {counts_N.dtype} of {counts_N.shape}"
        )
    counts = kernels.from_counts(counts_N)
    return [(group, counts[group.start : group.stop]) for group in groups]


def join_counts(parts: Iterable[Tensor]) -> Counts:
    """Put the counts of all groups behind each other; a fresh array."""
    counts_N: Counts = torch.cat(list(parts)).numpy()
    return counts_N


REGRID_ABOVE = 2**28  # a quarter of where the kernels stop sending
REGRID_BELOW = 2**25


class ModelProgress:
    """One replica's local and shared, of all parameters.

    Building it rounds the parameters to the grid once, so that all replicas that start
    from the same module share the same counts. Extra memory: 4 bytes per parameter;
    strict or half types 8; strict float64 12.

    Args:
        parameters: The module's flat parameters, changed in place from now on.
        strict: The module computes with shared instead of local.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> progress = ModelProgress(FlatParameters(layer), strict=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.75, 0.0]]))  # a step
        >>> progress.residual_norm()
        0.75
        >>> _ = progress.hand_over_()
        >>> progress.residual_norm(), progress.shared_counts() * progress.grid
        (0.0, array([0.75, 0.  ]))
    """

    size: int  # N
    grid: float  # one step of shared, parameter units, a power of two
    groups: Sequence[Progress]  # ascending in position
    strict: bool

    def __init__(self, parameters: FlatParameters, strict: bool) -> None:
        self.size = parameters.size
        self.grid = grid_for(parameters)
        self.groups = [
            Progress(group, self.grid, strict) for group in parameters.groups
        ]
        self.strict = strict
        self._showing = False

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
        if self.strict:
            return scale
        for group in self._free():
            if group.weight != 1.0 / scale:
                group.weigh_(1.0 / scale)
        return 1.0

    @property
    def weight(self) -> float:
        """How many times the residual local is ahead of shared."""
        return self.groups[0].weight

    def take_(self, entries_K: Counts, count: int, bound: float) -> float:
        """Take own entries out of the residual: shared moves by them.

        Args:
            entries_K: Entries, int32, ascending positions of the model.
            count: Quantum in steps of the grid, in [1, 2**22].
            bound: Most that these leave of the residual, parameter units.

        Returns:
            Mass removed from the residual by the bound, parameter units.

        Raises:
            CodecError: If an entry is not such a position; nothing is changed.
        """
        parts = cut_entries(self._free(), entries_K)
        return sum(group.take_(part_K, count, bound) for group, part_K in parts)

    def take_counts_(self, counts_N: Counts) -> None:
        """Take counts out of the residual: shared moves by them.

        Args:
            counts_N: Int32, shape (N,), steps of the grid.

        Raises:
            CodecError: If they have another size; nothing is changed.
        """
        for group, part_N in cut_counts(self._free(), counts_N):
            group.take_counts_(part_N)

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
        for group, entries_K in cut_entries(self._free(), update.entries_K):
            group.apply_(entries_K, count)

    def apply_counts_(self, counts_N: Counts) -> None:
        """Move local and shared by many updates at once, as a full inbox folds them.

        Args:
            counts_N: Their sum, int32, shape (N,), steps of the grid.

        Raises:
            CodecError: If it has another size; nothing is changed.
        """
        for group, part_N in cut_counts(self._free(), counts_N):
            group.apply_counts_(part_N)

    def residual_counts(self, most: int = INT32_MAX) -> Counts:
        """Return the residual in whole steps of the grid, int32, shape (N,).

        Rounded, and limited so that shared plus it stays within ``most`` steps, by
        default within int32; NaN counts as 0.
        """
        self.absorb_()
        return join_counts(group.residual_counts(most) for group in self.groups)

    def hand_over_(self) -> Counts:
        """Move shared by :meth:`residual_counts` and return it, to be sent dense.

        What is left in the residual is below half a step.
        """
        self.absorb_()
        return join_counts(group.hand_over_() for group in self.groups)

    def shared_counts(self) -> Counts:
        """Return a copy of shared in steps of the grid, int32, shape (N,)."""
        return join_counts(group.shared_N.cpu() for group in self.groups)

    def replace_shared_(self, counts_N: Counts, grid: float) -> None:
        """Start from a snapshot, or repair: shared is replaced, the residual stays.

        Args:
            counts_N: Another replica's :meth:`shared_counts`.
            grid: The other replica's grid.

        Raises:
            CodecError: If the counts have another size; nothing is changed.
        """
        for group, part_N in cut_counts(self._free(), counts_N):
            group.replace_shared_(part_N, grid)
        self.grid = grid

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is shared, and what is this replica's own: plain values and tensors.

        The tensors are those that go on changing: copy them.
        """
        self.absorb_()
        shared = {"grid": self.grid, "shared": [g.shared_N for g in self.groups]}
        own = {"local": [g.local_N for g in self.groups], "weight": self.weight}
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
        for i, group in enumerate(self.groups):
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

    def add_residual_(self, counts_N: Counts, grid: float) -> None:
        """Add progress that has not been sent; shared stays.

        Args:
            counts_N: Int32, shape (N,).
            grid: What they are steps of, parameter units; it may be another one.

        Raises:
            CodecError: If they have another size; nothing is changed.
        """
        for group, part_N in cut_counts(self._free(), counts_N):
            group.add_counts_(part_N, grid)

    def residual_norm(self) -> float:
        """Return the Euclidean length of the residual, parameter units."""
        self.absorb_()
        return math.sqrt(sum(group.squares() for group in self.groups))

    def farthest(self) -> float:
        """Return the largest ``|residual|``, parameter units; NaN if one is."""
        self.absorb_()
        far = [group.farthest() for group in self.groups]
        return math.nan if any(map(math.isnan, far)) else max(far)

    @property
    def reach(self) -> float:
        """Farthest that is still counted: 2**31 - 1 of the largest quanta.

        Shared itself gets there in several laps, as :meth:`regrid_` goes on.
        """
        return INT32_MAX * MAX_COUNT * self.grid

    def digest(self) -> int:
        """Return a CRC-32 of grid and shared: equal on replicas that agree."""
        checksum = zlib.crc32(struct.pack("<d", self.grid))
        for group in self.groups:
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
        largest = max(group.largest_count() for group in self.groups)
        if largest > REGRID_ABOVE:
            shift = 1
            while (largest + (1 << shift >> 1)) >> shift >= REGRID_BELOW:
                shift += 1
            for group in self.groups:
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
                for group in self.groups:
                    stack.enter_context(group.showing_shared())
                yield
        finally:
            self._showing = False

    def _free(self) -> Sequence[Progress]:
        if self._showing:
            raise RunError("the module shows shared; leave showing_shared() first")
        return self.groups


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
