"""Predictions and advice from costs by hand: each number is worked out here."""

import dataclasses
import math
import pickle
import re

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
    encode_s=0.01,
    apply_s=0.002,
    decode_s=0.001,
    request_s=0.001,
    item_s=0.0001,
    update_bytes=12_500 - WIRE_BYTES,  # 0.1 Mbit with it
    density=1e-3,
)
FAST = Network(bandwidth_bits_per_s=1e9, latency_s=0.0)
SHARING = GradientSharing()
IN_STEP = GradientSharing(max_staleness=0)
UNBOUNDED = GradientSharing(max_staleness=None)


def measured(cores=2, **changes):
    return Measured(dataclasses.replace(COSTS, **changes), cores)


def plain(workers=2, master=SHARING, link=FAST, **changes):
    return predict(measured(**changes), master, link, workers)


def slow(bits_per_s, latency_s=0.0):
    return Network(bits_per_s, latency_s)


class TestOne:
    def test_it_is_a_step_and_nothing_else(self):
        one = plain(1)

        assert (one.efficiency, one.limit, one.carried) == (1.0, "compute", 1.0)
        assert one.step_s == pytest.approx(0.1)
        assert one.samples_per_s == pytest.approx(640)


class TestTwoThroughTheRelay:
    def test_a_step_is_the_sum_of_its_parts(self):
        two = plain()

        assert two.compute_s == pytest.approx(0.1)
        assert two.encode_s == pytest.approx(0.01)
        assert two.apply_s == pytest.approx(0.002)
        # Two requests, two updates, one of them to decode.
        assert two.messages_s == pytest.approx(2 * 0.001 + 2 * 0.0001 + 0.001)
        assert two.wait_s == 0
        assert two.step_s == pytest.approx(0.1152)

    def test_efficiency_is_what_is_left_of_a_step(self):
        two = plain()

        assert two.efficiency == pytest.approx(0.1 / 0.1152)
        assert two.samples_per_s == pytest.approx(128 / 0.1152)
        assert two.speed == pytest.approx(2 * 0.1 / 0.1152)
        assert two.limit == "encode"

    def test_exchanges_are_divided_by_the_steps_between_them(self):
        two = plain(master=GradientSharing(exchange_every=4))

        assert (two.encode_s, two.apply_s) == (0.0025, 0.0005)
        # How far everybody is, is said after each step all the same.
        assert two.messages_s == pytest.approx(2 * 0.001 + (2 * 0.0001 + 0.001) / 4)

    def test_in_step_everybody_waits_until_all_has_come(self):
        two = plain(master=IN_STEP)

        # Two updates leave the relay; it handles both of both.
        assert two.wait_s == pytest.approx(0.0002 + 2 * 0.0022)

    def test_in_step_a_long_way_is_waited_for_once_for_each_exchange(self):
        one = plain(master=IN_STEP, link=slow(1e9, 0.05))
        four = GradientSharing(max_staleness=0, exchange_every=4)

        assert one.wait_s == pytest.approx(2 * 0.05 + 0.0002 + 0.0044)
        assert one.limit == "latency"
        assert plain(master=four, link=slow(1e9, 0.05)).wait_s < one.wait_s / 3

    @pytest.mark.parametrize("master", [SHARING, UNBOUNDED], ids=["8", "None"])
    def test_who_may_be_ahead_does_not_wait_for_the_way(self, master):
        assert plain(master=master, link=slow(1e9, 0.05)).wait_s == 0

    def test_who_may_be_ahead_a_little_waits_for_a_very_long_way(self):
        one_ahead = GradientSharing(max_staleness=1)
        two = plain(master=one_ahead, link=slow(1e9, 0.05))

        # To the relay and on, each time just after a request has gone.
        requests = 0.005 + 2 * 0.05 + 0.01 + 2 * 0.05
        assert two.step_s == pytest.approx(2 * 0.05 + requests + 0.0002 + 0.0044)
        assert two.limit == "latency"


