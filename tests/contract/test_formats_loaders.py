"""Who gets what, what may come out, and what a file is called when it is wrong."""

import uuid
import zipfile

import numpy as np
import pytest
import torch

from daskdl.data.formats import (
    Format,
    FromBytes,
    FromPath,
    Npy,
    OneExample,
    loader_of,
    reading,
)
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError

X = np.zeros((3, 2))
Y = np.arange(3)


@pytest.fixture
def store():
    made = Store(f"memory://{uuid.uuid4().hex}")
    made.write("a.bin", b"ab")
    return made


def given_back(result):
    """A loader of a function that returns this."""
    return FromBytes(lambda _: result)


def test_a_function_gets_the_local_path(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    seen = []

    for url in (str(tmp_path), f"file://{tmp_path}"):
        loader_of(lambda path: seen.append(path) or X).load(Store(url), "a")

    assert seen == [f"{tmp_path}/a"] * 2


def test_a_function_gets_the_url_of_what_is_not_local(store):
    seen = []

    loader_of(lambda path: seen.append(path) or X).load(store, "a.bin")

    assert seen == [f"{store.url}/a.bin"]


def test_a_function_in_from_bytes_gets_the_bytes(store):
    seen = []

    FromBytes(lambda content: seen.append(content) or X).load(store, "a.bin")

    assert seen == [b"ab"]


def test_a_format_gets_the_bytes_and_the_url(store):
    seen = []

    class Own(Format):
        def __call__(self, content, name):
            seen.append((content, name))
            return X, None

    facts = Own().look(store, "a.bin")

    assert seen == [(b"ab", f"{store.url}/a.bin")]
    assert facts.rows == 3


@pytest.mark.parametrize(
    ("result", "x", "y"),
    [
        ((X, Y), X, Y),
        ((X, None), X, None),
        (X, X, None),
        ((torch.zeros(3, 2, dtype=torch.float64), torch.arange(3)), X, Y),
        ((X.astype(">f8"), Y), X, Y),
    ],
    ids=["pair", "no labels", "alone", "tensors", "byte order"],
)
def test_results_become_numpy(store, result, x, y):
    got_x, got_y = given_back(result).load(store, "a.bin")

    np.testing.assert_array_equal(got_x, x)
    assert got_x.dtype == np.float64
    assert got_x.dtype.isnative
    if y is None:
        assert got_y is None
    else:
        np.testing.assert_array_equal(got_y, y)


def test_results_may_be_trees(store):
    x, y = given_back(({"a": X, "b": (X, X)}, (Y, Y))).load(store, "a.bin")

    assert x["b"][1].shape == (3, 2)
    assert y[1].tolist() == [0, 1, 2]


def test_labels_may_be_missing(store):
    y = np.array([0.0, np.nan, 1.0])

    np.testing.assert_array_equal(given_back((X, y)).load(store, "a.bin")[1], y)


def test_no_rows_are_a_result(store):
    assert given_back((X[:0], Y[:0])).look(store, "a.bin").rows == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((X, Y[:2]), "all arrays of {} must have as many rows, but x has 3, y has 2"),
        (({"a": X, "b": X[1:]}, Y), r"but x\['a'\] has 3, x\['b'\] has 2, y has 3"),
        (([1.0, 2.0], Y), "x of {} must be a numpy array, .* got a list"),
        ((np.array(["a", "b", "c"]), Y), "x of {} must hold real numbers"),
        ((np.float64(3), Y), "x of {} must be a numpy array"),
        ((np.array(3.0), Y), "x of {} must have examples along its first axis"),
        (((), Y), r"x of {} must not be empty, got \(\)"),
        (None, "x of {} must be a numpy array, .* got None"),
        ((X, Y, Y), "has 3"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_named_with_the_file(store, result, message):
    url = f"{store.url}/a.bin"
    if isinstance(result, tuple) and len(result) == 3:  # three inputs, no labels
        assert given_back(result).load(store, "a.bin")[1] is None
        return

    with pytest.raises(DataError, match=message.format(url)):
        given_back(result).load(store, "a.bin")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        OSError("bad"),
        EOFError("bad"),
        KeyError("bad"),
        SyntaxError("bad"),
        zipfile.BadZipFile("bad"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", [FromPath, FromBytes])
def test_a_damaged_file_is_named(store, kind, error):
    def fail(_):
        raise error

    message = f"cannot read {store.url}/a.bin: {type(error).__name__}: .*bad"
    with pytest.raises(DataError, match=message) as raised:
        kind(fail).load(store, "a.bin")

    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [TypeError, AttributeError, ZeroDivisionError])
def test_a_mistake_in_a_loader_comes_out_as_it_is(store, error):
    def fail(_):
        raise error("mine")

    with pytest.raises(error, match=r"^mine$"):
        FromBytes(fail).load(store, "a.bin")


def test_an_error_that_says_all_is_not_wrapped():
    with pytest.raises(DataError, match=r"^said$"), reading("x"):
        raise DataError("said")


def test_one_example_has_one_row(store):
    load = OneExample(FromBytes(lambda _: ({"a": X, "n": 3.5}, 7)), classes=["c"])

    x, y = load.load(store, "a.bin")

    assert (x["a"].shape, x["n"].tolist(), y.tolist()) == ((1, 3, 2), [3.5], [7])
    assert load.single
    assert load.classes == ["c"]


def test_one_example_takes_tensors_and_a_path(store):
    x, y = OneExample(lambda path: torch.zeros(2)).load(store, "a.bin")

    assert (x.shape, y) == ((1, 2), None)


def test_one_example_that_is_no_array_is_refused(store):
    with pytest.raises(DataError, match=rf"x of {store.url}/a\.bin must be a numpy"):
        OneExample(lambda path: "text").load(store, "a.bin")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Npy, r"got the class Npy; write Npy\(...\)"),
        ("csv", "loader must be a function .* got 'csv'"),
    ],
)
def test_what_is_no_loader_is_refused(given, message):
    with pytest.raises(OptionError, match=message):
        loader_of(given)


def test_a_format_is_not_one_example():
    with pytest.raises(OptionError, match=r"OneExample needs a function .* got Npy\("):
        OneExample(Npy())
