"""Lazy data: made where they are trained on, a little before, and dropped soon."""

import contextlib
import functools
import math
import os
import re
import signal
import threading

import dask.array as da
import dask.config
import numpy as np
import pytest
from distributed import Event, get_worker, wait
from distributed.utils_test import poll_for

from daskdl import Callback, ReplicaError, WaitTimeoutError
from daskdl.data.distribute import workers_of
from tests.support.clusters import (
    Script,
    TookPart,
    enough,
    own_threads,
    still_left_behind,
)
from tests.support.problems import kept, rows, trainer
from tests.support.watched import (
    MADE,
    TrainedRows,
    Watched,
    built,
    note,
    notes,
    watched_blocks,
)

BLOCKS, STEPS = 12, 5  # of 8 rows for each block
LEASED = 4  # steps of a lease, except near the end of an epoch
IN_STEP = kept(max_staleness=0)  # each replica has six blocks, and shares none
ALL = dict.fromkeys(range(480), 1)


class Made(Callback):
    """Notes after each step how many blocks were made; waits for those that will be.

    Args:
        folder: Of the notes.
        ahead: So many blocks are made before they are needed.
    """

    def __init__(self, folder, ahead):
        self._folder = str(folder)
        self._ahead = ahead

    def on_step_end(self, step):
        wanted = expected(step.number, self._ahead)
        with MADE:
            MADE.wait_for(lambda: built[self._folder] >= wanted, timeout=30)
            note(self._folder, "ahead", step=step.number, blocks=built[self._folder])


