"""A lazy collection in, a lazy one of the same kind out."""

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from dask.delayed import Delayed
from torch import nn

from daskdl.data.inputs import ReadOptions, source_of
from daskdl.errors import ModelError
from daskdl.inference.lazy import Examples, lazy_outputs, with_first_rows
from daskdl.inference.predict import predict

X = np.arange(14.0, dtype=np.float32).reshape(7, 2)
TABLE = pd.DataFrame(X, columns=["a", "b"], index=list("tuvwxyz"))


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(dim=1)


class Both(nn.Module):
    def forward(self, x):
        return {"sum": x.sum(dim=1), "parts": (2 * x, x[:, :1].to(torch.int32))}


class OfTwo(nn.Module):
    def forward(self, x):
        return x["one"] + x["other"][0]


def say(model, X, **options):
    """What the model says, lazily; batches go across nothing and are smaller."""
    return predict(model, X, ReadOptions(2, **options), False)


def lazy(values=X, rows=3):
    return da.from_array(values, chunks=(rows, *values.shape[1:]))


def unknown():
    return lazy().map_blocks(lambda block: block, chunks=((np.nan,) * 3, (2,)))


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


class TestArray:
    def test_it_has_the_chunks_of_the_rows_and_the_shape_of_the_outputs(self):
        outputs = say(nn.Identity(), lazy())

        assert isinstance(outputs, da.Array)
        assert outputs.chunks == ((3, 3, 1), (2,))
        assert outputs.dtype == np.float32
        assert outputs.compute().tolist() == X.tolist()

    def test_one_number_for_each_row_makes_one_axis(self):
        outputs = say(Sum(), lazy())

        assert outputs.shape == (7,)
        assert outputs.compute().tolist() == X.sum(axis=1).tolist()

    def test_nothing_is_computed_before_it_is_asked_for(self):
        computed = []

        def noting(block, block_info):
            computed.append(block_info[None]["chunk-location"][0])
            return block

        x = lazy().map_blocks(noting, dtype=X.dtype, meta=X[:0])
        outputs = say(Sum(), x)

        assert computed == []
        assert outputs[3:6].compute().tolist() == X[3:6].sum(axis=1).tolist()
        assert computed == [1]

    def test_lengths_that_are_not_known_stay_so(self):
        outputs = say(Sum(), unknown())

        assert np.isnan(outputs.shape[0])
        assert outputs.compute().tolist() == X.sum(axis=1).tolist()

    def test_a_block_without_rows_is_passed_over(self):
        outputs = say(nn.Identity(), lazy(rows=(3, 0, 4)))

        assert outputs.chunks[0] == (3, 0, 4)
        assert outputs.compute().tolist() == X.tolist()

    def test_several_outputs_are_a_tree_of_arrays(self):
        outputs = say(Both(), lazy())

        assert outputs["parts"][0].compute().tolist() == (2 * X).tolist()
        assert outputs["parts"][1].dtype == np.int32
        assert outputs["parts"][1].compute().tolist() == X[:, :1].tolist()
        assert outputs["sum"].compute().tolist() == X.sum(axis=1).tolist()

    def test_several_outputs_that_are_asked_for_together_cost_one_pass(self):
        computed = []

        def noting(block):
            computed.append(len(block))
            return block

        x = lazy().map_blocks(noting, dtype=X.dtype, meta=X[:0])

        dask.compute(say(Both(), x))

        assert sorted(computed) == [1, 3, 3]

    def test_several_inputs_are_cut_alike(self):
        x = {"one": lazy(), "other": (lazy(X * 10, rows=2),)}

        outputs = say(OfTwo(), x)

        assert outputs.compute().tolist() == (X * 11).tolist()

    def test_bfloat16_is_float32_in_numpy(self):
        outputs = say(nn.BatchNorm1d(2, affine=False).bfloat16(), lazy())

        assert outputs.dtype == outputs.compute().dtype == np.float32


class TestFrame:
    def table(self, partitions=3):
        return dd.from_pandas(TABLE, npartitions=partitions)

    def test_one_number_for_each_row_is_a_series_with_the_same_index(self):
        outputs = say(Sum(), self.table())

        assert isinstance(outputs, dd.Series)
        assert outputs.divisions == self.table().divisions
        computed = outputs.compute()
        assert list(computed.index) == list(TABLE.index)
        assert computed.tolist() == X.sum(axis=1).tolist()

    def test_several_are_a_table(self):
        outputs = say(nn.Identity(), self.table())

        assert isinstance(outputs, dd.DataFrame)
        assert list(outputs.columns) == [0, 1]
        computed = outputs.compute()
        assert list(computed.index) == list(TABLE.index)
        assert computed.to_numpy().tolist() == X.tolist()

    def test_several_outputs_are_a_tree_of_such(self):
        outputs = say(Both(), self.table())

        assert isinstance(outputs["sum"], dd.Series)
        assert isinstance(outputs["parts"][0], dd.DataFrame)
        assert outputs["parts"][1].compute()[0].tolist() == X[:, 0].tolist()

    def test_a_partition_without_rows_is_passed_over(self):
        table = self.table()
        few = table[table["a"] > 11]

        assert say(Sum(), few).compute().to_dict() == {"z": 25.0}

    def test_outputs_that_are_no_table_are_refused(self):
        model = nn.Unflatten(1, (1, 2))

        with pytest.raises(ModelError, match=r"shape \(1, 2\) for each row, which doe"):
            say(model, self.table())


