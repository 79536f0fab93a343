"""What members learn of each other at a barrier."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Last = Mapping[int, int]  # sequence number of the last update of each replica


class Gathered(NamedTuple):
    """What all members said at a barrier."""

    notes: Mapping[int, Any]  # by replica, lost ones included if they had arrived
    gone: Last  # of those that left or were lost
    # At a ``REPORT``, by the run in this epoch: "refused", "repeated" and "departed".
    # At a ``PAUSE``: "departed", of all but those whose parts a checkpoint has.
    # At an ``AGREE``: "present", how many replicas there are, newcomers included.
    counted: Mapping[str, Any] = {}
