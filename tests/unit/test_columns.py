"""Trees of dask.array and dask.dataframe, cut into parts that go together."""

import re

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.threaded import get

from daskdl.data.dask_collections import columns
from daskdl.data.inputs import infer_metadata
from daskdl.data.source import is_known
from daskdl.errors import DataError

X = np.arange(46.0, dtype=np.float32).reshape(23, 2)
Y = np.repeat([0, 1], [12, 11])
TABLE = pd.DataFrame({"a": np.arange(23), "b": np.arange(23) + 0.5})
NAMES = pd.Series(["ant", "bee", "cat"] * 7 + ["ant", "bee"], dtype="category")


def lazy(values=X, rows=10):
    return da.from_array(values, chunks=(rows, *values.shape[1:]))


def unknown(values=X, rows=10, keep=lambda block: block):
    """The same with lengths of blocks that Dask does not know."""
    whole = lazy(values, rows)
    chunks = ((np.nan,) * whole.numblocks[0], *whole.chunks[1:])
    return whole.map_blocks(keep, chunks=chunks, dtype=values.dtype)


def frame(values=TABLE, partitions=3):
    return dd.from_pandas(values, npartitions=partitions)


def loaded(source):
    return [source.load(part) for part in range(source.parts)]


def test_block_rows_become_parts_and_labels_are_cut_like_the_inputs():
    source = columns(lazy(rows=(10, 0, 13)), lazy(Y, rows=5))

    parts = loaded(source)

    assert source.lengths == (10, 0, 13)
    assert [len(y) for _, y in parts] == [10, 0, 13]
    np.testing.assert_array_equal(parts[2][0], X[10:])
    np.testing.assert_array_equal(parts[2][1], Y[10:])


def test_trees_of_arrays_are_aligned_leaf_by_leaf():
    x = {"a": lazy(rows=10), "b": (lazy(Y, rows=7), lazy(X * 2, rows=23))}

    source = columns(x, (lazy(Y, rows=4),))

    assert source.lengths == (10, 10, 3)
    inputs, labels = source.load(1)
    assert inputs["a"].tolist() == X[10:20].tolist()
    assert inputs["b"][0].tolist() == Y[10:20].tolist()
    assert inputs["b"][1].tolist() == (X * 2)[10:20].tolist()
    assert labels[0].tolist() == Y[10:20].tolist()


def test_without_labels_there_are_none():
    source = columns(lazy(), None)

    assert source.load(0)[1] is None
    assert source.first[1] is None


def test_tables_are_cut_by_their_partitions():
    table = frame()

    source = columns(table, table["a"])

    parts = loaded(source)
    assert source.lengths is None
    np.testing.assert_array_equal(np.concatenate([x for x, _ in parts]), TABLE)
    assert np.concatenate([y for _, y in parts]).tolist() == TABLE["a"].tolist()


def test_arrays_and_tables_go_together_if_they_are_partitioned_alike():
    table = frame()
    rows = tuple(len(part) for part in table.partitions)

    source = columns({"table": table, "array": lazy(rows=rows)}, table["a"])

    assert source.lengths == rows
    inputs, labels = source.load(1)
    np.testing.assert_array_equal(inputs["array"][:, 0] / 2, labels)
    np.testing.assert_array_equal(inputs["table"][:, 0], labels)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (lazy(), lazy(Y[1:]), "X and y must have the same length, got 23 and 22"),
        ({"a": lazy(), "b": (lazy(X[:4]),)}, None, "X['a'] and X['b'][0] must have the "
         "same length, got 23 and 4"),
        (lazy(), Y, "y is in memory and the other data are Dask's; use "
         "dask.array.from_array(y, chunks=...) with the chunks of the others, or "
         "compute() the others"),
        ((lazy(), X), lazy(Y), "X[1] is in memory"),
        (lazy(X.astype(complex)), lazy(Y), "X must hold real numbers"),
        (lazy(), {"a": lazy(Y.astype(object))}, "y['a'] must hold real numbers"),
        (lazy(X[:0]), lazy(Y[:0]), "X must not be empty, got the shape (0, 2)"),
        (da.from_array(X, chunks=(5, 1)), lazy(Y), "X must be chunked along its first "
         "axis only, got the blocks (5, 2); use X.rechunk({1: -1})"),
        (frame(), frame(partitions=2)["a"], "Dask's data whose lengths are not known "
         "must be partitioned alike, got 3 of X, 2 of y partitions; take X and y"),
        (unknown(), lazy(Y, rows=5), "got 3 of X, 5 of y partitions"),
        (frame(TABLE.assign(b="text")), None, "column 'b' of X holds strings"),
        (frame(NAMES.to_frame("c")), None, "column 'c' of X"),
        ((), lazy(Y), "X must not be empty, got no array at all"),
        (lazy(), {}, "y must not be empty, got no array at all"),
    ],
    ids=["lengths", "lengths in a tree", "labels in memory", "inputs in memory",
         "complex", "objects", "empty", "chunks", "partitions", "unknown", "strings",
         "names", "no inputs", "no labels"],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(x, y, message):
    with pytest.raises(DataError, match=re.escape(message)):
        columns(x, y)