class TestLink:
    def test_who_may_be_ahead_a_little_goes_as_fast_as_it_carries(self):
        two = plain(link=slow(1e6))

        assert two.step_s == pytest.approx(0.2)  # two updates of 0.1 Mbit
        assert (two.limit, two.carried) == ("link", 1.0)

    def test_who_need_not_wait_puts_exchanges_off(self):
        two = plain(master=UNBOUNDED, link=slow(1e6))

        assert two.step_s == pytest.approx(0.1152)
        assert two.carried == pytest.approx(0.1152 / 0.2)
        assert two.limit == "link"

    def test_a_queue_of_few_large_updates_is_no_reason_to_wait(self):
        mesh = GradientSharing(routing="mesh")
        two = plain(master=mesh, link=slow(5e6), update_bytes=2**20)

        # One is under way, of eight that might be behind; a request goes each 5 ms.
        whole_s = 8 * (2**20 + WIRE_BYTES) / 5e6
        assert two.step_s == pytest.approx((whole_s + 0.005) / 8)
        assert two.carried == pytest.approx(two.step_s / whole_s)
        assert two.limit == "link"

    def test_the_relay_sends_every_update_to_all_others(self):
        four = plain(4, master=UNBOUNDED, link=slow(1e6))

        assert four.carried == pytest.approx(four.step_s / (4 * 3 * 0.1))

    def test_in_a_mesh_each_link_carries_what_one_receives(self):
        mesh = GradientSharing(routing="mesh", max_staleness=None)
        four = plain(4, master=mesh, link=slow(1e5))

        assert four.carried == pytest.approx(four.step_s / (3 * 1.0))

    @pytest.mark.parametrize("workers", [2, 5, 9, 64])
    @pytest.mark.parametrize(
        "master", [SHARING, IN_STEP, UNBOUNDED], ids=["8", "0", "None"]
    )
    def test_more_bandwidth_never_hurts_and_more_latency_never_helps(
        self, workers, master
    ):
        rates = [1e5, 1e6, 1e7, 1e8, 1e9, 1e10, math.inf]
        by_rate = [plain(workers, master, slow(rate, 1e-3)) for rate in rates]
        by_latency = [plain(workers, master, slow(1e8, s)) for s in (0, 1e-3, 0.1, 1)]

        carried = [row.carried * row.samples_per_s for row in by_rate]
        assert carried == sorted(carried)
        assert carried[0] < carried[-1]
        waits = [row.wait_s for row in by_latency]
        assert waits == sorted(waits)


class TestRelay:
    def test_it_is_the_limit_where_it_has_more_to_do_than_there_is_time(self):
        costs = {"gradients_s": 0.0, "encode_s": 0.0, "apply_s": 0.0, "decode_s": 0.0}
        eight = plain(8, **costs)

        assert eight.limit == "relay"
        assert eight.wait_s > 0

    def test_it_has_nothing_to_do_in_a_mesh(self):
        mesh = GradientSharing(routing="mesh")
        costs = {"gradients_s": 0.0, "encode_s": 0.0, "apply_s": 0.0}

        assert plain(8, master=mesh, **costs).limit == "messages"

    def test_requests_are_no_more_than_fit_into_a_step(self):
        short = plain(8, gradients_s=0.001, optimizer_s=0.0, item_s=0.0, decode_s=0.0)
        requests = short.messages_s / COSTS.request_s

        busy_s = short.step_s - short.wait_s
        # One to the relay; from it, which pauses for 10 ms, fewer than from all others.
        assert 0.02 < busy_s < 0.05
        assert requests == pytest.approx(1 + busy_s / 0.010, rel=1e-4)

    def test_two_updates_fit_into_one_request_where_steps_are_short(self):
        costs = {"gradients_s": 0.001, "optimizer_s": 0.0, "encode_s": 0.0}
        short = plain(2, apply_s=0.0, item_s=0.0, decode_s=0.0, **costs)

        assert short.step_s < 0.005
        requests = short.messages_s / COSTS.request_s
        busy_s = short.step_s - short.wait_s
        assert requests == pytest.approx(busy_s * (1 / 0.005 + 1 / 0.010), rel=1e-4)


class TestMany:
    def test_each_applies_an_update_of_each_other_one(self):
        assert plain(64).apply_s == pytest.approx(63 * 0.002)
        assert plain(64, apply_s=0.02).limit == "apply"

    def test_efficiency_falls_with_their_number(self):
        efficiencies = [plain(n).efficiency for n in range(1, 9)]

        assert efficiencies == sorted(efficiencies, reverse=True)
        assert len(set(efficiencies)) == 8

    def test_beyond_eight_they_send_to_each_other(self):
        nine = plain(9)

        # Eight others: a request to each and from each; each update once to each.
        expected = 16 * 0.001 + 16 * 0.0001 + 8 * 0.001
        assert nine.messages_s == pytest.approx(expected)

    def test_trees_are_as_deep_as_they_must_be(self):
        mesh = GradientSharing(max_staleness=0, routing="mesh")
        ways = [plain(n, mesh, slow(math.inf, 1)) for n in (9, 10, 73, 74)]

        assert [round(row.wait_s) for row in ways] == [1, 4, 4, 7]

    def test_one_that_hardly_lacks_anything_is_limited_by_nothing(self):
        row = plain(encode_s=0.001)

        assert row.efficiency > 0.9
        assert row.limit == "compute"


