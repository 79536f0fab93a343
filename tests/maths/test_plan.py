"""Predictions and advice from costs by hand: each number is worked out here."""

import math
import re
from dataclasses import replace

import pytest

from daskdl.channel.protocol import WIRE_BYTES
from daskdl.planning.cost_model import Costs, Measured, Network, predict
from daskdl.planning.plan import Plan, advise
from daskdl.training.gradient_sharing import GradientSharing

COSTS = Costs(
    rows=64,
    parameters=1_000_000,
    threads=1,
    gradients_s=0.09,
    optimizer_s=0.01,
    overhead_s=0.0,
    encode_s=0.01,
    apply_s=0.002,
    dense_s=0.02,
    decode_s=0.001,
    request_s=0.001,
    item_s=0.0001,
    update_bytes=12_500 - WIRE_BYTES,  # 0.1 Mbit with it
    density=1e-3,
)
FAST = Network(bandwidth_bits_per_s=1e9, latency_s=0.0)
SHARING = GradientSharing(exchange_every=1)
IN_STEP = replace(SHARING, max_staleness=0)
UNBOUNDED = replace(SHARING, max_staleness=None)


def measured(cores=2, **changes):
    return Measured(replace(COSTS, **changes), cores)


def plain(workers=2, master=SHARING, link=FAST, cores=2, **changes):
    return predict(measured(cores, **changes), master, link, workers)


def slow(bits_per_s, latency_s=0.0):
    return Network(bits_per_s, latency_s)


MESH = replace(SHARING, routing="mesh")
MERGED = replace(SHARING, routing="merged")
# Two requests with an update each, one of them to decode.
TWO_MESSAGES_S = 2 * 0.001 + 0.001
# Two updates leave the relay; it handles both requests of both replicas.
RELAYED_S = 0.0002 + 2 * 0.002
NO_WORK = {"gradients_s": 0.0, "encode_s": 0.0, "apply_s": 0.0}

