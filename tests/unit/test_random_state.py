import torch

from daskdl.training.replica import random_state_kept

CPU = torch.device("cpu")


def test_the_state_is_put_back():
    before = torch.get_rng_state()

    with random_state_kept(CPU):
        torch.manual_seed(99)
        torch.rand(3)

    assert torch.equal(torch.get_rng_state(), before)


def test_whoever_leaves_last_puts_the_state_back_that_the_first_one_found():
    before = torch.get_rng_state()
    first, second = random_state_kept(CPU), random_state_kept(CPU)
    first.__enter__()
    torch.manual_seed(98)
    second.__enter__()
    torch.manual_seed(99)

    first.__exit__(None, None, None)
    between = torch.get_rng_state()
    second.__exit__(None, None, None)

    assert not torch.equal(between, before)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_later_use_finds_the_state_of_its_own_time():
    with torch.random.fork_rng(devices=[]):
        with random_state_kept(CPU):
            torch.manual_seed(99)
        torch.manual_seed(5)
        expected = torch.get_rng_state()

        with random_state_kept(CPU):
            torch.manual_seed(6)

        assert torch.equal(torch.get_rng_state(), expected)
