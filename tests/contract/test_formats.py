"""Loaders: what a function gets and may return; the named readers; what is refused."""

import io
import sys
import uuid
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from daskdl.data import Csv, Npy, Npz, Parquet, Safetensors, files, storage
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)
GAPS = np.array([0.0, np.nan, 2, 3, 4, 5])


@pytest.fixture
def store():
    return Store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def loaded(store):
    """Rows of one file that has this content."""

    def load(loader, content, **options):
        store.write("a", content)
        return files(store.url_of("a"), loader, **options).load(0)

    return load


@pytest.fixture
def looked(store):
    """What is learnt of a file that has this content."""

    def look(loader, content):
        store.write("a", content)
        return files(store.url_of("a"), loader).facts(0)

    return look


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def tensors(**arrays):
    return safetensors.torch.save(
        {name: torch.as_tensor(array).clone() for name, array in arrays.items()}
    )


def parquet(columns, group=2):
    file = io.BytesIO()
    pa.parquet.write_table(pa.table(columns), file, row_group_size=group)
    return file.getvalue()


class TestFunctions:
    """A function of an open binary file."""

    def test_it_gets_an_open_file_with_its_path_or_url(self, store, tmp_path):
        (tmp_path / "a").write_bytes(b"ab")
        store.write("a", b"ab")
        seen = []

        def load(file):
            seen.append((file.name, file.read(1), file.seek(0), file.read()))
            return X

        for url in (str(tmp_path), f"file://{tmp_path}", store.url):
            files(url, load).load(0)

        names = [f"{tmp_path}/a"] * 2 + [f"{store.url}/a"]
        assert seen == [(name, b"a", 0, b"ab") for name in names]

    @pytest.mark.parametrize(
        ("result", "x", "y"),
        [
            ((X, Y), X, Y),
            ((X, None), X, None),
            (X, X, None),
            ((torch.from_numpy(X), torch.arange(6)), X, Y),
            ((X.astype(">f4"), Y), X, Y),
            ((X, GAPS), X, GAPS),
        ],
        ids=["pair", "no labels", "alone", "tensors", "byte order", "missing labels"],
    )
    def test_results_become_numpy(self, loaded, result, x, y):
        got_x, got_y = loaded(lambda file: result, b"")

        np.testing.assert_array_equal(got_x, x)
        assert got_x.dtype == np.float32
        assert got_x.dtype.isnative
        if y is not None:
            np.testing.assert_array_equal(got_y, y)

    def test_one_example_has_one_row(self, loaded):
        example = {"a": torch.from_numpy(X), "n": 3.5}, 7

        x, y = loaded(lambda file: example, b"", one_example=True)

        assert {k: v.shape for k, v in x.items()} == {"a": (1, 6, 2), "n": (1,)}
        assert y.tolist() == [7]
        assert loaded(Npy(), npy(X), one_example=True)[0].shape == (1, 6, 2)

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            ((X, Y[:2]), "arrays of {} must have equally many rows, but x has 6, y"),
            (({"a": X, "b": X[1:]}, Y), r"but x\['a'\] has 6, x\['b'\] has 5, y has 6"),
            (([1.0, 2.0], Y), "x of {} must be a numpy array, .* got a list"),
            ((np.array(["a", "b", "c"]), Y), "x of {} must hold real numbers"),
            ((np.array(3.0), Y), "x of {} must have examples along its first axis"),
            (((), Y), r"x of {} must not be empty, got \(\)"),
            (None, "x of {} must be a numpy array, .* got None"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_what_cannot_be_used_is_named_with_the_file(
        self, store, loaded, result, message
    ):
        with pytest.raises(DataError, match=message.format(store.url_of("a"))):
            loaded(lambda file: result, b"")

    @pytest.mark.parametrize("error", [OSError, EOFError, KeyError, zipfile.BadZipFile])
    def test_a_damaged_file_is_named(self, store, loaded, error):
        def fail(_):
            raise error("bad")

        message = f"cannot read {store.url}/a: {error.__name__}: .*bad"
        with pytest.raises(DataError, match=message) as raised:
            loaded(fail, b"")

        assert type(raised.value.__cause__) is error

    @pytest.mark.parametrize("error", [TypeError, ZeroDivisionError, DataError])
    def test_a_mistake_in_a_loader_comes_out_as_it_is(self, loaded, error):
        def fail(_):
            raise error("mine")

        with pytest.raises(error, match=r"^mine$"):
            loaded(fail, b"")

    def test_what_is_no_loader_is_refused(self, loaded):
        with pytest.raises(OptionError, match=r"got the class Npy; write Npy\(...\)"):
            loaded(Npy, b"")
        with pytest.raises(
            OptionError, match=r"loader must be a function .* got 'csv'"
        ):
            loaded("csv", b"")


class TestNpy:
    @pytest.mark.parametrize(("column", "place"), [(None, 0), (0, 0), (-1, 2)])
    def test_a_column_may_be_y(self, loaded, looked, column, place):
        table = np.insert(X, place, 100 + Y, axis=1)

        x, y = loaded(Npy(label_column=column), npy(table if column is not None else X))
        first = looked(Npy(label_column=column), npy(table)).first_rows

        np.testing.assert_array_equal(x, X)
        if column is None:
            assert y is first[1] is None
        else:
            np.testing.assert_array_equal(y, 100 + Y)
            assert [part.shape for part in first] == [(2, 2), (2,)]

    @pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3)])
    def test_a_column_that_is_not_there_is_refused(self, loaded, shape):
        with pytest.raises(DataError, match=rf"/a must be a table .* 2 .*{shape[0]}"):
            loaded(Npy(label_column=2), npy(np.zeros(shape)))

    def test_objects_are_not_unpickled_and_one_array_is_no_npz(self, loaded):
        content = npy(np.array([{}, {}]), allow_pickle=True)

        with pytest.raises(DataError, match=r"cannot read .*allow_pickle"):
            loaded(Npy(), content)
        with pytest.raises(DataError, match=r"must be an \.npz file, .* use Npy"):
            loaded(Npz(), npy(X))

    @pytest.mark.parametrize("dtype", ["f4", ">i2", "?"])
    @pytest.mark.parametrize("rows", [5000, 1])
    def test_looking_says_what_loading_does(self, looked, dtype, rows):
        facts = looked(Npy(), npy(np.zeros((rows, 2, 3), dtype)))

        assert facts.rows == rows
        assert facts.first_rows[0].shape == (min(rows, 2), 2, 3)
        assert facts.first_rows[0].dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize(
    ("kind", "written"),
    [(Npz, npz), (Safetensors, tensors)],
    ids=["npz", "safetensors"],
)
class TestNames:
    """What has several arrays with names."""

    def test_x_and_y_are_names(self, loaded, looked, kind, written):
        x, y = loaded(kind(), written(x=X, y=Y, z=X))
        rows, first = looked(kind(), written(x=X, y=Y, z=X))

        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
        assert rows == 6
        assert [part.shape for part in first] == [(2, 2), (2,)]
        assert [part.dtype for part in first] == [x.dtype, y.dtype] == ["f4", "i8"]

    def test_names_are_given_as_trees(self, loaded, kind, written):
        loader = kind(x={"image": "a", "rest": ("b", "c")}, y=None)

        x, y = loaded(loader, written(a=X, b=X + 1, c=X + 2))

        np.testing.assert_array_equal(x["rest"][1], X + 2)
        assert y is None

    def test_what_is_wrong_is_named(self, store, loaded, looked, kind, written):
        for act in (loaded, looked):
            with pytest.raises(DataError, match=r"/a must .* named 'y', .*\['x', 'z'"):
                act(kind(), written(x=X, z=Y))
            with pytest.raises(DataError, match=r"must have equally many rows, .*6.*5"):
                act(kind(), written(x=X, y=Y[1:]))


