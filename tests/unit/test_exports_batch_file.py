"""A batch file gives back its rows, or says that it is damaged."""

import numpy as np
import pytest
import safetensors.numpy

from daskdl.data.batch_files import BatchFile, Schema
from daskdl.data.storage import Store
from daskdl.errors import DataError
from tests.support.numbered import numbered

ROWS = numbered(5, 4)
SCHEMA = Schema.of(ROWS)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def file(store):
    return BatchFile.written(store, "a.safetensors", ROWS)


def test_rows_come_back(store, file):
    x, y = file.read(store, SCHEMA)

    assert x["id"].tolist() == [5, 6, 7, 8]
    assert x["pair"][0].tolist() == [[i, -i] for i in range(5, 9)]
    assert y.tolist() == [2, 0, 1, 2]
    assert file.rows == 4


def test_any_reader_of_safetensors_can_read_it(store, file):
    arrays = safetensors.numpy.load(store.read("a.safetensors"))

    assert {name: a.dtype.name for name, a in arrays.items()} == {
        "x['id']": "int64",
        "x['pair'][0]": "float32",
        "y": "uint8",
    }


def test_arrays_that_are_not_contiguous_are_written_right(store):
    x = np.arange(12.0).reshape(3, 4).T

    file = BatchFile.written(store, "a.safetensors", (x, None))

    assert file.read(store, Schema.of((x, None)))[0].tolist() == x.tolist()


def test_each_single_damaged_byte_is_found(store, file):
    content = store.read("a.safetensors")

    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        store.write("a.safetensors", bytes(damaged))
        with pytest.raises(DataError, match=r"/a\.safetensors is damaged: "):
            file.read(store, SCHEMA)
        assert not file.is_there(store)


def test_a_file_cut_short_is_found(store, file):
    store.write("a.safetensors", store.read("a.safetensors")[:-1])

    with pytest.raises(DataError, match=r"has \d+ bytes with the checksum"):
        file.read(store, SCHEMA)


def test_a_missing_file_is_named(store, file):
    store.delete(["a.safetensors"])

    with pytest.raises(DataError, match=r"cannot read .*/a\.safetensors"):
        file.read(store, SCHEMA)
    assert not file.is_there(store)


def test_an_intact_file_is_there(store, file):
    assert file.is_there(store)


def test_other_rows_than_those_of_the_manifest_are_refused(store):
    file = BatchFile.written(store, "a.safetensors", (np.zeros((2, 3)), None))

    with pytest.raises(DataError, match=r"x of .*/a\.safetensors is float64"):
        file.read(store, Schema.of((np.zeros((2, 4)), None)))
