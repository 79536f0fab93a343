"""The training thread's end of a channel over Dask."""

import concurrent.futures
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.base import (
    ActivateResult,
    BarrierResult,
    ChannelStats,
    Encode,
    JoinResult,
    Last,
    Load,
    Receiver,
    Snapshot,
    Stopped,
    Waits,
)
from daskdl.channel.inbox import Have, Received, donors, helpers, missing, settle
from daskdl.channel.leasing import Finished, Lease, Range, SyncPoint
from daskdl.channel.link import Link, Wanted
from daskdl.channel.protocol import (
    Answer,
    Arrays,
    Barrier,
    Endpoint,
    Message,
    Parcel,
    WaitCause,
    compact,
    join,
    unwrap,
    unwrap_arrays,
    wrap_arrays,
)
from daskdl.config import VERSION, Bound
from daskdl.errors import ChannelError, WaitTimeoutError
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)


class RemoteWaits(Waits):
    """The waits and the requests of one replica's training thread.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        make: Makes a snapshot for a newcomer; None: not now.
    """

    make: Snapshot | None

    def __init__(self, link: Link, endpoint: Endpoint) -> None:
        super().__init__(link.inbox, endpoint)
        self.make = None
        self._link = link
        self._carrier = link.carrier
        self._connection = link.connection
        self._mesh = endpoint.routing == "mesh"

    @override
    def check(self) -> None:
        """Raise if the run was stopped, or the link is broken; else serve newcomers."""
        if self._inbox.stopped is None:
            if self._link.wanted:
                self._serve()
            return
        if self._connection.failure is not None:
            raise self._connection.failure
        super().check()

    def until_sent(self, cause: WaitCause, ready: Callable[[], bool]) -> None:
        """Wait until enough of what was published has gone.

        Args:
            cause: For messages and counters.
            ready: Of the carrier.

        Raises:
            WaitTimeoutError: If it takes too long.
        """
        # In a mesh it may be for one who is silent, and then given up by then.
        names = ("silence", "request") if self._mesh else ("silence",)
        bound = self._timeouts.bound(*names)
        if not self.until_true(cause, ready, bound.seconds):
            updates, nbytes, destination = self._carrier.backlog()
            raise WaitTimeoutError(
                f"replica {self._replica} waited {bound} for {cause}: "
                f"{updates} updates ({nbytes} bytes) could not be passed to "
                f"{destination}; last heard: {self.last_heard()}"
            )

    def ask(
        self, cause: WaitCause, operation: str, bound: Bound | None, **fields: Any
    ) -> dict[str, Any]:
        """Send the scheduler a request and wait for the answer.

        Args:
            cause: What the wait counts as.
            operation: Its name.
            bound: How long. None: it is answered when others have done something;
                the scheduler gives up who is silent meanwhile, and a scheduler that
                is silent is noticed by the link.
            **fields: Of the message.

        Raises:
            WaitTimeoutError: If it takes too long.
            ChannelError: If the scheduler cannot be reached, or refuses.
        """
        future = self._connection.request(
            operation, self._inbox.wake, replica=self._replica, **fields
        )
        bound_s = None if bound is None else bound.seconds
        self._wait(cause, future.done, bound_s)
        if not future.done():
            future.cancel()
            self.check()
            raise WaitTimeoutError(
                f"the scheduler did not answer {operation} of replica {self._replica} "
                f"within {bound}; last heard: {self.last_heard()}"
            )
        try:
            answer = self._connection.understand(future.result())
        except OSError as error:
            raise ChannelError(f"the scheduler cannot be reached: {error}") from error
        self.check()
        return answer

    def ask_worker(
        self, cause: WaitCause, worker: str, operation: str, **fields: Any
    ) -> Mapping[str, Any] | None:
        """Send another worker a request; None if it does not answer."""
        future = self._connection.request_of(
            worker, operation, self._inbox.wake, **fields
        )
        bound = self._timeouts.bound("request")
        self.until_true(cause, future.done, bound.seconds)
        if not future.done():
            future.cancel()
            logger.info("%s: %s did not answer within %s", operation, worker, bound)
            return None
        try:
            answer: Any = future.result()
        except OSError as error:
            logger.info("%s of %s: %s", operation, worker, error)
            return None
        return answer if isinstance(answer, dict) else None

    def tell(self, operation: str, **fields: Any) -> None:
        """Send the scheduler a last word, whether the run goes on or not."""
        future = self._connection.request(
            operation, lambda: None, replica=self._replica, **fields
        )
        try:
            future.result(self._timeouts.request)
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            logger.info("%s of replica %s: %s", operation, self._replica, error)

    @override
    def last_heard(self) -> str:
        said = f"the scheduler {self._connection.silent_s():.1f} s ago"
        return "; ".join(filter(None, [said, super().last_heard()]))

    @override
    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            came = self._inbox.wait_for(lambda: ready() or bool(self._servable()), left)
            self._serve()
            # A newcomer that has given up meanwhile is no reason to stop waiting.
            if not came or self._inbox.stopped is not None or ready():
                return came

    def _serve(self) -> None:
        """Give newcomers this replica's state if it has all they need."""
        for wanted in self._servable():
            assert self.make is not None
            self._link.serve(wanted, wrap_arrays(self.make()))

    def _servable(self) -> list[Wanted]:
        if self.make is None or self._inbox.stopped is not None:
            return []
        return [wanted for wanted in list(self._link.wanted) if self._has(wanted)]

    def _has(self, wanted: Wanted) -> bool:
        # What a lost one had sent may have reached nobody, unless a relay has it.
        without = {self._replica} | (self._inbox.lost() if self._mesh else set())
        others = {o: s for o, s in wanted.cut.items() if o not in without}
        return self._inbox.reached(others)


