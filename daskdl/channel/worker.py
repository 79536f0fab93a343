"""The channel's end on a worker: a plugin that hands items to their replica."""

import asyncio
import atexit
import gc
import logging
from collections.abc import Sequence
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.answers import Guard
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.link import Link
from daskdl.channel.messages import Answer, Item, ItemKind
from daskdl.channel.payloads import fields_of
from daskdl.channel.reading import SharedFrame
from daskdl.channel.remote import RemoteChannel
from daskdl.errors import ChannelError

logger = logging.getLogger(__name__)

NAME = "daskdl-channel"
WAIT_S = 1.0  # for what is not there yet; then who wants it asks again
LEAVE_S = 2.0  # batch systems kill soon after they ask a worker to close


class ChannelWorkerPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Hand arriving items to the channels of the replicas on this worker."""

    name = NAME
    idempotent = True
    links: dict[tuple[int, int], Link]
    refused: int  # items for no replica of this worker, or not understood

    def __init__(self) -> None:
        self.links = {}
        self.refused = 0

    @override
    def setup(self, worker: Worker) -> None:
        # Dask may set a plugin up twice; live channels then go on.
        former = worker.extensions.get(NAME)
        if former is not None:
            self.links = former.links
        worker.extensions[NAME] = self
        guard = Guard()
        for operation, handler in (
            (messages.DELIVER, self.handle_deliver),
            (messages.SHARE, self.handle_share),
            (messages.SNAPSHOT, self.handle_snapshot),
            (messages.REPAIR, self.handle_repair),
            (messages.FETCH, self.handle_fetch),
            (messages.AGREED, self.handle_agreed),
        ):
            worker.handlers[operation] = guard.of(handler, self._count)
        self._worker = worker
        if worker.nanny:
            # Its process is there for it alone. To look for cycles in all that torch
            # leaves takes over a second of the four that a nanny waits for its end.
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    @override
    async def teardown(self, worker: Worker) -> None:
        """The worker closes: its replicas leave, what they had done is delivered."""
        if worker.extensions.get(NAME) is not self:
            return
        links = list(self.links.values())
        for link in links:
            link.close_soon()
        await asyncio.gather(*(link.left(LEAVE_S) for link in links))

    async def handle_deliver(
        self, run: Any = None, replica: Any = None, items: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """The relay, or another replica, has items for a replica here."""
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        try:
            unpacked = [Item.of(fields) for fields in items]
        except (TypeError, ValueError) as error:
            return _refused(link, error)
        return await _delivered(link, unpacked)

    async def handle_share(
        self, run: Any = None, items: Sequence[Any] = (), shares: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """The relay has items for several replicas here; what is for all came once."""
        unpacked = [_shareable(fields) for fields in items]
        try:
            own = {int(r): [unpacked[int(i)] for i in places] for r, places in shares}
        except (TypeError, ValueError, IndexError) as error:
            self.refused += 1
            return {"status": Answer.REFUSED.value, "reason": str(error)}
        answers = [await self._share(run, r, for_it) for r, for_it in own.items()]
        return {"status": Answer.OK.value, "answers": answers}

    async def _share(
        self, run: Any, replica: int, items: Sequence[Item | Exception]
    ) -> dict[str, Any]:
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        readable = []
        for item in items:
            if isinstance(item, Exception):
                return _refused(link, item)
            readable.append(item)
        return await _delivered(link, readable)

    async def handle_snapshot(
        self, run: Any = None, replica: Any = None, cut: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """A newcomer elsewhere wants the state of a replica here."""
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        try:
            snapshot = await link.snapshot({int(o): int(s) for o, s in cut})
        except (TypeError, ValueError) as error:
            return {"status": Answer.REFUSED.value, "reason": str(error)}
        except TimeoutError:
            return {
                "status": Answer.REFUSED.value,
                "reason": "it was not ready in time",
            }
        return {"status": Answer.OK.value, "snapshot": snapshot}

    async def handle_repair(
        self,
        run: Any = None,
        replica: Any = None,
        origin: Any = None,
        sequences: Sequence[Any] = (),
    ) -> dict[str, Any]:
        """A replica elsewhere asks one here for updates that it missed."""
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        try:
            found = link.find(int(origin), [int(s) for s in sequences])
        except (TypeError, ValueError) as error:
            return {"status": Answer.REFUSED.value, "reason": str(error)}
        return {"status": Answer.OK.value, "items": [fields_of(item) for item in found]}

    async def handle_fetch(
        self, run: Any = None, replica: Any = None, name: Any = None, part: Any = 0
    ) -> dict[str, Any]:
        """A replica elsewhere fetches what one here has on its shelf, or will have."""
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        try:
            answer = await link.shelf.answer(_name(name), int(part), WAIT_S)
        except TimeoutError:
            return {"status": Answer.REFUSED.value, "reason": "it is not there yet"}
        except (TypeError, ValueError) as error:
            return {"status": Answer.REFUSED.value, "reason": str(error)}
        return {"status": Answer.OK.value, **answer}

    async def handle_agreed(
        self, run: Any = None, replica: Any = None, epoch: Any = None, part: Any = 0
    ) -> dict[str, Any]:
        """The client fetches what all have agreed on, through the scheduler."""
        link = self._link(run, replica)
        if link is None:
            return {"status": Answer.UNKNOWN.value}
        try:
            answer = await link.newest.answer(int(epoch), int(part), WAIT_S)
        except TimeoutError:
            return {"status": Answer.REFUSED.value, "reason": "it is not there yet"}
        except (TypeError, ValueError) as error:
            return {"status": Answer.REFUSED.value, "reason": str(error)}
        return {"status": Answer.OK.value, **answer}

    def _count(self, **fields: Any) -> None:
        """Count what was refused, for the replica that it was for if there is one."""
        run, replica = fields.get("run"), fields.get("replica")
        for (of_run, number), link in self.links.items():
            if of_run == run and replica in (None, number):
                link.inbox.refuse()
                return
        self.refused += 1

    def _link(self, run: Any, replica: Any) -> Link | None:
        known = isinstance(run, int) and isinstance(replica, int)
        link = self.links.get((run, replica)) if known else None
        self.refused += link is None
        return link

    def open(self, endpoint: Endpoint) -> RemoteChannel:
        """Make the channel of a replica; items for it are kept from now on.

        Raises:
            ChannelError: If the replica is on this worker already.
        """
        key = (endpoint.run, endpoint.replica)
        links = self.links
        if key in links:
            raise ChannelError(f"replica {key[1]} of run {key[0]} is here already")
        links[key] = Link(self._worker, endpoint)
        return RemoteChannel(links[key], endpoint, lambda: links.pop(key, None))


async def set_up(dask_worker: Worker) -> None:
    """Set the plugin up on a worker that Dask has not told of it yet."""
    if NAME not in dask_worker.plugins:
        await dask_worker.plugin_add(ChannelWorkerPlugin(), NAME, catch_errors=False)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name must be text, got {name!r}")
    return name


def _shareable(fields: Sequence[Any]) -> Item | Exception:
    """An item whose frame is decoded once, or why it is none."""
    try:
        item = Item.of(fields)
    except (TypeError, ValueError) as error:
        return error
    if item.kind != ItemKind.UPDATE:
        return item
    return item._replace(payload=SharedFrame(item.payload))


async def _delivered(link: Link, items: Sequence[Item]) -> dict[str, Any]:
    """Give a replica items, in order, until it takes no more."""
    accepted = 0
    for item in items:
        if not await link.deliver(item):
            break
        accepted += 1
    return {"status": Answer.OK.value, "accepted": accepted}


def _refused(link: Link, error: Exception) -> dict[str, Any]:
    link.inbox.refuse()
    replica = link.connection.endpoint.replica
    logger.warning("replica %s refused a message: %s", replica, error)
    return {"status": Answer.REFUSED.value, "reason": str(error)}
