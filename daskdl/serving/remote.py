"""Replicas on workers, as the client sees them.

Requests go to a handler of the worker's, by Dask's own connections: one small request
there and back took 1.0 ms through the scheduler and 0.6 ms to the worker directly,
where a submitted task with its result took 12 ms and a method of an actor 2.1 ms, on
two loaded cores. (An actor keeps its worker from being retired, too.) They go through
the scheduler, which every client reaches; `Client(direct_to_workers=True)` says that
this one reaches the workers, which pays for large rows: it is Dask's own setting.
"""

import uuid
from typing import Any

from distributed import Client
from typing_extensions import override

from daskdl.channel.protocol import Answer, unwrap, wrap
from daskdl.data import batching
from daskdl.data.batching import Transform, Tree
from daskdl.errors import ChannelError
from daskdl.serialization import Packed, PackedModel
from daskdl.serving.answers import Failure, Outputs
from daskdl.serving.replica import Ground, Replica
from daskdl.serving.structures import structure_of, tree_of
from daskdl.serving.worker import FAILED, open_end


class RemoteReplica(Replica):
    """A model on a worker.

    Args:
        client: Of the cluster.
        place: The worker's address.
        name: Of its requests.
    """

    def __init__(self, client: Client, place: str, name: str) -> None:
        self.place = place
        self._client = client
        self._name = name

    @override
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        payload = wrap(model.payload)
        answer = await self._request("stage", version=version, payload=payload)
        return _failure(answer)

    @override
    async def use(self, version: int) -> None:
        answer = await self._request("use", version=version)
        if answer["status"] == Answer.REFUSED:
            raise ConnectionError(answer["reason"])

    @override
    async def discard(self) -> None:
        await self._request("discard")

    @override
    async def ask(self, x: Tree) -> Outputs | Failure:
        leaves = [wrap(leaf) for leaf in batching.leaves(x)]
        answer = await self._request("ask", structure=structure_of(x), leaves=leaves)
        failure = _failure(answer)
        if failure is not None:
            return failure
        outputs = [unwrap(leaf) for leaf in answer["leaves"]]
        tree = tree_of(bytes(answer["structure"]), outputs)
        return Outputs(tree, tuple(answer["dtypes"]))

    @override
    async def hear(self) -> None:
        await self._request("hear")

    @override
    async def close(self, wait: bool) -> None:
        await self._request("close", wait=wait)

    async def _request(self, call: str, **fields: Any) -> dict[str, Any]:
        if self._client.status in ("closing", "closed"):
            raise ConnectionError("the client is closed")
        if self._client.direct_to_workers:
            ask = getattr(self._client.rpc(self.place), self._name)
            answer = await ask(call=call, **fields)
        else:
            message = {"op": self._name, "call": call, **fields}
            answer = await self._client.scheduler.proxy(worker=self.place, msg=message)
        if not isinstance(answer, dict):  # Dask's answer where there is no handler
            raise ConnectionError(f"worker {self.place} has the replica no longer")
        if answer["status"] == Answer.UNKNOWN:
            raise ConnectionError(f"worker {self.place}: {answer['reason']}")
        return answer


class RemoteGround(Ground):
    """The workers of a cluster.

    Args:
        client: Synchronous; used on its event loop only.
        transform: See `Resident`.
        silence_s: After so long without a word of the client replicas go.
    """

    def __init__(
        self, client: Client, transform: Packed[Transform] | None, silence_s: float
    ) -> None:
        self._client = client
        self._transform = transform
        self._silence_s = silence_s
        self._name = f"daskdl-predictor-{uuid.uuid4().hex}"

    @override
    async def places(self) -> list[str]:
        if self._client.status in ("closing", "closed"):
            raise ChannelError("the client is closed, and no worker can be reached")
        return sorted(await self._client.scheduler.ncores())

    @override
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        name = f"{self._name}-{number}"
        terms = (name, self._transform, sharing, self._silence_s)
        await self._client.run(open_end, *terms, workers=[place])
        return RemoteReplica(self._client, place, name)


def _failure(answer: dict[str, Any]) -> Failure | None:
    if answer["status"] == Answer.REFUSED:
        return Failure(answer["reason"], "before it came to the model")
    if answer["status"] != FAILED:
        return None
    return Failure(answer["summary"], answer["details"])
