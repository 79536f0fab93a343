import re
from decimal import Decimal

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from daskdl.data.tables import check_columns, columns_of, is_frame
from daskdl.errors import DataError

DAY = pd.Timestamp("2024-01-01")
ARROW_DICTIONARY = pa.array(["b", "a", "b"]).dictionary_encode()

NUMBERS = {
    "int8": (pd.Series([1, 2], dtype="int8"), "int8", [1, 2]),
    "uint64": (pd.Series([1, 2], dtype="uint64"), "uint64", [1, 2]),
    "bool": (pd.Series([True, False]), "bool", [True, False]),
    "float16": (pd.Series([1, 2], dtype="float16"), "float16", [1, 2]),
    "infinite": (pd.Series([1, np.inf]), "float64", [1, np.inf]),
    "big-endian": (pd.Series(np.array([1, 2], ">i4")), "int32", [1, 2]),
    "Int64": (pd.Series([1, 2], dtype="Int64"), "int64", [1, 2]),
    "UInt8": (pd.Series([1, 2], dtype="UInt8"), "uint8", [1, 2]),
    "Float32": (pd.Series([1, 2], dtype="Float32"), "float32", [1, 2]),
    "boolean": (pd.Series([True, False], dtype="boolean"), "bool", [True, False]),
    "int32[pyarrow]": (pd.Series([1, 2], dtype="int32[pyarrow]"), "int32", [1, 2]),
    "float[pyarrow]": (pd.Series([1, 2], dtype="float[pyarrow]"), "float32", [1, 2]),
    "bool[pyarrow]": (pd.Series([True, False], dtype="bool[pyarrow]"), "bool",
                      [True, False]),
    "sparse": (pd.Series([0, 2.5], dtype="Sparse[float32]"), "float32", [0, 2.5]),
    "categories": (pd.Series([7, 5, 7], dtype="category"), "int64", [7, 5, 7]),
    "Int8-categories": (pd.Series([7, 5], dtype="Int8").astype("category"), "int8",
                        [7, 5]),
    "arrow": (pa.array([1, 2], pa.int16()), "int16", [1, 2]),
    "chunked": (pa.chunked_array([[1.5], [2.5]]), "float64", [1.5, 2.5]),
    "arrow-bool": (pa.array([True, False]), "bool", [True, False]),
    "arrow-half": (pa.array([1.0, 2.0], pa.float16()), "float16", [1, 2]),
    "arrow-dictionary": (pa.array([7, 5, 7]).dictionary_encode(), "int64", [7, 5, 7]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("series", "dtype", "values"), NUMBERS.values(), ids=NUMBERS.keys()
)
class TestNumbers:
    def test_keep_their_dtype_in_one_axis(self, series, dtype, values):
        array = columns_of(series, "y")

        assert type(array) is np.ndarray
        assert array.dtype == np.dtype(dtype)
        assert array.dtype.isnative
        assert array.tolist() == values

    def test_are_no_classes(self, series, dtype, values):
        assert check_columns(series, "y", label=True) is None

    def test_are_columns_of_a_frame(self, series, dtype, values):
        if isinstance(series, pd.Series):
            frame = pd.DataFrame({"a": series, "b": series})
        else:
            frame = pa.table({"a": series, "b": series})

        array = columns_of(frame, "X")

        assert array.dtype == np.dtype(dtype)
        assert array.tolist() == [[value, value] for value in values]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float32", "float32"], "float32"),
        (["int64", "float32"], "float64"),
        (["int8", "float32"], "float32"),
        (["int8", "int32"], "int32"),
        (["bool", "float32"], "float32"),
        (["bool", "bool"], "bool"),
        (["bool", "int64"], "int64"),
        (["Int8", "float[pyarrow]", "boolean"], "float32"),
    ],
    ids="-".join,
)
def test_columns_of_several_dtypes_take_the_one_numpy_finds(dtypes, expected):
    frame = pd.concat([pd.Series([1, 0], dtype=dtype) for dtype in dtypes], axis=1)

    array = columns_of(frame, "X")

    assert array.dtype == np.dtype(expected)
    assert array.tolist() == [[1] * len(dtypes), [0] * len(dtypes)]


def test_columns_of_one_name_stay_two():
    frame = pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"])

    assert columns_of(frame, "X").tolist() == [[1, 2], [3, 4]]


def test_rows_of_a_frame_lie_together():
    array = columns_of(pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}), "X")

    assert array.flags.c_contiguous


def test_a_frame_of_one_column_has_two_axes():
    assert columns_of(pd.DataFrame({"a": [1, 2]}), "y").shape == (2, 1)


def test_a_partition_may_be_empty():
    frame = pd.DataFrame({"a": [1], "b": [1.5]})[:0]

    assert columns_of(frame, "X").shape == (0, 2)


