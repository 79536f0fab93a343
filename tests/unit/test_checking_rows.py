import numpy as np
import pytest

from daskdl.data.validate import Expectations, Wrong, examine, expectations_of

NONE = Expectations()
X = np.zeros((4, 2), np.float32)
Y = np.array([0, 1, 2, 3])


def expected(shapes=None, dtypes=None, labels=None):
    return expectations_of(shapes, dtypes, labels)


def with_value(value, *places, like=X):
    changed = like.astype(float)
    for place in places:
        changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("rows", "expectations"),
    [
        ((X, Y), NONE),
        ((X, None), NONE),
        ((X, Y), expected({"x": (2,), "y": ()}, {"x": "float32", "y": int}, 4)),
        ((X, Y), expected((None,))),
        ((X, Y.astype(float)), expected(labels={0, 1, 2, 3})),
        (
            ({"a": X, "b": Y}, (Y, Y)),
            expected({"a": (2,), "b": ()}, None, (4, range(4))),
        ),
        ((X > 0, Y > 0), expected(labels=2)),
    ],
    ids=str,
)
def test_nothing_is_wrong_with_what_is_as_expected(rows, expectations):
    assert examine(rows, expectations) == (4, {}, [])


@pytest.mark.parametrize("y", [None, Y[:0]], ids=["none", "empty"])
def test_nothing_is_wrong_where_there_is_nothing(y):
    assert examine((X[:0], y), expected((2,), None, 4)) == (0, {}, [])


@pytest.mark.parametrize(
    ("rows", "expectations", "message"),
    [
        (
            (X, Y),
            expected((3, None)),
            "rows of x have the shape (2,), expected (3, any)",
        ),
        (
            (X, X),
            expected({"y": ()}),
            "rows of y have the shape (2,), expected ()",
        ),
        (({"a": X}, Y), expected({"b": (2,)}), "it has x['a'], expected x['b']"),
        ((X, {"a": Y}), expected({"y": ()}), "it has y['a'], expected y"),
        (
            (X, Y[:3]),
            NONE,
            "it has rows of different numbers: 4 of x, 3 of y",
        ),
        (
            ((X, Y[:3]), Y),
            NONE,
            "it has rows of different numbers: 4 of x[0], 3 of x[1], 4 of y",
        ),
        ((np.float32(1) * np.ones(()), Y), NONE, "x has no rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_shape_counts_once(rows, expectations, message):
    found = examine(rows, expectations)

    assert found.counts == {"wrong shape": 1}
    assert found.wrong == [Wrong(None, "wrong shape", message)]


@pytest.mark.parametrize(
    ("x", "expectations", "message"),
    [
        (X, expected(None, "float64"), "x is float32, expected float64"),
        (np.array(["a"] * 4), NONE, "x is <U1, expected real numbers"),
        (np.array([{}] * 4), NONE, "x is object, expected real numbers"),
        (X.astype(complex), NONE, "x is complex128, expected real numbers"),
    ],
    ids=["other", "text", "objects", "complex"],
)
def test_a_wrong_dtype_counts_once(x, expectations, message):
    found = examine((x, Y), expectations)

    assert found.counts == {"wrong dtype": 1}
    assert found.wrong == [Wrong(None, "wrong dtype", message)]


def test_the_byte_order_of_a_dtype_does_not_matter():
    found = examine((X.astype(">f4"), Y), expected(None, "float32"))

    assert found.counts == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_with_values_that_are_not_finite_are_found(value):
    x = with_value(value, (1, 0), (1, 1), (3, 1))

    found = examine((x, Y), NONE, start=10)

    assert found.counts == {"non-finite": 2}
    assert found.wrong == [
        Wrong(11, "non-finite", f"x is {value}"),
        Wrong(13, "non-finite", f"x is {value}"),
    ]


def test_a_row_counts_once_of_whatever_array():
    x = {"a": with_value(np.nan, (1, 0)), "b": with_value(np.inf, (1, 0), (2, 0))}

    found = examine((x, Y), NONE)

    assert found.counts == {"non-finite": 2}
    assert found.wrong == [
        Wrong(1, "non-finite", "x['a'] is nan"),
        Wrong(2, "non-finite", "x['b'] is inf"),
    ]


@pytest.mark.parametrize("labels", [None, 4])
def test_labels_that_are_nan_are_missing_and_not_invalid(labels):
    found = examine((X, with_value(np.nan, 2, like=Y)), expected(labels=labels))

    assert found.counts == {"missing label": 1}
    assert found.wrong == [Wrong(2, "missing label", "y is nan")]


@pytest.mark.parametrize(
    "expectations", [{"labels": 4}, {"shapes": {"y": ()}}], ids=str
)
def test_labels_that_are_not_there_are_missing_from_every_row(expectations):
    found = examine((X, None), expected(**expectations))

    assert found.counts == {"missing label": 4}
    assert found.wrong == [Wrong(None, "missing label", "it has no labels")]


@pytest.mark.parametrize(
    ("labels", "rows", "remedy"),
    [
        (2, [2, 3], "0 to 1"),
        (range(1, 4), [0], "1 to 3"),
        ({0, 3}, [1, 2], "0, 3"),
    ],
)
def test_labels_that_are_not_allowed_are_found(labels, rows, remedy):
    found = examine((X, Y), expected(labels=labels))

    assert found.counts == {"invalid label": len(rows)}
    assert found.wrong == [
        Wrong(row, "invalid label", f"y is {row}, allowed are {remedy}") for row in rows
    ]


def test_infinite_labels_are_invalid_whatever_is_expected():
    found = examine((X, with_value(np.inf, 1, like=Y)), NONE)

    assert found.wrong == [Wrong(1, "invalid label", "y is inf")]


def test_several_outputs_have_labels_of_their_own():
    found = examine((X, {"a": Y, "b": Y}), expected(labels={"a": 3, "b": {0, 2, 3}}))

    assert {(one.row, one.message[:6]) for one in found.wrong} == {
        (3, "y['a']"),
        (1, "y['b']"),
    }


def test_one_set_of_labels_is_for_all_outputs():
    found = examine((X, (Y, Y[::-1])), expected(labels=3))

    assert sorted(one.row for one in found.wrong) == [0, 3]


def test_labels_in_the_shape_of_an_image_are_found_with_the_first_wrong_one():
    masks = np.zeros((4, 2, 2), int)
    masks[2] = [[0, 7], [8, 1]]

    found = examine((X, masks), expected(labels=2))

    assert found.wrong == [Wrong(2, "invalid label", "y is 7, allowed are 0 to 1")]


def test_many_rows_are_counted_and_the_first_hundred_kept():
    x = np.full((250, 1), np.nan)

    found = examine((x, None), NONE)

    assert found.counts == {"non-finite": 250}
    assert [one.row for one in found.wrong] == list(range(100))
