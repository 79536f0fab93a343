import os
import re
import signal
import threading

import dask.array as da
import numpy as np
import pytest
import torch
from dask import delayed
from distributed import Event, get_worker, secede, wait
from distributed.utils_test import poll_for

from daskdl.data.futures import workers_of
from daskdl.data.loading import load
from daskdl.data.pieces import place
from daskdl.errors import DataError, OptionError, WaitTimeoutError

X = np.arange(200.0, dtype=np.float32).reshape(100, 2)
Y = np.arange(100)


@pytest.fixture
def workers(client):
    return workers_of(client)


def put(client, workers, X=X, y=Y, seed=None):
    return place(
        X, y, client, workers, batch_size=4, replicas=len(workers), shuffle_seed=seed
    )


def until_there(client, things):
    with client.as_current():  # `wait` asks the default client
        wait(things, timeout=20)


def piece_keys(client):
    """The pieces the scheduler knows of."""
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    return [key for key in keys if str(key).startswith("daskdl-piece")]


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("seed", [None, 1], ids=["in order", "shuffled"])
def test_pieces_in_memory_hold_every_row_once(client, workers, kind, seed):
    with put(client, workers, kind(X), kind(Y), seed) as pieces:
        got = client.gather(pieces.futures)

        assert [len(y) for _, y in got] == [piece.examples for piece in pieces]
        assert [piece.index for piece in pieces] == list(range(16))
        assert [piece.key for piece in pieces] == [f.key for f in pieces.futures]
        assert pieces.examples == 100
        labels = np.concatenate([y for _, y in got])
        assert sorted(labels) == list(range(100))
        assert (labels.tolist() == list(range(100))) == (seed is None)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X[labels])


def test_pieces_are_spread_evenly_over_the_workers_named(client, workers):
    with put(client, workers) as both, put(client, workers[1:]) as one:
        holders = client.who_has(both.futures + one.futures)

        where = [holders[piece.key] for piece in both]
        assert where == [(workers[i % 2],) for i in range(16)]
        assert {holders[piece.key] for piece in one} == {(workers[1],)}


def test_the_same_data_placed_twice_have_keys_of_their_own(client, workers):
    with put(client, workers) as one, put(client, workers) as two:
        assert not {piece.key for piece in one} & {piece.key for piece in two}
        one.release()

        assert len(client.gather(two.futures)) == len(two)


def test_released_pieces_leave_nothing_behind(client, workers):
    pieces = put(client, workers)
    lazy = put(client, workers, da.from_array(X, (30, 2)), da.from_array(Y, 30))

    kept = pieces.futures + lazy.futures  # as a task's arguments may be

    for placed in (pieces, lazy):
        placed.release()
        placed.release()

    poll_for(lambda: not piece_keys(client), timeout=20)
    assert len(kept) == 16 + 4
    assert len(pieces) == 0
    with pytest.raises(OptionError, match="the pieces have been released"):
        pieces.restore(0, "key", workers)


def test_an_error_while_placing_leaves_nothing_behind(client, workers):
    with pytest.raises(TimeoutError) as kept:  # with its frames, as a notebook does
        place(
            X,
            Y,
            _FailingAtTheTenth(client),
            workers,
            batch_size=4,
            replicas=2,
            shuffle_seed=None,
        )

    poll_for(lambda: not piece_keys(client), timeout=20)
    assert kept.traceback


class _FailingAtTheTenth:
    """A client that fails when the first worker has got all of its eight pieces."""

    def __init__(self, client):
        self._client, self._left = client, 9

    def scatter(self, *args, **kwargs):
        if self._left == 0:
            raise TimeoutError
        self._left -= 1
        return self._client.scatter(*args, **kwargs)

    def sync(self, function):
        return self._client.sync(function)


def test_pieces_for_a_worker_that_has_just_gone_are_put_on_another(client, workers):
    with put(client, [workers[0], "tcp://127.0.0.1:9"]) as pieces:
        got = client.gather(pieces.futures)

        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
        holders = client.who_has(pieces.futures).values()
        assert {tuple(h) for h in holders} == {(workers[0],)}


class TestDaskArrays:
    def test_a_piece_is_a_block_row(self, client, workers):
        x, y = da.from_array(X, chunks=(30, 2)), da.from_array(Y, chunks=45)

        with put(client, workers, x, y) as pieces:
            got = client.gather(pieces.futures)

            assert [piece.examples for piece in pieces] == [30, 30, 30, 10]
            np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
            np.testing.assert_array_equal(np.concatenate([y for _, y in got]), Y)
            until_there(client, pieces.futures)
            held = [len(keys) for keys in client.has_what().values()]
            assert min(held) >= 2

    def test_persisted_blocks_stay_where_they_are(self, client, workers):
        x = client.persist(da.from_array(X, chunks=(30, 2)), workers=[workers[1]])
        until_there(client, x)

        with put(client, workers, x, da.from_array(Y, chunks=30)) as pieces:
            until_there(client, pieces.futures)

            assert set(client.who_has(pieces.futures).values()) == {(workers[1],)}

    def test_blocks_persisted_elsewhere_are_spread(self, client, workers):
        x = client.persist(da.from_array(X, chunks=(30, 2)), workers=[workers[1]])
        until_there(client, x)

        with put(client, workers[:1], x, da.from_array(Y, chunks=30)) as pieces:
            until_there(client, pieces.futures)

            assert set(client.who_has(pieces.futures).values()) == {(workers[0],)}

    def test_a_block_shorter_than_promised_is_named(self, client, workers):
        blocks = [delayed(np.zeros)((n, 2)) for n in (4, 3)]
        x = da.concatenate([da.from_delayed(b, (4, 2), float) for b in blocks])

        pieces = put(client, workers, x, da.zeros(8, chunks=4))

        message = "piece 1 has 3 rows of X and 4 of y"
        with pieces, pytest.raises(DataError, match=message):
            client.gather(pieces.futures)


