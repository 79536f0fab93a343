"""Each kind of data, validated: what is wrong is counted row by row, and named."""

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch

from daskdl.data.export import export
from daskdl.data.formats import FromBytes, OneExample
from daskdl.data.images import image_folder
from daskdl.data.shards import Index, file_batches
from daskdl.data.storage import Store
from daskdl.data.tabular_formats import Csv, Parquet
from daskdl.data.validate import KINDS, validate
from tests.support import s3
from tests.support.pictures import encoded, folder, pixels

# Of 100 rows in parts of 40, 40 and 20: two labels are missing, three are no classes.
ROWS = 100
X = np.arange(2.0 * ROWS).reshape(ROWS, 2)
MISSING, INVALID = (3, 50), (4, 41, 99)
Y = np.arange(ROWS) % 3.0
Y[list(MISSING)] = np.nan
Y[list(INVALID)] = 3, -1, 0.5
PARTS = 3


def numbers():
    """Labels as a column of pandas with a mask."""
    return pd.Series(Y).astype("Float64")


def lazy(values):
    return da.from_array(values, chunks=(40, *values.shape[1:]))


def cut(values):
    return [values[:40], values[40:80], values[80:]]


def delayed():
    return [
        dask.delayed(lambda *rows: rows)(x, y)
        for x, y in zip(cut(X), cut(Y), strict=True)
    ]


def bag():
    rows = list(zip(X, Y, strict=True))
    return db.Bag({("b", i): part for i, part in enumerate(cut(rows))}, "b", PARTS)


def tables(tmp_path, write):
    table = pd.DataFrame({"a": X[:, 0], "y": Y})
    for part, rows in enumerate(cut(table)):
        write(rows, tmp_path / f"{part}")
    return str(tmp_path)


IN_MEMORY = {
    "numpy": (X, Y),
    "torch": (torch.from_numpy(X), torch.from_numpy(Y)),
    "trees": ({"a": X, "b": X}, {"y": Y, "z": np.zeros(ROWS)}),
    "pandas": (pd.DataFrame(X), pd.Series(Y)),
    "pandas with a mask": (pd.DataFrame(X), numbers()),
}
LAZY = {
    "dask.array": (lazy(X), lazy(Y)),
    "trees of dask.array": ({"a": lazy(X)}, (lazy(Y), lazy(np.zeros(ROWS)))),
    "dask.bag": (bag(), None),
    "delayed": (delayed(), None),
}


def frames(labels):
    """As ``dask.dataframe`` with the same parts."""
    divisions = [0, 40, 80, ROWS - 1]
    x, y = pd.DataFrame(X, columns=["a", "b"]), pd.Series(labels)
    whole = dd.from_pandas(x, npartitions=1), dd.from_pandas(y, npartitions=1)
    return tuple(one.repartition(divisions=divisions) for one in whole)


def wrong_labels(report):
    """The rows of missing and of invalid labels, by part."""
    kinds = {"missing label": [], "invalid label": []}
    for one in report.offenders:
        kinds[one.kind].append((one.part, one.row))
    return kinds


