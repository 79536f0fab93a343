import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daskdl.data.batching import (
    Chunk,
    all_rows,
    batches,
    floating_dtype,
    inputs_to_device,
    tensors,
    to_device,
)


def chunks_of(lengths, rng=None):
    """Chunks whose row i is (i, i + 0.5; label 10 * i), counted over all of them."""
    start = 0
    for length in lengths:
        rows = np.arange(start, start + length)
        part = np.stack([rows, rows + 0.5], axis=1), 10 * rows
        yield all_rows(part) if rng is None else Chunk(part, rng.permutation(length))
        start += length


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 7),
    st.none() | st.integers(0, 5),
)
def test_every_row_comes_once_in_batches_of_the_size_asked_for(lengths, size, seed):
    rng = None if seed is None else np.random.default_rng(seed)

    got = list(batches(chunks_of(lengths, rng), size))

    total = sum(lengths)
    rest = [total % size] if total % size else []
    assert [len(x) for x, _ in got] == [size] * (total // size) + rest
    rows = [row for x, _ in got for row in x[:, 0].tolist()]
    assert sorted(rows) == list(range(total))
    assert [v for _, y in got for v in y.tolist()] == [10 * row for row in rows]
    if rng is None:
        assert rows == sorted(rows)


@pytest.mark.parametrize("chosen", [slice(2, 7), np.array([6, 2, 2, 9])], ids=type)
def test_of_a_part_the_chosen_rows_come_in_their_order(chosen):
    rows = np.arange(10), 10 * np.arange(10)

    got = list(batches([Chunk(rows, chosen)], 2))

    x = [value for x, _ in got for value in x.tolist()]
    assert x == rows[0][chosen].tolist()
    assert [value for _, y in got for value in y.tolist()] == [10 * row for row in x]


def test_trees_are_cut_leaf_by_leaf():
    rows = {"a": np.arange(3), "b": (np.arange(6).reshape(3, 2),)}, (np.arange(3),)

    got = list(batches([all_rows(rows), all_rows(rows)], 4))

    assert [x["a"].tolist() for x, _ in got] == [[0, 1, 2, 0], [1, 2]]
    assert got[1][0]["b"][0].tolist() == [[2, 3], [4, 5]]
    assert [y[0].tolist() for _, y in got] == [[0, 1, 2, 0], [1, 2]]


def test_without_labels_there_are_none():
    got = list(batches([all_rows((np.arange(3), None))] * 2, 4))

    assert [(x.tolist(), y) for x, y in got] == [([0, 1, 2, 0], None), ([1, 2], None)]


@pytest.mark.parametrize(
    "rows",
    [(np.ones((2, 5)), np.ones(2)), (np.ones((2, 3)), np.ones((2, 1)))],
    ids=["inputs", "labels"],
)
def test_rows_of_another_shape_begin_a_batch_of_their_own(rows):
    chunks = [(np.zeros((5, 3)), np.zeros(5)), rows, (np.ones((1, 3)), np.ones(1))]

    got = list(batches(map(all_rows, chunks), 4))

    assert [len(x) for x, _ in got] == [4, 1, 2, 1]
    assert got[2][0].shape == rows[0].shape


def test_a_chunk_without_rows_ends_no_batch_whatever_its_shape():
    chunks = [(np.zeros((3, 2)), None), (np.zeros(0), None), (np.ones((1, 2)), None)]

    got = list(batches(map(all_rows, chunks), 4))

    assert [len(x) for x, _ in got] == [4]


def test_the_next_chunk_is_asked_for_only_when_it_is_needed():
    asked = []

    def lazily():
        for number, chunk in enumerate(chunks_of([4, 3, 3])):
            asked.append(number)
            yield chunk

    stream = batches(lazily(), 2)

    assert asked == []
    next(stream), next(stream)
    assert asked == [0]
    next(stream)
    assert asked == [0, 1]


@pytest.mark.parametrize("size", [4, 8, 5], ids=["cut", "whole", "cut across"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
def test_a_model_that_works_in_place_does_not_change_the_part(shuffled, size):
    x, y = np.ones((8, 2), np.float32), np.zeros(8, np.float32)
    chosen = np.arange(8)[::-1] if shuffled else slice(0, 8)

    for inputs, labels in batches([Chunk((x, y), chosen)], size):
        inputs.mul_(0)
        labels.add_(1)

    assert x.min() == 1
    assert y.max() == 0


def test_rows_as_tensors_have_memory_of_their_own():
    rows = np.ones(3), {"a": np.zeros(3)}

    x, y = tensors(rows)
    x.mul_(0)
    y["a"].add_(1)

    assert (rows[0].min(), rows[1]["a"].max()) == (1, 0)


@pytest.mark.parametrize("size", [2, 3], ids=["whole", "cut across"])
def test_read_only_arrays_are_taken_without_a_warning(size):
    x, y = np.arange(4.0), np.arange(4)
    x.flags.writeable = y.flags.writeable = False

    got = [v for x, _ in batches([all_rows((x, y))], size) for v in x.tolist()]

    assert got == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [4, 8], ids=["whole", "cut across"])
@pytest.mark.parametrize("step", [1, -1])
def test_rows_of_a_table_of_columns_are_laid_out_row_by_row(step, size):
    columns = np.asfortranarray(np.arange(12.0).reshape(4, 3))[::step]

    got = list(batches([all_rows((columns, None))] * 2, size))

    assert all(x.is_contiguous() for x, _ in got)
    assert [row for x, _ in got for row in x.tolist()] == columns.tolist() * 2


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("float64", "float64", (torch.float16, torch.float16)),
        ("float32", "int16", (torch.float16, torch.int64)),
        ("uint8", "uint8", (torch.uint8, torch.int64)),
        ("bool", "bool", (torch.bool, torch.bool)),
    ],
    ids=["floats", "classes", "indices", "bool"],
)
def test_dtypes_become_what_model_and_loss_expect(x, y, expected):
    batch = [torch.ones(2, dtype=getattr(torch, name)) for name in (x, y)]

    moved = to_device(*batch, "meta", torch.float16)

    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert tuple(tensor.dtype for tensor in moved) == expected
    assert inputs_to_device(batch[0], "cpu", torch.float16).dtype == expected[0]


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (nn.Linear(1, 1).bfloat16(), torch.bfloat16),
        (nn.BatchNorm1d(2, affine=False).double(), torch.float64),
        (nn.ReLU(), torch.float32),
    ],
    ids=["parameter", "buffer", "neither"],
)
def test_a_model_computes_in_the_dtype_of_its_first_float(module, dtype):
    assert floating_dtype(module) == dtype


def test_a_part_that_is_done_with_is_gone_before_the_next_is_asked_for():
    there = []

    def parts():
        for _ in range(3):
            assert [part() for part in there] == [None] * len(there)
            rows = np.zeros((2, 1))
            there.append(weakref.ref(rows))
            chunk = all_rows((rows, None))
            del rows
            yield chunk
            del chunk

    assert len(list(batches(parts(), 2))) == 3