def expected(step, ahead):
    """Blocks made by the replica's step of that number, of an epoch of six blocks."""
    return min(math.ceil(step / STEPS) + ahead, BLOCKS // 2)


class OutOfStep(Callback):
    """Replica 1 waits in a lease until 0 has trained on all rows that are in no other.

    Left alone, a busy machine decides how many blocks go from one to the other: one
    that is far ahead also loads blocks that are near the other, which may take them.

    Args:
        folder: Of the notes.
        steps: Made by replica 1 before it waits; as many by 0, which waits for it.
    """

    def __init__(self, folder, steps):
        self._folder = str(folder)
        self._steps = steps
        # All but the steps that replica 1 has leased.
        self._others = BLOCKS * STEPS - math.ceil(steps / LEASED) * LEASED

    def on_step_end(self, step):
        there, alone = (Event(f"{what} {self._folder}") for what in ("there", "alone"))
        at = step.replica, step.number
        if at == (1, self._steps):
            wanted = math.ceil(self._steps / STEPS) + 1  # and the next
            with MADE:
                assert MADE.wait_for(lambda: built[self._folder] == wanted, timeout=60)
            there.set()
            assert alone.wait(60)
        elif at == (0, self._steps):
            assert there.wait(60)
        elif at == (0, self._others):
            alone.set()


class TestWhenBlocksAreThere:
    def test_each_is_made_once_per_epoch(self, client, tmp_path):
        trained, watched = TrainedRows(tmp_path), Watched(tmp_path)
        fitted = trainer(client, master=IN_STEP, loss=trained, callbacks=[trained])

        fitted.fit(*watched_blocks(watched), epochs=3, batch_size=8)

        assert trained.by_epoch() == [ALL] * 3
        assert trained.replicas() == {0, 1}
        assert watched.times() == dict.fromkeys(range(BLOCKS), 3)

    @pytest.mark.parametrize("steps", [1, 6, 21])
    def test_out_of_step_two_are_made_by_both_replicas(self, client, tmp_path, steps):
        trained, watched = TrainedRows(tmp_path), Watched(tmp_path)
        out_of_step = OutOfStep(tmp_path, steps)
        master, callbacks = kept(max_staleness=None), [trained, out_of_step]
        fitted = trainer(client, master=master, loss=trained, callbacks=callbacks)

        fitted.fit(*watched_blocks(watched), batch_size=8)

        assert trained.by_epoch() == [ALL]
        # Replica 0 takes the block that 1 has reserved, and shares the one it is in.
        assert sorted(watched.times().values()) == [1] * (BLOCKS - 2) + [2] * 2

    @pytest.mark.parametrize(("prefetch", "ahead"), [(2, 1), (0, 0)])
    def test_the_next_is_made_while_one_is_trained_on(
        self, client, tmp_path, prefetch, ahead
    ):
        watched = Watched(tmp_path)
        callbacks = [Made(tmp_path, ahead)]
        fitted = trainer(client, master=IN_STEP, callbacks=callbacks)
        x, y = watched_blocks(watched)

        fitted.fit(x, y % 4, batch_size=8, prefetch=prefetch)

        seen = notes(tmp_path, "ahead")
        assert len(seen) == BLOCKS * STEPS
        for line in seen:
            assert line["blocks"] == expected(line["step"], ahead), line

    @pytest.mark.parametrize("prefetch", [0, 2, 100])
    def test_they_are_dropped_after_their_last_use(self, client, tmp_path, prefetch):
        watched = Watched(tmp_path)
        x, y = watched_blocks(watched)

        trainer(client).fit(x, y % 4, epochs=2, batch_size=8, prefetch=prefetch)

        # Trained on, the one before, and those of 100 batches or the next.
        assert watched.most() <= 3 + (prefetch == 100) * 100 // STEPS
        poll_for(lambda: watched.left() == 0, timeout=20)


def test_tasks_of_blocks_find_the_worker_that_runs_them(client):
    def of_worker(block):
        assert get_worker().address.startswith("tcp://")
        return block

    x, y = rows()
    x = da.from_array(x, chunks=(97, 20)).map_blocks(of_worker, meta=x)

    history = trainer(client).fit(x, da.from_array(y, chunks=97))

    assert history.column("examples") == [480]


class Hanging:
    """Hangs before one block until the test says so."""

    def __init__(self, block):
        self._block = block

    def __call__(self, number):
        if number == self._block:
            Event("hangs").set()
            Event("go").wait(60)


@pytest.fixture
def hangs(client):
    """Set when a block hangs; which it does not when the test is over."""
    hangs, go = (Event(name, client=client) for name in ("hangs", "go"))
    yield hangs
    go.set()
    assert still_left_behind(client) == {}
    for event in (hangs, go):
        event.clear()


def training_threads(client):
    """Threads of Dask's that still run daskdl, on all workers."""
    names = client.run(own_threads).values()
    return [
        name for names_of_worker in names for name in names_of_worker if "Dask-" in name
    ]


class TestBlocksThatDoNotCome:
    def test_one_that_raises_is_named_with_the_traceback(self, client, tmp_path):
        def broken(number):
            if number == 7:
                raise LookupError("no such block")

        x, y = watched_blocks(Watched(tmp_path, broken))

        with pytest.raises(ReplicaError) as caught:
            trainer(client).fit(x, y % 4, batch_size=8)

        message = str(caught.value)
        assert re.match(r"replica \d on tcp://\S+: LookupError: no such", message)
        assert "in part 7 of the train data" in message
        # Without the line: cloudpickle 3.1.3 no longer says which file it is in.
        assert "in broken\n" in message
        assert type(caught.value.__cause__) is LookupError

    @pytest.mark.slow
    def test_one_that_hangs_is_named(self, client, tmp_path, hangs):
        x, y = watched_blocks(Watched(tmp_path, Hanging(5)))

        with (
            dask.config.set({"daskdl.timeouts.data": "2s"}),
            pytest.raises(WaitTimeoutError) as caught,
        ):
            trainer(client).fit(x, y % 4, batch_size=8)

        assert re.match(
            r"replica \d on tcp://\S+: part 5 of the train data was not loaded within "
            r"2 s \(daskdl\.timeouts\.data\)",
            str(caught.value),
        )

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_does_not_wait_for_it(self, client, tmp_path, hangs):
        x, y = watched_blocks(Watched(tmp_path, Hanging(5)))

        def press():
            if hangs.wait(60):
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with contextlib.ExitStack() as ending:
            ending.callback(thread.join)
            # Who waits looks by itself only each quarter of that: too late for a test.
            with (
                dask.config.set({"daskdl.timeouts.silence": "2000s"}),
                pytest.raises(KeyboardInterrupt),
            ):
                # Not loaded before, so that the replica cannot but wait for it.
                trainer(client).fit(x, y % 4, batch_size=8, prefetch=0)

        assert still_left_behind(client) == {}  # though the block still hangs
        poll_for(lambda: not training_threads(client), timeout=30)
        assert not Event("go", client=client).is_set()


class TestPersistedBlocks:
    def test_half_lazy_on_top_of_those_of_one_worker(self, client, tmp_path):
        persisted, watched = Watched(tmp_path / "below"), Watched(tmp_path / "above")
        for folder in (persisted.folder, watched.folder):
            os.mkdir(folder)
        trained = TrainedRows(tmp_path)
        below, y = watched_blocks(persisted)
        below = client.persist(below, workers=workers_of(client)[:1])
        with client.as_current():
            wait(below, timeout=20)
        x = below.map_blocks(watched, meta=np.empty((0, 20), np.float32))
        fitted = trainer(client, master=IN_STEP, loss=trained, callbacks=[trained])

        fitted.fit(x, y, epochs=2, batch_size=8)

        assert trained.by_epoch() == [ALL] * 2
        assert trained.replicas() == {0, 1}
        assert watched.times() == dict.fromkeys(range(BLOCKS), 2)
        assert persisted.times() == dict.fromkeys(range(BLOCKS), 1)

    @pytest.mark.slow
    def test_those_lost_with_their_worker_are_made_again(self, three, tmp_path):
        persisted, trained = Watched(tmp_path), TrainedRows(tmp_path)
        pids = three.run(os.getpid)
        victim = pids[sorted(pids)[1]]
        x, y = watched_blocks(persisted)
        x = three.persist(x)
        with three.as_current():
            wait(x, timeout=20)
        held = {line["block"] for line in notes(tmp_path, "made")}
        took_part = TookPart(tmp_path)
        kill = functools.partial(os.kill, victim, signal.SIGKILL)
        script = Script((3, kill), (took_part.by(3), enough))

        script.run(trainer(three, loss=trained, callbacks=[trained, took_part]), x, y)

        assert held == set(range(BLOCKS))
        again = {block for block, times in persisted.times().items() if times > 1}
        assert again
        assert all(epoch.keys() == ALL.keys() for epoch in trained.by_epoch()[:-1])
