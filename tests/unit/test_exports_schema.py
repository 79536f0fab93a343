"""Structures, shapes and dtypes survive; what cannot be exported is refused by name."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch

from daskdl.data.batch_files import Schema, as_rows
from daskdl.errors import DataError


class Two(NamedTuple):
    left: np.ndarray
    right: np.ndarray


A, B = np.arange(6.0).reshape(3, 2), np.array([True, False, True])

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]

TREES = {
    "array": (A, None),
    "labels": (A, B),
    "tuple": ((A, B), B),
    "dict": ({"a": A, 7: B}, {"out": A}),
    "nested": ({"a": (A, {"b": B})}, (A,)),
}


def shown(tree):
    """A tree whose arrays are compared by their values."""
    if isinstance(tree, dict):
        return {key: shown(child) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(shown(child) for child in tree)
    return None if tree is None else (str(tree.dtype), tree.tolist())


@pytest.mark.parametrize("kind", TREES)
def test_rows_come_back_from_records_as_they_were(kind):
    schema = Schema.of(TREES[kind])

    rows = schema.rows(schema.records(TREES[kind], np.arange(3)))

    assert shown(rows) == shown(TREES[kind])


@pytest.mark.parametrize("kind", TREES)
def test_a_schema_comes_back_from_json(kind):
    schema = Schema.of(TREES[kind])

    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))

    assert again == schema


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
    ],
)
def test_every_dtype_is_kept(dtype):
    rows = np.array([[1], [0]], dtype), np.array([0, 1], dtype)
    schema = Schema.from_json(Schema.of(rows).to_json())

    again = schema.rows(schema.records(rows, np.arange(2)))

    assert shown(again) == shown(rows)


def test_records_are_in_the_order_asked_for():
    schema = Schema.of((A, B))

    x, y = schema.rows(schema.records((A, B), np.array([2, 0])))

    assert (x.tolist(), y.tolist()) == ([[4, 5], [0, 1]], [True, True])


def test_a_named_tuple_becomes_a_plain_one():
    schema = Schema.of((Two(A, B), None))

    x, _ = schema.rows(schema.records((Two(A, B), None), np.arange(3)))

    assert type(x) is tuple


def test_big_endian_numbers_are_the_same_numbers():
    rows = as_rows((A.astype(">f8"), None))

    schema = Schema.of(rows)

    assert schema.rows(schema.records(rows, np.arange(3)))[0].tolist() == A.tolist()


def test_tensors_become_arrays():
    x, y = as_rows(({"a": torch.tensor([0.5], dtype=torch.bfloat16)}, None))

    assert (x["a"].tolist(), x["a"].dtype, y) == ([0.5], "float32", None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((A, B[:2]), "all arrays must have as many rows, but x has 3, y has 2"),
        (({"a": A.astype(object)}, None), r"x\['a'\] must hold real numbers"),
        ((np.zeros((2, 0)), None), r"x must not be empty, got the shape \(2, 0\)"),
        (({None: A}, None), "keys of dicts must be strings or whole numbers"),
    ],
    ids=["lengths", "dtype", "empty", "key"],
)
def test_what_cannot_be_exported_is_refused(rows, message):
    with pytest.raises(DataError, match=message):
        Schema.of(rows)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((A.astype("float32"), B), r"x of part 3 is float32 .*before float64"),
        ((A[:, :1], B), r"x of part 3 is .*\(rows, 1\), .*before .*\(rows, 2\)"),
        ((A, None), "y of part 3 is missing"),
        (((A,), B), r"x(\[0\])? of part 3 is"),
    ],
    ids=["dtype", "shape", "labels", "structure"],
)
def test_rows_that_look_different_are_refused(other, message):
    schema = Schema.of((A, B))

    with pytest.raises(DataError, match=message):
        schema.check(Schema.of(other), "part 3")


def test_a_dict_is_not_a_tuple_of_the_same_names():
    schema = Schema.of(({0: A}, None))

    with pytest.raises(DataError, match=r"x and y of part 3 are \['tuple'"):
        schema.check(Schema.of(((A,), None)), "part 3")


def test_a_record_is_refused_if_its_outline_has_other_arrays():
    content = Schema.of(((A, B), None)).to_json() | {"x": "array"}

    with pytest.raises(ValueError, match=r"the outlines are of"):
        Schema.from_json(content)