class TestSafetensors:
    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (torch.bfloat16, np.float32),
            (torch.float16, np.float16),
            (torch.bool, np.bool_),
            (torch.float8_e4m3fn, np.float32),
        ],
        ids=str,
    )
    def test_dtypes_are_the_same_looked_at_and_loaded(
        self, looked, loaded, dtype, expected
    ):
        arrays = {"x": torch.zeros(4, 2).to(dtype), "y": torch.arange(4)}
        content = safetensors.torch.save(arrays, {"made": "today"})

        rows, (x, _) = looked(Safetensors(), content)

        assert rows == 4
        assert x.dtype == loaded(Safetensors(), content)[0].dtype == expected

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\xff" * 99, "its header would have 18446744073709551615 bytes"),
            (b"\x05" + b"\0" * 7 + b"{not}", "JSONDecodeError"),
            (tensors(x=np.float32(1), y=Y), "x of .*/a must have examples along"),
        ],
    )
    def test_looking_at_what_cannot_be_used_names_it(self, looked, content, message):
        with pytest.raises(DataError, match=rf"/a.*{message}|{message}"):
            looked(Safetensors(), content)


TABLE = b"age,size,kind\n1,2.5,0\n3,4.5,1\n\n5,6.5,2\n"
NAMED = b'size,kind\n1,"cat, big"\n2,dog\n3,"cat, big"\n'


