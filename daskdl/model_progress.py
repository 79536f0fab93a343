"""The vectors of a whole model: its groups as one, position after position.

What one group's vectors do is :mod:`daskdl.progress`'s; here what all of them do
together. What is sent is decided in :mod:`daskdl.accumulator`. Everything here belongs
to the thread that trains: no method may overlap another one or a step of the optimizer.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daskdl.codec import DenseUpdate, Update
from daskdl.cuts import cut_counts, cut_entries, join_counts
from daskdl.errors import CodecError, RunError
from daskdl.progress import INT32_MAX, Counts, Progress
from daskdl.quanta import MAX_COUNT, count_of
from daskdl.vectors import FlatParameters, grid_for

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
