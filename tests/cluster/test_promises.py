"""The promises of the design, each on real worker processes."""

import itertools
import os
import signal
import time

import dask.config
import numpy as np
import pytest
import torch
from distributed import Event
from torch import nn

import daskdl
from daskdl import (
    AdaptiveThreshold,
    Callback,
    GradientSharing,
    KeepResidual,
    Trainer,
    codec,
)
from daskdl.channel.payloads import wrap
from daskdl.channel.scheduler import NAME
from tests.cluster.conftest import still_left_behind
from tests.cluster.problems import (
    adam,
    mlp,
    normalised,
    parameters_of,
    plain_loop,
    rows,
    sgd,
)
from tests.cluster.recording import Recorded, records

X, Y = rows()
SIZE = 20 * 32 + 32 + 32 * 4 + 4  # parameters of `mlp`


def trainer(client, **options):
    options = {"model": mlp, "optimizer": sgd, "progress": False, **options}
    return Trainer(loss=nn.CrossEntropyLoss(), client=client, **options)


def kept(**options):
    """Sharing that loses nothing on purpose: no clipping."""
    threshold = AdaptiveThreshold(initial=1e-3)
    return GradientSharing(threshold, KeepResidual(), **options)


class TestConservation:
    """Promise 1: start + all updates = shared + all residuals."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"exchange_every": 3}, {"max_staleness": 0}, {"max_staleness": None}],
        ids=str,
    )
    def test_at_every_step_and_at_the_end(self, client, tmp_path, options):
        master = Recorded(str(tmp_path), kept(**options))
        own = trainer(client, master=master)

        own.fit(X, Y, epochs=3, batch_size=16)

        ends = records(tmp_path, epoch=2)
        assert sorted(ends) == [0, 1]
        expected = ends[0]["start"] + ends[0]["progress"] + ends[1]["progress"]
        got = torch.cat([p.detach().reshape(-1) for p in own.model_.parameters()])
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=4e-6)

    def test_replicas_move_and_differ(self, client, tmp_path):
        trainer(client, master=Recorded(str(tmp_path), kept())).fit(X, Y, batch_size=16)

        ends = records(tmp_path, epoch=0)
        assert all(np.abs(end["progress"]).max() > 1e-3 for end in ends.values())
        assert not np.allclose(ends[0]["progress"], ends[1]["progress"])


class TestAgreement:
    """Promise 2: after a barrier shared is the same everywhere, bit for bit."""

    def test_shared_is_bit_identical_after_every_epoch(self, client, tmp_path):
        trainer(client, master=Recorded(str(tmp_path), kept())).fit(
            X, Y, epochs=3, batch_size=16
        )

        for epoch in range(3):
            ends = records(tmp_path, epoch)
            np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
            # And it is what was sent, exactly: whole steps of one grid.
            for end in ends.values():
                np.testing.assert_array_equal(end["shared"], end["expected"])

    def test_buffers_are_averaged(self, client):
        own = trainer(client, model=normalised, master=kept())

        own.fit(X, Y, epochs=2, batch_size=16)

        mean = own.model_[1].running_mean
        assert mean.abs().max() > 0
        assert own.model_[1].num_batches_tracked > 0

    def test_replicas_that_differ_are_told(self, client):
        class Liar(Callback):
            def on_step(self, step):
                """Change shared on one replica behind everybody's back."""
                import gc

                from daskdl.accumulator import Accumulator

                if step.replica == 1 and step.number == 2:
                    for thing in gc.get_objects():
                        if type(thing) is Accumulator:
                            thing._groups[0].shared_N[0] += 1

        with pytest.raises(daskdl.ChannelError, match="replicas differ at the end"):
            trainer(client, master=kept(), callbacks=[Liar()]).fit(X, Y, batch_size=16)


class TestExactlyOnce:
    """Promise 3: no update is applied twice or skipped."""

    @pytest.mark.parametrize("copies", [1, 3])
    def test_each_update_is_received_once(self, client, tmp_path, copies):
        master = Recorded(str(tmp_path), kept(), copies)

        trainer(client, master=master).fit(X, Y, epochs=2, batch_size=16)

        ends = records(tmp_path, epoch=1)
        for one, other in itertools.permutations(ends, 2):
            sent = [tuple(stamp) for stamp in ends[one]["published"]]
            got = [tuple(stamp) for stamp in ends[other]["received"]]
            assert len(sent) > 10
            assert sorted(got) == sorted(sent)


