"""From the bytes of a frame to an update that may be applied, or a refusal."""

import asyncio
import logging
from typing import Any

from daskdl import codec
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Item
from daskdl.channel.payloads import unwrap
from daskdl.compression.replica_vector import count_of
from daskdl.errors import CodecError

logger = logging.getLogger(__name__)

INLINE_BYTES = 2**20  # larger frames are decoded beside the event loop

# What foreign bytes may raise.
UNREADABLE = (CodecError, TypeError, ValueError, LookupError)


class SharedFrame:
    """A frame that came for several replicas of a run: decoded once.

    Args:
        payload: As it came.
    """

    def __init__(self, payload: Any) -> None:
        self._payload = payload
        self._update: codec.Update | None = None

    @property
    def frame(self) -> Any:
        """Its bytes, as the sender had them."""
        return unwrap(self._payload)

    def decode(self, run: int, size: int) -> codec.Update:
        """The update, which nobody changes; see :func:`daskdl.codec.decode`."""
        if self._update is None:
            self._update = codec.decode(self.frame, run=run, size=size)
        return self._update


class Reader:
    """Decodes what arrives for one replica.

    Args:
        endpoint: Which replica it is.
        inbox: Knows the grid of the run, and counts what is refused.
    """

    def __init__(self, endpoint: Endpoint, inbox: Inbox) -> None:
        self._endpoint = endpoint
        self._inbox = inbox

    async def read(self, item: Item) -> codec.Update:
        """Decode an update.

        Raises:
            CodecError, TypeError, ValueError, LookupError: If it cannot be read.
        """
        payload = item.payload
        shared = payload if isinstance(payload, SharedFrame) else SharedFrame(payload)
        if memoryview(shared.frame).nbytes > INLINE_BYTES:
            return await asyncio.to_thread(self.read_now, item, shared)
        return self.read_now(item, shared)

    def read_now(self, item: Item, shared: SharedFrame) -> codec.Update:
        """The same, here and now."""
        update = shared.decode(self._endpoint.run, self._endpoint.size)
        if update.stamp[1:3] != (item.origin, item.sequence):
            raise CodecError(f"sent as {item[1:3]}, stamped {update.stamp[1:3]}")
        if isinstance(update, codec.SparseUpdate):
            count_of(update.threshold, self._inbox.grid)
        elif update.grid != self._inbox.grid:
            raise CodecError(f"grid must be {self._inbox.grid}, got {update.grid}")
        return update

    def refuse(self, item: Item, error: Exception) -> None:
        """Count and log an update that could not be read; it is dropped."""
        self._inbox.refuse()
        logger.warning(
            "replica %s refused update %s of replica %s: %s",
            self._endpoint.replica,
            item.sequence,
            item.origin,
            error,
        )
