"""What the kernel tests share: every kernel, and how to make its tensors."""

import pytest
import torch

from daskdl.compression.kernels import Kernels
from daskdl.compression.kernels_numba import NumbaKernels

GRID = 2.0**-20
INT32_MIN = -(2**31)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def maker(device):
    """Return a function that makes tensors on a device."""
    return lambda values, dtype=torch.float32: torch.tensor(
        values, dtype=dtype, device=device
    )


KERNELS = [
    pytest.param((NumbaKernels(), maker("cpu")), id="numba"),
    pytest.param((Kernels(), maker("cpu")), id="torch"),
    pytest.param((Kernels(), maker("cuda")), id="cuda", marks=CUDA),
]
