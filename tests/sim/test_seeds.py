"""Fits whose workers, connections and scheduler fail, each by a seed.

``make sim SEEDS=1000`` runs more of them.
"""

import logging

import pytest
import torch

from tests.sim import mutations, scenario, seeds
from tests.sim.scenario import Scenario
from tests.sim.world import Violation


@pytest.fixture(autouse=True)
def quiet():
    """One thread of torch at a time, and no warnings of what the faults do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(50))
def test_what_must_hold_holds_whatever_fails(seed):
    outcome = seeds.run_seed(seed)

    assert not isinstance(outcome, str), seeds.report(seed, outcome)
    assert outcome.checks["looks at all queues"] > 0


def test_a_seed_stands_for_one_scenario():
    assert str(Scenario.of(7)) == str(Scenario.of(7)) != str(Scenario.of(8))


def test_the_seeds_have_every_kind_of_fault():
    drawn = {fault.kind for seed in range(200) for fault in Scenario.of(seed).faults}

    assert drawn == {*scenario.USUAL, *scenario.FATAL, *scenario.SPECIAL}


def test_the_seeds_have_every_aim():
    aims = {Scenario.of(seed).aim for seed in range(200)}

    assert aims == {"", *scenario.AIMS}


def test_some_seeds_stop_the_fit_early():
    drawn = [Scenario.of(seed) for seed in range(200)]

    stopped = [one for one in drawn if one.setup.stops]
    after = {f.kind for one in stopped for f in one.faults if f.moment == "stop"}
    assert after == {*scenario.AFTER_STOP}


def test_a_violation_names_its_seed_the_last_events_and_the_command(monkeypatch):
    def broken(own, cluster, epochs):
        raise Violation("this must not be")

    monkeypatch.setattr(scenario, "check_end", broken)

    failure = seeds.run_seed(3)
    said = seeds.report(3, failure)

    assert failure.startswith("this must not be at ")
    assert "scheduler: <- worker-0: daskdl_" in said
    assert f"seed 3: {failure}" in said
    assert "repeat it: python -m tests.sim --seed 3 --trace trace.txt" in said


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_mutation_changes_one_place(name):
    mutation = mutations.MUTATIONS[name]
    spec = mutations.find(mutation)

    compile(
        mutations.changed(spec.loader.get_data(spec.origin), mutation), name, "exec"
    )
