"""Arrays and tensors in memory: what is accepted, how it becomes numpy, its parts."""

import itertools
import math
import re
import sys

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskdl.data import tables as module
from daskdl.data.inputs import source_of
from daskdl.data.tables import (
    PARTS,
    InMemory,
    as_numpy,
    check_array,
    check_arrays,
    cut,
    row_count,
)
from daskdl.errors import DataError

X = np.arange(46.0).reshape(23, 2)
Y = np.repeat([0, 1], [12, 11])
SIX = np.arange(6.0)
UNKNOWN = da.from_array(SIX, chunks=2)[da.from_array(np.arange(6), 2) > 2]
SPLIT = da.zeros((4, 6), chunks=(2, 3))


class Frame:
    to_dask_array = to_numpy = None


def masked_blocks():
    return da.ma.masked_greater(da.arange(4, chunks=2), 2)


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)


class TestAccepted:
    @pytest.mark.parametrize(
        "value",
        [
            np.zeros((5, 2)),
            np.zeros(5, np.uint8),
            np.zeros(5, bool),
            np.zeros(5, ">i4"),
            torch.zeros(5, 2),
            torch.zeros(5, dtype=torch.bfloat16),
            da.zeros((5, 2), chunks=(2, 2)),
        ],
        ids=lambda value: f"{type(value).__name__}-{value.dtype}",
    )
    def test_arrays_of_every_kind_are_counted(self, value):
        assert check_array(value, "X") == 5
        assert check_arrays({"a": value, "b": (value,)}, (np.zeros(5),)) == 5

    def test_a_length_that_dask_does_not_know_is_nan(self):
        assert math.isnan(check_array(UNKNOWN, "X"))

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: np.array(1.0), "X must have examples along its first axis, got 0"),
            (lambda: torch.tensor(1.0), "got 0 dimensions"),
            (lambda: np.array([1j]), "got dtype complex128"),
            (lambda: np.zeros(2, np.longdouble), "at most 64 bits, got dtype float128"),
            (lambda: torch.tensor([1j]), "got dtype torch.complex64; convert it, for "
             "example with X.to(torch.float32)"),
            (lambda: da.zeros(4, chunks=2, dtype=complex), "got dtype complex128"),
            (lambda: torch.eye(2).to_sparse(), "must be a dense tensor, got layout "
             "torch.sparse_coo"),
            (quantized, "torch.quint8; convert it with to_dense() or dequantize()"),
            (lambda: np.ma.masked_array([1.0], mask=[True]), "fill it with X.filled("),
            (masked_blocks, "of numpy blocks, got numpy.MaskedArray"),
            (lambda: np.zeros((3, 0)), "X must not be empty, got the shape (3, 0)"),
            (lambda: da.zeros((0, 3), chunks=(2, 3)), "X must not be empty"),
            (lambda: SPLIT, "got the blocks (2, 2); use X.rechunk({1: -1})"),
            (Frame, "convert it with X.to_dask_array(lengths=True)"),
        ],
        ids=["0-d", "0-d tensor", "complex", "longdouble", "complex tensor",
             "complex dask", "sparse", "quantized", "masked", "masked dask", "columns",
             "dask rows", "split columns", "frame"],
    )  # fmt: skip
    def test_others_are_refused_with_a_remedy(self, make, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_array(make(), "X")

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (X, Y[:5], "X and y must have the same length, got 23 and 5"),
            ({"a": X, "b": (X, X[1:])}, None, "X['a'] and X['b'][0] and X['b'][1] "
             "must have the same length, got 23 and 23 and 22"),
            (X, {"a": Y.astype(object)}, "y['a'] must hold real numbers"),
            ((), Y, "X must not be empty, got no array at all"),
            (X, {}, "y must not be empty, got no array at all"),
        ],
        ids=["lengths", "lengths in a tree", "objects", "no X", "no y"],
    )  # fmt: skip
    def test_those_that_do_not_fit_together_are_refused_by_name(self, x, y, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_arrays(x, y)

    def test_a_dask_array_is_recognised_without_importing_dask(self, monkeypatch):
        assert row_count(SPLIT) == len(SPLIT)

        monkeypatch.delitem(sys.modules, "dask.array")

        assert row_count(SPLIT) is None
        assert "dask.array" not in sys.modules


class TestAsNumpy:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
    def test_floats_that_numpy_lacks_keep_their_values(self, dtype):
        tensor = torch.tensor([0.1, -3.3, 240.0]).to(dtype)

        array = as_numpy(tensor)

        assert array.dtype == np.float32
        assert torch.equal(torch.from_numpy(array).to(dtype).float(), tensor.float())

    @pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "bool"])
    def test_other_dtypes_are_kept_without_a_copy(self, dtype):
        tensor = torch.ones(3, dtype=getattr(torch, dtype))

        array = as_numpy(tensor)

        assert array.ctypes.data == tensor.data_ptr()
        assert array.dtype == dtype
        assert np.shares_memory(as_numpy(array), array)

    def test_gradients_and_foreign_byte_order_are_dropped(self):
        tensor = torch.tensor([1.0, 2.0], requires_grad=True)
        swapped = as_numpy(np.array([1, 258], ">i4"))

        assert as_numpy(tensor * 2).tolist() == [2.0, 4.0]
        assert torch.from_numpy(swapped).tolist() == [1, 258]


