"""Arrays and tensors in memory, cut into parts."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data import tables as module
from daskdl.data.tables import PARTS, InMemory, cut

X = np.arange(46.0).reshape(23, 2)
Y = np.repeat([0, 1], [12, 11])


def parts_of(source):
    """What is sent of each part."""
    return [source.packed(part) for part in range(source.parts)]


@given(st.integers(1, 500), st.integers(1, 70), st.integers(1, 40))
def test_parts_are_whole_batches_and_as_equal_as_can_be(examples, batch_size, parts):
    bounds = cut(examples, batch_size, parts)

    assert bounds[0][0] == 0
    assert bounds[-1][1] == examples
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
    assert all(start % batch_size == 0 for start, _ in bounds)
    batches = [-(-(stop - start) // batch_size) for start, stop in bounds]
    assert len(bounds) == min(parts, sum(batches))
    assert min(batches) >= 1
    assert max(batches) - min(batches) <= 1


def test_without_a_seed_the_parts_are_the_data_in_order():
    source = InMemory(X, Y, batch_size=2)

    parts = parts_of(source)

    assert source.lengths == [len(x) for x, _ in parts] == [2] * 11 + [1]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in parts]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in parts]), Y)


def test_a_seed_deals_out_every_row_with_its_label():
    source = InMemory(X, Y, batch_size=8, shuffle_seed=5)

    x, y = (np.concatenate(arrays) for arrays in zip(*parts_of(source), strict=True))

    order = (x[:, 0] / 2).astype(int)
    assert sorted(order) == list(range(23))
    np.testing.assert_array_equal(y, Y[order])
    assert all(set(labels) == {0, 1} for _, labels in parts_of(source))  # Y is sorted


def test_the_order_is_that_of_the_seed_however_the_rows_are_cut():
    orders = [
        np.concatenate([x for x, _ in parts_of(InMemory(X, Y, size, seed))]).tolist()
        for size, seed in [(8, 5), (1, 5), (8, 6)]
    ]

    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_there_are_parts_enough_to_share_and_no_more():
    source = InMemory(np.zeros(1000), np.zeros(1000), batch_size=2)

    assert source.parts == len(source.lengths) == PARTS
    assert set(source.lengths) == {14, 16}


def test_large_data_are_cut_by_bytes(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 64)
    x, y = np.zeros((2000, 3)), np.zeros(2000)  # 32 bytes for each row

    source = InMemory(x, y, batch_size=1)

    assert set(source.lengths) == {2}


def test_a_whole_batch_is_not_cut_whatever_its_bytes(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 64)

    source = InMemory(np.zeros((9, 10)), None, batch_size=4)

    assert source.lengths == [4, 4, 1]


def test_trees_are_cut_leaf_by_leaf():
    x = {"a": X, "b": (torch.arange(23), Y)}
    source = InMemory(x, (Y, X), batch_size=20)

    inputs, labels = source.load(1)

    assert inputs["a"].tolist() == X[20:].tolist()
    assert [leaf.tolist() for leaf in inputs["b"]] == [[20, 21, 22], [1, 1, 1]]
    assert [leaf.tolist() for leaf in labels] == [[1, 1, 1], X[20:].tolist()]


def test_without_labels_there_are_none():
    source = InMemory(X, None, batch_size=30, shuffle_seed=0)

    assert source.load(0)[1] is None
    assert source.first[1] is None
    assert source.whole[1] is None


def test_the_first_rows_and_all_rows_are_in_the_order_they_were_given():
    source = InMemory(X, Y, batch_size=8, shuffle_seed=5)

    assert [leaf.tolist() for leaf in source.first] == [X[:2].tolist(), [0, 0]]
    assert [leaf.tolist() for leaf in source.whole] == [X.tolist(), Y.tolist()]


@pytest.mark.parametrize("seed", [None, 0], ids=["in order", "shuffled"])
def test_tensors_are_sent_as_contiguous_numpy_arrays(seed):
    x = torch.arange(12.0).reshape(3, 4).T.bfloat16().requires_grad_()
    source = InMemory(x, torch.arange(8)[::2], batch_size=4, shuffle_seed=seed)

    [(got, labels)] = parts_of(source)

    assert type(got) is type(labels) is np.ndarray
    assert got.flags.c_contiguous
    assert labels.flags.c_contiguous
    assert got.dtype == np.float32
    order = (labels // 2).tolist()
    assert got.tolist() == x[order].tolist()
    assert sorted(order) == [0, 1, 2, 3]
