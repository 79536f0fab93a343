"""Keys of examples, examples of several shapes, and what comes out for them."""

import datetime
import uuid

import dask
import dask.bag
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.inference import lazy

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
ID = uuid.UUID(int=7)


class Shapes(nn.Module):
    """Notes the shape of each batch; gives the mean of each row."""

    def __init__(self):
        super().__init__()
        self.seen = SEEN

    def forward(self, x):
        SEEN.append(tuple(x.shape))
        return x.mean(dim=1)


SEEN = []


@pytest.fixture(autouse=True)
def in_this_thread():
    SEEN.clear()
    with dask.config.set(scheduler="sync"):
        yield


def bag_of(examples, partitions=2):
    return dask.bag.from_sequence(examples, npartitions=partitions)


@pytest.mark.parametrize(
    "key",
    ["cat", b"cat", ID, NOW, NOW.date(), np.datetime64("2026-01-02"), ("a", (1, ID))],
    ids=repr,
)
def test_a_name_before_anything_is_a_key(key):
    assert lazy.is_keyed((key, np.zeros(2)))
    assert lazy.is_keyed((key, 1.5))


@pytest.mark.parametrize("key", [3, np.int64(3), (1, 2)], ids=repr)
def test_a_number_is_a_key_only_before_arrays(key):
    assert lazy.is_keyed((key, {"a": np.zeros(2), "b": torch.zeros(3)}))
    assert lazy.is_keyed((key, (np.zeros(2), 1)))  # with a label
    assert not lazy.is_keyed((key, 1))


@pytest.mark.parametrize(
    "example",
    [
        np.zeros(2),
        (np.zeros(2), 1),
        (np.zeros(2), np.zeros(1)),
        (1.5, np.zeros(2)),
        (True, np.zeros(2)),
        ((), np.zeros(2)),
        ("a", np.zeros(2), 1),
        "text",
    ],
    ids=["x", "x, y", "arrays", "float", "bool", "empty", "three", "text"],
)
def test_all_else_has_no_key(example):
    assert not lazy.is_keyed(example)


def test_keys_come_back_as_they_were_beside_their_outputs():
    own = ["b", "a", "c", "a", "e"]
    bag = bag_of([(key, np.full(2, float(i))) for i, key in enumerate(own)])

    outputs = daskdl.predict(Shapes(), bag, client=False)

    assert isinstance(outputs, dask.bag.Bag)
    assert outputs.npartitions == bag.npartitions
    assert [(key, float(y)) for key, y in outputs] == list(
        zip(own, range(5), strict=True)
    )


def test_labels_after_a_key_are_passed_over():
    bag = bag_of([("a", (np.ones(2), 7)), ("b", (np.zeros(2), 8))])

    outputs = list(daskdl.predict(nn.Identity(), bag, client=False))

    assert [(key, y.tolist()) for key, y in outputs] == [("a", [1, 1]), ("b", [0, 0])]


@pytest.mark.parametrize(
    ("keyed", "expected"),
    [(None, [7.0, 8.0]), (True, [(7, 1.0), (8, 2.0)])],
    ids=["labels", "keys"],
)
def test_what_cannot_be_seen_can_be_said(keyed, expected):
    bag = bag_of([(7, 1), (8, 2)])

    outputs = daskdl.predict(nn.Identity(), bag, client=False, keyed=keyed)

    assert list(outputs) == expected


def test_a_key_can_be_said_to_be_the_input():
    bag = bag_of([(7, np.zeros(2)), (8, np.ones(2))])

    assert list(daskdl.predict(nn.Identity(), bag, client=False, keyed=False)) == [7, 8]


def test_an_example_without_a_key_among_others_is_refused_where_it_is():
    bag = bag_of([("a", np.ones(2)), ("b", np.ones(2)), ("c", np.ones(2)), np.ones(2)])

    with pytest.raises(DataError, match=r"example 1 of part 1 must be a pair .* ndarr"):
        daskdl.predict(nn.Identity(), bag, client=False).compute()


def test_each_batch_has_one_shape_and_outputs_the_order_of_the_examples():
    lengths = [3, 5, 3, 4, 5, 3, 3, 5]
    bag = bag_of([np.full(n, float(i)) for i, n in enumerate(lengths)], partitions=1)
    outputs = daskdl.predict(Shapes(), bag, client=False, batch_size=2)
    SEEN.clear()

    found = outputs.compute()

    assert found == list(range(8))
    assert SEEN == [(2, 3), (2, 3), (2, 5), (1, 5), (1, 4)]


def test_outputs_may_have_the_shape_of_their_example():
    bag = bag_of([torch.ones(n, 2) for n in (1, 4, 2, 4)], partitions=2)

    outputs = daskdl.predict(nn.Linear(2, 3), bag, client=False).compute()

    assert [one.shape for one in outputs] == [(1, 3), (4, 3), (2, 3), (4, 3)]


def test_partitions_without_examples_stay_so_and_the_first_with_some_is_looked_at():
    bag = bag_of([(i, np.full(2, i, np.float32)) for i in range(6)], partitions=3)

    outputs = daskdl.predict(
        Shapes(), bag.filter(lambda pair: pair[0] > 3), client=False
    )

    assert outputs.npartitions == 3
    assert outputs.compute() == [(4, 4.0), (5, 5.0)]


def test_a_bag_without_examples_is_refused():
    bag = bag_of([1.0, 2.0]).filter(lambda x: x > 5)

    with pytest.raises(DataError, match="X must not be empty, got no rows in 2 parts"):
        daskdl.predict(nn.Identity(), bag, client=False)


def test_only_what_is_asked_for_is_computed_beside_the_first_part():
    computed = []

    def noting(example):
        computed.append(example)
        return np.full(2, float(example))

    bag = bag_of(list(range(6)), partitions=3).map(noting)

    daskdl.predict(Shapes(), bag, client=False)

    assert computed == [0, 1]


def test_a_list_may_have_parts_that_are_lists_of_examples():
    parts = [
        dask.delayed([("a", np.ones(2)), ("b", np.zeros(3))], traverse=False),
        dask.delayed([("c", np.full(1, 5.0))], traverse=False),
    ]

    first, second = dask.compute(*daskdl.predict(Shapes(), parts, client=False))

    assert (first, second) == ([("a", 1.0), ("b", 0.0)], [("c", 5.0)])


def test_keys_are_refused_where_there_cannot_be_any():
    with pytest.raises(OptionError, match=r"keyed=True is for a bag.* got a ndarray"):
        daskdl.predict(nn.Identity(), np.zeros((2, 2)), client=False, keyed=True)


def test_an_output_with_fewer_rows_than_a_later_batch_is_refused():
    class Short(nn.Module):
        def forward(self, x):
            return x[: -1 if x.max() > 3 else None]

    bag = bag_of([np.full(2, float(i)) for i in range(6)], partitions=1)

    with pytest.raises(ModelError, match=r"shape \(5, 2\) for 6 rows, after \(2,\)"):
        daskdl.predict(Short(), bag, client=False).compute()
