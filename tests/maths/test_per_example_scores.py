"""Scores of examples, in this process."""

import itertools

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from dask import delayed
from torch import nn, optim
from torch.utils.data import IterableDataset, TensorDataset

from daskdl import (
    DataError,
    ModelError,
    OptionError,
    Trainer,
)
from daskdl.data.images import image_folder
from tests.support.pictures import folder
from tests.support.scored import (
    CHUNKS,
    CLOSE,
    IDS,
    NAMES,
    ROWS,
    X,
    Y,
    blocks,
    files,
    frame,
    keyed_lists,
    keyed_pairs,
    pairs,
    table,
    trainer,
)


def losses(fitted, x=X, y=Y):
    """One by one, by hand."""
    with torch.no_grad():
        output = fitted.model_(torch.as_tensor(x))
    each = nn.functional.cross_entropy(output, torch.as_tensor(y), reduction="none")
    return each.double().numpy()


def now(lazy):
    (value,) = dask.compute(lazy, scheduler="synchronous")
    return value


@pytest.fixture
def fitted():
    return trainer()


def unknown_lengths():
    x, y = blocks()
    return x[y >= 0], y[y >= 0]


def with_empty_partition():
    whole = table().repartition(npartitions=2)
    whole = dd.concat([whole[whole["a"] > 100], whole])
    return whole[NAMES], whole["label"]


def torch_rows():
    return torch.from_numpy(X), torch.from_numpy(Y)


KINDS = {
    "numpy": (lambda: (X, Y), np.ndarray),
    "torch": (torch_rows, torch.Tensor),
    "pandas": (lambda: (frame()[NAMES], frame()["label"]), pd.Series),
    "dataset": (lambda: (TensorDataset(*torch_rows()),), np.ndarray),
    "files": (files, np.ndarray),
    "dask.array": (blocks, da.Array),
    "of unknown lengths": (unknown_lengths, da.Array),
    "dask.dataframe": (lambda: (table()[NAMES], table()["label"]), dd.Series),
    "an empty partition": (with_empty_partition, dd.Series),
    "bag": (lambda: (pairs(),), db.Bag),
    "delayed": (
        lambda: ([delayed((X[a : a + 30], Y[a : a + 30])) for a in (0, 30, 60)],),
        list,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_have_the_type_of_the_data(fitted, kind, tmp_path):
    make, result = KINDS[kind]

    scores = fitted.score_examples(*(make(tmp_path) if kind == "files" else make()))

    assert isinstance(scores, result)
    values = now(scores)
    values = np.concatenate(values) if kind == "delayed" else np.asarray(values)
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, losses(fitted), **CLOSE)
    if kind == "numpy":
        assert scores.mean() == pytest.approx(fitted.evaluate(X, Y)["loss"], rel=1e-6)
    if kind == "dask.array":
        assert scores.chunks == CHUNKS
    if kind in ("pandas", "dask.dataframe"):
        assert now(scores).index.equals(frame().index)
    if kind in ("dask.dataframe", "bag"):
        assert scores.npartitions == 4


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


PAIRS = [*enumerate(IDS)]
# Data, keys, and the index and its name of the scores.
KEYED = {
    "list": lambda: ((X, Y), IDS, IDS, None),
    "series": lambda: ((X, Y), pd.Series(IDS, index=range(5, 95)), IDS, None),
    "tuples": lambda: ((X, Y), PAIRS, PAIRS, None),
    "tensor": lambda: ((X, Y), torch.arange(ROWS), [*range(ROWS)], None),
    "column": lambda: (labelled(frame()), "id", IDS, "id"),
    "lazy column": lambda: (labelled(table()), "id", IDS, "id"),
    "dask.array": lambda: (blocks(), lazy_ids(), IDS, None),
}


def labelled(whole):
    return whole[["id", *NAMES]], whole["label"]


def lazy_ids():
    return da.from_array(np.array(IDS), chunks=17)


class TestKeys:
    @pytest.mark.parametrize("kind", KEYED)
    def test_scores_with_keys_are_a_series(self, fitted, kind):
        data, key, index, name = KEYED[kind]()

        scores = fitted.score_examples(*data, key=key)

        lazy = kind in ("lazy column", "dask.array")
        assert isinstance(scores, dd.Series if lazy else pd.Series)
        series = now(scores)
        assert (series.index.tolist(), series.index.name) == (index, name)
        np.testing.assert_allclose(series, losses(fitted), **CLOSE)

    @pytest.mark.parametrize("key", [True, None])
    @pytest.mark.parametrize("data", [keyed_pairs, keyed_lists])
    def test_scores_of_a_bag_or_of_delayed_lists_with_keys_are_pairs(
        self, fitted, data, key
    ):
        scores = fitted.score_examples(data(), key=key)

        scored = now(scores)
        if data is keyed_pairs:
            assert isinstance(scores, db.Bag)
        else:
            scored = itertools.chain(*scored)
        names, values = zip(*scored, strict=True)
        assert list(names) == IDS
        np.testing.assert_allclose(values, losses(fitted), **CLOSE)

    @pytest.mark.parametrize(
        ("data", "key", "error", "message"),
        [
            ((X, Y), IDS[1:], DataError, "got 89 for 90 rows"),
            ((X, Y), "id", OptionError, "X is a ndarray; pass a sequence with one"),
            ((X, Y), X, OptionError, "one value for each row, got a"),
            ((X, Y), True, OptionError, "key=True applies only to a bag, or a list"),
            ((pairs(),), IDS, OptionError, "a Bag as X has its keys in its exam"),
            (([delayed((X, Y))],), True, DataError, "0 must be .* pairs .*got a tuple"),
            (
                blocks(),
                da.zeros(89, chunks=30),
                DataError,
                "same length, got 90 and 89",
            ),
            (
                blocks(),
                IDS[1:],
                DataError,
                "X and key must have the same length, got 90",
            ),
            (
                (table()[NAMES], table()["label"]),
                IDS,
                DataError,
                "key is in memory, .* make it a column of the dataframe, or pass X.to_",
            ),
            (
                blocks(),
                da.zeros((90, 2)),
                OptionError,
                "has 2 axes, and X is a Array",
            ),
            ((X, Y), da.zeros(90), OptionError, "has 1 axes, and X is a ndarray"),
            ((table()[NAMES], table()["label"]), "ID", OptionError, "which has .'a'"),
        ],
        ids=[
            *("length", "no table", "two axes", "no bag", "in memory", "no lists"),
            *(
                "lazy length",
                "length beside",
                "table",
                "lazy axes",
                "lazy key",
                "no such column",
            ),
        ],
    )
    def test_keys_that_do_not_fit_the_data_are_refused(
        self, fitted, data, key, error, message
    ):
        with pytest.raises(error, match=message):
            fitted.score_examples(*data, key=key)

    def test_keys_with_other_partitions_are_refused(self, fitted):
        x, y = blocks()
        keep = y >= 0  # of unknown lengths
        key = da.from_array(np.arange(4), chunks=1)

        with pytest.raises(DataError, match=r"part \d has \d+ rows and 1 keys"):
            now(fitted.score_examples(x[keep], y[keep], key=key))

    def test_keys_of_a_stream_are_refused(self, fitted):
        with pytest.raises(OptionError, match="in no fixed order"):
            fitted.score_examples(Stream(), key=IDS)


def halved(batch):
    x, y = batch
    return x / 2, y


def test_a_transform_comes_before_the_model(fitted):
    scores = fitted.score_examples(X, Y, transform=halved)

    np.testing.assert_allclose(scores, losses(fitted, X / 2), **CLOSE)


def first_only(batch):
    return batch[0][:1], batch[1][:1]


def falling(output, y):
    if len(y) == 1:
        raise ValueError("one is too few")
    return nn.functional.cross_entropy(output, y)


MISSING = Y.astype(np.float32)
MISSING[7] = np.nan


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({}, (X,), "y must be given"),
        ({}, (X, Y + 1), r"y\[\d+\] is 3, but the model gives 3 outputs"),
        ({}, (X[:0], Y[:0]), "X must not be empty"),
        ({"loss": nn.MSELoss()}, (X, np.stack([MISSING] * 3, 1)), r"y\[7, 0\] is nan"),
        ({"loss": falling}, (X, Y), "failed on a batch of one row.*too few"),
        (
            {"transform": first_only},
            (X, Y),
            r"as many rows as it receives.*shape \(1, 4\) for 2",
        ),
    ],
    ids=["no labels", "unseen class", "empty", "missing", "one row", "transform"],
)
def test_arguments_that_cannot_be_scored_are_refused(options, data, message):
    with pytest.raises((DataError, ModelError), match=message):
        trainer(**options).score_examples(*data)


