"""What replicas of one process share: CUDA devices, torch's threads and generator."""

import contextlib
import ctypes
import os
import threading

import psutil
import pytest
import torch

from daskdl.process_settings import (
    device_for,
    device_to_evaluate_on,
    freed_memory_kept,
    process_environment,
    random_state_kept,
    seed_generators,
    torch_threads,
)


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return current


def test_without_a_cuda_device_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with device_for("auto") as device:
        assert device == torch.device("cpu")
    for name in ("auto", "cuda", "cuda:1"):
        assert device_to_evaluate_on(name) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "chosen"), [("auto", "cuda"), ("cpu", "cpu"), ("cuda:1", "cuda:1")]
)
def test_models_are_evaluated_on_the_device_that_is_named(two_devices, device, chosen):
    assert device_to_evaluate_on(device) == torch.device(chosen)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_replicas_of_one_process_get_different_devices_whatever_their_numbers(
    two_devices, device
):
    for _ in range(2):  # when all have left, the first is free again
        with contextlib.ExitStack() as stack:
            devices = [stack.enter_context(device_for(device)) for _ in range(3)]

        assert [chosen.index for chosen in devices] == [0, 1, 0]


def test_a_replica_seeds_the_cpu_and_its_own_device(two_devices, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)

    with torch.random.fork_rng(devices=[]):
        for device in ("cuda:1", "cpu"):
            seed_generators(98, torch.device(device))
            assert torch.initial_seed() == 98

    assert seeds == [98]


def test_a_device_that_has_failed_is_warned_of_and_hides_no_error(
    two_devices, monkeypatch, caplog
):
    def fail(*arguments):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", fail)

    with process_environment("cuda:1", threads=1):
        pass
    with pytest.raises(KeyError), process_environment("cuda:1", threads=1):
        raise KeyError

    first, second = caplog.messages
    assert first == second
    assert first.startswith("this process can no longer use cuda:1: device-side assert")


@pytest.fixture
def two_threads():
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(former)


def test_the_last_replica_restores_torchs_threads(two_threads):
    first, second = torch_threads(3), torch_threads(4)
    first.__enter__()
    second.__enter__()

    first.__exit__(None, None, None)
    between = torch.get_num_threads()
    second.__exit__(None, None, None)

    assert (between, torch.get_num_threads()) == (4, 2)


def test_the_last_replica_restores_torchs_generator():
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        first, second = (random_state_kept(torch.device("cpu")) for _ in range(2))
        first.__enter__()
        torch.manual_seed(98)
        second.__enter__()
        torch.manual_seed(99)

        first.__exit__(None, None, None)
        between = torch.get_rng_state()
        second.__exit__(None, None, None)

        assert not torch.equal(between, before)
        assert torch.equal(torch.get_rng_state(), before)


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
