import re
from decimal import Decimal

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.dataframe.utils import make_meta

from daskdl.data.tables import array_of, check_columns, columns_of
from daskdl.errors import DataError

DAY = pd.Timestamp("2024-01-01")
ARROW_DICTIONARY = pa.array(["b", "a", "b"]).dictionary_encode()

NUMBERS = {
    "int8": (pd.Series([1, 2], dtype="int8"), "int8", [1, 2]),
    "uint64": (pd.Series([1, 2], dtype="uint64"), "uint64", [1, 2]),
    "bool": (pd.Series([True, False]), "bool", [True, False]),
    "infinite": (pd.Series([1, np.inf]), "float64", [1, np.inf]),
    "big-endian": (pd.Series(np.array([1, 2], ">i4")), "int32", [1, 2]),
    "Int64": (pd.Series([1, 2], dtype="Int64"), "int64", [1, 2]),
    "Float32": (pd.Series([1, 2], dtype="Float32"), "float32", [1, 2]),
    "boolean": (pd.Series([True, False], dtype="boolean"), "bool", [True, False]),
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
    "arrow-dictionary": (pa.array([7, 5, 7]).dictionary_encode(), "int64", [7, 5, 7]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("series", "dtype", "values"), NUMBERS.values(), ids=NUMBERS.keys()
)
class TestNumbers:
    def test_keep_their_dtype_in_one_axis(self, series, dtype, values):
        array = columns_of(series, "y")

        assert type(array) is np.ndarray
        assert (array.dtype, array.dtype.isnative) == (np.dtype(dtype), True)
        assert array.tolist() == values
        assert check_columns(series, "y", label=True) is None  # no classes

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
        (["int64", "float32"], "float64"),
        (["int8", "float32"], "float32"),
        (["bool", "float32"], "float32"),
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


def test_a_frame_has_two_axes_whatever_its_columns_and_rows():
    twice = columns_of(pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"]), "X")

    assert twice.tolist() == [[1, 2], [3, 4]]
    assert twice.flags.c_contiguous
    assert columns_of(pd.DataFrame({"a": [1, 2]}), "y").shape == (2, 1)
    assert columns_of(pd.DataFrame({"a": [1], "b": [1.5]})[:0], "X").shape == (0, 2)


@pytest.mark.parametrize(
    "make", [pa.Table.from_pydict, pa.RecordBatch.from_pydict], ids=["table", "batch"]
)
def test_columns_of_pyarrow_need_no_index(make):
    frame = pa.Table.from_pandas(pd.DataFrame({"a": [1, 2]}, index=[7, 8]))
    columns = {name: frame[name].combine_chunks() for name in frame.column_names}

    array = columns_of(make(columns), "X")

    assert array[:, 0].tolist() == [1, 2]
    assert columns_of(frame, "X").shape == (2, 2)  # where it is a column, it is one


REFUSED = {
    "str": (pd.Series(["a"]), "encode them as numbers, with "
            "X['b'].astype(pandas.CategoricalDtype([...])).cat.codes and the same "
            "categories for all data"),
    "string": (pd.Series(["a"], dtype="string"), "column 'b' of X holds strings "
               "(string); encode them as numbers"),
    "string[pyarrow]": (pd.Series(["a"], dtype=pd.ArrowDtype(pa.string())),
                        "holds strings (string[pyarrow])"),
    "object": (pd.Series([1, "a"], dtype=object), "column 'b' of X holds objects "
               "(object); if they are strings, encode them as numbers, with "
               "X['b'].astype(pandas.CategoricalDtype([...])).cat.codes and the same "
               "categories for all data; otherwise convert them to real numbers of at "
               "most 64 bits, for example with X['b'].astype('float32')"),
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
                   "with X['b'].astype(pandas.CategoricalDtype([...])).cat.codes"),
    "many": (pd.Series([*"abcdefg"], dtype="category"), "'d', 'e' and 2 more; encode"),
    "dates": (pd.Series([DAY], dtype="category"), "is categorical with the categories"),
    "null": (pd.Series([None], dtype=pd.ArrowDtype(pa.null())), "other values (null"),
}  # fmt: skip


@pytest.mark.parametrize(("series", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_other_columns_are_refused_by_name_with_rows_or_without(series, message):
    frame = pd.DataFrame({"a": 1.0, "b": series})

    with pytest.raises(DataError, match=re.escape(message)):
        columns_of(frame, "X")
    with pytest.raises(DataError, match=re.escape(message)):
        check_columns(frame[:0], "X")


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


def test_wrong_columns_are_named_the_first_five_of_them():
    few = pd.DataFrame({"a": ["x"], "b": [1], "c": [DAY]})
    many = pd.DataFrame({str(i): ["x"] for i in range(9)})

    with pytest.raises(DataError, match=r"column 'a' of X .*; column 'c' of X [^;]*"):
        check_columns(few, "X")
    with pytest.raises(DataError, match=r"column '4' of X .*; and 4 more columns$"):
        check_columns(many, "X")


@pytest.mark.parametrize(
    "frame", [pd.DataFrame(), pa.table({})], ids=["pandas", "pyarrow"]
)
def test_a_frame_without_columns_is_refused(frame):
    with pytest.raises(DataError, match="X must have columns"):
        check_columns(frame, "X")


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
        message = (
            "the labels before it 'a', 'b', 'c'; give all parts one dtype, with "
            "y.astype(pandas.CategoricalDtype([...]))"
        )

        with pytest.raises(DataError, match=re.escape(message)):
            columns_of(series, "y", ("a", "b", "c"))


@pytest.mark.parametrize(
    ("series", "categories"),
    [
        (pd.Series(pd.Categorical(["a"], categories=["b", "a"])), "'b', 'a'"),
        (pd.Series([1]), "none"),
    ],
    ids=["another order", "numbers"],
)
def test_names_of_labels_must_be_alike_in_all_parts(series, categories):
    with pytest.raises(DataError, match=f"y has the categories {categories}, and"):
        columns_of(series, "y", ("a", "b"))


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
def test_missing_values_become_nan_in_labels_and_are_refused_in_x(
    series, classes, dtype
):
    labels = columns_of(series, "y", classes, label=True)

    np.testing.assert_array_equal(labels, [1, np.nan, np.nan])
    assert labels.dtype == dtype
    if classes is None:
        arrow = not isinstance(series, pd.Series)
        frame = (pa.table if arrow else pd.DataFrame)({"b": series})
        message = "column 'b' of X has 2 missing values; fill them in or drop the rows"
        with pytest.raises(DataError, match=re.escape(message)):
            columns_of(frame, "X")


@pytest.mark.parametrize("dtype", ["string", object])
def test_strings_as_labels_are_told_how_to_become_classes(dtype):
    message = "make them categories, with y.astype('category').cat.as_known()"

    with pytest.raises(DataError, match=re.escape(message)):
        check_columns(pd.Series(["a"], dtype=dtype), "y", label=True)


@pytest.mark.parametrize("label", [True, False])
def test_categories_of_a_dask_dataframe_must_be_known(label):
    labels = dd.from_pandas(pd.Series(["b", "a"], dtype="category"), npartitions=1)
    known, unknown = map(make_meta, (labels, labels.cat.as_unknown()))

    assert check_columns(known, "y", label=True) == ("a", "b")
    with pytest.raises(DataError, match=r"not known yet; use y.cat.as_known\(\)"):
        check_columns(unknown, "y", label=label)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (pd.DataFrame({"a": [1]}), True),
        (pd.Series([1]), True),
        (pa.table({"a": [1]}), True),
        (pa.RecordBatch.from_pydict({"a": [1]}), True),
        (pa.array([1]), True),
        (pa.chunked_array([[1]]), True),
        (dd.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1), False),
        (np.zeros(2), False),
        ([1], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_frames_become_arrays_and_other_kinds_stay(value, expected):
    assert (array_of(value, "X") is not value) is expected
