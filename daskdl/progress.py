"""The three vectors of a group of parameters, and how they follow each other.

``flat`` is what the module computes with, ``local`` the replica's own progress,
``shared`` (int32, steps of the grid) what all replicas have in common. Local is shared
plus ``weight`` times the residual, which is what has yet to be sent. Between steps
of the optimizer flat shows local (eager) or shared (strict). Eager float32 and
float64: local *is* flat. Otherwise local is a vector of its own (float32 for half
types, so that quanta below their resolution add up), and what the optimizer changed
in flat is absorbed into local before anything else looks at it.

No other groups, no updates: :mod:`daskdl.model_progress` has those. No choice of
thresholds, no counting: :mod:`daskdl.accumulator` has those.

Shape suffixes: N = parameters of the group, K = entries of one update.
"""

import contextlib
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl import kernels
from daskdl.vectors import Group, empty, working_dtype

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
        >>> from daskdl.vectors import FlatParameters
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