class TestBag:
    def test_each_example_has_its_output(self):
        bag = dask.bag.from_sequence(list(X), npartitions=3)

        outputs = say(Sum(), bag)

        assert isinstance(outputs, dask.bag.Bag)
        assert outputs.npartitions == bag.npartitions
        assert [float(one) for one in outputs] == X.sum(axis=1).tolist()

    def test_labels_are_passed_over(self):
        bag = dask.bag.from_sequence([(row, 3) for row in X], npartitions=2)

        assert [one.tolist() for one in say(nn.Identity(), bag)] == X.tolist()

    def test_several_outputs_are_a_tree_for_each_example(self):
        bag = dask.bag.from_sequence(list(X), npartitions=2)

        first = say(Both(), bag).take(1)[0]

        assert first["sum"] == 1.0
        assert [leaf.tolist() for leaf in first["parts"]] == [[0.0, 2.0], [0]]

    def test_a_partition_without_examples_stays_so(self):
        bag = dask.bag.from_sequence(list(X), npartitions=3)

        few = say(Sum(), bag.filter(lambda row: row[0] > 9))

        assert [float(one) for one in few] == [21.0, 25.0]


class TestList:
    def test_each_part_has_a_delayed_array(self):
        parts = [dask.delayed(X[:4]), dask.delayed(X[4:])]

        outputs = say(Sum(), parts)

        assert all(isinstance(one, Delayed) for one in outputs)
        assert outputs[1].compute().tolist() == X[4:].sum(axis=1).tolist()

    def test_several_outputs_are_a_tree_for_each_part(self):
        parts = [dask.delayed((X[:4], None), traverse=False), dask.delayed(X[4:])]

        first, second = dask.compute(*say(Both(), parts))

        assert first["parts"][0].tolist() == (2 * X[:4]).tolist()
        assert second["parts"][1].tolist() == X[4:, :1].tolist()

    def test_a_part_without_rows_has_outputs_without_rows(self):
        parts = [dask.delayed(X[:0]), dask.delayed(X)]

        empty, _ = dask.compute(*say(nn.Identity(), parts))

        assert (empty.shape, empty.dtype) == ((0, 2), np.float32)


def test_a_transform_comes_before_the_model():
    seen = []

    def doubled(batch):
        x, y = batch
        seen.append(y)
        return 2 * x, None

    outputs = say(Sum(), lazy(), transform=doubled)

    assert outputs.compute().tolist() == (2 * X).sum(axis=1).tolist()
    assert set(seen) == {None}


def test_any_scheduler_computes_it_and_gets_the_same():
    outputs = say(Sum(), lazy())

    assert outputs.compute(scheduler="threads").tolist() == X.sum(axis=1).tolist()


def test_outputs_of_another_shape_than_the_first_are_refused():
    class Growing(nn.Module):
        def forward(self, x):
            return x[:, : 1 + int(x.max() > 9)]

    with pytest.raises(
        ModelError, match=r"gave the shape \(\d, 2\) for \d rows, after"
    ):
        say(Growing(), lazy()).compute()


class LabelSums:
    """Asks for the sum of each row and of its label."""

    def __call__(self, parts):
        return np.concatenate([x.sum(axis=1) + y for x, y in parts])


@pytest.mark.parametrize("kind", ["array", "frame", "bag", "list"])
def test_labels_are_there_for_what_asks_for_them(kind):
    y = np.arange(7.0)
    expected = (X.sum(axis=1) + y).tolist()
    labels = None
    if kind == "bag":
        data = dask.bag.from_sequence(list(zip(X, y, strict=True)), npartitions=2)
        source = Examples(data, None)
    elif kind == "list":
        data = [dask.delayed((X[:4], y[:4])), dask.delayed((X[4:], y[4:]))]
        source = Examples(data, None)
    elif kind == "array":
        data, labels = lazy(), da.from_array(y, chunks=2)
        source = source_of(data, labels)
    else:
        both = dd.from_pandas(TABLE.assign(y=y), npartitions=3)
        data, labels = both[["a", "b"]], both["y"]
        source = source_of(data, labels)
    source = with_first_rows(source, False)

    outputs = lazy_outputs(data, source, LabelSums(), np.zeros(0), False, y=labels)

    computed = dask.compute(outputs)[0]
    found = np.concatenate(computed) if kind == "list" else computed
    assert [float(one) for one in found] == expected