def test_a_wrong_label_of_a_lazy_part_is_named_when_it_is_computed(fitted):
    y = Y.copy()
    y[70] = 3

    scores = fitted.score_examples(blocks()[0], da.from_array(y, chunks=CHUNKS))

    with pytest.raises(DataError, match=r"y\[10\] is 3, but the model gives") as caught:
        now(scores)
    assert caught.value.__notes__ == ["in part 3"]


class TestSkipping:
    """Parts that cannot be read."""

    def test_rows_of_a_file_that_cannot_be_read_are_left_out(self, fitted, tmp_path):
        files(tmp_path)
        (tmp_path / "1.npz").write_bytes(b"torn")

        scores = fitted.score_examples(tmp_path, on_bad_batch="skip")

        expected = np.delete(losses(fitted), slice(30, 60))
        np.testing.assert_allclose(scores, expected, **CLOSE)

    @pytest.mark.parametrize("torn", [[5], [7], [4, 5, 6, 7]], ids=str)
    def test_of_several_files_in_a_part_only_the_torn_ones_have_no_score(
        self, tmp_path, torn
    ):
        store = folder(tmp_path, [f"{label}/{i}.png" for label in "abc" for i in "123"])
        source = image_folder(tmp_path, files_per_part=4)
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
        unfitted = Trainer(model, nn.CrossEntropyLoss(), optim.SGD, client=False)
        unfitted.model_ = unfitted.model
        expected = unfitted.score_examples(source)
        for row in torn:
            store.write(source.paths[row], b"torn")
        expected[torn] = np.nan

        scores = unfitted.score_examples(source, on_bad_batch="skip")
        keyed = unfitted.score_examples(source, key=source.paths, on_bad_batch="skip")

        np.testing.assert_allclose(scores, expected, **CLOSE)
        np.testing.assert_allclose(keyed, expected, **CLOSE)
        assert list(keyed.index) == list(source.paths)

    def test_lazy_data_cannot_be_skipped(self, fitted):
        with pytest.raises(OptionError, match="for Dask collections"):
            fitted.score_examples(*blocks(), on_bad_batch="skip")


def test_an_untrained_trainer_cannot_score():
    unfitted = Trainer(
        nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.optim.SGD, client=False
    )

    with pytest.raises(OptionError, match="call fit first"):
        unfitted.score_examples(X, Y)
