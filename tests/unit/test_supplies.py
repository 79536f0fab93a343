"""The data of a phase as the client keeps them, on a cluster that is only told of."""

import asyncio
from collections import Counter

import dask
import numpy as np
import pytest

from daskdl.config import Bound
from daskdl.data import distribute as module
from daskdl.data.dask_collections import pairs
from daskdl.data.distribute import Broadcast, Scattered, place_data
from daskdl.data.tables import InMemory
from daskdl.errors import OptionError, WaitTimeoutError
from tests.support.sources import Parts, future_of

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12)
BOUND = Bound(5, ("request",))


class Sent:
    """A future of what was sent."""

    def __init__(self, key, released):
        self.key = key
        self.status = "finished"
        self._released = released

    def release(self):
        self._released.append(self.key)


class Cluster:
    """As much of a client as sending data asks of one.

    Attributes:
        sent: Pairs of a worker and what it got at a time, by key.
        released: Keys.
        futures: By key.
    """

    def __init__(self, *, gone=(), hanging=(), held=()):
        self.scheduler = self
        self.sent, self.released, self.futures = [], [], {}
        self.gone, self.hanging, self.held = set(gone), set(hanging), dict(held)

    async def scatter(self, data, workers, broadcast, asynchronous):
        (worker,) = workers
        if worker in self.gone:
            raise KeyError(worker)
        if worker in self.hanging:
            raise WaitTimeoutError(worker)
        self.sent.append((worker, data))
        made = {key: Sent(key, self.released) for key in data}
        self.futures |= made
        return made

    def sync(self, function, **arguments):
        return asyncio.run(function(**arguments))

    async def who_has(self, keys):
        return {key: self.held.get(key, ()) for key in keys}

    def workers(self):
        """Who got how many parts."""
        return Counter(worker for worker, data in self.sent for _ in data)


def in_memory(rows=12):
    return InMemory(X[:rows], Y[:rows], batch_size=2)


def put(cluster, workers=("a", "b"), source=None):
    return Scattered(source or in_memory(), cluster, workers, BOUND)


class TestSpread:
    @pytest.mark.parametrize(
        ("rows", "expected"), [(12, {"a": 3, "b": 3}), (10, {"a": 3, "b": 2})]
    )
    def test_workers_get_about_as_many_parts_each(self, rows, expected):
        cluster = Cluster()

        put(cluster, source=in_memory(rows))

        assert cluster.workers() == expected

    def test_each_part_is_under_its_key(self):
        cluster = Cluster()

        supply = put(cluster)

        sent = {key: rows for _, data in cluster.sent for key, rows in data.items()}
        assert len(set(supply.keys)) == 6
        assert [sent[key][1].tolist() for key in supply.keys] == Y.reshape(
            6, 2
        ).tolist()

    def test_a_part_goes_where_its_results_are_and_the_others_make_up_for_it(self):
        parts = [future_of((X, Y), f"held-{i}") for i in range(3)]
        parts += [dask.delayed((X, Y), traverse=False) for _ in range(3)]
        held = {"held-0": ["b"], "held-1": ["c", "b"], "held-2": ["elsewhere"]}
        cluster = Cluster(held=held)

        supply = put(cluster, source=pairs(parts))

        home = {key: worker for worker, data in cluster.sent for key in data}
        assert [home[key] for key in supply.keys[:2]] == ["b", "b"]
        assert Counter(home.values()) == {"a": 3, "b": 3}

    def test_of_several_that_have_the_results_none_gets_all(self):
        parts = [future_of((X, Y), f"held-{i}") for i in range(6)]
        held = {part.key: ["b", "c", "a"] for part in parts}
        cluster = Cluster(held=held)

        put(cluster, workers=("a", "b", "c"), source=pairs(parts))

        assert cluster.workers() == {"a": 2, "b": 2, "c": 2}

    def test_small_parts_go_together_and_large_ones_alone(self, monkeypatch):
        monkeypatch.setattr(module, "SENT_BYTES", 96)  # of two rows: 48

        cluster = Cluster()
        put(cluster, workers=["a"])

        assert [len(data) for _, data in cluster.sent] == [2, 2, 2]
        monkeypatch.setattr(module, "SENT_BYTES", 40)
        cluster = Cluster()
        put(cluster, workers=["a"])
        assert [len(data) for _, data in cluster.sent] == [1] * 6

    def test_there_has_to_be_a_worker(self):
        with pytest.raises(OptionError, match="workers must name at least one"):
            put(Cluster(), workers=())


