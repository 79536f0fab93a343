"""The vectors of one replica: local, shared, and the residual between them.

The module computes with ``flat``; ``local`` has the values that this replica has
trained, and ``shared`` (int32, steps of the grid) those that all replicas have in
common. Local is shared plus ``local_factor`` times the unsent residual. Between
optimizer steps flat equals local (eager) or shared (strict), in its own dtype. In eager
float32 and float64, local *is* flat. Otherwise local is a separate vector
(float32 for half types, so that quanta below their resolution add up), and
:meth:`ReplicaVector.sync_from_parameters_` adds the optimizer's changes of flat to it.

Only the training thread calls these methods, between optimizer steps.
:mod:`daskdl.compression.compressor` chooses the updates.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import bisect
import contextlib
import functools
import itertools
import logging
import math
import operator
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl.codec import DenseUpdate, SparseUpdate, Update
from daskdl.compression import kernels_numba
from daskdl.compression.flat import FlatParameters, empty, grid_for, working_dtype
from daskdl.compression.kernels import (
    INT32_MAX,
    PinnedGroup,
    ReceivedEntries,
    VectorGroup,
    own_factor,
)
from daskdl.errors import CodecError, RunError

logger = logging.getLogger(__name__)

Counts = npt.NDArray[np.int32]
Where = slice | Tensor  # positions within a group

# 22 of float32's 24 bits: small multiples of a quantum stay exact.
MAX_COUNT = 2**22
REGRID_ABOVE = 2**28  # a quarter of the count at which kernels stop sending
REGRID_BELOW = 2**25
NEIGHBORS = 16  # neighboring values in a sample: a cache line of float32


def kernels_for(device: torch.device) -> type[VectorGroup]:
    """Return the fastest kernels for a device."""
    if device.type == "cpu":
        return kernels_numba.NumbaGroup
    return triton_or_torch(device) if device.type == "cuda" else VectorGroup


@functools.cache
def triton_or_torch(device: torch.device) -> type[VectorGroup]:
    """Return kernels in Triton, or torch operations if Triton cannot compile here."""
    try:
        from daskdl.compression.kernels_triton import TritonGroup, check_compiles

        check_compiles(device)
    except ImportError as error:
        logger.warning(
            "exchanges use torch operations instead of Triton's kernels, which are "
            "faster: %s; Triton needs a C compiler and the headers of Python",
            error,
        )
        return PinnedGroup
    return TritonGroup


def count_of(threshold: float, grid: float) -> int:
    """Return a received quantum in steps of the grid.

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


def coarsened(counts: Any, shift: int) -> Any:
    """Return counts of the grid in steps that are `2**shift` as large, halves up.

    Integer arithmetic, equal on all replicas.

    Args:
        counts: Int32, an array or a tensor.
        shift: 1 to 31.

    Example:
        >>> coarsened(np.array([-3, -2, 2, 5], np.int32), shift=2).tolist()
        [-1, 0, 1, 1]
    """
    return (counts >> shift) + (counts >> (shift - 1) & 1)


def to_grid(update: DenseUpdate, grid: float) -> DenseUpdate:
    """Return a received dense update in steps of the grid.

    The last update of a replica that left may arrive after the others have coarsened
    the grid. Its counts are in steps of the former, finer grid, and are rounded in the
    same way as shared.

    Example:
        >>> from daskdl.codec import Stamp
        >>> stamp = Stamp(run=1, origin=2, sequence=3, step=4)
        >>> update = DenseUpdate(stamp, 2, 0.25, np.array([-3, 5], np.int32))
        >>> to_grid(update, grid=1.0).counts_N
        array([-1,  1], dtype=int32)
    """
    if update.grid == grid:
        return update
    mantissa, exponent = math.frexp(grid / update.grid)
    if mantissa != 0.5 or not 1 < exponent <= 32:
        raise CodecError(f"grid must be {grid} or a finer one, got {update.grid}")
    counts_N = coarsened(update.counts_N, exponent - 1)
    return update._replace(grid=grid, counts_N=counts_N)


def fold_(total_N: Counts, update: Update, grid: float) -> None:
    """Add a decoded update to a dense sum of counts.

    Example:
        >>> from daskdl.codec import Kind, SparseUpdate, Stamp
        >>> total, entries = np.zeros(3, np.int32), np.array([1, -3], np.int32)
        >>> stamp = Stamp(run=1, origin=2, sequence=3, step=4)
        >>> fold_(total, SparseUpdate(stamp, Kind.RAW32, 3, 1.25, entries), grid=0.25)
        >>> total
        array([ 5,  0, -5], dtype=int32)
    """
    if isinstance(update, DenseUpdate):
        total_N += update.counts_N
    else:
        levels_K = update.levels_K
        levels_K = kernels_numba.ONE_EACH if levels_K is None else levels_K
        count = count_of(update.threshold, grid)
        kernels_numba.fold_(total_N, update.entries_K, levels_K, count)


