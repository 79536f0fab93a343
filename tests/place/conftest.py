"""Fixtures for fits among threads."""

import contextlib

import pytest
import torch


@pytest.fixture
def one_thread():
    """One thread of torch, as in `plain_loop`."""
    with torch_threads(1):
        yield


@pytest.fixture(params=[1, 2])
def threads(request):
    """One or two threads of torch, on any machine."""
    with torch_threads(request.param):
        yield request.param


@contextlib.contextmanager
def torch_threads(count):
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(former)
