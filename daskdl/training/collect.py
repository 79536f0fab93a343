"""What the replicas of a run left on their workers, joined there."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from distributed import Client, Future, wait

from daskdl.data.futures import new_key
from daskdl.errors import WaitTimeoutError
from daskdl.packed import Packed
from daskdl.training.merge import Final, merge
from daskdl.training.task import TaskOptions

LOOK_S = 1.0  # between two looks whether a result was lost


def collect(
    client: Client, tasks: Mapping[str, Future], options: TaskOptions
) -> Final | None:
    """Wait for the tasks of a run to end, and join what they left.

    A result may be lost with its worker when it is there already; then the others
    are joined without it.

    Args:
        client: Synchronous, of the cluster.
        tasks: Of the replicas that have not been given up, by whose they are.
        options: Of the run.

    Returns:
        What the run ended with; None if no task has come to its end.

    Raises:
        WaitTimeoutError: If they were not joined in time.
    """
    futures = tasks.values()
    _wait_for(client, futures, options.timeouts.stop)
    bound = options.timeouts.bound("data")
    deadline = time.monotonic() + bound.seconds
    while results := [task for task in futures if task.status == "finished"]:
        packed = _join(client, results, options.run, deadline)
        if packed is not None:
            return packed.unpack()
        if time.monotonic() > deadline:
            whose = "; of ".join(f"{who}: {task.status}" for who, task in tasks.items())
            raise WaitTimeoutError(
                f"the replicas' results were not joined within {bound}; Dask says of "
                f"{whose}; was a worker lost at the very end, or are all busy with "
                "other tasks?"
            )
    return None


def _wait_for(client: Client, tasks: Collection[Future], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while live := [task for task in tasks if task.status == "pending"]:
        # One that Dask gives up meanwhile is not pending any more.
        with contextlib.suppress(CancelledError):
            try:
                with client.as_current():  # `wait` asks the default client
                    wait(live, timeout=max(deadline - time.monotonic(), 0.0))
            except TimeoutError:  # who they are is said in the end
                return


def _join(
    client: Client, results: Sequence[Future], run: int, deadline: float
) -> Packed[Final] | None:
    """Join results; None if one of them was lost, or it takes too long."""
    merged = client.submit(merge, list(results), key=new_key(f"merge-{run:x}"))

    async def fetch() -> Any:
        # Once: over a slow link it takes long, and would take longer every time.
        fetching = asyncio.ensure_future(client.gather(merged, asynchronous=True))
        while time.monotonic() < deadline:
            await asyncio.wait([fetching], timeout=LOOK_S)
            if fetching.done():
                return fetching.result()
            # Dask would train again what was lost, on a worker that is gone.
            if any(result.status != "finished" for result in results):
                break
        fetching.cancel()
        return None

    try:
        packed: Packed[Final] | None = client.sync(fetch)
    except CancelledError:
        return None  # as above
    finally:
        merged.release()
    return packed
