from typing import NamedTuple

import dask.array as da
import numpy as np
import pytest
import torch

from daskdl.errors import DataError
from daskdl.inference.batching import call_of, structure_of, tree_of


class Pair(NamedTuple):
    left: object
    right: object


def kind(x):
    return call_of(x, 32, 0.0).kind


X = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_a_call_has_its_rows_in_memory_of_its_own():
    x = X.copy()

    call = call_of(x, 32, 1.5)
    x[:] = 0

    np.testing.assert_array_equal(call.x, X)
    assert (call.rows, call.came, call.tensors) == (3, 1.5, False)


def test_a_tensor_too():
    x = torch.from_numpy(X.copy())

    call = call_of({"a": x}, 32, 0.0)
    x[:] = 0

    np.testing.assert_array_equal(call.x["a"], X)
    assert call.tensors


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (X[:1], True),
        (torch.from_numpy(X), True),
        (X[:, :1], False),
        (X.astype(np.float64), False),
        ((X,), False),
    ],
    ids=["rows", "tensor", "shape", "dtype", "tuple"],
)
def test_calls_of_one_kind_differ_in_their_rows_only(other, alike):
    assert (kind(X) == kind(other)) == alike


def test_trees_are_of_one_kind_if_they_are_built_alike():
    assert kind({"a": X, "b": X}) == kind({"a": X[:1], "b": X[:1]})
    assert kind({"a": X, "b": X}) != kind({"a": X, "c": X})
    assert kind((X, X)) != kind(Pair(X, X))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.tolist(), "X must be a numpy array, a torch tensor .* got a list"),
        ({}, "X must not be empty, got no array"),
        (X[:0], r"X must not be empty, got the shape \(0, 2\)"),
        (np.float32(1), "X must be a numpy array"),
        (torch.tensor(1.0), "X must have examples along its first axis"),
        (X.astype("U1"), "X must hold real numbers"),
        (
            {"a": X, "b": X[:2]},
            r"equally many rows .* {\"X\['a'\]\": 3, \"X\['b'\]\": 2",
        ),
        (da.from_array(X), "X must be in memory, got a dask.array; use predict"),
        (np.zeros((33, 2)), "X has 33 rows, of which .* batch_limit=32; cut it"),
    ],
    ids=["list", "no", "empty", "number", "scalar", "text", "rows", "lazy", "long"],
)
def test_what_cannot_be_used_is_refused(x, message):
    with pytest.raises(DataError, match=message):
        call_of(x, 32, 0.0)


@pytest.mark.parametrize("tree", [1, (1, 2), {"b": (1,), "a": Pair(2, 3)}], ids=str)
def test_a_structure_is_what_a_tree_was(tree):
    leaves = [1, 2, 3]

    assert tree_of(structure_of(tree), leaves) == tree


def test_a_call_that_was_cancelled_does_not_begin_and_one_that_began_does_again():
    cancelled, begun = call_of(X, 32, 0.0), call_of(X, 32, 0.0)
    cancelled.answer.cancel()

    assert not cancelled.begin()
    assert begun.begin()
    assert not begun.answer.cancel()
    assert begun.begin()
