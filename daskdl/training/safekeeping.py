"""What the client keeps of a run, should all that train be lost.

At the end of each epoch all replicas have the same state. The client has the newest
one brought, in the background: one at a time, through the scheduler, a part at a time.
Epochs that end meanwhile are left out, so that nothing queues and nobody waits.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from distributed import Client

from daskdl.channel.protocol import Answer, Arrays, join, unwrap
from daskdl.packed import Packed
from daskdl.timeouts import Bound
from daskdl.training.parameters import Parameters

logger = logging.getLogger(__name__)

SHARED, REST = ".shared", ".rest"  # no tensor of a module has such a name
REST_TIMES = 4.0  # as long as the last one took: most of the network is for updates


class Kept(NamedTuple):
    """A state on which all replicas agreed."""

    epoch: int  # at the end of which, counted from 0
    arrays: Arrays

    @property
    def parameters(self) -> Parameters:
        """As the replicas had them."""
        pack: Packed[Parameters] = Packed.of(np.asarray(self.arrays[REST]), "model_")
        parameters = pack.unpack()
        if SHARED in self.arrays:
            return replace(parameters, shared_N=self.arrays[SHARED])
        exact = dict(parameters.exact or {})
        for name, like in exact.items():
            if name in self.arrays:
                flat = torch.from_numpy(self.arrays[name].copy())
                exact[name] = flat.view(like.dtype).reshape(like.shape)
        return replace(parameters, exact=exact)


def arrays_of(parameters: Parameters) -> Arrays:
    """What a replica lets the client fetch; what is large is not copied."""
    if parameters.shared_N is not None:
        rest = replace(parameters, shared_N=None)
        return {REST: Packed(rest, "model_").payload, SHARED: parameters.shared_N}
    exact = dict(parameters.exact or {})
    arrays = {}
    for name, tensor in exact.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if dense and tensor.numel():
            arrays[name] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            exact[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
    rest = replace(parameters, exact=exact)
    return {**arrays, REST: Packed(rest, "model_").payload}


class Safekeeping:
    """Brings agreed states to the client, on its event loop.

    Args:
        client: Of the cluster.
        run: Identity of the run.
        bound: For each request.

    Attributes:
        kept: The newest that is here as a whole, or None.
    """

    kept: Kept | None

    def __init__(self, client: Client, run: int, bound: Bound) -> None:
        self.kept = None
        self._client = client
        self._run = run
        self._bound = bound
        self._wanted = -1  # epoch that has ended last
        self._bringing: asyncio.Task[None] | None = None
        self._closed = False

    # ---- the client's thread

    def note(self, epoch: int) -> None:
        """An epoch has ended: have its state brought, or that of a later one."""
        self._client.loop.add_callback(self._begin, epoch)

    def close(self) -> None:
        """Bring nothing more; what is here stays."""
        self._client.loop.add_callback(self._end)

    # ---- event loop

    def _begin(self, epoch: int) -> None:
        self._wanted = epoch
        idle = self._bringing is None or self._bringing.done()
        if idle and not self._closed:
            self._bringing = asyncio.ensure_future(self._bring())

    def _end(self) -> None:
        self._closed = True
        if self._bringing is not None:
            self._bringing.cancel()

    async def _bring(self) -> None:
        now = asyncio.get_running_loop().time
        while self.kept is None or self.kept.epoch < self._wanted:
            began_at = now()
            try:
                kept = await self._newest()
            except OSError as error:  # the client's own requests say more
                logger.info("the agreed state was not brought: %s", error)
                return
            if kept is None:
                return
            self.kept = kept
            await asyncio.sleep(REST_TIMES * (now() - began_at))

    async def _newest(self) -> Kept | None:
        """Ask one replica after the other; None: no replica has it as a whole."""
        avoid: list[int] = []
        while True:
            first = await self._ask(self._wanted, 0, avoid)
            if first.get("replica") is None:
                return None
            kept = await self._whole(first)
            if kept is not None:
                return kept
            avoid.append(first["replica"])

    async def _whole(self, first: dict[str, Any]) -> Kept | None:
        if first["status"] != Answer.OK:
            return None
        epoch, replica, parts = first["epoch"], first["replica"], [first["bytes"]]
        while len(parts) < first["parts"]:
            answer = await self._ask(epoch, len(parts), (), replica)
            if answer["status"] != Answer.OK:
                return None
            parts.append(answer["bytes"])
        arrays = [np.frombuffer(unwrap(part), np.uint8) for part in parts]
        return Kept(epoch, join(first["forms"], arrays))

    async def _ask(
        self, epoch: int, part: int, avoid: Any, replica: int | None = None
    ) -> dict[str, Any]:
        asking: Awaitable[Any] = self._client.scheduler.daskdl_agreed(
            run=self._run, epoch=epoch, part=part, avoid=list(avoid), replica=replica
        )
        answer = await asyncio.wait_for(asking, self._bound.seconds)
        assert isinstance(answer, dict)
        return answer
