"""The model that all replicas of a predictor have, and how they get another one."""

import asyncio
from collections.abc import Awaitable, Callable

from daskdl.config import Timeouts
from daskdl.errors import ModelError
from daskdl.serialization import PackedModel
from daskdl.serving.replica import Replica, within

Lose = Callable[[Replica, object], None]


class CurrentModel:
    """What replicas answer by, with a version that grows with each swap.

    Args:
        model: The first.
        timeouts: Of the waits.
    """

    def __init__(self, model: PackedModel, timeouts: Timeouts) -> None:
        self._version, self._model = 1, model
        self._timeouts = timeouts
        self._swapping = asyncio.Lock()

    async def bring(self, replica: Replica) -> None:
        """Let a replica answer by the model of now, whatever it had.

        Raises:
            ModelError: If it cannot be used there.
            OSError: If the replica is lost.
        """
        while replica.version != self._version:  # it may be swapped meanwhile
            version = self._version
            if replica.staged != version:
                await self._stage(replica, version, self._model)
            bound = self._timeouts.bound("request")
            what = f"the replica on {replica.place} did not take the model"
            await within(replica.use(version), bound, what)
            replica.version = version

    async def swap(self, model: PackedModel, ready: list[Replica], lose: Lose) -> None:
        """Give all replicas another model; one swap after the other.

        It is sent to all before the first of them answers by it.

        Args:
            model: The next.
            ready: The replicas; may change meanwhile.
            lose: Called with each that cannot be reached, and why.

        Raises:
            ModelError: If it cannot be used somewhere; then the former one stays.
        """
        async with self._swapping:
            version = self._version + 1

            async def stage(replica: Replica) -> None:
                await self._stage(replica, version, model)

            refusals = await _refusals(ready, stage, lose)
            if refusals:
                await _refusals(ready, self._discard, lose)
                raise refusals[0]
            self._version, self._model = version, model
            while behind := [r for r in ready if r.version != version]:
                await _refusals(behind, self._bring_newcomer, lose)

    async def _bring_newcomer(self, replica: Replica) -> None:
        """One that came meanwhile has not been sent it yet."""
        try:
            await self.bring(replica)
        except ModelError as error:
            raise ConnectionError(f"it cannot use the model: {error}") from error

    async def _discard(self, replica: Replica) -> None:
        bound = self._timeouts.bound("request")
        what = f"the replica on {replica.place} did not answer"
        await within(replica.discard(), bound, what)

    async def _stage(self, replica: Replica, version: int, model: PackedModel) -> None:
        what = f"the model ({model.payload.nbytes} bytes) was not on {replica.place}"
        bound = self._timeouts.bound("data")
        failure = await within(replica.stage(version, model), bound, what)
        if failure is not None:
            raise failure.error(f"the model cannot be used on {replica.place}")
        replica.staged = version


async def _refusals(
    replicas: list[Replica], do: Callable[[Replica], Awaitable[None]], lose: Lose
) -> list[ModelError]:
    """Do something with each replica, which may be lost by it, or refuse."""
    asked = list(replicas)
    done = await asyncio.gather(*(do(r) for r in asked), return_exceptions=True)
    refusals = []
    for replica, error in zip(asked, done, strict=True):
        if isinstance(error, ModelError):
            refusals.append(error)
        elif isinstance(error, OSError):
            lose(replica, error)
        elif error is not None:
            raise error
    return refusals
