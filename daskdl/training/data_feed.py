"""Batches of one replica: takes leases, loads parts ahead, and cuts batches.

Handles failed and hanging loads, parts that were lost with their worker, and unreadable
files. :class:`Feed` is the entry point.
"""

import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
)
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from daskdl.channel.base import Channel
from daskdl.channel.leasing import TO_ITS_END, Lease, Range, SyncPoint
from daskdl.channel.protocol import FinishedLease, WaitCause, Work
from daskdl.channel.remote import RemoteChannel
from daskdl.config import Timeouts
from daskdl.data import batching
from daskdl.data.batching import (
    Batch,
    Chunk,
    Rows,
    all_rows,
    batches,
    with_lone_rows_joined,
)
from daskdl.data.distribute import ASK_S, Fetcher
from daskdl.data.source import Pieces, Source
from daskdl.data.unreadable import (
    UNREADABLE,
    blames_data,
    is_left_out,
    join_readable,
    load_each,
)
from daskdl.errors import (
    MAX_CHARACTERS,
    DataError,
    LostPieceError,
    WaitTimeoutError,
    count_of,
    shown,
)
from daskdl.evaluation.evaluate import Sums, add_sums
from daskdl.serialization import Packed
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.optimizer_step import BatchGroup, batch_norms
from daskdl.training.telemetry import EpochTotals
from daskdl.util import settle

T = TypeVar("T")
Job = tuple["Future[Any]", Callable[[], Any]]


class Loader:
    """A pool of daemon threads, started when needed, that starts jobs in order.

    Unlike a thread of Python's own pool, one that hangs in the user's code does not
    keep the process from exiting.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job as soon as a thread is free, with the caller's context variables.

        The user's code then finds the same Dask worker as in the calling thread.
        """
        future: Future[T] = Future()
        if len(self._threads) < self._most:
            self._threads.append(
                threading.Thread(target=self._work, name=self._name, daemon=True)
            )
            self._threads[-1].start()
        self._jobs.put((future, partial(copy_context().run, job)))
        return future

    def close(self) -> None:
        """Cancel the jobs that have not started; running jobs finish normally."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._jobs.get_nowait():
                waiting[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            if future.set_running_or_notify_cancel():
                settle(future, job)
            del future, job, taken  # frees the loaded part before the next job


PhasePart = tuple[str, int]  # phase and part


class _Loading(NamedTuple):
    """A part that is being loaded."""

    rows: Future[Rows]
    unwanted: threading.Event  # set when the part is no longer needed


class PartStore(ABC):
    """The data of a run for one replica, used only by its training thread."""

    def __init__(self, channel: Channel, timeouts: Timeouts, threads: int) -> None:
        self._channel = channel
        self._timeouts = timeouts
        self._loader = Loader(threads, "daskdl-loader")
        self._begun: dict[PhasePart, _Loading] = {}

    def begin(self, phase: str, part: int, key: str) -> None:
        """Start loading a part, unless loading has started; do not wait."""
        if (phase, part) not in self._begun:
            unwanted = threading.Event()
            job = self._job(phase, part, key, unwanted)
            self._begun[phase, part] = _Loading(self._loader.submit(job), unwanted)

    def forget(self, phase: str, but: Collection[int]) -> None:
        """Cancel the loading of parts that are no longer needed."""
        for which in [w for w in self._begun if w[0] == phase and w[1] not in but]:
            self._drop(which)

    def _drop(self, which: PhasePart) -> None:
        loading = self._begun.pop(which, None)
        if loading is not None:
            loading.unwanted.set()
            loading.rows.cancel()

    def rows(self, phase: str, part: int, key: str) -> Rows:
        """Wait for a part, loaded by another thread; arguments as in `begin`."""
        while True:
            self.begin(phase, part, key)
            try:
                return self._wait(phase, part, key, self._begun[phase, part].rows)
            except LostPieceError:
                self.forget(phase, ())  # other parts may be on the same worker
                key = self._key_now(phase, part, key)
            finally:
                self._drop((phase, part))
                self._channel.check()  # a closing worker causes arbitrary Dask errors

    def stream(self, phase: str, part: int, size: int, ahead: int) -> Iterator[Rows]:
        """Yield a sequential part in chunks, while `ahead` more are read."""
        loader = Loader(1, "daskdl-stream")  # one thread keeps the order
        source = self.source(phase)
        assert source is not None, "every worker has the source of a stream"
        chunks = source.stream(part, size)
        pending = deque(loader.submit(lambda: next(chunks, None)) for _ in range(ahead))
        try:
            while True:
                pending.append(loader.submit(lambda: next(chunks, None)))
                chunk = self._wait(phase, part, "", pending.popleft())
                if chunk is None:
                    return
                yield chunk
                del chunk  # frees the chunk before the wait for the next one
        finally:
            loader.close()

    def pieces(
        self, phase: str, part: int, key: str, skips: bool
    ) -> list[tuple[str, Rows]]:
        """Read the files or smaller parts of a part one by one.

        Returns:
            Names and rows; empty if the part can only be read as a whole.
        """
        job = self._loader.submit(
            lambda: list(load_each(self._pieces(phase, part, key), skips))
        )
        return self._wait(phase, part, "", job)

    def _pieces(self, phase: str, part: int, key: str) -> Pieces:
        """Return `Source.pieces`; runs in a loading thread."""
        source = self.source(phase)
        return () if source is None else source.pieces(part)

    def name(self, phase: str, part: int) -> str:
        """Return the name of a part for messages, with its file if known."""
        name = self._name(phase, part)
        if name.startswith(("part ", "parts ")):  # the user's numbers
            return f"{name} of the {phase} data"
        return f"part {part} of the {phase} data ({name})"

    def _name(self, phase: str, part: int) -> str:
        """Return `Source.name`, or the part's number if the source is elsewhere."""
        source = self.source(phase)
        return f"part {part}" if source is None else source.name(part)

    def close(self) -> None:
        """Cancel all loading."""
        for which in list(self._begun):
            self._drop(which)
        self._loader.close()

    @abstractmethod
    def source(self, phase: str) -> Source | None:
        """Return the source of a phase, or None if this process lacks it."""

    @abstractmethod
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        """Return the function that loads a part in another thread."""

    def _key_now(self, phase: str, part: int, key: str) -> str:
        """Return the key of a part, which changes after the part was lost."""
        return key

    def _wait(self, phase: str, part: int, key: str, coming: "Future[T]") -> T:
        bound = self._timeouts.bound("data")
        look_s = min(self._timeouts.silence / 4, bound.seconds)
        # The fetcher has the same bound; its error then reports where the result is.
        most_s = bound.seconds + (ASK_S if key else 0.0)
        for waited in itertools.count(1):
            if self._channel.wait(WaitCause.DATA, coming, look_s):
                return coming.result()
            if waited * look_s >= most_s:
                raise WaitTimeoutError(
                    f"{self.name(phase, part)} was not loaded within {bound}"
                )
            if key and not coming.running():  # queued behind parts that may hang
                self.forget(phase, (part,))
            if self._key_now(phase, part, key) != key:
                raise LostPieceError(f"part {part} is on a worker that hangs")
        raise AssertionError


