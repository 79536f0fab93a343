"""The device of the tests in tests/cuda: see `DEVICE`."""

import os

import pytest
import torch

# ``DASKDL_TEST_DEVICE``; else CUDA where there is a device, or the CPU.
DEVICE = torch.device(
    os.environ.get("DASKDL_TEST_DEVICE")
    or ("cuda" if torch.cuda.is_available() else "cpu")
)

# For what the CPU does not have, such as memory that is counted.
needs_cuda = pytest.mark.skipif(
    DEVICE.type != "cuda", reason="needs a CUDA device: the CPU has nothing like it"
)
