"""Files of arrays: .npy, .npz and safetensors."""

import io
import uuid

import numpy as np
import pytest
import safetensors.torch
import torch

from daskdl.data.formats import Npy, Npz, Safetensors
from daskdl.data.storage import Store
from daskdl.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)


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


@pytest.fixture
def read(monkeypatch):
    """What was read of which file, in order."""
    reads = []
    original = Store.read

    def recorded(self, name, start=None, stop=None):
        content = original(self, name, start, stop)
        reads.append((name, len(content)))
        return content

    monkeypatch.setattr(Store, "read", recorded)
    return reads


@pytest.fixture
def store():
    return Store(f"memory://{uuid.uuid4().hex}")


def test_the_array_of_an_npy_file_is_x():
    x, y = Npy()(npy(X), "a.npy")

    np.testing.assert_array_equal(x, X)
    assert (x.dtype, y) == (np.float32, None)


@pytest.mark.parametrize(("column", "place"), [(0, 0), (-1, 2)])
def test_a_column_of_an_npy_file_is_y(column, place):
    table = np.insert(X, place, 100 + np.arange(6), axis=1)

    x, y = Npy(label_column=column)(npy(table), "a.npy")

    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, 100 + np.arange(6))


@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3)])
def test_a_column_that_is_not_there_is_refused(shape):
    with pytest.raises(DataError, match=rf"a\.npy must be a table .* 2 .*{shape[0]}"):
        Npy(label_column=2)(npy(np.zeros(shape)), "a.npy")


@pytest.mark.parametrize(
    "content",
    [b"", b"no array at all", npy(X)[:-4], npy(X)[:20]],
    ids=["empty", "other", "cut", "cut in the header"],
)
def test_a_damaged_npy_file_is_named(content):
    with pytest.raises(DataError, match=r"cannot read s3://x/a\.npy: "):
        Npy()(content, "s3://x/a.npy")


def test_objects_are_not_unpickled():
    content = npy(np.array([{}, {}]), allow_pickle=True)

    with pytest.raises(DataError, match=r"cannot read a\.npy: .*allow_pickle"):
        Npy()(content, "a.npy")


@pytest.mark.parametrize("dtype", ["f4", ">i2", "?"])
def test_the_header_of_an_npy_file_is_enough_to_look(store, read, dtype):
    store.write("a.npy", npy(np.zeros((5000, 2, 3), dtype)))

    facts = Npy().look(store, "a.npy")

    assert facts.rows == 5000
    assert facts.first[0].shape == (2, 2, 3)
    assert facts.first[0].dtype == np.dtype(dtype).newbyteorder("=")
    assert facts.first[1] is None
    assert read == [("a.npy", 4096)]


def test_no_more_rows_are_shown_than_there_are(store):
    store.write("a.npy", npy(X[:1]))

    assert Npy().look(store, "a.npy").first[0].shape == (1, 2)


def test_looking_tells_columns_apart(store):
    store.write("a.npy", npy(X))

    x, y = Npy(label_column=1).look(store, "a.npy").first

    assert (x.shape, y.shape) == ((2, 1), (2,))


def test_looking_at_a_long_header_and_at_no_array(store):
    file = io.BytesIO()
    np.lib.format.write_array(file, X, version=(2, 0))
    store.write("long.npy", file.getvalue())
    store.write("none.npy", b"no array at all")
    store.write("number.npy", npy(np.array(3.0)))

    assert Npy().look(store, "long.npy").rows == 6
    with pytest.raises(DataError, match=r"cannot read .*none\.npy: "):
        Npy().look(store, "none.npy")
    with pytest.raises(DataError, match=r"number\.npy must have examples"):
        Npy().look(store, "number.npy")