class GroupEntries(NamedTuple):
    """Entries of one group, on its device, as :meth:`VectorGroup.find` lists them."""

    group: VectorGroup
    entries_K: Tensor
    levels_K: Tensor


class ReplicaVector:
    """The local and shared vectors of one replica, of all parameters.

    The constructor rounds the parameters to the grid, so that all replicas that start
    from the same module share the same counts. Extra memory: 4 bytes per parameter;
    strict or half types 8; strict float64 12.

    Call :meth:`sync_from_parameters_` after each optimizer step; all other methods rely
    on it.

    Args:
        parameters: The module's flat parameters, changed in place from now on.
        strict: The module computes with shared instead of local.

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> vector = ReplicaVector(FlatParameters(layer), strict=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.75, 0.0]]))  # a step
        >>> vector.sync_from_parameters_()
        >>> vector.farthest()
        0.75
        >>> _ = vector.flush_residual_()
        >>> vector.farthest(), vector.shared_counts() * vector.grid
        (0.0, array([0.75, 0.  ]))
    """

    size: int  # N
    grid: float  # one step of shared, parameter units, a power of two
    local_factor: float  # local is shared plus local_factor times the residual
    strict: bool
    groups: list[VectorGroup]  # ascending in position

    def __init__(self, parameters: FlatParameters, strict: bool) -> None:
        self.size = parameters.size
        self.grid = grid_for(parameters)
        self.local_factor = 1.0
        self.strict = strict
        self.groups = []
        self._showing = False
        self._parameters = parameters
        for flat, start, *_ in parameters.groups:
            size, dtype, device = flat.numel(), working_dtype(flat.dtype), flat.device
            aliased = not strict and dtype == flat.dtype
            local_N = flat if aliased else empty(size, dtype, device)
            shared_N = empty(size, torch.int32, device)
            group = kernels_for(device)(flat, local_N, shared_N, start)
            self.groups.append(group)
            for where in group.chunks():
                # On the CPU, as not every device has float64.
                counts = torch.round(flat[where].cpu().double() / self.grid)
                shared_N[where] = counts.to(torch.int32)
                local_N[where] = self._shared_values(group, where)
        self._copied = [g for g in self.groups if g.local_N is not g.flat]
        self._ends = [g.start + g.shared_N.numel() for g in self.groups]
        self._show_all_()

    # Flat, local and the residual.

    def _shared_values(self, group: VectorGroup, where: Where) -> Tensor:
        """Return shared in parameter units, in local's dtype; a new tensor."""
        return group.shared_N[where].to(group.local_N.dtype) * self.grid

    def _ahead(self, group: VectorGroup, where: Where) -> Tensor:
        return group.local_N[where] - self._shared_values(group, where)

    def _shown(self, group: VectorGroup, where: Where) -> Tensor:
        source = (
            self._shared_values(group, where) if self.strict else group.local_N[where]
        )
        return source.to(group.flat.dtype)

    def _show_all_(self) -> None:
        for group in self._copied:
            for where in group.chunks():
                group.flat[where] = self._shown(group, where)

    def _show_entries_(self, group: VectorGroup, entries_K: Tensor) -> None:
        if group.local_N is not group.flat:
            where = group.positions(entries_K)
            group.flat[where] = self._shown(group, where)

    def _local_groups(self) -> Sequence[VectorGroup]:
        """Return the groups for methods that read or move local."""
        if self._showing:
            raise RunError("the module shows shared; leave showing_shared() first")
        self._parameters.gather_()
        return self.groups

    def sync_from_parameters_(self) -> None:
        """Add the optimizer's changes of flat to local, and update flat.

        No-op for eager float32 and float64. A second call without an optimizer step in
        between changes nothing.
        """
        for group in self._local_groups():
            if group.local_N is group.flat:
                continue
            for where in group.chunks():
                dtype = group.local_N.dtype
                shown = self._shown(group, where).to(dtype)
                group.local_N[where] += group.flat[where].to(dtype) - shown
                group.flat[where] = self._shown(group, where)

    def residual(self, group: VectorGroup, where: Where) -> Tensor:
        """Return the residual at some positions, parameter units; a new tensor."""
        # Not a division, which CUDA rounds otherwise than the CPU.
        return self._ahead(group, where) * (1.0 / self.local_factor)

    def residual_counts(self, most: int = INT32_MAX) -> Counts:
        """Return the residual in whole steps of the grid, int32, shape (N,).

        The counts are rounded, and limited so that shared plus the counts stays within
        ``most`` steps, by default within int32; NaN becomes 0.
        """
        counts_N = np.empty(self.size, np.int32)
        for group in self._local_groups():
            own_N = counts_N[group.start :]
            for where in group.chunks():
                own_N[where] = group.residual_counts(
                    self.grid, most, self.local_factor, where
                )
        return counts_N

    def farthest(self) -> float:
        """Return the largest ``|residual|``, parameter units; NaN if any is NaN."""
        far = [
            float(self.residual(group, where).abs().max())
            for group in self._local_groups()
            for where in group.chunks()
        ]
        return math.nan if any(map(math.isnan, far)) else max(far)

    @property
    def reach(self) -> float:
        """Largest ``|residual|`` that can be sent: 2**31 - 1 of the largest quanta.

        Shared reaches it over several sync intervals, through :meth:`regrid_`.
        """
        return INT32_MAX * MAX_COUNT * self.grid

    # Updates and grids.

    def set_scale_(self, scale: float) -> float:
        """Scale the updates that this replica sends.

        Eager: the module trains at the full learning rate, as if the other replicas
        moved the same way, and sent updates are scaled: local leads shared by
        ``1 / scale`` times the residual. Strict: the learning rate is scaled instead.
        The residual stays.

        Args:
            scale: > 0; with 1 / replicas, shared moves by the mean of all replicas.

        Returns:
            Factor on the learning rate.
        """
        if self.strict:
            return scale
        if self.local_factor != 1.0 / scale:
            for group in self._local_groups():
                for where in group.chunks():
                    ahead = self._ahead(group, where) * (
                        1.0 / scale / self.local_factor
                    )
                    group.local_N[where] = self._shared_values(group, where) + ahead
            self.local_factor = 1.0 / scale
            self._show_all_()
        return 1.0

    def commit_(
        self,
        parts: Sequence[GroupEntries],
        count: int,
        bound: float,
        *,
        leveled: bool = False,
        momentum: float = 0.0,
    ) -> float:
        """Move shared by own entries, of which the residual keeps ``momentum``.

        Args:
            parts: Result of :meth:`ResidualView.find`.
            count: Quantum in steps of the grid.
            bound: Bound on ``|residual|`` at these positions, parameter units.
            leveled: Move by as many quanta as an entry has levels, otherwise by one.
            momentum: In [0, 1).

        Returns:
            Mass removed from the residual, parameter units.
        """
        removed = 0.0
        self._local_groups()  # raises inside `showing_shared`
        for group, entries_K, levels_K in parts:
            if not len(entries_K):
                continue
            removed += group.commit_(
                entries_K,
                count,
                self.grid,
                bound,
                self.local_factor,
                levels_K if leveled else None,
                momentum,
            )
            if self._copied:
                self._show_entries_(group, entries_K)
        return removed

    def apply_(self, *updates: Update) -> None:
        """Move local and shared by other replicas' updates; the residual stays."""
        sparse: list[SparseUpdate] = []
        for update in updates:
            if isinstance(update, SparseUpdate):
                sparse.append(update)
                continue
            if update.grid != self.grid:
                raise CodecError(f"grid must be {self.grid}, got {update.grid}")
            if sparse:
                self._apply_sparse_(sparse)
                sparse = []
            self.apply_counts_(update.counts_N)
        if sparse:
            self._apply_sparse_(sparse)

    def _apply_sparse_(self, updates: Sequence[SparseUpdate]) -> None:
        groups = self._local_groups()
        parts: list[list[ReceivedEntries]] = [[] for _ in groups]
        for update in updates:
            if update.size != self.size:
                raise CodecError(f"model has {self.size} parameters, got {update.size}")
            count = count_of(update.threshold, self.grid)
            for of_group, entries_K, levels_K in self._split(update):
                parts[of_group].append(ReceivedEntries(entries_K, levels_K, count))
        for group, received in zip(groups, parts, strict=True):
            if received:
                group.apply_all_(received, self.grid)
            if self._copied:
                for part in received:
                    self._show_entries_(group, part.entries_K)

    def apply_counts_(
        self, counts_N: Counts, *, from_residual: bool = False, momentum: float = 0.0
    ) -> None:
        """Move local and shared by a dense update, or by a sum of folded updates.

        Args:
            counts_N: Int32, shape (N,), steps of the grid.
            from_residual: The update is this replica's: take it out of the residual.
            momentum: Part of such an update that the residual keeps, in [0, 1).
        """
        factor = own_factor(self.local_factor, momentum) if from_residual else 1.0
        for group, where, part_N in self._split_counts(counts_N):
            group.apply_counts_(part_N, self.grid, factor, where)
        self._show_all_()

    def flush_residual_(self) -> Counts:
        """Move shared by :meth:`residual_counts`; return the counts for a dense update.

        At most half a step of residual remains, unless int32 limits the counts.
        """
        counts_N = self.residual_counts()
        self.apply_counts_(counts_N, from_residual=True)
        return counts_N

    def add_residual_(self, counts_N: Counts, grid: float) -> None:
        """Add counts to the residual; shared stays.

        Args:
            counts_N: Int32, shape (N,), steps of ``grid``.
            grid: One step of the counts, parameter units; may differ from `self.grid`.
        """
        for group, where, part_N in self._split_counts(counts_N):
            counts = part_N.to(group.local_N.dtype)
            group.local_N[where] += counts * (grid * self.local_factor)
        self._show_all_()

    def regrid_(self) -> None:
        """Coarsen the grid if shared has grown far beyond the start; at a barrier.

        Above ``2**28`` steps the grid is multiplied by the smallest power of two that
        brings shared below ``2**25``. The result depends on shared alone, so replicas
        keep agreeing. Local is unchanged: rounding errors move to the residual.
        """
        groups = [group for group in self._local_groups() if group.shared_N.numel()]
        ends = [(int(g.shared_N.min()), int(g.shared_N.max())) for g in groups]
        largest = max(max(-low, high) for low, high in ends)
        if largest > REGRID_ABOVE:
            shift = 1
            while (largest + (1 << shift >> 1)) >> shift >= REGRID_BELOW:
                shift += 1
            for group in groups:
                for where in group.chunks():
                    group.shared_N[where] = coarsened(group.shared_N[where], shift)
            self.grid *= 2**shift
            self._show_all_()

    # Shared, and state for checkpoints.

    def shared_counts(self) -> Counts:
        """Return a copy of shared in steps of the grid, int32, shape (N,)."""
        counts_N: Counts = torch.cat([g.shared_N.cpu() for g in self.groups]).numpy()
        return counts_N

    def digest(self) -> int:
        """Return a CRC-32 of grid and shared, equal on replicas that agree."""
        checksum = zlib.crc32(struct.pack("<d", self.grid))
        for group in self.groups:
            for where in group.chunks():
                counts_N = group.shared_N[where].cpu().numpy()
                checksum = zlib.crc32(counts_N.data, checksum)
        return checksum

    def replace_shared_(self, counts_N: Counts, grid: float) -> None:
        """Replace shared by that of another replica; the residual stays."""
        for group, where, part_N in self._split_counts(counts_N):
            ahead = self._ahead(group, where)
            group.shared_N[where] = part_N
            group.local_N[where] = part_N.to(ahead.dtype) * grid + ahead
        self.grid = grid
        self._show_all_()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state shared by all replicas, and this replica's own state.

        The tensors are not copies and change later.
        """
        groups = self._local_groups()
        shared = {"grid": self.grid, "shared": [group.shared_N for group in groups]}
        replica_state = {
            "local": [group.local_N for group in groups],
            "local_factor": self.local_factor,
        }
        return shared, replica_state

    def restore_(
        self, shared: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Restore the state of one replica, or the combined state of several."""
        self.grid = shared["grid"]
        self.local_factor = parts[0]["local_factor"] if parts else self.local_factor
        for i, group in enumerate(self.groups):
            group.shared_N.copy_(shared["shared"][i])
            if parts:
                group.local_N.copy_(parts[0]["local"][i])
            for where in group.chunks():
                sent = self._shared_values(group, where)
                if not parts:
                    group.local_N[where] = sent
                for part in parts[1:]:
                    ahead = part["local"][i][where].to(sent) - sent
                    group.local_N[where] += ahead * (
                        self.local_factor / part["local_factor"]
                    )
        self._show_all_()

    @contextlib.contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Let the module compute with shared inside the context, as for validation.

        Its values are restored bit for bit on exit; eager float32 and float64 keep a
        copy. Methods that read or move local raise RunError inside.
        """
        groups = self._local_groups()
        self._showing = True
        kept = [(g.flat, g.flat.clone()) for g in groups if g.local_N is g.flat]
        try:
            for group in groups:
                for where in group.chunks():
                    shown = self._shared_values(group, where)
                    group.flat[where] = shown.to(group.flat.dtype)
            yield
        finally:
            self._parameters.gather_(copy=False)
            for flat, local_N in kept:
                flat.copy_(local_N)
            self._show_all_()
            self._showing = False

    def _split(
        self, update: SparseUpdate
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Split entries and levels by group, leaving out groups without entries."""
        entries_K, levels_K = update.entries_K, update.levels_K
        ends = [bisect.bisect_right(entries_K, end, key=abs) for end in self._ends[:-1]]
        cuts = [0, *ends, len(entries_K)]
        for i, (group, (a, b)) in enumerate(
            zip(self.groups, itertools.pairwise(cuts), strict=True)
        ):
            if a == b:
                continue
            part_K, quanta_K = group.from_host(torch.from_numpy(entries_K[a:b])), None
            if levels_K is not None:
                quanta_K = group.from_host(torch.from_numpy(levels_K[a:b]))
            yield i, part_K, quanta_K

    def _split_counts(
        self, counts_N: Counts
    ) -> Iterator[tuple[VectorGroup, slice, Tensor]]:
        """Split a dense vector by group and chunk."""
        if counts_N.shape != (self.size,) or counts_N.dtype != np.int32:
            raise CodecError(
                f"need {self.size} counts of int32, got {counts_N.dtype} of "
                f"{counts_N.shape}"
            )
        # Read-only arrays are copied, because torch has no read-only tensors.
        counts = torch.from_numpy(np.require(counts_N, np.int32, ["C", "W"]))
        for group in self._local_groups():
            part = counts[group.start :]
            for where in group.chunks():
                yield group, where, group.from_host(part[where])


