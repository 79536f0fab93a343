"""From costs to speeds: each number here is worked out by hand."""

import dataclasses
import math

import pytest

from daskdl.channel.protocol import WIRE_BYTES
from daskdl.planning.cost_model import Measured, Network, predict
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.planned import COSTS, FAST, measured

SHARING = GradientSharing()
IN_STEP = GradientSharing(max_staleness=0)
UNBOUNDED = GradientSharing(max_staleness=None)


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
