"""What is sent of the data is on the workers, is sent again, and is let go."""

import os
import signal

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Future, wait
from distributed.utils_test import poll_for

from daskdl.config import Bound
from daskdl.data.distribute import place_data, workers_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.errors import OptionError
from tests.support.sources import Parts

X = np.arange(200.0, dtype=np.float32).reshape(100, 2)
Y = np.arange(100)
BOUND = Bound(30, ("request",))
PARTS = 15  # of 100 rows by 7


@pytest.fixture
def workers(client):
    return workers_of(client)


def source(X=X, y=Y, seed=None):
    return source_of(X, y, ReadOptions(batch_size=7), shuffle_seed=seed)


def put(client, workers, X=X, y=Y, seed=None):
    return place_data(source(X, y, seed), client, workers, BOUND)


def sent(client, supply):
    """What the workers hold of each part, in order."""
    return client.gather([Future(key, client) for key in supply.keys])


def holders(client, supply):
    """The only worker that has each part, in order."""
    found = client.who_has([Future(key, client) for key in supply.keys])
    assert {len(found[key]) for key in supply.keys} == {1}
    return [found[key][0] for key in supply.keys]


def part_keys(client):
    """The parts the scheduler knows of."""
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    return [key for key in keys if str(key).startswith("daskdl-part")]


def until_there(client, things):
    with client.as_current():  # `wait` asks the default client
        wait(things, timeout=20)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("seed", [None, 1], ids=["in order", "shuffled"])
def test_parts_in_memory_hold_every_row_once(client, workers, kind, seed):
    with put(client, workers, kind(X), kind(Y), seed) as supply:
        got = sent(client, supply)

        assert [len(y) for _, y in got] == list(supply.source.lengths)
        assert [len(y) for _, y in got] == [7] * 14 + [2]
        assert supply.packed is None
        labels = np.concatenate([y for _, y in got])
        assert sorted(labels) == list(range(100))
        assert (labels.tolist() == list(range(100))) == (seed is None)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X[labels])


def test_parts_are_spread_evenly_over_the_workers_named(client, workers):
    with put(client, workers) as both, put(client, workers[1:]) as one:
        assert holders(client, both) == [workers[i % 2] for i in range(PARTS)]
        assert set(holders(client, one)) == {workers[1]}


def test_the_same_data_sent_twice_have_keys_of_their_own(client, workers):
    with put(client, workers) as one, put(client, workers) as two:
        assert not {*one.keys} & {*two.keys}
        one.release()

        assert len(sent(client, two)) == PARTS


def test_what_was_released_leaves_nothing_behind(client, workers):
    supply = put(client, workers)
    lazy = put(client, workers, da.from_array(X, (30, 2)), da.from_array(Y, 30))
    keys = [*supply.keys, *lazy.keys]

    for own in (supply, lazy):
        own.release()
        own.release()

    poll_for(lambda: not part_keys(client), timeout=20)
    assert len(keys) == PARTS + 4
    assert len(supply.keys) == 0
    with pytest.raises(OptionError, match="the data have been released"):
        supply.restore(0, "key", workers)


def test_an_error_while_sending_leaves_nothing_behind(client, workers):
    with pytest.raises(TimeoutError) as kept:  # with its frames, as a notebook does
        place_data(source(), _FailingAtTheSecond(client), workers, BOUND)

    poll_for(lambda: not part_keys(client), timeout=20)
    assert kept.traceback


class _FailingAtTheSecond:
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


def test_parts_for_a_worker_that_has_just_gone_are_put_on_another(client, workers):
    with put(client, [workers[0], "tcp://127.0.0.1:9"]) as supply:
        got = sent(client, supply)

        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
        assert set(holders(client, supply)) == {workers[0]}


