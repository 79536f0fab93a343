"""What every worker would do before its first step, done once.

The workers of the clusters here are forks of a process that has imported this module;
those of the examples are not, they start as a user's do. What a fork does not have is
threads: so nothing here may start one, and torch has one for itself.
"""

import os

os.environ |= dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)

import torch
import torch._dynamo  # noqa: F401  # an optimizer imports it
import torchmetrics.classification  # noqa: F401

import daskdl  # noqa: F401
from daskdl.compression.kernels_numba import NumbaGroup

# The first of numba's functions takes half a second to load, each other none.
NumbaGroup(torch.zeros(1), torch.zeros(1), torch.zeros(1).int(), 0).find(1, 1.0)
