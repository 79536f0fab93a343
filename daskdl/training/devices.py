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

from daskdl.errors import OptionError

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

    Raises:
        OptionError: If this process has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "auto":
        check_device(device)
        found = torch.device(device)
        with _current(found):
            yield found
    elif not count:
        yield torch.device("cpu")
    else:
        with _fewest_users(count) as found, _current(found):
            yield found


def check_device(device: str) -> None:
    """Refuse a CUDA device that this process has not.

    Raises:
        OptionError: How many there are.
    """
    if device == "auto" or torch.device(device).type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(device).index or 0) >= count:
        raise OptionError(
            f"device={device!r} is not there: torch finds {count} CUDA devices in this "
            "process; take device='auto', which is CUDA where there is one and else "
            "the CPU, or have the device on all workers"
        )


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
