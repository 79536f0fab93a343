"""As many replicas as were asked for, all with one model. No Dask.

A replica that is lost is let go of, and another one is started where there is room. No
place has more than its share, which is set at the start: when a worker dies its place
stays free until one comes, so that the others are not made slower for good.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable

from daskdl.config import Timeouts
from daskdl.errors import OptionError
from daskdl.serialization import PackedModel
from daskdl.serving.current_model import CurrentModel
from daskdl.serving.replica import Ground, Replica, within

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between looks at who is there: one small request of the scheduler


class Crew:
    """The replicas of a predictor. All its methods are called on one event loop.

    Args:
        ground: Where they can be.
        model: They answer by at first.
        wanted: How many there should be, >= 1.
        timeouts: Of the waits.

    Attributes:
        ready: Those that can be asked. Changed in place.
        lost: Called with each that is lost.
        changed: Called when one has become ready.
        ended: Called with an error if there will never be one again.
    """

    ready: list[Replica]
    lost: Callable[[Replica], None]
    changed: Callable[[], None]
    ended: Callable[[BaseException], None]

    def __init__(
        self, ground: Ground, model: PackedModel, wanted: int, timeouts: Timeouts
    ) -> None:
        self.ready = []
        self._ground = ground
        self._wanted = wanted
        self._timeouts = timeouts
        self._sharing = wanted  # replicas of one place at most; known when it opens
        self._current = CurrentModel(model, timeouts)
        self._numbers = itertools.count()
        self._starting: dict[asyncio.Task[None], str] = {}  # and the place
        self._opening: set[asyncio.Task[Replica]] = set()
        self._parting: set[asyncio.Task[None]] = set()
        self._failed: Counter[str] = Counter()  # starts and replicas, by place
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all of them.

        Raises:
            OptionError: If there is no place.
            ModelError: If the model cannot be used there.
            OSError: If one of them cannot be started.
        """
        places = await self._ground.places()
        if not places:
            raise OptionError(
                "the cluster has no workers; wait for some with "
                "client.wait_for_workers(1)"
            )
        self._sharing = math.ceil(self._wanted / len(places))
        chosen = itertools.islice(itertools.cycle(places), self._wanted)
        starts = [self._start(place) for place in chosen]
        for done in await asyncio.gather(*starts, return_exceptions=True):
            if done is not None:
                raise done
        self._heard_at = asyncio.get_running_loop().time()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    async def close(self, wait: bool) -> None:
        """Leave no replica anywhere.

        Args:
            wait: For what they compute, so that no model is in memory afterwards.
        """
        tasks = [*self._starting, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opening:
            await asyncio.wait(self._opening, timeout=self._timeouts.stop)
        for replica in list(self.ready):
            self._part(replica, wait)
        self.ready.clear()
        await asyncio.gather(*self._parting)

    def lose(self, replica: Replica, why: object) -> None:
        """One cannot be asked any more."""
        if replica not in self.ready:
            return
        logger.warning("a replica on %s is lost: %s", replica.place, why)
        self.ready.remove(replica)
        self._failed[replica.place] += 1
        self._part(replica)
        self.lost(replica)

    async def swap(self, model: PackedModel) -> None:
        """Answer by another model: what is asked from now on, by all of them.

        Raises:
            ModelError: If it cannot be used somewhere; then the former one stays.
        """
        await self._current.swap(model, self.ready, self.lose)

    # ---- who is there

    async def _start(self, place: str) -> None:
        replica = await self._opened(place)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self._part, replica)
            await self._current.bring(replica)
            unless_ready.pop_all()
        self.ready.append(replica)
        self.changed()

    async def _opened(self, place: str) -> Replica:
        opening = asyncio.create_task(
            self._ground.open(place, next(self._numbers), self._sharing)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        bound, what = self._timeouts.bound("join"), f"no replica was made on {place}"
        with contextlib.ExitStack() as unless_there:
            # It may be made all the same, and nobody would take it from there.
            unless_there.callback(opening.add_done_callback, self._abandon)
            replica = await within(asyncio.shield(opening), bound, what)
            unless_there.pop_all()
        return replica

    def _abandon(self, opening: asyncio.Task[Replica]) -> None:
        """One was made that nobody waits for any more."""
        if not opening.cancelled() and opening.exception() is None:
            self._part(opening.result())

    def _part(self, replica: Replica, wait: bool = True) -> None:
        """Tell a replica to go, if it still hears that."""

        async def part() -> None:
            bound = self._timeouts.bound("stop")
            try:
                await within(replica.close(wait), bound, "it did not answer")
            except OSError as error:
                logger.info("a replica on %s was not closed: %s", replica.place, error)

        task = asyncio.create_task(part())
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:
                logger.info("it is not known which workers are there: %s", error)
            await asyncio.sleep(LOOK_S)

    def _watched(self, task: asyncio.Task[None]) -> None:
        """Nobody looks after them any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ended(error)

    async def look(self) -> None:
        """See who is there, and start those who are missing.

        Raises:
            OSError: If that cannot be known.
            ChannelError: If nobody will be there any more.
        """
        bound = self._timeouts.bound("request")
        places = await within(
            self._ground.places(), bound, "no answer of the scheduler"
        )
        for replica in list(self.ready):
            if replica.place not in places:
                self.lose(replica, "its worker is gone")
        for place in self._free(places):
            task = asyncio.create_task(self._start(place))
            self._starting[task] = place
            task.add_done_callback(self._started)
        self._hear()

    def _free(self, places: list[str]) -> list[str]:
        """Where those who are missing are to be started."""
        used = Counter([r.place for r in self.ready] + list(self._starting.values()))
        chosen: list[str] = []
        while used.total() < self._wanted:
            room = [place for place in places if used[place] < self._sharing]
            if not room:
                break
            place = min(room, key=lambda place: (used[place], self._failed[place]))
            used[place] += 1
            chosen.append(place)
        return chosen

    def _started(self, task: asyncio.Task[None]) -> None:
        place = self._starting.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed[place] += 1
            logger.warning("no replica could be started on %s: %s", place, error)

    def _hear(self) -> None:
        """Let all know that somebody is there who may ask them."""
        now = asyncio.get_running_loop().time()
        if now - self._heard_at < self._timeouts.silence / 4:
            return
        self._heard_at = now
        for replica in self.ready:
            task = asyncio.create_task(self._listen(replica))
            self._parting.add(task)
            task.add_done_callback(self._parting.discard)

    async def _listen(self, replica: Replica) -> None:
        bound = self._timeouts.bound("request")
        try:
            await within(replica.hear(), bound, "it did not answer")
        except OSError as error:
            self.lose(replica, error)