class TestHere:
    def here(self, workers, cores=2, **changes):
        return predict(measured(cores, **changes), SHARING, None, workers)

    def test_the_scheduler_takes_its_share_of_the_cores(self):
        two = self.here(2)

        assert two.step_s == pytest.approx(0.1152 + 0.0044 / 2)

    def test_with_cores_to_spare_nobody_waits(self):
        assert self.here(2, cores=3).wait_s == 0

    def test_more_than_there_are_cores_for_take_turns(self):
        four = self.here(4)

        assert four.limit == "cores"
        assert four.step_s > 2 * 0.112
        assert four.samples_per_s < self.here(2).samples_per_s

    def test_threads_take_a_core_each(self):
        assert self.here(2, cores=4, threads=4).step_s > 0.2

    def test_sharing_memory_counts_as_sharing_cores(self):
        slower = dataclasses.replace(COSTS, gradients_s=0.14)
        shared = Measured(COSTS, 4, slower, 2)

        two = predict(shared, SHARING, None, 2)

        assert two.limit == "cores"
        assert two.efficiency == pytest.approx(0.1 / (0.1152 + 0.05))

    def test_on_machines_of_their_own_they_share_none(self):
        slower = dataclasses.replace(COSTS, gradients_s=0.14)

        assert predict(Measured(COSTS, 4, slower, 2), SHARING, FAST, 2) == plain()


class TestSharedMemory:
    slower = dataclasses.replace(
        COSTS, gradients_s=0.15, encode_s=0.03, request_s=0.0005
    )

    def costs(self, workers, processes=2, cores=2):
        return Measured(COSTS, cores, self.slower, processes).here(workers)

    def test_costs_are_those_measured_for_as_many_processes_as_have_cores(self):
        assert self.costs(1) == COSTS
        assert self.costs(2) == self.costs(9) == self.slower
        assert Measured(COSTS, cores=8).here(8) == COSTS

    def test_costs_grow_linearly_and_never_below_those_measured(self):
        assert self.costs(2, 4, 4).gradients_s == pytest.approx(0.11)
        assert self.costs(4, 3, 4).gradients_s == pytest.approx(0.18)
        assert self.costs(4, 3, 4).request_s == 0.0005

    def test_processes_with_several_threads_need_a_core_for_each(self):
        assert measured(8, threads=3).most_at_once == 2


UP_TO_64 = tuple(range(1, 65))


def advice(workers=UP_TO_64, link=FAST, master=None, **changes):
    master = GradientSharing() if master is None else master
    return advise(measured(**changes), master, link, workers)


def number_of(text, before):
    return int(re.search(rf"(\d+){before}", text)[1])


def test_one_worker_is_no_question():
    assert advice((1,)) == (
        "One worker sends nothing: ask for more to see whether they pay."
    )


def test_where_all_pay_nothing_is_to_be_changed():
    assert advice((1, 2, 4)) == (
        "Pays up to 4 workers, 3.2 times as fast as one; nothing was asked about more."
    )


def test_one_that_is_asked_about_alone_pays_too():
    assert advice((4,)).startswith("Pays up to 4 workers, ")


def test_where_it_ends_the_first_that_does_not_pay_is_named_with_its_limit():
    said = advice()

    last = number_of(said, " workers, ")
    assert 8 < last < 64
    assert f"at {last + 1} workers" in said
    assert "the limit is 'messages', and the efficiency 4" in said


def test_a_step_that_is_short_does_not_pay():
    said = advice(gradients_s=0.0005, optimizer_s=0.0001)

    assert said.startswith("Does not pay: ")
    assert "64 times" not in said


def test_what_helps_is_named_with_how_far():
    said = advice(gradients_s=0.001, optimizer_s=0.0, apply_s=0.0, decode_s=0.0)

    assert said.startswith("Does not pay: 64 workers, 0.43 times as fast as one at ")
    assert re.search(
        r"It would pay up to \d+ with 16 times the batch \(accumulate=16\)\.$", said
    )


def test_faster_than_one_is_not_yet_paid_for():
    said = advice(encode_s=0.5)

    assert said.startswith("Hardly pays: 64 workers, ")
    assert "with 16 times the batch (accumulate=16)." in said