class LocalStore(PartStore):
    """Slices, loads or computes parts in this process.

    Nothing is cached: a computed part is computed again in each epoch.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        channel: Channel,
        timeouts: Timeouts,
        threads: int,
    ) -> None:
        super().__init__(channel, timeouts, threads)
        self._sources = sources

    @override
    def source(self, phase: str) -> Source:
        return self._sources[phase]

    @override
    def begin(self, phase: str, part: int, key: str) -> None:
        if not self._sources[phase].in_memory:  # rows in memory are only sliced
            super().begin(phase, part, key)

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        if self._sources[phase].in_memory:
            return self._sources[phase].load_counted(part)
        return super().rows(phase, part, key)

    @override
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        return lambda: self._sources[phase].load_counted(part)


class WorkerStore(PartStore):
    """Loads parts on this worker, or fetches them as results of Dask tasks.

    Must be created in the replica's task.
    """

    def __init__(
        self,
        sources: Mapping[str, Packed[Source]],
        channel: RemoteChannel,
        timeouts: Timeouts,
        threads: int,
    ) -> None:
        super().__init__(channel, timeouts, threads)
        self._remote = channel
        self._sources = sources
        self._fetcher = Fetcher(timeouts.data)
        self._keys: dict[PhasePart, str] = {}  # last requested key of each part

    @override
    def source(self, phase: str) -> Source | None:
        packed = self._sources.get(phase)
        return None if packed is None else packed.shared()

    @override
    def rows(self, phase: str, part: int, key: str) -> Rows:
        held = self._fetcher.here(key) if key else None
        if held is not None and not isinstance(held, Packed):
            self._drop((phase, part))  # loading may have started
            x, y = held
            return x, y
        return super().rows(phase, part, key)

    @override
    def _job(
        self, phase: str, part: int, key: str, unwanted: threading.Event
    ) -> Callable[[], Rows]:
        if not key:
            return lambda: self._sources[phase].shared().load_counted(part)
        self._keys[phase, part] = key
        return lambda: self._fetcher.rows(key, unwanted.is_set)

    @override
    def _name(self, phase: str, part: int) -> str:
        key = self._keys.get((phase, part), "")
        return self._fetcher.names.get(key) or super()._name(phase, part)

    @override
    def _pieces(self, phase: str, part: int, key: str) -> Pieces:
        if not key:
            return super()._pieces(phase, part, key)
        return self._fetcher.pieces(key, lambda: self._channel.closing)

    @override
    def _key_now(self, phase: str, part: int, key: str) -> str:
        return key and self._remote.missing(phase, part, key)


class _ReadLease(NamedTuple):
    """A lease whose rows have all been passed to batches."""

    number: int
    rows: int  # passed to batches
    end: int  # rows passed to batches with and before it
    skipped: int  # rows left out with and before it
    reason: str  # see `EpochTotals`


class Feed:
    """Batches of one phase of one epoch, until no replica has rows left.

    Batches are grouped by optimizer step. A lease is returned after all its rows have
    been trained on; until then, another replica can take it over if this one fails.
    The replica returns its results for these rows with the lease, so that a later
    failure loses nothing: the totals with each request in training, and the scores with
    `hand_over` in validation. A replica that finishes early waits for the others, and
    takes over the leases of failed replicas.

    Args:
        spec: Options for reading the data.
        phase: ``"train"`` or ``"validation"``.
        epoch: The epoch of the fit, from 0.
        channel: Hands out the leases.
        store: Loads the parts.
        totals: Receives the numbers of skipped examples. The caller adds a group's sums
            before it requests the next group. With a reason to stop the fit, the epoch
            ends after the current group, for all replicas: they finish their leases,
            and lease no other rows.
        take_logs: Returns what steps have logged since its last call.
        check_rows: Gets the rows of a part and its name for messages; raises
            `DataError` if the model cannot run on them. None: no check.

    Attributes:
        rows: Rows of the last group, after `transform`.
        sync_point: Remaining work of the epoch, if `groups` stopped at the end of a
            sync interval; else None. After the sync, call `groups` again.
    """

    rows: int
    sync_point: SyncPoint | None

    def __init__(
        self,
        spec: ReplicaSpec,
        phase: str,
        epoch: int,
        channel: Channel,
        store: PartStore,
        totals: EpochTotals,
        take_logs: Callable[[], Sums] = dict,
        check_rows: Callable[[Rows, str], None] | None = None,
    ) -> None:
        self._spec = spec
        self._phase = phase
        self._epoch = epoch
        self._channel = channel
        self._store = store
        self.totals = totals
        self._take_logs = take_logs
        self._check_rows = check_rows
        self._trains = phase == "train"
        self._drop_last = spec.drop_last and self._trains
        joins = spec.read.batch_size > 1 and self._trains and not self._drop_last
        self._joins = joins and bool(batch_norms(spec.model))
        self._seed: tuple[int, ...] | None = None
        if spec.shuffle and self._trains:
            self._seed = (spec.seed, spec.epochs_before + epoch)
        self._passed = self._done = 0  # rows passed to batches, and rows trained on
        self._leases: deque[_ReadLease] = deque()
        self._finished: list[FinishedLease] = []  # not returned yet
        self._work = replace(totals)  # over all finished leases
        self._next: Lease | None = None  # after `hand_over`
        # The lease that is being cut into batches, and `_passed` before it.
        self._leasing: tuple[Lease, int] | None = None
        self._held: tuple[int, Rows, np.ndarray | None] | None = None  # the last part
        self._bad: set[int] = set()
        self._partial: set[int] = set()  # parts with some unreadable files
        self.rows = 0
        self.sync_point = None

    # ---- batches

    def batches(self) -> Iterator[Batch]:
        """Yield batches until no rows are free; then `hand_over` must follow.

        A batch counts as used when the next one is requested.
        """
        lease, self._next = self._next or self._lease(wait=False), None
        for group in self._groups(lease, size=1):
            yield from group

    def hand_over(self, work: Work) -> bool:
        """Return all leases with their results, and wait for the other replicas.

        Args:
            work: Results over all batches of this feed so far.

        Returns:
            Whether there are more `batches`, which a failed replica had leased.
        """
        self._next = self._lease(wait=True, work=work)
        return self._next is not None

    def groups(
        self, before_wait: Callable[[], None], size: int
    ) -> Iterator[BatchGroup]:
        """Yield groups; a group counts as trained on when the next one is requested.

        Args:
            before_wait: Called between two groups, before waiting for other replicas.
            size: Batches of a group. The last group before a wait may have fewer.
        """
        self.sync_point = None
        lease = self._lease(wait=False)
        while True:
            yield from self._groups(lease, size)
            before_wait()
            lease = self._lease(wait=True)
            if lease is None:
                return

    def _groups(self, lease: Lease | None, size: int) -> Iterator[BatchGroup]:
        """Yield the groups of this lease and the next ones, until none is free."""
        transform = self._spec.read.transform
        batches_of_leases = self._batches(lease)
        while group := list(itertools.islice(batches_of_leases, size)):
            read = self.rows = sum(batching.length(x) for x, _ in group)
            if transform is not None:
                group = [transform(batch) for batch in group]
                self.rows = sum(batching.length(x) for x, _ in group)
            before = replace(self.totals)
            yield group
            self._done += read
            self._finish(before, read)
            if self.totals.stop:
                self._end_leases()
                batches_of_leases.close()
                self._store.forget(self._phase, ())
                return

    def _finish(self, before: EpochTotals, read: int) -> None:
        """Finish the leases that end in the last `read` rows that were trained on.

        The sums of a group count in proportion for a lease that ends within it.

        Args:
            before: Totals before these rows.
            read: Rows, before `transform`.
        """
        now = self.totals
        while self._leases and self._leases[0].end <= self._done:
            number, rows, end, skipped, reason = self._leases.popleft()
            self._finished.append({"lease": number, "examples": rows, "loss": now.loss})
            beyond = (self._done - end) / max(read, 1)
            self._work = replace(
                now,
                loss_sum=now.loss_sum - beyond * (now.loss_sum - before.loss_sum),
                examples=now.examples
                - round(beyond * (now.examples - before.examples)),
                excess=now.excess - beyond * (now.excess - before.excess),
                skipped=skipped,
                reason=reason,
            )

    def _end_leases(self) -> None:
        """Finish all leases as they are; the next request ends the epoch."""
        if self._leasing is not None:
            lease, before = self._leasing
            self._note_read(lease, self._done - before)
        self._leases = deque(
            lease._replace(
                rows=max(min(lease.rows, self._done - lease.end + lease.rows), 0),
                end=self._done,
            )
            for lease in self._leases
        )

    def _batches(self, lease: Lease | None) -> Generator[Batch, None, None]:
        size = self._spec.read.batch_size
        cut = batches(self._leased(lease), size)
        if self._joins:
            cut = with_lone_rows_joined(cut)
        for batch in cut:
            if self._drop_last and (rows := batching.length(batch[0])) < size:
                self._done += rows
                self.totals.dropped += rows
            else:
                yield batch

    def _lease(self, *, wait: bool, work: Work | None = None) -> Lease | None:
        self._finish(self.totals, 0)  # leases without rows, or of dropped rows
        finished: list[FinishedLease] = []
        if self._trains:
            self.totals.logs = add_sums(self.totals.logs, self._take_logs())
            logs, stop = self.totals.logs, self.totals.stop
            work = replace(self._work, logs=logs, stop=stop).to_wire()
        if work is not None:
            finished, self._finished = self._finished, []
        leased = self._channel.lease(
            self._phase, self._epoch, finished, wait=wait, work=work
        )
        if isinstance(leased, SyncPoint):
            self.sync_point = leased
            return None
        return leased

    def _leased(self, lease: Lease | None) -> Iterator[Chunk]:
        """Yield the rows of this lease and the next ones."""
        while lease is not None:
            before = self._passed
            self._leasing = lease, before
            for chunk in self.chunks(lease):
                self._passed += chunk.length
                yield chunk
                del chunk  # see `chunks`
            self._note_read(lease, self._passed - before)
            self._leasing = None
            lease = self._lease(wait=False)

    def _note_read(self, lease: Lease, rows: int) -> None:
        skipped, reason = self.totals.skipped, self.totals.reason
        self._leases.append(
            _ReadLease(lease.number, rows, self._passed, skipped, reason)
        )

    # ---- parts

    def chunks(self, lease: Lease) -> Iterator[Chunk]:
        """Yield the rows of a lease in training order."""
        for i, piece in enumerate(lease.ranges):
            if piece.stop == TO_ITS_END:
                yield from self._stream(piece.part)
                continue
            if self._held is not None and self._held[0] != piece.part:
                self._held = None  # frees the part before the next is loaded
            self._look_ahead(lease, i)
            chunk = self._read(piece, lease.keys)
            if chunk is not None:
                yield chunk
            del chunk  # frees the part before the wait for the next one

    def _look_ahead(self, lease: Lease, now: int) -> None:
        """Start loading the next parts, and cancel the loading of all others."""
        wanted = {lease.ranges[now].part: None}  # in order
        if self._spec.prefetch > 0:
            rows, enough = 0, self._spec.prefetch * self._spec.read.batch_size
            at = now + 1  # no slice: a lease may have thousands of parts
            while at < len(lease.ranges) and (rows < enough or len(wanted) == 1):
                part, start, stop = lease.ranges[at]
                rows += max(stop - start, 1)  # 1 for a part of unknown length
                wanted[part] = None
                at += 1
            if len(wanted) == 1 and lease.ahead is not None:
                wanted[lease.ahead] = None
        self._store.forget(self._phase, wanted)
        for part in wanted:
            new = self._held is None or part != self._held[0]
            if new and part not in self._bad:
                self._store.begin(self._phase, part, lease.keys[part])

    def _read(self, piece: Range, keys: Mapping[int, str]) -> Chunk | None:
        part, start, stop = piece
        if self._held is None and part not in self._bad:
            self._hold(part, keys[part])
        if self._held is None:
            self.totals.skipped += stop - start
            return None
        _, rows, order = self._held
        count = batching.length(rows[0])
        if part in self._partial:
            readable = max(min(stop, count), start)
            self.totals.skipped += stop - readable
            stop = readable
        elif count < stop:
            raise DataError(
                f"{self._store.name(self._phase, part)} has {count_of(count, 'row')}, "
                f"but had at least {stop} before; a part must be the same each time it "
                "is loaded or computed: persist() it, or pack it"
            )
        within = slice(start, stop)
        return Chunk(rows, within if order is None else order[within])

    def _hold(self, part: int, key: str) -> None:
        with self._left_out_if_bad(part):
            try:
                rows = self._store.rows(self._phase, part, key)
                self._check(rows, self._store.name(self._phase, part))
            except UNREADABLE as error:
                readable = self._readable_rows(part, key, error)
                if readable is None:
                    raise
                rows = readable
            order = None
            if self._seed is not None:  # equal on all replicas
                rng = np.random.default_rng([*self._seed, part])
                order = rng.permutation(batching.length(rows[0]))
            self._held = part, rows, order

    def _readable_rows(self, part: int, key: str, error: BaseException) -> Rows | None:
        """Return the rows of a part's readable files, or None.

        Unless bad data may be skipped, raise the error of the first bad file.
        """
        if not blames_data(error):
            return None
        skips = self._spec.read.skips
        files = self._store.pieces(self._phase, part, key, skips)
        if not skips:
            for name, file_rows in files:
                self._check(file_rows, name)
            return None
        rows, _ = join_readable(iter(files), self._check)
        if rows is not None:
            self._note_skipped(error)
            self._partial.add(part)
        return rows

    def _note_skipped(self, error: BaseException) -> None:
        """Keep the first reason for skipped examples, for the history."""
        self.totals.reason = self.totals.reason or shown(str(error), MAX_CHARACTERS)

    @contextlib.contextmanager
    def _left_out_if_bad(self, part: int) -> Iterator[None]:
        """Name the part in an error; suppress the error if bad parts are skipped."""
        try:
            yield
        except UNREADABLE as error:
            name = self._store.name(self._phase, part)
            if not is_left_out(error, name, self._spec.read.skips):
                raise
            self._note_skipped(error)
            self._bad.add(part)

    def _check(self, rows: Rows, name: str) -> None:
        if self._spec.labels is not None:
            self._spec.labels.check(rows[1], name)
        if self._check_rows is not None:
            self._check_rows(rows, name)

    def _stream(self, part: int) -> Iterator[Chunk]:
        size, ahead = self._spec.read.batch_size, self._spec.prefetch
        with self._left_out_if_bad(part):
            for rows in self._store.stream(self._phase, part, size, ahead):
                self._check(rows, self._store.name(self._phase, part))
                yield all_rows(rows)
                del rows
