"""What the exchange of one replica publishes, and when; the channel is a fake."""

import math
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import codec
from daskdl.channel.base import BarrierResult, Channel
from daskdl.channel.inbox import DrainResult
from daskdl.channel.transport import Clock
from daskdl.compression.residuals import KeepResidual, ResidualClipping
from daskdl.compression.thresholds import FixedThreshold
from daskdl.errors import CodecError
from daskdl.training import gradient_sharing
from daskdl.training.base import ReplicaContext
from daskdl.training.gradient_sharing import BESIDE_ENTRIES, GradientSharing

DENSE, SPARSE = codec.DenseUpdate, codec.SparseUpdate
QUANTUM = FixedThreshold(2.0**-4)
LAYERS = dict.fromkeys(("a", "b", "c"), QUANTUM)
DENSELY = {"warmup_steps": 9}
GRID = 2.0**-24


class Published(NamedTuple):
    update: codec.Update
    partial: bool  # others of its step follow


class ManualClock(Clock):
    """A clock that the test advances."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds


class Room(Channel):
    """A fake channel of one of two replicas, which accepts `room` updates.

    Every call takes some seconds of its clock.
    """

    closing = False
    _queue = _announce = None  # `publish` and `progress` need none

    def __init__(self):
        self.frames = []
        self.room = 10**9  # updates that are accepted
        self.announces_room = False  # though there may be none
        self.others = [1]
        self.waited = []  # updates published whenever room was waited for
        self.progressed = []  # steps that the others were told of
        self.bounds = []  # on the lead, at the start of each interval
        self.slowest = 10**9  # step that the slowest other replica announced
        self.clock = ManualClock()
        self.drained_s = 1000
        self.grid = None  # that it has been given

    def peers(self):
        return self.others

    def has_room(self, *, wait=False, unsent=math.inf):
        self.clock.seconds += 2
        if wait:
            self.waited.append(len(self.frames))
        return self.room > 0 or self.announces_room

    @property
    def published(self):
        return len(self.frames)

    def publish(self, encode, step, *, partial=False, force=False):
        self.clock.seconds += 10
        frame = encode(codec.Stamp(1, 0, self.published + 1, step))
        if self.room <= 0:
            return None
        self.room -= 1
        self.frames.append(Published(codec.decode(frame), partial))
        return frame

    def progress(self, step, interval=-1):
        self.progressed.append(step)

    def drain(self, up_to_step=None):
        self.clock.seconds += self.drained_s
        return DrainResult([], None)

    def drain_for_snapshot(self):
        return self.drain(), {}

    def wait_for_peers(self, step, interval, max_staleness):
        self.clock.seconds += 1
        if max_staleness is not None:
            self.bounds.append(max_staleness)
        return max(0, step - self.slowest)

    def sync(self, step, grid):
        self.grid = grid

    run = activate = join = serve_snapshot = lease = wait = barrier = None
    agree = fail = leave = set_idle = publish_blob = drop_blobs = fetch_blob = None
    stats = check = None


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        for name in LAYERS:
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))


class WithMean(Three):
    """A module with a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))


class Case:
    """A replica that moves every parameter by some quanta in each step."""

    def __init__(
        self,
        threshold=QUANTUM,
        steps_made=0,
        shared=None,
        channel=None,
        optimizer=torch.optim.SGD,
        module=None,
        **options,
    ):
        self.channel = channel or Room()
        self.module = module or Three()
        optimizer = optimizer(self.module.parameters(), lr=0.01)
        defaults = {"max_staleness": None, "update_scale": "sum"}
        options = {**defaults, "residual": KeepResidual(), **options}
        master = GradientSharing(threshold, **options)
        self.exchange = master.attach(
            ReplicaContext(
                *(self.module, self.channel, 0, [0, 1]),
                joins=shared is not None,
                optimizer=optimizer,
            )
        )
        if steps_made or shared is not None:
            self.exchange.load_(shared or {"steps_made": steps_made, "sent": {}}, [])

    def step(self, names=tuple(LAYERS), seconds=0):
        """Make a step that takes some seconds, and return what was published."""
        before = self.channel.published
        self.exchange.before_step(0)
        self.channel.clock.seconds += seconds
        with torch.no_grad():
            for name in names:
                getattr(self.module, name).add_(0.25)
        self.exchange.after_step(0, 1)
        return self.channel.frames[before:]


