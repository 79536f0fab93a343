"""Tasks of one part, run where they are."""

import threading

import cloudpickle
import dask
import numpy as np
import pytest

from daskdl.data.source import PartGraph


def both(values):
    return tuple(values)


def part(graph, keys, needs=(), finish=both):
    return PartGraph(graph, keys, needs, finish)


def test_tasks_run_in_the_thread_that_asks():
    graph = part({"a": (threading.get_ident,), "b": (abs, -1)}, ("a", "b"))

    with dask.config.set(scheduler=lambda *arguments, **options: 1 / 0):
        ident, value = graph.rows({})

    assert (ident, value) == (threading.get_ident(), 1)


@pytest.mark.parametrize(
    "value",
    [
        "b",
        ("b", 0),
        ["b", ("b", 0)],
        {"b": "b"},
        (len, "abc"),
        np.array(["b"]),
        None,
    ],
    ids=["key", "tuple key", "list of keys", "dict", "task", "array", "none"],
)
def test_results_that_look_like_keys_or_tasks_are_not_touched(value):
    graph = part({"b": (abs, -1), ("b", 0): (abs, -2)}, ("held", "b"), ("held",))

    got, other = graph.rows({"held": value})

    assert got is value
    assert other == 1


def test_tasks_begin_with_results():
    graph = part({"a": (np.add, "one", "two")}, ("a", "one"), ("one", "two"))

    values = graph.rows({"one": np.array([1]), "two": np.array([10])})

    assert [value.tolist() for value in values] == [[11], [1]]


def test_the_same_part_can_be_computed_again():
    graph = part({"a": (np.ones, 2)}, ("a",))

    assert [graph.rows({})[0].tolist() for _ in range(2)] == [[1.0, 1.0]] * 2


def test_it_travels():
    factor = 3
    graph = part({"a": (lambda: factor,)}, ("a",))

    assert cloudpickle.loads(cloudpickle.dumps(graph)).rows({}) == (3,)


def test_what_a_task_raises_comes_out_as_it_is():
    graph = part({"a": (int, "x")}, ("a",))

    with pytest.raises(ValueError, match="invalid literal"):
        graph.rows({})
