"""PyTorch's own process group, over gloo."""

import contextlib
import os
from collections.abc import Iterator

from torch import distributed

from benchmarks.peers.arguments import Arguments
from benchmarks.peers.loop import meet
from benchmarks.peers.meeting import PATIENCE, Meeting


@contextlib.contextmanager
def group(own: Arguments) -> Iterator[Meeting]:
    """All processes of the contestant as the default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    meeting = meet(own)
    distributed.init_process_group(
        "gloo",
        f"tcp://{own.address}:{own.port + 1}",
        rank=own.rank,
        world_size=own.world,
        timeout=PATIENCE,
    )
    try:
        yield meeting
    finally:
        distributed.destroy_process_group()
