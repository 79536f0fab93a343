"""A replica's channel over Dask, for its training thread.

Every wait also serves snapshots to other replicas, and ends when the replica must leave
or the connection to the scheduler fails.
"""

import concurrent.futures
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.base import (
    ActivateResult,
    BarrierResult,
    Channel,
    ChannelStats,
    Frame,
    JoinResult,
    LastUpdates,
    Load,
    MakeSnapshot,
    Stopped,
)
from daskdl.channel.inbox import Received
from daskdl.channel.leasing import Finished, Lease, Range, SyncPoint
from daskdl.channel.protocol import (
    Answer,
    Arrays,
    BarrierKind,
    BlobParts,
    ChannelSpec,
    LiveReport,
    Message,
    PeerProgress,
    WaitCause,
    Work,
    for_queue,
    join,
    read,
    unwrap,
    unwrap_arrays,
    wrap_arrays,
)
from daskdl.channel.recovery import ReceivedByReplica, donors, target_of
from daskdl.channel.transport import extended
from daskdl.channel.worker import ChannelWorkerPlugin, Snapshot, SnapshotRequest
from daskdl.config import VERSION, Bound
from daskdl.errors import ChannelError, WaitTimeoutError

logger = logging.getLogger(__name__)

FETCH_RETRY_S = 0.1  # before a failed fetch is repeated
JOIN_PACE_S = 1.0  # least time between two requests for a snapshot


