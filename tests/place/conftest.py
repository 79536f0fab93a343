"""What tests among threads have in common."""

import contextlib

import pytest
import torch


@pytest.fixture
def one_thread():
    """As the plain loop has it, unless it is told."""
    with torch_threads(1):
        yield


@pytest.fixture(params=[1, 2])
def threads(request):
    """Of torch, whatever the machine has."""
    with torch_threads(request.param):
        yield request.param


@contextlib.contextmanager
def torch_threads(count):
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(former)
