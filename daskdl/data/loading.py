"""Getting what a part is made of to the worker that trains on it."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future, Worker, get_client, get_worker
from distributed.client import FutureCancelledError
from distributed.utils_comm import gather_from_workers

from daskdl.data.batching import Rows
from daskdl.data.futures import new_key
from daskdl.data.part_graph import PartGraph
from daskdl.errors import DataError, LostPieceError, WaitTimeoutError
from daskdl.serialization import Packed

ASK_S = 5.0  # for a better message, after a bound was passed anyway
LOOK_S = 0.25  # between two looks whether nobody wants it any more


class Fetcher:
    """Gets results of Dask's to one worker; made in a task, used by any thread.

    Dask moves them, so they count and spill like any others. The task must have
    seceded, or its worker needs a second thread.

    Attributes:
        names: What parts are called that were sent as tasks, by key.
    """

    names: dict[str, str]

    def __init__(self) -> None:
        self.names = {}
        self._worker: Worker = get_worker()
        self._client: Client = get_client()

    def here(self, key: Any) -> Any | None:
        """A result that is in this worker's store; None if it is not."""
        return self._worker.data.get(key)

    def rows(self, key: str, timeout_s: float, unwanted: Callable[[], bool]) -> Rows:
        """Get a part, whether it is here as rows or has to be computed.

        Args:
            key: Of what was sent of it.
            timeout_s: For each result that has to come.
            unwanted: Whether to give up; asked now and then.

        Returns:
            Rows, to be read only: they may be the store's own.

        Raises:
            WaitTimeoutError: If something did not come in time.
            LostPieceError: If it was lost with its worker.
            DataError: If the part cannot be trained on, or something it begins with
                is lost for good. What the user's own tasks raise comes out as it is.
        """
        content = self.fetch(key, timeout_s, unwanted)
        if not isinstance(content, Packed):
            x, y = content
            return x, y
        graph: PartGraph = content.unpack()
        self.names[key] = graph.name
        return graph.rows(self._needs(graph, timeout_s, unwanted))

    def separate(
        self, key: str, timeout_s: float, unwanted: Callable[[], bool]
    ) -> list[tuple[str, Callable[[], Rows]]]:
        """What a part is made of, see `Source.separate`; arguments as of `rows`."""
        content = self.fetch(key, timeout_s, unwanted)
        if not isinstance(content, Packed):
            return []
        graph: PartGraph = content.unpack()
        return graph.separate(self._needs(graph, timeout_s, unwanted))

    def _needs(
        self, graph: PartGraph, timeout_s: float, unwanted: Callable[[], bool]
    ) -> dict[Any, Any]:
        """All results that a part begins with; those elsewhere in one request."""
        found = {key: self.here(key) for key in graph.needs}
        missing = [key for key, value in found.items() if value is None]
        if len(missing) > 1:
            gathered = self._gathered(missing, timeout_s, unwanted)
            found |= gathered
            missing = [key for key in missing if key not in gathered]
        # One by one, which says which is lost.
        return found | {k: self._need(k, timeout_s, unwanted) for k in missing}

    def _gathered(
        self, keys: Sequence[Any], timeout_s: float, unwanted: Callable[[], bool]
    ) -> dict[Any, Any]:
        """Those of many small results that their workers hand over in one request."""
        loop = self._client.loop.asyncio_loop
        coming = asyncio.run_coroutine_threadsafe(_gather(self._client, keys), loop)
        deadline = time.monotonic() + timeout_s
        while not concurrent.futures.wait([coming], LOOK_S).done:
            if time.monotonic() >= deadline or unwanted():
                coming.cancel()
                return {}
        return {} if isinstance(coming.exception(), OSError) else coming.result()

    def _need(self, key: Any, timeout_s: float, unwanted: Callable[[], bool]) -> Any:
        """A result that a part begins with; to send the part again is of no use."""
        try:
            return self.fetch(key, timeout_s, unwanted)
        except LostPieceError as error:
            if unwanted():
                raise
            raise DataError(
                f"{key} was lost with the worker that held it, and Dask cannot compute "
                "it again; persist() what comes from tasks, or scatter with "
                "broadcast=True"
            ) from error

    def fetch(self, key: Any, timeout_s: float, unwanted: Callable[[], bool]) -> Any:
        """Get one result from this worker's store, else from another's; see `rows`."""
        held = self.here(key)
        if held is not None:
            return held
        moved = self._client.submit(
            _itself,
            Future(key, self._client),
            key=new_key("moved"),
            workers=[self._worker.address],
        )
        try:
            self._wait(moved, key, timeout_s, unwanted)
            # It is here: a client would fetch it through a connection to this worker.
            held = self._worker.data.get(moved.key)
            return moved.result() if held is None else held
        except FutureCancelledError as error:
            raise LostPieceError(
                f"{key} was lost with the worker that held it"
            ) from error
        finally:
            moved.release()

    def _wait(
        self, moved: Any, key: Any, timeout_s: float, unwanted: Callable[[], bool]
    ) -> None:
        ended = threading.Event()
        moved.add_done_callback(lambda _: ended.set())
        deadline = time.monotonic() + timeout_s
        while not ended.wait(LOOK_S):
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{key} did not come to {self._worker.address} within "
                    f"{timeout_s:g} s (daskdl.timeouts.data); {self._where(key)}"
                )
            if unwanted():
                raise LostPieceError(f"{key} is not wanted any more")

    def _where(self, key: Any) -> str:
        """What the scheduler says of a result that does not come."""
        client = self._client
        try:
            answers = client.sync(_ask_where, client, key, callback_timeout=ASK_S)
        except (OSError, TimeoutError):
            return f"the scheduler did not say within {ASK_S:g} s where it is"
        holders, computing = answers
        if holders:
            return f"it is held by {', '.join(holders)} and was not moved in time"
        if computing:
            return f"it is being computed on {', '.join(computing)}"
        return "nobody has it; it waits for Dask to compute what it is made of"


async def _gather(client: Client, keys: Sequence[Any]) -> dict[Any, Any]:
    held = await client.scheduler.who_has(keys=keys)
    found, *_ = await gather_from_workers(held, rpc=client.rpc)
    return dict(found)


async def _ask_where(client: Any, key: Any) -> tuple[list[str], list[str]]:
    held = await client.scheduler.who_has(keys=[key])
    processing = await client.scheduler.processing(workers=None)
    computing = [worker for worker, keys in processing.items() if key in keys]
    return list(held.get(key, ())), computing


def _itself(rows: Any) -> Any:
    return rows
