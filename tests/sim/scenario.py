"""What a seed stands for: a fit, a network, and what goes wrong when.

The faults of a scenario are drawn in advance, and their victims when they happen. At
least one worker, the last resort, is spared, except where everybody may go. One seed in
five aims at an order of events that chance alone hardly ever makes, see `AIMS`. In some
a callback stops the fit, see `stopped`, and in some there are validation data.
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from daskdl import (
    AdaptiveThreshold,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    ParameterAveraging,
)
from daskdl.channel.protocol import MESSAGE_BYTES, MessageKind, unwrap
from daskdl.codec import decode_sum
from daskdl.training.checkpointing import ResumePlan
from tests.sim.checks import (
    FRAME_BYTES,
    Inspector,
    check,
    check_end,
    check_nothing_left,
)
from tests.sim.fit import TIMEOUTS, Cluster, Setup
from tests.sim.network import KEPT_S, SCHEDULER
from tests.sim.oracle import flipped
from tests.sim.world import Process, Violation

LIMIT_S = 900.0  # virtual; no fit here takes so long
SETTLE_S = 60.0  # after a fit, until nothing of it may be left


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        moment: Name of one of `MOMENTS`.
        number: Counts these moments over all replicas, from 1; 0: the start.
        at_s: When, virtual seconds after that.
        kind: Name of a method of `Fate`.
        chance: Seeds the choice of victims.
        lasts_s: Until it is mended, for what can be.
        aimed: Whether it strikes the replica of that moment, if it may.
    """

    moment: str
    number: int
    at_s: float
    kind: str
    chance: int
    lasts_s: float
    aimed: bool

    def __str__(self):
        after = f" after {self.moment} {self.number}" if self.number else ""
        what = f"{self.kind}{' of that replica' if self.aimed else ''}"
        return f"{self.at_s:8.3f} s{after}: {what} (for {self.lasts_s:.2f} s)"


START = "start"
# What faults follow closely, and how often it is drawn, relative to the others.
MOMENTS = {
    START: 5,  # at any time after it
    "open": 1,  # the run is open, no replica has joined
    "publish": 2,  # a replica publishes an update
    "arrive": 4,  # a replica arrives at a barrier
    "compare": 2,  # a replica has stopped deliveries, after losses
    "join": 2,  # a replica joins that is not an initial one
    "activate": 2,  # it begins to train
    "leave": 1,  # a replica leaves
    "lose": 1,  # a replica is removed
    # Only where a seed aims at them.
    "agree": 0,  # a replica arrives at a barrier after which updates are held back
    "hold": 0,  # such a barrier is complete
    # Only where there are validation data.
    "validate": 0,  # a replica begins to load a part of them
    # Only where a callback stops the fit.
    "stop": 0,  # it has done so, in a step of a replica
}
# After which moments kinds find most, if they strike the replica of that moment.
OFTEN = {
    "kill": "publish",
    "restart_here": "leave",
    "freeze": "arrive",
    "retire": "arrive",
    "join": "open",
    "slow_down": "join",
    "break_connections": "publish",
}
# How often each fault is drawn, relative to the others.
USUAL = {
    "kill": 3,
    "kill_machine": 1,
    "restart_here": 2,
    "freeze": 3,
    "retire": 2,
    "join": 3,
    "cut_workers": 2,
    "cut_one_way": 1,
    "cut_briefly": 1,
    "break_connections": 2,
    "slow_down": 2,
    "scheduler_late": 2,
}
# With these alone, a replica leaves before its worker has closed.
QUIET = {"join", "retire", "kill", "restart_here", "break_connections"}
# After these, a fit may end with an error that says so.
FATAL = {
    "cut_off": 3,
    "scheduler_hangs": 2,
    "scheduler_killed": 2,
    "client_gone": 2,
    "kill_all": 1,
}
# Only where a seed aims at something.
SPECIAL = {"sever", "join_beside_slow"}
# Only where a seed damages updates: on their way, or before they are sent.
DAMAGES = "damage_copies", "damage_own"
# Only where a seed has narrow links.
NARROW = "join_slowly"


