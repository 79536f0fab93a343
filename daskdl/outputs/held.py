"""What all tasks of a lazy result need, where each worker gets it once.

It is a task of its own, so that Dask sends its result to each worker that needs it,
once, lets go of it after its last use, and makes it again if the worker that has it
dies. Data that are scattered cannot be made again: Dask keeps one copy of them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from dask.delayed import delayed
from distributed import Client

from daskdl.data.futures import new_key, workers_of
from daskdl.serialization import Packed

# Dask warns of graphs above 10 MB; and a scheduler that reads a gigabyte in one message
# does nothing else meanwhile.
BLOCK_BYTES = 4 * 2**20


def held(packed: Packed[Any], client: Client | Literal[False]) -> Any:
    """What tasks can depend on, to get the same as one object per worker.

    Args:
        packed: Its bytes go to the scheduler, which keeps them as long as what is
            returned, or something made of it, is there.
        client: Of the cluster that computes; False: whoever does.

    Returns:
        A future, or without a client a Delayed object.
    """
    name = new_key("model")
    if client is False:
        return delayed(packed, name=name, traverse=False)
    workers_of(client)  # there must be some
    starts = range(0, packed.payload.nbytes, BLOCK_BYTES)
    blocks = [
        client.submit(
            _block,
            packed.payload[start : start + BLOCK_BYTES],
            key=new_key("model-block"),
            pure=False,
        )
        for start in starts
    ]
    # The blocks are let go of: Dask drops them when they have been put together.
    kind = type(packed)
    return client.submit(_joined, kind, blocks, packed.argument, key=name, pure=False)


def _block(block: np.ndarray) -> np.ndarray:
    return block


def _joined(
    kind: type[Packed[Any]], blocks: Sequence[np.ndarray], argument: str
) -> Packed[Any]:
    whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return kind.of(whole, argument)
