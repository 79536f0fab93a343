"""Parameter averaging among threads while replicas die at any moment.

Training on a row adds one to a parameter of its own, another one for each replica, so
that the model tells what is in it and from whom. A replica dies by leaving its loop at
some call of its channel, between any two messages; the run then learns of it.
"""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from daskdl import ParameterAveraging
from daskdl.channel.base import Stopped
from daskdl.channel.leasing import PartitionSizes, RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import BarrierKind, ChannelSpec
from daskdl.training.base import ReplicaContext
from daskdl.training.parameter_averaging import ROUND_KEY, RoundDecision, Vote
from tests.support.run_states import TIMEOUTS

EPOCHS = 3
BOUNDS = dataclasses.replace(TIMEOUTS, data=20, silence=10)  # of a test that hangs


class Killed(BaseException):
    """The death of a replica, which nothing in the library may catch."""


class Mortal(LocalChannel):
    """A channel that dies after some calls that others could notice."""

    def __init__(self, run, spec, calls):
        super().__init__(run, spec)
        self._calls = calls
        self.differed = False
        self.meetings = {}  # of each the mean before, and how much each moves the next
        self.votes = []  # of this replica

    def _age(self):
        self._calls -= 1
        if self._calls < 0:
            raise Killed

    def barrier(self, *args, **options):
        self._age()
        gathered = super().barrier(*args, **options)
        self._age()
        if args[0] == ROUND_KEY:
            votes = Vote.by_replica(gathered.payloads)
            self.votes.append(Vote(*args[1]["vote"]))
            self._compare(list(votes.values()))
            self._record_mean(votes, RoundDecision.of(votes, gathered.gone))
        return gathered

    def _record_mean(self, votes, decided):
        moves = {r: w * votes[r].examples for r, w in decided.weights.items()}
        self.meetings[decided.number] = (decided.latest, moves)

    def _compare(self, votes):
        """Check that replicas with the same mean have the same parameters."""
        digests = {vote.mean_round: vote.digest for vote in votes if vote.ended}
        for vote in votes:
            self.differed |= vote.ended and digests[vote.mean_round] != vote.digest

    def lease(self, *args, **options):
        self._age()
        return super().lease(*args, **options)

    def publish_blob(self, *args):
        self._age()
        super().publish_blob(*args)

    def fetch_blob(self, *args):
        self._age()
        fetched = super().fetch_blob(*args)
        self._age()
        return fetched


class Life:
    """One replica, which leases, trains, averages, and records its rows."""

    def __init__(self, run, master, replica, replicas, rows, calls):
        spec = ChannelSpec(
            7, replica, rows * replicas, 1.0, 2**20, 2**20, BOUNDS, in_step=True
        )
        self.channel = Mortal(run, spec, calls)
        self.model = nn.ParameterList(
            [torch.zeros(replicas, rows, dtype=torch.float64)]
        )
        seat = ReplicaContext(self.model, self.channel, replica, list(range(replicas)))
        self.exchange = master.attach(seat)
        self.left = {}  # of each mean, what rounding would have left here
        self._watch(self.exchange.reduce_state)
        self.replica = replica
        self.rows = []  # of each epoch, those it trained on
        self.ends = []  # of each epoch, the model all agreed on

    def _watch(self, feedback):
        propose = feedback.propose

        def noted(number, residual):
            self.left[number] = sum(array.sum() for array in residual.values())
            propose(number, residual)

        feedback.propose = noted

    def residual(self, means):
        """Return the rounding error of this replica at the last of these means."""
        meetings = self.channel.meetings
        there = [n for n in self.left if n in means and meetings[n] == means[n]]
        return self.left[max(there)] if there else 0.0

    def live(self):
        """Return whether the replica reached the end."""
        try:
            self.channel.join()
            for epoch in range(EPOCHS):
                self._epoch(epoch)
        except (Killed, Stopped):
            return False
        finally:
            self.channel.leave()
        return True

    def _epoch(self, epoch):
        trained, finished = [], []
        while True:
            piece = self.channel.lease("train", epoch, finished)
            if piece is None:
                self.exchange.sync(epoch, len(trained), ended=False)
                piece = self.channel.lease("train", epoch, [], wait=True)
            if piece is None:
                break
            for row in (
                r
                for part_range in piece.ranges
                for r in range(part_range.part, part_range.part + 1)
            ):
                self.exchange.before_step(epoch)
                with torch.no_grad():
                    self.model[0][self.replica, row] += 1
                trained.append(row)
                self.exchange.after_step(epoch, 1)
            finished = [{"lease": piece.number, "examples": 1, "loss": 0.0}]
        self.rows.append(trained)
        self.exchange.sync(epoch, len(trained), ended=True)
        self.ends.append(self.model[0].detach().clone())
        digest = self.exchange.agreed().digest
        self.channel.barrier(f"report {epoch}", digest, BarrierKind.REPORT)


