"""Fits whose workers, connections and scheduler fail, each by a seed.

``make sim SEEDS=1000`` runs more of them.
"""

import contextlib
import logging
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from daskdl.compression import replica_vector
from daskdl.training import gradient_sharing
from tests.sim import mutations, oracle, scenario, seeds
from tests.sim.fit import Cluster, Setup
from tests.sim.scenario import Fate, Fault, Scenario
from tests.sim.world import Trace, Violation


@pytest.fixture(autouse=True)
def quiet():
    """One thread of torch at a time, and no warnings of what the faults do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed in seeds.CROWDED else ())
        for seed in seeds.CHOSEN
    ],
)
def test_what_must_hold_holds_whatever_fails(seed):
    outcome = seeds.run_seed(seed)

    assert not isinstance(outcome, str), seeds.report(seed, outcome)
    assert outcome.checks["looks at all queues"] > 0


CHANGING = 15, 24, 56, 68, 69, 84, 103, 113  # join or leave as others change the grid


@pytest.mark.parametrize("seed", CHANGING)
def test_what_must_hold_holds_while_the_grid_changes(seed, monkeypatch):
    """It doubles whenever replicas meet, unless somebody joins then."""
    monkeypatch.setattr(replica_vector, "REGRID_ABOVE", 2**12)
    monkeypatch.setattr(replica_vector, "REGRID_BELOW", 2**40)
    monkeypatch.setattr(oracle, "ROUNDING", 2.0**-10)  # which loses some exactness

    outcome = seeds.run_seed(seed)

    assert not isinstance(outcome, str), seeds.report(seed, outcome)


FREE = 5, 7, 15, 17, 69, 79, 115, 194, 333  # not in lockstep; join, leave, are lost


@pytest.mark.parametrize("seed", FREE)
def test_what_must_hold_holds_while_updates_are_packed_beside_steps(seed, monkeypatch):
    """Threads pack, but touch nothing else, so a seed stands for one run."""
    packing = Mock(wraps=gradient_sharing.pack_beside)
    monkeypatch.setattr(gradient_sharing, "pack_beside", packing)
    monkeypatch.setattr(gradient_sharing, "least_beside", lambda _: 1)

    outcome = seeds.run_seed(seed)

    assert not isinstance(outcome, str), seeds.report(seed, outcome)
    assert packing.call_count > 0


@pytest.mark.parametrize("inbox_bytes", [1, 2**20], ids=["folded", "not folded"])
def test_a_replica_joins_one_that_has_left_the_first_grid_alone(inbox_bytes):
    """And leaves before they have met."""
    setup = Setup(workers=1, epochs=1, lengths=(1200,), inbox_bytes=inbox_bytes)
    faults = [
        Fault("start", 0, 8.0, "join", 0, 0.0, aimed=False),
        Fault("activate", 1, 1.0, "retire", 0, 0.0, aimed=True),
    ]
    with contextlib.closing(Cluster(0, setup)) as cluster:
        fate, client = Fate(Scenario(0, setup, 2e-3, faults), cluster), cluster.client
        cluster.fit(scenario.LIMIT_S)

    assert client.error is None
    assert fate.happened == ["join", "retire"]
    assert client.model.parameters.grid > client.spec.grid


def test_a_seed_stands_for_one_scenario():
    assert str(Scenario.of(7)) == str(Scenario.of(7)) != str(Scenario.of(8))


def test_the_seeds_have_every_kind_of_fault():
    drawn = {fault.kind for seed in range(200) for fault in Scenario.of(seed).faults}

    special = {*scenario.SPECIAL, *scenario.DAMAGES, scenario.NARROW}
    assert drawn == {*scenario.USUAL, *scenario.FATAL, *special}


def test_some_seeds_have_many_workers():
    drawn = [Scenario.of(seed).setup for seed in seeds.CROWDED]

    assert [setup.workers for setup in drawn] == [scenario.CROWD] * 2
    assert {setup.routing for setup in drawn} == {"mesh", "plain"}


def test_the_seeds_have_every_aim():
    aims = {Scenario.of(seed).aim for seed in range(200)}

    assert aims == {"", *scenario.AIMS}


def test_some_seeds_stop_the_fit_early():
    drawn = [Scenario.of(seed) for seed in range(200)]

    stopped = [plan for plan in drawn if plan.setup.stops]
    after = {f.kind for plan in stopped for f in plan.faults if f.moment == "stop"}
    assert after == {*scenario.AFTER_STOP}


def test_a_replica_takes_its_time_to_load_validation_data():
    cluster, moments = Cluster(0, Setup(epochs=2, validation=(4,) * 6)), Counter()
    cluster.on_moment = lambda moment, worker=None: moments.update([moment])
    try:
        cluster.fit(100.0)
    finally:
        cluster.close()

    assert moments["validate"] == 2 * 6


def test_a_violation_names_its_seed_the_last_events_and_the_command(monkeypatch):
    def broken(plan, cluster, epochs):
        raise Violation("this must not be")

    monkeypatch.setattr(scenario, "check_end", broken)

    failure = seeds.run_seed(3)
    printed = seeds.report(3, failure)

    assert failure.startswith("this must not be at ")
    assert "scheduler: <- worker-0: daskdl_" in printed
    assert f"seed 3: {failure}" in printed
    assert "repeat it: python -m tests.sim --seed 3 --trace trace.txt" in printed


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_mutation_changes_one_place(name):
    mutation = mutations.MUTATIONS[name]
    spec = mutations.find(mutation)

    compile(
        mutations.changed(spec.loader.get_data(spec.origin), mutation), name, "exec"
    )


@pytest.mark.slow
def test_a_seed_repeats_whatever_steps_take():
    """Replicas join, and the size of what they get decides how long they wait."""
    digests = set()
    for _ in range(3):
        trace = Trace()
        seeds.run_seed(582, trace)
        digests.add(trace.digest)

    assert len(digests) == 1
