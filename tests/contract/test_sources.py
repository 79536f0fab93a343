"""Which class knows which kind of data, and which options go with it."""

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from daskdl.data.dask_collections import Collections, Pairs
from daskdl.data.files import LoadedFiles
from daskdl.data.inputs import (
    ReadOptions,
    infer_metadata,
    merge_small_parts,
    source_of,
)
from daskdl.data.tables import InMemory
from daskdl.data.torch_datasets import IterableStyle, MapStyle
from daskdl.errors import DataError
from tests.support.sources import Parts

X = np.arange(8.0).reshape(4, 2)
Y = np.array([0, 1, 2, 3])
TABLE = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})


class Counting(IterableDataset):
    def __iter__(self):
        return iter([(1.0, 1)])


def lazy(values=X):
    return da.from_array(values, chunks=(2, *values.shape[1:]))


PAIRED = {
    "map style": (TensorDataset(torch.zeros(2), torch.zeros(2)), MapStyle),
    "iterable": (Counting(), IterableStyle),
    "bag": (dask.bag.from_sequence([(1, 2)]), Pairs),
    "delayed": ([dask.delayed((X, Y))], Pairs),
    "own": (Parts((X, Y)), Parts),
    "path": ("memory://daskdl-sources/*.npz", LoadedFiles),
}


@pytest.fixture
def a_file():
    import fsspec

    with fsspec.open("memory://daskdl-sources/a.npz", "wb") as file:
        np.savez(file, X=X, y=Y)


@pytest.mark.parametrize(
    ("x", "y", "kind"),
    [
        (X, Y, InMemory),
        (torch.zeros(4), Y, InMemory),
        ({"a": X, "b": (X, X)}, (Y, Y), InMemory),
        (TABLE, TABLE["a"], InMemory),
        (lazy(), lazy(Y), Collections),
        ((lazy(), lazy()), {"a": lazy(Y)}, Collections),
        (dd.from_pandas(TABLE, npartitions=1), None, Collections),
    ],
    ids=["numpy", "torch", "tree", "table", "dask", "dask tree", "dask table"],
)
def test_each_kind_of_arrays_has_its_class(x, y, kind):
    assert type(source_of(x, y)) is kind


@pytest.mark.parametrize("name", PAIRED)
def test_each_kind_that_brings_its_labels_has_its_class(name, a_file):
    data, kind = PAIRED[name]

    assert type(source_of(data)) is kind


def test_one_local_file_is_data(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)

    source = source_of(tmp_path / "a.npz")

    assert type(source) is LoadedFiles
    assert source.load(0)[1].tolist() == Y.tolist()


@pytest.mark.parametrize("name", PAIRED)
def test_what_brings_its_labels_takes_none_beside(name, a_file):
    message = r"y must (not be given with .* labels|be a .*, partitioned as X is)"
    with pytest.raises(DataError, match=message):
        source_of(PAIRED[name][0], Y)


def test_a_source_may_know_its_lengths_but_not_its_first_rows():
    source = Parts((X[:3], Y[:3]), (X[3:], Y[3:]))
    source.lengths = [3, 1]

    known = infer_metadata(source, False)

    assert known.lengths == [3, 1]
    assert known.first[0].tolist() == X[:2].tolist()
    assert source.first is None


def test_a_source_is_taken_as_it_is():
    source = Parts((X, Y))

    assert source_of(source) is source


def test_tables_among_arrays_become_arrays_and_names_of_labels_are_kept():
    table = pd.DataFrame({"a": [1, 2, 3, 4], "b": [0.5] * 4})
    labels = pd.Series(["cat", "ant", "bee", "ant"], dtype="category")

    source = source_of({"table": table, "array": X}, labels)

    x, y = source.whole
    assert x["table"].tolist() == [[1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5]]
    assert x["array"].tolist() == X.tolist()
    assert source.classes == ("ant", "bee", "cat")
    assert y.tolist() == [2, 0, 1, 0]


def test_a_column_that_is_no_number_is_named_with_its_place():
    table = pd.DataFrame({"a": ["x", "y", "z", "w"]}, dtype="string")

    with pytest.raises(DataError, match=r"column 'a' of X\['table'\] holds strings"):
        source_of({"table": table, "array": X}, Y)


def test_parts_of_data_in_memory_are_whole_batches_in_the_order_of_the_seed():
    dealt = source_of(X, Y, ReadOptions(batch_size=4), shuffle_seed=1)

    assert source_of(X, Y, ReadOptions(batch_size=3)).lengths == [3, 1]
    order = np.random.default_rng(1).permutation(4)
    assert dealt.load(0)[1].tolist() == order.tolist()


def test_small_files_of_several_shapes_are_merged_although_some_have_no_rows(tmp_path):
    for number in range(129):  # of one row, but for the first
        rows = np.zeros((min(number, 1), 2 + number // 65))
        np.savez(tmp_path / f"{number:03}.npz", x=rows, y=np.zeros(len(rows)))

    source = merge_small_parts(infer_metadata(source_of(str(tmp_path)), False))

    assert source.parts == 64
    assert [len(source.load(part)[0]) for part in range(64)] == [2] * 64
