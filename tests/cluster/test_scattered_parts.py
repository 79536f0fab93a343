"""Parts placed on the workers of a cluster: spread, restored after a loss, released."""

import os
import signal

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Event, Future, get_worker, secede, wait
from distributed.utils_test import poll_for

from daskdl.config import Bound
from daskdl.data.distribute import DataPlacement, Fetcher, workers_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.errors import LostPieceError, OptionError, WaitTimeoutError

X = np.arange(200.0, dtype=np.float32).reshape(100, 2)
Y = np.arange(100)
BOUND = Bound(30, ("request",))
PARTS = 15  # of 100 rows by 7


@pytest.fixture
def workers(client):
    return workers_of(client)


def put(client, workers, X=X, y=Y, seed=None):
    source = source_of(X, y, ReadOptions(batch_size=7), shuffle_seed=seed)
    return DataPlacement(source, client, workers, BOUND)


def blocks():
    return da.from_array(X, chunks=(30, 2)), da.from_array(Y, chunks=30)


def placed(client, placement):
    """Rows that the workers hold of each part, in order."""
    held = client.gather([Future(key, client) for key in placement.keys])
    return [
        part if isinstance(part, tuple) else part.unpack().rows({}) for part in held
    ]


def all_labels(client, placement):
    """Labels of all parts; the inputs must be theirs."""
    x, y = map(np.concatenate, zip(*placed(client, placement), strict=True))
    np.testing.assert_array_equal(x, X[y])
    return y.tolist()


def holders(client, placement):
    """The only worker that has each part, in order."""
    holders = client.who_has([Future(key, client) for key in placement.keys])
    assert {len(holders[key]) for key in placement.keys} == {1}
    return [holders[key][0] for key in placement.keys]


def part_keys(client):
    """The parts the scheduler knows of."""
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    return [key for key in keys if str(key).startswith("daskdl-part")]


def until_there(client, things):
    with client.as_current():  # `wait` asks the default client
        wait(things, timeout=20)


@pytest.mark.parametrize(
    ("kind", "seed"), [(np.asarray, None), (torch.from_numpy, 1)], ids=["order", "seed"]
)
def test_parts_in_memory_hold_every_row_once(client, workers, kind, seed):
    with put(client, workers, kind(X), kind(Y), seed) as placement:
        labels = all_labels(client, placement)

        assert list(placement.source.lengths) == [7] * 14 + [2]
        assert holders(client, placement) == [workers[i % 2] for i in range(PARTS)]
        assert sorted(labels) == list(range(100))
        assert (labels == list(range(100))) == (seed is None)


def test_what_was_released_leaves_only_what_was_sent_again(client, workers):
    placements = put(client, workers), put(client, workers, *blocks())
    with put(client, workers) as second:
        for placement in placements:
            placement.release()

        poll_for(lambda: len(part_keys(client)) == PARTS, timeout=20)
        assert all_labels(client, second) == list(range(100))


class FailingAtTheSecond:
    """A client that fails when the first worker has got all of its eight parts."""

    def __init__(self, client):
        self._client, self._left = client, 1

    def scatter(self, *args, **kwargs):
        if self._left == 0:
            raise TimeoutError
        self._left -= 1
        return self._client.scatter(*args, **kwargs)

    def sync(self, function):
        return self._client.sync(function)


def test_an_error_while_sending_leaves_nothing_behind(client, workers):
    with pytest.raises(TimeoutError) as kept:  # with its frames, as a notebook does
        put(FailingAtTheSecond(client), workers)

    poll_for(lambda: not part_keys(client), timeout=20)
    assert kept.traceback


def test_parts_for_a_worker_that_has_just_left_go_to_another(client, workers):
    with put(client, [workers[0], "tcp://127.0.0.1:9"]) as placement:
        assert all_labels(client, placement) == list(range(100))
        assert set(holders(client, placement)) == {workers[0]}


def test_a_part_of_arrays_is_tasks_of_which_none_is_run(client, workers):
    def broken(block):
        raise AssertionError("a block was computed")

    x, y = blocks()
    lazy = x.map_blocks(broken, meta=X)

    with (
        put(client, workers, x, y) as placement,
        put(client, workers, lazy, y) as lazy_placement,
    ):
        assert all_labels(client, placement) == list(range(100))
        assert sorted(holders(client, lazy_placement)) == sorted([*workers, *workers])


@pytest.mark.parametrize("there", [True, False], ids=["chosen", "elsewhere"])
def test_tasks_go_to_where_persisted_blocks_are(client, workers, there):
    x, y = blocks()
    x = client.persist(x, workers=[workers[1]])
    until_there(client, x)

    with put(client, workers if there else workers[:1], x, y) as placement:
        assert set(holders(client, placement)) == {workers[there]}
        held = client.gather([Future(key, client) for key in placement.keys])
        assert [part.unpack().needs for part in held] == [
            ((x.name, i, 0),) for i in range(4)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lambda: (X, Y), blocks], ids=["rows", "tasks"])
