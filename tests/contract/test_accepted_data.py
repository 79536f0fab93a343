"""Data as people have them: each form gives the rows that one expects, or a remedy."""

import functools

import dask
import dask.bag as db
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import xarray
import zarr
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import daskdl
from daskdl.data import dataset
from daskdl.data.inputs import ReadOptions, infer_metadata, source_of
from daskdl.data.normalize import Standardize
from tests.support.sources import Parts

ROWS = 8
X = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)
Y = np.arange(ROWS) % 2
NAMES = np.array(["dog", "cat"])[Y]  # the first label is the second class
# Strings of varying length are new in NumPy 2.
CLIENT = object.__new__(distributed.Client)  # of no cluster
STRINGS = getattr(np.dtypes, "StringDType", lambda: NAMES.dtype)()
NUMBERS = 1 - Y
PAIRS = list(zip(X, Y, strict=True))
TABLE = pd.DataFrame(X, columns=["a", "b"]).assign(price=Y)
RECORDS = [{"a": a, "b": b, "price": y} for (a, b), y in PAIRS]
DATASET = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
ARRAYS = xarray.Dataset(
    {
        "x": (["row", "column"], X),
        **{name: ("row", TABLE[name]) for name in TABLE},
    },
    {"row": np.arange(ROWS) + 100, "column": ["a", "b"]},
)


