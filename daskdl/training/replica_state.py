"""What the replicas of an averaging run have in common at times, and take a mean of."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl.channel.protocol import Arrays
from daskdl.codec import Stamp
from daskdl.compression.flat import FlatParameters, Frozen
from daskdl.training.feedback import Feedback
from daskdl.training.outcome import KeptResidual
from daskdl.training.outer import Outer
from daskdl.training.shares import PARAMETERS, Shares, is_linear
from daskdl.training.terms import Differences, Terms, Whole

OUTER = "outer"  # the outer optimizer's state, among the arrays
# Before the names of what is one replica's own.
COMMON, RESIDUAL = "common ", "residual "


class ReplicaState:
    """A replica's module, its optimizer if that is averaged, and its outer optimizer.

    Args:
        module: Its parameters' memory is replaced, see `FlatParameters`.
        optimizer: Of the module; None: it is not averaged.
        outer: Makes the outer optimizer; None: there is none.
        compressed: Whether rounded differences are averaged.
        frozen: What the module changes itself; None: from now on.

    Attributes:
        averages_optimizer: Whether the optimizer is among what is averaged.
        feedback: What rounding has left.
    """

    averages_optimizer: bool
    feedback: Feedback

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        outer: Callable[[Any], Optimizer] | None,
        *,
        compressed: bool = False,
        frozen: Frozen | None = None,
    ) -> None:
        self.feedback = Feedback()
        self._groups = FlatParameters(module).groups
        self._shares = Shares(module, self._groups, optimizer, frozen)
        self.averages_optimizer = optimizer is not None
        self._outer = None if outer is None else Outer(outer, module)
        self._compressed = compressed
        self._common: Arrays | None = None

    def depart_(self) -> None:
        """Before a step: what is here after a mean, or at the start, is what all have.

        With compression a copy of it is kept; a second call changes nothing.
        """
        if self._compressed and self._common is None:
            arrays = self._shares.take(1.0)
            self._common = {name: a for name, a in arrays.items() if is_linear(name)}

    def terms(self, stamp: Stamp, *, whole: bool) -> Terms:
        """This replica's part in a mean.

        Args:
            stamp: Of frames; its sequence is the number of the mean.
            whole: Nothing is to be rounded.
        """
        if whole or not self._compressed:
            return Whole(self._shares, self.feedback, stamp.sequence)
        self.depart_()  # it may have made no step since
        common = self._common or {}
        return Differences(self._shares, common, self.feedback, stamp)

    def whole(self) -> Arrays:
        """All that another replica needs to have the same; new arrays."""
        return self.complete(self._shares.take(1.0))

    def complete(self, arrays: Arrays) -> Arrays:
        """Add what those need that were not at the last mean."""
        if self._outer is None:
            return arrays
        return {**arrays, OUTER: self._outer.state()}

    def residual_norm(self) -> float:
        """Length of what rounding has left of the parameters; NaN where none is."""
        if not self._compressed:
            return math.nan
        left = self.feedback.residual.items()
        parts = [a.reshape(-1) for name, a in left if PARAMETERS in name]
        return math.sqrt(sum(float(np.dot(part, part)) for part in parts))

    def local(self) -> Arrays:
        """What compression has beside `whole`, not to be changed; else nothing.

        What all had after the last mean, if there were steps since, and what rounding
        has left here. At the end of an epoch there is neither.
        """
        common = {f"{COMMON}{name}": a for name, a in (self._common or {}).items()}
        left = {f"{RESIDUAL}{name}": a for name, a in self.feedback.residual.items()}
        return {**common, **left}

    def restore_local_(self, local: Arrays) -> None:
        """Go on with what `local` returned, after `load_`.

        Residuals of replicas that are no more may be added to that of any other.
        """
        self._common = _named(local, COMMON) or None
        self.feedback.restore_(_named(local, RESIDUAL))

    def load_(self, whole: Arrays) -> None:
        """Take over another replica's state."""
        self._shares.load_(whole)
        if self._outer is not None:
            self._outer.load_(whole[OUTER])
        self._common = None

    def take_mean_(self, mean: Arrays, *, step: bool = True) -> None:
        """Go on from a mean, or from the outer step towards it.

        Args:
            mean: Of all.
            step: Whether there is to be an outer step; else the outer optimizer takes
                the mean for what all have in common.
        """
        self._shares.load_(mean)
        if self._outer is not None:
            if OUTER in mean:
                self._outer.load_(mean[OUTER])
            if step:
                self._outer.step_()
            else:
                self._outer.follow_()
        self._common = None

    def outer(self) -> dict[str, Any] | None:
        """What the outer optimizer goes on from; None without one."""
        return None if self._outer is None else self._outer.values()

    def restore_outer_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `outer` made, if there still is an outer optimizer."""
        if self._outer is not None:
            self._outer.restore_(values)

    def deliver_(self, residual: KeptResidual, module: nn.Module) -> None:
        """Begin with all that an earlier fit has kept; so does every other founder.

        Args:
            residual: That it has kept.
            module: The replica's own.
        """
        residual.deliver_(module)
        if self._outer is not None:
            self._outer.follow_()

    def digest(self) -> int:
        """A CRC-32 of the parameters."""
        checksum = 0
        for group in self._groups:
            flat = group.flat.detach().cpu().view(torch.uint8)
            checksum = zlib.crc32(flat.numpy().data, checksum)
        return checksum


def _named(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
