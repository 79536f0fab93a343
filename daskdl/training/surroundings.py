"""What a replica finds in its process while it trains, and what it computes on."""

import contextlib
from collections.abc import Iterator

import torch

from daskdl.memory import freed_memory_kept
from daskdl.training.devices import device_for
from daskdl.training.random_state import random_state_kept
from daskdl.training.threads import torch_threads


@contextlib.contextmanager
def surroundings(device: str, threads: int) -> Iterator[torch.device]:
    """Share the process with other replicas; afterwards it is as it was.

    Args:
        device: Where the replica is to compute, see
            :func:`~daskdl.training.devices.device_for`.
        threads: Of torch's own, >= 1.

    Yields:
        The device.
    """
    with (
        device_for(device) as found,
        torch_threads(threads),
        freed_memory_kept(),
        random_state_kept(found),
    ):
        yield found
