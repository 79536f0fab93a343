"""Optimizers whose steps are shorter where a batch is smaller."""

import math
import warnings

from torch.optim import Optimizer

# The groups of optimizers that divide by a root of squared gradients have one of these.
ADAPTIVE = ("betas", "beta2_decay", "centered", "rho", "lr_decay")


def divides_by_noise(optimizer: Optimizer) -> bool:
    """Whether steps are shorter where gradients are noisier, as those of Adam.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> divides_by_noise(torch.optim.AdamW([weight]))
        True
        >>> divides_by_noise(torch.optim.SGD([weight], momentum=0.9))
        False
    """
    return any(key in group for group in optimizer.param_groups for key in ADAPTIVE)


def warn_of_short_steps(optimizer: Optimizer, replicas: int) -> None:
    """Warn where several replicas may learn slower than one with as large a batch.

    Each divides by the noise of its own batches, which is larger than that of all of
    them together: by up to the root of their number.

    Args:
        optimizer: As each replica has one.
        replicas: Of whose updates the mean counts.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_short_steps(optimizer, replicas=4)
        >>> str(caught[0].message)[:42]
        '4 replicas with AdamW may learn slower tha'
    """
    if replicas < 2 or not divides_by_noise(optimizer):
        return
    name = type(optimizer).__name__
    warnings.warn(
        f"{replicas} replicas with {name} may learn slower than one process with "
        f"{replicas} times the batch: each step is made from a smaller and noisier "
        f"batch, and {name} makes it shorter for that. Try a learning rate up to "
        f"{math.sqrt(replicas):.2g} times as high; see 'Adam and its like' in "
        "docs/tuning.md",
        stacklevel=5,  # where `fit` was called
    )
