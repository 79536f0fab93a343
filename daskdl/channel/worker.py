"""The channel's end on a worker: a plugin that delivers messages to its replicas."""

import asyncio
import atexit
import gc
from collections.abc import Sequence
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from typing_extensions import override

from daskdl.channel.endpoint import ReplicaEndpoint, SharedFrame
from daskdl.channel.protocol import (
    NAME,
    Answer,
    Endpoint,
    Fields,
    GoneError,
    Guard,
    Identity,
    Message,
    MessageKind,
    Whole,
    handlers_of,
)
from daskdl.channel.remote import RemoteChannel
from daskdl.errors import ChannelError

WAIT_S = 1.0  # for what is not there yet; then who wants it asks again
LEAVE_S = 2.0  # batch systems kill soon after they ask a worker to close


class ChannelWorkerPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Deliver arriving messages to the channels of the replicas on this worker."""

    name = NAME
    idempotent = True
    links: dict[tuple[int, int], ReplicaEndpoint]
    refused: int  # messages for no replica of this worker, or not understood

    def __init__(self) -> None:
        self.links = {}
        self.refused = 0
        self._guard = Guard(self._count)

    @override
    def setup(self, worker: Worker) -> None:
        # Dask may set a plugin up twice; live channels then go on.
        former = worker.extensions.get(NAME)
        if former is not None:
            self.links = former.links
        worker.extensions[NAME] = self
        for operation, handler in handlers_of(self).items():
            worker.handlers[operation] = self._guard.of(handler)
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
        self, run: Identity, replica: Whole, messages: Sequence[Any]
    ) -> Fields:
        """The relay, or another replica, has messages for a replica here."""
        link = self._link(run, replica)
        return await _deliver(link, [Message.from_wire(one) for one in messages])

    async def handle_deliver_batches(
        self,
        run: Identity,
        messages: Sequence[Any],
        shares: Sequence[tuple[Whole, Sequence[Whole]]],
    ) -> Fields:
        """The relay has messages for several replicas here, each of them once."""
        unpacked = [_shareable(fields) for fields in messages]
        own = {r: [unpacked[i] for i in places] for r, places in shares}
        shared = self._guard.of(self._share)  # each replica's answer is its own
        answers = [
            await shared(run=run, replica=replica, messages=for_it)
            for replica, for_it in own.items()
        ]
        return {"status": Answer.OK.value, "answers": answers}

    async def _share(
        self, run: Identity, replica: Whole, messages: Sequence[Any]
    ) -> Fields:
        link = self._link(run, replica)
        for message in messages:
            if isinstance(message, Exception):
                raise message
        return await _deliver(link, messages)

    async def handle_snapshot(
        self, run: Identity, replica: Whole, cut: Sequence[tuple[Whole, Whole]]
    ) -> Fields:
        """A newcomer elsewhere wants the state of a replica here."""
        link = self._link(run, replica)
        try:
            snapshot = await link.snapshot(dict(cut))
        except TimeoutError:
            return _not_yet("it was not ready in time")
        return {"status": Answer.OK.value, "snapshot": snapshot}

    async def handle_repair(
        self, run: Identity, replica: Whole, origin: Whole, sequences: Sequence[Whole]
    ) -> Fields:
        """A replica elsewhere asks one here for updates that it missed."""
        found = self._link(run, replica).lookup(origin, sequences)
        return {"status": Answer.OK.value, "messages": [one.to_wire() for one in found]}

    async def handle_fetch(
        self, run: Identity, replica: Whole, name: str, part: Whole
    ) -> Fields:
        """A replica elsewhere fetches what one here has on its shelf, or will have."""
        link = self._link(run, replica)
        try:
            answer = await link.blobs.answer(name, part, WAIT_S)
        except TimeoutError:
            return _not_yet("it is not there yet")
        return {"status": Answer.OK.value, **answer}

    async def handle_agreed(
        self, run: Identity, replica: Whole, epoch: Whole, part: Whole
    ) -> Fields:
        """The client fetches what all have agreed on, through the scheduler."""
        link = self._link(run, replica)
        try:
            answer = await link.agreed_state.answer(epoch, part, WAIT_S)
        except TimeoutError:
            return _not_yet("it is not there yet")
        return {"status": Answer.OK.value, **answer}

    def _count(self, fields: Fields) -> None:
        """Count what was refused, for the replica that it was for if there is one."""
        run, replica = fields.get("run"), fields.get("replica")
        if not isinstance(replica, int):
            replica = None
        for (of_run, number), link in self.links.items():
            if isinstance(run, int) and of_run == run and replica in (None, number):
                link.inbox.refuse()
                return
        self.refused += 1

    def _link(self, run: int, replica: int) -> ReplicaEndpoint:
        """The link of a replica here.

        Raises:
            GoneError: If it is not here; counted.
        """
        link = self.links.get((run, replica))
        if link is None:
            self.refused += 1
            raise GoneError(f"no replica {replica} of run {run} here")
        return link

    def open(self, endpoint: Endpoint) -> RemoteChannel:
        """Make the channel of a replica; messages for it are kept from now on.

        Raises:
            ChannelError: If the replica is on this worker already.
        """
        key = (endpoint.run, endpoint.replica)
        links = self.links
        if key in links:
            raise ChannelError(f"replica {key[1]} of run {key[0]} is here already")
        links[key] = ReplicaEndpoint(self._worker, endpoint)
        return RemoteChannel(links[key], endpoint, lambda: links.pop(key, None))


def set_up(worker: Worker) -> None:
    """Set the channel's end up on a worker."""
    ChannelWorkerPlugin().setup(worker)


def _not_yet(reason: str) -> Fields:
    """It was understood; who asks may ask again."""
    return {"status": Answer.REFUSED.value, "reason": reason}


def _shareable(fields: Any) -> Message | Exception:
    """A message whose frame is decoded once, or why it is none."""
    try:
        message = Message.from_wire(fields)
    except (TypeError, ValueError) as error:
        return error
    if message.kind != MessageKind.UPDATE:
        return message
    return message._replace(payload=SharedFrame(message.payload))


async def _deliver(link: ReplicaEndpoint, messages: Sequence[Message]) -> Fields:
    """Give a replica messages, in order, until it takes no more."""
    accepted = 0
    for message in messages:
        if not await link.deliver(message):
            break
        accepted += 1
    return {"status": Answer.OK.value, "accepted": accepted}