def test_the_mildest_change_that_helps_is_named():
    said = advice(encode_s=0.15)

    assert "with exchange_every=4," in said
    assert "with 4 times the batch (accumulate=4)." in said
    assert "=16" not in said


def test_applying_is_not_saved_by_exchanging_less():
    said = advice(apply_s=0.06, encode_s=0.0, request_s=0.0)

    assert "exchange_every" not in said
    assert "times the batch" in said


def test_a_slow_link_is_helped_by_sending_less():
    mesh, slow = GradientSharing(routing="mesh"), Network(3e6, 0.0)
    said = advice(link=slow, master=mesh, encode_s=0.0, request_s=0.0)

    paying = number_of(said, " workers, ")
    assert "the limit is 'link'" in said
    assert number_of(said, " with a density of 1e-04 instead of 1e-03") > 2 * paying


def test_where_nobody_waits_too_few_exchanges_do_not_pay():
    unbounded = GradientSharing(max_staleness=None)
    said = advice((1, 2, 3), Network(1e5, 0.0), unbounded)

    assert said.startswith("Hardly pays: 3 workers, ")
    assert "the link carries 6% of the exchanges at 2 workers" in said


def test_where_nothing_helps_it_says_so():
    said = advice((1, 2), gradients_s=1e-5, optimizer_s=0.0, encode_s=0.9)

    assert said.endswith(
        "Neither exchange_every=16 nor 16 times the batch nor a tenth of the density "
        "would change that."
    )


def test_an_interval_of_the_masters_own_is_made_longer():
    said = advice(encode_s=0.5, master=GradientSharing(exchange_every=2))

    assert "with exchange_every=8," in said


@pytest.mark.parametrize("encode_s", [0.099, 0.11], ids=["below", "above"])
def test_it_pays_from_half_of_each_worker_on(encode_s):
    costs = {"apply_s": 0.0, "decode_s": 0.0, "item_s": 0.0, "request_s": 0.0}

    said = advice((1, 2), encode_s=encode_s, **costs)

    assert said.startswith("Pays" if encode_s < 0.1 else "Does not pay: 2 workers, 0.9")


def planned(workers=(1, 2, 4), link=FAST, **changes):
    costs = measured(**changes)
    rows = tuple(predict(costs, SHARING, link, count) for count in workers)
    return Plan(rows, "Advice <of 1>.", costs, link)


def test_it_prints_a_table_under_what_it_is_about():
    heading, names, one, two, four, advice = str(planned()).splitlines()

    assert heading == (
        "1,000,000 parameters, 64 rows a step, 1 thread; 12.5 KB an update; "
        "1 Gbit/s, 0 ms one way"
    )
    assert names == "workers  efficiency  samples/s  step ms    limit  carried"
    assert one.split() == ["1", "1.00", "640", "100.0", "compute", "100%"]
    assert two.split() == ["2", "0.87", "1,111", "115.2", "encode", "100%"]
    assert len({len(line) for line in (names, one, two, four)}) == 1
    assert advice == "Advice <of 1>."


def test_it_says_where_workers_are_on_one_machine():
    heading = str(planned(link=None, threads=2)).splitlines()[0]

    assert heading.endswith("2 threads; 12.5 KB an update; processes of this machine")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (16, [*range(1, 17)]),
        (17, [1, 2, 4, 8, 16, 17]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_of_many_rows_some_are_shown(last, expected):
    _, _, *rows, _ = str(planned(tuple(range(1, last + 1)))).splitlines()

    assert [int(row.split()[0]) for row in rows] == expected


def test_all_rows_are_there():
    assert [row.workers for row in planned(tuple(range(1, 65))).rows] == [*range(1, 65)]


def test_as_a_frame_it_has_all_rows_and_all_parts():
    frame = planned().to_pandas()

    assert frame.index.tolist() == [1, 2, 4]
    assert frame.loc[2, "encode_s"] == 0.01
    parts = ["compute_s", "encode_s", "apply_s", "messages_s", "wait_s"]
    assert frame[parts].sum(axis=1).tolist() == pytest.approx(frame["step_s"].tolist())


def test_in_a_notebook_it_is_a_table_of_the_same():
    shown = planned()._repr_html_()

    assert shown.count("<tr>") == 4
    assert "<td>1,111</td>" in shown
    assert "<p>Advice &lt;of 1&gt;.</p>" in shown


def test_it_is_frozen_and_can_be_kept():
    plan = planned()

    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.advice = ""
