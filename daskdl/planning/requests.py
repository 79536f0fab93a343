"""What a request over Dask's comms costs, measured between two ends in one thread."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from distributed.core import Server, rpc
from numpy.typing import NDArray

from daskdl.channel.protocol import unwrap, wrap
from daskdl.training.checkpointing import run_in_thread

WARM, TIMED = 10, 40  # requests
MANY = 9  # items in a larger one
PAUSE_S = 0.003  # between requests, so that each finds what a replica's finds: cold


class RequestCosts(NamedTuple):
    """CPU time at either end, seconds."""

    request_s: float  # with one item
    item_s: float  # for each further one


def request_costs(
    frame: NDArray[np.uint8], meanwhile: Callable[[], object]
) -> RequestCosts:
    """Send a frame to and fro, over TCP on this machine.

    It has an event loop of its own, in a thread: the caller may be in one.

    Args:
        frame: Of an update.
        meanwhile: What the caller does again and again until it is done, as a replica
            trains beside its worker's event loop.
    """
    measured = run_in_thread(lambda: asyncio.run(_measure(frame)), "daskdl-plan")
    while not measured.done():
        meanwhile()
    return measured.result()


async def _measure(frame: NDArray[np.uint8]) -> RequestCosts:
    async def take(items: Any) -> dict[str, int]:
        return {"accepted": sum(unwrap(item).nbytes > 0 for item in items)}

    server = Server({"take": take})
    await server.listen("tcp://127.0.0.1:0")
    peer = rpc(server.address)
    try:
        await _cpu_s(peer, frame, 1, WARM)
        one_s = await _cpu_s(peer, frame, 1, TIMED)
        many_s = await _cpu_s(peer, frame, MANY, TIMED)
    finally:
        await peer.close_rpc()
        await server.close()
    # The thread is both ends.
    return RequestCosts(one_s / 2, max(0.0, many_s - one_s) / (MANY - 1) / 2)


async def _cpu_s(peer: Any, frame: NDArray[np.uint8], items: int, count: int) -> float:
    """CPU time of this thread for a request, the median."""
    taken = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        started = time.thread_time()
        await peer.take(items=[wrap(frame) for _ in range(items)])
        taken.append(time.thread_time() - started)
    return float(np.median(taken))
