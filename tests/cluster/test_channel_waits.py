"""Waiting: for the others, for room, for an answer, until told to stop."""

from distributed import Event

from daskdl import codec
from daskdl.channel.protocol import WaitCause
from tests.support.channels import (
    PATIENCE_S,
    RUN,
    a_run,
    begin,
    in_thread,
    workers,
)

STAMP = codec.Stamp(RUN, 0, 1, 0)


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
