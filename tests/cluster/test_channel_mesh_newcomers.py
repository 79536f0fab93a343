"""Replicas that join a mesh while a run goes on."""

import asyncio

import numpy as np

from tests.support.channels import (
    SIZE,
    a_run,
    applied_by,
    begin,
    in_thread,
    newcomer,
    publish,
    totals,
    two_workers,
    wait_until,
)


@two_workers()
async def test_a_newcomer_in_the_middle_of_traffic_has_all_of_it_once(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh", fan_out=1) as run:
        donor, made = run.channels[0], applied_by(run.channels[0])
        donor.serve_snapshot(made)
        stop = asyncio.Event()

        async def traffic(replica):
            step = 0
            while not stop.is_set():
                publish(run.channels[replica], replica + 1, step=step)
                step += 1
                if replica == 0:
                    await in_thread(donor.check)
                await asyncio.sleep(0.001)

        senders = [asyncio.ensure_future(traffic(replica)) for replica in (0, 1)]
        await wait_until(lambda: donor.published > 20)
        replica, channel = await newcomer(run, b)
        entry = await in_thread(channel.join)
        known_N = entry.snapshot["total_N"].copy()
        (own,) = (last for o, last, _ in entry.snapshot["received"] if o == 0)
        known_N[0] += own  # what a donor has published itself does not arrive there
        at_entry = donor.published
        await wait_until(lambda: donor.published > at_entry + 20)
        stop.set()
        await asyncio.gather(*senders)

        last = {r: run.channels[r].published for r in (0, 1)}
        await in_thread(channel.wait_for_updates, last)
        known_N += np.array(totals(channel.drain()), np.int32)
        assert known_N.tolist() == [last[0], last[1]] + [0] * (SIZE - 2)
        assert replica == 2


@two_workers()
async def test_a_newcomer_waits_until_all_know_that_it_is_there(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh") as run:
        donor, other = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        run.live.relays[1].cancel()  # the relay to the other one
        _, channel = await newcomer(run, b)
        joining = begin(channel.join)
        waiting = begin(donor.wait_for_updates, {1: 2})
        await wait_until(lambda: run.link(0).routing.workers.keys() == {0, 1, 2})
        assert publish(other, 1)  # by the old routes
        await wait_until(lambda: 1 in run.link(0).inbox.received.by_origin())
        assert not joining.done()

        routes = [i for i in run.record.outboxes[1].head(10**6) if i.kind == "members"]
        await run.deliver(1, *routes)
        entry = await joining
        assert publish(other, 2)
        await waiting

        assert entry.snapshot["total_N"].tolist() == [1] + [0] * (SIZE - 1)
        await in_thread(channel.wait_for_updates, {1: 2})
        assert totals(channel.drain())[:2] == [0, 1]


@two_workers()
async def test_a_donor_has_first_what_a_newcomer_is_not_sent(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh") as run:
        donor, other = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        link = run.link(0)
        deliver = link.deliver

        async def losing(item):
            return item.kind == "update" or await deliver(item)

        link.deliver = losing  # until the donor asks for it
        assert publish(other, 1)
        _, channel = await newcomer(run, b)
        joining = begin(channel.join)
        await wait_until(lambda: link.snapshot_requests)

        donor.check()
        assert not joining.done()
        await in_thread(donor.wait_for_updates, {1: 1})
        donor.check()

        total_N = (await joining).snapshot["total_N"]
        assert total_N.tolist() == [1] + [0] * (SIZE - 1)
