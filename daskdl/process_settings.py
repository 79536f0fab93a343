"""Settings of a process that its replicas share; the last replica restores them.

The settings are torch's number of threads and random generators, the CUDA devices, and
whether glibc keeps freed memory.
"""

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from daskdl.errors import OptionError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Setting(Generic[T]):
    """A setting of the process that replicas change; the last one restores it."""

    def __init__(self, read: Callable[[], T], write: Callable[[T], object]) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        self._originals: list[T] = []  # the original value, once per active replica

    @contextlib.contextmanager
    def kept(self, value: T | None = None) -> Iterator[None]:
        """Context manager: restore the setting when the last replica leaves.

        A `value` other than None is written on entry.
        """
        with self._lock:
            original = self._originals[0] if self._originals else self._read()
            self._originals.append(original)
            if value is not None:
                self._write(value)
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
        for place in {torch.device("cpu"), device}:
            stack.enter_context(_generator(place).kept())
        yield


def generators(device: torch.device) -> dict[str, Tensor]:
    """Return the current random states of the CPU and the device, by device type."""
    places = {torch.device("cpu"), device}
    return {place.type: _read_generator(place) for place in places}


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of `generators`, for the device types in use."""
    for place in {torch.device("cpu"), device}:
        if place.type in states:
            _write_generator(place, states[place.type])


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the random generators of the CPU and the device.

    `torch.manual_seed` would also seed the other devices, on which other replicas of
    this process may be training.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


_threads = _Setting(torch.get_num_threads, torch.set_num_threads)


def torch_threads(count: int) -> AbstractContextManager[None]:
    """Context manager: set the number of torch's threads."""
    return _threads.kept(count)


# Whether each replica uses a stream of its own on CUDA. On torch's default stream, a
# replica that reads a value waits for all others on the device. With streams, two
# replicas on an H100 took 1.45 instead of 1.63 times as long as two plain loops. They
# are off, as only tests/cuda/test_streams.py has run with them.
separate_streams = False

_device_lock = threading.Lock()
_replicas_by_device: Counter[int] = Counter()  # keys: numbers of CUDA devices


def is_divided(device: str | torch.device) -> bool:
    """Whether replicas divide the CUDA devices of their process among them."""
    return str(device) in ("auto", "cuda")


@contextlib.contextmanager
def device_for(device: str) -> Iterator[torch.device]:
    """Context manager: choose the device of a replica.

    A CUDA device becomes the calling thread's current device, for user code that names
    ``"cuda"`` without a number.

    Args:
        device: ``"cuda"``, which is the first CUDA device with the fewest replicas of
            this process; ``"auto"``, which is the same, or the CPU without CUDA; or the
            name of another torch device.

    Raises:
        OptionError: If this process does not have the device.
    """
    check_device(device)
    chosen = torch.device("cpu" if device == "auto" else device)
    count, number = _device_count(), None
    if count and is_divided(device):
        with _device_lock:
            number = min(range(count), key=_replicas_by_device.__getitem__)
            _replicas_by_device[number] += 1
        chosen = torch.device("cuda", number)
    on_cuda = chosen.type == "cuda"
    try:
        with contextlib.ExitStack() as stack:
            if on_cuda:
                stack.enter_context(torch.cuda.device(chosen))
            if on_cuda and separate_streams:
                # Frames, batches and results are in the host's memory, so no tensor
                # is used on two streams.
                stream = torch.cuda.Stream(chosen)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
            yield chosen
    finally:
        if number is not None:
            with _device_lock:
                _replicas_by_device[number] -= 1


def device_to_evaluate_on(device: str) -> torch.device:
    """Return the device of this process on which models are evaluated.

    Args:
        device: ``"auto"``, which is CUDA; or the name of a torch device. Without CUDA,
            the CPU replaces it, so that a trainer that was saved on a machine with CUDA
            can be used on others.

    Raises:
        OptionError: If this process has CUDA devices, but not the one that is named.
    """
    chosen = torch.device("cuda" if device == "auto" else device)
    if chosen.type == "cuda" and not _device_count():
        if device != "auto":
            logger.warning("no CUDA device for device=%r: the CPU is used", device)
        return torch.device("cpu")
    check_device(device)
    return chosen


def _device_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name(device: Any) -> str:
    """Return the name of a device option.

    Example:
        >>> device_name(torch.device("cuda", 1)), device_name("auto")
        ('cuda:1', 'auto')
    """
    # No bare number: its meaning in torch depends on the machine.
    is_name = isinstance(device, str | torch.device)
    try:
        if is_name and device != "auto":
            torch.device(device)
    except RuntimeError:
        is_name = False
    if not is_name:
        raise OptionError(
            "device must be 'auto' or a torch device, such as 'cpu' or 'cuda:0', got "
            f"{device!r}"
        )
    return str(device)


def check_device(device: str) -> None:
    """Refuse a CUDA device that this process does not have."""
    if device == "auto" or torch.device(device).type != "cuda":
        return
    count = _device_count()
    if (torch.device(device).index or 0) >= count:
        raise OptionError(
            f"device {device!r} does not exist: torch finds {count} CUDA devices in "
            "this process; use device='auto', which is CUDA if available and otherwise "
            "the CPU, or make sure that every worker has the device"
        )


DEFAULT_BYTES = 128 * 1024  # default of each setting in glibc


class MallocSetting(NamedTuple):
    """A malloc setting of glibc, see mallopt(3)."""

    number: int
    variable: str  # environment variable
    kept_bytes: int  # value that keeps freed memory


SETTINGS = (
    # The largest value that glibc accepts: larger blocks are always mapped anew.
    MallocSetting(-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),
    MallocSetting(-1, "MALLOC_TRIM_THRESHOLD_", 2**30),
    # Heaps of threads are smaller. The padding is reserved, but not touched.
    MallocSetting(-2, "MALLOC_TOP_PAD_", 64 * 2**20),
)


def _keep_freed_memory(keep: bool) -> None:
    """Change the settings, or restore them and return freed memory to the system."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        return
    for number, variable, kept_bytes in SETTINGS:
        configured = os.environ.get(variable, "")
        former_bytes = int(configured) if configured.isdigit() else DEFAULT_BYTES
        libc.mallopt(number, kept_bytes if keep else former_bytes)
    if not keep:
        libc.malloc_trim(0)


_freed_memory = _Setting(lambda: False, _keep_freed_memory)


def freed_memory_kept() -> AbstractContextManager[None]:
    """Context manager: keep freed memory for reuse instead of returning it.

    Works for blocks up to 32 MiB under glibc; has no effect elsewhere. When the last
    context exits, the memory is returned to the system and the settings are restored.
    """
    return _freed_memory.kept(True)


@contextlib.contextmanager
def process_environment(device: str, threads: int) -> Iterator[torch.device]:
    """Set up the process for a replica; the last replica to leave restores it.

    A device that has failed, for example by a device-side assert, is left as it is: the
    replica has reported its error, which another one must not replace.
    """
    on_device = contextlib.ExitStack()
    with torch_threads(threads), freed_memory_kept():
        chosen = on_device.enter_context(device_for(device))
        try:
            on_device.enter_context(random_state_kept(chosen))
            yield chosen
        finally:
            try:
                on_device.close()
            except RuntimeError as error:  # torch's errors of a device
                logger.warning(
                    "this process can no longer use %s: %s; restart it, or the "
                    "workers with client.restart()",
                    chosen,
                    error,
                )
