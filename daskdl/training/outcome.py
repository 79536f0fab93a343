"""What one run leaves to the next: how far it came with compression."""

from collections.abc import Mapping
from typing import NamedTuple

from daskdl.thresholds import Sent


class Outcome(NamedTuple):
    """What one run leaves to the next: how far it came with compression."""

    sent: Mapping[str, Sent]  # what the last exchange of each pattern did
    steps: int  # made in all, by whoever made most of them
