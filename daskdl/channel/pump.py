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
from daskdl.timeouts import Bound

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
        bound: How long one request may take.
        destination: For messages, for example ``"the scheduler"``.
    """

    def __init__(
        self,
        outbox: Outbox,
        send: Send,
        *,
        pace_s: float,
        beat_s: float,
        bound: Bound,
        destination: str,
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._pace_s = pace_s
        self._beat_s = beat_s
        self._bound = bound
        self._destination = destination
        self._more = asyncio.Event()
        self._heard_at: float | None = None  # of the last answer, the loop's clock

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
                # Not `wait_for`: of what is woken and cancelled at once, before
                # Python 3.12 it forgets that it was cancelled.
                async with asyncio.timeout(self._beat_s):
                    await self._more.wait()
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
                async with asyncio.timeout(self._bound.seconds):
                    accepted = await self._send(batch)
            except TimeoutError:
                if attempt == ATTEMPTS:
                    raise self._unanswered(len(batch)) from None
            except OSError:
                if attempt == ATTEMPTS:
                    raise
            else:
                self._heard_at = asyncio.get_running_loop().time()
                return accepted
        raise AssertionError("every attempt returns or raises")

    def _unanswered(self, items: int) -> WaitTimeoutError:
        now = asyncio.get_running_loop().time()
        last = (
            "it never answered before"
            if self._heard_at is None
            else f"its last answer was {now - self._heard_at:.1f} s ago"
        )
        return WaitTimeoutError(
            f"{self._destination} did not answer within {self._bound}, {ATTEMPTS} "
            f"times, to {items} items ({self._outbox.nbytes} bytes waiting); {last}"
        )
