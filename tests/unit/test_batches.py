import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daskdl.data.batches import (
    auto_device,
    batches,
    floating_dtype,
    inputs_to_device,
    to_device,
)


def pieces_of(lengths):
    """Pieces whose row i is (i, i + 0.5; label 10 * i), counted over all of them."""
    start = 0
    for length in lengths:
        rows = np.arange(start, start + length)
        yield np.stack([rows, rows + 0.5], axis=1), 10 * rows
        start += length


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 7),
    st.none() | st.integers(0, 5),
)
def test_every_row_comes_once_in_batches_of_the_size_asked_for(lengths, size, seed):
    rng = None if seed is None else np.random.default_rng(seed)

    got = list(batches(pieces_of(lengths), size, rng))

    total = sum(lengths)
    rest = [total % size] if total % size else []
    assert [len(x) for x, _ in got] == [size] * (total // size) + rest
    rows = [row for x, _ in got for row in x[:, 0].tolist()]
    assert sorted(rows) == list(range(total))
    assert [v for _, y in got for v in y.tolist()] == [10 * row for row in rows]
    if rng is None:
        assert rows == sorted(rows)


def test_rows_are_shuffled_within_their_piece_only():
    pieces = list(pieces_of([50, 50]))

    got = batches(pieces, 50, np.random.default_rng(3))

    first, second = (x[:, 0].tolist() for x, _ in got)
    assert first != sorted(first)
    assert sorted(first) == list(range(50))
    assert [row - 50 for row in second] != first


def test_the_same_seed_gives_the_same_batches():
    one, two, other = (
        [
            y.tolist()
            for _, y in batches(pieces_of([20, 9]), 6, np.random.default_rng(s))
        ]
        for s in (4, 4, 5)
    )

    assert one == two != other


def test_the_next_piece_is_asked_for_only_when_it_is_needed():
    asked = []

    def lazily():
        for number, piece in enumerate(pieces_of([4, 3, 3])):
            asked.append(number)
            yield piece

    stream = batches(lazily(), 2)

    assert asked == []
    next(stream), next(stream)
    assert asked == [0]
    next(stream)
    assert asked == [0, 1]


@pytest.mark.parametrize("seed", [None, 0], ids=["in order", "shuffled"])
def test_a_model_that_works_in_place_does_not_change_the_piece(seed):
    rng = None if seed is None else np.random.default_rng(seed)
    x, y = np.ones((8, 2), np.float32), np.zeros(8, np.float32)

    for inputs, labels in batches([(x, y)], 4, rng):
        inputs.mul_(0)
        labels.add_(1)

    assert x.min() == 1
    assert y.max() == 0


@pytest.mark.parametrize("size", [2, 3], ids=["whole", "cut across"])
def test_read_only_arrays_are_taken_without_a_warning(size):
    x, y = np.arange(4.0), np.arange(4)
    x.flags.writeable = y.flags.writeable = False

    got = [v for x, _ in batches([(x, y)], size) for v in x.tolist()]

    assert got == [0.0, 1.0, 2.0, 3.0]


def test_reversed_and_fortran_arrays_are_taken():
    x = np.asfortranarray(np.arange(12.0).reshape(4, 3))[::-1]

    [(got, _)] = batches([(x, np.arange(4)[::-1])], 4)

    assert got.tolist() == x.tolist()


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

    moved = to_device(*batch, "cpu", torch.float16)

    assert tuple(tensor.dtype for tensor in moved) == expected
    assert inputs_to_device(batch[0], "cpu", torch.float16).dtype == expected[0]


def test_a_batch_goes_where_it_is_told():
    moved = to_device(torch.ones(2), torch.ones(2), "meta", torch.float32)

    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]


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


@pytest.mark.parametrize("there", [True, False])
def test_the_accelerator_is_used_if_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)

    assert auto_device().type == ("cuda" if there else "cpu")