def on_host(parts: Sequence[GroupEntries]) -> tuple[Counts, npt.NDArray[np.uint8]]:
    """Return entries and levels of all groups in the host's memory."""
    copies = [group.to_host(*tensors) for group, *tensors in parts]
    entries_K, levels_K = map(_end_to_end, *copies)
    return entries_K.numpy(), levels_K.numpy()


def _end_to_end(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ResidualView:
    """The residual of some of a replica's parameters."""

    size: int  # parameters
    ranges: Sequence[tuple[VectorGroup, slice]]

    def __init__(
        self, vector: ReplicaVector, ranges: Sequence[tuple[VectorGroup, slice]]
    ) -> None:
        self.size = sum(where.stop - where.start for _, where in ranges)
        self.ranges = ranges
        self._vector = vector

    def find(self, count: int) -> list[GroupEntries]:
        """List the entries of a quantum of ``count`` steps by group."""
        vector = self._vector
        vector._local_groups()  # raises inside `showing_shared`
        grid, local_factor = vector.grid, vector.local_factor
        parts = []
        for group, ranges in itertools.groupby(self.ranges, operator.itemgetter(0)):
            by_range = [group.find(count, grid, local_factor, w) for _, w in ranges]
            parts.append(GroupEntries(group, *map(_end_to_end, *by_range)))
        return parts

    def tensor(self) -> Tensor:
        """See :class:`daskdl.compression.thresholds.Residual`."""
        device = self.ranges[0][0].flat.device
        return torch.cat([self._vector.residual(*r).to(device) for r in self.ranges])

    def sample(self, most: int) -> Tensor:
        """See :class:`daskdl.compression.thresholds.Residual`."""
        apart = NEIGHBORS * max(-(-self.size // most), 1)
        parts, since = [], 0  # positions since the last run began
        for group, where in self.ranges:  # evenly spaced over all ranges together
            starts = torch.arange(where.start - since, where.stop, apart)
            positions = (starts[:, None] + torch.arange(NEIGHBORS)).flatten()
            # Ascending: a run before the range or beyond it is cut at its end.
            ends = torch.tensor([where.start, where.stop])
            positions = positions[slice(*torch.searchsorted(positions, ends).tolist())]
            positions = positions.to(group.flat.device)
            parts.append(self._vector.residual(group, positions).cpu())
            since = (since + where.stop - where.start) % apart
        return torch.cat(parts)


def ranges_by_pattern(
    parameters: FlatParameters,
    vector: ReplicaVector,
    assigned: Mapping[str, str],
) -> dict[str, list[tuple[VectorGroup, slice]]]:
    """Return the positions of each pattern; adjacent ranges are merged."""
    by_pattern: dict[str, list[tuple[VectorGroup, slice]]] = {}
    for group, vectors in zip(parameters.groups, vector.groups, strict=True):
        at, former = 0, None
        for name, numel in zip(group.names, group.numels, strict=True):
            pattern, where = assigned[name], slice(at, at + numel)
            ranges = by_pattern.setdefault(pattern, [])
            if pattern == former:
                where = slice(ranges.pop()[1].start, where.stop)
            ranges.append((vectors, where))
            at, former = where.stop, pattern
    return by_pattern
