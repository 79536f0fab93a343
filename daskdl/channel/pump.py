"""The paced sender: one request in flight for each destination.

A request that is answered before the next one goes is back-pressure,
coalescing, a bound and a visible error in one. Streams have none of these.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from daskdl.channel.messages import Item
from daskdl.channel.outbox import Outbox
from daskdl.errors import WaitTimeoutError

BATCH_BYTES = 4 * 2**20  # below Dask's 10 MiB offload to its one helper thread
ATTEMPTS = 2  # a lost answer is asked for once more: receivers know duplicates

BACK_OFF = 16  # most times the pace between two requests to a full destination

Send = Callable[[Sequence[Item]], Awaitable[int]]


class Pump:
    """Carry one outbox to its destination, in order, until cancelled.

    Args:
        outbox: What to carry.
        send: Sends a batch and returns how many of its items were accepted.
            Called with an empty batch as a sign of life.
        pace_s: Least time between two requests, seconds.
        beat_s: Most time between two requests, seconds.
        timeout_s: How long one request may take, seconds.
        destination: For messages, for example ``"the scheduler"``.
    """

    def __init__(
        self,
        outbox: Outbox,
        send: Send,
        *,
        pace_s: float,
        beat_s: float,
        timeout_s: float,
        destination: str,
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._pace_s = pace_s
        self._beat_s = beat_s
        self._timeout_s = timeout_s
        self._destination = destination
        self._more = asyncio.Event()

    def wake(self) -> None:
        """There is something to send. Call from the event loop."""
        self._more.set()

    async def run(self) -> None:
        """Carry items until cancelled.

        Raises:
            WaitTimeoutError: If a request was not answered in time, twice.
            OSError: If the destination cannot be reached, twice.
        """
        pause_s = self._pace_s
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), self._beat_s)
            self._more.clear()
            batch = self._outbox.head(BATCH_BYTES)
            accepted = await self._send_surely(batch)
            self._outbox.drop(accepted)
            if len(self._outbox):
                self._more.set()
            # All that was refused goes again, so ask less often while it is.
            full = batch and not accepted
            longest_s = BACK_OFF * self._pace_s
            pause_s = min(2 * pause_s, longest_s) if full else self._pace_s
            await asyncio.sleep(pause_s)

    async def _send_surely(self, batch: Sequence[Item]) -> int:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await asyncio.wait_for(self._send(batch), self._timeout_s)
            except TimeoutError:
                if attempt == ATTEMPTS:
                    raise WaitTimeoutError(
                        f"{self._destination} did not answer within "
                        f"{self._timeout_s:g} s, {ATTEMPTS} times, to "
                        f"{len(batch)} items ({self._outbox.nbytes} bytes waiting)"
                    ) from None
            except OSError:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("every attempt returns or raises")
