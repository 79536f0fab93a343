"""What one replica sends, and when, and what becomes of what there is no room for."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import codec
from daskdl.channel.base import Channel, DrainResult
from daskdl.codec import dense8
from daskdl.residuals import KeepResidual
from daskdl.thresholds import (
    HEADER_BYTES,
    Drained,
    FixedThreshold,
    Link,
    LinkAlgorithm,
    Sent,
)
from daskdl.training.base import CompressionState, ReplicaContext, SoloExchange
from daskdl.training.gradient_sharing import GradientSharing

DENSE = codec.DenseUpdate
SPARSE = codec.SparseUpdate


class Published(NamedTuple):
    update: codec.Update
    part: bool  # others of its step follow


class Room(Channel):
    """A channel of one replica of two, that takes as much as it is told to."""

    closing = False

    def __init__(self):
        self.published_ = []
        self.room = 10**9  # updates that are taken
        self.filling = False  # there is room until it is tried
        self.there = [1]  # the other replicas
        self.waited = []  # updates published whenever it was waited for room
        self.drained_ = Drained()  # what it says has left
        self.said = []  # steps that the others were told of
        self.slowest = 10**9  # steps that the slowest of the others has said

    def peers(self):
        return self.there

    def has_room(self, *, wait=False):
        if wait:
            self.waited.append(len(self.published_))
        return self.room > 0 or self.filling

    @property
    def published(self):
        return len(self.published_)

    def publish(self, encode, step, *, partial=False, force=False):
        frame = encode(codec.Stamp(1, 0, self.published + 1, step))
        if self.room <= 0:
            return False
        self.room -= 1
        self.published_.append(Published(codec.decode(frame), partial))
        return True

    def progress(self, step, interval=-1):
        self.said.append(step)

    def drain(self, up_to_step=None):
        return DrainResult([], None)

    def link_stats(self):
        drained, self.drained_ = self.drained_, Drained()
        return drained

    def wait_for_peers(self, step, interval, max_staleness):
        return max(0, step - self.slowest)

    run = activate = join = serve_snapshot = sync = lease = wait = barrier = None
    agree = fail = leave = set_idle = publish_blob = drop_blobs = fetch_blob = None
    stats = check = None


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("a", "b", "c"):
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))


QUANTUM = FixedThreshold(2.0**-4)
MAPPING = dict.fromkeys(("a", "b", "c"), QUANTUM)


class Case:
    """A replica that moves every parameter by some quanta in each step."""

    def __init__(self, threshold=None, last=None, snapshot=None, **options):
        self.channel = Room()
        self.module = Three()
        options = {
            "residual": KeepResidual(),
            "max_staleness": None,
            "update_scale": "sum",
            **options,
        }
        master = GradientSharing(threshold or QUANTUM, **options)
        seat = ReplicaContext(self.module, self.channel, 0, [0, 1], last, snapshot)
        self.exchange = master.attach(seat)

    def step(self, amount=0.25, names=("a", "b", "c")):
        """Make one, and return what was published."""
        before = self.channel.published
        self.exchange.before_step(0)
        with torch.no_grad():
            for name in names:
                getattr(self.module, name).add_(amount)
        self.exchange.after_step(0, 1)
        return self.channel.published_[before:]

    def positions(self, published):
        return [abs(int(p.update.entries_K[0])) - 1 for p in published]


def kinds(case, steps):
    return [[type(p.update) for p in case.step()] for _ in range(steps)]


@pytest.mark.parametrize(
    ("update_scale", "expected"),
    [("mean", [1 / 2, 1 / 3, 1]), ("sum", [1, 1, 1]), (0.7, [0.7, 0.7, 0.7])],
)
@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_the_scale_follows_those_that_train(apply, update_scale, expected):
    case, scales = Case(apply=apply, update_scale=update_scale), []
    for others in ([1], [1, 2], []):
        case.channel.there = others
        case.step()
        weight = case.exchange._vector.lead
        scales.append((case.exchange.learning_rate_scale, 1 / weight))

    # Strict: the rate is scaled. Eager: what is sent of steps at the whole rate.
    pairs = [(e, 1) if apply == "strict" else (1, e) for e in expected]
    assert scales == [pytest.approx(pair) for pair in pairs]


class TestWarmUp:
    def test_the_first_steps_are_sent_whole(self):
        case = Case(warmup_steps=3)

        assert kinds(case, 5) == [[DENSE]] * 3 + [[SPARSE]] * 2

    def test_without_one_nothing_is(self):
        assert kinds(Case(), 2) == [[SPARSE]] * 2

    @pytest.mark.parametrize(
        ("warmup", "dense"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
    )
    def test_what_the_first_steps_made_is_whether_or_not_an_exchange_is_among_them(
        self, warmup, dense
    ):
        case = Case(warmup_steps=warmup, exchange_every=4)

        sent = [kind for step in kinds(case, 16) for kind in step]

        assert sent == [DENSE] * dense + [SPARSE] * (4 - dense)

    def test_what_there_was_no_room_for_is_sent_whole_later(self):
        case = Case(warmup_steps=1)

        case.channel.room = 0
        assert kinds(case, 2) == [[], []]
        case.channel.room = 9

        assert kinds(case, 2) == [[DENSE], [SPARSE]]
        moved = case.channel.published_[0].update
        assert moved.counts_N * moved.grid == pytest.approx(0.75, abs=0.003)

    def test_what_the_rest_of_an_epoch_sends_is_whole_too(self):
        case = Case(warmup_steps=2, exchange_every=4)
        case.step()

        case.exchange.sync(0, 1, ended=False)

        assert [type(p.update) for p in case.channel.published_] == [DENSE]

    def test_it_goes_on_where_an_earlier_fit_ended(self):
        case = Case(
            warmup_steps=5, last=CompressionState({"*": Sent(0.25, 0.5)}, steps=3)
        )

        assert kinds(case, 3) == [[DENSE]] * 2 + [[SPARSE]]
        assert case.exchange.result().compression.steps == 6

    def test_a_newcomer_learns_how_far_it_is(self):
        donor = Case(warmup_steps=6, last=CompressionState({}, steps=2))
        for _ in range(3):
            donor.step()

        # It was told of an earlier fit, or of none.
        newcomer = Case(warmup_steps=6, snapshot=donor.exchange.snapshot())

        assert kinds(newcomer, 2) == [[DENSE], [SPARSE]]

    def test_one_that_was_alone_has_not_warmed_up_for_nothing(self):
        channel, module = Room(), Three()
        master = GradientSharing(QUANTUM, warmup_steps=4)
        context = ReplicaContext(module, channel, 0, [0], CompressionState({}, 1))
        alone = SoloExchange(context, master.solo_scale)
        alone.after_step(0, 1)
        alone.after_step(0, 1)

        shared = master.attach(alone.shared_context())

        assert channel.published_ == []
        assert alone.result().compression == CompressionState({}, 3)
        assert shared.snapshot()["made"] == shared.result().compression.steps == 3

    def test_all_of_it_counts_as_sent(self):
        case = Case(warmup_steps=1)
        case.step(amount=0.01)
        case.step(amount=0.01)

        statistics = case.exchange.stats()

        assert (statistics.exchanges, statistics.density_sum) == (2, 1.0)
        assert statistics.threshold == QUANTUM.value

    def test_where_nothing_moved_nothing_is_sent(self):
        case = Case(warmup_steps=2)

        assert case.step(amount=0.0) == []
        assert case.exchange.stats().exchanges == 1


class TestLayers:
    def test_each_pattern_has_a_frame_of_its_own_of_the_same_step(self):
        case = Case(MAPPING)

        published = case.step()

        assert [p.update.stamp[1:] for p in published] == [
            (0, 1, 1),
            (0, 2, 1),
            (0, 3, 1),
        ]
        assert [p.part for p in published] == [True, True, False]
        assert case.positions(published) == [0, 4, 8]

    def test_one_that_has_nothing_to_send_sends_nothing(self):
        case = Case(MAPPING)

        published = case.step(names=("a", "b"))

        assert [p.part for p in published] == [True, False]
        stats = case.exchange.stats()
        assert (stats.exchanges, stats.density_sum) == (1, 8 / 12)

    def test_what_there_was_no_room_for_is_not_taken_and_comes_first_next_time(self):
        case = Case(MAPPING)
        order = []

        for _ in range(4):
            case.channel.room = 1
            order += case.positions(case.step())

        assert order == [0, 4, 8, 0]
        shared = case.exchange.snapshot()
        quanta = shared["counts_N"] * shared["grid"] / QUANTUM.value
        assert quanta.tolist() == [2.0] * 4 + [1.0] * 8

    def test_only_what_was_taken_counts(self):
        case = Case(MAPPING)
        case.channel.room = 2
        case.step()
        case.channel.room = 0
        case.step()

        statistics = case.exchange.stats()

        assert (statistics.exchanges, statistics.density_sum) == (1, 8 / 12)

    def test_an_exchange_of_which_nothing_was_taken_is_none(self):
        case = Case(MAPPING)
        case.channel.room, case.channel.filling = 0, True

        assert case.step(names=("a", "b")) == []
        assert case.exchange.stats().exchanges == 0
        assert case.exchange.result().compression.sent == {}

    def test_in_step_there_is_room_for_each_before_it_is_sent(self):
        case = Case(MAPPING, max_staleness=0)

        case.step()

        assert case.channel.waited == [0, 1, 2]

    def test_the_threshold_told_is_the_mean(self):
        mapping = {**MAPPING, "c": FixedThreshold(0.25)}
        case = Case(mapping)
        case.step()

        assert case.exchange.stats().threshold == (0.25 + 2 * QUANTUM.value) / 3

    def test_what_is_left_to_the_next_fit_is_by_pattern(self):
        case = Case(MAPPING, last=CompressionState({"b": Sent(0.125, 0.5)}, 0))

        assert case.exchange.result().compression.sent == {"b": Sent(0.125, 0.5)}
        case.step(names=("a",))
        assert case.exchange.result().compression.sent == {
            "a": Sent(QUANTUM.value, 1.0),
            "b": Sent(QUANTUM.value, 0.0),
            "c": Sent(QUANTUM.value, 0.0),
        }


class Wired(LinkAlgorithm):
    """Writes down what it is asked and told, and sends dense when it is told to."""

    def __init__(self):
        self.told, self.links, self.asked, self.dense = [], [], [], False

    def next_threshold(self, residual, last):
        self.asked.append(last)
        return QUANTUM.value

    def sends_dense(self, last):
        return self.dense

    def learn(self, link, measured):
        self.links.append(link)
        self.told.append(measured)
        return Link(measured.size, 0.5, rest=len(self.told))


class TestMeasuring:
    """What a rule that follows the link is told, and what comes of it."""

    def wired(self, **options):
        rule = Wired()
        return rule, Case(rule, **options)

    def test_it_is_told_what_was_sent(self):
        rule, case = self.wired()
        stamp = codec.Stamp(1, 0, 1, 1)
        entries_K = np.arange(1, 5, dtype=np.int32)

        case.step(names=("a",))

        [told] = rule.told
        nbytes = codec.encode(stamp, 12, QUANTUM.value, entries_K).nbytes
        assert told[:4] == (12, 4 / 12, nbytes, False)

    def test_it_is_told_what_left_since_the_last_exchange(self):
        rule, case = self.wired()
        for nbytes in (100, 200):
            case.channel.drained_ = Drained(nbytes, 1, 1, 0.5)
            case.step()

        assert [told.drained.nbytes for told in rule.told] == [100, 200]

    def test_what_it_learned_comes_back_to_it(self):
        rule, case = self.wired()
        for _ in range(3):
            case.step()

        assert [link and link.rest for link in rule.links] == [None, 1, 2]
        assert [last and last.link.rest for last in rule.asked] == [None, 1, 2]
        assert case.exchange.result().compression.sent["*"].link.rest == 3

    def test_nothing_is_learned_from_a_refused_exchange(self):
        rule, case = self.wired()
        case.step()
        case.channel.room, case.channel.filling = 0, True

        case.step()

        assert len(rule.told) == 1

    def test_an_empty_exchange_has_no_bytes(self):
        rule, case = self.wired()

        case.step(names=())

        assert rule.told[0][1:4] == (0.0, 0, False)

    def test_it_is_sent_dense_where_the_rule_says_so(self):
        rule, case = self.wired()

        assert kinds(case, 1) == [[SPARSE]]
        rule.dense = True
        assert kinds(case, 2) == [[DENSE]] * 2
        rule.dense = False
        assert kinds(case, 1) == [[SPARSE]]
        assert [told.dense for told in rule.told] == [False, True, True, False]
        assert rule.told[1][1:3] == (1.0, HEADER_BYTES + dense8.length(12))

    def test_the_warm_up_is_not_told(self):
        rule, case = self.wired(warmup_steps=2)
        case.channel.drained_ = Drained(1000, 1, 1, 9.0)

        assert kinds(case, 3) == [[DENSE]] * 2 + [[SPARSE]]
        [told] = rule.told
        assert (told.dense, told.drained) == (False, Drained())

    def test_the_steps_are_timed_and_nothing_else(self):
        rule, case = self.wired(exchange_every=2)
        clock = Clock(case.exchange)
        for _ in range(4):
            clock.now += 100.0  # between steps
            case.exchange.before_step(0)
            clock.now += 1.0
            case.exchange.after_step(0, 1)

        assert [told.step_s for told in rule.told] == [2.0, 2.0]

    def test_chances_without_room_divide_the_time(self):
        rule, case = self.wired()
        clock = Clock(case.exchange)
        for room in (0, 0, 1):
            case.channel.room = room
            case.exchange.before_step(0)
            clock.now += 1.0
            case.exchange.after_step(0, 1)

        assert [told.step_s for told in rule.told] == [1.0]

    def test_other_rules_know_of_no_link(self):
        case = Case()
        case.channel.drained_ = Drained(1000, 1, 1, 9.0)

        case.step()

        assert case.exchange.result().compression.sent["*"].link is None


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, exchange):
        self.now = 0.0
        exchange._now = lambda: self.now

    def spent(self, method, seconds):
        """The same method, which takes so long."""

        def slow(*args, **options):
            self.now += seconds
            return method(*args, **options)

        return slow


class TestStep:
    """What is told of the last step."""

    def test_it_is_what_was_sent_and_what_is_left(self):
        case = Case()
        published = case.step(amount=0.25)

        told = case.exchange.step_stats()

        frame_bytes = told.sent_bytes
        assert told[:2] == (QUANTUM.value, 1.0)
        assert 64 < frame_bytes < 64 + 4 * 12
        assert told.kind == published[0].update.kind.name
        assert told.residual_norm == pytest.approx(0.1875 * 12**0.5)
        assert told[5:8] == (3.0, 3.0, 3.0)

    def test_a_step_without_an_exchange_says_so(self):
        case = Case(exchange_every=2)
        case.step(), case.step(), case.step()

        told = case.exchange.step_stats()

        assert not case.exchange.exchanged
        assert told[2:4] == (0, None)
        assert math.isnan(told.density)
        assert told.threshold == QUANTUM.value
        case.step()
        assert case.exchange.exchanged
        assert case.exchange.step_stats().kind is not None

    def test_one_that_found_no_room_has_sent_nothing(self):
        case = Case()
        case.channel.room = 0
        case.step()

        told = case.exchange.step_stats()

        assert case.exchange.exchanged
        assert told[2:4] == (0, None)
        assert math.isnan(told.density)
        assert math.isnan(told.residual_p99)
        assert told.residual_norm == pytest.approx(0.25 * 12**0.5)

    def test_the_lead_is_that_of_this_step(self):
        case = Case()
        for lead in (2, 5):
            case.channel.wait_for_peers = lambda *args, lead=lead: lead
            case.step()

        assert case.exchange.step_stats().staleness == 5
        assert case.exchange.stats().lead_sum == 7

    def test_times_are_those_of_what_they_are_called(self):
        case = Case(MAPPING, max_staleness=0)
        update = case.step()[0].update
        case.channel.drain = lambda up_to_step=None: DrainResult([update], None)
        clock, exchange = Clock(case.exchange), case.exchange
        for owner, costs in {
            case.channel: {"wait_for_peers": 1, "has_room": 2, "publish": 10},
            exchange._compressor: {"propose": 100, "commit_": 20},
            exchange._vector: {"sync_from_parameters_": 200, "apply_": 1000},
        }.items():
            for name, seconds in costs.items():
                setattr(owner, name, clock.spent(getattr(owner, name), seconds))

        case.step()

        stats = exchange.step_stats()
        assert stats.wait_s == 1 + 3 * 2
        assert stats.encode_s == 200 + 100 + 3 * (10 + 20)
        assert stats.apply_s == 1000


class TestWhatOthersAreTold:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"exchange_every": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
            ({"exchange_every": 4}, [4, 8]),
            ({"exchange_every": 4, "max_staleness": 1}, [3, 4, 7, 8]),
            ({"exchange_every": 4, "max_staleness": 8}, [4, 8]),
        ],
    )
    def test_steps_that_nobody_may_wait_for_are_not_said(self, options, said):
        case = Case(**options)

        for _ in range(8):
            case.step()

        assert case.channel.said == said

    def test_what_another_may_have_made_and_not_said_is_no_lead(self):
        case = Case(exchange_every=4)
        case.channel.slowest = 0

        for _ in range(6):
            case.step()

        # Steps begin with 0 to 5 made; the other may have made 3 by then.
        assert case.exchange.stats().lead_sum == 1 + 2