def test_parts_lost_with_their_worker_can_be_sent_again(three, kind):
    pids = three.run(os.getpid)
    first, second = sorted(pids)[:2]
    with put(three, [first, second], *kind()) as placement:
        keys = list(placement.keys)
        gone = list(range(0, len(keys), 2))
        os.kill(pids[first], signal.SIGKILL)
        poll_for(lambda: len(placement.lost()) == len(gone), timeout=20)

        assert placement.lost() == [(part, keys[part]) for part in gone]
        again = [placement.restore(part, keys[part], [second]) for part in gone]

        assert again == [placement.keys[part] for part in gone]
        assert placement.lost() == []
        assert all_labels(three, placement) == list(range(100))


def test_an_asynchronous_client_is_refused():
    class Asynchronous:
        asynchronous = True

    with pytest.raises(OptionError, match="client must be synchronous"):
        workers_of(Asynchronous())


# ---- what a part is made of comes to the worker that wants it, or is said to be late


@pytest.fixture
def fetch(client):
    """Gets a part in a task, and tells whether it was there already."""
    futures = []

    def fetch(worker, key, timeout_s=30, unwanted=lambda: False):
        def task():
            secede()
            held = get_worker().data.get(key)
            rows = Fetcher(timeout_s).rows(key, unwanted)
            return rows, isinstance(held, tuple) and rows[0] is held[0]

        futures.append(client.submit(task, workers=[worker], pure=False))
        return futures[-1]

    yield fetch
    for future in futures:  # or an error's frames would keep them
        future.release()


def test_rows_are_taken_from_the_own_store_or_from_anothers(client, workers, fetch):
    with put(client, workers) as supply:
        near, far = (fetch(w, supply.keys[0]).result(30) for w in workers)

        assert (near[1], far[1]) == (True, False)
        np.testing.assert_array_equal(far[0][0], X[:7])
        np.testing.assert_array_equal(far[0][1], Y[:7])


def test_a_lazy_part_is_computed_where_it_is_asked_for(client, workers, fetch):
    x = da.from_array(X, chunks=(50, 2)).map_blocks(lambda b: b + 1, meta=X)
    with put(client, workers[:1], x, da.from_array(Y, chunks=50)) as supply:
        (rows, labels), _ = fetch(workers[1], supply.keys[1]).result(30)

        np.testing.assert_array_equal(rows, X[50:] + 1)
        np.testing.assert_array_equal(labels, Y[50:])


def test_what_is_persisted_is_moved_to_where_the_rest_is_computed(
    client, workers, fetch
):
    x = client.persist(da.from_array(X, chunks=(50, 2)), workers=[workers[0]])
    until_there(client, x)
    with put(client, workers[:1], x * 2, da.from_array(Y, chunks=50)) as supply:
        (rows, _), _ = fetch(workers[1], supply.keys[1]).result(30)

        np.testing.assert_array_equal(rows, X[50:] * 2)


def test_what_is_computed_meanwhile_is_awaited(client, workers, fetch):
    gate = Event("load-gate", client=client)

    def late():
        Event("load-gate").wait(60)
        return X, Y

    future = client.submit(late, workers=[workers[0]], pure=False)
    try:
        with put(client, workers[1:], [future], None) as supply:
            fetched = fetch(workers[1], supply.keys[0])
            poll_for(lambda: future.key in client.processing()[workers[0]], 20)
            with pytest.raises(WaitTimeoutError) as caught:
                fetch(workers[1], supply.keys[0], 0.2).result(30)
            gate.set()

            assert str(caught.value) == (
                f"{future.key} did not come to {workers[1]} within 0.2 s "
                f"(daskdl.timeouts.data); it is being computed on {workers[0]}"
            )
            np.testing.assert_array_equal(fetched.result(30)[0][1], Y)
    finally:
        gate.set()
        future.release()


def test_what_is_not_wanted_any_more_is_given_up(client, workers, fetch):
    gate = Event("unwanted-gate", client=client)
    never = client.submit(Event("unwanted-gate").wait, 30, workers=[workers[0]])
    try:
        with pytest.raises(LostPieceError, match="is no longer needed"):
            fetch(workers[1], never.key, unwanted=lambda: True).result(30)
    finally:
        gate.set()
        never.release()


def test_an_error_of_the_users_own_comes_out_as_it_is(client, workers, fetch):
    def broken(block):
        raise OSError("no such file")

    x = da.from_array(X, chunks=50).map_blocks(broken, meta=X)
    supply = put(client, workers, x, da.from_array(Y, chunks=50))

    with supply, pytest.raises(OSError, match="no such file"):
        fetch(workers[1], supply.keys[0]).result(30)


def test_what_is_gone_is_said_to_be(client, workers, fetch):
    with pytest.raises(LostPieceError, match="was lost with the worker"):
        fetch(workers[0], "daskdl-part-gone").result(30)