def shared_in(case):
    """What all replicas have of a case's parameters, in parameter units."""
    shared = case.exchange.state().common["compressor"]
    return torch.cat(shared["shared"]) * shared["grid"]


def residual_in(exchange):
    """The residual of an exchange, in parameter units."""
    carried = exchange.carried(ended=True)
    return carried["residual"] * carried["grid"]


def kinds(case, steps):
    return [[type(p.update) for p in case.step()] for _ in range(steps)]


@pytest.mark.parametrize(
    ("update_scale", "expected"),
    [("mean", [1 / 2, 1 / 3, 1]), ("sum", [1, 1, 1]), (0.7, [0.7, 0.7, 0.7])],
)
@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_the_scale_follows_the_number_of_replicas(apply, update_scale, expected):
    case, scales = Case(apply=apply, update_scale=update_scale), []
    for others in ([1], [1, 2], []):
        case.channel.others = others
        case.step()
        scales.append((case.exchange.learning_rate_scale, case.exchange.update_scale))

    # Strict: the rate is scaled. Eager: what is sent of steps at the whole rate.
    pairs = [(e, e) if apply == "strict" else (1, e) for e in expected]
    assert scales == [pytest.approx(pair) for pair in pairs]


def test_the_first_steps_are_sent_in_full():
    assert kinds(Case(warmup_steps=2), 3) == [[DENSE], [DENSE], [SPARSE]]


def test_a_joining_replica_continues_the_warm_up():
    donor = Case(warmup_steps=6, steps_made=2)
    for _ in range(3):
        donor.step()

    joining = Case(warmup_steps=6, shared=donor.exchange.state().common)

    assert kinds(joining, 2) == [[DENSE], [SPARSE]]


def test_the_rest_is_published_at_a_sync_point():
    case = Case(exchange_every=4)
    case.step()

    case.exchange.sync(0, 1, ended=False)

    assert len(case.channel.frames) == 1


def test_replicas_wait_for_each_other_only_where_an_interval_begins():
    case = Case(exchange_every=4, max_staleness=2)

    for _ in range(8):
        case.step()

    assert case.channel.bounds == [2, 2]


@pytest.mark.parametrize(("merges", "bound"), [(False, 32), (True, 48)])
def test_replicas_may_be_farther_ahead_where_updates_are_merged(merges, bound):
    channel = Room()
    channel.merges = merges
    options = {"exchange_every": 16, "max_staleness": "auto", "routing": "merged"}
    case = Case(channel=channel, **options)

    case.step()

    assert case.channel.bounds == [bound]


def test_only_the_last_update_of_a_step_completes_it():
    published = Case(LAYERS).step()

    assert [update.partial for update in published] == [True, True, False]


@pytest.mark.parametrize(
    ("merges", "quantum"), [(False, 0.07), (True, 0.0625)], ids=["alone", "summed"]
)
def test_quanta_of_updates_that_are_summed_are_rounded(merges, quantum):
    channel = Room()
    channel.merges = merges

    [published] = Case(FixedThreshold(0.07), channel=channel).step()

    assert published.update.threshold == pytest.approx(quantum, abs=GRID)


def test_a_kept_residual_is_delivered_in_steps_of_its_grid():
    module = Three()
    context = ReplicaContext(module, Room(), 1, [0, 1])
    exchange = GradientSharing(QUANTUM).attach(context)
    residual = {"residual": torch.full((12,), 3).int(), "grid": 2.0**-4}

    exchange.load_({"steps_made": 0, "sent": {}, **residual}, [])

    # One of three steps, the other two.
    assert residual_in(exchange).tolist() == [2.0**-4] * 12


