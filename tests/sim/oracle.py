"""What must hold, computed beside a run from what replicas publish, receive and lease.

It decodes each frame when it is published and adds up for itself. The real code is only
looked at; nothing here changes what it does.
"""

import bisect
import contextlib
import itertools
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from daskdl import GradientSharing, ParameterAveraging, codec
from daskdl.channel.base import Stopped
from daskdl.channel.inbox import NOTHING, contains, missing
from daskdl.channel.protocol import MESSAGE_BYTES
from daskdl.channel.remote import RemoteChannel
from daskdl.training.gradient_sharing import GradientSharingExchange
from daskdl.training.parameter_averaging import AveragingExchange
from daskdl.training.state import decoded
from daskdl.training.telemetry import reports_of, validation

SIZE = 24  # parameters
UNIT = 2.0**-4  # of the rows and of the first parameters
ROUNDING = 1e-5  # of some hundred moves of float32 parameters of size about 10


def flipped(frame):
    """A frame with one bit changed."""
    damaged = np.frombuffer(frame, np.uint8).copy()
    damaged[-1] ^= 4
    return damaged


def value_of(update):
    """An update as a dense vector, parameter units, exact."""
    value_N = np.zeros(update.size)
    if isinstance(update, codec.DenseUpdate):
        return update.counts_N * update.grid
    positions = np.abs(update.entries_K.astype(np.int64)) - 1
    value_N[positions] = update.quanta_K * float(update.threshold)
    return value_N


def flat(received):
    """Received updates without empty entries, comparable."""
    return {
        origin: (complete, tuple(beyond))
        for origin, (complete, beyond) in sorted(received.items())
        if complete or beyond
    }


