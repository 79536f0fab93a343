import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.worker import WorkerInfo

from daskdl.data.torch_datasets import Collation, worker_info
from daskdl.errors import DataError


class Point(NamedTuple):
    left: object
    right: object


def padded(items):
    """Pad to the longest."""
    x = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return x, torch.tensor([y for _, y in items])


def shown(tree):
    """With lists for arrays, so that it can be compared."""
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(shown(value) for value in tree)
    assert isinstance(tree, np.ndarray)
    return tree.tolist()


@pytest.mark.parametrize(
    ("items", "x", "y"),
    [
        ([(torch.ones(2), 3), (torch.zeros(2), 4)], [[1, 1], [0, 0]], [3, 4]),
        ([(np.ones(1), np.int8(3)), (np.zeros(1), np.int8(4))], [[1], [0]], [3, 4]),
        ([((1, 2.5), True), ((3, 4.5), False)], ([1, 3], [2.5, 4.5]), [True, False]),
        ([[[1, 2], 5]], ([1], [2]), [5]),
        ([({"a": 1, "b": (2, 3)}, 4)], {"a": [1], "b": ([2], [3])}, [4]),
        ([(1, {"c": 2})], [1], {"c": [2]}),
    ],
    ids=["tensors", "numpy", "tuple", "list", "nested", "outputs"],
)
def test_items_become_trees_of_arrays_as_torch_collates_them(items, x, y):
    rows = Collation().rows(items)

    assert (shown(rows[0]), shown(rows[1])) == (x, y)


def test_a_named_tuple_stays_one():
    x, _ = Collation().rows([(Point(1, 2.0), 0)])

    assert isinstance(x, Point)
    assert shown(x) == ([1], [2.0])


def test_dtypes_are_those_of_torch():
    (a, b, c), y = Collation().rows([((1.5, np.float32(1), torch.ones(1).half()), 1)])

    assert [a.dtype, b.dtype, c.dtype] == [np.float64, np.float32, np.float16]
    assert y.dtype == np.int64


@pytest.mark.parametrize(
    ("items", "x"),
    [
        ([{"a": 1}, {"a": 2}], {"a": [1, 2]}),
        ([torch.tensor([1, 2])], [[1, 2]]),
        ([(1, 2, 3)], ([1], [2], [3])),
        ([(1,), (2,)], [1, 2]),
    ],
    ids=["dict", "tensor", "three", "alone"],
)
def test_without_labels_anything_but_a_pair_is_x(items, x):
    rows = Collation(labelled=False).rows(items)

    assert shown(rows[0]) == x
    assert rows[1] is None


def test_without_labels_a_pair_still_is_one():
    rows = Collation(labelled=False).rows([(1, 2)])

    assert (shown(rows[0]), shown(rows[1])) == ([1], [2])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": 1, "y": 2}], "must give pairs (x, y), got a dict with the keys "
         "['x', 'y']; for several inputs ((x1, x2), y), or use a collate_fn"),
        ([(1, 2, 3)], "must give pairs (x, y), got a list of 3"),
        ([torch.ones(2)], "must give pairs (x, y), got a Tensor"),
        ([("cat", 1)], "x[0] of a dataset's items must be made of tensors, arrays and "
         "numbers in tuples and dicts, got a str"),
        ([({"a": ()}, 1)], "x['a'] of a dataset's items must be made of"),
        ([(1, None)], "items of the dataset cannot be put together: TypeError"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "of equal shapes in tuples and "
         "dicts, or use a collate_fn"),
        ([({"a": 1}, 0), ({"b": 1}, 0)], "cannot be put together: KeyError"),
        ([((1, 2), 0), ((1,), 0)], "cannot be put together: RuntimeError"),
        ([(1j, torch.ones(1))], "cannot be put together: TypeError"),
        ([(torch.tensor(1j), 0)], "x must hold real numbers"),
    ],
    ids=["dict", "three", "alone", "string", "nothing", "none", "ragged", "keys",
         "lengths", "complex", "complex-tensor"],
)  # fmt: skip
def test_what_is_no_pair_of_numbers_is_refused(items, message):
    with pytest.raises(DataError, match=re.escape(message)):
        Collation().rows(items)


def test_a_function_of_the_users_gets_the_items():
    items = [(torch.ones(3), 0), (torch.ones(1), 1)]

    x, y = Collation(padded, 2).rows(items)

    assert x.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda items: padded(items[1:]), "must return one row for each item, got 1 "
         "rows of x for 2 items"),
        (lambda items: ({"a": torch.ones(2), "b": torch.ones(5)}, torch.ones(2)),
         "got 5 rows of x['b'] for 2 items"),
        (lambda items: (torch.ones(2), torch.ones(3)), "3 rows of y for 2 items"),
        (lambda items: (torch.ones(2), [1, 2]), "y[0] of a dataset's items must be"),
        (lambda items: (*padded(items), [3, 1]), "got a tuple of 3"),
    ],
    ids=["fewer", "dict", "labels", "list", "three"],
)  # fmt: skip
def test_rows_that_are_not_those_of_the_items_are_refused(function, message):
    items = [(torch.ones(3), 0), (torch.ones(1), 1)]

    with pytest.raises(DataError, match=re.escape(message)):
        Collation(function, 2).rows(items)


def test_what_the_users_function_raises_comes_out():
    def refuse(items):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Collation(refuse, 2).rows([(1, 2)])


def test_no_shared_memory_is_taken_while_another_thread_asks_for_a_shard(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("took shared memory")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    items = [(torch.ones(2), np.ones(2))]

    with worker_info(WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)):
        with pytest.raises(pytest.fail.Exception):
            default_collate(items)  # what would be
        x, _ = Collation().rows(items)

    assert x.tolist() == [[1, 1]]
