"""What a replica lets the others fetch, on its worker's event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from daskdl.channel.parcel import Arrays, Parcel
from daskdl.channel.payloads import wrap


class Shelf:
    """Parcels by name. Whoever comes before one is there waits for it.

    Args:
        loop: Of the worker.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parcels: dict[str, asyncio.Future[Parcel]] = {}
        self._sent_bytes = 0

    # ---- event loop

    async def answer(self, name: str, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of a parcel, as it is sent.

        Args:
            name: Of the parcel.
            part: Counted from 0.
            timeout_s: How long to wait for it, seconds.

        Raises:
            TimeoutError: If it did not come.
        """
        parcel = await asyncio.wait_for(asyncio.shield(self._named(name)), timeout_s)
        content = parcel.part(part)
        self._sent_bytes += content.nbytes
        return {
            "forms": parcel.forms if part == 0 else [],
            "parts": parcel.parts,
            "bytes": wrap(content),
        }

    def _named(self, name: str) -> asyncio.Future[Parcel]:
        if name not in self._parcels:
            self._parcels[name] = self._loop.create_future()
        return self._parcels[name]

    def _put(self, name: str, parcel: Parcel) -> None:
        future = self._named(name)
        if not future.done():
            future.set_result(parcel)

    def _clear(self, but: str) -> None:
        # Who waits for what is not there yet goes on waiting.
        for name, future in list(self._parcels.items()):
            if future.done() and name != but:
                del self._parcels[name]

    # ---- training thread

    def put(self, name: str, parcel: Parcel) -> None:
        """Let others fetch it; a second one of the same name changes nothing."""
        self._loop.call_soon_threadsafe(self._put, name, parcel)

    def count_off(self) -> int:
        """Bytes that others have fetched since the last call."""
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return sent_bytes

    def clear(self, but: str) -> None:
        """Keep nothing of what is there, but what has this name."""
        self._loop.call_soon_threadsafe(self._clear, but)


class Newest:
    """The newest state of a replica that all agreed on, for the client.

    Nothing is made of it before the first part is asked for. What the parts are cut
    from stays until the last of them has gone: that is one copy at most.

    Args:
        loop: Of the worker.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoch = -1
        self._make: Callable[[], Arrays] | None = None
        self._came = asyncio.Condition()
        self._cut: tuple[int, Parcel] | None = None  # with its epoch

    # ---- event loop

    async def answer(self, epoch: int, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of it, as it is sent.

        Args:
            epoch: At the end of which it was agreed on; for the first part, that one
                or a later one.
            part: Counted from 0.
            timeout_s: How long to wait for the first part, seconds.

        Raises:
            TimeoutError: If it did not come.
            ValueError: If this is not what is being fetched.
        """
        if part == 0:
            epoch, make = await asyncio.wait_for(self._there(epoch), timeout_s)
            self._cut = epoch, Parcel(await asyncio.to_thread(make))
        if self._cut is None or self._cut[0] != epoch:
            raise ValueError(f"epoch {epoch} is not being fetched")
        parcel = self._cut[1]
        content = parcel.part(part)
        if part == parcel.parts - 1:
            self._cut = None
        return {
            "epoch": epoch,
            "forms": parcel.forms if part == 0 else [],
            "parts": parcel.parts,
            "bytes": wrap(content),
        }

    async def _there(self, epoch: int) -> tuple[int, Callable[[], Arrays]]:
        async with self._came:
            while self._make is None or self._epoch < epoch:
                await self._came.wait()
            return self._epoch, self._make

    async def _keep(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        async with self._came:
            self._epoch, self._make = epoch, make
            self._came.notify_all()

    # ---- training thread

    def keep(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        """Let the client fetch this, and what was before only if it is under way.

        Args:
            epoch: That has ended.
            make: Makes it; None: not yet.
        """
        asyncio.run_coroutine_threadsafe(self._keep(epoch, make), self._loop)
