"""Between two laps of an epoch: nobody holds anything, and all replicas meet."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from daskdl.channel.leases import Done, Left, done_of, left_of


class Pause(NamedTuple):
    """What is left of the epoch."""

    order: int  # checksum of what ranges depend on, see `RunPlan.order`
    left: Sequence[Left]
    departed: Sequence[Done] = ()  # of those that trained in it, and are not there

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Self:
        """Read one as it came over the wire, where a tuple has no names."""
        order, left, *departed = fields  # earlier versions did not write the last
        return cls(order, left_of(left), *map(done_of, departed))

    def values(self) -> list[Any]:
        """The same as plain lists."""
        left = [[r, [list(one) for one in own]] for r, own in self.left]
        return [self.order, left, [list(one) for one in self.departed]]
