"""Tables as text: which columns, which numbers, and the line where it is wrong."""

import numpy as np
import pytest

from daskdl.data.storage import Store
from daskdl.data.tabular_formats import Csv
from daskdl.errors import DataError

TABLE = b"age,size,kind\n1,2.5,0\n3,4.5,1\n\n5,6.5,2\n"
NAMED = b'size,kind\n1,"cat, big"\n2,dog\n3,"cat, big"\n'


def loaded(loader, content):
    return loader(content, "s3://b/a.csv")


@pytest.mark.parametrize("label", ["kind", 2, -1])
def test_one_column_is_y_and_the_others_are_x(label):
    x, y = loaded(Csv(label), TABLE)

    assert x.tolist() == [[1, 2.5], [3, 4.5], [5, 6.5]]
    assert y.tolist() == [0, 1, 2]
    assert (x.dtype, y.dtype) == (np.float32, np.int64)


def test_columns_are_chosen_and_ordered():
    x, y = loaded(Csv(["size", 0], features=["kind"], label_dtype="float64"), TABLE)

    assert x.tolist() == [[0], [1], [2]]
    assert y.tolist() == [[2.5, 1], [4.5, 3], [6.5, 5]]
    assert y.dtype == np.float64


def test_without_a_label_all_is_x():
    x, y = loaded(Csv(dtype="float64"), TABLE)

    assert (x.shape, x.dtype, y) == ((3, 3), np.float64, None)


def test_without_a_header_columns_are_numbers():
    x, y = loaded(Csv(1, header=False, delimiter=";"), b"1;2\n3;4\n")

    assert (x.tolist(), y.tolist()) == ([[1], [3]], [2, 4])


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffy,a\n2,1\n".encode(),
        b"a,y\r\n1,2\r\n",
        b'"a"," y"\n"1"," 2"\n',
        b"\n\na,y\n1,2",
        b"a,y\n1,2.0\n",
    ],
    ids=["byte order mark", "line ends", "quotes and blanks", "empty lines", "float"],
)
def test_how_tables_are_written_does_not_matter(content):
    x, y = loaded(Csv("y"), content)

    assert (x.tolist(), y.tolist(), y.dtype) == ([[1]], [2], np.int64)


def test_labels_that_are_names_need_classes():
    x, y = loaded(Csv("kind", classes=["dog", "cat, big"]), NAMED)

    assert (x.tolist(), y.tolist()) == ([[1], [2], [3]], [1, 0, 1])


def test_a_header_alone_has_no_rows():
    x, y = loaded(Csv("y"), b"a,b,y\n")

    assert (x.shape, y.shape, y.dtype) == ((0, 2), (0,), np.int64)


def test_nan_is_a_number():
    x, _ = loaded(Csv(), b"a,b\nnan,inf\n")

    assert np.isnan(x[0, 0])
    assert np.isinf(x[0, 1])


@pytest.mark.parametrize(
    ("loader", "content", "message"),
    [
        (
            Csv("colour"),
            TABLE,
            r"label 'colour' is not a column of s3://b/a\.csv; it has 'age', 'size', "
            "'kind'",
        ),
        (Csv(3), TABLE, "label 3 is not a column of .*; it has 'age'"),
        (Csv("y", features=["b"]), b"a,y\n1,2\n", "feature 'b' is not a column"),
        (Csv("a"), b"a,a\n1,2\n", "label 'a' is the name of several columns"),
        (Csv("a", features=["a"]), b"a,b\n1,2\n", "label 'a' .* meant once, and not"),
        (Csv(["a", "a"]), b"a,b\n1,2\n", "label 'a' .* must be meant once"),
        (Csv("a"), b"a\n1\n", "a.csv has no columns for x, only 'a'"),
        (Csv(), b"", "a.csv must have rows, got an empty file"),
        (Csv(), b"a,b\n1,2\n\n3\n", "must have 2 cells, got 1 in line 4"),
        (Csv("a"), b"a,b\n1,2,3\n", "must have 2 cells, got 3 in line 2; the delim"),
        (Csv(), b"a,b\n1,2\n3,x\n", "column 'b' of s3.* got 'x' in line 3; leave"),
        (Csv("a"), b"a,b\n1,2\n3,\n", "column 'b' .* must hold numbers, got '' in"),
        (Csv("kind"), NAMED, "column 'kind' .* got 'cat, big' in line 2; .*classes="),
        (Csv("y"), b"a,y\n1,1\n1,1.5\n", "label 'y' .* got 1.5 in row 1; for regress"),
        (Csv("y"), b"a,y\n1,inf\n", "label 'y' .* whole numbers, got inf in row 0"),
        (Csv("y"), b"a,y\n1,\n1,1.5\n", "label 'y' .* got 1.5 in row 1; for regress"),
        (Csv("y"), b"a,y\n1,\n1,x\n", "column 'y' of s3.* got 'x' in line 3; leave"),
        (Csv("y"), b"a,y\n1,\n1,1_0\n", "could not convert string '1_0'"),
        (Csv("y"), b"a,y\n,1\n", "column 'a' .* must hold numbers, got '' in line 2"),
        (
            Csv("kind", classes=["dog"]),
            NAMED,
            "column 'kind' of .* label 'cat, big' in row 0, .* the classes 'dog'",
        ),
        (Csv(), b"a\n\xff\n", "cannot read s3://b/a.csv: UnicodeDecodeError"),
    ],
)
def test_what_is_wrong_is_named(loader, content, message):
    with pytest.raises(DataError, match=message):
        loaded(loader, content)


@pytest.mark.parametrize(
    ("loader", "cells", "dtype"),
    [
        (Csv("y"), (b"1", b"", b" "), "float64"),
        (Csv("y"), (b"1", b"nan", b"NaN"), "float64"),
        (Csv("y", label_dtype="float32"), (b"1", b"", b"nan"), "float32"),
        (Csv("y", classes=["a", "b"]), (b"b", b"", b" "), "float64"),
    ],
    ids=["empty", "nan", "regression", "names"],
)
def test_labels_may_be_missing(loader, cells, dtype):
    lines = b"".join(b"%d,%s\n" % (row, cell) for row, cell in enumerate(cells))

    x, y = loaded(loader, b"a,y\n" + lines)

    assert x[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(y, [1, np.nan, np.nan])
    assert y.dtype == dtype


@pytest.mark.parametrize("loader", [Csv("y"), Csv("y", classes=["a", "1"])])
def test_a_file_with_missing_labels_is_known_to_have_classes(loader):
    store = Store("memory://daskdl-csv-gaps")
    store.write("a.csv", b"a,y\n1,1\n2,\n3,1\n")

    rows, (_, y) = loader.look(store, "a.csv")

    assert rows == 3
    assert y.dtype == np.int64


def test_a_number_that_only_python_reads_is_named():
    with pytest.raises(DataError, match=r"a\.csv: could not convert string '1_0'"):
        loaded(Csv(), b"a\n1_0\n")


def test_of_many_columns_the_first_are_named():
    content = ",".join(f"c{i}" for i in range(30)).encode() + b"\n"

    with pytest.raises(DataError, match=r"'c0', .* 'c9' and 20 more$"):
        loaded(Csv("y"), content)
