"""Every wait has a timeout and names what it waited for."""

import asyncio
import os
import re
import signal

import dask.config
import pytest
from distributed import Event

import daskdl
from daskdl import Callback, GradientSharing
from daskdl.channel import protocol
from tests.support.clusters import still_left_behind
from tests.support.problems import rows, trainer
from tests.support.promises import Interrupt

X, Y = rows()


def soon(**bounds):
    """Configure timeouts, with a short wait for replicas that cannot leave."""
    bounds = {"stop": "1s", **bounds}
    return {f"daskdl.timeouts.{name}": bound for name, bound in bounds.items()}


def deafen(dask_scheduler):
    """Make the scheduler stop answering its client."""

    async def never(**fields):
        await asyncio.Event().wait()

    handlers = dask_scheduler.handlers
    dask_scheduler.daskdl_test_handler = handlers[protocol.WATCH]
    handlers[protocol.WATCH] = never


def hear_again(dask_scheduler):
    dask_scheduler.handlers[protocol.WATCH] = dask_scheduler.daskdl_test_handler
    del dask_scheduler.daskdl_test_handler


class TestNoSilentWaits:
    def test_a_worker_that_is_busy_is_named(self, client):
        worker = sorted(client.nthreads())[1]
        release = Event("release", client=client)

        def occupy():
            Event("release").wait()

        busy = client.submit(occupy, workers=[worker], pure=False)
        try:
            with (
                dask.config.set(soon(join="1s")),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                trainer(client).fit(X, Y)
        finally:
            release.set()
            busy.result()
            busy.release()
        assert "not all replicas started within 1 s (daskdl.timeouts.join)" in str(
            caught.value
        )
        assert worker in str(caught.value)

    @pytest.mark.slow
    def test_too_few_replicas_are_named_with_their_last_step(self, client):
        pids = client.run(os.getpid)
        worker = sorted(pids)[1]

        class Freeze(Callback):
            def on_epoch_end(self, row):
                os.kill(pids[worker], signal.SIGSTOP)

        master = GradientSharing(min_replicas=2, rejoin_timeout=1.0)
        failing = trainer(client, master=master, callbacks=[Freeze()])
        try:
            with (
                dask.config.set(soon(silence="3s")),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                failing.fit(X, Y, epochs=500)
        finally:
            os.kill(pids[worker], signal.SIGCONT)
        message = str(caught.value)
        expected = "fewer than min_replicas=2 replicas for 1 s (daskdl.timeouts.rejoin)"
        assert expected in message
        assert f"1 left; gone: replica 1 on {worker}, last seen at step" in message

    @pytest.mark.slow
    def test_a_scheduler_that_does_not_answer_the_client_is_named(self, client):
        trainer(client).fit(X, Y)  # the handlers are there

        class Deafen(Callback):
            def on_epoch_end(self, row):
                client.run_on_scheduler(deafen)

        failing = trainer(client, callbacks=[Deafen()])
        try:
            with (
                dask.config.set(soon(request="1s")),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                failing.fit(X, Y, epochs=10_000)
        finally:
            client.run_on_scheduler(hear_again)
        assert re.fullmatch(
            r"the scheduler at tcp://\S+ did not answer within 1 s "
            r"\(daskdl\.timeouts\.request\); it last answered \d+\.\d s ago; perhaps "
            r"it hangs, or the network is down",
            str(caught.value),
        )

    def test_ctrl_c_ends_a_run_and_leaves_the_cluster_clean(self, client, ctrl_c):
        fitted = trainer(client, callbacks=[Interrupt()])

        with pytest.raises(KeyboardInterrupt):
            fitted.fit(X, Y, epochs=10_000)

        assert still_left_behind(client) == {}
        assert len(fitted.history_) >= 1
        assert fitted.model_ is not None
        fitted.callbacks = []
        assert len(fitted.fit(X, Y)) == 1