class Oracle:
    """Watches a run.

    Attributes:
        checks: How often each thing was checked, by name.
        waiting: What each replica waits for, if it waits.
        damaged: Origin and sequence of each update of which a copy was damaged, or
            has come to a replica in a sum that it could not use.
    """

    def __init__(self, cluster):
        self.resumes = False  # a checkpoint of an earlier fit
        self.checks = Counter()
        self.waiting = {}
        self.damaged = set()
        self._world = cluster.world
        self._members = lambda: cluster.live.state.members
        self.start_N = np.arange(1, SIZE + 1) * UNIT
        self._values = defaultdict(dict)  # by origin and sequence
        self._announced = defaultdict(list)  # steps and updates, by origin
        self.validation = None  # source of the validation data
        self._shown_N = None  # parameters that were validated last
        self._taken = defaultdict(Counter)  # updates that each replica took in
        self._sent_to = defaultdict(dict)  # replicas, by origin and sequence
        self._due_at_barrier = {}  # the same at the last barrier of a relay
        self._barriers = {}  # by key: received updates and digest of the first
        self.agreed = set()  # digests of all parameters that replicas have agreed on
        self._leased = {}

    def check(self, holds, what):
        if not holds:
            self._world.violated(what)

    # ---- updates

    def published(self, origin, sequence, frame):
        what = f"publishes update {sequence}, checksum {zlib.crc32(frame):08x}"
        self._world.note(f"replica-{origin}", what)
        update = codec.decode(frame.tobytes())
        self.check(
            update.stamp[1:3] == (origin, sequence),
            f"replica {origin} published {update.stamp} as {sequence}",
        )
        self._values[origin][sequence] = value_of(update)

    def retracted(self, origin, sequence):
        del self._values[origin][sequence]

    def announced(self, origin, step, published):
        """A replica announces its progress, after so many updates."""
        self._announced[origin].append((step, published))

    def counts(self, replica, peers, received):
        """A replica counts on a step of others, and so on their updates until then."""
        for origin, progress in peers.items():
            if not self._members().is_here(origin):
                continue  # nobody waits for it
            announced = self._announced[origin]
            at = bisect.bisect_left(announced, (progress.step, -1))
            due = announced[at][1] if at < len(announced) else 0
            self.checks["progress with its updates"] += 1
            if received.complete(origin) >= due and not self.damaged:  # nearly always
                continue
            mine = received.by_origin().get(origin, NOTHING)
            lacking = [s for s in range(mine[0] + 1, due + 1) if not contains(mine, s)]
            self.check(
                all((origin, sequence) in self.damaged for sequence in lacking),
                f"replica {replica} counts on step {progress.step} of {origin}, of "
                f"which it lacks the updates {lacking}",
            )

    def took(self, replica, origin, sequence):
        taken = self._taken[replica]
        taken[origin, sequence] += 1
        self.checks["updates taken once"] += 1
        self.check(
            taken[origin, sequence] == 1,
            f"replica {replica} takes update {sequence} of {origin} twice",
        )

    def sent_to(self, origin, sequence, replicas):
        """An update is sent to these replicas, directly or through others."""
        self._sent_to[origin][sequence] = frozenset(replicas)

    def began(self, replica, received):
        """A replica starts from a snapshot, or from the start."""
        if not self._members().is_here(replica):
            return  # it was lost, and does not know it yet
        for origin in self._members().training if received else ():
            for sequence, replicas in self._sent_to[origin].items():
                self.checks["a joining replica gets all"] += 1
                self.check(
                    replica in replicas
                    or (origin, sequence) in self.damaged
                    or contains(received.get(origin, NOTHING), sequence),
                    f"replica {replica} starts without update {sequence} of {origin}, "
                    f"which is not sent to it, from {received}",
                )
        self._taken[replica] = Counter(
            (origin, sequence)
            for origin, (complete, beyond) in received.items()
            for sequence in (*range(1, complete + 1), *beyond)
        )

    def gave_up(self, replica):
        """A replica has not joined, for lack of others, and was not stopped."""
        members = self._members()
        self.check(
            members.started and (members.gone or not members.training),
            f"replica {replica} does not join although others train",
        )

    def lacks(self, replica, have, relayed):
        """Replicas that compare their updates have different ones.

        A relay sends all that it has accepted. A snapshot may have more of its donor,
        which was lost before the relay accepted it.
        """
        lacking = [
            (origin, sequence)
            for mine, theirs in itertools.permutations(have.values(), 2)
            for origin, sequences in missing(mine, theirs).items()
            for sequence in sequences
        ]
        self.check(
            self.damaged
            or not relayed
            or not any(
                sequence in self._sent_to[origin] or self._members().is_here(origin)
                for origin, sequence in lacking
            ),
            f"replica {replica} compares {have}, although a relay has sent it all",
        )

    def held(self):
        """A relay holds updates back; all earlier ones have been sent."""
        self._due_at_barrier = {
            (origin, sequence): replicas
            for origin, sent in self._sent_to.items()
            for sequence, replicas in sent.items()
        }

    def sum_of(self, received):
        """The sum of updates."""
        total_N = 0.0
        for origin, (complete, beyond) in received.items():
            for sequence in (*range(1, complete + 1), *beyond):
                total_N = total_N + self._values[origin][sequence]
        return total_N

    def met(self, key, replica, received, agreed):
        """A replica has passed a barrier."""
        outcome = flat(received), agreed
        first, who = self._barriers.setdefault(key, (outcome, replica))
        self.agreed.add(agreed)
        for (origin, sequence), replicas in self._due_at_barrier.items():
            self.check(
                replica not in replicas
                or replica == origin
                or (origin, sequence) in self.damaged
                or contains(received.get(origin, NOTHING), sequence),
                f"at {key} replica {replica} lacks update {sequence} of {origin}, that "
                "a relay accepted before",
            )
        self.checks["replicas alike at a barrier"] += 1
        self.check(
            outcome[0] == first[0],
            f"at {key} replicas {who} and {replica} have received {first[0]} and "
            f"{outcome[0]}",
        )
        self.check(
            outcome[1] == first[1],
            f"at {key} replicas {who} and {replica} differ: {first[1]}, {outcome[1]}",
        )

    def resumed(self, replica, digest):
        """A replica has read a checkpoint of an earlier fit."""
        self.checks["a checkpoint is what was agreed on"] += 1
        self.check(
            digest in self.agreed,
            f"replica {replica} resumes from {digest}, which replicas never agreed on",
        )

    # ---- leases

    def watch_relay(self, state):
        """The scheduler passes updates on."""
        offer = state.publish

        def publishing(origin, messages, progress, **options):
            messages = list(messages)
            accepted = offer(origin, messages, progress, **options)
            for message in messages[:accepted]:
                self.sent_to(origin, message.sequence, state.outboxes)
            return accepted

        state.publish = publishing

    def watch_leases(self, state):
        leases = state.leases["train"]
        self._begin_epoch()
        take, finish, begin, post = leases.take, leases.finish, leases.open, state.post
        end = leases.end_epoch
        lengths = enumerate(state.spec.sizes["train"].rows)
        self._rows = {(part, row) for part, rows in lengths for row in range(rows)}
        resumed = state.spec.intervals.resumed
        self._due = self._rows  # in this epoch
        if resumed is not None:
            self._due = {row for work in resumed.remaining for row in rows_of(work)}

        def taking(replica, is_near=None):
            lease = take(replica, is_near)
            if lease is not None:
                again = lease.number in self._grants
                self.check(not self._ended, "a lease in an epoch that was ended")
                self._grants[lease.number] = lease
                self._held[lease.number] = replica
                self._leased["again"] += again
                if not again:
                    self._leased["granted"].update(rows_of(lease))
                self.checks["leases"] += 1
            return lease

        def finishing(replica, number):
            released = finish(replica, number)
            if released:
                self._leased["finished"].update(rows_of(self._grants[number]))
                del self._held[number]
            return released

        def beginning(epoch, replicas):
            if epoch > leases.epoch:
                self._begin_epoch()
            begin(epoch, replicas)

        def ending():
            self._ended = True
            end()

        def posting(kind, **fields):
            if kind == "report":  # an epoch ends
                rows = self._check_epoch(leases)
                self._check_reports(
                    reports_of(dict(fields["payloads"]), fields["departed"]), rows
                )
            post(kind, **fields)

        leases.take, leases.finish, leases.open = taking, finishing, beginning
        leases.end_epoch = ending
        state.post = posting

    def _begin_epoch(self):
        self._leased = {"granted": Counter(), "finished": Counter(), "again": 0}
        self._grants = {}
        self._held = {}  # replicas, by lease that is not finished
        self._ended = False  # a replica has ended it early

    def _check_epoch(self, leases):
        """Check the leases of an epoch that is over; return how many rows they had."""
        every, self._due = self._due, self._rows
        name = "epochs ended early" if self._ended else "epochs with each row once"
        self.checks[name] += 1
        busy = [r for r in self._held.values() if self._members().is_here(r)]
        self.check(not busy, f"an epoch is over, and replicas {busy} hold leases")
        for what in ("granted", "finished"):
            counted = self._leased[what]
            twice = sorted(row for row, count in counted.items() if count > 1)
            self.check(not twice, f"rows {what} twice in an epoch: {twice[:5]}")
            strange = sorted(counted.keys() - every)
            self.check(not strange, f"rows {what} that are not due: {strange[:5]}")
            missing = [] if self._ended else sorted(every - counted.keys())
            self.check(not missing, f"rows not {what} in an epoch: {missing[:5]}")
        again = self._leased["again"]
        self.check(
            again == leases.repeated,
            f"{again} leases were given out again, and {leases.repeated} are counted",
        )
        trained_before = len(self._rows) - len(every)  # by a fit that is resumed
        return trained_before + sum(self._leased["finished"].values())

    def showing(self, module):
        """A replica shows its agreed parameters, to validate them."""
        self._shown_N = module.weight.detach().numpy().astype(np.float64)

    def _check_reports(self, reports, rows):
        """Each row counts once in the sums of all replicas, the gone ones included."""
        stopped = any(report.totals.stop for report in reports)
        self.check(
            stopped == self._ended,
            f"an epoch was {'' if self._ended else 'not '}ended early, and the reports "
            f"say {[report.totals.stop for report in reports]}",
        )
        examples = sum(report.totals.examples for report in reports)
        # What a replica has leased when an epoch is ended counts as far as it got.
        self.check(
            examples <= rows if self._ended else examples == rows,
            f"{rows} rows were trained on, and {examples} reported",
        )
        if self.validation is None:
            return
        self.checks["validations with each row once"] += 1
        columns, due = validation(reports), sum(self.validation.lengths)
        scored = sum(report.score.examples for report in reports if report.score)
        self.check(scored == due, f"of {due} validation rows {scored} were scored")
        if self._shown_N is None:  # by a replica without an exchange
            return
        expected = self.validation.mean_output(self._shown_N)
        self.check(
            abs(columns["val_loss"] - expected) <= 1e-4 * (1 + np.abs(expected)),
            f"val_loss is {columns['val_loss']}, and should be {expected}",
        )