@dataclass
class Scenario:
    """A fit and its faults.

    Attributes:
        seed: Of all of it.
        setup: The fit.
        latency_s: Mean time of a message.
        faults: In the order of their times.
        spared: Number of workers that nothing is done to.
        aim: Name of one of `AIMS`, if the seed aims at something.
    """

    seed: int
    setup: Setup
    latency_s: float
    faults: list = field(default_factory=list)
    spared: int = 1
    aim: str = ""

    @classmethod
    def of(cls, seed):
        """The scenario of a seed."""
        chance = random.Random(f"scenario {seed}")
        setup = setup_of(chance, seed)
        latency_s = chance.choice([5e-4, 2e-3, 2e-3, 1e-2, 5e-2])
        kinds = {k: w for k, w in USUAL.items() if chance.random() < 0.6}
        if chance.random() < 0.15:
            kinds.update(FATAL)
        kinds = kinds or USUAL
        count = chance.choice([0, 1, 2, 3, 4, 6, 8, 12])
        drawn = chance.choices(list(kinds), list(kinds.values()), k=count)
        drawn += ["join"] * chance.choice([0, 0, 1, 2, 4])
        faults = [fault_of(chance, setup, latency_s, kind) for kind in drawn]
        spared = setup.master.min_replicas
        scenario = cls(seed, setup, latency_s, sorted(faults), spared)
        chance = random.Random(f"crowded {seed}")
        scenario = crowded(scenario, chance) if chance.random() < CROWDED else scenario
        chance = random.Random(f"aimed {seed}")  # of its own: it changes no other seed
        scenario = aimed(scenario, chance) if chance.random() < AIMED else scenario
        chance = random.Random(f"stopped {seed}")
        scenario = stopped(scenario, chance) if chance.random() < STOPPED else scenario
        chance = random.Random(f"damaged {seed}")
        scenario = damaged(scenario, chance) if chance.random() < DAMAGED else scenario
        chance = random.Random(f"validated {seed}")
        scenario = (
            validated(scenario, chance) if chance.random() < VALIDATED else scenario
        )
        chance = random.Random(f"narrow {seed}")
        scenario = narrow(scenario, chance) if chance.random() < NARROWED else scenario
        chance = random.Random(f"flock {seed}")
        scenario = flocked(scenario, chance) if chance.random() < FLOCKED else scenario
        chance = random.Random(f"merged {seed}")
        if chance.random() < MERGED:
            merge_s, inline_bytes = chance.choice(MERGE_S), chance.choice([0, 2**20])
            inbox_bytes = max(scenario.setup.inbox_bytes, MERGED_INBOX_BYTES)
            in_step = scenario.setup.master.synchronous
            scenario.setup = replace(
                scenario.setup,
                routing=scenario.setup.routing if in_step else "merged",
                merge_s=merge_s,
                forgets=chance.choice([0.0, 0.0, 0.1]),
                inline_bytes=inline_bytes,
                inbox_bytes=inbox_bytes,
                tree_bytes=chance.choice([0, 0, 2**16]),
                sum_fan_out=chance.choice([1, 1, 2, 4]),
                relay_bytes=chance.choice([scenario.setup.relay_bytes, MERGED_BYTES]),
            )
        chance = random.Random(f"momentum {seed}")
        momentum = chance.choice([0.0, 0.0, 0.5, 0.75])
        if isinstance(scenario.setup.master, GradientSharing):
            master = replace(scenario.setup.master, momentum=momentum)
            scenario.setup = replace(scenario.setup, master=master)
        return scenario

    @property
    def may_fail(self):
        """Whether the fit may end with an error."""
        return any(fault.kind in FATAL for fault in self.faults)

    def __str__(self):
        faults = "\n".join(map(str, self.faults)) or "no faults"
        aim = f"\naims at: {self.aim}" if self.aim else ""
        return f"{self.setup}\nlatency {self.latency_s} s{aim}\n{faults}"


