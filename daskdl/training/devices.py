"""Where the replicas of a process compute: CUDA devices are shared out evenly.

How many replicas a device has is counted in the process, because a replica's number
does not say which others are on its worker.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_lock = threading.Lock()
_users: Counter[int] = Counter()  # replicas now, by number of the CUDA device


@contextlib.contextmanager
def device_for(device: str) -> Iterator[torch.device]:
    """Yield where a replica computes meanwhile.

    A CUDA device is the calling thread's current one too, for code of the user's that
    says ``"cuda"`` without a number.

    Args:
        device: ``"auto"`` takes the CUDA device with the fewest replicas of this
            process, the first of these, and without one the CPU. Else the name of a
            torch device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "auto":
        found = torch.device(device)
        with _current(found):
            yield found
    elif not count:
        yield torch.device("cpu")
    else:
        with _fewest_users(count) as found, _current(found):
            yield found


def _current(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cuda" and device.index is not None:
        return torch.cuda.device(device)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _fewest_users(count: int) -> Iterator[torch.device]:
    with _lock:
        number = min(range(count), key=lambda i: _users[i])
        _users[number] += 1
    try:
        yield torch.device("cuda", number)
    finally:
        with _lock:
            _users[number] -= 1
