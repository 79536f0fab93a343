import re
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from daskdl.data.torch_datasets import (
    Collation,
    IterableStyle,
    Stream,
    is_iterable_style,
    split_stream,
)
from daskdl.errors import DataError, OptionError


class Counted(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id, self.items, info.num_workers):
            yield torch.tensor([i]), i + 100


class Careless(IterableDataset):
    """Gives all items to each worker."""

    def __iter__(self):
        return iter([(1.0, 0), (2.0, 1)])


def counted(items):
    return Stream(
        lambda k, n: [(torch.tensor([i]), i + 100) for i in range(k, items, n)]
    )


def padded(items):
    longest = max(int(x) for x, _ in items)
    return torch.zeros(len(items), longest), torch.tensor([y for _, y in items])


def streamed(source, part, rows=3):
    return [(x[:, 0].tolist(), y.tolist()) for x, y in source.stream(part, rows)]


@pytest.mark.parametrize("make", [Counted, counted], ids=["get_worker_info", "Stream"])
class TestEveryKind:
    def test_a_part_is_a_shard_in_order_and_some_rows_at_a_time(self, make):
        source = IterableStyle(make(9), parts=2)

        assert source.parts == 2
        assert streamed(source, 0) == [
            ([0, 2, 4], [100, 102, 104]),
            ([6, 8], [106, 108]),
        ]
        assert streamed(source, 1) == [([1, 3, 5], [101, 103, 105]), ([7], [107])]

    def test_it_can_be_gone_through_again(self, make):
        source = IterableStyle(make(4))

        assert streamed(source, 0) == streamed(source, 0)

    def test_it_travels(self, make):
        source = IterableStyle(make(9), parts=2)

        there = cloudpickle.loads(cloudpickle.dumps(source))

        assert streamed(there, 1) == streamed(source, 1)

    def test_its_first_rows_are_shown_and_not_taken(self, make):
        source = IterableStyle(make(9), parts=2)

        x, y = source.first

        assert (x.tolist(), y.tolist()) == ([[0], [2]], [100, 102])
        assert streamed(source, 0)[0][0] == [0, 2, 4]

    def test_shards_may_be_empty(self, make):
        source = IterableStyle(make(1), parts=3)

        assert [streamed(source, part) for part in range(3)] == [[([0], [100])], [], []]
        assert len(source.first[0]) == 1

    def test_none_at_all_is_refused(self, make):
        source = IterableStyle(make(0), parts=2)

        with pytest.raises(DataError, match=r"empty: none of its 2 parts has an item"):
            _ = source.first


def test_the_first_rows_may_be_in_a_later_shard():
    source = IterableStyle(Stream(lambda k, n: [(k, 0)] * k, 3))

    assert source.first[0].tolist() == [1]


def test_nothing_is_known_before_it_is_gone_through():
    source = IterableStyle(Counted(9))

    assert source.sequential
    assert source.lengths is None


def test_no_item_is_asked_for_before_it_is_needed():
    asked = []

    def items(k, n):
        for i in range(100):
            asked.append(i)
            yield i, i

    source = IterableStyle(Stream(items, 2))
    assert asked == []

    next(source.stream(0, 3))
    assert asked == [0, 1, 2]


def test_the_users_collate_function_gets_its_batch_size():
    source = IterableStyle(
        Stream(lambda k, n: [(i + 1, 0) for i in range(5)], 1), 1, Collation(padded, 2)
    )

    shapes = [x.shape for x, _ in source.stream(0, rows=100)]

    assert shapes == [(2, 2), (2, 4), (1, 5)]


def test_x_alone_is_enough_without_labels():
    source = IterableStyle(
        Stream(lambda k, n: [{"a": 1.5}], 1), collation=Collation(labelled=False)
    )

    (x, y), *_ = source.stream(0, 4)

    assert x["a"].tolist() == [1.5]
    assert y is None


@pytest.mark.parametrize(
    "dataset",
    [Careless(), Stream(lambda k, n: [({"a": np.ones(2)}, 1)])],
    ids=["get_worker_info", "Stream"],
)
def test_shards_that_begin_alike_are_told_of(dataset):
    source = IterableStyle(dataset)
    _ = source.first

    with pytest.warns(UserWarning, match=r"in 2 parts.* used 2 times"):
        split_stream(source, 2)


def test_so_are_those_whose_number_the_user_said():
    with pytest.warns(UserWarning, match=r"in 3 parts.* with the same items"):
        split_stream(IterableStyle(Stream(lambda k, n: [(1.0, 0)], 3)), 2)


def test_one_shard_may_have_everything():
    with warnings.catch_warnings(action="error"):
        x, _ = split_stream(IterableStyle(Careless()), 1).first

    assert x.tolist() == [1, 2]


def test_shards_of_unlike_shapes_are_not_alike():
    with warnings.catch_warnings(action="error"):
        source = split_stream(
            IterableStyle(Stream(lambda k, n: [(np.ones(k + 1), 0)])), 2
        )

    assert source.first[0].shape == (1, 1)


def test_the_items_are_checked():
    source = IterableStyle(Stream(lambda k, n: [{"a": 1}], 1))

    with pytest.raises(DataError, match=re.escape("must give pairs (x, y)")):
        list(source.stream(0, 2))


def test_how_many_shards_is_said_once():
    assert IterableStyle(Stream(lambda k, n: [], 3), parts=2).parts == 3
    assert IterableStyle(Stream(lambda k, n: []), parts=2).parts == 2


@pytest.mark.parametrize("parts", [0, -1, 1.5, True, "2"])
def test_shards_that_cannot_be_are_refused(parts):
    with pytest.raises(OptionError, match=f">= 1, got {parts!r}"):
        Stream(lambda k, n: [], parts)
    with pytest.raises(OptionError, match=f">= 1, got {parts!r}"):
        IterableStyle(Counted(1), parts)


def test_what_is_no_function_is_refused():
    with pytest.raises(OptionError, match=r"function\(part, parts\), got \[1\]"):
        Stream([1], 2)


def test_a_part_is_called_after_its_shard():
    assert IterableStyle(Counted(1), 4).name(3) == "part 3 of 4"


def test_it_is_not_loaded_as_a_whole():
    with pytest.raises(NotImplementedError, match="IterableStyle is sequential"):
        IterableStyle(Counted(1)).load(0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Counted(1), True),
        (counted(1), True),
        (TensorDataset(torch.ones(1)), False),
        ([(1, 2)], False),
    ],
    ids=["dataset", "sharded", "map-style", "list"],
)
def test_it_is_known_from_other_kinds(value, expected):
    assert is_iterable_style(value) is expected