@pytest.mark.parametrize(
    ("kind", "written"),
    [(Npz, npz), (Safetensors, tensors)],
    ids=["npz", "safetensors"],
)
class TestNames:
    """What has several arrays with names."""

    def test_x_and_y_are_names(self, kind, written):
        x, y = kind()(written(x=X, y=Y, z=X), "a")

        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
        assert (x.dtype, y.dtype) == (np.float32, np.int64)

    def test_names_are_given_as_trees(self, kind, written):
        loader = kind(x={"image": "a", "rest": ("b", "c")}, y=None)

        x, y = loader(written(a=X, b=X + 1, c=X + 2), "a")

        np.testing.assert_array_equal(x["image"], X)
        np.testing.assert_array_equal(x["rest"][1], X + 2)
        assert y is None

    def test_a_name_that_is_not_there_is_named_with_those_that_are(self, kind, written):
        with pytest.raises(
            DataError, match=r"s3://a must .* named 'y', .*\['x', 'z'\]"
        ):
            kind()(written(x=X, z=Y), "s3://a")

    def test_a_damaged_file_is_named(self, kind, written):
        for content in (b"", b"something else", written(x=X, y=Y)[:-30]):
            with pytest.raises(DataError, match="cannot read s3://a: "):
                kind()(content, "s3://a")

    def test_ragged_lengths_are_refused(self, kind, written, store):
        store.write("a", written(x=X, y=Y[1:]))

        for act in (kind().load, kind().look):
            with pytest.raises(DataError, match=r"a must have as many rows, .*6.*5"):
                act(store, "a")

    def test_looking_says_what_loading_does(self, kind, written, store):
        store.write("a", written(x=X, y=Y))

        facts = kind().look(store, "a")

        assert facts.rows == 6
        assert [part.shape for part in facts.first] == [(2, 2), (2,)]
        assert [part.dtype for part in facts.first] == [np.float32, np.int64]


def test_one_array_is_not_an_npz_file():
    with pytest.raises(DataError, match=r"a\.npz must be an \.npz file, .* use Npy"):
        Npz()(npy(X), "a.npz")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, np.float32),
        (torch.float16, np.float16),
        (torch.float64, np.float64),
        (torch.uint8, np.uint8),
        (torch.int32, np.int32),
        (torch.bool, np.bool_),
        (torch.float8_e4m3fn, np.float32),
    ],
    ids=str,
)
def test_dtypes_of_safetensors_are_the_same_looked_at_and_loaded(
    store, dtype, expected
):
    store.write("a", tensors(x=torch.zeros(4, 2).to(dtype), y=torch.arange(4)))

    looked, loaded = Safetensors().look(store, "a"), Safetensors().load(store, "a")

    assert loaded[0].dtype == looked.first[0].dtype == expected
    assert looked.rows == 4


def test_the_header_of_a_safetensors_file_is_enough_to_look(store, read):
    store.write("a", tensors(x=np.zeros((5000, 3)), y=np.zeros(5000)))

    assert Safetensors().look(store, "a").rows == 5000
    assert sum(size for _, size in read) < 1000


def test_safetensors_may_have_metadata(store):
    content = safetensors.torch.save({"x": torch.zeros(3, 2)}, {"made": "today"})
    store.write("a", content)

    assert Safetensors(y=None).look(store, "a").rows == 3
    with pytest.raises(DataError, match=r"but has \['x'\]"):
        Safetensors().look(store, "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSONDecodeError"),
        (b"\xff" * 99, "its header would have 18446744073709551615 bytes"),
        (b"\x05" + b"\0" * 7 + b"{not}", "JSONDecodeError"),
    ],
)
def test_looking_at_a_damaged_safetensors_file_names_it(store, content, message):
    store.write("a", content)

    with pytest.raises(DataError, match=rf"cannot read {store.url}/a: .*{message}"):
        Safetensors().look(store, "a")


def test_looking_at_a_number_among_safetensors_says_what_loading_does(store):
    store.write("a", tensors(x=np.float32(1), y=Y))

    with pytest.raises(DataError, match=r"x of .*/a must have examples along"):
        Safetensors().look(store, "a")