def wait_until_done(future, timeout_s):
    """As a channel does, but for a run that nobody stops."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait(timeout_s)
    return future.done()


class TestLoad:
    @pytest.fixture
    def fetch(self, client):
        """Loads a piece in a task, and tells whether it was there already."""
        futures = []

        def fetch(worker, key, timeout_s=30):
            def task():
                secede()
                held = get_worker().data.get(key, [None])[0]
                rows = load(key, timeout_s, timeout_s, lambda: True, wait_until_done)
                return rows, rows[0] is held

            futures.append(client.submit(task, workers=[worker], pure=False))
            return futures[-1]

        yield fetch
        for future in futures:  # or an error's frames would keep them
            future.release()

    def test_a_piece_is_taken_from_the_own_store_or_from_anothers(
        self, client, workers, fetch
    ):
        with put(client, workers) as pieces:
            [piece, *_] = pieces
            near, far = (fetch(w, piece.key).result(30) for w in workers)

            assert (near[1], far[1]) == (True, False)
            np.testing.assert_array_equal(far[0][0], X[:4])
            np.testing.assert_array_equal(far[0][1], Y[:4])

    def test_a_piece_that_is_computed_meanwhile_is_awaited(
        self, client, workers, fetch
    ):
        gate = Event("load-gate", client=client)

        def late(block):
            Event("load-gate").wait(30)
            return block

        x = da.from_array(X, chunks=(50, 2)).map_blocks(late, meta=X)
        with put(client, workers[:1], x, da.from_array(Y, chunks=50)) as pieces:
            fetched = fetch(workers[1], next(iter(pieces)).key)
            too_soon = fetch(workers[1], next(iter(pieces)).key, 0.2)
            with pytest.raises(WaitTimeoutError) as caught:
                too_soon.result(30)
            assert re.fullmatch(
                rf"piece daskdl-piece-\S+ did not come to {workers[1]} within 0\.2 s "
                r"\(daskdl\.timeouts\.data\); nobody has it; it waits for Dask "
                "to compute what it is made of",
                str(caught.value),
            )
            gate.set()

            assert fetched.result(30)[0][1].tolist() == list(range(50))

    def test_an_error_of_the_users_own_comes_out_as_it_is(self, client, workers, fetch):
        def broken(block):
            raise OSError("no such file")

        x = da.from_array(X, chunks=50).map_blocks(broken, meta=X)
        pieces = put(client, workers, x, da.from_array(Y, chunks=50))

        with pieces, pytest.raises(OSError, match="no such file"):
            fetch(workers[1], next(iter(pieces)).key).result(30)

    def test_a_piece_that_is_gone_is_said_to_be(self, client, workers, fetch):
        with pytest.raises(DataError, match="was lost with the worker"):
            fetch(workers[0], "daskdl-piece-gone").result(30)


def test_pieces_lost_with_their_worker_can_be_restored(three):
    first, second = workers_of(three)[:2]
    pids = three.run(os.getpid)
    with put(three, [first, second]) as pieces:
        keys = [piece.key for piece in pieces]
        os.kill(pids[first], signal.SIGKILL)
        poll_for(lambda: len(pieces.lost()) == 8, timeout=20)

        assert [piece.index for piece in pieces.lost()] == list(range(0, 16, 2))
        restored = [pieces.restore(i, keys[i], [second]) for i in range(0, 16, 2)]

        assert [piece.index for piece in restored] == list(range(0, 16, 2))
        assert not {piece.key for piece in restored} & set(keys)
        got = three.gather(pieces.futures)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
        assert pieces.restore(0, keys[0], [second]) == restored[0]
        assert pieces.lost() == []


def test_threads_of_one_process_do_as_well(threads):
    with put(threads, workers_of(threads)) as pieces:
        got = threads.gather(pieces.futures)

        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)


def test_no_workers_are_refused(client, no_workers):
    with pytest.raises(OptionError, match="workers must name at least one worker"):
        place(X, Y, client, [], batch_size=4, replicas=1, shuffle_seed=None)
    with pytest.raises(OptionError, match="has no workers; wait for some with"):
        workers_of(no_workers)


def test_an_asynchronous_client_is_refused():
    class Asynchronous:
        asynchronous = True

    with pytest.raises(OptionError, match="client must be synchronous"):
        workers_of(Asynchronous())
