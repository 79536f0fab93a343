"""Numbers of one flat vector: torch in, torch out, no state, no bytes.

Every vector is a pair: ``local_N`` (floating, parameter units) and ``shared_N``
(int32, steps of ``grid``). The residual is ``(local - shared * grid) / weight`` and is
never stored: local is ahead by ``weight`` times what has yet to be sent, as if as many
others had gone the same way. As ``shared`` counts whole steps, sums of quanta are exact
and do not depend on their order. What moves them is a few positions
(:mod:`daskdl.kernels.entries`) or all (:mod:`daskdl.kernels.counts`). Each function
picks :mod:`daskdl.kernels.cpu` (numba) or :mod:`daskdl.kernels.generic` (torch) by the
vector it gets; both give the same bits.

Shape suffixes: N = parameters of one flat vector.
"""

from daskdl.kernels.counts import apply_counts_, from_counts, residual_counts
from daskdl.kernels.entries import apply_, check, find, fold_, move_, take_
from daskdl.kernels.generic import GUARD

__all__ = [
    "GUARD",
    "apply_",
    "apply_counts_",
    "check",
    "find",
    "fold_",
    "from_counts",
    "move_",
    "residual_counts",
    "take_",
]
