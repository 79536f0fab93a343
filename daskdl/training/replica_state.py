"""What the replicas of an averaging run have in common at times, and take a mean of."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.channel.parcel import Arrays
from daskdl.training.outer import Outer
from daskdl.training.shares import Shares
from daskdl.vectors import FlatParameters

OUTER = "outer"  # the outer optimizer's state, among the arrays


class ReplicaState:
    """A replica's module, its optimizer if that is averaged, and its outer optimizer.

    Args:
        module: Its parameters' memory is replaced, see `FlatParameters`.
        optimizer: Of the module; None: it is not averaged.
        outer: Makes the outer optimizer; None: there is none.

    Attributes:
        averages_optimizer: Whether the optimizer is among what is averaged.
    """

    averages_optimizer: bool

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        outer: Callable[[Any], Optimizer] | None,
    ) -> None:
        self._groups = FlatParameters(module).groups
        self._shares = Shares(module, self._groups, optimizer)
        self.averages_optimizer = optimizer is not None
        self._outer = None if outer is None else Outer(outer, module)

    def share(self, weight: float) -> Arrays:
        """What this replica adds to a mean; new arrays."""
        return self._shares.take(weight)

    def whole(self) -> Arrays:
        """All that another replica needs to have the same; new arrays."""
        return self.complete(self._shares.take(1.0))

    def complete(self, arrays: Arrays) -> Arrays:
        """Add what those need that were not at the last mean."""
        if self._outer is None:
            return arrays
        return {**arrays, OUTER: self._outer.state()}

    def load_(self, whole: Arrays) -> None:
        """Take over another replica's state."""
        self._shares.load_(whole)
        if self._outer is not None:
            self._outer.load_(whole[OUTER])

    def take_mean_(self, mean: Arrays) -> None:
        """Go on from a mean, or from the outer step towards it."""
        if self._outer is None:
            self._shares.load_(mean)
            return
        if OUTER in mean:
            self._outer.load_(mean[OUTER])
        self._shares.load_(mean)
        self._outer.step_()

    def outer(self) -> dict[str, Any] | None:
        """What the outer optimizer goes on from; None without one."""
        return None if self._outer is None else self._outer.values()

    def restore_outer_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `outer` made, if there still is an outer optimizer."""
        if self._outer is not None:
            self._outer.restore_(values)

    def digest(self) -> int:
        """A CRC-32 of the parameters."""
        checksum = 0
        for group in self._groups:
            flat = group.flat.detach().cpu().view(torch.uint8)
            checksum = zlib.crc32(flat.numpy().data, checksum)
        return checksum
