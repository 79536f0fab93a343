"""Data of any kind that cannot be used are refused by name, with the remedy."""

import re

import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
import pytest
import torch
from dask import delayed
from torch.utils.data import DataLoader, Dataset, TensorDataset

from daskdl import DataError, OptionError, data
from tests.support.kinds import (
    NAMES,
    PARTS,
    Given,
    Items,
    Joining,
    Where,
    X,
    Y,
    as_frame,
    blocks,
    collate,
    files,
    frame,
    load,
    save_npz,
    save_table,
    tables,
)
from tests.support.problems import plain, trainer


def fit(client, given, **options):
    own = trainer(client, model=Joining, optimizer=plain)
    own.fit(given.x, given.y, batch_size=8, **given.options, **options)
    return own


class Lengthless(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


class Repeating(Dataset):
    """The same item again and again."""

    def __init__(self, item, length=10):
        self._item, self._length = item, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return self._item


def with_column(**columns):
    return frame().assign(**columns)


def uneven_tables():
    own = tables()
    return Given(own[NAMES], own["label"].repartition(npartitions=2))


def with_strings():
    own = tables().assign(e="x")
    return Given(own[[*NAMES, "e"]], own["label"])


def loaded(**options):
    return Given(DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y))), **options)


def two_rows(items):
    return np.zeros((1, 4)), np.zeros(1)


# What the client sees by itself, before it asks a worker for anything.
AT_ONCE = {
    "rows of arrays": (
        lambda: Given(da.from_array(X, 30), da.from_array(Y[:-1], 30)),
        "X and y must have the same length, got 90 and 89",
    ),
    "partitions": (uneven_tables, "must be partitioned alike, got 3 of X, 2 of y part"),
    "objects": (
        lambda: Given(X.astype(object), Y),
        r"X must hold real .* got dtype object; .* with X\.astype\(numpy\.float32\)",
    ),
    "lazy objects": (
        lambda: Given(blocks()[0].astype(object), blocks()[1]),
        "X must hold real numbers of at most 64 bits, got dtype object",
    ),
    "strings": (
        lambda: Given(with_column(e="x"), Y),
        r"column 'e' of X holds strings .* X\['e'\]\.astype\('category'\)\.cat\.codes",
    ),
    "lazy strings": (with_strings, "column 'e' of X holds strings .*; encode them as"),
    "missing": (
        lambda: Given(with_column(e=pd.array([None] + [1] * 89, dtype="Int64")), Y),
        "column 'e' of X has 1 missing values; fill them in or drop the rows",
    ),
    "string labels": (
        lambda: Given(X, pd.Series(["a"] * 90)),
        r"y holds strings .*; make them categories, .* y\.astype\('category'\)",
    ),
    "DataLoader": (loaded, r"X must not be a DataLoader, .*; give its dataset, X\.dat"),
    "DataLoader and y": (lambda: loaded(y=Y), "X must not be a DataLoader"),
    "y and Dataset": (
        lambda: Given(Items(), Y),
        "y must not be given with a Items, which brings its labels",
    ),
    "three": (
        lambda: Given(Repeating((X[0], X[1], 1))),
        r"must give pairs \(x, y\), got a list of 3; .* use a collate_fn that returns",
    ),
    "text": (
        lambda: Given(Repeating(("a", 1))),
        r"x\[0\] of a dataset's items must be made of tensors.* got a str",
    ),
    "no length": (lambda: Given(Lengthless()), "must have __len__, Lengthless has non"),
    "no items": (lambda: Given(Repeating(0, 0)), "dataset is empty: len.Repeating. is"),
    "collate_fn": (
        lambda: Given(Items(), options={"collate_fn": two_rows}),
        "collate_fn must return one row for each item, got 1 rows of x for 2 items",
    ),
    "bag and y": (
        lambda: Given(db.from_sequence([1, 2]), Y),
        "y must not be given with a Bag, which brings its labels",
    ),
    "Delayed": (lambda: Given(delayed(load)("x")), r"put it into a list, \[X\]"),
    "list": (
        lambda: Given([X, X], Y),
        r"got a list; make one array of it, numpy\.stack\(X\)",
    ),
    "no list": (lambda: Given([]), "X must be a .* got a list; convert it with"),
    "no dict": (lambda: Given({}, Y), "X must not be empty, got no array at all"),
    "dict": (lambda: Given({"a": X, "b": 3}, Y), r"X\['b'\] must be .*, got an int"),
    "nothing": (lambda: Given(None), "X must be a numpy array, .*, got None"),
    "no folder": (lambda: Given("/nowhere/x"), "there are no files at /nowhere/x"),
    "no match": (
        lambda: Given("/x/*.npz"),
        r"there are no files that match /x/\*\.npz",
    ),
    "no file": (lambda: Given(["/x/a.npz"]), r"there is no file at /x/a\.npz"),
}


