"""What becomes of updates: promises 1 to 4 and 9 of the design."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import daskdl
from daskdl import Callback, codec
from daskdl.channel.protocol import NAME, wrap
from tests.support import promises
from tests.support.problems import SIZE, kept, rows, trainer
from tests.support.recording import (
    Recorded,
    RecordingChannel,
    delivered,
    records,
)

X, Y = rows()


@pytest.mark.slow
class TestConservation(promises.Conservation):
    pass


@pytest.mark.slow
class TestAgreement(promises.Agreement):
    pass


class TestReplicas:
    def test_they_move_and_differ(self, client, tmp_path):
        trainer(client, master=Recorded(str(tmp_path), kept())).fit(X, Y, batch_size=16)

        ends = records(tmp_path, epoch=0)
        assert all(np.abs(end["progress"]).max() > 1e-3 for end in ends.values())
        assert not np.allclose(ends[0]["progress"], ends[1]["progress"])

    def test_buffers_are_averaged(self, client):
        def first():
            return nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 4))

        own = trainer(client, model=first, master=kept(max_staleness=0))

        # In step each has half the rows: one step, that moves its mean by a tenth.
        own.fit(X, Y, batch_size=240)

        mean = own.model_[0].running_mean.numpy()
        np.testing.assert_allclose(mean, 0.1 * X.mean(axis=0), rtol=0, atol=1e-6)
        assert own.model_[0].num_batches_tracked == 1

    def test_those_that_differ_are_told(self, client, tmp_path):
        own = trainer(client, master=Losing(str(tmp_path), kept()))

        with pytest.raises(daskdl.ChannelError, match="replicas differ at the end"):
            own.fit(X, Y, batch_size=16)


class Losing(Recorded):
    """One replica does not get the first update that was sent to it."""

    def attach(self, seat):
        if seat.replica == 1:
            seat = replace(seat, channel=LosingChannel(seat.channel))
        return self.inner.attach(seat)


class LosingChannel(RecordingChannel):
    def _note(self, arrived):
        if self.received:
            return arrived
        return super()._note(arrived)._replace(updates=arrived.updates[1:])


class TestBoundedMemory:
    """Promise 4: nothing queues without a bound, and nothing is lost by it."""

    def test_a_full_outbox_leaves_the_update_in_the_residual(
        self, client, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("daskdl.training.fit.OUTBOX_BYTES", 1)
        own = trainer(client, master=Recorded(str(tmp_path), kept(max_staleness=None)))

        history = own.fit(X, Y, epochs=3, batch_size=4)

        assert sum(history.column("withheld")) > 0
        ends = records(tmp_path, epoch=2)
        expected = ends[0]["start"] + ends[0]["progress"] + ends[1]["progress"]
        got = delivered(own).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=8e-6)


class TestDamagedBytes:
    """Promise 9: damaged bytes do no harm."""

    def test_a_run_under_fire_finishes_right(self, client, tmp_path):
        class Fire(Callback):
            def on_epoch_end(self, row):
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
            await worker.daskdl_deliver(run=run, replica=replica, messages=[item])
            await worker.daskdl_deliver(run=run, replica=replica, messages=[[1]])
    publish = client.scheduler.daskdl_publish
    await publish(run=run, replica=99, messages=[], progress=[0, 0, -1])
    await publish(run=run, replica=0, messages=[[1]], progress=[0, 0, -1])
    await publish(run=run, replica=0, messages=None, progress=[0, 0, -1])
    await publish(run="?", replica=0, messages=[], progress=[0, 0, -1])