Meet = Callable[[str, Any, Barrier], BarrierResult]


class Agreement:
    """One replica's part in it; belongs to its training thread.

    Args:
        link: The event loop's half of its channel.
        waits: Where it waits.
        gather: Meets the others: :meth:`Channel.barrier`.
    """

    def __init__(self, link: Link, waits: RemoteWaits, gather: Meet) -> None:
        self._link = link
        self._inbox = link.inbox
        self._waits = waits
        self._gather = gather
        self._replica = link.connection.endpoint.replica

    def reach(self, key: str, published: Last, gone: Last, load: Load) -> None:
        """Return when all survivors have the same; arguments of :meth:`Channel.agree`.

        Raises:
            ChannelError: If updates of a survivor are out of reach.
            WaitTimeoutError: If nobody gives a replica what it misses.
        """
        self._wait_for_the_living(published, gone)
        known = set(gone)
        repaired = False  # by asking for updates; then only a state can help
        deadline = math.inf
        for turn in itertools.count():
            have, lost = self._tell(f"{key}, round {turn}", known)
            if lost != known:  # somebody told before that was known
                known, repaired, deadline = lost, False, math.inf
                continue
            if _same(have):
                return
            now, patience = time.monotonic(), self._waits.patience
            if now > deadline:
                raise WaitTimeoutError(
                    f"replicas {sorted(have)} did not come to the same updates within "
                    f"{patience}, {turn + 1} rounds; last heard: "
                    f"{self._waits.last_heard()}"
                )
            deadline = min(deadline, now + patience.seconds)
            if repaired:
                self._take_state(have, load)
            else:
                self._pull_all(have)
            repaired = not repaired

    def _wait_for_the_living(self, published: Last, gone: Last) -> None:
        def behind() -> Mapping[int, Sequence[int]]:
            without = {self._replica, *gone, *self._inbox.lost()}
            target = {o: s for o, s in published.items() if o not in without}
            return self._inbox.behind(target)

        self._waits.until(WaitCause.UPDATES, lambda: not behind(), behind)

    def _tell(self, key: str, gone: set[int]) -> tuple[Have, set[int]]:
        """What each survivor has, after nothing more can come; and who is gone."""
        own = {self._replica: (self._link.carrier.sequence, ())}
        received: Mapping[int, Received] = {**self._inbox.hold(gone), **own}
        note = [[o, last, list(more)] for o, (last, more) in sorted(received.items())]
        gathered = self._gather(key, {"received": note}, Barrier.AGREE)
        survivors = sorted(gathered.payloads.keys() - gathered.gone.keys())
        have = {r: _received(gathered.payloads[r]) for r in survivors}
        return have, set(gathered.gone)

    def _pull_all(self, have: Have) -> None:
        """Ask for what is missing, one after the other, until it is here."""
        target = settle(have)
        self._inbox.open(target)
        for origin, sequences in missing(have[self._replica], target).items():
            for helper in helpers(origin, sequences, have, have, self._replica):
                if self._pull(helper, origin, target[origin]):
                    break

    def _pull(self, helper: int, origin: int, target: Received) -> bool:
        """Ask one replica until it has no more; whether nothing is missing then."""
        former: Sequence[int] = []
        while True:
            lacking = missing(self._inbox.received(), {origin: target})
            if not lacking or lacking[origin] == former:
                return not lacking
            former = lacking[origin]
            pulling = self._link.pull(helper, origin, former)
            self._waits.until_true(
                WaitCause.REPAIR, pulling.done, None
            )  # it has a bound

    def _take_state(self, have: Have, load: Load) -> None:
        """Begin again from one who has what this replica cannot get."""
        workers = self._link.repairs.workers
        for donor in donors(have, self._replica):
            if donor not in workers:
                continue
            answer = self._waits.ask_worker(
                WaitCause.SNAPSHOT,
                workers[donor],
                protocol.SNAPSHOT,
                replica=donor,
                cut=[],
            )
            if answer is None or answer["status"] != Answer.OK:
                continue
            snapshot = unwrap_arrays(answer["snapshot"])
            if _plain(_received(snapshot)) != _plain(have[donor]):
                continue
            received = dict(_received(snapshot))
            received.pop(self._replica, None)
            self._inbox.begin(received, snapshot["grid"])
            load(snapshot)
            logger.warning(
                "replica %s has taken the state of replica %s, which had more of those "
                "that are lost; its own residual stays",
                self._replica,
                donor,
            )
            return