class TestCsv:
    @pytest.mark.parametrize(
        ("loader", "x", "y"),
        [
            (Csv(label="kind"), [[1, 2.5], [3, 4.5], [5, 6.5]], [0, 1, 2]),
            (Csv(label=2), [[1, 2.5], [3, 4.5], [5, 6.5]], [0, 1, 2]),
            (Csv(label=-1), [[1, 2.5], [3, 4.5], [5, 6.5]], [0, 1, 2]),
            (
                Csv(["kind"], ["size", 0], label_dtype="float64"),
                [[0], [1], [2]],
                [[2.5, 1], [4.5, 3], [6.5, 5]],
            ),
            (Csv(), [[1, 2.5, 0], [3, 4.5, 1], [5, 6.5, 2]], None),
        ],
        ids=["name", "index", "from the end", "several", "no label"],
    )
    def test_columns_are_chosen_and_ordered(self, loaded, looked, loader, x, y):
        got_x, got_y = loaded(loader, TABLE)

        assert got_x.tolist() == x
        assert got_x.dtype == np.float32
        assert (None if got_y is None else got_y.tolist()) == y
        assert looked(loader, TABLE).rows == 3

    def test_numbers_are_read_to_the_last_digit(self, loaded):
        values = np.random.default_rng(0).normal(size=(50, 3)) * 1e-7
        text = pd.DataFrame(values, columns=list("abc")).to_csv(index=False)

        x, _ = loaded(Csv(dtype="float64"), text.encode())

        np.testing.assert_array_equal(x, values)

    def test_without_a_header_columns_are_numbers(self, loaded):
        x, y = loaded(Csv(label="1", header=False, delimiter=";"), b"1;2\n3;4\n")

        assert (x.tolist(), y.tolist()) == ([[1], [3]], [2, 4])

    @pytest.mark.parametrize("delimiter", ["::", "[:;]+", r"\s+", "§"])
    def test_a_delimiter_is_a_character_or_an_expression(self, loaded, delimiter):
        between = {"[:;]+": ":;", r"\s+": "\t "}.get(delimiter, delimiter)
        lines = [["a", "b", "y"], ["1", "2", "cat"], ["3", "4", "nan"]]
        content = "\n".join(map(between.join, lines)).encode()

        x, y = loaded(Csv(label="y", classes=["cat"], delimiter=delimiter), content)

        assert x.tolist() == [[1, 2], [3, 4]]
        np.testing.assert_array_equal(y, [0, np.nan])

    @pytest.mark.parametrize("delimiter", ["", "||", r"\s*", "(("])
    def test_a_delimiter_that_matches_nothing_is_refused(self, delimiter):
        with pytest.raises(OptionError, match=r"delimiter must be .*; put a backsl"):
            Csv(delimiter=delimiter)

    def test_cells_in_quotes_may_have_white_space(self, loaded):
        loader = Csv(label="y", classes=["big cat"], delimiter=r"\s+")

        _, y = loaded(loader, b'a y\n 1 "big cat"\n2 nan\n')

        np.testing.assert_array_equal(y, [0, np.nan])

    @pytest.mark.parametrize(
        "content",
        [
            "\ufeffy,a\n2,1\n".encode(),
            b"a,y\r\n1,2\r\n",
            b'"a"," y"\n"1"," 2"\n',
            b"\n\na,y\n1,2",
            b"a,y\n1,2.0\n",
        ],
        ids=["byte order mark", "line ends", "quotes and blanks", "empty", "float"],
    )
    def test_how_tables_are_written_does_not_matter(self, loaded, content):
        x, y = loaded(Csv(label="y"), content)

        assert (x.tolist(), y.tolist(), y.dtype) == ([[1]], [2], np.int64)

    def test_a_header_alone_has_no_rows(self, loaded):
        x, y = loaded(Csv(label="y"), b"a,b,y\n")

        assert (x.shape, y.shape, y.dtype) == ((0, 2), (0,), np.int64)

    @pytest.mark.parametrize(
        ("loader", "content", "message"),
        [
            (Csv(label="hue"), TABLE, "label 'hue' is not a column of .*/a; it has 'a"),
            (Csv(label=3), TABLE, "label 3 is not a column of .*; it has 'age'"),
            (Csv(["b"], "y"), b"a,y\n1,2\n", "feature 'b' is not a column"),
            (Csv(label="a"), b"a,a\n1,2\n", "label 'a' is the name of several columns"),
            (Csv(["a"], "a"), b"a,b\n1,2\n", "label 'a' .* selected once, and"),
            (Csv(label=["b", "b"]), b"a,b\n1,2\n", "label 'b' .* selected once"),
            (Csv(label="a"), b"a\n1\n", "/a has no columns for x, only 'a'"),
            (Csv(), b"", "/a must have rows, got an empty file"),
            (Csv(), b"a,b\n1,2\n\n3\n", "column 'b' .* numbers, got '' in row 1"),
            (Csv(label="a"), b"a,b\n1,2,3\n", "cannot read .*/a: .*Expected 2 fields"),
            (Csv(), b"a,b\n0,2,5\n1,4,6\n", "cannot read .*/a: .*Expected 2 fields"),
            (
                Csv(label="y"),
                b"a,y\n1,2\n\n3\n",
                "have 2 cells, got 1 in line 4; the d",
            ),
            (
                Csv(label=["y", "z"], delimiter=";"),
                b'a;y;z\n"1;\n2";3;\n3;4\n',
                "have 3 cells, got 2 in line 4",
            ),
            (
                Csv(label="y", delimiter=r"\s+"),
                b'a  b y\n"1"\t2 0\n3  4 \n',
                r"have 3 cells, got 2 in line 3; the delimiter is '\\\\s\+'",
            ),
            (Csv(delimiter="::"), b"a::b\n\n1::2\n3\n", "2 cells, got 1 in line 4"),
            (Csv(delimiter="::"), b"a::b\n1::2::3\n", "Expected 2 fields in line 2"),
            (Csv(delimiter="::"), b"a::b\n1::2\n1::2::\n", "2 cells, got 3 in line 3"),
            (Csv(delimiter="§"), "a§b\n1§2\n3\n".encode(), "got 1 in line 3"),
            (Csv(), b"a,b\n1,2\n1,2,3\n", "cannot read .*/a: .*Expected 2 fields"),
            (Csv(), b"a,b\n1,2\n3,x\n", "column 'b' of .* got 'x' in row 1; leave"),
            (Csv(label="kind"), NAMED, "'kind' .* got 'cat, big' in row 0; .*classes="),
            (Csv(label="y"), b"a,y\n1,1\n1,1.5\n", "'y' .* 1.5 in row 1; for regress"),
            (Csv(label="y"), b"a,y\n1,inf\n", "'y' .* whole numbers, got inf in row 0"),
            (Csv(label="y"), b"a,y\n1,\n1,1.5\n", "'y' .* got 1.5 in row 1"),
            (Csv(label="y"), b"a,y\n1,1\n1,1_0\n", "numbers, got '1_0' in row 1"),
            (Csv(label="y"), b"a,y\n,1\n", "column 'a' .* got '' in row 0"),
            (
                Csv(label="kind", classes=["dog"]),
                NAMED,
                "'kind' of .* label 'cat, big' in row 0, .* the classes 'dog'",
            ),
            (Csv(), b"a\n\xff\n", "cannot read .*/a: UnicodeDecodeError"),
        ],
    )
    def test_what_is_wrong_is_named(self, loaded, loader, content, message):
        with pytest.raises(DataError, match=message):
            loaded(loader, content)

    @pytest.mark.parametrize(
        ("loader", "cells", "dtype"),
        [
            (Csv(label="y"), (b"1", b"", b" "), "float64"),
            (Csv(label="y"), (b"1", b"nan", b"NaN"), "float64"),
            (Csv(label="y", label_dtype="float32"), (b"1", b"", b"nan"), "float32"),
            (Csv(label="y", classes=["01", "1"]), (b"1", b"", b" "), "float64"),
        ],
        ids=["empty", "nan", "regression", "names"],
    )
    def test_labels_may_be_missing(self, loaded, looked, loader, cells, dtype):
        lines = b"".join(b"%d,%s\n" % (row, cell) for row, cell in enumerate(cells))

        x, y = loaded(loader, b"a,y\n" + lines)

        assert x[:, 0].tolist() == [0, 1, 2]
        np.testing.assert_array_equal(y, [1, np.nan, np.nan])
        assert y.dtype == dtype
        known = looked(loader, b"a,y\n" + lines).first_rows[1].dtype
        assert known == (dtype if dtype == "float32" else "int64")


