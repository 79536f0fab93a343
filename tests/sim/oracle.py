"""What must hold, computed beside a run from what replicas publish, receive and lease.

It decodes each frame when it is published and adds up for itself. The real code is only
looked at; nothing here changes what it does.
"""

import itertools
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from daskdl import GradientSharing, ParameterAveraging, codec
from daskdl.channel.remote import RemoteChannel
from daskdl.training.gradient_sharing import GradientSharingExchange
from daskdl.training.parameter_averaging import AveragingExchange

SIZE = 24  # parameters
UNIT = 2.0**-4  # of the rows and of the first parameters
ROUNDING = 1e-5  # of some hundred moves of float32 parameters of size about 10


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
    """

    def __init__(self, cluster):
        self.checks = Counter()
        self._world = cluster.world
        self.start_N = np.arange(1, SIZE + 1) * UNIT
        self._values = defaultdict(dict)  # by origin and sequence
        self._taken = defaultdict(Counter)  # updates that each replica took in
        self._barriers = {}  # by key: received updates and digest of the first
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

    def took(self, replica, origin, sequence):
        taken = self._taken[replica]
        taken[origin, sequence] += 1
        self.checks["updates taken once"] += 1
        self.check(
            taken[origin, sequence] == 1,
            f"replica {replica} takes update {sequence} of {origin} twice",
        )

    def began(self, replica, received):
        """A replica starts from a snapshot."""
        self._taken[replica] = Counter(
            (origin, sequence)
            for origin, (complete, beyond) in received.items()
            for sequence in (*range(1, complete + 1), *beyond)
        )

    def sum_of(self, received):
        """The sum of updates."""
        total_N = 0.0
        for origin, (complete, beyond) in received.items():
            for sequence in (*range(1, complete + 1), *beyond):
                total_N = total_N + self._values[origin][sequence]
        return total_N

    def met(self, key, replica, received, agreed):
        """A replica has passed a barrier."""
        found = flat(received), agreed
        first, who = self._barriers.setdefault(key, (found, replica))
        self.checks["replicas alike at a barrier"] += 1
        self.check(
            found[0] == first[0],
            f"at {key} replicas {who} and {replica} have received {first[0]} and "
            f"{found[0]}",
        )
        self.check(
            found[1] == first[1],
            f"at {key} replicas {who} and {replica} differ: {first[1]}, {found[1]}",
        )

    # ---- leases

    def watch_leases(self, state):
        leases = state.leases["train"]
        self._leased = {"granted": Counter(), "finished": Counter(), "again": 0}
        self._grants = {}
        take, finish, begin = leases.take, leases.finish, leases._begin

        def taking(replica, is_near=None):
            lease = take(replica, is_near)
            if lease is not None:
                again = lease.number in self._grants
                self._grants[lease.number] = lease
                self._leased["again"] += again
                if not again:
                    self._leased["granted"].update(rows_of(lease))
                self.checks["leases"] += 1
            return lease

        def finishing(replica, number):
            own = finish(replica, number)
            if own:
                self._leased["finished"].update(rows_of(self._grants[number]))
            return own

        def beginning(order, remaining, replicas):
            self._grants.clear()
            self._leased = {"granted": Counter(), "finished": Counter(), "again": 0}
            begin(order, remaining, replicas)

        leases.take, leases.finish, leases._begin = taking, finishing, beginning
        end_epoch = state._end_epoch

        def ending(key, barrier):
            self._check_epoch(leases)
            end_epoch(key, barrier)

        state._end_epoch = ending

    def _check_epoch(self, leases):
        every = {
            (part, row)
            for part, rows in enumerate(leases._sizes.rows)
            for row in range(rows)
        }
        self.checks["epochs with each row once"] += 1
        for what in ("granted", "finished"):
            counted = self._leased[what]
            twice = sorted(row for row, count in counted.items() if count > 1)
            self.check(not twice, f"rows {what} twice in an epoch: {twice[:5]}")
            missing = sorted(every - counted.keys())
            self.check(not missing, f"rows not {what} in an epoch: {missing[:5]}")
        again = self._leased["again"]
        self.check(
            again == leases.repeated,
            f"{again} leases were given out again, and {leases.repeated} are counted",
        )


def rows_of(lease):
    return itertools.chain.from_iterable(
        ((one.part, row) for row in range(one.start, one.stop)) for one in lease.ranges
    )


class WatchedChannel(RemoteChannel):
    """The real channel; the oracle sees what it publishes and takes in."""

    def __init__(self, plugin, spec, oracle):
        super().__init__(plugin, spec)
        self.oracle = oracle
        self.extra_N = 0.0  # in shared beside updates, see `WatchedSharing`
        inbox, put, begin = self._inbox, self._inbox.put, self._inbox.begin

        def putting(message, update):
            taken = put(message, update)
            if taken:
                oracle.took(spec.replica, message.origin, message.sequence)
            return taken

        def beginning(received, grid):
            oracle.began(spec.replica, received)
            begin(received, grid)

        inbox.put, inbox.begin = putting, beginning

    def known(self):
        """All updates received or published so far, by origin."""
        received = self._inbox.received.by_origin()
        return {**received, self._replica: (self.published, ())}

    @override
    def _queue(self, item, frame, force):
        self.oracle.published(self._replica, item.sequence, frame)
        accepted = super()._queue(item, frame, force)
        if not accepted:
            self.oracle.retracted(self._replica, item.sequence)
        return accepted

    @override
    def agree(self, key, published, gone, load):
        def loading(snapshot):
            load(snapshot)
            self.extra_N = np.array(snapshot["sim_extra_N"])

        super().agree(key, published, gone, loading)


class SharingOfOne(GradientSharingExchange):
    """Gradient sharing; the oracle compares shared with the sum of the updates."""

    def __init__(self, context, options):
        super().__init__(context, options)
        self._oracle = options.oracle
        self._start_N = self._oracle.start_N
        if context.snapshot is not None:
            self._channel.extra_N = np.array(context.snapshot["sim_extra_N"])

    def _shared(self):
        return self._vector.shared_counts() * float(self._vector.grid)

    @override
    def sync(self, interval, examples, *, ended):
        super().sync(interval, examples, ended=ended)
        if ended:
            self._check(f"sync {interval}")

    def _check(self, key):
        channel, oracle = self._channel, self._oracle
        known = channel.known()
        expected_N = self._start_N + oracle.sum_of(known)
        if self._sole:  # its residual went into shared without an update
            channel.extra_N = self._shared() - expected_N
        oracle.checks["shared is the sum of the updates"] += 1
        off = np.abs(self._shared() - expected_N - channel.extra_N).max()
        oracle.check(
            off <= ROUNDING,
            f"at {key} shared of replica {self.context.replica} is off by {off:g}",
        )
        oracle.met(key, self.context.replica, known, self._vector.digest())

    @override
    def snapshot(self):
        made = super().snapshot()
        channel = self._channel
        expected_N = self._start_N + self._oracle.sum_of(channel.known())
        extra_N = made["counts_N"] * float(made["grid"]) - expected_N
        return {**made, "sim_extra_N": extra_N}


class AveragingOfOne(AveragingExchange):
    """Averaging; the oracle compares the replicas where they meet."""

    def __init__(self, context, options):
        super().__init__(context, options)
        self._oracle = options.oracle

    @override
    def sync(self, interval, examples, *, ended):
        super().sync(interval, examples, ended=ended)
        if ended:
            replica, digest = self.context.replica, self.agreed().digest
            self._oracle.met(f"sync {interval}", replica, {}, digest)


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
