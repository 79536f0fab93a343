"""Parquet files: which columns, and what is refused by its name."""

import io
import sys
import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from daskdl.data.storage import Store
from daskdl.data.tabular_formats import Parquet
from daskdl.errors import DataError, OptionError

TABLE = {
    "a": np.arange(5, dtype=np.int16),
    "b": np.arange(5) / 2,
    "y": np.array([0, 1, 2, 1, 0]),
    "kind": ["cat", "dog", "cat", "cat", "dog"],
}


def written(columns, group=2):
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file, row_group_size=group)
    return file.getvalue()


@pytest.fixture
def store():
    made = Store(f"memory://{uuid.uuid4().hex}")
    made.write("a", written(TABLE))
    return made


@pytest.mark.parametrize(
    ("loader", "x", "y"),
    [
        (Parquet(["a", "b"], "y"), [0, 0.0], [0, 1, 2, 1, 0]),
        (Parquet(["b"], "kind", classes=["dog", "cat"]), [0.0], [1, 0, 1, 1, 0]),
        (Parquet(["b", 0], ["y"]), [0.0, 0], [[0], [1], [2], [1], [0]]),
        (Parquet(["b"]), [0.0], None),
    ],
    ids=["numbers", "classes", "several", "no labels"],
)
def test_columns_are_loaded_and_looked_at(store, loader, x, y):
    loaded, facts = loader.load(store, "a"), loader.look(store, "a")

    assert loaded[0].shape == (5, len(x))
    assert loaded[0][0].tolist() == x
    assert loaded[0].dtype == np.float32
    assert facts.rows == 5
    assert facts.first[0].shape == (2, len(x))
    if y is None:
        assert loaded[1] is facts.first[1] is None
    else:
        assert loaded[1].tolist() == y
        assert facts.first[1].dtype == loaded[1].dtype == np.int64
        assert facts.first[1].shape[1:] == loaded[1].shape[1:]


def test_all_columns_but_the_label_are_x():
    content = written({"a": [1, 2], "y": [1.5, 2.5], "b": [True, False]})

    x, y = Parquet(label="y")(content, "a")

    assert (x.tolist(), y.tolist()) == ([[1, 1], [2, 0]], [1.5, 2.5])


def test_labels_may_be_dictionaries():
    kinds = pa.array(["b", "a", "b"]).dictionary_encode()

    _, y = Parquet(label="y", classes=["a", "b"])(
        written({"x": [1, 2, 3], "y": kinds}), ""
    )

    assert y.tolist() == [1, 0, 1]


def test_looking_reads_the_footer_only(store, monkeypatch):
    store.write("big", written({"x": np.random.default_rng(0).random(50_000)}, 10_000))
    sizes = []
    read = Store.read

    def recorded(*args):
        sizes.append(len(read(*args)))
        return read(*args)

    monkeypatch.setattr(Store, "read", recorded)

    assert Parquet().look(store, "big").rows == 50_000
    assert sum(sizes) < store.size("big") / 100


@pytest.mark.parametrize(
    ("loader", "columns", "message"),
    [
        (
            Parquet(label="z"),
            {"a": [1], "b": [2]},
            r"label 'z' is not a column of s3://b/a; it has 'a', 'b'",
        ),
        (Parquet(), {"a": [1, None]}, "column 'a' of s3://b/a has 1 missing values"),
        (Parquet(), {"a": [1.0, None]}, "column 'a' of s3://b/a has 1 missing values"),
        (Parquet(), {"a": [1], "t": ["x"]}, "column 't' .* numbers, got string; leave"),
        (
            Parquet(),
            {"t": pa.array(["x"]).dictionary_encode()},
            "column 't' .* must hold numbers, got dictionary",
        ),
        (Parquet(), {"t": pa.array([1], pa.timestamp("s"))}, "'t' .* got timestamp"),
        (Parquet(label="y"), {"a": [1], "y": ["c"]}, "'y' .* got string; .*classes="),
        (
            Parquet(label="y", classes=["d"]),
            {"a": [1], "y": ["c"]},
            "column 'y' .* the label 'c' in row 0, which is not among the classes 'd'",
        ),
    ],
)
def test_what_is_wrong_is_named(loader, columns, message):
    with pytest.raises(DataError, match=message):
        loader(written(columns), "s3://b/a")


@pytest.mark.parametrize(
    ("loader", "labels"),
    [
        (Parquet(label="y"), [1, None, None]),
        (Parquet(label="y"), [1.0, None, np.nan]),
        (Parquet(label="y", classes=["a", "b"]), ["b", None, None]),
    ],
    ids=["integers", "floats", "names"],
)
def test_labels_may_be_missing(loader, labels):
    x, y = loader(written({"a": [1, 2, 3], "y": labels}), "s3://b/a")

    assert x[:, 0].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(y, [1, np.nan, np.nan])


def test_looking_says_when_it_is_no_such_file(store):
    store.write("bad", b"something else, and longer")

    with pytest.raises(DataError, match="does not end as a Parquet file does"):
        Parquet().look(store, "bad")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"something else, and longer"])
def test_a_damaged_file_is_named(store, content):
    store.write("bad", content)

    for act in (Parquet().load, Parquet().look):
        with pytest.raises(DataError, match=f"cannot read {store.url}/bad: "):
            act(store, "bad")


def test_without_pyarrow_it_is_said_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(OptionError, match=r"pip install daskdl\[dataframe\]"):
        Parquet().load(store, "a")