class TestBoundedMemory:
    """Promise 4: nothing queues without a bound, and nothing is lost by it."""

    def test_a_full_outbox_leaves_the_update_in_the_residual(
        self, client, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("daskdl.trainer.OUTBOX_BYTES", 1)
        own = trainer(client, master=Recorded(str(tmp_path), kept(max_staleness=None)))

        history = own.fit(X, Y, epochs=3, batch_size=4)

        assert sum(history.column("withheld")) > 0
        ends = records(tmp_path, epoch=2)
        expected = ends[0]["start"] + ends[0]["progress"] + ends[1]["progress"]
        got = torch.cat([p.detach().reshape(-1) for p in own.model_.parameters()])
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=8e-6)

    def test_a_full_inbox_is_folded(self, client, tmp_path, monkeypatch):
        monkeypatch.setattr("daskdl.trainer.INBOX_BYTES", 1)
        master = Recorded(str(tmp_path), kept())

        history = trainer(client, master=master).fit(X, Y, epochs=2, batch_size=16)

        assert sum(history.column("folds")) > 0
        ends = records(tmp_path, epoch=1)
        np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
        np.testing.assert_array_equal(ends[0]["shared"], ends[0]["expected"])


class Slow(Callback):
    """Makes one replica slower than the other."""

    def on_step(self, step):
        if step.replica == 1:
            time.sleep(0.01)  # the slowness itself, not a wait for something


class TestBoundedStaleness:
    """Promise 5: nobody runs more than max_staleness steps ahead."""

    @pytest.mark.parametrize("bound", [0, 3])
    def test_no_replica_starts_a_step_further_ahead(self, client, tmp_path, bound):
        master = Recorded(str(tmp_path), kept(max_staleness=bound))

        trainer(client, master=master, callbacks=[Slow()]).fit(X, Y, batch_size=8)

        leads = np.concatenate([end["leads"] for end in records(tmp_path, 0).values()])
        assert leads.max() == bound

    def test_unbounded_is_not_held(self, client):
        history = trainer(
            client, master=kept(max_staleness=None), callbacks=[Slow()]
        ).fit(X, Y, batch_size=8)

        assert "staleness" not in history[0]["waits"]
        assert history[0]["staleness"] > 3

    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_synchronous_runs_repeat_bit_for_bit(self, client, model):
        runs = []
        for _ in range(2):
            own = trainer(client, model=model, master=kept(max_staleness=0), seed=7)
            history = own.fit(X, Y, epochs=2, batch_size=16)
            runs.append((parameters_of(own.model_), history.column("loss")))

        for name, value in runs[0][0].items():
            np.testing.assert_array_equal(value, runs[1][0][name])
        assert runs[0][1] == runs[1][1]

    def test_another_seed_gives_another_run(self, client):
        losses = [
            trainer(client, master=kept(max_staleness=0), seed=seed)
            .fit(X, Y, batch_size=16)
            .column("loss")
            for seed in (1, 2)
        ]

        assert losses[0] != losses[1]


