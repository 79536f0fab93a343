"""Settings of a process that its replicas share; the last replica restores them.

The settings are torch's threads and random generators, the CUDA devices, and whether
glibc keeps freed memory.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from daskdl.errors import OptionError

T = TypeVar("T")


class _Setting(Generic[T]):
    """A setting of the process that replicas change; the last one restores it."""

    def __init__(self, read: Callable[[], T], write: Callable[[T], object]) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        self._originals: list[T] = []  # the original value, once per active replica

    @contextlib.contextmanager
    def kept(self, now: T | None = None) -> Iterator[None]:
        """Context manager: restore the setting when the last replica leaves."""
        with self._lock:
            original = self._originals[0] if self._originals else self._read()
            self._originals.append(original)
            if now is not None:
                self._write(now)
        try:
            yield
        finally:
            with self._lock:
                original = self._originals.pop()
                if not self._originals:
                    self._write(original)


def _read_generator(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _write_generator(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@functools.cache
def _generator(device: torch.device) -> _Setting[Tensor]:
    return _Setting(
        lambda: _read_generator(device), lambda state: _write_generator(device, state)
    )


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Context manager: restore the random generators of the CPU and the device."""
    with contextlib.ExitStack() as stack:
        for each in {torch.device("cpu"), device}:
            stack.enter_context(_generator(each).kept())
        yield


def generators(device: torch.device) -> dict[str, Tensor]:
    """Return the current random states of the CPU and the device, by device type."""
    return {e.type: _read_generator(e) for e in {torch.device("cpu"), device}}


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of `generators`, for the device types in use."""
    for each in {torch.device("cpu"), device}:
        if each.type in states:
            _write_generator(each, states[each.type])


_threads = _Setting(torch.get_num_threads, torch.set_num_threads)


def torch_threads(count: int) -> AbstractContextManager[None]:
    """Context manager: set the number of torch's threads."""
    return _threads.kept(count)


_lock_devices = threading.Lock()
_users_devices: Counter[int] = Counter()  # active replicas, by CUDA device number


@contextlib.contextmanager
def device_for(device: str) -> Iterator[torch.device]:
    """Context manager: choose the device of a replica.

    A CUDA device becomes the calling thread's current device, for user code that names
    ``"cuda"`` without a number.

    Args:
        device: ``"auto"`` takes the first CUDA device with the fewest replicas of this
            process, and the CPU without CUDA. Else the name of a torch device.

    Raises:
        OptionError: If this process does not have the device.
    """
    chosen = torch.device("cpu")
    number = None
    if device != "auto":
        check_device(device)
        chosen = torch.device(device)
    elif count := _device_count():
        with _lock_devices:
            number = min(range(count), key=_users_devices.__getitem__)
            _users_devices[number] += 1
        chosen = torch.device("cuda", number)
    cuda = chosen.type == "cuda" and chosen.index is not None
    try:
        with torch.cuda.device(chosen) if cuda else contextlib.nullcontext():
            yield chosen
    finally:
        if number is not None:
            with _lock_devices:
                _users_devices[number] -= 1


def _device_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_device(device: str) -> None:
    """Check that this process has a CUDA device."""
    if device == "auto" or torch.device(device).type != "cuda":
        return
    count = _device_count()
    if (torch.device(device).index or 0) >= count:
        raise OptionError(
            f"device {device!r} does not exist: torch finds {count} CUDA devices in "
            "this process; use device='auto', which is CUDA where available and else "
            "the CPU, or make sure that every worker has the device"
        )


DEFAULT_BYTES = 128 * 1024  # default of each setting in glibc


class MallocSetting(NamedTuple):
    """A malloc setting of glibc, see mallopt(3)."""

    number: int
    variable: str  # environment variable
    kept_bytes: int  # value that keeps freed memory


SETTINGS = (
    # glibc's limit: larger blocks are always mapped anew.
    MallocSetting(-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),
    MallocSetting(-1, "MALLOC_TRIM_THRESHOLD_", 2**30),
    # Heaps of threads are smaller. The padding is reserved, but not touched.
    MallocSetting(-2, "MALLOC_TOP_PAD_", 64 * 2**20),
)

_memory_lock = threading.Lock()
_memory_users: list[None] = []


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for reuse, instead of returning it to the system.

    Works for blocks up to 32 MiB under glibc; has no effect elsewhere. When the last
    context exits, it returns the memory and restores the settings.
    """
    with _memory_lock:
        _memory_users.append(None)
        if len(_memory_users) == 1:
            _set_malloc({s.number: s.kept_bytes for s in SETTINGS})
    try:
        yield
    finally:
        with _memory_lock:
            _memory_users.pop()
            if not _memory_users:
                asked = [os.environ.get(s.variable, "") for s in SETTINGS]
                sizes = [int(n) if n.isdigit() else DEFAULT_BYTES for n in asked]
                _set_malloc({s.number: n for s, n in zip(SETTINGS, sizes, strict=True)})
                trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
                if trim is not None:
                    trim(0)


def _set_malloc(sizes: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for number, size in sizes.items():
            mallopt(number, size)


@contextlib.contextmanager
def process_environment(device: str, threads: int) -> Iterator[torch.device]:
    """Set up the process for a replica; the last replica to leave restores it."""
    with (
        device_for(device) as chosen,
        torch_threads(threads),
        freed_memory_kept(),
        random_state_kept(chosen),
    ):
        yield chosen