COLUMNS = {
    "a": np.arange(5, dtype=np.int16),
    "b": np.arange(5) / 2,
    "y": np.array([0, 1, 2, 1, 0]),
    "kind": ["cat", "dog", "cat", "cat", "dog"],
    "dict": pa.array(["cat", "dog", "cat", "cat", "dog"]).dictionary_encode(),
}


class TestParquet:
    @pytest.mark.parametrize(
        ("loader", "x", "y"),
        [
            (Parquet(["a", "b"], "y"), [0, 0.0], [0, 1, 2, 1, 0]),
            (Parquet(["b"], "kind", classes=["dog", "cat"]), [0.0], [1, 0, 1, 1, 0]),
            (Parquet(["b"], "dict", classes=["dog", "cat"]), [0.0], [1, 0, 1, 1, 0]),
            (Parquet(["b", 0], ["y"]), [0.0, 0], [[0], [1], [2], [1], [0]]),
            (Parquet(["b"]), [0.0], None),
        ],
        ids=["numbers", "classes", "dictionary", "several", "no labels"],
    )
    def test_columns_are_loaded_and_looked_at(self, loaded, looked, loader, x, y):
        got_x, got_y = loaded(loader, parquet(COLUMNS))
        facts = looked(loader, parquet(COLUMNS))

        assert got_x.shape == (5, len(x))
        assert got_x[0].tolist() == x
        assert got_x.dtype == np.float32
        assert facts.rows == 5
        assert facts.first_rows[0].shape == (2, len(x))
        if y is None:
            assert got_y is facts.first_rows[1] is None
        else:
            assert got_y.tolist() == y
            assert facts.first_rows[1].dtype == got_y.dtype == np.int64
            assert facts.first_rows[1].shape[1:] == got_y.shape[1:]

    def test_labels_have_the_columns_dtype_or_the_one_given(self, loaded):
        content = parquet({"a": [1, 2], "y": [1.0, 2.0], "b": [True, False]})

        x, y = loaded(Parquet(label="y"), content)
        _, whole = loaded(Parquet(label="y", label_dtype="int64"), content)

        assert (x.tolist(), y.tolist()) == ([[1, 1], [2, 0]], [1, 2])
        assert (y.dtype, whole.dtype) == (np.float64, np.int64)

    @pytest.mark.parametrize(
        ("loader", "columns", "message"),
        [
            (Parquet(label="z"), {"a": [1]}, "label 'z' is not a column .*; it has 'a"),
            (Parquet(), {"a": [1, None]}, "column 'a' of .* has 1 missing values"),
            (Parquet(), {"a": [1], "t": ["x"]}, "'t' .* numbers, got 'x' in row 0; l"),
            (Parquet(), {"t": pa.array([1], pa.timestamp("s"))}, "'t' .* got Timest"),
            (
                Parquet(label="y", classes=["d"]),
                {"a": [1], "y": ["c"]},
                "'y' .* the label 'c' in row 0, which is not among the classes 'd'",
            ),
            (
                Parquet(label="y", classes={"d": 0}),
                {"a": [1], "y": ["c"]},
                "'c' in row 0, which is not among the classes 'd'",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, loaded, loader, columns, message):
        with pytest.raises(DataError, match=message):
            loaded(loader, parquet(columns))

    @pytest.mark.parametrize(
        ("loader", "labels"),
        [
            (Parquet(label="y"), [1, None, None]),
            (Parquet(label="y"), [1.0, None, np.nan]),
            (Parquet(label="y", classes=["a", "b"]), ["b", None, None]),
        ],
        ids=["integers", "floats", "names"],
    )
    def test_labels_may_be_missing(self, loaded, loader, labels):
        x, y = loaded(loader, parquet({"a": [1, 2, 3], "y": labels}))

        assert x[:, 0].tolist() == [1, 2, 3]
        np.testing.assert_array_equal(y, [1, np.nan, np.nan])

    def test_without_pyarrow_it_is_said_what_to_install(self, loaded, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

        with pytest.raises(OptionError, match=r"pyarrow; .*pip install 'daskdl\[dataf"):
            loaded(Parquet(), b"")


LARGE = {
    "npy": (Npy(), npy(np.zeros((50_000, 3)))),
    "safetensors": (Safetensors(y=None), tensors(x=np.zeros((50_000, 3)))),
    "parquet": (
        Parquet(),
        parquet({"x": np.random.default_rng(0).random(50_000)}, 9999),
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_of_a_large_file_only_the_header_is_read_to_look(looked, monkeypatch, kind):
    loader, content = LARGE[kind]
    read, sizes = storage.read, []

    def recorded(*arguments):
        content = read(*arguments)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(storage, "read", recorded)

    assert looked(loader, content).rows == 50_000
    assert 0 < sum(sizes) < len(content) / 5


@pytest.mark.parametrize("loader", [Npy(), Npz(), Csv(), Parquet(), Safetensors()])
@pytest.mark.parametrize(
    "content", [b"", b"\xffno such file at all", npy(X)[:20], npz(x=X, y=Y)[:-30]]
)
def test_a_damaged_file_is_named_when_it_is_loaded_and_looked_at(
    store, loaded, looked, loader, content
):
    for act in (loaded, looked):
        with pytest.raises(DataError, match=f"{store.url}/a"):
            act(loader, content)


@pytest.mark.parametrize(
    ("version", "precision"),
    [("2.1.0", "round_trip"), ("3.0.6", "round_trip"), ("3.1.1", None)],
)
def test_numbers_of_csv_are_exact_in_each_pandas(monkeypatch, version, precision):
    options = []

    def read_csv(file, *, float_precision=None, **others):
        options.append(float_precision)
        return pandas_read_csv(file, **others)

    pandas_read_csv = pd.read_csv
    monkeypatch.setattr(pd, "__version__", version)
    monkeypatch.setattr(pd, "read_csv", read_csv)
    file = io.BytesIO(b"a,b\n0.1,2\n")
    file.name = "x.csv"

    Csv(label="b")(file)

    assert {*options} == {precision}