@pytest.mark.parametrize(("make", "message"), AT_ONCE.values(), ids=AT_ONCE)
def test_what_can_be_seen_at_once_is_refused_before_a_worker_is_asked(
    untouched, make, message
):
    with pytest.raises(DataError, match=message):
        fit(untouched, make())


@pytest.mark.parametrize("make", [uneven_tables, loaded], ids=["partitions", "loader"])
def test_data_to_validate_on_are_refused_likewise(untouched, make):
    given = make()
    both = given.x if given.y is None else (given.x, given.y)

    with pytest.raises(DataError, match=r"validation: .*(must be part|not be a D)"):
        fit(untouched, Given(X, Y), validation=both)


OPTIONS = {
    "a loader for arrays": (Given(X, Y), {"loader": load}, "loader is for paths and U"),
    "a loader for a Dataset": (Given(Items()), {"loader": load}, "loader is for paths"),
    "a loader for a bag": (
        Given(db.from_sequence([1])),
        {"loader": load},
        "loader is for paths",
    ),
    "collate_fn for arrays": (
        Given(X, Y),
        {"collate_fn": collate},
        "collate_fn is for a torch Dataset, got other data",
    ),
    "collate_fn for paths": (
        Given("/x"),
        {"collate_fn": collate},
        "collate_fn is for a torch Dataset, got other data",
    ),
}


