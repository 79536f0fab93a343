"""Which kernels work on a vector."""

from types import ModuleType

from torch import Tensor

from daskdl.kernels import cpu, generic


def kernels_for(local_N: Tensor) -> ModuleType:
    """Those on the CPU where they can, and the generic ones everywhere else."""
    return cpu if cpu.supports(local_N) else generic