def test_what_every_worker_reads_by_itself_is_packed_and_nobody_holds_it(
    client, workers
):
    own = Parts((X, Y), (X, Y))
    with place_data(own, client, workers, BOUND) as supply:
        assert supply.keys == ("", "")
        assert supply.packed.unpack().parts == 2
        assert supply.lost() == []
        assert part_keys(client) == []


class TestDaskArrays:
    def test_a_part_is_the_tasks_of_a_block_row_and_none_of_them_is_run(
        self, client, workers
    ):
        def broken(block):
            raise AssertionError("a block was computed")

        x, y = da.from_array(X, chunks=(30, 2)), da.from_array(Y, chunks=45)
        lazy = x.map_blocks(broken, meta=X)

        with put(client, workers, x, y) as supply, put(client, workers, lazy, y) as own:
            got = [packed.unpack().rows({}) for packed in sent(client, supply)]

            assert list(supply.source.lengths) == [30, 30, 30, 10]
            np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
            np.testing.assert_array_equal(np.concatenate([y for _, y in got]), Y)
            assert sorted(holders(client, own)) == sorted([*workers, *workers])

    def test_tasks_go_to_where_persisted_blocks_are(self, client, workers):
        x = client.persist(da.from_array(X, chunks=(30, 2)), workers=[workers[1]])
        until_there(client, x)

        with put(client, workers, x, da.from_array(Y, chunks=30)) as supply:
            assert set(holders(client, supply)) == {workers[1]}
            needs = [packed.unpack().needs for packed in sent(client, supply)]
            assert needs == [((x.name, i, 0),) for i in range(4)]

    def test_tasks_of_blocks_persisted_elsewhere_are_spread(self, client, workers):
        x = client.persist(da.from_array(X, chunks=(30, 2)), workers=[workers[1]])
        until_there(client, x)

        with put(client, workers[:1], x, da.from_array(Y, chunks=30)) as supply:
            assert set(holders(client, supply)) == {workers[0]}


@pytest.mark.slow
def test_parts_lost_with_their_worker_can_be_sent_again(three):
    first, second = workers_of(three)[:2]
    pids = three.run(os.getpid)
    with put(three, [first, second]) as supply:
        keys = list(supply.keys)
        gone = list(range(0, PARTS, 2))
        os.kill(pids[first], signal.SIGKILL)
        poll_for(lambda: len(supply.lost()) == len(gone), timeout=20)

        assert supply.lost() == [(part, keys[part]) for part in gone]
        again = [supply.restore(part, keys[part], [second]) for part in gone]

        assert again == [supply.keys[part] for part in gone]
        assert not {*again} & {*keys}
        got = sent(three, supply)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)
        assert supply.restore(0, keys[0], [second]) == again[0]
        assert supply.lost() == []


@pytest.mark.slow
def test_lost_tasks_of_lazy_parts_are_sent_again(three):
    first, second = workers_of(three)[:2]
    pids = three.run(os.getpid)
    x, y = da.from_array(X, (30, 2)), da.from_array(Y, 30)
    with put(three, [first, second], x, y) as supply:
        os.kill(pids[first], signal.SIGKILL)
        poll_for(lambda: len(supply.lost()) == 2, timeout=20)

        for part, key in supply.lost():
            supply.restore(part, key, [second])

        got = [packed.unpack().rows({}) for packed in sent(three, supply)]
        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)


def test_threads_of_one_process_do_as_well(threads):
    with put(threads, workers_of(threads)) as supply:
        got = sent(threads, supply)

        np.testing.assert_array_equal(np.concatenate([x for x, _ in got]), X)


def test_no_workers_are_refused(client, no_workers):
    with pytest.raises(OptionError, match="workers must name at least one worker"):
        place_data(source(), client, [], BOUND)
    with pytest.raises(OptionError, match="has no workers; wait for some with"):
        workers_of(no_workers)


def test_an_asynchronous_client_is_refused():
    class Asynchronous:
        asynchronous = True

    with pytest.raises(OptionError, match="client must be synchronous"):
        workers_of(Asynchronous())
