"""Parts placed on workers, restored and fetched, with a client that has no cluster."""

import asyncio
import contextlib
from collections import Counter

import dask
import numpy as np
import pytest

from daskdl.config import Bound
from daskdl.data import distribute as module
from daskdl.data.dask_collections import ExampleCollection
from daskdl.data.distribute import DataPlacement, Fetcher, scatter
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, LostPieceError, OptionError, WaitTimeoutError
from tests.support.sources import Parts, future_of

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12)
BOUND, SOON = Bound(5, ("request",)), Bound(0.01, ("join",))


class Sent:
    """A future of something that was sent."""

    def __init__(self, key, released):
        self.key = key
        self.status = "finished"
        self._released = released

    def release(self):
        self._released.append(self.key)


class Cluster:
    """The part of a client's interface that placing data uses.

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
        assert asynchronous
        assert broadcast == (len(workers) > 1)
        for worker in workers:
            if worker in self.gone:
                raise KeyError(worker)
            if worker in self.hanging:
                await asyncio.Event().wait()
            self.sent.append((worker, data))
        futures = {key: Sent(key, self.released) for key in data}
        self.futures |= futures
        return futures

    def as_current(self):
        return contextlib.nullcontext()

    def sync(self, function, **arguments):
        return asyncio.run(function(**arguments))

    async def who_has(self, keys):
        return {key: self.held.get(key, ()) for key in keys}

    def workers(self):
        """Number of parts that each worker got."""
        return Counter(worker for worker, data in self.sent for _ in data)


class Leaving(Cluster):
    """Its workers leave after some messages."""

    def __init__(self, after, gone):
        super().__init__()
        self.after, self.leaving = after, gone

    async def scatter(self, data, workers, **options):
        if len(self.sent) == self.after:
            self.gone |= {*self.leaving}
        return await super().scatter(data, workers, **options)


def in_memory(rows=12):
    return InMemory(X[:rows], Y[:rows], batch_size=2)


def put(cluster, workers=("a", "b"), source=None, bound=BOUND):
    return DataPlacement(source or in_memory(), cluster, workers, bound)


class TestScatter:
    @pytest.mark.parametrize("workers", [["a"], ["a", "b"]], ids=["one", "all"])
    def test_sends_a_value_to_each_worker(self, workers):
        cluster = Cluster()

        futures = scatter(cluster, {"k": 1}, workers, BOUND, "it")

        assert futures == cluster.futures
        assert cluster.sent == [(worker, {"k": 1}) for worker in workers]

    def test_names_workers_that_hang_and_does_not_wait_for_them(self):
        with pytest.raises(WaitTimeoutError) as caught:
            scatter(Cluster(hanging="a"), {"k": 1}, ["a", "b"], SOON, "the model")

        assert str(caught.value) == (
            "the model could not be sent to a, b within 0.01 s (daskdl.timeouts.join); "
            "is the network slow, or a worker busy?"
        )

    def test_releases_what_arrives_too_late(self):
        too_late = asyncio.Event()

        class Late(Cluster):
            async def scatter(self, *arguments, **options):
                await too_late.wait()
                return await super().scatter(*arguments, **options)

            def sync(self, function):
                async def afterwards():
                    with pytest.raises(WaitTimeoutError):
                        await function()
                    too_late.set()
                    others = asyncio.all_tasks() - {asyncio.current_task()}
                    await asyncio.gather(*others)
                    return {}

                return asyncio.run(afterwards())

        cluster = Late()
        scatter(cluster, {"a": 1, "b": 2}, ["w"], SOON, "it")

        assert sorted(cluster.released) == ["a", "b"]

    @pytest.mark.parametrize("error", [KeyError("a"), ValueError("no such worker")])
    def test_to_a_worker_that_was_removed_is_an_oserror(self, error):
        class Removed(Cluster):
            async def scatter(self, *arguments, **options):
                raise error

        with pytest.raises(OSError, match=r"removed a worker of \['a'\]"):
            scatter(Removed(), {"k": 1}, ["a"], BOUND, "it")


class TestPlacement:
    @pytest.mark.parametrize(
        ("rows", "expected"), [(12, {"a": 3, "b": 3}), (10, {"a": 3, "b": 2})]
    )
    def test_spreads_parts_evenly_each_under_its_key(self, rows, expected):
        cluster = Cluster()

        placement = put(cluster, source=in_memory(rows))

        sent = {key: part for _, data in cluster.sent for key, part in data.items()}
        labels = [sent[key][1].tolist() for key in placement.keys]
        assert cluster.workers() == expected
        assert labels == Y[:rows].reshape(-1, 2).tolist()
        assert (placement.packed, placement.lost()) == (None, [])

    def test_puts_a_part_where_its_results_are_and_balances_with_the_others(self):
        parts = [future_of((X, Y), f"held-{i}") for i in range(3)]
        parts += [dask.delayed((X, Y), traverse=False) for _ in range(3)]
        held = {"held-0": ["b"], "held-1": ["c", "b"], "held-2": ["elsewhere"]}
        cluster = Cluster(held=held)

        placement = put(cluster, source=ExampleCollection(parts, bag=False))

        home = {key: worker for worker, data in cluster.sent for key in data}
        assert [home[key] for key in placement.keys[:2]] == ["b", "b"]
        assert Counter(home.values()) == {"a": 3, "b": 3}

    def test_shares_the_parts_among_several_holders_of_their_results(self):
        parts = [future_of((X, Y), f"held-{i}") for i in range(6)]
        cluster = Cluster(held={part.key: ["b", "c", "a"] for part in parts})

        put(
            cluster, workers=("a", "b", "c"), source=ExampleCollection(parts, bag=False)
        )

        assert cluster.workers() == {"a": 2, "b": 2, "c": 2}

    @pytest.mark.parametrize(("limit", "together"), [(96, 2), (40, 1)])
    def test_sends_small_parts_together(self, monkeypatch, limit, together):
        monkeypatch.setattr(module, "SENT_BYTES", limit)  # a part has 48

        cluster = Cluster()
        put(cluster, workers=["a"])

        assert {len(data) for _, data in cluster.sent} == {together}

    def test_sends_tasks_as_a_packed_graph(self):
        cluster = Cluster()

        put(
            cluster,
            source=ExampleCollection([dask.delayed(lambda: (X, Y))()], bag=False),
        )

        ((_, data),) = cluster.sent
        (content,) = data.values()
        x, y = content.unpack().rows({})
        assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())

    def test_packs_a_source_that_every_worker_reads_by_itself(self):
        cluster = Cluster()
        with put(cluster, source=Parts((X, Y), (X, Y))) as placement:
            x, _ = placement.packed.unpack().load(1)

            assert x.tolist() == X.tolist()
            assert list(placement.keys) == ["", ""]
            assert placement.lost() == cluster.sent == []

    @pytest.mark.parametrize(
        ("cluster", "expected"),
        [
            (Cluster(gone="b"), {"a": 3, "c": 3}),
            (Cluster(hanging="b"), {"a": 3, "c": 3}),
            (Cluster(gone="ac"), {"b": 6}),
        ],
        ids=["gone", "hanging", "several"],
    )
    def test_gives_parts_of_workers_that_refuse_to_the_others(
        self, cluster, expected, caplog
    ):
        placement = put(cluster, workers=("a", "b", "c"), bound=SOON)

        assert cluster.workers() == expected
        assert len(placement.keys) == 6
        assert caplog.messages[0].startswith("no data on ")

    def test_does_not_repeat_what_was_sent_before_a_worker_left(self, monkeypatch):
        monkeypatch.setattr(module, "SENT_BYTES", 1)
        cluster = Leaving(1, "a")

        put(cluster)

        assert cluster.workers() == {"a": 1, "b": 5}

    def test_releases_all_parts_if_all_workers_leave(self, monkeypatch):
        monkeypatch.setattr(module, "SENT_BYTES", 1)
        cluster = Leaving(2, "ab")

        with pytest.raises(OSError, match="removed a worker"):
            put(cluster)

        assert sorted(cluster.released) == sorted(cluster.futures)
        assert len(cluster.released) == 2

    def test_is_released_once_at_the_end_of_its_block(self):
        cluster = Cluster()

        with pytest.raises(ZeroDivisionError), put(cluster) as placement:
            raise ZeroDivisionError
        placement.release()

        assert sorted(cluster.released) == sorted(cluster.futures)
        assert len(placement.keys) == 0
        with pytest.raises(OptionError, match="the data have been released"):
            placement.restore(0, "key", ["a"])


class TestRestore:
    @pytest.mark.parametrize("status", ["lost", "cancelled"])
    def test_lists_lost_parts_with_their_keys(self, status):
        cluster = Cluster()
        placement = put(cluster)
        keys = placement.keys
        for part in (4, 1):
            cluster.futures[keys[part]].status = status

        assert placement.lost() == [(1, keys[1]), (4, keys[4])]

    @pytest.mark.parametrize(("there", "home"), [("c", "c"), ("gb", "b")])
    def test_sends_a_part_once_under_a_new_key_however_many_ask(self, there, home):
        cluster = Cluster()
        placement = put(cluster)
        former = placement.keys[4]
        cluster.gone.add("g")

        key = placement.restore(4, former, [*there])
        sent = len(cluster.sent)

        worker, data = cluster.sent[-1]
        assert (worker, [*data]) == (home, [key])
        assert data[key][1].tolist() == [8, 9]
        assert placement.keys[4] == key != former
        assert cluster.released == [former]
        assert placement.restore(4, former, [*there]) == key
        assert len(cluster.sent) == sent

    def test_is_an_oserror_if_no_worker_takes_the_part(self):
        placement = put(Cluster(gone="c"))

        with pytest.raises(OSError, match="removed a worker"):
            placement.restore(4, placement.keys[4], ["c"])


class Forgetful(Fetcher):
    """Has the tasks of a part, but not the result that they depend on."""

    def __init__(self):
        self.names = {}
        self._part = module.content_of(
            ExampleCollection([future_of((X, Y), "result")], bag=False), 0
        )

    def here(self, key):
        return None

    def fetch(self, key, unwanted):
        if key == "part":
            return self._part
        raise LostPieceError(f"{key} was lost")


def test_a_part_that_depends_on_a_lost_result_is_not_restored():
    with pytest.raises(DataError, match="Dask cannot compute it again") as got:
        Forgetful().rows("part", lambda: False)

    assert not isinstance(got.value, LostPieceError)
    with pytest.raises(LostPieceError, match="result was lost"):
        Forgetful().rows("part", lambda: True)