def _received(note: Mapping[str, Any]) -> dict[int, Received]:
    return {origin: (last, tuple(more)) for origin, last, more in note["received"]}


def _same(have: Have) -> bool:
    first, *others = (_plain(received) for received in have.values())
    return all(received == first for received in others)


def _plain(received: Mapping[int, Received]) -> Mapping[int, Received]:
    return {o: (last, more) for o, (last, more) in received.items() if last or more}


class Entrance:
    """What is asked for, and of whom, until a replica is in.

    Args:
        link: The event loop's half of its channel.
        waits: Where its training thread waits.
        endpoint: Which replica it is.
    """

    def __init__(self, link: Link, waits: RemoteWaits, endpoint: Endpoint) -> None:
        self._link = link
        self._waits = waits
        self._replica = endpoint.replica
        self._grid = endpoint.grid
        self._timeouts = endpoint.timeouts

    def enter(self) -> JoinResult:
        """See :meth:`~daskdl.channel.base.Channel.join`."""
        # Updates may come before the answer does.
        self._link.wait_for_snapshot()
        answer = self._join()
        self._link.enter(answer["topology"])
        if answer["members"]:
            others = {r: s for r, s in answer["members"] if r != self._replica}
            self._link.inbox.meet(others)
            self._link.begin({}, self._grid)
            self._link.start()
            return JoinResult([r for r, _ in answer["members"]], None)
        self._link.start()
        snapshot = self._snapshot(answer)
        received = {o: (last, tuple(more)) for o, last, more in snapshot["received"]}
        received.pop(self._replica, None)
        self._link.begin(received, snapshot["grid"])
        return JoinResult([self._replica], snapshot)

    def _join(self) -> dict[str, Any]:
        bound = self._timeouts.bound("join", "request")
        return self._waits.ask(WaitCause.JOIN, protocol.JOIN, bound, version=VERSION)

    def _snapshot(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Ask the donor that was named, or another one if that has gone."""
        bound = self._timeouts.bound("join")
        deadline = time.monotonic() + bound.seconds
        while answer["donor"] is not None:
            given = self._waits.ask_worker(
                WaitCause.SNAPSHOT,
                answer["worker"],
                protocol.SNAPSHOT,
                replica=answer["donor"],
                cut=answer["cut"],
            )
            if given is not None and given["status"] == Answer.OK:
                return dict(unwrap_arrays(given["snapshot"]))
            if time.monotonic() > deadline:
                why = "it did not answer" if given is None else given.get("reason")
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {bound} for a snapshot, last of "
                    f"replica {answer['donor']} on {answer['worker']}: {why}; last "
                    f"heard: {self._waits.last_heard()}"
                )
            answer = self._join()
        raise Stopped("nobody is left to begin from")


AGAIN_S = 0.1  # until one is asked again that did not answer


class Fetching:
    """Requests for parcels, a part at a time; the training thread waits.

    Args:
        waits: Where it waits.
        worker_of: Where a replica is; None: it is gone.
    """

    def __init__(
        self, waits: RemoteWaits, worker_of: Callable[[int], str | None]
    ) -> None:
        self._waits = waits
        self._worker_of = worker_of

    def fetch(self, replica: int, name: str) -> dict[str, NDArray[Any]] | None:
        """Wait for a parcel and bring it; None if the replica goes before.

        Args:
            replica: Another one.
            name: Of the parcel.

        Raises:
            WaitTimeoutError: If it is there, and the parcel does not come.
        """
        first = self._part(replica, name, 0)
        if first is None:
            return None
        parts = [unwrap(first["bytes"])]
        for number in range(1, first["parts"]):
            answer = self._part(replica, name, number)
            if answer is None:
                return None
            parts.append(unwrap(answer["bytes"]))
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        return join(first["forms"], arrays)

    def _part(self, replica: int, name: str, part: int) -> Any:
        bound = self._waits.patience
        deadline = time.monotonic() + bound.seconds
        while (worker := self._worker_of(replica)) is not None:
            answer = self._waits.ask_worker(
                WaitCause.FETCH,
                worker,
                protocol.FETCH,
                replica=replica,
                name=name,
                part=part,
            )
            if answer is not None and answer["status"] == Answer.OK:
                return answer
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"waited {bound} for {name!r} of replica {replica} on {worker}; "
                    f"last heard: {self._waits.last_heard()}"
                )
            # Not at once: one that died is known to be gone a little later.
            gone = lambda: self._worker_of(replica) is None  # noqa: E731
            self._waits.until_true(WaitCause.FETCH, gone, AGAIN_S)
        return None


class RemoteChannel(Receiver):
    """The channel of one replica, over Dask's connections.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.
        forget: Called when the replica has left.
    """

    _waits: RemoteWaits

    def __init__(
        self, link: Link, endpoint: Endpoint, forget: Callable[[], object]
    ) -> None:
        super().__init__(link.inbox, RemoteWaits(link, endpoint), endpoint)
        self._link = link
        self._carrier = link.carrier
        self._forget = forget
        self._entrance = Entrance(link, self._waits, endpoint)
        self._fetching = Fetching(self._waits, self._worker_of)
        self._note: Any = None  # while it waits for a lease
        self._agreement = Agreement(link, self._waits, self.barrier)
        self._repaired = 0  # as told by the last `stats`

    @property
    @override
    def closing(self) -> bool:
        return self._link.closing

    # ---- coming and going

    @override
    def join(self) -> JoinResult:
        return self._entrance.enter()

    @override
    def activate(self, step: int) -> ActivateResult:
        answer = self._waits.ask(WaitCause.ACTIVATE, protocol.ACTIVATE, None, step=step)
        members = dict(answer["members"])
        self._carrier.progress = (step, answer["interval"] - 1)
        self._inbox.meet({r: s for r, s in members.items() if r != self._replica})
        report = {replica: unwrap_arrays(said) for replica, said in answer["report"]}
        epoch, lap = answer["epoch"], answer["interval"]
        return ActivateResult(sorted(members), epoch, report, lap)

    @override
    def serve_snapshot(self, make: Snapshot | None) -> None:
        self._waits.make = make

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._waits.tell(protocol.FAIL, failure=dict(failure))

    @override
    def leave(self, *, retires: bool = False) -> None:
        self._link.stop_sending()
        self._waits.tell(protocol.LEAVE, retires=retires)
        self._forget()
        self._link.end()

    # ---- updates

    @override
    def has_room(self, *, wait: bool = False) -> bool:
        if wait:
            self._waits.until_sent(WaitCause.ROOM, self._carrier.ready)
            return True
        room = self._carrier.has_room()
        self._stats.withheld += not room
        return room

    @override
    def publish(
        self, encode: Encode, step: int, *, partial: bool = False, force: bool = False
    ) -> bool:
        if not force and not self.has_room():
            return False
        stamp = self._stamp(step)
        frame = encode(stamp)
        completed = step - 1 if partial else step
        item = Message.update(stamp, completed, frame.nbytes, compact(frame))
        if not self._carrier.offer(item, force=force):
            self._stats.withheld += 1
            return False
        self._published = stamp.sequence
        self._stats.sent_bytes += frame.nbytes
        self._stats.frames += 1
        if force:
            self._wait_until_sent()
        return True

    def _wait_until_sent(self) -> None:
        bound = self._timeouts.bound("stop")
        if not self._carrier.wait_until_sent(bound.seconds):
            logger.warning(
                "replica %s leaves after %s; %s updates (%s bytes) could not be passed "
                "to %s; last heard: %s",
                self._replica,
                bound,
                *self._carrier.backlog(),
                self._waits.last_heard(),
            )

    @override
    def progress(self, step: int, interval: int = -1) -> None:
        self._carrier.complete(step, interval)

    @override
    def sync(self, step: int, grid: float) -> None:
        self._carrier.progress = (step, self._carrier.progress[1])
        self._inbox.sync(self._inbox.others(), step, grid)

    @override
    def link_stats(self) -> Drained:
        return self._carrier.drained()

    # ---- requests

    @override
    def lease(
        self, phase: str, epoch: int, finished: Finished, *, wait: bool = False
    ) -> Lease | SyncPoint | None:
        answer = self._waits.ask(
            WaitCause.LEASE,
            protocol.LEASE,
            None if wait else self._timeouts.bound("request"),
            phase=phase,
            epoch=epoch,
            finished=[dict(piece) for piece in finished],
            wait=wait,
            idle_payload=wrap_arrays(self._note) if wait else None,
        )
        if wait:
            self._note = None
        if answer["lease"] is None:
            sync_point = answer["sync_point"]
            return None if sync_point is None else SyncPoint.from_wire(sync_point)
        ranges = tuple(Range(*one) for one in answer["ranges"])
        return Lease(answer["lease"], ranges, dict(answer["keys"]), answer["ahead"])

    def missing(self, phase: str, part: int, key: str) -> str:
        """A part does not come: is it lost with the worker that held it?

        Args:
            phase: ``"train"`` or ``"validation"``.
            part: Of a piece that was leased.
            key: Under which it does not come.

        Returns:
            The same key if it is not lost; else, once it has been started again, its
            new key.
        """
        answer = self._waits.ask(
            WaitCause.MISSING,
            protocol.MISSING,
            self._timeouts.bound("data"),
            phase=phase,
            part=part,
            key=key,
        )
        return str(answer["key"])

    @override
    def barrier(
        self,
        key: str,
        payload: Any,
        kind: Barrier = Barrier.MEET,
        client_payload: bytes = b"",
    ) -> BarrierResult:
        if kind == Barrier.AGREE and self._endpoint.routing == "plain":
            # What is still here would be held back with what others hand over.
            self._waits.until_sent(WaitCause.FLUSH, self._carrier.sent)
        answer = self._waits.ask(
            WaitCause.GATHER,
            protocol.BARRIER,
            None,
            key=key,
            payload=wrap_arrays(payload),
            client_payload=client_payload,
            kind=kind.value,
        )
        if kind != Barrier.AGREE:
            self._inbox.release()
        payloads = {
            replica: unwrap_arrays(said) for replica, said in answer["payloads"]
        }
        self._count_payloads(payloads)
        return BarrierResult(payloads, dict(answer["gone"]), answer["counted"])

    @override
    def set_idle(self, payload: Any) -> None:
        self._note = payload

    @override
    def publish_blob(self, name: str, arrays: Arrays) -> None:
        self._link.shelf.put(name, Parcel(arrays))

    @override
    def drop_blobs(self, keep: str = "") -> None:
        self._link.shelf.clear(keep)

    @override
    def keep_state(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        self._link.newest.keep(epoch, make)

    @override
    def fetch_blob(self, replica: int, name: str) -> Arrays | None:
        arrays = self._fetching.fetch(replica, name)
        if arrays is not None:
            self._stats.received_bytes += sum(a.nbytes for a in arrays.values())
        return arrays

    def _worker_of(self, replica: int) -> str | None:
        gone = replica in self._inbox.lost()
        return None if gone else self._link.repairs.workers.get(replica)

    @override
    def agree(self, key: str, published: Last, gone: Last, load: Load) -> None:
        if self._endpoint.routing == "plain":
            super().agree(key, published, gone, load)
        else:
            self._agreement.reach(key, published, gone, load)

    @override
    def stats(self) -> ChannelStats:
        now = super().stats()
        former, self._repaired = self._repaired, self._link.repairs.repaired
        now.repaired = self._repaired - former
        now.sent_bytes += self._link.shelf.count_off()
        return now
