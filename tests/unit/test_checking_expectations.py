import numpy as np
import pytest
import torch

from daskdl.data.validate import (
    Expectations,
    are_allowed,
    expectations_of,
    shown_labels,
)
from daskdl.errors import OptionError


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (None, {}),
        ((), {"x": ()}),
        ((3, None, -1), {"x": (3, None, None)}),
        ([3, 4], {"x": (3, 4)}),
        ({"x": (3,), "y": ()}, {"x": (3,), "y": ()}),
        ({"y": (2,)}, {"y": (2,)}),
        ({"image": (3,), "size": (2,)}, {"x['image']": (3,), "x['size']": (2,)}),
        (((3,), {"a": (4,)}), {"x[0]": (3,), "x[1]['a']": (4,)}),
        (
            {"x": {"a": (1,)}, "y": ((), (2,))},
            {"x['a']": (1,), "y[0]": (), "y[1]": (2,)},
        ),
    ],
    ids=str,
)
def test_shapes_go_by_the_names_of_arrays(shapes, expected):
    assert expectations_of(shapes, None, None).shapes == expected


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ("float32", {"x": np.dtype("float32")}),
        (torch.int64, {"x": np.dtype("int64")}),
        ({"x": None, "y": np.int8}, {"y": np.dtype("int8")}),
        (
            {"image": "u1", "size": ">f4"},
            {"x['image']": "uint8", "x['size']": "float32"},
        ),
    ],
    ids=str,
)
def test_dtypes_go_by_the_names_of_arrays(dtypes, expected):
    assert expectations_of(None, dtypes, None).dtypes == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (3, {"y": range(3)}),
        (range(1, 3), {"y": range(1, 3)}),
        ({1, 5}, {"y": frozenset({1, 5})}),
        ([1.5], {"y": frozenset({1.5})}),
        (np.array([7, 8]), {"y": frozenset({7, 8})}),
        ({"a": 2, "b": {4}}, {"y['a']": range(2), "y['b']": frozenset({4})}),
    ],
    ids=str,
)
def test_labels_go_by_the_names_of_arrays(labels, expected):
    assert expectations_of(None, None, labels).labels == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("3", None, None), "shapes must have the shape of a row .* got '3' for x"),
        (({"y": 3}, None, None), "shapes must have .* got 3 for y"),
        (((3, -2), None, None), r"got 3 for x\[0\]"),
        (((True,), None, None), r"got True for x\[0\]"),
        ((None, "number", None), "dtypes must be dtypes of numpy, got 'number' for x"),
        ((None, None, 0), "labels must be a number of classes, .* got 0"),
        ((None, None, True), "labels must be"),
        ((None, None, set()), "labels must be"),
        ((None, None, "cat"), "labels must be"),
        ((None, None, ["cat"]), "labels must be"),
    ],
    ids=str,
)
def test_what_cannot_be_expected_is_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        expectations_of(*arguments)


@pytest.mark.parametrize(
    ("expected", "labelled"),
    [
        (Expectations(), False),
        (Expectations(shapes={"x": ()}), False),
        (Expectations(shapes={"y": ()}), True),
        (Expectations(dtypes={"y[0]": np.dtype(int)}), True),
        (Expectations(labels={"y": range(2)}), True),
    ],
    ids=str,
)
def test_there_must_be_labels_if_anything_is_expected_of_them(expected, labelled):
    assert expected.labelled is labelled


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int64, np.uint64, np.float32, np.bool_]
)
@pytest.mark.parametrize("labels", [range(1, 300), range(299, 0, -1), frozenset({1})])
def test_labels_of_any_dtype_are_compared(dtype, labels):
    values = np.array([0, 1], dtype)

    assert are_allowed(values, labels).tolist() == [False, True]


def test_labels_between_those_of_a_range_are_not_allowed():
    values = np.array([[0.0, 0.5, 1.0], [2.0, np.nan, np.inf]])

    allowed = are_allowed(values, range(0, 4, 2))

    assert allowed.tolist() == [[True, False, False], [True, False, False]]


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (range(10), "0 to 9"),
        (range(0, 6, 2), "0, 2, 4"),
        (frozenset(range(20)), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."),
    ],
)
def test_labels_are_shown(labels, shown):
    assert shown_labels(labels) == shown
