"""Costs on one machine, alone and beside others."""

import dataclasses

import pytest

from daskdl.planning.cost_model import Measured, mean
from tests.support.planned import COSTS

SLOWER = dataclasses.replace(COSTS, gradients_s=0.15, encode_s=0.03, request_s=0.0005)


def beside(workers, processes=2, cores=2):
    return Measured(COSTS, cores, SLOWER, processes).here(workers)


def test_the_mean_of_several_is_one_of_their_times_and_bytes_only():
    costs = mean([COSTS, SLOWER])

    assert costs.gradients_s == pytest.approx((COSTS.gradients_s + 0.15) / 2)
    assert costs.request_s == pytest.approx((COSTS.request_s + 0.0005) / 2)
    assert (costs.rows, costs.parameters) == (COSTS.rows, COSTS.parameters)


def test_alone_nothing_is_shared():
    assert beside(1) == COSTS


def test_as_many_as_were_measured_cost_what_was_measured():
    assert beside(2) == SLOWER


def test_more_than_there_are_cores_for_are_not_slower_still():
    assert beside(9) == SLOWER


def test_between_them_costs_grow_evenly():
    assert beside(2, processes=4, cores=4).gradients_s == pytest.approx(0.11)


def test_beyond_those_measured_costs_go_on_growing():
    costs = beside(4, processes=3, cores=4)

    assert costs.gradients_s == pytest.approx(0.18)
    assert costs.request_s == 0.0005  # that was less: nothing becomes less still


def test_processes_with_several_threads_need_a_core_for_each():
    assert Measured(dataclasses.replace(COSTS, threads=3), cores=8).most_at_once == 2


def test_without_a_measurement_beside_others_nothing_is_known_of_it():
    assert Measured(COSTS, cores=8).here(8) == COSTS


def test_batches_add_up_gradients_and_nothing_else():
    costs = COSTS.accumulated(4)

    assert (costs.rows, costs.gradients_s) == (256, 0.36)
    assert (costs.optimizer_s, costs.encode_s) == (0.01, 0.01)


def test_thinner_updates_have_fewer_bytes_and_cost_the_same_time():
    costs = COSTS.thinned(10)

    assert (costs.update_bytes, costs.density) == (COSTS.update_bytes / 10, 1e-4)
    assert (costs.apply_s, costs.decode_s) == (COSTS.apply_s, COSTS.decode_s)


def test_gathered_updates_save_nothing_of_their_own():
    costs = COSTS.gathered(4)

    assert costs.update_bytes == 4 * COSTS.update_bytes
    assert (costs.apply_s, costs.decode_s) == (0.008, 0.004)
    assert costs.encode_s == COSTS.encode_s


def test_a_change_is_made_to_both():
    changed = Measured(COSTS, 2, SLOWER, 2).changed(lambda costs: costs.accumulated(2))

    assert changed.alone.rows == changed.together.rows == 128
