"""What replicas of one process share: CUDA devices, torch's threads and generator."""

import contextlib

import pytest
import torch

from daskdl.training.replica import device_for, random_state_kept, torch_threads


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


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_was_asked_for_is_taken(two_devices, name):
    with device_for(name) as first, device_for(name) as second:
        assert first == second == torch.device(name)


def test_replicas_of_one_process_get_different_devices_whatever_their_numbers(
    two_devices,
):
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(device_for("auto")) for _ in range(4)]

    assert [device.index for device in devices] == [0, 1, 0, 1]


def test_the_next_one_gets_what_one_that_left_had(two_devices):
    with device_for("auto"):
        with contextlib.suppress(ZeroDivisionError), device_for("auto") as left:
            raise ZeroDivisionError
        with device_for("auto") as came:
            assert came == left == torch.device("cuda", 1)


def test_when_all_have_left_the_first_is_free_again(two_devices):
    for _ in range(2):
        with device_for("auto") as device:
            assert device.index == 0


@pytest.mark.parametrize("name", ["cuda:1", "auto"])
def test_the_device_is_the_current_one_meanwhile(two_devices, name):
    with contextlib.ExitStack() as stack:
        if name == "auto":
            stack.enter_context(device_for(name))

        with device_for(name) as device:
            assert two_devices[-1] == device == torch.device("cuda", 1)

    assert two_devices == [torch.device("cuda", 0)]


@pytest.fixture
def two_threads():
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(former)


def test_who_leaves_last_restores_torchs_threads(two_threads):
    first, second = torch_threads(3), torch_threads(4)
    first.__enter__()
    second.__enter__()

    first.__exit__(None, None, None)
    between = torch.get_num_threads()
    second.__exit__(None, None, None)

    assert (between, torch.get_num_threads()) == (4, 2)


def test_who_leaves_last_restores_the_generator_that_the_first_found():
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


def test_a_later_one_finds_the_settings_of_its_own_time(two_threads):
    for count in (2, 1):
        torch.set_num_threads(count)
        with torch_threads(3):
            pass

        assert torch.get_num_threads() == count