# Workers, other arguments, and what comes of them.
CASES = {
    "one worker only makes steps": (
        1,
        {},
        {"step_s": 0.1, "efficiency": 1.0, "samples_per_s": 640, "limit": "compute"},
    ),
    "a step is the sum of its parts": (
        2,
        {},
        {
            **{"compute_s": 0.1, "encode_s": 0.01, "apply_s": 0.002, "wait_s": 0},
            **{"messages_s": TWO_MESSAGES_S, "step_s": 0.115, "limit": "encode"},
            **{"efficiency": 0.1 / 0.115, "samples_per_s": 128 / 0.115},
        },
    ),
    "exchanges are divided by the steps between them": (
        2,
        {"master": GradientSharing(exchange_every=4)},
        {"encode_s": 0.0025, "apply_s": 0.0005, "messages_s": TWO_MESSAGES_S / 4},
    ),
    "the work of every step is not divided": (
        2,
        {"master": GradientSharing(exchange_every=4), "overhead_s": 0.003},
        {"encode_s": 0.003 + 0.0025},
    ),
    "progress between exchanges has requests of its own": (
        2,
        {"master": GradientSharing(exchange_every=4, max_staleness=2)},
        {"messages_s": (4 * 0.001 + 0.001) / 4},
    ),
    "an interval is as long as an exchange costs": (
        2,
        {"master": GradientSharing(), "encode_s": 0.009},  # 0.11 steps
        {"encode_s": 0.009 / 4, "apply_s": 0.0005},
    ),
    "with an automatic interval, replicas may be far ahead": (
        2,
        {
            **{"master": replace(MESH, exchange_every="auto"), "encode_s": 0.009},
            "link": slow(1e5),  # 1 s for an update, every 4 steps
        },
        {"wait_s": 0, "encode_s": 0.009 / 4, "limit": "link"},
    ),
    "more workers have longer intervals": (
        33,
        # 0.74 steps, less than 3 % of 32
        {"master": replace(MESH, exchange_every="auto")},
        {
            **{"encode_s": 0.01 / 32, "apply_s": 0.002},
            # Each interval: a request to and from each of 32 others, an update of each.
            "messages_s": (64 * 0.001 + 32 * 0.001) / 32,
        },
    ),
    "at staleness 0 all wait for all": (2, {"master": IN_STEP}, {"wait_s": RELAYED_S}),
    "at staleness 0 the latency counts": (
        2,
        {"master": IN_STEP, "link": slow(1e9, 0.05)},
        {"wait_s": 2 * 0.05 + RELAYED_S, "limit": "latency"},
    ),
    "at staleness 1 a long latency counts": (
        2,
        {"master": replace(SHARING, max_staleness=1), "link": slow(1e9, 0.05)},
        # To the relay and on, each time just after a request has gone.
        {
            "step_s": 2 * 0.05 + (0.005 + 2 * 0.05 + 0.01 + 2 * 0.05) + RELAYED_S,
            "limit": "latency",
        },
    ),
    "with a bounded staleness the link sets the speed": (
        2,
        {"link": slow(1e6)},
        {"step_s": 0.2, "limit": "link", "carried": 1.0},  # two updates of 0.1 Mbit
    ),
    "without a bound exchanges are put off": (
        2,
        {"master": UNBOUNDED, "link": slow(1e6)},
        {"step_s": 0.115, "limit": "link", "carried": 0.115 / 0.2},
    ),
    "a queue of few large updates delays nobody": (
        2,
        {"master": MESH, "link": slow(5e6), "update_bytes": 2**20},
        # One is under way, of eight that might be behind; a request goes each 5 ms.
        {"step_s": (8 * (2**20 + WIRE_BYTES) / 5e6 + 0.005) / 8, "limit": "link"},
    ),
    "an overloaded relay is the limit": (
        8,
        {**NO_WORK, "decode_s": 0.0},
        {"limit": "relay"},
    ),
    "a mesh has no relay": (
        8,
        {**NO_WORK, "master": MESH},
        {"limit": "messages"},
    ),
    "in a mesh, each replica applies an update of each other": (
        64,
        {"master": MESH},
        {"apply_s": 63 * 0.002},
    ),
    "by default, updates of more than eight workers are merged": (
        9,
        {},
        # A request with its update, and one with the sum of nine, each of which has
        # 1.4 times the entries.
        {"messages_s": 2 * 0.001 + 9 * 1.4 * 0.001, "apply_s": 8 * 0.002},
    ),
    "in lockstep, more than eight workers form a mesh": (
        9,
        {"master": IN_STEP},
        # A request to and from each of eight others, and an update of each.
        {"messages_s": 16 * 0.001 + 8 * 0.001},
    ),
    "of merged updates a replica gets the sum of all": (
        33,
        {"master": MERGED, "update_bytes": 10_000.0},
        {
            "apply_s": 0.02,  # of a dense update, less than 32 of 0.002 s
            # A request with its update, and one with the sum: as many bytes as 33
            # updates with 1.4 times the entries.
            "messages_s": 2 * 0.001 + 33 * 1.4 * 0.001,
        },
    ),
    "the sum of many updates is dense": (
        1024,  # 32 doubled five times
        {"master": MERGED, "update_bytes": 10_000.0},
        {"apply_s": 0.02, "messages_s": 2 * 0.001 + 1.4e6 / 10_000 * 0.001},
    ),
    "a large sum goes along a tree": (
        21,
        {
            "master": replace(MERGED, max_staleness=None),
            **{"update_bytes": 12_500.0, "link": slow(1e6)},
            **dict.fromkeys(("request_s", "item_s", "decode_s"), 0.0),
        },
        # Steps of 0.13 s, and the link of the scheduler: 21 updates, two sums.
        {"carried": 0.13 / ((21 * 17_532 + 2 * (21 * 17_500 + 32)) * 8 / 1e6)},
    ),
    "a small sum goes to each worker": (
        21,
        {
            "master": replace(MERGED, max_staleness=None),
            **{"update_bytes": 1000.0, "link": slow(1e5)},
            **dict.fromkeys(("request_s", "item_s", "decode_s"), 0.0),
        },
        {"carried": 0.13 / ((21 * 1432 + 21 * (21 * 1400 + 32)) * 8 / 1e5)},
    ),
    "updates in the relay count as unsent": (
        2,
        {
            **{"master": GradientSharing(), "encode_s": 0.009},
            "link": slow(1e5),  # 1 s for an update, every 4 steps
        },
        # Two updates of 1 s leave the scheduler every 4 steps. In transit are 64 KiB
        # and two updates, of the 32 that fit into 128 steps.
        {"step_s": 2 * 0.25 * 4 / 128 * (2**16 / 12_500 + 2)},
    ),
    "of few merged updates each is applied": (
        2,
        {"master": MERGED},
        {"apply_s": 0.002},
    ),
    "less than a tenth is missing": (2, {"encode_s": 0.001}, {"limit": "compute"}),
    "on one machine the scheduler uses the cores too": (
        2,
        {"link": None},
        {"step_s": 0.115 + 0.004 / 2},
    ),
    "with spare cores nobody waits": (2, {"link": None, "cores": 3}, {"wait_s": 0}),
    "on one machine processes share too few cores": (
        4,
        {"link": None},
        {"limit": "cores"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_prediction(case):
    workers, arguments, expected = CASES[case]

    row = plain(workers, **arguments)

    assert {name: getattr(row, name) for name in expected} == {
        name: value if isinstance(value, str) else pytest.approx(value, abs=1e-12)
        for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("master", "copies"),
    [
        (UNBOUNDED, 4 * 3),  # the relay sends every update to all others
        (replace(MESH, max_staleness=None), 3),
    ],
    ids=["relay", "mesh"],
)
def test_a_slow_link_carries_a_share_of_the_exchanges(master, copies):
    four = plain(4, master=master, link=slow(1e5))

    assert four.carried == pytest.approx(four.step_s / copies)


@pytest.mark.parametrize("workers", [2, 9])  # by relay, and merged or as a mesh
@pytest.mark.parametrize(
    "master",
    [SHARING, IN_STEP, UNBOUNDED, MERGED],
    ids=["8", "0", "None", "merged"],
)
def test_more_bandwidth_never_hurts_and_more_latency_never_helps(workers, master):
    rates = [1e5, 1e6, 1e7, 1e8, 1e9, 1e10, math.inf]
    by_rate = [plain(workers, master, slow(rate, 1e-3)) for rate in rates]
    by_latency = [plain(workers, master, slow(1e8, s)) for s in (0, 1e-3, 0.1, 1)]

    carried = [row.carried * row.samples_per_s for row in by_rate]
    assert carried == sorted(carried)
    assert carried[0] < carried[-1]
    waits = [row.wait_s for row in by_latency]
    assert waits == sorted(waits)


def test_a_step_has_no_more_requests_than_fit_into_it():
    short = plain(8, gradients_s=0.001, optimizer_s=0.0, item_s=0.0, decode_s=0.0)

    busy_s = short.step_s - short.wait_s
    # One to the relay; from it, which pauses for 10 ms, fewer than from all others.
    assert 0.02 < busy_s < 0.05
    requests = short.messages_s / COSTS.request_s
    assert requests == pytest.approx(1 + busy_s / 0.010, rel=1e-4)


def test_with_staleness_0_the_latency_counts_once_for_each_exchange():
    four = GradientSharing(max_staleness=0, exchange_every=4)
    frequent, rare = (
        plain(master=master, link=slow(1e9, 0.05)) for master in (IN_STEP, four)
    )

    assert rare.wait_s < frequent.wait_s / 3
    # Of updates that reach the relay together, all but one wait for its next request.
    assert plain(3, IN_STEP, slow(1e9, 0.05)).wait_s > 2 * 0.05 + (0.01 + 2 * 0.05)


def test_the_latency_grows_with_the_depth_of_the_trees():
    mesh = replace(MESH, max_staleness=0)
    ways = [plain(n, mesh, slow(math.inf, 1)) for n in (9, 10, 73, 74)]

    assert [round(row.wait_s) for row in ways] == [1, 4, 4, 7]


def test_on_one_machine_costs_are_those_measured_together():
    slower = replace(COSTS, gradients_s=0.15, encode_s=0.03, request_s=0.0005)
    both = Measured(COSTS, 4, slower, 3)

    assert both.here(1) == COSTS
    # They grow linearly up to as many as have cores, and never below those measured.
    assert both.here(2).gradients_s == pytest.approx(0.12)
    assert both.here(4).gradients_s == both.here(9).gradients_s == pytest.approx(0.18)
    assert both.here(4).request_s == 0.0005
    assert Measured(replace(COSTS, threads=3), 8).most_at_once == 2
    shared = Measured(COSTS, 4, replace(COSTS, gradients_s=0.14), 2)
    assert predict(shared, SHARING, None, 2).limit == "cores"
    assert predict(shared, SHARING, FAST, 2) == plain()


UP_TO_64 = tuple(range(1, 65))


def advice(workers=UP_TO_64, link=FAST, master=SHARING, **changes):
    costs = measured(**changes)
    rows = [predict(costs, master, link, count) for count in workers]
    return advise(rows, costs, master, link)


# Numbers of workers, other arguments, and parts of the advice.
ADVICE = {
    "no question": ((1,), {}, ["A single worker sends nothing; plan for more"]),
    "all pay": (
        *((1, 2, 4), {}),
        ["Pays off up to 4 workers, 3.3 times as fast as one; no more workers were p"],
    ),
    "hundreds pay": (
        (1, 256),
        {"gradients_s": 9.99, "link": slow(math.inf)},
        ["Pays off up to 256 workers, 253 times as fast as one;"],
    ),
    "some pay": (
        UP_TO_64,
        {"master": MESH},
        ["Pays off up to ", "the limit is 'messages', and the e"],
    ),
    "a larger batch helps": (
        UP_TO_64,
        {"gradients_s": 0.001, "optimizer_s": 0.0, "apply_s": 0.0, "decode_s": 0.0}
        | {"master": MESH},
        [
            "Does not pay off: 64 workers, 0.47 times as fast",
            "It would pay off up to",
            "16 times the batch (accumulate=1",
        ],
    ),
    "the mildest change is named": (
        *(UP_TO_64, {"encode_s": 0.15}),
        ["with exchange_every=4,", "with 4 times the batch (accumulate=4)."],
    ),
    "too few exchanges do not pay": (
        *((1, 2, 3), {"link": Network(1e5, 0.0), "master": UNBOUNDED}),
        ["Hardly pays off: 3 workers, ", "at 2 workers, the link carries 6% of the ex"],
    ),
    "nothing helps": (
        (1, 2),
        {"gradients_s": 1e-3, "optimizer_s": 0.0, "encode_s": 0.9},
        ["Neither exchange_every=16 nor 16 times the batch nor a tenth of the density"],
    ),
    "a short step": (
        (1, 2),
        {"gradients_s": 1e-4, "optimizer_s": 0.0, "encode_s": 0.0},
        [
            "Does not pay off: a step takes 0.1 ms. Below 1 ms, ",
            " With 16 times the batch (accumulate=16), a step would take 1.6 ms",
        ],
    ),
    "a very short step": (
        (1, 2),
        {"gradients_s": 1e-5, "optimizer_s": 0.0},
        ["Does not pay off: a step takes 0.01 ms.", "take as long as steps."],
    ),
    **{
        verdict: (
            (1, 2),
            {"encode_s": encode_s, "apply_s": 0.0, "decode_s": 0.0}
            | {"item_s": 0.0, "request_s": 0.0},
            [verdict],
        )
        for verdict, encode_s in (("Pays off", 0.099), ("Does not pay off: 2", 0.11))
    },
}


@pytest.mark.parametrize("case", ADVICE)
def test_the_advice(case):
    workers, arguments, parts = ADVICE[case]

    text = advice(workers, **arguments)

    assert [part for part in parts if part not in text] == []


def test_with_adam_a_plan_has_more_frequent_exchanges():
    costs = {"encode_s": 0.009, "apply_s": 0.002}  # an exchange: 0.11 of a step
    auto, every = GradientSharing(), (2, 4)

    chosen = [
        plain(master=auto, adaptive=adaptive, **costs) for adaptive in (True, False)
    ]

    masters = [GradientSharing(exchange_every=k) for k in every]
    by_hand = [plain(master=master, **costs).step_s for master in masters]
    assert [row.step_s for row in chosen] == pytest.approx(by_hand)
    assert by_hand[0] > by_hand[1]


def test_rarer_exchanges_do_not_save_applying():
    text = advice(master=MESH, apply_s=0.06, encode_s=0.0, request_s=0.0)

    assert "exchange_every" not in text
    assert "times the batch" in text


def test_a_lower_density_helps_on_a_slow_link():
    text = advice(link=Network(3e6, 0.0), master=MESH, encode_s=0.0, request_s=0.0)

    paying = int(re.search(r"(\d+) workers, ", text)[1])
    sparser = int(re.search(r"(\d+) with a density of 1e-04 instead of", text)[1])
    assert "the limit is 'link'" in text
    assert sparser > 2 * paying


def planned(workers=(1, 2, 4)):
    rows = tuple(predict(measured(), SHARING, FAST, count) for count in workers)
    return Plan(rows, "Advice.", measured(), FAST)


def test_a_printed_plan_has_a_heading_a_table_and_the_advice():
    heading, names, first, second, four, advice = str(planned()).splitlines()

    assert heading == (
        "1,000,000 parameters, 64 rows a step, 1 thread; 12.5 KB an update; "
        "1 Gbit/s, 0 ms one way"
    )
    assert names == "workers  efficiency  samples/s  step ms    limit  carried"
    assert first.split() == ["1", "1.00", "640", "100.0", "compute", "100%"]
    assert second.split() == ["2", "0.87", "1,113", "115.0", "encode", "100%"]
    assert len({len(line) for line in (names, first, second, four)}) == 1
    assert advice == "Advice."
    _, _, *rows, _ = str(planned(range(1, 65))).splitlines()
    assert [int(row.split()[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    assert planned().to_pandas().loc[2, "encode_s"] == 0.01
