"""What is of a whole model, cut by its groups, and put together again. No state.

What came from another replica is checked before it is cut.

Shape suffixes: N = parameters over all groups, K = entries of one update.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from daskdl import kernels
from daskdl.errors import CodecError
from daskdl.progress import Counts, Progress


def cut_entries(
    groups: Sequence[Progress], entries_K: Counts
) -> list[tuple[Progress, Tensor]]:
    """Cut the entries of a model by group; groups without entries are left out.

    Raises:
        CodecError: If an entry is not an ascending position of the model.
    """
    entries = kernels.from_counts(entries_K)
    kernels.check(entries, 0, groups[-1].stop)
    ends = np.searchsorted(np.abs(entries_K), [g.stop for g in groups], "right")
    parts = zip(groups, [0, *ends[:-1]], ends, strict=True)
    return [(group, entries[a:b]) for group, a, b in parts if a < b]


def cut_counts(
    groups: Sequence[Progress], counts_N: Counts
) -> list[tuple[Progress, Tensor]]:
    """Cut a dense vector of a model by group.

    Raises:
        CodecError: If it is not int32 with one number per parameter.
    """
    size = groups[-1].stop
    if counts_N.shape != (size,) or counts_N.dtype != np.int32:
        raise CodecError(
            f"need {size} counts of int32, got {counts_N.dtype} of {counts_N.shape}"
        )
    counts = kernels.from_counts(counts_N)
    return [(group, counts[group.start : group.stop]) for group in groups]


def join_counts(parts: Iterable[Tensor]) -> Counts:
    """Put the counts of all groups behind each other; a fresh array."""
    counts_N: Counts = torch.cat(list(parts)).numpy()
    return counts_N