@pytest.mark.parametrize(("given", "options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_other_kinds_are_refused(untouched, given, options, message):
    with pytest.raises(OptionError, match=message):
        fit(untouched, given, **options)


def damaged_npz(where):
    url = files(where, ".npz", save_npz)
    (where.folder / "1.npz").write_bytes(b"nonsense")
    return Given(url)


def npz(where, **options):
    return Given(files(where, ".npz", save_npz), options=options)


def csv(where, **options):
    url = files(where, ".csv", lambda path, x, y: as_frame(x, y).to_csv(path, index=0))
    return Given(url, options=options)


def npy(where):
    loader = data.Npy(label_column=9)
    return Given(files(where, ".npy", save_table), options={"loader": loader})


def strings(path):
    return np.array(["a"]), np.array([1])


def shorter(path):
    return X, Y[:-1]


def examples(*items, npartitions=1):
    return Given(db.from_sequence(items, npartitions=npartitions))


def returning(value):
    return Given([delayed(lambda: value, pure=False)()])


# What only those see who read the data, before training begins.
ON_READING = {
    "damaged": (damaged_npz, r"cannot read \S*/1\.npz: "),
    "label": (
        lambda w: csv(w, loader=data.Csv(label="target")),
        r"label 'target' is not a column of \S*\.csv; it has 'a', 'b', 'c', 'd', 'l",
    ),
    "no label": (csv, r"y must be given, or data of pairs \(x, y\)"),
    "column": (npy, r"\.npy must be a table with the column 9 .*, got the shape"),
    "names": (
        lambda w: npz(w, loader=data.Npz(y="target")),
        r"\S*\.npz must have an array named 'target', but has \['x', 'y'\]",
    ),
    "strings": (
        lambda w: npz(w, loader=strings),
        r"x of \S*\.npz must hold real numbers of at most 64 bits, got dtype <U1",
    ),
    "lengths": (
        lambda w: npz(w, loader=shorter),
        r"arrays of \S*\.npz must have as many rows, but x has 90, y has 89",
    ),
    "empty bag": (
        lambda w: Given(examples((X[0], 1)).x.filter(lambda pair: False)),
        "X must not be empty, got no rows in 1 parts",
    ),
    "shapes": (
        lambda w: examples((X[0], 0), (X[0][:2], 1)),
        "examples of part 0 must all have one shape for X",
    ),
    "texts": (
        lambda w: examples(("a", 1)),
        "X of part 0 must hold real numbers .* got dtype <U1; encode them as numbers",
    ),
    "some pairs": (
        lambda w: examples((X[0], 0), X[0]),
        r"examples of part 0 must all be pairs \(x, y\), .*, got 1 of 2 without y",
    ),
    "no pairs": (lambda w: examples(*X), r"y must be given, or data of pairs \(x, y\)"),
    "lengths of Delayed": (
        lambda w: returning((X, Y[1:])),
        "part 0 has rows that do not go together: 90 of X, 89 of y",
    ),
    "None": (lambda w: returning(None), "X of part 0 must be .*, got None"),
}


@pytest.mark.parametrize(("make", "message"), ON_READING.values(), ids=ON_READING)
def test_what_reading_shows_is_refused_before_training(client, tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        fit(client, make(Where(client, tmp_path)))


def test_what_the_users_own_loader_raises_comes_out_with_the_file(client, tmp_path):
    def failing(path):
        raise ZeroDivisionError("of one's own")

    given = npz(Where(client, tmp_path), loader=failing)

    with pytest.raises(ZeroDivisionError, match="of one's own") as caught:
        fit(client, given)
    assert re.fullmatch(r"in \S*\.npz", caught.value.__notes__[0])


def test_missing_values_of_a_partition_are_named_by_a_worker(client):
    import dask.dataframe as dd

    own = frame().assign(label=Y)
    own.loc[40, "b"] = np.nan
    lazy = dd.from_pandas(own, npartitions=3)

    with pytest.raises(
        DataError, match=r"column 'b' of X of part 1 has 1 missing values; fill them"
    ):
        fit(client, Given(lazy[NAMES], lazy["label"]))


class TestOneBadFile:
    """One batch file among a hundred is not what was written."""

    @pytest.fixture
    def url(self, tmp_path):
        rows = 2  # of each file
        made = data.export(
            np.tile(X, (3, 1))[: 100 * rows],
            np.tile(Y, 3)[: 100 * rows],
            url=str(tmp_path),
            batch_size=rows,
            client=False,
        )
        path = tmp_path / made.files[57].name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        return str(tmp_path)

    def test_it_is_named(self, client, url):
        with pytest.raises(
            DataError, match=r"batch-000057\.safetensors is damaged: .*; export again"
        ):
            fit(client, Given(url))

    def test_it_is_left_out_and_counted_if_asked_for(self, client, url):
        own = fit(client, Given(url), on_bad_batch="skip", epochs=2)

        assert own.history_.column("examples") == [198, 198]
        assert own.history_.column("skipped_examples") == [2, 2]

    def test_scores_name_it_or_leave_it_out(self, client, url):
        own = trainer(client, model=Joining)
        own.model_ = Joining()

        with pytest.raises(DataError, match=r"batch-000057\.safetensors is damaged"):
            own.evaluate(url)
        assert own.evaluate(url, on_bad_batch="skip")["loss"] > 0


def test_files_of_unknown_length_that_cannot_be_read_are_left_out(client, tmp_path):
    given = damaged_npz(Where(client, tmp_path))

    own = fit(client, given, on_bad_batch="skip")

    damaged = PARTS[2]
    assert own.history_.column("examples") == [90 - (damaged.stop - damaged.start)]