def lives_of(master, replicas, deaths, rows, piece):
    """Run replicas; return those that reached the end, and the others."""
    plan = RunSpec(
        run=7,
        replicas=dict.fromkeys(range(replicas), "here"),
        sizes={"train": PartitionSizes((1,) * rows, ("",) * rows, 1, piece)},
        seed=None,
        epochs_before=0,
        synchronous=True,
        relay_bytes=0,
        min_replicas=1,
        timeouts=dataclasses.asdict(BOUNDS),
    )
    run = LocalRun(plan)
    lives = [
        Life(run, master, replica, replicas, rows, deaths.get(replica, 10**9))
        for replica in range(replicas)
    ]
    with ThreadPoolExecutor(replicas) as pool:
        ended = list(pool.map(Life.live, lives))
    assert run.state.stopped is None
    both = {True: [], False: []}
    for life, whole in zip(lives, ended, strict=True):
        both[whole].append(life)
    return both[True], both[False]


def seeds(count):
    """Some seeds; all but the first 20 are slow."""
    return [
        pytest.param(n, marks=pytest.mark.slow) if n >= 20 else n for n in range(count)
    ]


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("compression", [None, "dense8"])
@pytest.mark.parametrize(("most", "rows", "calls"), [(9, 60, 120), (4, 12, 50)])
@pytest.mark.parametrize("seed", seeds(100))
def test_survivors_agree_and_keep_all_they_trained_on(
    seed, most, rows, calls, compression
):
    check_survivors(random.Random(seed), most, rows, calls, compression=compression)


def check_survivors(chance, most, rows, calls, **options):
    """Let random replicas die, and check the models of the others."""
    replicas = chance.randint(2, most)
    doomed = chance.sample(range(replicas), chance.randint(1, replicas - 1))
    deaths = {replica: chance.randint(0, calls) for replica in doomed}
    master = ParameterAveraging(
        frequency=chance.choice([1, 2, 5]),
        fan_out=chance.choice([1, 2, 8]),
        outer=chance.choice([None, with_momentum]),
        **options,
    )
    rows, piece = chance.randint(replicas, rows), chance.randint(1, 3)

    survivors, lost = lives_of(master, replicas, deaths, rows, piece)

    assert {life.replica for life in survivors} >= set(range(replicas)) - set(doomed)
    assert not any(life.channel.differed for life in survivors)
    before = torch.zeros(replicas, rows)
    for epoch in range(EPOCHS):
        after = survivors[0].ends[epoch]
        for life in survivors:
            torch.testing.assert_close(life.ends[epoch], after, rtol=0, atol=0)
            gained = (after - before)[life.replica]
            assert [row for row in life.rows[epoch] if gained[row] <= 0] == []
        before = after
    if master.outer is None:
        check_sums(survivors, lost)


def check_sums(survivors, lost):
    """Check that all training in a mean is in the model, or was lost as a residual."""
    meetings = {}  # a number may be that of two meetings, one of them of the lost
    for life in [*lost, *survivors]:
        meetings.update(life.channel.meetings)
    mean, _ = meetings[max(survivors[0].channel.meetings)]
    means = {}
    while mean:
        means[mean] = meetings[mean]
        mean, _ = meetings[mean]
    left = sum(life.residual(means) for life in lost)

    expected = sum(sum(moves.values()) for _, moves in means.values())
    assert survivors[0].ends[-1].sum().item() + left == pytest.approx(
        expected, rel=1e-9
    )


def test_a_replica_rests_from_its_last_step_before_a_wait_to_the_next_one():
    master = ParameterAveraging(frequency=2)

    [life], _ = lives_of(master, replicas=1, deaths={}, rows=3, piece=3)

    rests = [vote.rests for vote in life.channel.votes if not vote.ended]
    assert rests == [False, True] * EPOCHS  # the third step has its mean at the wait
