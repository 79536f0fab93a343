import threading

import pytest
import torch

from daskdl.training.replica import torch_threads


@pytest.fixture(autouse=True)
def two_threads():
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(former)


def test_torch_has_the_share_inside_and_its_own_setting_afterwards():
    with torch_threads(3):
        inside = torch.get_num_threads()

    assert (inside, torch.get_num_threads()) == (3, 2)


def test_the_setting_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), torch_threads(3):
        raise ZeroDivisionError

    assert torch.get_num_threads() == 2


def test_whoever_leaves_last_puts_the_setting_back():
    first, second = torch_threads(3), torch_threads(4)
    first.__enter__()
    second.__enter__()

    first.__exit__(None, None, None)
    between = torch.get_num_threads()
    second.__exit__(None, None, None)

    assert between == 4
    assert torch.get_num_threads() == 2


def test_a_later_use_finds_the_setting_of_its_own_time():
    with torch_threads(3):
        pass
    torch.set_num_threads(1)

    with torch_threads(4):
        pass

    assert torch.get_num_threads() == 1


def test_replicas_in_threads_of_their_own_leave_the_setting_as_it_was():
    together = threading.Barrier(3)

    def replica():
        with torch_threads(3):
            together.wait(20)
            together.wait(20)

    threads = [threading.Thread(target=replica) for _ in range(2)]
    for thread in threads:
        thread.start()
    together.wait(20)
    together.wait(20)
    for thread in threads:
        thread.join(20)

    assert torch.get_num_threads() == 2
