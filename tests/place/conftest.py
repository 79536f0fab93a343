"""What tests among threads have in common."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """As the plain loop has it: sums over a batch depend on how they are shared out."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)
