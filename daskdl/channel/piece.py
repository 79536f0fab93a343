"""What is leased to a replica at a time, and what it says of it afterwards."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from daskdl.channel.leases import Range

Finished = Sequence[Mapping[str, Any]]  # of each piece: number, examples, loss


class Piece(NamedTuple):
    """Rows that are leased to a replica at a time.

    Ranges are of positions in the order in which the rows of a part are trained on.
    """

    number: int  # in its phase and epoch
    ranges: tuple[Range, ...]  # in the order to train on them
    keys: Mapping[int, str]  # Dask's, of the parts named here; "": on no worker
    ahead: int | None = None  # the part that this replica will probably load next
