"""Processes that are suspended, as SIGSTOP does, for longer than an answer may take.

What has arrived by the time they run again is in time.
"""

import asyncio

import numpy as np
import pytest

from daskdl.channel import protocol
from daskdl.channel.protocol import WaitCause
from daskdl.channel.transport import time_limit
from tests.sim.cluster import simulated
from tests.sim.fit import TIMEOUTS, Cluster, Setup
from tests.sim.world import Process
from tests.support.channels import (
    a_run,
    agree,
    applied_by,
    begin,
    bounds,
    recorded,
    sent_by,
    wait_until,
)

LIMIT_S = 300.0
SUSPENDED_S = TIMEOUTS.request + 0.5  # the scheduler removes a replica later


def suspend(process, duration_s):
    """Suspend a process for a while, from now on."""
    world = process.world
    process.freeze()
    world.after(duration_s, Process(world, "fate"), process.thaw)


def suspended_at(cluster, worker, operation, times=1):
    """Suspend a worker whenever the scheduler has got a request of its replica."""
    handlers, left = cluster.scheduler.handlers, [worker] * times
    handler = handlers[operation]

    async def suspending(**fields):
        members = cluster.live.state.members.replicas
        if left and members[fields["replica"]].worker == worker.address:
            suspend(left.pop().process, SUSPENDED_S)
        return await handler(**fields)

    handlers[operation] = suspending
    return left


@pytest.mark.parametrize(
    ("operation", "times"),
    [(protocol.LEASE, 1), (protocol.PUBLISH, 2), (protocol.BARRIER, 1)],
    ids=["lease", "both attempts of a heartbeat", "barrier"],
)
def test_a_fit_goes_on_though_a_worker_was_suspended_while_the_answer_came(
    operation, times
):
    cluster = Cluster(3, Setup(workers=3))
    try:
        left = suspended_at(cluster, cluster.workers["worker-1"], operation, times)
        cluster.fit(LIMIT_S)
        assert not left
        assert cluster.client.error is None
        assert not [e for e in cluster.client.events if e["kind"] == "lost"]
    finally:
        cluster.close()


SHORT = bounds(data=2.0, silence=2.0, request=1.0)  # patience: 4 s
LONG_S = 10.0


@simulated(2)
async def test_a_newcomer_goes_on_though_all_were_suspended_for_longer_than_it_waits(
    c, s, a, b
):
    async with a_run(c, s, a, b, timeouts=SHORT) as run:
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: any(run.link(r).snapshot_requests for r in (0, 1)))

        suspend(s.process, LONG_S)
        await asyncio.sleep(0)
        for channel in run.channels.values():
            channel.serve_snapshot(applied_by(channel))
        serving = [
            begin(run.channels[r].wait, WaitCause.DATA, joining, LONG_S) for r in (0, 1)
        ]

        assert (await joining).snapshot is not None
        await asyncio.gather(*serving)


@simulated(2)
async def test_a_blob_arrives_though_all_were_suspended_for_longer_than_it_takes(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=SHORT) as run:
        asked = recorded(a.handlers, protocol.FETCH, monkeypatch)
        fetching = begin(run.channels[1].fetch_blob, 0, "x")
        await wait_until(lambda: asked)

        suspend(s.process, LONG_S)
        await asyncio.sleep(0)
        run.channels[0].publish_blob("x", {"x": np.arange(3)})

        assert (await fetching)["x"].tolist() == [0, 1, 2]


@simulated(3)
async def test_survivors_agree_though_all_were_suspended_for_longer_than_they_try(
    c, s, *workers, monkeypatch
):
    options = {"routing": "mesh", "inbox_bytes": 1, "timeouts": SHORT}
    async with a_run(c, s, *workers, **options) as run:
        first, second, third = sent_by(run, 2, 1, 2, 3)
        for replica in (0, 1):
            channel = run.channels[replica]
            channel.serve_snapshot(applied_by(channel))
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        run.lose(2)
        handler, states = workers[0].handlers[protocol.REPAIR], []

        async def suspending(**fields):
            suspend(s.process, LONG_S)
            return await handler(**fields)

        monkeypatch.setitem(workers[0].handlers, protocol.REPAIR, suspending)

        await agree(run, states.append)

        assert len(states) == 1


@simulated(1)
async def test_a_wait_that_serves_a_snapshot_after_a_suspension_goes_on(c, s, a):
    async with a_run(c, s, a) as run:
        channel, link = run.channels[0], run.link(0)
        channel.serve_snapshot(applied_by(channel))
        came = asyncio.get_running_loop().create_future()
        waiting = begin(channel.wait, WaitCause.DATA, came, 1.0)
        await wait_until(lambda: link.inbox.waiting)

        suspend(s.process, LONG_S)
        await asyncio.sleep(0)
        serving = asyncio.ensure_future(link.snapshot({}))
        asyncio.get_running_loop().call_later(0.3, came.set_result, None)

        assert await waiting
        await serving


@simulated(2)
async def test_what_comes_soon_after_a_suspension_is_in_time(c, s, a, b):
    came = asyncio.get_running_loop().create_future()

    async def wait():
        async with time_limit(1.0):
            return await came

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0.5)
    suspend(s.process, LONG_S)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.1, came.set_result, "all")

    assert await waiting == "all"


@simulated(1)
async def test_a_limit_of_time_is_one_while_the_process_runs(c, s, a):
    world = s.network.world
    with pytest.raises(TimeoutError):
        async with time_limit(1.0):
            await asyncio.sleep(2.0)

    assert world.now == pytest.approx(1.0, abs=0.01)