def rows_of(lease):
    return itertools.chain.from_iterable(
        ((piece.part, row) for row in range(piece.start, piece.stop))
        for piece in lease.ranges
    )


class WatchedChannel(RemoteChannel):
    """The real channel; the oracle sees what it publishes and takes in."""

    def __init__(self, plugin, spec, oracle):
        super().__init__(plugin, spec)
        self.oracle = oracle
        oracle.announced(spec.replica, 0, 0)
        self.extra_N = 0.0  # in shared beside updates, see `WatchedSharing`
        self.gave_up = False  # it has found nobody to begin from
        self.on_publish = lambda: None
        self.damages = lambda: False  # the next update, before it is kept
        self.forgets = lambda: False  # an update that it subtracts from a sum
        inbox, put, begin = self._inbox, self._inbox.put, self._inbox.begin
        put_sum, add_unreadable = inbox.put_sum, inbox.add_unreadable
        original = self._endpoint.original

        def putting(message, update):
            taken = put(message, update)
            if taken:
                oracle.took(spec.replica, message.origin, message.sequence)
            return taken

        def putting_sum(new, update, nbytes):
            taken = put_sum(new, update, nbytes)
            for origin, sequence, _ in new if taken else ():
                oracle.took(spec.replica, origin, sequence)
                oracle.checks["updates taken in sums"] += 1
            return taken

        def adding_unreadable(message):
            oracle.damaged.add((message.origin, message.sequence))
            add_unreadable(message)

        def kept(origin, sequence):
            if self.forgets():
                oracle.checks["sums that cannot be used"] += 1
                raise LookupError(f"update {sequence} is forgotten")
            return original(origin, sequence)

        def beginning(received, grid, cut):
            oracle.began(spec.replica, received)
            begin(received, grid, cut)

        inbox.put, inbox.put_sum, inbox.begin = putting, putting_sum, beginning
        inbox.add_unreadable = adding_unreadable
        self._endpoint.original = kept

    @override
    def join(self):
        try:
            return super().join()
        except Stopped:
            self.gave_up = self._inbox.stopped is None
            raise

    @override
    def _timed(self, cause, ready, timeout_s):
        waiting = self.oracle.waiting
        waiting[self._replica] = cause
        try:
            return super()._timed(cause, ready, timeout_s)
        finally:
            waiting.pop(self._replica, None)

    def known(self):
        """All updates received or published so far, by origin."""
        received = self._inbox.received.by_origin()
        return {**received, self._replica: (self.published, ())}

    @override
    def _queue(self, item, frame, force):
        oracle, routing = self.oracle, self._routing
        oracle.published(self._replica, item.sequence, frame)
        if self.damages():
            oracle.damaged.add((self._replica, item.sequence))
            frame = flipped(frame)
        accepted = super()._queue(item, frame, force)
        if not accepted:
            oracle.retracted(self._replica, item.sequence)
            return False
        self.on_publish()
        oracle.announced(self._replica, item.step, item.sequence)
        if not routing.relayed:  # else the scheduler sends it
            oracle.sent_to(self._replica, item.sequence, routing.workers)
        queue, most = routing.queue, routing.queue.limit_bytes
        if not routing.relayed:  # one update more is sent before its size is known
            most += item.nbytes + MESSAGE_BYTES
        oracle.check(
            force or len(queue) <= 1 or queue.nbytes <= most,
            f"replica {self._replica} queues {queue.nbytes} bytes, of at most {most}",
        )
        return True

    @override
    def progress(self, step, interval=-1):
        self.oracle.announced(self._replica, step, self.published)
        super().progress(step, interval)

    @override
    def sync(self, step, grid):
        self.oracle.announced(self._replica, step, self.published)
        super().sync(step, grid)

    @override
    def activate(self, step):
        self.oracle.announced(self._replica, step, self.published)
        return super().activate(step)

    @override
    def wait_for_peers(self, step, interval, max_staleness):
        lead = super().wait_for_peers(step, interval, max_staleness)
        inbox = self._inbox
        peers = dict(inbox.peers.progress)
        self.oracle.counts(self._replica, peers, inbox.received)
        return lead

    @override
    def _request_missing(self, have):
        self.oracle.lacks(self._replica, have, self._routing.relayed)
        super()._request_missing(have)

    @override
    def agree(self, key, published, gone, load):
        def loading(snapshot):
            self.oracle.checks["a state is taken over for lack of updates"] += 1
            load(snapshot)
            common = decoded(snapshot).common["exchange"]
            self.extra_N = common["sim_extra_N"].numpy()

        super().agree(key, published, gone, loading)


