"""The simulated world itself: one seed, one trace; time, threads and connections."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.fit import Cluster, Setup
from tests.sim.network import Network, Server
from tests.sim.world import Killed, Trace, Violation, World

ROOT = Path(__file__).parents[2]
HOUR_S = 3600.0


def traced(seed, **options):
    """The trace of a fit of three replicas."""
    trace = Trace(whole=True)
    cluster = Cluster(seed, Setup(preempted=0.05, **options), trace)
    cluster.fit(HOUR_S)
    assert cluster.client.error is None
    assert cluster.client.model is not None
    cluster.close()
    return trace


@pytest.mark.parametrize("routing", ["plain", "mesh"])
def test_the_same_seed_gives_the_same_trace_and_another_one_another(routing):
    first, second, reseeded = (traced(seed, routing=routing) for seed in (1, 1, 2))

    assert first.lines == second.lines
    assert first.digest == second.digest != reseeded.digest


def test_the_trace_does_not_depend_on_the_hashes_of_a_process():
    code = "from tests.sim.test_world import traced; print(traced(1).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert digests == {traced(1).digest}


def test_a_fit_takes_no_longer_than_its_events():
    """An hour of training passes in a moment."""
    trace = traced(3, mean_step_s=60.0, epochs=1)

    assert float(trace.lines[-1].split()[0]) > 600


# ---- threads, event loops and processes


@pytest.fixture
def world():
    new_world = World(seed=0)
    yield new_world
    new_world.close()


@pytest.fixture
def network(world):
    return Network(world)


def run(world, *results):
    world.run(lambda: all(result.done() for result in results), HOUR_S)
    return [result.result() for result in results]


def server_of(network, name="one"):
    return Server(network, f"tcp://{name}:1", name)


def test_a_thread_waits_on_a_condition_for_virtual_time(world, network):
    process = server_of(network).process
    changed, ready = process.clock.condition(), []

    def wait(timeout_s):
        with changed:
            came = changed.wait_for(lambda: bool(ready), timeout_s)
        return came, world.now

    def set_later():
        world.current.sleep(50.0)
        with changed:
            ready.append(True)
            changed.notify_all()

    results = [process.start("waits", wait, s) for s in (10.0, None)]
    results.append(process.start("sets", set_later))

    (late, late_at), (came, came_at), _ = run(world, *results)
    assert (late, late_at) == (False, 10.0)
    assert came
    assert came_at == pytest.approx(50.0, abs=0.01)


def test_a_thread_of_a_killed_process_ends_in_its_wait(world, network):
    process, ended = server_of(network).process, []

    def wait():
        try:
            world.current.sleep(HOUR_S)
        except Killed:
            ended.append(world.now)
            raise

    process.start("waits", wait)
    watching = server_of(network, "other").process
    world.after(5.0, watching, process.kill)

    world.run(lambda: bool(ended), HOUR_S)

    assert ended == [5.0]


def test_nothing_runs_in_a_frozen_process_until_it_thaws(world, network):
    process = server_of(network).process
    watching = server_of(network, "other").process
    result = process.start("sleeps", lambda: world.current.sleep(1.0) or world.now)
    world.after(0.5, watching, process.freeze)
    world.after(7.0, watching, process.thaw)

    assert run(world, result) == [7.0]


def test_a_wait_without_end_is_an_error_that_names_it(world, network):
    process = server_of(network).process
    changed = process.clock.condition()

    def wait():
        with changed:
            changed.wait_for(lambda: False)

    result = process.start("replica-7", wait)
    with pytest.raises(Violation, match="replica-7 waits for"):
        run(world, result)


def test_an_error_in_an_event_loop_ends_the_world(world, network):
    async def broken():
        raise KeyError("bug")

    async def ask():
        await network.ask(asker, answerer.address, "broken", {})

    asker, answerer = server_of(network), server_of(network, "other")
    answerer.handlers["broken"] = broken
    asker.start(ask())

    with pytest.raises(Violation, match=r"other: broken raised KeyError\('bug'\)"):
        world.run(lambda: False, HOUR_S)


# ---- connections


@pytest.fixture
def echo(network):
    """A server that answers with what it gets, and all that it got."""
    server, got = server_of(network, "echo"), []

    async def answer(value, pause_s=0.0):
        got.append(value)
        await asyncio.sleep(pause_s)
        return {"value": value}

    server.handlers["echo"] = answer
    return server, got


def asked(server, address, *values, **fields):
    """Answers to requests, sent at once; an error is its text."""
    answers = []

    async def ask(value):
        try:
            echoed = {"value": value, **fields}
            answer = await server.network.ask(server, address, "echo", echoed)
            answers.append(answer["value"])
        except OSError as error:
            answers.append(str(error))

    for value in values:
        server.start(ask(value))
    return answers


def test_requests_overtake_each_other_and_each_is_answered(world, network, echo):
    server, got = echo
    asker = server_of(network)
    answers = asked(asker, server.address, *range(20))

    world.run(lambda: len(answers) == 20, HOUR_S)

    assert sorted(answers) == sorted(got) == [*range(20)]
    assert got != sorted(got)


def test_what_is_sent_is_a_copy_without_lists(world, network, echo):
    server, got = echo
    sent = [1, ["a", {"b": [2.5]}]]
    answers = asked(server_of(network), server.address, sent)

    world.run(lambda: bool(answers), HOUR_S)

    assert got == [(1, ("a", {"b": (2.5,)}))]


def test_messages_wait_at_a_cut_in_its_direction_until_it_heals(world, network, echo):
    server, got = echo
    asker = server_of(network)
    for cut, arrives in (((asker, server), False), ((server, asker), True)):
        got.clear()
        network.cuts.add(tuple(process.address for process in cut))
        answers = asked(asker, server.address, 1)
        until = world.now + 5.0

        world.after(5.0, asker.process, lambda: None)
        world.run(lambda until=until: world.now >= until, HOUR_S)
        assert (answers, bool(got)) == ([], arrives)

        network.heal()
        world.run(lambda answers=answers: answers == [1], HOUR_S)


def test_a_broken_connection_is_an_error_at_the_sender(world, network, echo):
    server, _ = echo
    asker = server_of(network)
    answers = asked(asker, server.address, 1, 2, pause_s=5.0)
    ends = asker.address, server.address
    world.after(1.0, asker.process, lambda: network.break_between(*ends))

    world.run(lambda: len(answers) == 2, HOUR_S)

    assert set(answers) == {f"the connection to {server.address} was closed"}
    assert world.now < 2.0


def test_a_server_that_is_not_there_is_tried_for_a_while(world, network):
    asker = server_of(network)
    answers = asked(asker, "tcp://nobody:1", 1)

    world.run(lambda: bool(answers), HOUR_S)

    assert answers == ["timed out trying to connect to tcp://nobody:1"]
    assert world.now == pytest.approx(30.0, abs=1.0)


# ---- narrow links


def arrivals(world, network, echo, sizes):
    """When messages of these sizes arrive over a link of 100 bytes per second."""
    server, got = echo
    network.bandwidth[server.address] = 100.0
    handler, arrived_at = server.handlers["echo"], {}

    async def noting(value, **fields):
        arrived_at[len(value)] = world.now
        return {"value": None, "echoed": await handler(value, **fields) is None}

    server.handlers["echo"] = noting
    for size in sizes:
        asked(server_of(network, f"asker-{size}"), server.address, bytes(size))
    world.run(lambda: len(got) == len(sizes), HOUR_S)
    return [arrived_at[size] for size in sizes]


def test_messages_share_a_narrow_link_equally(world, network, echo):
    arrived_at = arrivals(world, network, echo, [1000, 100, 500, 0])

    # 100 bytes of each of the three; 400 more of two of them; the last 500.
    assert arrived_at == pytest.approx([16.0, 3.0, 11.0, 0.0], abs=0.1)


def test_a_message_passes_the_links_of_both_ends(world, network, echo):
    network.bandwidth["tcp://asker-1000:1"] = 40.0
    arrived_at = arrivals(world, network, echo, [1000, 500])

    assert arrived_at == pytest.approx([25.0, 10.0], abs=0.1)


def test_an_answer_that_nobody_waits_for_leaves_the_link(world, network, echo):
    server, _ = echo
    network.bandwidth[server.address] = 100.0

    async def large():
        return {"value": bytes(100_000)}

    async def impatient():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await network.ask(asker, server.address, "large", {})
        await network.ask(asker, server.address, "echo", {"value": bytes(100)})
        ended_at.append(world.now)

    server.handlers["large"] = large
    asker, ended_at = server_of(network), []
    asker.start(impatient())

    world.run(lambda: bool(ended_at), HOUR_S)

    assert ended_at == pytest.approx([7.0], abs=0.1)