def parts_of(source):
    """Rows that are sent of each part."""
    return [source.content(part) for part in range(source.parts)]


class TestParts:
    @given(st.integers(1, 500), st.integers(1, 70), st.integers(1, 40))
    def test_are_whole_batches_and_as_equal_as_can_be(self, rows, batch_size, parts):
        bounds = cut(rows, batch_size, parts)

        assert (bounds[0][0], bounds[-1][1]) == (0, rows)
        assert all(
            before[1] == after[0] for before, after in itertools.pairwise(bounds)
        )
        assert all(start % batch_size == 0 for start, _ in bounds)
        batches = [-(-(stop - start) // batch_size) for start, stop in bounds]
        assert len(bounds) == min(parts, sum(batches))
        assert min(batches) >= 1
        assert max(batches) - min(batches) <= 1

    @pytest.mark.parametrize("seed", [None, 5, 6])
    def test_hold_every_row_with_its_label_in_order_or_in_that_of_a_seed(self, seed):
        def dealt(batch_size):
            source = InMemory(X, Y, batch_size, seed)
            parts = parts_of(source)
            assert source.lengths == [len(x) for x, _ in parts]
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            rows = (x[:, 0] / 2).astype(int).tolist()
            np.testing.assert_array_equal(y, Y[rows])
            return rows

        rows = np.arange(23)
        if seed is not None:
            rows = np.random.default_rng(seed).permutation(23)
        assert dealt(8) == dealt(1) == rows.tolist()

    @pytest.mark.parametrize(
        ("rows", "width", "batch_size", "lengths"),
        [(1000, 1, 2, {14, 16}), (2000, 4, 1, {2}), (9, 10, 4, {4, 1})],
        ids=["enough to share", "few bytes", "a whole batch at least"],
    )
    def test_are_cut_by_number_and_bytes(
        self, monkeypatch, rows, width, batch_size, lengths
    ):
        monkeypatch.setattr(module, "PART_BYTES", 512 if width == 1 else 64)

        source = InMemory(np.zeros((rows, width)), None, batch_size)

        assert set(source.lengths) == lengths
        assert (source.parts == PARTS) == (width == 1)

    def test_of_trees_are_cut_leaf_by_leaf(self):
        x = {"a": X, "b": (torch.arange(23), Y)}

        inputs, labels = InMemory(x, (Y, X), batch_size=20).load(1)

        assert inputs["a"].tolist() == X[20:].tolist()
        assert [leaf.tolist() for leaf in inputs["b"]] == [[20, 21, 22], [1, 1, 1]]
        assert [leaf.tolist() for leaf in labels] == [[1, 1, 1], X[20:].tolist()]

    @pytest.mark.parametrize("y", [Y, None], ids=["labels", "none"])
    def test_are_beside_the_first_rows_and_all_rows_as_they_were_given(self, y):
        source = InMemory(X, y, batch_size=30, shuffle_seed=5)

        rows = [source.first_rows, source.rows_in_memory, source.load(0)]

        assert [x.tolist() for x, _ in rows[:2]] == [X[:2].tolist(), X.tolist()]
        assert [labels is None for _, labels in rows] == [y is None] * 3

    @pytest.mark.parametrize("seed", [None, 0], ids=["in order", "shuffled"])
    def test_are_contiguous_numpy_arrays_also_of_tensors(self, seed):
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


X4 = np.arange(8.0).reshape(4, 2)


def test_tables_among_arrays_become_arrays_and_names_of_labels_are_kept():
    table = pd.DataFrame({"a": [1, 2, 3, 4], "b": [0.5] * 4})
    labels = pd.Series(["cat", "ant", "bee", "ant"], dtype="category")

    source = source_of({"table": table, "array": X4}, labels)

    x, y = source.rows_in_memory
    assert x["table"].tolist() == [[1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5]]
    assert x["array"].tolist() == X4.tolist()
    assert source.classes == ("ant", "bee", "cat")
    assert y.tolist() == [2, 0, 1, 0]


def test_a_column_that_is_no_number_is_named_with_its_place():
    table = pd.DataFrame({"a": ["x", "y", "z", "w"]}, dtype="string")

    with pytest.raises(DataError, match=r"column 'a' of X\['table'\] holds strings"):
        source_of({"table": table, "array": X4}, X4)
