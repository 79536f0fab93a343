"""Outputs as ``dask.array``, in the blocks of the rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph

from daskdl.data.futures import new_key


def lazy_array(
    parts: Sequence[Delayed], number: int, empty: np.ndarray, rows: Sequence[float]
) -> Any:
    """One array; an empty block stays one, which concatenate drops.

    Args:
        parts: The outputs of each block, as a list of all.
        number: Which of these.
        empty: The same of no rows.
        rows: Of each block; NaN if it is not known.
    """
    import dask.array  # takes half a second, and scipy

    name = new_key("outputs")
    inner = (0,) * (empty.ndim - 1)
    take = delayed(list.__getitem__, pure=False)
    taken = [
        take(part, number, dask_key_name=f"{name}-{i}") for i, part in enumerate(parts)
    ]
    layer: dict[Any, Any] = {
        (name, i, *inner): part.key for i, part in enumerate(taken)
    }
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=taken),
        name,
        chunks=(tuple(rows), *((size,) for size in empty.shape[1:])),
        meta=empty,
    )
