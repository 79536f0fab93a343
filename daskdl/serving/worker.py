"""A replica's end on a worker: a handler for requests, and nothing else of Dask's.

No plugin: the client says which workers are to have a replica, so that no other one
needs anything. It is put there by :func:`open_end`, and goes when the client says so,
when the worker closes, or when the client has been silent for too long, as one that
was killed is.
"""

import asyncio
import logging
from typing import Any

import numpy as np
from distributed import Worker

from daskdl.channel.payloads import unwrap, wrap
from daskdl.data import trees
from daskdl.data.batches import Transform
from daskdl.packed import Packed, PackedModel
from daskdl.serving.answers import Failure
from daskdl.serving.resident import Resident
from daskdl.serving.structures import structure_of, tree_of

logger = logging.getLogger(__name__)


async def open_end(
    name: str,
    transform: Packed[Transform] | None,
    sharing: int,
    silence_s: float,
    dask_worker: Worker,
) -> None:
    """Make a replica without a model; what Dask's `run` calls on a worker.

    Args:
        name: Of its requests.
        transform: See `Resident`.
        sharing: Replicas that a worker has at most.
        silence_s: After so long without a word of its client it goes.
        dask_worker: Given by Dask.
    """
    threads = max(1, dask_worker.state.nthreads // sharing)
    ReplicaEnd(dask_worker, name, Resident(transform, threads), silence_s)


class ReplicaEnd:
    """Answers the requests of a predictor on a worker.

    Args:
        worker: Whose handlers and extensions it is among, from now on.
        name: There.
        resident: Who answers.
        silence_s: See `open_end`.
    """

    def __init__(
        self, worker: Worker, name: str, resident: Resident, silence_s: float
    ) -> None:
        self._worker = worker
        self._name = name
        self._resident = resident
        self._silence_s = silence_s
        self._asked = 0  # requests that have no answer yet
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        worker.handlers[name] = self.handle
        worker.extensions[name] = self
        self._timer = self._loop.call_later(silence_s, self._look)

    # ---- event loop

    async def handle(self, call: Any = None, **fields: Any) -> dict[str, Any]:
        """Its client asks for something."""
        self._heard = self._loop.time()
        self._asked += 1
        try:
            return await self._answer(call, **fields)
        finally:
            self._asked -= 1
            self._heard = self._loop.time()

    async def _answer(self, call: Any, **fields: Any) -> dict[str, Any]:
        if call == "ask":
            return await self._ask(**fields)
        if call == "stage":
            return await self._stage(**fields)
        if call == "use":
            self._resident.use(fields["version"])
        elif call == "discard":
            self._resident.discard()
        elif call == "close":
            self._remove()
            if fields["wait"]:
                await self._resident.gone()
        return {"status": "ok"}

    async def _ask(self, structure: bytes, leaves: Any) -> dict[str, Any]:
        x = tree_of(structure, [unwrap(leaf) for leaf in leaves])
        outputs = await self._resident.outputs(x)
        if isinstance(outputs, Failure):
            return _failed(outputs)
        return {
            "status": "ok",
            "structure": structure_of(outputs.tree),
            "leaves": [wrap(leaf) for leaf in trees.leaves(outputs.tree)],
            "dtypes": list(outputs.dtypes),
        }

    async def _stage(self, version: int, payload: Any) -> dict[str, Any]:
        packed = PackedModel.of(np.asarray(unwrap(payload)), "model")
        failure = await self._resident.stage(version, packed)
        return {"status": "ok"} if failure is None else _failed(failure)

    def close(self) -> None:
        """The worker closes; what Dask calls of an extension."""
        self._timer.cancel()
        self._resident.close()

    def _remove(self) -> None:
        self.close()
        self._worker.handlers.pop(self._name, None)
        self._worker.extensions.pop(self._name, None)

    def _look(self) -> None:
        """Whether its client is still there."""
        silent_s = self._loop.time() - self._heard
        if silent_s < self._silence_s or self._asked:
            rest_s = max(self._silence_s - silent_s, self._silence_s / 4)
            self._timer = self._loop.call_later(rest_s, self._look)
            return
        logger.warning("%s goes: silent for %.0f s", self._name, silent_s)
        self._remove()


def _failed(failure: Failure) -> dict[str, Any]:
    return {
        "status": "failed",
        "summary": failure.summary,
        "details": failure.details,
    }
