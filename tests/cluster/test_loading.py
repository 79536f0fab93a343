"""What a part is made of comes to the worker that wants it, or is said to be late."""

import dask.array as da
import numpy as np
import pytest
from distributed import Event, get_worker, secede, wait
from distributed.utils_test import poll_for

from daskdl.config import Bound
from daskdl.data.distribute import DataPlacement, Fetcher, workers_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.errors import LostPieceError, WaitTimeoutError

X = np.arange(200.0, dtype=np.float32).reshape(100, 2)
Y = np.arange(100)


@pytest.fixture
def workers(client):
    return workers_of(client)


def put(client, workers, X=X, y=Y):
    source = source_of(X, y, ReadOptions(batch_size=10))
    return DataPlacement(source, client, workers, Bound(30, ("request",)))


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


def until_there(client, things):
    with client.as_current():  # `wait` asks the default client
        wait(things, timeout=20)


def test_rows_are_taken_from_the_own_store_or_from_anothers(client, workers, fetch):
    with put(client, workers) as supply:
        near, far = (fetch(w, supply.keys[0]).result(30) for w in workers)

        assert (near[1], far[1]) == (True, False)
        np.testing.assert_array_equal(far[0][0], X[:10])
        np.testing.assert_array_equal(far[0][1], Y[:10])


def test_a_lazy_part_is_computed_where_it_is_asked_for(client, workers, fetch):
    x = da.from_array(X, chunks=(50, 2)).map_blocks(lambda b: b + 1, meta=X)
    with put(client, workers[:1], x, da.from_array(Y, chunks=50)) as supply:
        (own, labels), _ = fetch(workers[1], supply.keys[1]).result(30)

        np.testing.assert_array_equal(own, X[50:] + 1)
        np.testing.assert_array_equal(labels, Y[50:])


def test_what_is_persisted_is_moved_to_where_the_rest_is_computed(
    client, workers, fetch
):
    x = client.persist(da.from_array(X, chunks=(50, 2)), workers=[workers[0]])
    until_there(client, x)
    with put(client, workers[:1], x * 2, da.from_array(Y, chunks=50)) as supply:
        (own, _), _ = fetch(workers[1], supply.keys[1]).result(30)

        np.testing.assert_array_equal(own, X[50:] * 2)


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
        with pytest.raises(LostPieceError, match="is not wanted any more"):
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
