"""What becomes of updates: promises 1 to 4 and 9 of the design."""

import numpy as np

from daskdl import Callback, codec
from daskdl.channel.protocol import NAME, wrap
from tests.support.problems import SIZE, kept, rows, trainer
from tests.support.recording import (
    Recorded,
    records,
)

X, Y = rows()


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