class TestWorkerThatIsGone:
    @pytest.mark.parametrize("why", ["gone", "hanging"])
    def test_the_others_take_its_parts_and_the_log_says_so(self, why, caplog):
        cluster = Cluster(**{why: ["b"]})

        supply = put(cluster, workers=("a", "b", "c"))

        assert cluster.workers() == {"a": 3, "c": 3}
        assert len(supply.keys) == 6
        assert caplog.messages[0].startswith("no data on b: ")

    def test_several_may_be_gone(self):
        cluster = Cluster(gone=["a", "c"])

        put(cluster, workers=("a", "b", "c"))

        assert cluster.workers() == {"b": 6}

    def test_if_all_are_gone_nothing_of_the_data_stays(self, monkeypatch):
        monkeypatch.setattr(module, "SENT_BYTES", 1)

        class Leaving(Cluster):
            async def scatter(self, data, workers, **options):
                if len(self.sent) == 2:
                    self.gone |= {"a", "b"}
                return await super().scatter(data, workers, **options)

        cluster = Leaving()
        with pytest.raises(OSError, match="removed a worker"):
            put(cluster)

        assert sorted(cluster.released) == sorted(cluster.futures)
        assert len(cluster.released) == 2


class TestRestore:
    def test_nothing_is_lost_at_first(self):
        assert put(Cluster()).lost() == []

    @pytest.mark.parametrize("status", ["lost", "cancelled"])
    def test_what_is_lost_is_told_with_its_key(self, status):
        cluster = Cluster()
        supply = put(cluster)
        keys = supply.keys
        for part in (4, 1):
            cluster.futures[keys[part]].status = status

        assert supply.lost() == [(1, keys[1]), (4, keys[4])]

    def test_it_is_sent_again_under_a_new_key(self):
        cluster = Cluster()
        supply = put(cluster)
        former = supply.keys[4]

        key = supply.restore(4, former, ["c"])

        worker, data = cluster.sent[-1]
        assert (worker, list(data)) == ("c", [key])
        assert data[key][1].tolist() == [8, 9]
        assert supply.keys[4] == key != former
        assert cluster.released == [former]

    def test_it_is_sent_once_however_many_find_it_lost(self):
        cluster = Cluster()
        supply = put(cluster)
        former = supply.keys[4]
        key = supply.restore(4, former, ["c"])
        count = len(cluster.sent)

        assert supply.restore(4, former, ["c"]) == key
        assert len(cluster.sent) == count

    def test_a_worker_that_is_gone_is_an_oserror(self):
        cluster = Cluster(gone=["c"])
        supply = put(cluster)

        with pytest.raises(OSError, match="removed a worker"):
            supply.restore(4, supply.keys[4], ["c"])

    def test_another_worker_takes_it_if_one_is_gone(self):
        cluster = Cluster()
        supply = put(cluster)
        former = supply.keys[4]
        cluster.gone.add("c")

        key = supply.restore(4, former, ["c", "b"])

        worker, data = cluster.sent[-1]
        assert (worker, list(data)) == ("b", [key])
        assert supply.keys[4] == key != former
        assert cluster.released == [former]

    def test_what_was_sent_before_its_worker_went_is_not_sent_twice(self, monkeypatch):
        monkeypatch.setattr(module, "SENT_BYTES", 1)

        class Leaving(Cluster):
            async def scatter(self, data, workers, **options):
                if len(self.sent) == 1:
                    self.gone.add("a")
                return await super().scatter(data, workers, **options)

        cluster = Leaving()
        put(cluster)

        assert cluster.workers() == {"a": 1, "b": 5}


class TestRelease:
    def test_all_is_let_go_of_once(self):
        cluster = Cluster()
        supply = put(cluster)
        keys = supply.keys

        supply.release()
        supply.release()

        assert sorted(cluster.released) == sorted(keys)

    def test_nothing_is_sent_after_it(self):
        supply = put(Cluster())
        key = supply.keys[0]
        supply.release()

        with pytest.raises((OptionError, KeyError)):
            supply.restore(0, key, ["a"])

    def test_leaving_the_block_is_enough(self):
        cluster = Cluster()

        with pytest.raises(ZeroDivisionError), put(cluster):
            raise ZeroDivisionError

        assert len(cluster.released) == 6


class TestCarried:
    def test_a_source_goes_as_a_whole_and_no_worker_holds_a_part(self):
        supply = place_data(Parts((X, Y), (X, Y)), Cluster(), ["a"], BOUND)

        assert type(supply) is Broadcast
        assert supply.keys == ("", "")
        assert supply.lost() == []
        x, _ = supply.packed.unpack().load(1)
        assert x.tolist() == X.tolist()

    def test_there_is_nothing_to_let_go_of(self):
        with Broadcast(Parts((X, Y))) as supply:
            supply.release()


def test_parts_that_are_sent_apart_are_scattered():
    assert type(place_data(in_memory(), Cluster(), ["a"], BOUND)) is Scattered


def test_of_tasks_the_packed_graph_is_sent():
    part = dask.delayed(lambda: (X, Y))()
    cluster = Cluster()

    put(cluster, source=pairs([part]))

    ((_, data),) = cluster.sent
    (content,) = data.values()
    x, y = content.unpack().rows({})
    assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())
    assert module.bytes_of(content) == content.payload.nbytes
