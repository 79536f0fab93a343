"""torch's own threads, shared out among the replicas of a process.

Dask's nanny starts workers with one computing thread whatever their size, and
the setting belongs to the whole process: the first replica notes it, the last
one to leave puts it back.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_users: list[int] = []  # the setting found by the first of those inside


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads while inside.

    Args:
        count: Threads for one operation, >= 1.
    """
    with _lock:
        _users.append(torch.get_num_threads() if not _users else _users[0])
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _lock:
            former = _users.pop()
            if not _users:
                torch.set_num_threads(former)
