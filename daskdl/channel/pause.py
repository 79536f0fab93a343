"""Between two laps of an epoch: nobody holds anything, and all replicas meet."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from daskdl.channel.leases import Left, left_of


class Pause(NamedTuple):
    """What is left of the epoch."""

    order: int  # checksum of what ranges depend on, see `RunPlan.order`
    left: Sequence[Left]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Self:
        """Read one as it came over the wire, where a tuple has no names."""
        order, left = fields
        return cls(order, left_of(left))

    def values(self) -> list[Any]:
        """The same as plain lists."""
        return [self.order, [[r, [list(one) for one in own]] for r, own in self.left]]
