import asyncio
import itertools

import dask.array as da
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data.sources import (
    DaskBlocks,
    InMemory,
    as_piece,
    cut,
    source_of,
)
from daskdl.errors import DataError, OptionError
from daskdl.timeouts import Bound


@given(st.integers(1, 500), st.integers(1, 70), st.integers(1, 40))
def test_parts_are_whole_batches_and_as_equal_as_can_be(examples, batch_size, pieces):
    bounds = cut(examples, batch_size, pieces)

    assert bounds[0][0] == 0
    assert bounds[-1][1] == examples
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
    assert all(start % batch_size == 0 for start, _ in bounds)
    batches = [-(-(stop - start) // batch_size) for start, stop in bounds]
    assert len(bounds) == min(pieces, sum(batches))
    assert min(batches) >= 1
    assert max(batches) - min(batches) <= 1


class ScatteringClient:
    """As much of a client as an in-memory source asks of one."""

    def __init__(self):
        self.calls = []

    async def scatter(self, rows, workers, broadcast, asynchronous):
        self.calls.append((rows, workers))
        return rows

    def sync(self, function):
        return asyncio.run(function())


def rows_of(source):
    """The arrays of each piece, as they would reach a worker."""
    client = ScatteringClient()
    keys = {i: f"key-{i}" for i in range(len(source.lengths))}
    started = source.start(client, "tcp://somewhere", keys, Bound(5, ("request",)))
    assert [list(rows) for rows, _ in client.calls] == [[key] for key in keys.values()]
    assert all(workers == ["tcp://somewhere"] for _, workers in client.calls)
    return [started[i] for i in keys]


X = np.arange(46.0).reshape(23, 2)
Y = np.repeat([0, 1], [12, 11])


def test_in_memory_without_a_seed_the_pieces_are_the_data_in_order():
    source = InMemory(X, Y, batch_size=2, replicas=1, shuffle_seed=None)

    pieces = rows_of(source)

    assert source.lengths == [len(x) for x, _ in pieces] == [2, 4, 2, 4, 2, 4, 2, 3]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in pieces]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in pieces]), Y)


def test_in_memory_a_seed_deals_out_every_row_with_its_label():
    one, two, other = (
        rows_of(InMemory(X, Y, batch_size=8, replicas=1, shuffle_seed=seed))
        for seed in (5, 5, 6)
    )

    x, y = (np.concatenate([piece[part] for piece in one]) for part in (0, 1))
    order = (x[:, 0] / 2).astype(int)
    assert sorted(order) == list(range(23))
    np.testing.assert_array_equal(y, Y[order])
    assert all(set(labels) == {0, 1} for _, labels in one)  # Y comes sorted
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(other[0][0], one[0][0])


def test_tensors_reach_a_worker_as_contiguous_numpy_arrays():
    x = torch.arange(12.0).reshape(3, 4).T.bfloat16().requires_grad_()

    [(got, labels)] = rows_of(InMemory(x, torch.arange(8)[::2], 4, 1, None))

    assert type(got) is type(labels) is np.ndarray
    assert got.flags.c_contiguous
    assert labels.flags.c_contiguous
    assert got.dtype == np.float32
    assert got.tolist() == x.tolist()
    assert labels.tolist() == [0, 2, 4, 6]


def test_replicas_get_about_eight_pieces_each():
    assert len(InMemory(np.zeros(1000), np.zeros(1000), 2, 3, None).lengths) == 24


class TestDaskBlocks:
    def test_block_rows_become_pairs_and_empty_ones_are_passed_over(self):
        x = da.from_array(X, chunks=((10, 0, 13), 2))
        y = da.from_array(Y, chunks=5)

        source = DaskBlocks(x, y)

        pairs = [source.delayed(i).compute(scheduler="sync") for i in range(2)]
        assert source.lengths == [10, 13]
        np.testing.assert_array_equal(pairs[1][0], X[10:])
        np.testing.assert_array_equal(pairs[1][1], Y[10:])

    def test_the_key_of_a_piece_can_be_chosen(self):
        source = DaskBlocks(da.zeros(4, chunks=2), da.zeros(4, chunks=2))

        assert source.delayed(1, "mine").key == "mine"
        assert source.delayed(1).key != source.delayed(1).key


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros(3), np.zeros(4), "piece 7 has 3 rows of X and 4 of y, but the "),
        (np.zeros(4), np.zeros(3), "piece 7 has 4 rows of X and 3 of y"),
        (np.zeros(3), np.zeros(3), "the chunks promise 4; call compute_chunk_sizes"),
        (np.zeros(4), np.array([0, 0, np.nan, 0]), r"y of piece 7\[2\] is nan"),
    ],
    ids=["X", "y", "both", "nan"],
)
def test_a_block_that_breaks_its_promise_is_named(x, y, message):
    with pytest.raises(DataError, match=message):
        as_piece(x, y, 7, 4)


def test_a_block_in_foreign_byte_order_is_made_native():
    x, y = as_piece(np.array([1.0], ">f8"), np.array([258], ">i4"), 0, 1)

    assert x.dtype.isnative
    assert y.dtype.isnative
    assert (x.tolist(), y.tolist()) == ([1.0], [258])


class TestSourceOf:
    @pytest.mark.parametrize(
        ("x", "kind"),
        [
            (np.zeros(4), InMemory),
            (torch.zeros(4), InMemory),
            (da.zeros(4, chunks=2), DaskBlocks),
        ],
        ids=["numpy", "torch", "dask"],
    )
    def test_each_kind_has_its_class(self, x, kind):
        assert type(source_of(x, x, 2, 1, None)) is kind

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
            ({"replicas": 0}, "replicas must be >= 1, got 0"),
        ],
        ids=["batch_size", "replicas"],
    )
    def test_says_which_option_is_wrong(self, settings, message):
        options = {"batch_size": 2, "replicas": 1, "shuffle_seed": None, **settings}

        with pytest.raises(OptionError, match=message):
            source_of(X, Y, **options)

    def test_data_that_do_not_fit_are_refused(self):
        with pytest.raises(DataError, match="same length, got 23 and 22"):
            source_of(X, Y[1:], 2, 1, None)
