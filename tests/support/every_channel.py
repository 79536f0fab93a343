"""One test for every channel: over Dask, plain and mesh, and among threads."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect

import pytest

from daskdl.channel.leasing import WHOLE_EPOCHS, RunSpec
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import ChannelSpec
from tests.support.channels import (
    GRID,
    PATIENCE_S,
    RUN,
    SIZE,
    TIMEOUTS,
    a_run,
    in_thread,
    on_workers,
)
from tests.support.records import extents

KINDS = ("plain", "mesh", "local")


class ThreadsRun:
    """A run among threads, and its channels; as `channels.Run` is over Dask."""

    def __init__(self, replicas, spec, pieces, **plan):
        self.spec = spec
        self.channels = {}
        self._run = LocalRun(
            RunSpec(
                run=spec.run,
                replicas={r: self.where(r) for r in range(replicas)},
                sizes=extents(pieces),
                seed=None,
                epochs_before=0,
                relay_bytes=0,
                timeouts=dataclasses.asdict(spec.timeouts),
                **plan,
            )
        )
        for replica in range(replicas):
            self.open_channel(replica)

    @property
    def record(self):
        return self._run.state

    def where(self, replica):
        return f"chair {replica}"

    def open_channel(self, replica):
        spec = dataclasses.replace(self.spec, replica=replica)
        self.channels[replica] = LocalChannel(self._run, spec)

    async def join(self):
        joins = [in_thread(channel.join) for channel in self.channels.values()]
        await asyncio.gather(*joins)

    async def until(self, ready):
        def wait():
            with self._run.changed:
                assert self._run.changed.wait_for(ready, PATIENCE_S)

        await in_thread(wait)

    async def events(self):
        return await in_thread(self._run.watch, PATIENCE_S)

    async def stop(self, reason):
        self._run.stop(reason)

    async def shut(self):
        self._run.stop("the run was closed")

    async def close(self):
        for channel in self.channels.values():
            await in_thread(channel.leave)
        assert self._run.here == []
        assert self.record.outboxes == {}


@contextlib.asynccontextmanager
async def a_threads_run(
    replicas,
    join=True,
    pieces=None,
    min_replicas=1,
    synchronous=False,
    intervals=WHOLE_EPOCHS,
    fan_out=1,
    **options,
):
    spec = ChannelSpec(RUN, 0, SIZE, GRID, 2**20, 2**20, TIMEOUTS, fan_out=fan_out)
    spec = dataclasses.replace(spec, **options)
    plan = {
        "min_replicas": min_replicas,
        "synchronous": synchronous,
        "intervals": intervals,
    }
    run = ThreadsRun(replicas, spec, pieces or {"train": ()}, **plan)
    try:
        if join:
            await run.join()
        yield run
    finally:
        await run.close()


def every_channel(replicas=2, kinds=KINDS):
    """Call a test with a function that opens a run, once for each kind of channel.

    Args:
        replicas: In the run.
        kinds: Of channels, some of `KINDS`.
    """

    def decorate(test):
        async def over_dask(c, s, *workers, kind, call):
            options = {"routing": kind, "fan_out": 1}
            await call(functools.partial(a_run, c, s, *workers, **options))

        workers = [("127.0.0.1", 1)] * replicas
        over_dask = on_workers(nthreads=workers)(over_dask)

        @functools.wraps(test)
        def one(self, kind, **parameters):
            call = functools.partial(test, self, **parameters)
            if kind == "local":
                asyncio.run(call(functools.partial(a_threads_run, replicas)))
            else:
                over_dask(kind=kind, call=call)

        # What pytest looks at: the kind in the place of the function.
        own, _, *others = inspect.signature(test).parameters.values()
        chosen = inspect.Parameter("kind", own.kind)
        one.__signature__ = inspect.Signature([own, chosen, *others])
        return pytest.mark.parametrize("kind", kinds)(one)

    return decorate
