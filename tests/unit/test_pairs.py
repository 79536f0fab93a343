"""Bags of examples, and lists of Delayed objects and futures of parts."""

import re
from collections import namedtuple

import dask
import dask.bag
import numpy as np
import pytest
import torch

from daskdl.data.dask_collections import pair, pairs, stacked
from daskdl.data.inputs import infer_metadata
from daskdl.errors import DataError
from tests.support.sources import future_of

X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6)
Both = namedtuple("Both", "left right")


def bag(examples, partitions=3):
    return dask.bag.from_sequence(examples, npartitions=partitions)


def parts(*values):
    return [dask.delayed(value, traverse=False, pure=False) for value in values]


def loaded(source):
    return [source.load(part) for part in range(source.parts)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, 2), (1, 2)),
        ((1, None), (1, None)),
        ((1, 2, 3), ((1, 2, 3), None)),
        (Both(1, 2), (Both(1, 2), None)),
        ({"a": 1}, ({"a": 1}, None)),
        (1, (1, None)),
    ],
    ids=["both", "none", "three", "named", "dict", "one"],
)
def test_a_tuple_of_two_is_both_and_all_else_is_x_alone(value, expected):
    assert pair(value) == expected


class TestBag:
    def test_the_examples_of_a_partition_are_stacked(self):
        source = pairs(bag(list(zip(X, Y, strict=True))))

        got = loaded(source)

        assert source.parts == 3
        assert (source.lengths, source.first) == (None, None)
        assert [x.tolist() for x, _ in got] == [
            X[i : i + 2].tolist() for i in (0, 2, 4)
        ]
        assert [y.tolist() for _, y in got] == [[0, 1], [2, 3], [4, 5]]

    def test_examples_are_numbers_arrays_and_tensors_in_trees(self):
        examples = [({"a": row, "b": (torch.tensor(row[0]), 7)}, 1.5) for row in X]

        x, y = pairs(bag(examples, 1)).load(0)

        assert x["a"].tolist() == X.tolist()
        assert [leaf.tolist() for leaf in x["b"]] == [X[:, 0].tolist(), [7] * 6]
        assert y.tolist() == [1.5] * 6

    def test_of_x_alone_there_are_no_labels(self):
        x, y = pairs(bag(list(X), 2)).load(1)

        assert x.tolist() == X[3:].tolist()
        assert y is None

    def test_a_partition_without_examples_has_no_rows(self):
        examples = bag(list(zip(X, Y, strict=True))).filter(lambda one: one[1] > 3)

        whole = infer_metadata(pairs(examples), False)

        assert whole.lengths == [0, 0, 2]
        assert [leaf.tolist() for leaf in whole.first] == [X[4:].tolist(), [4, 5]]

    @pytest.mark.parametrize(
        ("examples", "message"),
        [
            ([(X[0], 1), (X[0, :1], 1)], "the examples of part 0 must all have one "
             "shape for X: "),
            ([(X[0], X[0]), (X[0], 1)], "one shape for y: "),
            ([({"a": 1}, 1), ({"b": 1}, 1)], "one shape for X: trees must have the "
             "same structure, got {'a': .}, {'b': .}"),
            ([(1, 2), (3, None), 4], "the examples of part 0 must all be pairs (x, y), "
             "or all x alone, got 2 of 3 without y"),
            ([("text", 1)], "X of part 0 must hold real numbers"),
        ],
        ids=["inputs", "labels", "structure", "mixed", "text"],
    )  # fmt: skip
    def test_examples_that_do_not_fit_are_refused(self, examples, message):
        with pytest.raises(DataError, match=re.escape(message)):
            pairs(bag(examples, 1)).load(0)


def test_no_examples_make_no_rows():
    x, y = stacked([], "part 0")

    assert (len(x), y) == (0, None)


class TestLists:
    def test_each_delayed_object_is_a_part_of_several_rows(self):
        source = pairs(parts((X[:4], Y[:4]), (X[4:], Y[4:])))

        got = loaded(source)

        assert [x.tolist() for x, _ in got] == [X[:4].tolist(), X[4:].tolist()]
        assert [y.tolist() for _, y in got] == [[0, 1, 2, 3], [4, 5]]

    def test_a_delayed_call_is_computed_when_its_part_is_loaded(self):
        called = []

        @dask.delayed
        def make(start):
            called.append(start)
            return X[start : start + 2], Y[start : start + 2]

        source = pairs([make(start) for start in (0, 2, 4)])

        _, y = source.load(1)

        assert called == [2]
        assert y.tolist() == [2, 3]

    def test_a_future_is_a_part_too(self):
        held = future_of((X[:2], Y[:2]), "held")

        source = pairs([held, *parts((X[2:], Y[2:]))])

        assert source.needs(0) == ("held",)
        assert source.needs(1) == ()
        assert [y.tolist() for _, y in loaded(source)] == [[0, 1], [2, 3, 4, 5]]

    @pytest.mark.parametrize("second", [None, [1, 2]], ids=["None", "absent"])
    def test_labels_may_be_absent(self, second):
        value = (X, None) if second is None else X

        x, y = pairs(parts(value)).load(0)

        assert x.tolist() == X.tolist()
        assert y is None

    def test_a_part_without_rows_has_none(self):
        source = pairs(parts((X[:0], Y[:0]), (X, Y)))

        assert infer_metadata(source, False).lengths == [0, 6]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ((X, Y[1:]), "part 1 has rows that do not go together: 6 of X, 5 of y; "
             "partition X and y alike"),
            (({"a": X, "b": X[:3]}, Y), "6 of X['a'], 3 of X['b'], 6 of y"),
            ((X.tolist(), Y), "X of part 1 must be a numpy array, a torch tensor"),
            ((X, np.float64(3.0)), "y of part 1 must be a numpy array"),
            ((X, np.array(3.0)), "y of part 1 must have examples along its first axis, "
             "got one value"),
            ((X.astype(str), Y), "X of part 1 must hold real numbers"),
        ],
        ids=["lengths", "lengths in a tree", "list", "number", "one value", "text"],
    )  # fmt: skip
    def test_a_part_that_cannot_be_used_is_named(self, value, message):
        source = pairs(parts((X, Y), value))

        with pytest.raises(DataError, match=re.escape(message)):
            source.load(1)

    def test_tables_of_a_part_become_arrays(self):
        import pandas as pd

        table = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})

        x, y = pairs(parts((table, table["a"]))).load(0)

        assert x.tolist() == [[1.0, 0.5], [2.0, 1.5]]
        assert y.tolist() == [1, 2]

    def test_labels_in_a_table_may_be_missing(self):
        import pandas as pd

        labels = pd.Series([1, None], dtype="Int64")

        _, y = pairs(parts((X[:2], labels))).load(0)

        np.testing.assert_array_equal(y, [1, np.nan])

    def test_what_a_task_raises_comes_out_as_it_is(self):
        @dask.delayed
        def fail():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            pairs([fail()]).load(0)