class TestUnknownLengths:
    def test_they_are_found_by_looking(self):
        x = unknown(keep=lambda block: block[block[:, 0] >= 10])
        y = unknown(Y, keep=lambda block: block[: len(block) - 5 * (block[0] == 0)])
        source = columns(x, None)

        whole = infer_metadata(source, False)

        assert source.lengths is None
        assert whole.lengths == [5, 10, 3]
        assert columns(y, None).lengths is None

    def test_arrays_that_turn_out_to_differ_are_refused_with_the_part(self):
        x = unknown(keep=lambda block: block[1:])

        source = columns(x, unknown(Y))

        message = "part 2 has rows that do not go together: 2 of X, 3 of y"
        assert [leaf.shape for leaf in source.first] == [(1, 2), (1,)]
        with pytest.raises(DataError, match=message):
            source.load(2)

    def test_one_that_is_known_says_what_the_others_have_to_have(self):
        source = columns(unknown(keep=lambda block: block[1:]), lazy(Y))

        assert source.lengths == (10, 10, 3)
        with pytest.raises(DataError, match=r"part 0 has rows .* 9 of X, 10 of y"):
            source.load(0)

    def test_a_block_that_breaks_its_promise_is_named(self):
        short = lazy().map_blocks(lambda block: block[1:], dtype=X.dtype)

        source = columns(short, None)

        message = "part 1 has 9 rows, but the chunks promise 10; call compute_chunk_siz"
        with pytest.raises(DataError, match=message):
            source.load(1)


class TestFirst:
    def test_zeros_of_the_right_shape_and_dtype_are_known_without_computing(self):
        def never(*arguments):
            raise AssertionError

        source = columns(lazy().map_blocks(never, dtype="f4", meta=X[:0]), lazy(Y))

        x, y = source.first
        assert is_known(source)
        assert (x.shape, x.dtype, x.any()) == ((1, 2), np.float32, False)
        assert (y.shape, y.dtype, y.any()) == ((1,), Y.dtype, False)

    def test_of_a_table_they_are_those_of_its_columns(self):
        x, y = columns(frame(), frame()["a"]).first

        assert (x.shape, x.dtype) == ((1, 2), np.float64)
        assert (y.shape, y.dtype) == ((1,), np.int64)

    def test_of_a_shape_that_is_not_known_there_are_none(self):
        x = da.from_array(X, chunks=(10, 2)).map_blocks(
            lambda block: block, chunks=((10, 10, 3), (np.nan,)), dtype=X.dtype
        )

        source = columns(x, lazy(Y))

        assert source.first is None
        assert not is_known(source)
        assert source.load(0)[0].tolist() == X[:10].tolist()


class TestLabels:
    def test_names_become_numbers_and_are_kept(self):
        source = columns(frame(), frame(NAMES))

        labels = np.concatenate([y for _, y in loaded(source)])

        assert source.classes == ("ant", "bee", "cat")
        assert labels.tolist() == NAMES.cat.codes.tolist()

    def test_categories_that_are_not_known_are_refused(self):
        labels = frame(NAMES).cat.as_unknown()

        with pytest.raises(DataError, match="y"):
            columns(frame(), labels)

    def test_numbers_have_no_names(self):
        assert columns(frame(), frame()["a"]).classes is None

    @pytest.mark.parametrize("name", ["label", "number"])
    def test_one_may_be_missing_in_a_table(self, name):
        own = {"label": NAMES, "number": pd.Series(Y, dtype="Int64")}[name]
        whole = columns(frame(), frame(own))
        labels = frame(own.mask(pd.Series(range(len(own))) == 5))

        source = columns(frame(), labels)

        assert np.flatnonzero(np.isnan(source.load(0)[1])).tolist() == [5]
        known = infer_metadata(source, False)
        assert known.first[1].dtype == whole.first[1].dtype


def test_a_missing_value_of_a_table_is_named_with_its_column_and_part():
    table = TABLE.assign(b=TABLE["b"].where(TABLE["a"] != 20))

    source = columns(frame(table), None)

    with pytest.raises(DataError, match="column 'b' of X of part 2 has 1 missing"):
        source.load(2)


def test_blocks_in_foreign_byte_order_are_made_native():
    source = columns(lazy(X.astype(">f4")), lazy(Y.astype(">i4")))

    x, y = source.load(2)

    assert x.dtype.isnative
    assert y.dtype.isnative
    assert (x.tolist(), y.tolist()) == (X[20:].tolist(), Y[20:].tolist())


def test_the_scheduler_that_the_user_has_chosen_is_not_asked(monkeypatch):
    import dask

    with dask.config.set(scheduler=lambda *arguments, **options: get(1 / 0)):
        x, _ = columns(lazy(), None).load(0)

    assert x.tolist() == X[:10].tolist()


def test_only_the_part_that_is_asked_for_is_computed():
    computed = []

    def noting(block, block_info):
        computed.append(block_info[None]["chunk-location"][0])
        return block

    x = lazy().map_blocks(noting, dtype=X.dtype)

    columns(x, lazy(Y)).load(1)

    assert computed == [1]