@pytest.mark.parametrize("make", [pa.table, pa.record_batch], ids=["table", "batch"])
def test_columns_of_pyarrow_need_no_index(make):
    frame = pa.Table.from_pandas(pd.DataFrame({"a": [1, 2]}, index=[7, 8]))
    columns = {name: frame[name].combine_chunks() for name in frame.column_names}

    array = columns_of(make(columns), "X")

    assert array[:, 0].tolist() == [1, 2]
    assert columns_of(frame, "X").shape == (2, 2)  # where it is a column, it is one


REFUSED = {
    "str": (pd.Series(["a"]), "column 'b' of X holds strings (str); encode them as "
            "numbers, for example with X['b'].astype('category').cat.codes"),
    "string": (pd.Series(["a"], dtype="string"), "holds strings (string)"),
    "string[pyarrow]": (pd.Series(["a"], dtype=pd.ArrowDtype(pa.string())),
                        "holds strings (string[pyarrow])"),
    "object": (pd.Series([1, "a"], dtype=object), "column 'b' of X holds other values "
               "(object); convert them to real numbers of at most 64 bits, for "
               "example with X['b'].astype('float32')"),
    "complex": (pd.Series([1j]), "holds other values (complex128)"),
    "longdouble": (pd.Series(np.ones(1, np.longdouble)), "other values (float128"),
    "decimal": (pd.Series([Decimal(1)], dtype=pd.ArrowDtype(pa.decimal128(5))),
                "holds other values (decimal128"),
    "list": (pd.Series([[1.0]], dtype=pd.ArrowDtype(pa.list_(pa.float32()))),
             "holds other values (list"),
    "datetime": (pd.Series([DAY]), "column 'b' of X holds dates (datetime64["),
    "time-zone": (pd.Series([DAY.tz_localize("UTC")]), "turn them into numbers, for "
                  "example with (X['b'] - X['b'].min()).dt.total_seconds()"),
    "date[pyarrow]": (pd.Series([DAY.date()], dtype=pd.ArrowDtype(pa.date32())),
                      "holds dates (date32"),
    "period": (pd.Series([pd.Period("2024")]), "holds dates (period"),
    "timedelta": (pd.Series([DAY - DAY]), "holds durations (timedelta64"),
    "categories": (pd.Series(["a", "c"], dtype="category"), "column 'b' of X is "
                   "categorical with the categories 'a', 'c'; encode it as numbers, "
                   "for example with X['b'].cat.codes"),
    "many": (pd.Series([*"abcdefg"], dtype="category"), "'d', 'e' and 2 more; encode"),
    "dates": (pd.Series([DAY], dtype="category"), "is categorical with the categories"),
    "null": (pd.Series([None], dtype=pd.ArrowDtype(pa.null())), "other values (null"),
}  # fmt: skip


@pytest.mark.parametrize(("series", "message"), REFUSED.values(), ids=REFUSED.keys())
class TestRefused:
    def test_by_name_and_with_the_remedy(self, series, message):
        with pytest.raises(DataError, match=re.escape(message)):
            columns_of(pd.DataFrame({"a": 1.0, "b": series}), "X")

    def test_before_there_is_a_row(self, series, message):
        with pytest.raises(DataError, match=re.escape(message)):
            check_columns(pd.DataFrame({"a": 1.0, "b": series})[:0], "X")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["a"]), "column 'b' of X holds strings (string[pyarrow])"),
        (pa.array([DAY]), "column 'b' of X holds dates (timestamp["),
        (pa.array(["a"]).dictionary_encode(), "categorical with the categories 'a'"),
        (pa.array([{"c": 1}]), "column 'b' of X holds other values (struct"),
    ],
    ids=["string", "timestamp", "dictionary", "struct"],
)
def test_columns_of_pyarrow_are_refused_by_name(column, message):
    with pytest.raises(DataError, match=re.escape(message)):
        columns_of(pa.table({"a": [1.0], "b": column}), "X")


def test_each_column_that_is_wrong_is_named():
    frame = pd.DataFrame({"a": ["x"], "b": [1], "c": [DAY]})

    with pytest.raises(DataError, match=r"column 'a' of X .*; column 'c' of X [^;]*"):
        check_columns(frame, "X")


def test_very_many_wrong_columns_are_counted():
    frame = pd.DataFrame({str(i): ["x"] for i in range(9)})

    with pytest.raises(DataError, match=r"column '4' of X .*; and 4 more columns$"):
        check_columns(frame, "X")


@pytest.mark.parametrize(
    "frame", [pd.DataFrame(), pa.table({})], ids=["pandas", "pyarrow"]
)
def test_a_frame_without_columns_is_refused(frame):
    with pytest.raises(DataError, match="X must have columns"):
        check_columns(frame, "X")


@pytest.mark.parametrize(
    "series",
    [
        pd.Series([1.5, np.nan, np.nan]),
        pd.Series([1, None, None], dtype="Int64"),
        pd.Series([True, None, None], dtype="boolean"),
        pd.Series([1.5, None, None], dtype="Float32"),
        pd.Series([1, None, None], dtype="int64[pyarrow]"),
        pd.Series([1, None, None], dtype="category"),
        pd.Series(pd.arrays.ArrowExtensionArray(pa.array([1.5, np.nan, np.nan]))),
    ],
    ids=lambda series: str(series.dtype),
)
def test_missing_values_are_refused_by_name(series):
    message = "column 'b' of X has 2 missing values; fill them in or drop the rows"

    with pytest.raises(DataError, match=re.escape(message)):
        columns_of(pd.DataFrame({"a": 1, "b": series}), "X")