class SharingOfOne(GradientSharingExchange):
    """Gradient sharing; the oracle compares shared with the sum of the updates."""

    def __init__(self, context, options):
        super().__init__(context, options)
        self._oracle = options.oracle
        self._start_N = self._oracle.start_N
        # What it has trained alone.
        self._channel.extra_N = self._shared() - self._start_N
        flush_ = self._vector.flush_residual_

        def flushing_():
            """The residual of a sole replica goes into shared without an update."""
            before_N = self._shared()
            flushed = flush_()
            self._count(before_N)
            return flushed

        self._vector.flush_residual_ = flushing_
        commit_ = self._compressor.commit_

        def committing_(update):
            """What is sent leaves the residual, but for what momentum keeps."""
            before_N, residual_N = self._shared(), self._residual()
            commit_(update)
            left_N = (1.0 - options.momentum) * (self._shared() - before_N)
            off = np.abs(residual_N - left_N - self._residual()).max()
            self._oracle.check(
                off <= ROUNDING,
                f"a commit of replica {context.replica} loses {off:g} of its residual",
            )

        self._compressor.commit_ = committing_

    @override
    def load_(self, common, per_replica):
        super().load_(common, per_replica)
        if self.context.joins:
            self._channel.extra_N = common["sim_extra_N"].numpy()
        elif self._oracle.resumes:
            self._oracle.resumed(self.context.replica, self._vector.digest())
            self._start_N = self._oracle.start_N = self._shared()
            self._channel.extra_N = np.zeros_like(self._start_N)

    def _count(self, before_N):
        """Count what has come into shared otherwise than by updates."""
        self._channel.extra_N = self._channel.extra_N + self._shared() - before_N

    def _shared(self):
        return self._vector.shared_counts() * float(self._vector.grid)

    def _residual(self):
        (group,) = self._vector.groups
        return self._vector.residual(group, slice(None)).double().numpy()

    @override
    def sync(self, interval, examples, *, ended):
        super().sync(interval, examples, ended=ended)
        if ended:
            self._check(f"sync {interval}")

    def _check(self, key):
        channel, oracle = self._channel, self._oracle
        known = channel.known()
        expected_N = self._start_N + oracle.sum_of(known)
        oracle.checks["shared is the sum of the updates"] += 1
        off = np.abs(self._shared() - expected_N - channel.extra_N).max()
        oracle.check(
            off <= ROUNDING,
            f"at {key} shared of replica {self.context.replica} is off by {off:g}",
        )
        oracle.met(key, self.context.replica, known, self._vector.digest())

    @override
    def showing_agreed(self):
        return shown(super().showing_agreed(), self.context, self._oracle)

    @override
    def state(self):
        state = super().state()
        expected_N = self._start_N + self._oracle.sum_of(self._channel.known())
        extra_N = torch.from_numpy(self._shared() - expected_N)
        return state._replace(common={**state.common, "sim_extra_N": extra_N})


