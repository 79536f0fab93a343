"""The device of the tests in tests/cuda, and what tests see of it."""

import contextlib
import gc
import os
import threading

import dask
import pytest
import torch
from torch import nn

from tests.support.clusters import cluster_of

# ``DASKDL_TEST_DEVICE``; else CUDA where there is a device, or the CPU.
DEVICE = torch.device(
    os.environ.get("DASKDL_TEST_DEVICE")
    or ("cuda" if torch.cuda.is_available() else "cpu")
)

# For what the CPU does not have, such as memory that is counted.
needs_cuda = pytest.mark.skipif(
    DEVICE.type != "cuda", reason="needs a CUDA device: the CPU has nothing like it"
)


@contextlib.contextmanager
def cluster_on_device(workers):
    """A client of so many workers, which are started as Dask starts them.

    Forks would do as well, as long as what they are forks of has not used CUDA.
    """
    method = "forkserver" if DEVICE.type == "cpu" else "spawn"
    options = {
        "distributed.worker.multiprocessing-method": method,
        "distributed.deploy.lost-worker-timeout": "90s",
    }
    with dask.config.set(options), cluster_of(workers) as client:
        yield client


def tensor_bytes():
    """Bytes of the tensors of this process on the device.

    On the CPU, of those that Python's collector knows, without the tensors that have
    no memory, which `torch.export` keeps.
    """
    gc.collect()
    if DEVICE.type == "cuda":
        # cuBLAS keeps a workspace for each thread. Torch's notes on CUDA name this
        # function to free them; there is no public one.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # memory that several streams have used is freed late
        return torch.cuda.memory_allocated(DEVICE)
    kinds = torch.Tensor, torch.nn.Parameter
    return sum(thing.nbytes for thing in gc.get_objects() if type(thing) in kinds)


class SeenDevices(nn.CrossEntropyLoss):
    """The loss of classes, which notes where replicas of this process compute it.

    Attributes:
        seen: Types of devices. Of all copies of this loss.
    """

    seen: set[str] = set()  # noqa: RUF012  # of the class

    def forward(self, output, labels):
        if threading.current_thread().name.startswith("daskdl-replica"):
            self.seen.update((output.device.type, labels.device.type))
        return super().forward(output, labels)


class OutOfMemory(nn.Module):
    """A model that needs more memory than there is for a batch of so many rows.

    Args:
        model: Computes batches of other sizes.
        rows: Size of the batch.
    """

    def __init__(self, model, rows):
        super().__init__()
        self.model = model
        self.rows = rows

    def forward(self, x):
        if len(x) == self.rows and self.training:
            allocate_too_much(x.device)
        return self.model(x)


def allocate_too_much(device):
    """Raise what torch raises; on the CPU it has another class."""
    if device.type == "cpu":
        raise torch.OutOfMemoryError("out of memory: tried to allocate 1 PiB")
    torch.empty(2**50, dtype=torch.uint8, device=device)
