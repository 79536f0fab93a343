import threading

import numpy as np
import pytest
from distributed import Client, Event

from daskdl import codec
from daskdl.channel import merging
from daskdl.channel.base import Stopped
from daskdl.channel.protocol import FETCH_SUM, NAME, WaitCause
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from tests.support.channels import (
    EITHER,
    PATIENCE_S,
    RUN,
    a_run,
    begin,
    in_thread,
    lease,
    publish,
    recorded,
    totals,
    wait_until,
    workers,
)
from tests.support.run_states import GRID


@workers(2)
async def test_a_second_plugin_adopts_the_state_of_the_first(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        second = ChannelSchedulerPlugin()
        await second.start(s)
        ChannelWorkerPlugin().setup(b)

        assert second.runs is run.plugin.runs
        assert s.extensions[NAME] is run.plugin
        assert publish(run.channels[0])
        await in_thread(run.channels[1].wait_for_updates, {0: 1})


@workers(3)
async def test_sums_are_passed_on_from_worker_to_worker(c, s, *servers, monkeypatch):
    monkeypatch.setattr(merging, "TREE_BYTES", 0)
    size = 2**18  # a sum has more bytes than travel inside a message
    options = {"merge_s": 100.0, "sum_fan_out": 1}
    options |= {"size": size, "inbox_bytes": 2**23}
    signs_N = np.random.default_rng(0).integers(-1, 2, size, np.int32)
    entries_K = (signs_N * np.arange(1, size + 1, dtype=np.int32))[signs_N != 0]

    def encode(stamp):
        return codec.encode(stamp, size, GRID, entries_K)

    async with a_run(c, s, *servers, **options) as run:
        requests = [recorded(w.handlers, FETCH_SUM, monkeypatch) for w in servers]

        for channel in run.channels.values():
            assert channel.publish(encode, 1) is not None
        for channel in run.channels.values():
            last = dict.fromkeys(run.channels, 1)
            await in_thread(channel.wait_for_updates, last)

        assert sorted(map(len, requests)) == [0, 1, 1]
        (update,) = run.channels[0].drain().updates
        assert (update.counts_N == 2 * signs_N).all()


@workers(2)
async def test_a_large_frame_is_decoded_outside_the_event_loop(c, s, a, b, monkeypatch):
    size = 2**19  # 2 MiB of counts, which do not compress
    counts_N = np.random.default_rng(0).integers(-(2**30), 2**30, size, np.int32)
    async with a_run(c, s, a, b, size=size, inbox_bytes=2**23) as run:
        stamp = run.next_stamp(0, 3)
        frame = codec.encode_dense(stamp, run.spec.grid, counts_N)
        assert frame.nbytes > 2**20

        decode_all, threads = codec.decode_all, []

        def decoding(frames, **options):
            threads.append(threading.get_ident())
            return decode_all(frames, **options)

        monkeypatch.setattr(codec, "decode_all", decoding)
        assert run.channels[0].publish(lambda _: frame, stamp.step) is not None
        await in_thread(run.channels[1].wait_for_updates, {0: 1})

        assert threads != [threading.get_ident()]
        (update,) = run.channels[1].drain().updates
        assert update.stamp == stamp
        np.testing.assert_array_equal(update.counts_N, counts_N)


@EITHER
@workers(2)
async def test_two_runs_at_once_do_not_mix(c, s, a, b, routing):
    async with (
        a_run(c, s, a, b, routing=routing) as run,
        a_run(c, s, a, b, run=8, routing=routing) as neighbor,
    ):
        assert publish(run.channels[0], 1)
        assert publish(neighbor.channels[0], -2)

        await in_thread(run.channels[1].wait_for_updates, {0: 1})
        await in_thread(neighbor.channels[1].wait_for_updates, {0: 1})

        assert totals(run.channels[1].drain())[:2] == [1, 0]
        assert totals(neighbor.channels[1].drain())[:2] == [0, -1]
        await neighbor.ask("daskdl_stop", run=8, reason="enough")
        with pytest.raises(Stopped, match="enough"):
            await in_thread(neighbor.channels[1].barrier, "never", None)
        assert run.record.stopped is None
        run.channels[1].check()


@workers(2)
async def test_a_part_is_leased_to_the_replica_whose_worker_holds_it(c, s, a, b):
    near_a = await c.scatter({"a-0": 0}, workers=[a.address])
    near_b = await c.scatter({"b-0": 1}, workers=[b.address])
    keys = {"train": (*near_a, *near_b, "nowhere")}
    async with a_run(c, s, a, b, pieces=keys) as run:
        first, second = run.channels.values()

        assert await lease(second) == (0, "b-0")
        assert await lease(first) == (1, "a-0")
        assert await lease(second) == (2, "nowhere")


@workers(2)
async def test_a_run_is_closed_when_its_client_disconnects(c, s, a, b):
    async with (
        Client(s.address, asynchronous=True) as second,
        a_run(c, s, a, b) as mine,
        a_run(second, s, a, b, run=8) as its,
    ):
        waiting = [  # each where the other does not come
            begin(channel.barrier, f"never {replica}", None)
            for replica, channel in its.channels.items()
        ]
        its.client = c  # the one that asks from now on

        await second.close()

        for wait in waiting:
            with pytest.raises(Stopped, match="its client is gone"):
                await wait
        for channel in its.channels.values():
            await in_thread(channel.leave)
        its.channels.clear()
        await wait_until(lambda: list(its.plugin.runs) == [RUN])
        assert mine.record.stopped is None


# ---- waiting: for the others, for room, for an answer, until told to stop


@workers(2, clean_kwargs={"threads": False})  # Dask keeps the thread of callbacks
async def test_a_wait_for_data_ends_when_they_arrive(c, s, a, b):
    gate = Event("daskdl-test-gate")
    future = c.submit(gate_passed, gate.name)
    async with a_run(c, s, a, b) as run:
        channel = run.channels[0]
        assert not await in_thread(channel.wait, WaitCause.DATA, future, 0.1)
        waiting = begin(channel.wait, WaitCause.DATA, future, 2 * PATIENCE_S)
        await gate.set()

        assert await waiting
        assert channel.stats().waits_s["data"] > 0.1


def gate_passed(name):
    return Event(name).wait(PATIENCE_S)
