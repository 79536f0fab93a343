"""A replica's end on a worker: a handler for requests, and nothing else of Dask's.

No plugin: the client says which workers are to have a replica, so that no other one
needs anything. It is put there by :func:`open_end`, and goes when the client says so,
when the worker closes, or when the client has been silent for too long, as one that
was killed is.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from distributed import Worker

from daskdl.channel.protocol import (
    Answer,
    Fields,
    GoneError,
    Guard,
    Natural,
    unwrap,
    wrap,
)
from daskdl.data import batching
from daskdl.data.batching import Transform
from daskdl.serialization import Packed, PackedModel
from daskdl.serving.answers import Failure
from daskdl.serving.resident import Resident
from daskdl.serving.structures import structure_of, tree_of

logger = logging.getLogger(__name__)

FAILED = "failed"  # the status where the model, or a transform, raised


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

    Attributes:
        refused: Requests that were not understood.
    """

    refused: int

    def __init__(
        self, worker: Worker, name: str, resident: Resident, silence_s: float
    ) -> None:
        self._worker = worker
        self._name = name
        self._resident = resident
        self._silence_s = silence_s
        self.refused = 0
        self._asked = 0  # requests that have no answer yet
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        guard = Guard(self._count)
        self._other = guard.of(self._refuse)
        self._calls = {
            "ask": guard.of(self._ask),
            "stage": guard.of(self._stage),
            "use": guard.of(self._use),
            "discard": guard.of(self._discard),
            "hear": guard.of(self._hear),
            "close": guard.of(self._close),
        }
        worker.handlers[name] = self.handle
        worker.extensions[name] = self
        self._timer = self._loop.call_later(silence_s, self._look)

    # ---- event loop

    async def handle(self, /, call: Any = None, **fields: Any) -> dict[str, Any]:
        """Its client asks for something; anybody else is refused."""
        known = isinstance(call, str) and call in self._calls
        answering = self._calls[call] if known else self._other
        self._asked += 1
        try:
            answer = {"status": Answer.OK.value, **await answering(**fields)}
        finally:
            self._asked -= 1
        if answer["status"] != Answer.REFUSED:
            self._heard = self._loop.time()
        return answer

    async def _ask(self, structure: bytes, leaves: Sequence[Any]) -> dict[str, Any]:
        self._check_open()
        x = tree_of(structure, [unwrap(leaf) for leaf in leaves])
        outputs = await self._resident.outputs(x)
        if isinstance(outputs, Failure):
            return _failed(outputs)
        return {
            "structure": structure_of(outputs.tree),
            "leaves": [wrap(leaf) for leaf in batching.leaves(outputs.tree)],
            "dtypes": list(outputs.dtypes),
        }

    async def _stage(self, version: Natural, payload: Any) -> dict[str, Any]:
        self._check_open()
        packed = PackedModel.of(np.asarray(unwrap(payload)), "model")
        failure = await self._resident.stage(version, packed)
        return {} if failure is None else _failed(failure)

    async def _use(self, version: Natural) -> dict[str, Any]:
        self._resident.use(version)
        return {}

    async def _discard(self) -> dict[str, Any]:
        self._resident.discard()
        return {}

    async def _hear(self) -> dict[str, Any]:
        return {}

    async def _close(self, wait: bool) -> dict[str, Any]:
        self._remove()
        if wait:
            await self._resident.gone()
        return {}

    async def _refuse(self) -> dict[str, Any]:
        raise ValueError(f"call must be one of {', '.join(self._calls)}")

    def _check_open(self) -> None:
        if self._resident.closed:
            raise GoneError("the replica is closed")

    def _count(self, fields: Fields) -> None:
        self.refused += 1

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
        "status": FAILED,
        "summary": failure.summary,
        "details": failure.details,
    }