class TestRoom:
    def test_updates_that_found_no_room_come_first_next_time(self):
        case, order = Case(LAYERS), []

        for _ in range(4):
            case.channel.room = 1
            order += [abs(int(p.update.entries_K[0])) - 1 for p in case.step()]

        assert order == [0, 4, 8, 0]
        assert (shared_in(case) / QUANTUM.value).tolist() == [16.0] * 4 + [8.0] * 4 + [
            12.0
        ] * 4

    def test_an_exchange_without_an_accepted_update_does_not_count(self):
        case = Case()
        case.channel.room, case.channel.announces_room = 0, True

        assert case.step(names=("a", "b")) == []

        assert case.exchange.stats().exchanges == 0
        assert case.exchange.carried(ended=False)["sent"] == {}

    def test_in_lockstep_each_update_waits_for_room(self):
        case = Case(LAYERS, max_staleness=0)

        case.step()

        assert case.channel.waited == [0, 1, 2]


def test_a_step_reports_seconds_of_waiting_encoding_and_applying():
    case = Case(LAYERS, max_staleness=0)

    case.step()

    stats = case.exchange.step_stats()
    assert stats.wait_s == 1 + 3 * 2
    assert stats.encode_s == 3 * 10
    assert stats.apply_s == 1000


class Wide(nn.Module):
    """As many parameters as entries that are packed beside a step, and a few more."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(BESIDE_ENTRIES))
        self.narrow = nn.Parameter(torch.zeros(4))


def test_on_the_cpu_every_update_is_published_at_once():
    case = Case(QUANTUM, module=Wide(), exchange_every=1)

    assert [len(case.step(names=("wide",))) for _ in range(2)] == [1, 1]


class TestPackingBesideTheNextStep:
    @pytest.fixture(autouse=True)
    def as_on_an_accelerator(self, monkeypatch):
        of_device = gradient_sharing.least_beside({torch.device("cuda")})
        monkeypatch.setattr(gradient_sharing, "least_beside", lambda _: of_device)

    @staticmethod
    def case(threshold=QUANTUM, **options):
        return Case(threshold, module=Wide(), **options)

    @staticmethod
    def quanta(case):
        """The quanta that all replicas have of each parameter."""
        return set((shared_in(case) / QUANTUM.value).tolist())

    def test_an_update_is_published_after_the_next_step(self):
        case = self.case(exchange_every=2)

        published = [case.step(names=("wide",)) for _ in range(4)]

        assert [len(frames) for frames in published] == [0, 0, 1, 0]
        [update] = published[2]
        assert update.update.stamp.step == 3
        # It has the two steps before it, and the third is not lost.
        assert set(update.update.quanta_K.tolist()) == {8}
        case.exchange.sync(0, 1, ended=False)
        assert self.quanta(case) == {16.0, 0.0}
        assert set(residual_in(case.exchange).tolist()) == {0.0}

    def test_the_step_that_publishes_has_its_numbers(self):
        case, exchanged = self.case(exchange_every=2), []

        for _ in range(3):
            case.step(names=("wide",))
            exchanged.append(case.exchange.exchanged)
            stats = case.exchange.step_stats()

        assert exchanged == [False, False, True]
        assert stats.encode_s == 10
        assert stats.density == pytest.approx(1, rel=1e-3)
        assert stats.sent_bytes > 64

    @pytest.mark.parametrize(
        ("every", "announced"), [(4, [4, 5, 8, 9]), ("auto", [2, 3, 4, 9])], ids=str
    )
    def test_steps_are_announced_that_publish_or_that_others_wait_for(
        self, every, announced
    ):
        case = self.case(exchange_every=every, steps_made=10**6)
        case.channel.drained_s = 0

        for _ in range(9):
            case.step(("wide",), seconds=50)

        assert case.channel.progressed == announced

    @pytest.mark.parametrize(
        ("names", "options"),
        [(("narrow",), {}), (("wide",), {"max_staleness": 0}), (("wide",), DENSELY)],
        ids=["few entries", "lockstep", "dense"],
    )
    def test_what_does_not_pay_or_may_not_be_late_is_published_at_once(
        self, names, options
    ):
        case = self.case(exchange_every=1, **options)

        assert [len(case.step(names)) for _ in range(2)] == [1, 1]

    def test_each_pattern_is_published(self):
        case = self.case({"wide": QUANTUM, "narrow": QUANTUM}, exchange_every=1)

        counts = [len(case.step(("wide", "narrow"))) for _ in range(3)]

        assert counts == [0, 2, 2]

    def test_a_sync_point_has_what_is_being_packed(self):
        case = self.case(channel=Meeting(), exchange_every=1)
        case.step(names=("wide",))

        case.exchange.sync(0, 1, ended=True)

        assert self.quanta(case) == {4.0, 0.0}
        assert set(residual_in(case.exchange).tolist()) == {0.0}

    def test_an_update_that_finds_no_room_stays_in_the_residual(self):
        case = self.case(exchange_every=1)
        case.step(names=("wide",))
        case.channel.room, case.channel.announces_room = 0, True
        assert case.step(names=("wide",)) == []
        case.channel.room = 9

        [update] = case.step(names=("wide",))

        assert set(update.update.quanta_K.tolist()) == {8}
        assert case.exchange.stats().exchanges == 1

    def test_a_replica_that_leaves_sends_it_once(self):
        case = self.case(exchange_every=1)
        case.step(names=("wide",))

        case.exchange.leave()

        [last] = case.channel.frames
        assert set((last.update.counts_N * GRID / QUANTUM.value).tolist()) == {4.0, 0.0}

    @pytest.mark.parametrize(("contended_s", "every"), [(0.0, 8), (20.0, 32)], ids=str)
    def test_the_interval_follows_what_holds_up_training(
        self, contended_s, every, monkeypatch
    ):
        monkeypatch.setattr(gradient_sharing, "pack_beside", lambda _: contended_s)
        case = self.case(steps_made=10**6)
        case.channel.drained_s = 0

        exchanges = [n for n in range(192) if case.step(("wide",), seconds=42)]

        assert set(np.diff(exchanges[4:])) == {every}

    def test_an_error_ends_the_next_step(self, monkeypatch):
        case = self.case(exchange_every=1)
        error = CodecError("levels must be in 1 .. 15, got 0 .. 16")
        monkeypatch.setattr(codec, "pack", Mock(side_effect=error))
        case.step(names=("wide",))

        with pytest.raises(CodecError) as caught:
            case.step(names=("wide",))

        assert caught.value is error
        assert self.quanta(case) == {0.0}  # nobody has it, and the sender neither


class TestProgress:
    @pytest.mark.parametrize(
        ("options", "announced"),
        [
            ({"exchange_every": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
            ({"exchange_every": 4}, [4, 8]),
            ({"exchange_every": 4, "max_staleness": 1}, [3, 4, 7, 8]),
            ({"exchange_every": 4, "max_staleness": 8}, [4, 8]),
        ],
    )
    def test_only_steps_that_others_may_wait_for_are_announced(
        self, options, announced
    ):
        case = Case(**options)

        for _ in range(8):
            case.step()

        assert case.channel.progressed == announced

    def test_steps_that_others_need_not_announce_are_no_lead(self):
        case = Case(exchange_every=4)
        case.channel.slowest = 0

        for _ in range(6):
            case.step()

        # Steps begin with 0 to 5 made; the other may have made 3 by then.
        assert case.exchange.stats().lead_sum == 1 + 2


class TestInterval:
    """With ``exchange_every="auto"``; here, an exchange takes 10 seconds."""

    @staticmethod
    def exchanges(steps, steps_made=0, seconds=0.001, **options):
        """The steps after which an exchange was made, of steps of some seconds."""
        case = Case(steps_made=steps_made, **options)
        case.channel.drained_s = 0
        return [n for n in range(1, steps + 1) if case.step(seconds=seconds)]

    def test_it_grows_with_the_steps_that_were_made(self):
        exchanges = self.exchanges(1152)

        # 16 at first, however long an exchange takes; at most a 32nd of the steps made.
        assert exchanges[:5] == [1, 2, 16, 32, 48]
        assert exchanges[-6:] == [1008, 1024, 1056, 1088, 1120, 1152]

    @pytest.mark.parametrize(
        ("seconds", "every"), [(101, 1), (99, 2), (49, 4), (24, 8), (12, 16), (1, 16)]
    )
    def test_at_first_exchanging_takes_10_percent_of_the_time(self, seconds, every):
        exchanges = self.exchanges(56, seconds=seconds)

        assert set(np.diff(exchanges[2:])) == {every}

    @pytest.mark.parametrize(
        ("seconds", "every"), [(400, 1), (300, 2), (50, 8), (20, 32), (0.1, 64)]
    )
    def test_exchanging_takes_3_percent_of_the_time(self, seconds, every):
        exchanges = self.exchanges(192, steps_made=10**6, seconds=seconds)

        assert set(np.diff(exchanges[2:])) == {every}

    @pytest.mark.parametrize(
        ("seconds", "every"), [(101, 1), (99, 2), (49, 4), (12, 16), (1, 64)]
    )
    def test_with_adam_exchanging_takes_10_percent_of_the_time(self, seconds, every):
        exchanges = self.exchanges(
            192, steps_made=10**6, seconds=seconds, optimizer=torch.optim.Adam
        )

        assert set(np.diff(exchanges[2:])) == {every}

    def test_with_adam_replicas_are_two_intervals_apart(self):
        bounds = {}
        for optimizer in (torch.optim.SGD, torch.optim.Adam):
            steps_made = 10**6
            case = Case(
                steps_made=steps_made, optimizer=optimizer, max_staleness="auto"
            )
            case.channel.drained_s = 0
            for _ in range(64):
                case.step(seconds=12)
            bounds[optimizer] = set(case.channel.bounds[-2:])

        assert bounds == {torch.optim.SGD: {128}, torch.optim.Adam: {32}}

    def test_the_first_exchange_does_not_count(self):
        case = Case(steps_made=10**6)
        case.channel.drained_s = 1000
        case.step(seconds=400)
        case.channel.drained_s = 0

        assert [bool(case.step(seconds=400)) for _ in range(4)] == [True] * 4

    def test_one_long_step_changes_nothing(self):
        case = Case(steps_made=10**6)
        case.channel.drained_s = 0
        for _ in range(64):
            case.step(seconds=50)

        exchanged = [bool(case.step(seconds=s)) for s in (5000, *[50] * 31)]

        assert exchanged == [n % 8 == 0 for n in range(1, 33)]

    def test_steps_alone_are_no_part_of_an_exchange(self):
        channel = Meeting()
        channel.present, channel.absent = 1, ("sync 0",)
        case = Case(steps_made=10**6, channel=channel)
        case.exchange.sync(0, 1, ended=True)
        for _ in range(64):
            assert not case.step(seconds=50)
        case.exchange.admit()  # another replica joins
        channel.drained_s = 0

        exchanges = [n for n in range(1, 65) if case.step(seconds=50)]

        assert set(np.diff(exchanges[2:])) == {8}

    def test_in_lockstep_the_steps_alone_decide(self):
        slow, fast = (
            self.exchanges(96, steps_made=10**6, seconds=seconds, max_staleness=0)
            for seconds in (1000, 0.001)
        )

        assert slow == fast == [16, 32, 48, 64, 80, 96]

    def test_in_lockstep_with_adam_each_step_is_exchanged(self):
        exchanges = self.exchanges(
            8, steps_made=10**6, max_staleness=0, optimizer=torch.optim.AdamW
        )

        assert exchanges == [*range(1, 9)]

    @pytest.mark.parametrize(
        ("options", "every"),
        [({"max_staleness": 6}, 4), ({"max_staleness": "auto"}, 64)],
    )
    def test_it_is_no_longer_than_replicas_may_be_apart(self, options, every):
        exchanges = self.exchanges(192, steps_made=10**6, **options)

        assert set(np.diff(exchanges[2:])) == {every}

    def test_with_strict_each_step_is_exchanged(self):
        assert self.exchanges(9, steps_made=10**6, apply="strict") == [*range(1, 10)]

    def test_only_exchanges_are_announced(self):
        case = Case(steps_made=10**6)
        case.channel.drained_s = 0
        for _ in range(128):
            case.step(seconds=50)

        assert case.channel.progressed == [1, 2, *range(8, 129, 8)]


@pytest.mark.parametrize(
    ("options", "adaptive", "cost", "steps_made", "steps"),
    [
        ({}, False, 0.2, 0, 2),  # 10 % of the time at first
        ({}, False, 0.2, 10**6, 8),  # 3 % later
        ({}, False, 0.2, 32 * 4, 4),  # 3 % up to a 32nd of the steps
        ({}, False, 99.0, 32 * 16, 16),
        ({}, False, 99.0, 32 * 32, 32),
        ({}, False, 99.0, 10**6, 64),
        ({}, True, 0.2, 10**6, 2),
        # At any cost, adaptive optimizers exchange often at first.
        ({}, True, 99.0, 15, 1),
        ({}, True, 99.0, 8 * 4, 4),
        ({}, True, 99.0, 8 * 16, 16),
        ({}, True, 99.0, 32 * 32, 32),
        ({"max_staleness": 20}, False, 99.0, 10**6, 16),
        ({"max_staleness": 1}, False, 99.0, 10**6, 1),
        ({"max_staleness": None}, False, 99.0, 10**6, 64),
        # Measured times do not decide in lockstep.
        ({"max_staleness": 0}, False, 0.0, 10**6, 16),
        ({"max_staleness": 0}, False, 99.0, 32 * 4, 4),
        ({"max_staleness": 0}, False, 99.0, 0, 1),
        ({"max_staleness": 0}, True, 99.0, 10**6, 1),
        ({"apply": "strict"}, False, 99.0, 10**6, 1),
        ({"exchange_every": 12}, True, 99.0, 0, 12),
    ],
)
def test_exchanges_are_seldom_only_late_and_where_they_cost(
    options, adaptive, cost, steps_made, steps
):
    pace = GradientSharing(**options).pace(adaptive=adaptive)

    assert pace.steps_between(cost, steps_made) == steps


def test_the_bound_of_staleness_follows_the_interval():
    assert GradientSharing().staleness_bound(0) == 32
    assert GradientSharing().staleness_bound(10**6) == 128
    assert GradientSharing(routing="merged").staleness_bound(10**6) == 192
    assert GradientSharing(exchange_every=16).staleness_bound(0) == 32
    assert GradientSharing(max_staleness=3).staleness_bound(10**6) == 3
    assert GradientSharing(max_staleness=None).staleness_bound(10**6) is None


class Meeting(Room):
    """A fake channel between replica 0 and replica 1, who reports what replica 0 does.

    Attributes:
        present: Replicas, joining ones included.
        its: Values of replica 1 in a barrier, by key of the barrier.
        absent: Keys of barriers that replica 1 does not reach.
    """

    run = 1

    def __init__(self):
        super().__init__()
        self.present, self.its, self.absent = 2, {}, ()

    def check(self):
        pass

    def barrier(self, key, payload, kind=None, client_payload=b""):
        payloads = {0: payload}
        if key not in self.absent:
            payloads[1] = payload | self.its.get(key, {})
        gone = {} if 1 in payloads else {1: 0}
        return BarrierResult(payloads, gone, {"present": self.present})

    def agree(self, key, published, gone, load):
        pass


@pytest.mark.parametrize(
    ("present", "factor"), [(2, 16), (3, 1)], ids=["nobody joins", "a replica joins"]
)
def test_the_grid_changes_unless_a_replica_joins(present, factor):
    """One that joins has a snapshot in the former grid."""
    grown = Case().exchange.state().common
    grown["compressor"]["shared"][0].fill_(2**28 + 2**5)  # exact in float32
    case = Case(shared=grown, channel=Meeting())
    case.channel.sync(0, GRID)  # as its snapshot says
    case.channel.present = present

    case.exchange.sync(0, 1, ended=True)

    assert case.channel.grid == case.exchange.agreed().grid == factor * GRID


class Served(Meeting):
    """A snapshot is served during each barrier."""

    def barrier(self, key, payload, *args):
        self.exchange.admit()
        return super().barrier(key, payload, *args)


def test_a_replica_that_has_served_a_snapshot_goes_on_sharing():
    case = Case(channel=Served())
    case.channel.exchange, case.channel.absent = case.exchange, ("sync 0",)
    case.channel.present = 1

    case.exchange.sync(0, 1, ended=True)

    assert len(case.step()) == 1


def test_steps_are_those_of_the_fastest_after_replicas_have_met():
    case = Case(channel=Meeting())
    case.step()
    case.channel.its["sync 0"] = {"step": 9}

    case.exchange.sync(0, 1, ended=True)

    assert case.exchange.admit()["step"] == 9


def test_buffers_are_averaged_with_the_weights_of_examples():
    case = Case(channel=Meeting(), module=WithMean())
    case.channel.its["sync 0"] = {
        "examples": 3,
        "floating buffers": np.full(1, 8.0, np.float32),
    }

    case.exchange.sync(0, 1, ended=True)

    assert case.module.mean.item() == 6.0  # 8 of three examples, 0 of one


def test_clipped_mass_is_reported_once():
    rule = ResidualClipping(multiple=1.0, frequency=1)
    case = Case(FixedThreshold(2.0**-9), residual=rule)
    for _ in range(2):
        case.step()

    first, second = case.exchange.stats(), case.exchange.stats()

    assert first.clipped > 0
    assert second.clipped == 0


def test_a_snapshot_of_the_only_replica_has_all_of_its_progress():
    case = Case(FixedThreshold(1.0), channel=Meeting())
    case.channel.present, case.channel.absent = 1, ("sync 0",)
    case.exchange.sync(0, 1, ended=True)
    case.step()

    case.exchange.admit()

    assert set(shared_in(case).tolist()) == {0.25}


class TestWholeResidual:
    """Each step moves parameters by a sixteenth, in what replicas share."""

    @pytest.fixture
    def case(self):
        threshold = FixedThreshold(2.0**-3)
        return Case(threshold, channel=Meeting(), update_scale=2.0**-2)

    def shared(self, case):
        return set((case.exchange.agreed().shared_N * GRID).tolist())

    def dense(self, case, steps):
        """Whether the last update of a sync interval of some steps is dense."""
        for _ in range(steps):
            case.step()
        case.exchange.sync(0, 1, ended=True)
        return type(case.channel.frames[-1].update) is DENSE

    @pytest.mark.parametrize(("steps", "dense"), [(1, True), (19, True), (20, False)])
    def test_it_is_sent_at_the_end_of_an_interval_of_few_exchanges(
        self, case, steps, dense
    ):
        for _ in range(2):  # exchanges of earlier intervals do not count
            assert self.dense(case, steps) == dense

    def test_all_progress_is_then_in_shared(self, case):
        case.step()
        assert self.shared(case) == {0.0}  # a sixteenth: less than the threshold

        case.exchange.sync(0, 1, ended=True)

        (moved,) = self.shared(case)
        assert moved == pytest.approx(2.0**-4, rel=1 / 254)  # in eight bits
        assert residual_in(case.exchange).abs().max() < 2.0**-4 / 254
        assert case.channel.waited == [0]

    def test_thresholds_and_densities_are_those_of_exchanges(self, case):
        for _ in range(3):
            case.step()
        before = case.exchange.carried(ended=False)["sent"]

        case.exchange.sync(0, 1, ended=True)

        assert type(case.channel.frames[-1].update) is DENSE
        assert case.exchange.carried(ended=False)["sent"] == before
        assert case.exchange.stats().density_sum == 1

    def test_it_is_not_sent_after_a_dense_update(self):
        case = Case(channel=Meeting(), warmup_steps=1)
        for _ in range(2):
            case.step()

        case.exchange.sync(0, 1, ended=True)

        assert [type(sent.update) for sent in case.channel.frames] == [DENSE, SPARSE]

    def test_nothing_is_sent_before_the_interval_has_ended(self, case):
        case.step()

        case.exchange.sync(0, 1, ended=False)

        assert case.channel.frames == []

    def test_it_stays_in_strict_mode(self):
        case = Case(FixedThreshold(2.0**-3), channel=Meeting(), apply="strict")
        with torch.no_grad():
            case.module.a.add_(2.0**-4)
        case.step(names=())

        case.exchange.sync(0, 1, ended=True)

        assert case.channel.frames == []

    def test_a_sole_replica_sends_nothing(self, case):
        case.channel.present, case.channel.absent = 1, ("sync 0",)
        case.exchange.sync(0, 1, ended=True)

        case.step()
        case.exchange.sync(1, 1, ended=True)

        assert case.channel.frames == []
