"""The tasks of collections, taken apart by part."""

import cloudpickle
import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph

from daskdl.data.dask_collections import Tasks, is_future, tasks_of
from daskdl.errors import DataError
from tests.support.sources import future_of

X = np.arange(12.0).reshape(6, 2)


def first(values):
    return values[0], None


def persisted(*blocks):
    """A dask.array whose blocks are on a cluster."""
    held = [future_of(block, ("held", i, 0)) for i, block in enumerate(blocks)]
    layer = {future.key: future for future in held}
    chunks = (tuple(map(len, blocks)), (blocks[0].shape[1],))
    graph = HighLevelGraph.from_collections("held", layer)
    return da.Array(graph, "held", chunks, meta=blocks[0][:0]), held


def test_each_part_has_its_own_tasks_only():
    lazy = (da.from_array(X, chunks=(2, 2)) + 1) * 2
    tasks, keys = tasks_of(lazy)

    graphs = [tasks.part((key,), first) for key in keys]

    assert len(keys) == 3
    assert [graph.rows({})[0].tolist() for graph in graphs] == [
        ((X[i : i + 2] + 1) * 2).tolist() for i in (0, 2, 4)
    ]
    indices = [
        {key[1] for key in graph.graph if isinstance(key, tuple)} for graph in graphs
    ]
    assert indices == [{0}, {1}, {2}]


def test_collections_are_optimised():
    lazy = (((da.ones((6, 2), chunks=(2, 2)) + 1) * 2) - 1) / 3
    tasks, keys = tasks_of(lazy)

    assert len(tasks.part((keys[0],), first).graph) < 4


def test_what_two_collections_need_comes_together():
    one, other = da.ones((4, 2), chunks=(2, 2)), da.zeros((4,), chunks=2)
    (a, keys), (b, others) = tasks_of(one), tasks_of(other)

    graph = (a | b).part((keys[0], others[0]), lambda values: tuple(values))

    x, y = graph.rows({})
    assert (x.tolist(), y.tolist()) == ([[1.0, 1.0], [1.0, 1.0]], [0.0, 0.0])


class TestResults:
    def test_what_is_persisted_is_needed_and_not_carried(self):
        array, held = persisted(X[:2], X[2:])
        tasks, keys = tasks_of(array)

        graph = tasks.part((keys[1],), first)

        assert graph.needs == (held[1].key,)
        assert dict(graph.graph) == {}
        assert graph.rows({held[1].key: X[2:]})[0].tolist() == X[2:].tolist()

    def test_lazy_ones_on_top_begin_with_them(self):
        array, held = persisted(X[:2], X[2:])
        tasks, keys = tasks_of(array * 10)

        graph = tasks.part((keys[0],), first)

        assert graph.needs == (held[0].key,)
        assert held[0].key not in graph.graph
        assert graph.rows({held[0].key: X[:2]})[0].tolist() == (X[:2] * 10).tolist()

    def test_they_are_kept_and_not_asked_for_their_values(self):
        array, held = persisted(X[:2], X[2:])

        tasks, _ = tasks_of(array + 1)

        assert dict(tasks.done) == {future.key: future for future in held}
        assert [future.asked for future in held] == [0, 0]

    def test_both_of_two_collections_are_kept(self):
        one, held = persisted(X)

        both = tasks_of(one)[0] | Tasks({}, {"other": future_of(1, "other")})

        assert set(both.done) == {held[0].key, "other"}


class TestLists:
    def test_delayed_objects_and_futures_are_parts_in_order(self):
        parts = [dask.delayed(X), future_of(X, "held"), dask.delayed(abs)(X)]

        tasks, keys = tasks_of(parts)

        assert keys == [part.key for part in parts]
        assert [tasks.part((key,), first).needs for key in keys] == [(), ("held",), ()]

    @pytest.mark.parametrize(
        "part",
        [
            lambda held: dask.delayed(np.negative)(held),
            lambda held: dask.delayed(lambda own: -own["a"][0])({"a": [held, 1]}),
            lambda held: dask.delayed(lambda *, own: -own[0])(own=[held]),
        ],
        ids=["argument", "nested", "keyword"],
    )
    def test_a_future_that_a_delayed_object_is_made_of_is_a_result_too(self, part):
        held = future_of(X, "held")
        tasks, (key,) = tasks_of([part(held)])

        graph = cloudpickle.loads(cloudpickle.dumps(tasks.part((key,), first)))

        assert graph.needs == ("held",)
        assert graph.rows({"held": X})[0].tolist() == (-X).tolist()


class TestElsewhere:
    """Results of which Dask has left nothing but their keys."""

    def test_they_are_needed(self):
        tasks = Tasks({"a": Task("a", np.negative, TaskRef("there"))}, {})

        graph = tasks.part(("a", "other"), first)

        assert graph.needs == ("other", "there")
        x, _ = graph.rows({"there": X, "other": 1})
        assert x.tolist() == (-X).tolist()

    def test_only_the_cluster_has_them(self):
        with pytest.raises(
            DataError, match=r"there is a result on a cluster .* client="
        ):
            Tasks({}, {}).result("there")

    def test_what_is_held_can_be_fetched(self):
        assert Tasks({}, {"held": future_of(5, "held")}).result("held") == 5


@pytest.mark.parametrize(
    ("value", "expected"), [(future_of(1, "a"), True), (1, False), (X, False)]
)
def test_a_future_is_told_by_where_its_class_is_from(value, expected):
    assert is_future(value) is expected


def test_bags_have_a_part_for_each_partition():
    tasks, keys = tasks_of(dask.bag.from_sequence(range(4), npartitions=2).map(str))

    values = [list(tasks.part((key,), first).rows({})[0]) for key in keys]

    assert values == [["0", "1"], ["2", "3"]]
