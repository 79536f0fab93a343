import math
import re
import sys

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch

from daskdl.data.tables import as_numpy, check_array, first_rows, is_dask_array
from daskdl.errors import DataError

UNKNOWN = da.from_array(np.arange(6.0), chunks=2)[da.from_array(np.arange(6), 2) > 2]
SPLIT = da.zeros((4, 6), chunks=(2, 3))


class TestCheckArray:
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
    def test_counts_the_examples_of_every_kind(self, value):
        assert check_array(value, "X") == 5

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([1.0], "X must be a numpy array, a torch tensor or a dask.array, got a "
             "list; convert it with numpy.asarray(X)"),
            (pd.DataFrame({"a": [1.0]}), "pandas.DataFrame; convert it with "
             "X.to_numpy()"),
            (np.array(1.0), "X must have examples along its first axis, got 0 dim"),
            (torch.tensor(1.0), "got 0 dimensions"),
            (np.array([None]), "got dtype object; convert it, for example with "
             "X.astype(numpy.float32)"),
            (np.array(["a"]), "got dtype <U1"),
            (np.array([1j]), "got dtype complex128"),
            (np.zeros(2, np.longdouble), "at most 64 bits, got dtype float128"),
            (torch.tensor([1j]), "got dtype torch.complex64; convert it, for example "
             "with X.to(torch.float32)"),
            (da.zeros(4, chunks=2, dtype=complex), "got dtype complex128"),
            (torch.eye(2).to_sparse(), "must be a dense tensor, got layout "
             "torch.sparse_coo"),
            (np.ma.masked_array([1.0], mask=[True]), "fill it with X.filled(...)"),
            (np.zeros((0, 3)), "X must not be empty, got the shape (0, 3)"),
            (np.zeros((3, 0)), "X must not be empty, got the shape (3, 0)"),
            (da.zeros((0, 3), chunks=(2, 3)), "X must not be empty"),
            (SPLIT, "got the blocks (2, 2); use X.rechunk({1: -1})"),
        ],
        ids=[
            "list", "pandas", "0-d", "0-d tensor", "object", "text", "complex",
            "longdouble", "complex tensor", "complex dask", "sparse", "masked",
            "no rows", "no columns", "no dask rows", "split columns",
        ],
    )  # fmt: skip
    def test_says_what_is_wrong_and_what_to_do(self, value, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_array(value, "X")

    def test_a_length_that_dask_does_not_know_is_nan(self):
        assert math.isnan(check_array(UNKNOWN, "X"))

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
    def test_a_quantized_tensor_is_refused(self):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)

        with pytest.raises(DataError, match=r"torch\.quint8; .* or dequantize\(\)"):
            check_array(quantized, "X")

    def test_a_dask_array_of_masked_blocks_is_refused(self):
        masked = da.ma.masked_greater(da.arange(4, chunks=2), 2)

        with pytest.raises(DataError, match=r"of numpy blocks, got numpy\.MaskedArray"):
            check_array(masked, "X")

    def test_a_dask_dataframe_is_told_how_to_become_an_array(self):
        class Frame:
            to_dask_array = to_numpy = None

        with pytest.raises(DataError, match=r"X\.to_dask_array\(lengths=True\)"):
            check_array(Frame(), "X")


def test_a_dask_array_is_recognised_without_importing_dask(monkeypatch):
    assert is_dask_array(SPLIT)
    assert not is_dask_array(np.zeros(2))

    monkeypatch.delitem(sys.modules, "dask.array")

    assert not is_dask_array(SPLIT)
    assert "dask.array" not in sys.modules


class TestAsNumpy:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
    def test_floats_that_numpy_lacks_keep_their_values(self, dtype):
        tensor = torch.tensor([0.1, -3.3, 240.0]).to(dtype)

        array = as_numpy(tensor)

        assert array.dtype == np.float32
        assert torch.equal(torch.from_numpy(array).to(dtype).float(), tensor.float())

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.float64, torch.int8, torch.bool], ids=str
    )
    def test_other_dtypes_are_kept_without_a_copy(self, dtype):
        tensor = torch.ones(3, dtype=dtype)

        assert as_numpy(tensor).ctypes.data == tensor.data_ptr()
        assert str(as_numpy(tensor).dtype) == str(dtype).removeprefix("torch.")

    def test_a_plain_array_is_kept_without_a_copy(self):
        array = np.ones((3, 2), np.float32)

        assert np.shares_memory(as_numpy(array), array)

    def test_a_tensor_in_a_graph_is_taken_out_of_it(self):
        tensor = torch.tensor([1.0, 2.0], requires_grad=True)

        assert as_numpy(tensor * 2).tolist() == [2.0, 4.0]

    def test_foreign_byte_order_is_swapped(self):
        array = as_numpy(np.array([1, 258], ">i4"))

        assert array.dtype.isnative
        assert torch.from_numpy(array).tolist() == [1, 258]


class TestFirstRows:
    def test_of_a_dask_array_nothing_is_computed(self):
        def explode(block):
            raise AssertionError("computed")

        lazy = da.map_blocks(
            explode, da.ones((4, 3), chunks=2, dtype="f4"), meta=np.zeros((0, 0), "f4")
        )

        rows = first_rows(lazy, 2)

        assert rows.dtype == np.float32
        assert rows.tolist() == [[0.0] * 3] * 2

    def test_of_a_single_row_two_are_made(self):
        assert first_rows(torch.tensor([[5, 6]]), 2).tolist() == [[5, 6], [5, 6]]