class RemoteChannel(Channel):
    """The channel of one replica, over Dask's connections."""

    has_dashboard = True
    has_client = True

    def __init__(self, plugin: ChannelWorkerPlugin, spec: ChannelSpec) -> None:
        endpoint = plugin.open(spec)
        super().__init__(endpoint.inbox, spec)
        self._plugin = plugin
        self._endpoint = endpoint
        self._connection = endpoint.connection
        self._now = endpoint.connection.clock.now
        self._routing = endpoint.routing
        self.merges = endpoint.routing.merges
        self._make: MakeSnapshot | None = None  # makes a snapshot; None: not now
        self._passed_on = 0  # number of the last barrier, see `RunState`
        self._repaired = self._blob_bytes = 0  # at the last `stats`

    @property
    @override
    def closing(self) -> bool:
        return self._endpoint.closing

    # ---- waits, and snapshots for other replicas

    @override
    def check(self) -> None:
        if self._inbox.stopped is None:
            if self._endpoint.snapshot_requests:
                self._serve()
            return
        if self._connection.failure is not None:
            raise self._connection.failure
        super().check()

    @override
    def _block(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else self._now() + timeout_s
        while True:
            left_s = None if deadline is None else max(deadline - self._now(), 0.0)
            in_time = self._inbox.wait_for(
                lambda: ready() or bool(self._servable()), left_s
            )
            if deadline is not None:
                deadline = extended(deadline, self._now())
            self._serve()
            # A snapshot request alone does not end the wait.
            if not in_time or self._inbox.stopped is not None or ready():
                return in_time

    @override
    def serve_snapshot(self, make: MakeSnapshot | None) -> None:
        self._make = make

    def _serve(self) -> None:
        """Serve a snapshot to each replica whose request has its cut reached."""
        requests = self._servable()
        if not requests:
            return
        assert self._make is not None
        fields = self._make()
        arrays = {n: v for n, v in fields.items() if isinstance(v, np.ndarray)}
        values = {n: v for n, v in fields.items() if n not in arrays}
        for request in requests:
            if request.answer.set_running_or_notify_cancel():  # else timed out
                request.answer.set_result(Snapshot(values, arrays))

    def _servable(self) -> list[SnapshotRequest]:
        if self._make is None or self._inbox.stopped is not None:
            return []
        with self._inbox.changed:
            # In a mesh, updates of a failed replica may have reached no other replica.
            ignored = {self._replica}
            if not self._routing.relayed:
                ignored |= self._inbox.peers.failed
            return [
                request
                for request in list(self._endpoint.snapshot_requests)
                if not request.answer.done()
                and self._inbox.received.reached(
                    {o: s for o, s in request.cut.items() if o not in ignored}
                )
            ]

    def _wait_until_sent(self, cause: WaitCause, ready: Callable[[], bool]) -> None:
        """Wait until queued updates are sent or acknowledged, according to `ready`."""
        # A hanging replica may cause the wait: its queue in the relay is full, or in a
        # mesh its acknowledgement is missing. The scheduler removes it by then. If all
        # replicas are slow, some updates arrive meanwhile, here or elsewhere.
        bound = self._timeouts.bound("silence", "request")
        queue, inbox = self._routing.queue, self._inbox
        scheduler = self._routing.to_scheduler

        def counts() -> tuple[int, ...]:
            return len(queue), inbox.received_bytes, scheduler.moved

        while not ready():
            before = counts()

            def moved(before: tuple[int, ...] = before) -> bool:
                return ready() or counts() != before

            if not self._wait_until(cause, moved, bound.seconds):
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {bound} for {cause}: "
                    f"{self._routing.backlog()}; last seen: {self._last_seen()}"
                )

    @override
    def _last_seen(self) -> str:
        scheduler = f"the scheduler {self._connection.since_answer_s():.1f} s ago"
        return "; ".join(filter(None, [scheduler, super()._last_seen()]))

    @override
    @contextlib.contextmanager
    def _announcing_need(self, step: int) -> Iterator[None]:
        if not self.merges:
            yield
            return
        self._routing.needed_step = step
        self._routing.to_scheduler.wake()
        try:
            yield
        finally:
            self._routing.needed_step = 0

    # ---- requests

    def _answer(
        self,
        cause: WaitCause,
        worker: str | None,
        operation: str,
        bound: Bound | None,
        in_vain: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> Any:
        """Send a request and wait for the answer, unless the wait is `in_vain`."""
        asking = self._connection.ask(worker, operation, **fields)
        future = self._connection.start(asking)
        future.add_done_callback(lambda _: self._inbox.wake())
        ready = lambda: future.done() or in_vain()  # noqa: E731
        self._timed(cause, ready, None if bound is None else bound.seconds)
        if not future.done():
            future.cancel()
            raise TimeoutError("no answer")
        return future.result()

    def _ask(
        self, cause: WaitCause, operation: str, bound: Bound | None, **fields: Any
    ) -> dict[str, Any]:
        """Send the scheduler a request and wait for the answer.

        Args:
            cause: Counter that the wait is added to.
            operation: Name of the operation.
            bound: Longest wait. None: the answer depends on other replicas. Meanwhile
                the scheduler removes replicas without a heartbeat, and this replica's
                own heartbeat fails if the scheduler does not answer.
            **fields: Fields of the message.
        """
        fields["replica"] = self._replica
        try:
            answer = self._answer(cause, None, operation, bound, **fields)
        except TimeoutError as error:
            self.check()  # a heartbeat may have failed before
            raise WaitTimeoutError(
                f"the scheduler did not answer {operation} of replica {self._replica} "
                f"within {bound}; last seen: {self._last_seen()}"
            ) from error
        except OSError as error:
            self.check()
            raise ChannelError(f"the scheduler cannot be reached: {error}") from error
        answer = self._connection.checked(answer)
        self.check()
        return answer

    def _ask_worker(
        self,
        cause: WaitCause,
        worker: str,
        operation: str,
        bound: Bound | None = None,
        **fields: Any,
    ) -> Mapping[str, Any]:
        """Send another worker a request, once.

        Args:
            cause: Counter that the wait is added to.
            worker: Address of the worker.
            operation: Name of the operation.
            bound: Longest wait, unless the worker's replicas are lost before; None:
                ``daskdl.timeouts.request``.
            **fields: Fields of the message.

        Returns:
            The worker's answer, or a substitute with the reason for its absence.
        """
        bound = bound or self._timeouts.bound("request")
        try:
            answer = self._answer(
                cause,
                worker,
                operation,
                bound,
                in_vain=lambda: worker not in self._routing.workers.values(),
                **fields,
            )
            why = f"it answered {answer!r}"
        except OSError as error:
            answer, why = None, str(error)
        self.check()
        if not isinstance(answer, dict):
            answer = {"status": Answer.REFUSED, "reason": why}
        if answer["status"] != Answer.OK:
            logger.info("%s of %s: %s", operation, worker, answer["reason"])
        return answer

    def _tell(self, operation: str, **fields: Any) -> None:
        """Send the scheduler a final message, even if the run was stopped."""
        fields["replica"] = self._replica
        telling = self._connection.ask(None, operation, **fields)
        try:
            self._endpoint.complete(telling, self._timeouts.request)
        except (OSError, RuntimeError, concurrent.futures.CancelledError) as error:
            logger.info("%s of replica %s: %s", operation, self._replica, error)

    # ---- joining and leaving

    @override
    def join(self) -> JoinResult:
        answer = self._ask_to_join()
        while answer.get("queued"):
            answer = self._ask_to_join()
        self._endpoint.enter(answer["topology"])
        with self._inbox.changed:  # their updates may still arrive
            for replica in answer["gone"]:
                self._inbox.peers.fail(replica)
        if answer["members"]:
            members = self._record_members(answer["members"])
            self._endpoint.start_from_snapshot({}, self._spec.grid, {})
            self._endpoint.start()
            return JoinResult(members, None)
        # A relay withholds updates, and sends the progress of the others meanwhile.
        self._inbox.in_order = False
        self._endpoint.start()
        return JoinResult([self._replica], self._snapshot(answer))

    def _record_members(self, members: Sequence[Sequence[int]]) -> list[int]:
        """Record the progress of each member; return the members."""
        for replica, *progress in members:
            if replica != self._replica:
                self._inbox.record_progress(replica, PeerProgress())
                self._inbox.record_progress(replica, PeerProgress(*progress))
        return sorted(replica for replica, *_ in members)

    def _ask_to_join(self) -> dict[str, Any]:
        bound = self._timeouts.bound("join", "request")
        return self._ask(WaitCause.JOIN, protocol.JOIN, bound, version=VERSION)

    def _snapshot(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Request a snapshot from the named donor; on failure, ask for a donor again.

        A donor makes no snapshot while it validates, or in the middle of a step. An
        attempt that begins in time counts, even if the process is suspended meanwhile,
        so the last one begins after the deadline. Once the plain values have arrived,
        this replica takes updates in again, while the arrays arrive in parts: waiting
        updates would hold up the others. While all donors serve others, nothing bounds
        the wait but the patience of those others, each of which becomes a donor or
        fails.
        """
        request, seen = self._timeouts.bound("request"), dict[int, int]()
        deadline = self._now() + self._patience.seconds
        while answer["training"]:
            donor, worker, asked_at = answer["donor"], answer["worker"], self._now()
            cut = {o: max(s, seen.get(o, 0)) for o, s in answer["cut"]}
            reason = "no snapshot can be made at the moment"
            if worker is not None:
                served = self._ask_for_snapshot(donor, worker, cut)
                reason = served.get("reason", "it has gone")
            if worker is not None and served["status"] == Answer.OK:
                values = served["values"]
                received = self._received_with(values)
                self._endpoint.start_from_snapshot(received, values["grid"], cut)
                if self._routing.relayed:
                    self._subscribe(received)
                arrays = self._fetch(WaitCause.SNAPSHOT, donor, served["name"])
                if arrays is not None:
                    return {**values, **arrays}
                deadline = self._now() + self._patience.seconds
            if donor is None:
                deadline, asked_at = self._now() + self._patience.seconds, -math.inf
            if asked_at > deadline:
                raise WaitTimeoutError(
                    f"replica {self._replica} waited {self._patience} for a snapshot, "
                    f"{request} for each answer, last of replica {donor} on {worker}: "
                    f"{reason}; last seen: {self._last_seen()}"
                )
            pause_s = max(JOIN_PACE_S - (self._now() - asked_at), 0.0)
            self._wait_until(WaitCause.SNAPSHOT, lambda: False, pause_s)
            seen = self._endpoint.buffer_again() or seen
            answer = self._ask_to_join()
            self._endpoint.drop_early(dict(answer["cut"]))
        raise Stopped("no replica is left to take the state from")

    def _subscribe(self, received: Mapping[int, Received]) -> None:
        contained = [(origin, complete) for origin, (complete, _) in received.items()]
        bound = self._timeouts.bound("request")
        self._ask(WaitCause.SNAPSHOT, protocol.SUBSCRIBE, bound, contained=contained)

    def _ask_for_snapshot(
        self, donor: int, worker: str, cut: Mapping[int, int]
    ) -> Mapping[str, Any]:
        return self._ask_worker(
            WaitCause.SNAPSHOT,
            worker,
            protocol.SNAPSHOT,
            replica=donor,
            cut=list(cut.items()),
            reader=self._replica,
        )

    @override
    def activate(self, step: int) -> ActivateResult:
        answer = self._ask(WaitCause.ACTIVATE, protocol.ACTIVATE, None, step=step)
        interval = answer["interval"]
        self._inbox.progress = PeerProgress(step, self.published, interval - 1)
        members = self._record_members(answer["members"])
        return ActivateResult(members, answer["epoch"], answer["report"], interval)

    @override
    def fail(self, failure: Mapping[str, Any]) -> None:
        self._tell(protocol.FAIL, failure=dict(failure))

    @override
    def leave(self, *, retires: bool = False) -> None:
        self._endpoint.stop_sending()
        self._tell(protocol.LEAVE, retires=retires)
        self._plugin.forget(self._spec)

    # ---- updates

    @override
    def has_room(self, *, wait: bool = False, unsent: float = math.inf) -> bool:
        if wait:
            ready = lambda: self._routing.has_room(math.inf)  # noqa: E731
            self._wait_until_sent(WaitCause.ROOM, ready)
            return True
        room = self._routing.has_room() and self._routing.unsent() <= unsent
        self._stats.withheld += not room
        return room

    @override
    def _queue(self, item: Message, frame: Frame, force: bool) -> bool:
        item = item._replace(payload=for_queue(frame))
        accepted = self._routing.publish(item, force=force)
        if force:
            bound = self._timeouts.bound("stop")
            if not self._inbox.wait_for(
                self._routing.all_sent, bound.seconds, even_if_stopped=True
            ):
                logger.warning(
                    "replica %s leaves after %s: %s; last seen: %s",
                    self._replica,
                    bound,
                    self._routing.backlog(),
                    self._last_seen(),
                )
        return accepted

    @override
    def _announce(self, progress: PeerProgress) -> None:
        self._routing.announce(progress)

    @override
    def report_live(self, live: LiveReport) -> None:
        self._routing.live.append(live)

    # ---- work

    @override
    def lease(
        self,
        phase: str,
        epoch: int,
        finished: Finished,
        *,
        wait: bool = False,
        work: Work | None = None,
    ) -> Lease | SyncPoint | None:
        bound = self._timeouts.bound("rejoin" if wait else "request")
        # With too few replicas, this one waits until others join.
        with self._routing.to_scheduler.patient(bound):
            answer = self._ask(
                WaitCause.LEASE,
                protocol.LEASE,
                None if wait else bound,
                phase=phase,
                epoch=epoch,
                finished=[dict(lease) for lease in finished],
                wait=wait,
                work=work,
                idle_payload=wrap_arrays(self._idle_payload) if wait else None,
            )
        if wait:
            self._idle_payload = None
        if answer["lease"] is not None:
            ranges = read(answer["ranges"], tuple[Range, ...])
            return Lease(answer["lease"], ranges, dict(answer["keys"]), answer["ahead"])
        sync_point = answer["sync_point"]
        return None if sync_point is None else read(sync_point, SyncPoint)

    def missing(self, phase: str, part: int, key: str) -> str:
        """Return the current key of a part that does not arrive.

        Returns:
            The same key if the part exists; if it was lost with its worker, its new
            key, once the client has set one.
        """
        answer = self._ask(
            WaitCause.MISSING,
            protocol.MISSING,
            self._timeouts.bound("data"),
            phase=phase,
            part=part,
            key=key,
        )
        return str(answer["key"])

    # ---- barriers and blobs

    @override
    def barrier(
        self,
        key: str,
        payload: Any,
        kind: BarrierKind = BarrierKind.MEET,
        client_payload: bytes = b"",
    ) -> BarrierResult:
        if kind == BarrierKind.AGREE and self._routing.relayed:
            # Updates still queued here would be held back with those of leaving
            # replicas.
            self._wait_until_sent(WaitCause.FLUSH, self._routing.all_sent)
        answer = self._ask(
            WaitCause.GATHER,
            protocol.BARRIER,
            None,
            key=key,
            payload=wrap_arrays(payload),
            client_payload=client_payload,
            kind=kind.value,
            **self._routing.take_live(),
        )
        if kind != BarrierKind.AGREE:
            self._inbox.barrier.release()
            if self._endpoint.blobs.has_snapshots:
                with self._inbox.changed:  # training replicas have fetched theirs
                    peers = self._inbox.peers
                    readers = {*peers.progress, *peers.failed}
                self._connection.start(self._endpoint.blobs.drop_snapshots(readers))
        payloads = {r: unwrap_arrays(payload) for r, payload in answer["payloads"]}
        self._passed_on = answer["passed_on"]
        self._count_arrays(payloads)
        return BarrierResult(payloads, dict(answer["gone"]), answer["counted"])

    @override
    def publish_blob(self, name: str, arrays: Arrays) -> None:
        self._connection.start(self._endpoint.blobs.publish(name, BlobParts(arrays)))

    @override
    def drop_blobs(self, keep: str = "") -> None:
        self._connection.start(self._endpoint.blobs.drop(keep))

    @override
    def keep_state(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        self._connection.start(self._endpoint.blobs.keep_state(epoch, make))

    @override
    def fetch_blob(self, replica: int, name: str) -> Arrays | None:
        return self._fetch(WaitCause.FETCH, replica, name)

    def _fetch(self, cause: WaitCause, replica: int, name: str) -> Arrays | None:
        """Fetch a blob; None if the replica is gone, or the snapshot was dropped.

        A part may take long on a slow link. It would never arrive if it was requested
        again each time: the answer to the former request is dropped.
        """
        forms, parts, count = (), list[Any](), 1
        deadline = self._now() + self._patience.seconds
        while len(parts) < count:
            asked_at = self._now()
            worker = self._routing.workers.get(replica)
            if worker is None:
                return None
            answer = self._ask_worker(
                cause,
                worker,
                protocol.FETCH,
                self._patience,
                replica=replica,
                name=name,
                part=len(parts),
            )
            if answer["status"] == Answer.OK:
                forms, count = forms or answer["forms"], answer["parts"]
                parts.append(np.frombuffer(unwrap(answer["bytes"]), np.uint8))
                deadline = self._now() + self._patience.seconds
                continue
            if answer["status"] == Answer.UNKNOWN:  # it will not arrive
                return None
            if asked_at > deadline:  # as in `_snapshot`
                raise WaitTimeoutError(
                    f"waited {self._patience} for {name!r} of replica {replica} on "
                    f"{worker}; last seen: {self._last_seen()}"
                )
            # Pause: the failure of a replica is reported a little later.
            gone = lambda: replica not in self._routing.workers  # noqa: E731
            self._wait_until(cause, gone, FETCH_RETRY_S)
        arrays = join(forms, parts)
        self._stats.received_bytes += sum(a.nbytes for a in arrays.values())
        return arrays

    # ---- agreement after losses

    @override
    def agree(
        self, key: str, published: LastUpdates, gone: LastUpdates, load: Load
    ) -> None:
        # Updates of survivors arrive, but some survivors may lack updates of failed
        # replicas, or updates that arrived unreadable. Survivors compare their received
        # updates in rounds until these are equal. After one round, a survivor requests
        # its missing updates; after the next, if requests did not help, it loads
        # another survivor's state.
        if self._routing.relayed:
            self._wait_for_relay()
        else:
            self._wait_for_survivors(published, gone)
        deadline, acted_at, requests = math.inf, -math.inf, True
        for turn in itertools.count():
            former = gone
            have, gone = self._compare(f"{key}, round {turn}")
            if gone.keys() != former.keys():  # another replica failed: start over
                deadline, acted_at, requests = math.inf, -math.inf, True
                continue
            survivors = list(have.values())
            if all(received == survivors[0] for received in survivors):
                return
            if acted_at > deadline:  # as in `_snapshot`
                raise WaitTimeoutError(
                    f"replicas {sorted(have)} did not agree on their updates within "
                    f"{self._patience}, {turn + 1} rounds; last seen: "
                    f"{self._last_seen()}"
                )
            acted_at = self._now()
            deadline = min(deadline, acted_at + self._patience.seconds)
            if requests:
                self._request_missing(have)
            else:
                self._take_state(have, gone, load)
            requests = not requests

    def _wait_for_relay(self) -> None:
        """Wait until the relay has forwarded all updates that it does not hold back."""
        inbox, number = self._inbox, self._passed_on

        def received() -> Mapping[int, Received]:
            with inbox.changed:
                return inbox.received.by_origin()

        ready = lambda: inbox.passed_on >= number  # noqa: E731
        self._wait_for_others(WaitCause.UPDATES, ready, received)

    def _wait_for_survivors(self, published: LastUpdates, gone: LastUpdates) -> None:
        def behind() -> Mapping[int, Sequence[int]]:
            ignored = {self._replica, *gone, *self._inbox.peers.failed}
            target = {o: s for o, s in published.items() if o not in ignored}
            return self._inbox.received.behind(target)

        self._wait_for_others(WaitCause.UPDATES, lambda: not behind(), behind)

    def _compare(self, key: str) -> tuple[ReceivedByReplica, LastUpdates]:
        """Stop deliveries; return each survivor's updates, and the gone replicas."""
        received = {**self._inbox.hold(), self._replica: (self.published, ())}
        met = self.barrier(key, {"received": received}, BarrierKind.AGREE)
        survivors = sorted(met.payloads.keys() - met.gone.keys())
        return {r: _received(met.payloads[r]) for r in survivors}, met.gone

    def _request_missing(self, have: ReceivedByReplica) -> None:
        """Request this replica's missing updates from replicas that have them."""
        self._inbox.barrier.open(target_of(have))
        filling = self._connection.start(self._endpoint.repairs.request_lacking(have))
        try:
            # Each request has a bound of its own.
            self.wait(WaitCause.REPAIR, filling, None)
            filling.result()
        finally:
            filling.cancel()

    def _take_state(
        self, have: ReceivedByReplica, gone: LastUpdates, load: Load
    ) -> None:
        """Load the state of a donor, if this replica lacks updates of the donor."""
        workers = self._routing.workers
        for donor in donors(have, self._replica):
            if donor not in workers:
                continue
            answer = self._ask_for_snapshot(donor, workers[donor], {})
            if answer["status"] != Answer.OK:
                continue
            values = answer["values"]
            if _received(values) != have[donor]:  # an outdated snapshot
                continue
            arrays = self._fetch(WaitCause.SNAPSHOT, donor, answer["name"])
            if arrays is None:
                continue
            self._inbox.begin(self._received_with(values), values["grid"], gone)
            load({**values, **arrays})
            logger.warning(
                "replica %s loaded the state of replica %s, because it could not "
                "obtain missing updates; replica %s keeps its own residual",
                self._replica,
                donor,
                self._replica,
            )
            return

    def _received_with(self, snapshot: Mapping[str, Any]) -> Mapping[int, Received]:
        """Updates of others that this replica has received with a snapshot."""
        received = _received(snapshot)
        received.pop(self._replica, None)
        return received

    @override
    def stats(self) -> ChannelStats:
        stats, repairs, blobs = (
            super().stats(),
            self._endpoint.repairs,
            self._endpoint.blobs,
        )
        stats.repaired = repairs.repaired - self._repaired
        stats.sent_bytes += blobs.sent_bytes - self._blob_bytes
        self._repaired, self._blob_bytes = repairs.repaired, blobs.sent_bytes
        return stats


def _received(payload: Mapping[str, Any]) -> dict[int, Received]:
    """Received updates in a payload or snapshot, by origin; empty entries left out."""
    return {
        origin: (complete, tuple(beyond))
        for origin, (complete, beyond) in payload["received"].items()
        if complete or beyond
    }