def fault_of(chance, setup, latency_s, kind):
    """A fault of a kind, at any time or soon after something else."""
    (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
    often = kind in OFTEN and chance.random() < 0.3
    if often:
        moment = OFTEN[kind]
    if moment == START:
        # A replica needs some time to join.
        most_s = expected_s(setup) * (0.5 if kind == "join" else 1.0)
        number, at_s = 0, chance.uniform(0.0, most_s)
    else:
        replicas = setup.workers * setup.replicas
        most = {
            "open": 1,
            "publish": sum(setup.lengths) // setup.batch_size * setup.epochs,
            "arrive": 3 * replicas * setup.epochs,
            "leave": replicas,
        }
        number = chance.randint(1, most.get(moment, 3))
        at_s = chance.uniform(0.0, 5 * latency_s)
    seed, lasts_s = chance.randrange(2**32), lasts(chance, kind)
    aimed = often or chance.random() < 0.5
    return Fault(moment, number, at_s, kind, seed, lasts_s, aimed)


def lasts(chance, kind):
    """How long a fault lasts, seconds."""
    if kind == "freeze":  # shorter and longer than the time-out
        return chance.choice([0.3, 1.0, 3.0, TIMEOUTS.silence + 1.0, 15.0])
    if kind in ("cut_off", "scheduler_hangs"):
        return chance.uniform(TIMEOUTS.request, 3 * TIMEOUTS.silence)
    if kind in ("cut_briefly", "scheduler_late"):
        return chance.uniform(0.1, 0.5 * TIMEOUTS.request)
    return chance.uniform(0.2, 8.0)


def setup_of(chance, seed):
    """A fit, small enough to be over in a second of real time."""
    few = chance.random()
    workers = (
        chance.randint(2, 5)
        if few < 0.75
        else chance.randint(6, 12)
        if few < 0.95
        else chance.randint(13, 32)
    )
    replicas = 2 if workers <= 6 and chance.random() < 0.2 else 1
    each = chance.choice([4, 6, 10]) if workers <= 5 else 3  # steps in an epoch
    batch_size = 4
    rows = workers * replicas * each * batch_size
    parts = chance.choice([1, 3, 7])
    lengths = [rows // parts] * parts
    lengths[0] += rows - sum(lengths) + chance.choice([0, 1, 3])
    routing = chance.choice(["plain", "mesh"])
    few_frames = 4 * (FRAME_BYTES + MESSAGE_BYTES)
    bound = chance.choice([2**20, few_frames, few_frames, 1])
    return Setup(
        workers=workers,
        replicas=replicas,
        routing=routing,
        master=master_of(chance),
        epochs=chance.choice([1, 2, 3]) if workers <= 12 else 1,
        batch_size=batch_size,
        lengths=tuple(lengths),
        checkpoint_every=chance.choice([None, None, None, 1, "2 steps", "3 steps"]),
        seed=seed,
        preempted=chance.choice([0.0, 0.02, 0.1]),
        outbox_bytes=chance.choice([2**20, bound]),
        inbox_bytes=chance.choice([2**20, bound]),
        relay_bytes=chance.choice([2**20, bound]),
        batch_bytes=chance.choice([2**22, 2**22, 1]),
        mean_step_s=chance.choice([0.05, 0.2, 0.5]),
        step_s={
            replica: chance.choice([0.02, 0.1, 0.5, 1.0])
            for replica in range(workers * replicas)
            if chance.random() < 0.2
        },
        start_s=chance.choice([0.0, 0.0, 0.5, 3.0]),
        build_s=chance.choice([0.0, 0.0, 0.5, 3.0]),
    )


CROWDED = 0.005  # share of the seeds with many workers, which take some seconds
CROWD = 64  # workers


def crowded(drawn, chance):
    """A scenario of many workers, each of which takes a step or two."""
    batch_size, steps = drawn.setup.batch_size, chance.choice([1, 2])
    setup = replace(
        drawn.setup,
        workers=CROWD,
        replicas=1,
        epochs=1,
        lengths=(CROWD * steps * batch_size,),
        step_s={
            replica: chance.choice([0.02, 0.5, 1.0])
            for replica in range(CROWD)
            if chance.random() < 0.1
        },
    )
    return replace(drawn, setup=setup)


def master_of(chance):
    """Sharing or averaging, with options that do not depend on measured times."""
    fan_out = chance.choice([1, 2, 3, 8])
    min_replicas = chance.choice([1, 1, 1, 2])
    if chance.random() < 0.2:
        return ParameterAveraging(
            frequency=chance.choice([1, 2, 5]),
            compression=chance.choice([None, "dense8"]),
            fan_out=fan_out,
            min_replicas=min_replicas,
        )
    staleness = chance.choice([0, 0, 1, 4, "auto", None])
    return GradientSharing(
        threshold=chance.choice([FixedThreshold(2.0**-6), AdaptiveThreshold(2.0**-6)]),
        residual=KeepResidual(),
        apply=chance.choice(["eager", "eager", "eager", "strict"]),
        update_scale=chance.choice(["mean", "mean", "sum"]),
        max_staleness=staleness,
        exchange_every=chance.choice([1, 1, 2, 4]),
        warmup_steps=chance.choice([0, 0, 2]),
        fan_out=fan_out,
        min_replicas=min_replicas,
    )


AIMED = 0.2  # share of the seeds that aim at something


def aimed(drawn, chance):
    """Another scenario instead of one that was drawn, with some of its faults."""
    (aim,) = chance.choices(list(AIMS), [often for _, often in AIMS.values()])
    scenario = AIMS[aim][0](drawn, chance)
    others = drawn.faults[:2] if chance.random() < 0.5 and not drawn.may_fail else []
    return replace(scenario, faults=sorted([*scenario.faults, *others]), aim=aim)


def sharing(drawn, staleness, *, workers, each, fan_out=8, **more):
    """The fit of a scenario, with few replicas that share their updates every step.

    Args:
        each: Steps of a replica in an epoch.
    """
    master = GradientSharing(
        threshold=FixedThreshold(2.0**-6),
        residual=KeepResidual(),
        max_staleness=staleness,
        exchange_every=1,
        fan_out=fan_out,
    )
    few = {
        "workers": workers,
        "replicas": 1,
        "master": master,
        "epochs": 3,
        "lengths": (workers * each * drawn.setup.batch_size,),
        "step_s": {},
        "start_s": 0.0,
        "build_s": 0.0,
    }
    return replace(drawn.setup, **{**few, **more})


def strike(chance, kind, moment, number, at_s=0.0, lasts_s=0.0):
    """A fault of the replica of a moment, if it may be struck."""
    return Fault(moment, number, at_s, kind, chance.randrange(2**32), lasts_s, True)


def with_small_queues(drawn, chance):
    """Queues are full after a frame or two, as steps are shorter than requests."""
    setup = sharing(
        drawn,
        chance.choice([0, 1, 4, None]),
        workers=chance.randint(3, 5),
        each=6,
        fan_out=1,
        mean_step_s=0.05,
        **{name: chance.choice(FEW_BYTES) for name in QUEUES},
    )
    return replace(drawn, setup=setup, latency_s=chance.choice([1e-2, 5e-2]), faults=[])


def with_a_full_relay(drawn, chance):
    """The fastest of three replicas in lockstep hangs once it has sent a step.

    The relay's queue for it is then full, and one of the others comes to its next
    update, and waits for room, soon after the last heartbeat of the hanging one.
    """
    each = 6
    setup = sharing(
        drawn,
        0,
        workers=3,
        each=each,
        routing="plain",
        relay_bytes=1,
        mean_step_s=0.05,
        step_s={2: 0.02},
    )
    number = 1 + 3 * chance.randrange(each * setup.epochs)
    at_s, lasts_s = chance.uniform(2e-3, 1e-2), chance.uniform(10.0, 20.0)
    freeze = strike(chance, "freeze", "publish", number, at_s, lasts_s)
    return replace(drawn, setup=setup, latency_s=5e-4, faults=[freeze], spared=2)


def with_departures(drawn, chance):
    """Replicas leave just before the others have met, or just afterwards."""
    workers, latency_s = chance.randint(4, 6), chance.choice([2e-2, 5e-2])
    setup = sharing(
        drawn,
        chance.choice([1, 4, None]),
        workers=workers,
        each=4,
        routing=chance.choice(["plain", "plain", "mesh"]),
        mean_step_s=0.05,
    )
    faults = [
        strike(chance, "retire", "agree", first, chance.uniform(0.0, 4 * latency_s))
        for first in (1, 1 + workers)  # to arrive
    ]
    faults.append(strike(chance, "retire", "hold", 2, chance.uniform(0.0, latency_s)))
    return replace(drawn, setup=setup, latency_s=latency_s, faults=faults, spared=1)


def with_late_updates(drawn, chance):
    """Updates of a replica arrive after it was lost, at some or at none of the others.

    Or they come while the others compare what they have.
    """
    setup = sharing(
        drawn,
        chance.choice([0, 1, 1, 4, 4]),
        workers=chance.randint(3, 5),
        each=10,
        routing="mesh",
        fan_out=chance.choice([1, 8, 8]),
        mean_step_s=0.2,
    )
    number = chance.randint(1, 10 * setup.workers)
    at_s, lasts_s = chance.uniform(0.02, 0.1), chance.uniform(1.0, 7.0)
    sever = strike(chance, "sever", "publish", number, at_s, lasts_s)
    return replace(drawn, setup=setup, latency_s=2e-3, faults=[sever], spared=1)


def with_a_slow_sender(drawn, chance):
    """A replica joins while another one is late to hear of it, and sends updates."""
    setup = sharing(
        drawn,
        chance.choice([4, 8, None]),
        workers=chance.randint(3, 5),
        each=10,
        routing="mesh",
        mean_step_s=0.2,
    )
    at_s, lasts_s = chance.uniform(0.5, 3.0), 4.0
    joins = strike(chance, "join_beside_slow", START, 0, at_s, lasts_s)
    return replace(drawn, setup=setup, latency_s=1e-2, faults=[joins], spared=1)


def with_a_late_result(drawn, chance):
    """A worker hangs as its replica has left, for longer than a run waits for more."""
    workers = chance.randint(2, 4)
    setup = sharing(drawn, chance.choice([0, 4, None]), workers=workers, each=4)
    lasts_s = TIMEOUTS.rejoin + chance.uniform(5.0, 15.0)
    number = chance.randint(1, workers)
    freeze = strike(chance, "freeze", "leave", number, 0.0, lasts_s)
    return replace(drawn, setup=setup, faults=[freeze], spared=1)


QUEUES = "outbox_bytes", "inbox_bytes", "relay_bytes"
FEW_BYTES = 1, 600, 1000  # one frame, or one or two of those that are usual here
# What makes the scenario, and how often it is drawn, relative to the others.
AIMS = {
    "full queues": (with_small_queues, 2),
    "a full relay and a hanging replica": (with_a_full_relay, 2),
    "departures while replicas meet": (with_departures, 2),
    "late updates of a lost replica": (with_late_updates, 3),
    "a replica that joins beside a slow one": (with_a_slow_sender, 1),
    "a late result": (with_a_late_result, 1),
}


def expected_s(setup):
    """About how long the fit takes undisturbed."""
    steps = sum(setup.lengths) / setup.batch_size / (setup.workers * setup.replicas)
    return setup.epochs * (steps * setup.mean_step_s + 0.5) + 0.5


STOPPED = 0.15  # share of the seeds in which a callback stops the fit
AFTER_STOP = "kill", "freeze", "retire", "join", "restart_here", "break_connections"


def stopped(drawn, chance):
    """A scenario in which a replica stops the fit, or two do, and more goes wrong."""
    setup = drawn.setup
    steps = sum(setup.lengths) // setup.batch_size * setup.epochs
    first = chance.randint(1, steps)
    stops = first, first + chance.randint(1, setup.workers)
    faults = [
        Fault(
            "stop",
            1,
            chance.uniform(0.0, 5 * drawn.latency_s),
            kind,
            chance.randrange(2**32),
            lasts(chance, kind),
            chance.random() < 0.5,
        )
        for kind in chance.choices(AFTER_STOP, k=chance.choice([0, 1, 1, 2]))
    ]
    setup = replace(setup, stops=stops[: chance.choice([1, 1, 2])])
    return replace(drawn, setup=setup, faults=sorted([*drawn.faults, *faults]))


DAMAGED = 0.15  # share of the seeds in which updates are damaged
AFTER_DAMAGE = "retire", "kill", "join", "restart_here"


def damaged(drawn, chance):
    """A scenario in which updates are damaged, and replicas come and go just then."""
    setup = drawn.setup
    most = max(1, sum(setup.lengths) // setup.batch_size * setup.epochs)
    faults = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        (kind,) = chance.choices(DAMAGES, [2, 1])
        number = chance.randint(1, most)
        faults.append(strike(chance, kind, "publish", number))
        if chance.random() < 0.4:
            after, at_s = chance.choice(AFTER_DAMAGE), chance.uniform(0.0, 1.0)
            strikes_origin = chance.random() < 0.7
            fault = Fault(
                "publish",
                number,
                at_s,
                after,
                chance.randrange(2**32),
                0.0,
                strikes_origin,
            )
            faults.append(fault)
    return replace(drawn, faults=sorted([*drawn.faults, *faults]))


# Share of the seeds in which a relay merges updates, unless replicas are in lockstep.
MERGED = 0.5
# The longest is longer than any replica may wait for another one.
MERGE_S = 0.02, 0.3, 60.0
MERGED_BYTES = 1500  # room for some updates: others wait in a sum
# A replica subtracts its own updates from sums, so it has to keep the latest of them.
MERGED_INBOX_BYTES = 16 * (FRAME_BYTES + MESSAGE_BYTES)

VALIDATED = 0.3  # share of the seeds with validation data


def validated(drawn, chance):
    """A scenario with a validation after each epoch, in which more goes wrong."""
    setup = drawn.setup
    parts = chance.randint(1, 3 * setup.workers * setup.replicas)
    lengths = tuple(chance.randint(1, 2 * setup.batch_size) for _ in range(parts))
    faults = [
        Fault(
            "validate",
            chance.randint(1, parts * setup.epochs),
            chance.uniform(0.0, 2 * setup.mean_step_s),
            kind,
            chance.randrange(2**32),
            lasts(chance, kind),
            chance.random() < 0.7,
        )
        for kind in chance.choices(AFTER_STOP, k=chance.choice([0, 1, 1, 2]))
    ]
    setup = replace(setup, validation=lengths)
    return replace(drawn, setup=setup, faults=sorted([*drawn.faults, *faults]))


NARROWED = 0.1  # share of the seeds in which workers join over narrow links
SNAPSHOT_BYTES = 2500  # about


def narrow(drawn, chance):
    """A scenario in which workers join, and their snapshots take long."""
    setup = replace(drawn.setup, part_bytes=chance.choice([200, 500]))
    faults = [
        Fault(
            START,
            0,
            chance.uniform(0.2, 0.5 * expected_s(setup)),
            NARROW,
            chance.randrange(2**32),
            chance.choice([0.5, 1.5, 3.0]) * TIMEOUTS.request,
            False,
        )
        for _ in range(chance.choice([1, 1, 2]))
    ]
    return replace(drawn, setup=setup, faults=sorted([*drawn.faults, *faults]))


FLOCKED = 0.03  # share of the seeds in which many workers join at once
AFTER_JOIN = "kill", "kill_machine", "freeze", "retire", "break_connections"


def flocked(drawn, chance):
    """A scenario in which workers join that wait for each other's snapshots.

    Some of them are lost as they join, or while they are the donors of others. No link
    is narrow: it could not carry the updates of so many.
    """
    drawn = replace(drawn, faults=[f for f in drawn.faults if f.kind != NARROW])
    count = chance.choice([6, 12, 20])
    setup = replace(
        drawn.setup,
        epochs=3,
        stops=(),
        part_bytes=chance.choice([200, 500]),
        batch_bytes=2**22,  # else queues to so many grow for longer than a wait may be
    )
    at_s = chance.uniform(0.2, 0.5 * expected_s(setup))
    joins = [
        Fault(
            START,
            0,
            at_s + chance.uniform(0.0, 0.1),
            "join",
            chance.randrange(2**32),
            0.0,
            False,
        )
        for _ in range(count)
    ]
    losses = [
        Fault(
            chance.choice(["join", "activate"]),
            chance.randint(1, count),
            chance.uniform(0.0, 10 * drawn.latency_s),
            kind,
            chance.randrange(2**32),
            lasts(chance, kind),
            True,
        )
        for kind in chance.choices(AFTER_JOIN, k=chance.choice([0, 1, 2, 4]))
    ]
    faults = sorted([*drawn.faults, *joins, *losses])
    return replace(drawn, setup=setup, faults=faults)


class Fate:
    """Lets the faults of a scenario happen to a cluster."""

    def __init__(self, scenario, cluster):
        self.happened = []
        self._scenario = scenario
        self._cluster = cluster
        self._world = cluster.world
        self._network = cluster.network
        self._process = Process(cluster.world, "fate")
        self._counts = Counter({START: -1})
        self._on = {}  # by moment: what is done when it comes
        self._reach(START)
        cluster.on_moment = self._reach
        cluster.damages = self._damages
        cluster.network.damage = self._damage
        cluster.network.damage_sum = self._fetched_sum
        self._most_workers = max(32, scenario.setup.workers + 4)
        self._own = set()  # workers whose next update is damaged there
        self._copies = Counter()  # of updates of a worker, that are damaged next

    def _reach(self, moment, worker=None):
        """Something has happened, to a replica on a worker."""
        self._counts[moment] += 1
        self._on.pop(moment, lambda: None)()
        for fault in self._scenario.faults:
            if (fault.moment, fault.number) == (moment, self._counts[moment]):
                self._after(fault.at_s, functools.partial(self._strike, fault, worker))

    def _after(self, delay_s, action):
        self._world.after(delay_s, self._process, action)

    def _strike(self, fault, worker):
        self._random = random.Random(fault.chance)
        self._lasts_s = fault.lasts_s
        self._aim = worker if fault.aimed else None
        whom = getattr(self, f"_{fault.kind}")()
        if whom is not None:
            self.happened.append(fault.kind)
            self._world.note("fate", f"{fault.kind} {whom}")

    # ---- victims

    def _workers(self):
        """Workers that run, oldest first."""
        return [
            worker
            for worker in self._cluster.workers.values()
            if worker.process.alive
            and not worker.process.frozen
            and not worker.closing
            and worker.address in self._network.servers
        ]

    def _runs(self):
        return self._cluster.scheduler.plugin.runs.values()

    def _victim(self):
        """A worker that may go: not one of the oldest."""
        there = self._workers()[self._scenario.spared :]
        aim = [worker for worker in there if worker.address == self._aim]
        return self._random.choice(aim or there) if there else None

    # ---- faults; each returns whom it has struck, or None

    def _kill(self):
        victim = self._victim()
        if victim is None:
            return None
        victim.kill()
        if self._random.random() < 0.6:  # its nanny starts another
            self._after(self._random.uniform(0.5, 4.0), self._start)
        return victim.name

    def _kill_machine(self):
        victim = self._victim()
        if victim is None:
            return None
        # A replica that never joins ends the run, so those must be noticed at once.
        started = any(live.state.members.started for live in self._runs())
        victim.kill(notice_s=KEPT_S if started else 0.0)
        return victim.name

    def _restart_here(self):
        victim = self._victim()
        if victim is None:
            return None
        victim.kill()
        delay_s = self._random.uniform(1.0, 4.0)
        self._after(delay_s, functools.partial(self._start, victim.address))
        return victim.name

    def _start(self, address=None):
        if address in self._network.servers or self._network.cuts:
            return None
        worker = self._cluster.add_worker(address)
        self._cluster.arrive(worker)
        self._world.note("fate", f"starts {worker.name} at {worker.address}")
        return worker

    def _join(self):
        if len(self._workers()) >= self._most_workers:
            return None
        self._start()
        return "one more"

    def _freeze(self):
        victim = self._victim()
        if victim is None:
            return None
        victim.process.freeze()
        self._after(self._lasts_s, victim.process.thaw)
        return victim.name

    def _retire(self):
        victim = self._victim()
        if victim is None:
            return None
        victim.start(self._close(victim))
        return victim.name

    async def _close(self, worker):
        there = set(worker.plugin.endpoints)
        await worker.close()
        left = [replica for _, replica in there & worker.plugin.endpoints.keys()]
        setup = self._scenario.setup
        busy_s = max(
            setup.build_s, 1.5 * max([setup.mean_step_s, *setup.step_s.values()])
        )
        if left and busy_s < 1 and set(self.happened) <= QUIET:
            self._world.errors.append(f"replicas {left} stay on {worker.name}")

    def _cut(self, pairs):
        """Cut between addresses until it heals; one cut at a time."""
        if self._network.cuts or not pairs:
            return None
        self._network.cuts |= set(pairs)
        self._after(self._lasts_s, self._network.heal)
        return sorted({source for source, _ in pairs})

    def _groups(self, addresses):
        inside = [a for a in addresses if self._random.random() < 0.5]
        return inside, [a for a in addresses if a not in inside]

    def _cut_workers(self):
        inside, outside = self._groups([worker.address for worker in self._workers()])
        pairs = [(a, b) for a in inside for b in outside]
        return self._cut([*pairs, *((b, a) for a, b in pairs)])

    def _cut_one_way(self):
        inside, outside = self._groups([worker.address for worker in self._workers()])
        return self._cut([(a, b) for a in inside for b in outside])

    def _cut_briefly(self):
        """Nothing passes between some workers and the rest, the scheduler included."""
        inside, outside = self._groups([worker.address for worker in self._workers()])
        pairs = [(a, b) for a in inside for b in (*outside, SCHEDULER)]
        return self._cut([*pairs, *((b, a) for a, b in pairs)])

    _cut_off = _cut_briefly  # for longer

    def _sever(self):
        """A worker is cut off from others and dies; what it sent arrives later."""
        victim, there = self._victim(), self._workers()
        if victim is None or self._network.cuts:
            return None
        chance, latency_s = self._random, self._network.latency_s
        others = [worker.address for worker in there if worker is not victim]
        if chance.random() < 0.4:
            others = chance.sample(others, chance.randint(1, len(others)))
        if chance.random() < 0.6:
            later = functools.partial(
                self._after, chance.uniform(0.0, 2 * latency_s), self._network.heal
            )
            self._on["compare"] = later
        self._after(chance.uniform(0.2, 0.6), victim.kill)
        outgoing = [(victim.address, address) for address in others]
        return self._cut([*outgoing, *((b, a) for a, b in outgoing)])

    def _join_slowly(self):
        """A worker joins whose link takes so long for a snapshot."""
        if len(self._workers()) >= self._most_workers or self._network.cuts:
            return None
        worker = self._start()
        self._network.bandwidth[worker.address] = SNAPSHOT_BYTES / self._lasts_s
        return worker.name

    def _join_beside_slow(self):
        """A worker joins, and another one is slow meanwhile."""
        there = self._workers()
        if len(there) >= self._most_workers or self._network.slow:
            return None
        slow = self._random.choice(there).address
        self._network.slow[slow] = 100.0
        self._after(self._lasts_s, lambda: self._network.slow.pop(slow))
        self._start()
        return f"one more, beside {slow}"

    def _break_connections(self):
        there = self._workers()
        if len(there) < 2:
            return None
        first, second = self._random.sample(there, 2)
        aim = [worker for worker in there if worker.address == self._aim]
        if aim and second not in aim:
            first = aim[0]
        lost = self._network.break_between(first.address, second.address)
        return f"{first.name} and {second.name}: {lost} requests"

    def _damage_copies(self):
        """Some of the next copies of an update arrive damaged."""
        victim = self._sender()
        if victim is not None:
            self._copies[victim.address] = self._random.choice([1, 1, 2, 5])
        return victim and victim.name

    def _damage_own(self):
        """The next update of a worker is damaged before it is kept and sent."""
        victim = self._sender()
        if victim is not None:
            self._own.add(victim.address)
        return victim and victim.name

    def _sender(self):
        there = self._workers()
        aim = [worker for worker in there if worker.address == self._aim]
        return self._random.choice(aim or there) if there else None

    def _damages(self, address):
        damages = address in self._own
        self._own.discard(address)
        return damages

    def _damage(self, messages):
        """The messages of a request as they arrive."""
        return [self._arriving(message) for message in messages]

    def _arriving(self, message):
        kind, origin, sequence, *_ = message
        if kind == MessageKind.SUM:
            return (*message[:5], self._damage_sum(message[5]), *message[6:])
        if kind != MessageKind.UPDATE or not self._copies.total():
            return message
        for live in self._runs():
            member = live.state.members.replicas.get(origin)
            if member is not None and self._copies[member.worker]:
                self._copies[member.worker] -= 1
                self._cluster.oracle.damaged.add((origin, sequence))
                self._world.note("fate", f"damages update {sequence} of {origin}")
                return (*message[:5], flipped(message[5]).tobytes(), *message[6:])
        return message

    def _fetched_sum(self, frame):
        self._cluster.oracle.checks["sums fetched"] += 1
        return self._damage_sum(frame)

    def _damage_sum(self, frame):
        """A sum as it arrives; damaged if an update in it shall be."""
        if not self._copies.total():
            return frame
        names = [summand[:2] for summand in decode_sum(unwrap(frame)).summands]
        for live in self._runs():
            members = live.state.members.replicas
            workers = [members[o].worker for o, _ in names if o in members]
            struck = [worker for worker in workers if self._copies[worker]]
            if struck:
                self._copies[struck[0]] -= 1
                self._cluster.oracle.damaged.update(names)
                self._world.note("fate", f"damages the sum of {names}")
                return flipped(unwrap(frame)).tobytes()
        return frame

    def _slow_down(self):
        there = [SCHEDULER, *(w.address for w in self._workers())]
        slow = self._aim if self._aim in there else self._random.choice(there)
        if slow in self._network.slow:
            return None
        self._network.slow[slow] = self._random.choice([5.0, 20.0, 100.0])
        self._after(self._lasts_s, lambda: self._network.slow.pop(slow))
        return slow

    def _scheduler_late(self):
        process = self._cluster.scheduler.process
        if process.frozen:
            return None
        process.freeze()
        self._after(self._lasts_s, process.thaw)
        return "scheduler"

    _scheduler_hangs = _scheduler_late  # for longer

    def _scheduler_killed(self):
        scheduler = self._cluster.scheduler
        if not scheduler.process.alive:
            return None
        scheduler.process.kill()
        self._network.end(scheduler, 0.0)
        return "scheduler"

    def _client_gone(self):
        client, scheduler = self._cluster.client, self._cluster.scheduler
        if not client.process.alive or client.over:
            return None
        client.process.kill()
        gone = functools.partial(scheduler.client_gone, client.name)
        self._world.after(self._network.latency_s, scheduler.process, gone)
        return "client"

    def _kill_all(self):
        for worker in self._workers():
            worker.kill()
        return "all"


class Outcome(NamedTuple):
    """How a scenario has ended.

    Attributes:
        error: Type and text of the error of the fit; None: it has a model.
        resumed: Whether another fit has resumed a checkpoint of it.
        happened: Names of the faults.
        checks: How often each invariant was checked.
        events: Events of the world.
        now: Virtual seconds.
        digest: Checksum of the trace.
    """

    seed: int
    error: tuple | None
    resumed: bool
    happened: list
    checks: dict
    events: int
    now: float
    digest: str


def run(scenario, trace=None):
    """Let a scenario happen; raise `Violation` if what must hold does not."""
    cluster = Cluster(scenario.seed, scenario.setup, trace)
    world = cluster.world
    cluster.network.latency_s = scenario.latency_s
    fate = Fate(scenario, cluster)
    Inspector(cluster)
    client = cluster.client
    try:
        client.start(client.fit())
        world.run(lambda: client.over or not client.process.alive, LIMIT_S)
        check_end(scenario, cluster, scenario.setup.epochs)
        over_at, error = world.now, client.error
        end = max([over_at, *(fault.at_s for fault in scenario.faults)]) + SETTLE_S
        world.run(lambda: world.now >= end, end + 1)
        check_nothing_left(cluster)
        check(client.error == error, f"after the fit a task failed: {client.error}")
        if not client.process.alive:
            error = "no client", "it has gone"
        resumed = error is not None and resume(scenario, cluster)
        return Outcome(
            scenario.seed,
            error,
            resumed,
            fate.happened,
            dict(cluster.oracle.checks),
            world.events,
            over_at,
            world.trace.digest,
        )
    except Violation as violation:
        violation.add_note(f"at {world.now:.6f} s")
        raise
    finally:
        cluster.close()
        if client.checkpoints is not None:
            client.checkpoints.series.store.delete_all()


def resume(scenario, lost):
    """Resume a fit that has failed, on a new cluster; return whether it could be."""
    checkpoints, setup = lost.client.checkpoints, scenario.setup
    newest = None if checkpoints is None else checkpoints.series.newest()
    if newest is None:
        return False
    lost.close()
    plan = ResumePlan.of(newest)
    workers = random.Random(scenario.seed).randint(2, setup.workers + 1)
    setup = replace(setup, workers=workers)
    cluster = Cluster(scenario.seed, setup, lost.world.trace, plan)
    world, client, oracle = cluster.world, cluster.client, cluster.oracle
    world.note("client", f"resumes {newest.store.url} on {workers} workers")
    oracle.agreed, oracle.checks = lost.oracle.agreed, lost.oracle.checks
    Inspector(cluster)
    try:
        cluster.fit(LIMIT_S)
        check(client.error is None, f"the resumed fit ended with {client.error}")
        check_end(scenario, cluster, setup.epochs - plan.epoch)
        over_at = world.now
        world.run(lambda: world.now >= over_at + SETTLE_S, over_at + SETTLE_S + 1)
        check_nothing_left(cluster)
    finally:
        cluster.close()
    return True