def test_missing_values_of_pyarrow_are_refused_by_name():
    with pytest.raises(DataError, match="column 'b' of X has 1 missing values"):
        columns_of(pa.table({"b": [1, None]}), "X")


@pytest.mark.parametrize(
    "series",
    [pd.Series(["b", "a", "b"], dtype="category"), ARROW_DICTIONARY],
    ids=["pandas", "pyarrow"],
)
class TestNamedLabels:
    def test_become_numbers_in_the_order_of_the_categories(self, series):
        classes = check_columns(series, "y", label=True)

        codes = columns_of(series, "y", classes)

        assert [classes[code] for code in codes] == ["b", "a", "b"]

    def test_are_refused_where_they_are_no_labels(self, series):
        with pytest.raises(DataError, match="X is categorical"):
            columns_of(series, "X")

    def test_are_refused_as_one_column_of_several(self, series):
        frame = pa.table({"a": [1, 2, 3], "b": pa.array(series)})

        with pytest.raises(DataError, match="column 'b' of y is categorical"):
            check_columns(frame, "y", label=True)

    def test_must_have_the_same_categories_in_each_part(self, series):
        message = "'a', 'b', 'c' in another; give all parts the same ones"

        with pytest.raises(DataError, match=re.escape(message)):
            columns_of(series, "y", ("a", "b", "c"))


def test_names_in_another_order_are_other_names():
    series = pd.Series(pd.Categorical(["a"], categories=["b", "a"]))

    with pytest.raises(DataError, match="y has the categories 'b', 'a' in one part"):
        columns_of(series, "y", ("a", "b"))


def test_labels_that_are_numbers_in_one_part_only_are_refused():
    with pytest.raises(DataError, match="y has the categories none in one part"):
        columns_of(pd.Series([1]), "y", ("a", "b"))


@pytest.mark.parametrize(
    ("series", "classes", "dtype"),
    [
        (pd.Series([1.0, np.nan, np.nan]), None, "float64"),
        (pd.Series([1, None, None], dtype="Int64"), None, "float64"),
        (pd.Series([True, None, None], dtype="boolean"), None, "float64"),
        (pd.Series([1, None, None], dtype="Float32"), None, "float32"),
        (pd.Series([1, None, None], dtype="int64[pyarrow]"), None, "float64"),
        (pd.Series([1, None, None], dtype="category"), None, "float64"),
        (
            pd.Series(pd.Categorical(["b", None, None], ["a", "b"])),
            ("a", "b"),
            "float64",
        ),
        (
            pd.Series(pd.arrays.ArrowExtensionArray(pa.array([1.0, None, np.nan]))),
            None,
            "float64",
        ),
        (pa.array([1, None, None]), None, "float64"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_labels_may_be_missing(series, classes, dtype):
    labels = columns_of(series, "y", classes, label=True)

    np.testing.assert_array_equal(labels, [1, np.nan, np.nan])
    assert labels.dtype == dtype


def test_strings_as_labels_are_told_how_to_become_classes():
    message = "y holds strings (str); make them categories, for example with y.astype('"

    with pytest.raises(DataError, match=re.escape(message)):
        check_columns(pd.Series(["a"]), "y", label=True)


class TestOfADaskDataframe:
    def test_columns_are_refused_before_anything_is_computed(self):
        frame = dd.from_pandas(pd.DataFrame({"a": [1.0], "b": ["x"]}), npartitions=1)

        with pytest.raises(DataError, match="column 'b' of X holds strings"):
            check_columns(frame._meta, "X")

    def test_classes_are_known_where_the_categories_are(self):
        labels = pd.Series(["b", "a"], dtype="category")
        series = dd.from_pandas(labels, npartitions=2)

        assert check_columns(series._meta, "y", label=True) == ("a", "b")

    @pytest.mark.parametrize("label", [True, False])
    def test_categories_must_be_known(self, label):
        labels = pd.Series([1, 2], dtype="category")
        series = dd.from_pandas(labels, npartitions=1).cat.as_unknown()

        with pytest.raises(DataError, match=r"not known yet; use y.cat.as_known\(\)"):
            check_columns(series._meta, "y", label=label)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (pd.DataFrame({"a": [1]}), True),
        (pd.Series([1]), True),
        (pa.table({"a": [1]}), True),
        (pa.record_batch({"a": [1]}), True),
        (pa.array([1]), True),
        (pa.chunked_array([[1]]), True),
        (dd.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1), False),
        (np.zeros(2), False),
        ([1], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_frames_are_known_from_other_kinds(value, expected):
    assert is_frame(value) is expected
