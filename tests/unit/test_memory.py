import ctypes
import os
import subprocess
import sys
import threading

import psutil
import pytest

from daskdl import util
from daskdl.util import DEFAULT_BYTES, freed_memory_kept

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


FAULTS = """
import ctypes, resource, threading
from daskdl.util import (freed_memory_kept)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def work():
    full = [libc.malloc(12 << 20) for _ in range(5)]  # no room in the first heap
    for i in range(25):
        if i == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(16 << 20)
        ctypes.memset(block, 1, 16 << 20)
        libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

with freed_memory_kept():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@glibc
def test_a_thread_keeps_a_block_that_has_a_heap_of_its_own():
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    pages = 16 * 2**20 / os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages  # of 20 times as many


@pytest.mark.parametrize(
    "variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"]
)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [("65536", 65536), ("", DEFAULT_BYTES), ("-1", DEFAULT_BYTES)],
    ids=["nanny", "unset", "no size"],
)
def test_the_allocator_is_put_back_to_what_the_environment_asks_for(
    monkeypatch, variable, asked, expected
):
    settings = []
    monkeypatch.setenv(variable, asked)
    monkeypatch.setattr(util, "_set", settings.append)
    (number,) = [one.number for one in util.SETTINGS if one.variable == variable]

    with freed_memory_kept():
        pass

    assert settings[-1][number] == expected


def test_only_the_last_one_to_leave_gives_the_memory_back(monkeypatch):
    given = []
    monkeypatch.setattr(util, "_give_back", lambda: given.append("back"))

    with freed_memory_kept():
        with freed_memory_kept():
            pass
        between = list(given)

    assert (between, given) == ([], ["back"])


def test_a_c_library_without_these_settings_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())

    with freed_memory_kept():
        pass