def in_parts(names):
    """Where the wrong labels are, if the parts have these names."""

    def places(rows):
        return [(names[row // 40], row % 40) for row in rows]

    return {"missing label": places(MISSING), "invalid label": places(INVALID)}


def assert_counted(report, parts=PARTS):
    assert (report.parts, report.rows) == (parts, ROWS)
    assert report.counts == {
        **dict.fromkeys(KINDS, 0),
        "missing label": 2,
        "invalid label": 3,
    }


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_rows_in_memory_have_the_numbers_they_were_given_in(kind):
    x, y = IN_MEMORY[kind]

    report = validate(x, y=y, labels=3, client=False)

    assert_counted(report, parts=1)
    assert wrong_labels(report) == {
        "missing label": [("part 0", row) for row in MISSING],
        "invalid label": [("part 0", row) for row in INVALID],
    }


@pytest.mark.parametrize("kind", LAZY)
def test_rows_of_lazy_data_are_numbered_in_their_parts(kind):
    x, y = LAZY[kind]

    report = validate(x, y=y, labels=3, client=False)

    assert_counted(report)
    assert wrong_labels(report) == in_parts([f"part {i}" for i in range(PARTS)])


@pytest.mark.parametrize("labels", [Y, numbers()], ids=["floats", "with a mask"])
def test_rows_of_a_lazy_table_are_numbered_in_their_parts(labels):
    x, y = frames(labels)

    report = validate(x, y=y, labels=3, client=False)

    assert_counted(report)
    assert wrong_labels(report) == in_parts([f"part {i}" for i in range(PARTS)])


def test_names_that_are_missing_in_a_lazy_table_are_counted():
    names = pd.Series(np.array(["ant", "bee"] * 50), dtype="category")
    x, y = frames(names.mask(np.isnan(Y)))

    report = validate(x, y=y, client=False)

    assert report.counts["missing label"] == sum(report.counts.values()) == 2


def csv(rows, path):
    rows.to_csv(path, index=False)


def parquet(rows, path):
    rows.to_parquet(path, index=False)


@pytest.mark.parametrize(
    ("write", "loader"),
    [
        (csv, Csv("y", label_dtype="float32")),
        (parquet, Parquet(label="y")),
    ],
    ids=["csv", "parquet"],
)
def test_rows_of_files_are_numbered_in_each(tmp_path, write, loader):
    url = tables(tmp_path, write)

    report = validate(url, loader=loader, labels=3, client=False)

    assert_counted(report)
    assert report.files == PARTS
    assert wrong_labels(report) == in_parts([f"{url}/{i}" for i in range(PARTS)])


def test_empty_cells_of_classes_are_missing_labels(tmp_path):
    store = Store(str(tmp_path))
    store.write("a.csv", b"a,y\n1,0\n2,\n3,2\n")
    store.write("b.csv", b"a,y\n1,\n2,1\n")

    report = validate(store.url, loader=Csv("y"), labels=2, client=False)

    assert [one[:3] for one in report.offenders] == [
        (store.url_of("a.csv"), 1, "missing label"),
        (store.url_of("a.csv"), 2, "invalid label"),
        (store.url_of("b.csv"), 0, "missing label"),
    ]


NAMES = [f"{label}/{i}.png" for label in ("ant", "bee") for i in range(6)]


class TestImages:
    @pytest.fixture(params=["loose", "packed"])
    def damage(self, request, tmp_path):
        """Makes some images of a folder unreadable, and gives its URL."""

        def damage(count):
            store = folder(tmp_path / "images", NAMES)
            paths = image_folder(store.url, seed=None).paths
            for name in paths[:count]:
                store.write(name, store.read(name)[:60])
            if request.param == "loose":
                return store.url
            url = str(tmp_path / "packed")
            file_batches(store.url, url, 4, client=False)
            return url

        return damage

    @pytest.mark.parametrize("count", [1, 7])
    def test_damaged_ones_at_the_beginning_are_named(self, damage, count):
        source = image_folder(damage(count), seed=None)

        report = validate(source, client=False)

        wrong = {source._files.url_of(name) for name in sorted(NAMES)[:count]}
        assert report.counts["unreadable"] == count == sum(report.counts.values())
        assert {one.part for one in report.offenders} == wrong
        assert report.rows == len(NAMES) - count

    def test_with_a_size_all_may_be_damaged(self, damage):
        source = image_folder(damage(12), size=8)

        report = validate(source, client=False)

        assert report.counts["unreadable"] == len(report.offenders) == 12

    def test_labels_beyond_the_classes_are_counted_row_by_row(self, damage):
        source = image_folder(damage(0), seed=None)

        report = validate(source, labels=1, client=False)

        assert report.counts["invalid label"] == len(report.offenders) == 6
        assert {one.row for one in report.offenders} == {0}  # of each file


def test_an_image_of_another_size_is_named(tmp_path):
    store = folder(tmp_path, NAMES)
    store.write("bee/1.png", encoded(pixels(1, (9, 9, 3))))

    report = validate(image_folder(store.url), client=False)

    (offender,) = report.offenders
    assert offender[:3] == (store.url_of("bee/1.png"), None, "wrong shape")
    assert report.counts["wrong shape"] == sum(report.counts.values()) == 1


class TestBatchFiles:
    @pytest.fixture
    def store(self, tmp_path):
        x, y = lazy(X), lazy(Y)
        export(x, str(tmp_path), 30, y=y, client=False, shuffle=False)
        return Store(str(tmp_path))

    def test_labels_are_counted_row_by_row(self, store):
        report = validate(store.url, labels=3, client=False)

        assert_counted(report, parts=4)
        assert len(report.offenders) == 5

    def test_a_damaged_one_is_named(self, store):
        name = store.names("*.safetensors")[2]
        content = bytearray(store.read(name))
        content[-1] ^= 1
        store.write(name, bytes(content))

        report = validate(store.url, client=False)

        assert report.counts["unreadable"] == 1
        (offender,) = [one for one in report.offenders if one.kind == "unreadable"]
        assert offender[:2] == (store.url_of(name), None)

    def test_one_that_is_not_there_is_missing(self, store):
        name = store.names("*.safetensors")[1]
        store.delete([name])

        report = validate(store.url, client=False)

        assert report.counts["missing"] == 1
        assert report.counts["unreadable"] == 0
        assert store.url_of(name) in {one.part for one in report.offenders}


def test_a_damaged_file_at_the_beginning_of_a_shard_is_named(tmp_path):
    store = Store(str(tmp_path / "files"))
    for i in range(5):
        store.write(f"{i}.txt", b"torn" if i == 2 else b"1")
    url = str(tmp_path / "packed")
    file_batches(store.url, url, 2, client=False)
    assert Index.read(Store(url)).shards[0].members[0].name == "2.txt"
    loader = OneExample(FromBytes(lambda content: np.array([float(content)])))

    report = validate(url, loader=loader, client=False)

    assert (report.files, report.rows) == (5, 4)
    assert [one[1:3] for one in report.offenders] == [(None, "unreadable")]
    assert "2.txt" in report.offenders[0].part


class TestOnAServer:
    @pytest.fixture
    def store(self, s3_endpoint, bucket):
        return Store(f"{bucket}/x", s3.options(s3_endpoint))

    def test_batch_files_are_read_with_the_options(self, store):
        options = store.options
        export(X, store.url, 30, y=Y, client=False, storage_options=options)

        report = validate(store.url, labels=3, client=False, storage_options=options)

        assert report.rows == ROWS
        assert report.counts["missing label"] == len(MISSING)

    @pytest.mark.parametrize("packed", [False, True])
    def test_files_are_read_with_the_options(self, store, packed):
        options = store.options
        store.write("a.csv", b"a,y\n1,0\n2,1\n")
        store.write("b.csv", b"a,y\n1,7\n")
        url = f"{store.url}-packed" if packed else store.url
        if packed:
            file_batches(store.url, url, 1, client=False, storage_options=options)

        report = validate(
            url,
            labels=2,
            loader=Csv(label="y"),
            client=False,
            storage_options=options,
            quarantine=f"{store.url}-bad",
        )

        assert report.rows == 3
        assert report.counts["invalid label"] == 1
        assert [move.to is None for move in report.moved] == [packed]
