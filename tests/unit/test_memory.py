import ctypes
import os
import threading

import psutil
import pytest

from daskdl import memory
from daskdl.memory import DEFAULT_BYTES, freed_memory_kept

BLOCK_BYTES = 16 * 2**20

glibc = pytest.mark.skipif(
    getattr(ctypes.CDLL(None), "mallopt", None) is None,
    reason="the C library has no mallopt: there is nothing to set",
)


def resident():
    return psutil.Process(os.getpid()).memory_info().rss


def used_and_freed():
    """Resident bytes that stay after a block was written and freed, in a thread."""
    stayed = []

    def work():
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        before = resident()
        block = libc.malloc(ctypes.c_size_t(BLOCK_BYTES))
        ctypes.memset(block, 1, BLOCK_BYTES)
        libc.free(block)
        stayed.append(resident() - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return stayed[0]


@glibc
def test_a_freed_block_stays_while_inside_and_goes_back_afterwards():
    with freed_memory_kept():
        inside = used_and_freed()
    afterwards = used_and_freed()

    assert inside > BLOCK_BYTES / 2
    assert afterwards < BLOCK_BYTES / 2


@glibc
def test_the_last_one_to_leave_puts_it_back():
    with freed_memory_kept():
        with freed_memory_kept():
            pass
        inside = used_and_freed()

    assert inside > BLOCK_BYTES / 2


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("65536", 65536), ("", DEFAULT_BYTES), ("-1", DEFAULT_BYTES)],
    ids=["nanny", "unset", "no size"],
)
def test_the_allocator_is_put_back_to_what_the_environment_asks_for(
    monkeypatch, asked, expected
):
    settings = []
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", asked)
    monkeypatch.setattr(memory, "_set", lambda mmap, trim: settings.append(trim))

    with freed_memory_kept():
        pass

    assert settings[-1] == expected


def test_only_the_last_one_to_leave_gives_the_memory_back(monkeypatch):
    given = []
    monkeypatch.setattr(memory, "_give_back", lambda: given.append("back"))

    with freed_memory_kept():
        with freed_memory_kept():
            pass
        between = list(given)

    assert (between, given) == ([], ["back"])


def test_a_c_library_without_these_settings_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())

    with freed_memory_kept():
        pass