@pytest.fixture
def ctrl_c():
    """Python's own handler, also where a shell in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupt(Callback):
    """Presses Ctrl-C on the client after the first epoch."""

    def on_epoch(self, row):
        os.kill(os.getpid(), signal.SIGINT)


class TestNoSilentWaits:
    """Promise 7: every wait has a time-out and says whom it waited for."""

    def test_a_worker_that_is_busy_is_named(self, client):
        worker = sorted(client.nthreads())[1]
        release = Event("release", client=client)

        def occupy():
            Event("release").wait()

        busy = client.submit(occupy, workers=[worker], pure=False)
        try:
            with (
                dask.config.set({"daskdl.timeouts.join": "1s"}),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                trainer(client).fit(X, Y)
        finally:
            release.set()
            busy.result()
        assert "not all replicas started within 1 s (daskdl.timeouts.join)" in str(
            caught.value
        )
        assert worker in str(caught.value)

    def test_a_frozen_worker_is_named_with_what_was_last_heard(self, client):
        pids = client.run(os.getpid)
        worker = sorted(pids)[1]

        class Freeze(Callback):
            def on_epoch(self, row):
                os.kill(pids[worker], signal.SIGSTOP)

        try:
            with (
                dask.config.set({"daskdl.timeouts.silence": "3s"}),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                trainer(client, callbacks=[Freeze()]).fit(X, Y, epochs=500)
        finally:
            os.kill(pids[worker], signal.SIGCONT)
        message = str(caught.value)
        assert "nothing was heard for 3 s (daskdl.timeouts.silence)" in message
        assert f"replica 1 on {worker}, last heard at step" in message

    def test_ctrl_c_ends_a_run_and_leaves_the_cluster_clean(self, client, ctrl_c):
        own = trainer(client, callbacks=[Interrupt()])

        with pytest.raises(KeyboardInterrupt):
            own.fit(X, Y, epochs=10_000)

        assert still_left_behind(client) == {}
        assert len(own.history_) >= 1
        assert own.model_ is not None
        own.callbacks = []
        assert len(own.fit(X, Y)) == 1


class TestOneReplica:
    """Promise 8: one replica is plain PyTorch, bit for bit."""

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_equals_a_plain_loop(self, lone_client, model, optimizer):
        own = trainer(lone_client, model=model, optimizer=optimizer, seed=3)
        own.fit(X, Y, epochs=2, batch_size=50, shuffle=False)

        plain = plain_loop(model, optimizer, seed=3, epochs=2, batch_size=50, x=X, y=Y)

        for name, value in parameters_of(own.model_).items():
            np.testing.assert_array_equal(value, plain[name], err_msg=name)


class TestDamagedBytes:
    """Promise 9: damaged bytes do no harm."""

    def test_a_run_under_fire_finishes_right(self, client, tmp_path):
        class Fire(Callback):
            def on_epoch(self, row):
                run = client.run_on_scheduler(
                    lambda dask_scheduler: next(
                        iter(dask_scheduler.extensions[NAME].runs)
                    )
                )
                client.sync(shoot, client, run, sorted(client.nthreads()))

        master = Recorded(str(tmp_path), kept())
        history = trainer(client, master=master, callbacks=[Fire()]).fit(
            X, Y, epochs=4, batch_size=16
        )

        # The first three epochs' shots; the last one's find the run at its end.
        assert sum(history.column("refused_messages")) >= 3 * (2 * 5 + 3)
        ends = records(tmp_path, epoch=3)
        np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
        np.testing.assert_array_equal(ends[0]["shared"], ends[0]["expected"])
        assert len(client.nthreads()) == 2


async def shoot(client, run, workers):
    """Send garbage to the scheduler and to both workers, over their own ports."""
    noise = np.random.default_rng(0).integers(0, 256, 200, dtype=np.uint8)
    stamp = codec.Stamp(run, 0, 10**6, 1)
    one = np.array([1], np.int32)
    far = codec.encode(stamp, 10**9, 2.0**-10, np.array([10**9], np.int32))
    flipped = codec.encode(stamp, SIZE, 2.0**-10, one)
    flipped[-1] ^= 1
    foreign = codec.encode(stamp._replace(run=run ^ 1), SIZE, 2.0**-10, one)
    off_grid = codec.encode(stamp, SIZE, 2.0**-30, one)
    for frame in (noise, far, flipped, foreign, off_grid):
        item = ["update", 0, 10**6, 1, frame.nbytes, wrap(frame)]
        for replica, address in enumerate(workers):
            worker = client.rpc(address)
            await worker.daskdl_deliver(run=run, replica=replica, items=[item])
            await worker.daskdl_deliver(run=run, replica=replica, items=[[1]])
    publish = client.scheduler.daskdl_publish
    await publish(run=run, origin=99, items=[], step=0, done=0)
    await publish(run=run, origin=0, items=[[1]], step=0, done=0)
    await publish(run=run, origin=0, items=None, step=0, done=0)
    await publish(run="?", origin=0, items=[], step=0, done=0)