class Dicts(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return RECORDS[index]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


class Own:
    """No dataset of torch, but a `DataLoader` takes it."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return PAIRS[index]


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter([])


def rows(X, y=None, classes=None, **options):
    """Source and all rows, in order: x as one table, and y."""
    source = source_of(X, y, ReadOptions(4, **options), classes=classes)
    source = infer_metadata(source, False)
    if source.sequential:
        loaded = [piece for p in range(source.parts) for piece in source.stream(p, 3)]
    else:
        loaded = [source.load(part) for part in range(source.parts)]
    xs, ys = zip(*loaded, strict=True)
    tables = [
        np.column_stack(list(x.values())) if isinstance(x, dict) else x for x in xs
    ]
    return source, np.concatenate(tables), np.concatenate(ys)


def trainer(outputs=2, **options):
    options = {"loss": nn.CrossEntropyLoss(), "client": False} | options
    return daskdl.Trainer(
        functools.partial(nn.Linear, 2, outputs),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        **options,
    )


def loader(dataset=DATASET, batch_size=4, **options):
    return DataLoader(dataset, batch_size, **options)


def padded(items):
    """Pads x to the longest of a batch."""
    xs, ys = zip(*items, strict=True)
    longest = max(map(len, xs))
    x = np.stack([np.pad(x, (0, longest - len(x))) for x in xs])
    return x, np.array(ys)


def shifted(items):
    xs, ys = zip(*items, strict=True)
    return np.stack(xs) + 1, np.stack(ys)


@dask.delayed
def delayed(value):
    return value


def bag(values, npartitions=3):
    return db.from_sequence(values, npartitions=npartitions)


FORMS = {
    "list of pairs": (PAIRS, None, {}),
    "list of arrays": (list(X), list(Y), {}),
    "list of tensors": (list(torch.from_numpy(X)), torch.from_numpy(Y), {}),
    "nested lists": (X.tolist(), Y.tolist(), {}),
    "list of dicts": (RECORDS, None, {"label": "price"}),
    "dict of lists": ({"a": X[:, 0].tolist(), "b": X[:, 1].tolist()}, Y, {}),
    "dict with labels": ({"a": X[:, 0], "b": X[:, 1], "price": Y}, None,
                         {"label": "price"}),
    "table": (TABLE, None, {"label": "price"}),
    "arrow table": (pa.Table.from_pandas(TABLE), None, {"label": "price"}),
    "dask table": (dd.from_pandas(TABLE, npartitions=2), None, {"label": "price"}),
    "bag of dicts": (bag(RECORDS), None, {"label": "price"}),
    "two bags": (bag(X), bag(Y), {}),
    "one Delayed": (delayed((X, Y)), None, {}),
    "two Delayed": (delayed(X), delayed(Y), {}),
    "Delayed tables": ([delayed(TABLE[:3]), delayed(TABLE[3:])], None,
                       {"label": "price"}),
    "two lists of Delayed": ([delayed(X[:3]), delayed(X[3:])],
                             [delayed(Y[:3]), delayed(Y[3:])], {}),
    "dataset of dicts": (Dicts(), None, {"label": "price"}),
    "DataArrays": (ARRAYS.x, ARRAYS.price, {}),
    "lazy DataArrays": (ARRAYS.x.chunk(row=3), ARRAYS.price.chunk(row=4), {}),
    "Dataset": (ARRAYS[["a", "b", "price"]], None, {"label": "price"}),
    "lazy Dataset": (ARRAYS[["a", "b", "price"]].chunk(row=3), None,
                     {"label": "price"}),
    "dict of DataArrays": ({"a": ARRAYS.a, "b": ARRAYS.b}, Y, {}),
    "zarr": (zarr.array(X, chunks=(3, 1)), zarr.array(Y, chunks=(2,)), {}),
    "dict of zarr": ({"a": zarr.array(X[:, 0], chunks=(3,)),
                      "b": zarr.array(X[:, 1], chunks=(8,))},
                     zarr.array(Y, chunks=(4,)), {}),
    "zarr beside numpy": (zarr.array(X, chunks=(3, 1)), Y, {}),
    "Dask beside pandas": (dask.array.from_array(X, ((3, 0, 5), 2)),
                           pd.Series(Y, np.arange(ROWS)[::-1]), {}),
    "lazy xarray beside torch": (ARRAYS.x.chunk(row=3), torch.from_numpy(Y), {}),
    "lazy xarray beside xarray": (ARRAYS.x.chunk(row=3), ARRAYS.price, {}),
    "pandas beside Dask": (TABLE[["a", "b"]], dask.array.from_array(Y, ((5, 3),)), {}),
    "Dask table beside numpy": ({"a": dd.from_pandas(TABLE["a"], npartitions=2),
                                 "b": X[:, 1]}, dask.array.from_array(Y, 4), {}),
    "loader": (loader(), None, {}),
    "loader of a list": (loader(PAIRS), None, {}),
    "loader of an own class": (loader(Own()), None, {}),
    "loader of a stream": (loader(Streamed()), None, {}),
    "loader of dicts": (loader(Dicts()), None, {"label": "price"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_each_form_gives_its_rows_in_order(name):
    x, y, options = FORMS[name]

    _, inputs, labels = rows(x, y, **options)

    np.testing.assert_array_equal(inputs, X)
    np.testing.assert_array_equal(labels, Y)


def test_lists_go_through_a_collate_function():
    ragged = [np.ones(1 + i % 3, np.float32) for i in range(ROWS)]

    for x, y in ((ragged, Y), (list(zip(ragged, Y, strict=True)), None)):
        source = source_of(dataset(x, collate_fn=padded), y, ReadOptions(4))
        assert [source.load(p)[0].shape for p in range(2)] == [(4, 3), (4, 3)]
        assert source.load(1)[1].tolist() == Y[4:].tolist()
    _, _, labels = rows(dataset(ragged[:2], collate_fn=padded), NAMES[:2].tolist())
    assert labels.tolist() == NUMBERS[:2].tolist()


@pytest.mark.parametrize(
    "y",
    [
        NAMES, NAMES.astype(object), NAMES.astype("S"), NAMES.tolist(),
        np.array(NAMES, STRINGS), pd.Series(NAMES),
        pd.Series(NAMES, dtype=object), pa.array(NAMES),
    ],
    ids=["str", "objects", "bytes", "list", "StringDType", "series", "object series",
         "arrow"],
)  # fmt: skip
def test_labels_that_are_text_become_classes_in_sorted_order(y):
    for x in (X, zarr.array(X, chunks=(3, 2))):
        source, _, labels = rows(x, y)

        assert source.classes == ("cat", "dog")
        assert labels.tolist() == NUMBERS.tolist()


def test_later_data_have_the_classes_of_the_first_fit():
    fitted = trainer()
    fitted.fit(X, NAMES, validation=(X[:1], ["dog"]))  # a part of the classes
    assert fitted.classes_ == ("cat", "dog")
    weights = torch.zeros(2, 2), torch.tensor([0.0, 9.0])  # each row is a dog
    fitted.model_.load_state_dict(dict(zip(("weight", "bias"), weights, strict=True)))

    assert fitted.evaluate(X[:2], ["dog", "dog"])["accuracy"] == 1
    table = TABLE.assign(price=NAMES)
    with pytest.warns(UserWarning, match="matched by position"):
        assert fitted.evaluate(table, label="price")["accuracy"] == 0.5
    assert len(fitted.score_examples(X[:1], ["dog"])) == 1
    fitted.fit(X[:1], ["dog"])
    assert fitted.classes_ == ("cat", "dog")
    with pytest.raises(daskdl.DataError, match="none of the classes, 'cat', 'dog': "
                       "'fox'"):  # fmt: skip
        fitted.evaluate(X[:1], ["fox"])


def test_a_loader_says_how_batches_are_made():
    history = trainer().fit(loader(batch_size=3, drop_last=True, shuffle=True))
    _, x, _ = rows(loader(PAIRS, collate_fn=shifted))

    assert history.column("examples") == [6]
    np.testing.assert_array_equal(x, X + 1)


@pytest.mark.parametrize(
    ("options", "items", "shuffle"),
    [
        ({}, range(ROWS), False),
        ({"shuffle": True}, range(ROWS), True),
        ({"sampler": [5, 2]}, [5, 2], False),
        ({"sampler": SubsetRandomSampler([5, 2])}, [5, 2], True),
        ({"num_workers": 2, "timeout": 9}, range(ROWS), False),
    ],
    ids=["sequential", "random", "list", "subset", "processes"],
)
def test_a_loader_says_which_items_in_which_order(options, items, shuffle):
    from daskdl.data.torch_datasets import arguments_of

    arguments = arguments_of(loader(**options))

    assert [int(y) for _, y in arguments.dataset] == Y[list(items)].tolist()
    assert arguments.shuffle is shuffle


def test_a_loader_is_scored_in_the_order_of_its_dataset():
    fitted = trainer()
    fitted.fit(loader(shuffle=True), validation=loader(collate_fn=shifted))
    mixed = loader(shuffle=True)

    np.testing.assert_array_equal(fitted.predict(mixed), fitted.predict(X))
    assert fitted.evaluate(mixed) == pytest.approx(fitted.evaluate(X, Y), rel=1e-6)
    assert fitted.history_[-1]["val_loss"] == pytest.approx(
        fitted.evaluate(X + 1, Y)["loss"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": DistributedSampler(DATASET, 2, 0)}, "sampler, a "
         "DistributedSampler, of a DataLoader cannot be distributed; leave it out: "
         "replicas share the items"),
        ({"sampler": WeightedRandomSampler([1.0] * ROWS, 4)},
         "WeightedRandomSampler, .*Subset.X.dataset, list.X.sampler"),
        ({"sampler": RandomSampler(DATASET, replacement=True)}, "a RandomSampler, "),
        ({"sampler": RandomSampler(DATASET, num_samples=3)}, "a RandomSampler, "),
        ({"batch_sampler": [[0, 1]], "batch_size": 1}, "batch_sampler, a list, .* "
         "give a batch_size, and shuffle=True or False"),
        ({"batch_size": None}, "batch_size=None .* let each item be one example"),
        ({"worker_init_fn": print}, "worker_init_fn of .* let the dataset prepare"),
        ({"generator": torch.Generator()}, "generator of .* from Trainer.seed=...."),
    ],
    ids=["distributed", "weighted", "replacement", "some", "batches", "no batches",
         "worker_init_fn", "generator"],
)  # fmt: skip
def test_what_cannot_be_distributed_is_refused_by_name(options, message):
    with pytest.raises(daskdl.DataError, match=message):
        trainer().fit(loader(**options))


def test_a_subclass_with_its_own_iteration_is_refused():
    with pytest.raises(daskdl.DataError, match="__iter__ of OwnLoader, a subclass, of"):
        trainer().fit(OwnLoader(DATASET))
    batches = BatchSampler(RandomSampler(DATASET), 3, drop_last=True)
    assert trainer().fit(DataLoader(DATASET, batch_sampler=batches))[0]["examples"] == 6


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 5}, {"shuffle": True}, {"drop_last": True}],
    ids=lambda options: next(iter(options)),
)
def test_an_argument_that_contradicts_the_loader_is_refused(options):
    batches = loader(collate_fn=shifted)
    (name,) = options

    with pytest.raises(daskdl.OptionError, match=f"^{name}=.* contradicts the Data"):
        trainer().fit(batches, **options)
    trainer().fit(batches, batch_size=4, shuffle=False, drop_last=False)
    with pytest.raises(
        daskdl.OptionError, match=r"row is scored, but .* drops the last"
    ):
        trainer().fit(X, Y, validation=loader(drop_last=True))


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        ([X, X[:, :1]], Y, {}, "must have the same length, got 2 and 8; an item of a "
         "list is an example: pass several inputs as a tuple, tuple.X."),
        ([X, X[:, :1]], None, {}, "items of X must all have one shape: .* several "
         "inputs are a tuple"),
        ([[1.0], [2.0, 3.0]], [0, 1], {}, "items of X .* give daskdl.data.dataset"),
        ([(X[0], 0), X[1]], None, {}, "must all be pairs .* got 1 of 2 without y"),
        ([], None, {}, "X must not be empty, got an empty list"),
        (bag(X), Y, {}, "y must be a bag with the same partitions as X, got a"),
        (bag(X), bag(Y, 2), {}, "same partitions, got .* repartition them"),
        (bag(X, 2), bag(Y[:7], 2), {}, "same number of examples in each partition"),
        (TABLE, None, {"label": "cost"}, "label='cost' is not a column of X, which "
         "has 'a', 'b', 'price'"),
        (TABLE[["a"]], None, {"label": "a"}, "label='a' is the only column of X"),
        (TABLE, Y, {"label": "price"}, "and y both give labels; leave one"),
        (bag(RECORDS), bag(Y), {"label": "price"}, "and y both give labels; leave"),
        (TABLE, None, {"label": ["price"]}, "one column, got a list; .* as y"),
        (X, None, {"label": 0}, "label=0 names a column of a table or a key of dicts, "
         "got a numpy.ndarray; give the labels as y"),
        (DATASET, None, {"label": "y"}, "names a column .* or a key of dicts, got a"),
        ("a.csv", None, {"label": "price"},
         "daskdl.data.files.X, loader=daskdl.data.Csv.label='price'"),
        (Dicts(), None, {}, "got a dict with the keys .'a', 'b', 'price'.; say which "
         "key has the labels, label=..."),
        ({"train": DATASET, "test": DATASET}, None, {}, "X is a dict with the datasets "
         "'train', 'test'; give one of them, X.'train'., and others as validation"),
        (loader(list(zip(X, NAMES, strict=True))), None, {}, "y of a dataset's items "
         "is text, such as 'dog'; number the classes in the dataset"),
        (bag(list(zip(X, NAMES, strict=True))), None, {}, "number the classes, alike"),
        (X, pd.Series([*NAMES[:7], None]), {}, "y has 1 missing labels; drop the rows"),
        (dd.from_pandas(TABLE.assign(price=NAMES), npartitions=2), None,
         {"label": "price"}, "y holds strings .*; make them categories, with "
         "y.astype.'category'..cat.as_known"),
        (dask.array.from_array(X), dask.array.from_array(NAMES), {},
         "number the classes, y.map_blocks.*numpy.searchsorted"),
        (X, delayed(Y), {}, "futures hold pairs .x, y.: give them as X"),
        (CLIENT, Y, {}, "X must be a .* got a distributed.Client; pass it as client="),
        (CLIENT, None, {}, "got a distributed.Client; pass it as client="),
        (X, CLIENT, {}, "y must be a .* got a distributed.Client; pass it as client="),
        (ARRAYS.x, ARRAYS.price[::-1], {}, "X and y differ in the coordinates of 'row'"
         ": align them with xarray.align, or pass .data to pair rows by position"),
        (ARRAYS.x, ARRAYS.price.rename(row="day"), {}, "X has 'row' and y 'day': tr"),
        (ARRAYS.x.T, ARRAYS.price, {}, "X has 'column' and y 'row': transpose"),
        (ARRAYS.x.chunk(row=3, column=1), ARRAYS.price.chunk(row=3), {}, "X must be "
         "chunked along its first dimension only: write X.chunk..'column': -1.."),
        (DATASET, Y, {}, "y must be None for .* labels"),
        (DATASET, DATASET, {}, "which includes its labels; pass validation data as "
         "validation=..., the name of labels as label="),
        ("a.csv", "b.csv", {}, "include their labels; pass validation data as valid"),
        (TABLE, "price", {}, "must hold the labels, got 'price'; write label='price'"),
        (TABLE, ["price"], {}, "got .'price'.; write label=.'price'."),
        (dd.from_pandas(TABLE, npartitions=2), "price", {}, "write label='price'"),
        (Streamed(), Y, {}, "y must be None for .* labels"),
        ([delayed((X, Y))], Y, {}, "y must be a list of .* with the same partitions"),
        (Parts((X, Y)), Y, {}, "y must be None for .* labels"),
    ],
    ids=[
        "inputs of Keras", "inputs alone", "ragged", "mixed", "empty", "bag, array",
        "partitions", "lengths", "no column", "only column", "label, y",
        "label, y of bags", "labels",
        "label of an array", "label of a tuple", "label of files", "dicts", "splits",
        "text in a dataset", "text in a bag", "missing", "text of Dask",
        "text in blocks", "Delayed y", "client, y", "client",
        "y, client", "other order", "other dimension", "transposed",
        "chunks", "dataset, y", "dataset, dataset", "file, file",
        "table, name", "table, names", "Dask table, name", "stream, y", "list, y",
        "source, y",
    ],
)  # fmt: skip
def test_other_forms_are_told_what_to_type(x, y, options, message):
    with pytest.raises((daskdl.DataError, daskdl.OptionError), match=message):
        rows(x, y, **options)


INDEX = pd.Index([f"row {i}" for i in range(ROWS)], name="key")


def test_predictions_keep_the_index_of_a_table():
    fitted = trainer()
    fitted.fit(TABLE, validation=TABLE, label="price")
    table = TABLE.set_index(INDEX)

    named = trainer()
    named.fit(table.assign(price=NAMES), label="price")
    scores = fitted.predict(table, label="price")
    last = fitted.predict(table[["a", "b"]], postprocess=lambda outputs: outputs[:, 1])
    both = fitted.predict(
        table[["a", "b"]], postprocess=lambda out: {"p": out[:, 0], "q": out[:, 1]}
    )

    assert isinstance(scores, pd.DataFrame)
    assert isinstance(last, pd.Series)
    for arguments in (scores, last, both):
        pd.testing.assert_index_equal(arguments.index, INDEX)
    with pytest.warns(UserWarning, match="matched by position"):
        np.testing.assert_array_equal(scores, fitted.predict(X))
    np.testing.assert_array_equal(scores[1], last)
    assert list(both) == ["p", "q"]
    assert list(named.predict(table[["a", "b"]])) == ["cat", "dog"]
    with pytest.raises(daskdl.ModelError, match=r"use X.to_numpy\(\), or pass a post"):
        fitted.predict(table, label="price", postprocess=lambda out: out[:, None, None])


@pytest.mark.parametrize(
    "form",
    ["table", "list of pairs", "loader", "dict of lists", "DataArrays",
     "lazy DataArrays", "zarr", "zarr beside numpy", "Dask beside pandas"],
)  # fmt: skip
def test_a_fraction_of_each_form_is_left_for_validation(form):
    x, y, options = FORMS[form]

    fitted = trainer()
    if form == "dict of lists":
        x, y = list(X), NAMES.tolist()
    history = fitted.fit(x, y, validation=0.25, **options)

    assert history.column("examples") == [6]
    assert "val_loss" in history[0]
    if form == "table":
        weights = np.ones(ROWS)
        weighted = trainer()
        weighted.fit(x, y, sample_weight=weights, validation=0.25, **options)
        assert weighted.history_.column("examples") == [6]
        assert trainer().steps(x, batch_size=4, label="price") == 2


def test_weights_of_other_rows_are_refused():
    weights = xarray.ones_like(ARRAYS.price, dtype=float)

    trainer().fit(ARRAYS.x, ARRAYS.price, sample_weight=weights)
    with pytest.raises(daskdl.DataError, match="X and sample_weight differ in the coo"):
        trainer().fit(ARRAYS.x, ARRAYS.price, sample_weight=weights[::-1])
    with pytest.raises(daskdl.DataError, match="X and sample_weight differ in the coo"):
        trainer().fit(ARRAYS.x, ARRAYS.price.data, sample_weight=weights[::-1])


def test_classes_are_numbered_before_the_rows_are_split():
    names = [f"class {i}" for i in range(ROWS)]  # each is in one of the parts alone

    fitted = trainer(outputs=ROWS)
    fitted.fit(X, names, validation=0.5)

    assert list(fitted.classes_) == names


def test_a_single_delayed_object_gives_one():
    arguments = daskdl.predict(nn.Identity(), delayed(X), client=False)

    np.testing.assert_array_equal(arguments.compute(scheduler="sync"), X)


def test_other_passes_take_the_same_forms():
    scale = Standardize().fit(loader(), client=False)

    assert scale == Standardize().fit(list(X), client=False)
    assert daskdl.data.validate(PAIRS, labels=2, client=False).ok
    scores = trainer_of_bags().score_examples(bag(X), bag(Y))
    assert len(scores.compute(scheduler="sync")) == ROWS


def trainer_of_bags():
    fitted = trainer()
    fitted.fit(bag(X), bag(Y))
    return fitted
