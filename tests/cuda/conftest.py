"""Fits on a device: on the CPU the same tests show that the tests are right.

The device is `tests.support.devices.DEVICE`, and fits get it as ``device=DEVICE``.
"""

import pytest
import torch

from tests.support.devices import DEVICE


@pytest.fixture(scope="session", autouse=True)
def device():
    """The device, which must be there if ``DASKDL_TEST_DEVICE`` names it."""
    torch.ones(1, device=DEVICE).sum().item()
    return DEVICE
