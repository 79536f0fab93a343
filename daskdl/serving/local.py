"""Replicas that are threads of this process."""

import torch
from typing_extensions import override

from daskdl.data.batching import Transform, Tree
from daskdl.serialization import Packed, PackedModel
from daskdl.serving.answers import Failure, Outputs
from daskdl.serving.replica import Ground, Replica
from daskdl.serving.resident import Resident

PLACE = "this process"


class LocalReplica(Replica):
    """A model in this process.

    Args:
        resident: It.
    """

    place = PLACE

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    @override
    async def stage(self, version: int, model: PackedModel) -> Failure | None:
        return await self._resident.stage(version, model)

    @override
    async def use(self, version: int) -> None:
        self._resident.use(version)

    @override
    async def discard(self) -> None:
        self._resident.discard()

    @override
    async def ask(self, x: Tree) -> Outputs | Failure:
        return await self._resident.outputs(x)

    @override
    async def hear(self) -> None:
        """It is here."""

    @override
    async def close(self, wait: bool) -> None:
        self._resident.close()
        if wait:
            await self._resident.gone()


class LocalGround(Ground):
    """This process.

    Args:
        transform: See `Resident`.
    """

    def __init__(self, transform: Packed[Transform] | None) -> None:
        self._transform = transform
        self._threads = torch.get_num_threads()

    @override
    async def places(self) -> list[str]:
        return [PLACE]

    @override
    async def open(self, place: str, number: int, sharing: int) -> Replica:
        threads = max(1, self._threads // sharing)
        return LocalReplica(Resident(self._transform, threads))