class AveragingOfOne(AveragingExchange):
    """Averaging; the oracle compares the replicas where they meet."""

    def __init__(self, context, options):
        super().__init__(context, options)
        self._oracle = options.oracle

    @override
    def load_(self, common, per_replica):
        super().load_(common, per_replica)
        if self._oracle.resumes and not self.context.joins:
            self._oracle.resumed(self.context.replica, self.agreed().digest)

    @override
    def sync(self, interval, examples, *, ended):
        super().sync(interval, examples, ended=ended)
        if ended:
            replica, digest = self.context.replica, self.agreed().digest
            self._oracle.met(f"sync {interval}", replica, {}, digest)

    @override
    def showing_agreed(self):
        return shown(super().showing_agreed(), self.context, self._oracle)


@contextlib.contextmanager
def shown(showing, context, oracle):
    """Let the oracle see the parameters that a replica validates."""
    with showing:
        oracle.showing(context.module)
        yield


@dataclass(frozen=True)
class WatchedSharing(GradientSharing):
    oracle: Oracle = None

    @override
    def attach(self, context):
        return SharingOfOne(context, self)


@dataclass(frozen=True)
class WatchedAveraging(ParameterAveraging):
    oracle: Oracle = None

    @override
    def attach(self, context):
        return AveragingOfOne(context, self)
