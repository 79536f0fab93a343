"""A manifest says what is there; one that cannot be right is refused."""

import json

import numpy as np
import pytest

from daskdl.data.batch_files import BatchFile, Manifest, Schema, _checksum
from daskdl.data.storage import Store
from daskdl.errors import DataError

X = {"image": np.zeros((1, 2, 3), "uint8"), "size": (np.zeros(1),)}

MANIFEST = Manifest(
    4,
    (BatchFile("batch-0.safetensors", 4, 99, 7), BatchFile("batch-1", 2, 50, 8)),
    Schema.of((X, np.zeros(1, "int32"))),
    ("cat", "dog"),
    {"data": None, "seed": 3},
)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def changed(store, again=True, **fields):
    """Write a manifest with other fields, with the right checksum or with the old."""
    MANIFEST.write(store)
    content = json.loads(store.read("manifest.json")) | fields
    crc32 = content.pop("crc32")
    content["crc32"] = _checksum(content) if again else crc32
    store.write("manifest.json", json.dumps(content).encode())


@pytest.mark.parametrize("classes", [("cat", "dog"), None])
def test_it_is_read_as_it_was_written(store, classes):
    written = Manifest(**{**MANIFEST.__dict__, "classes": classes})
    written.write(store)

    assert Manifest.read(store) == written
    assert written.rows == 6


def test_it_is_readable_json(store):
    MANIFEST.write(store)

    content = json.loads(store.read("manifest.json"))

    assert (content["kind"], content["version"]) == ("daskdl batch files", 1)
    assert (content["rows"], content["batch_size"]) == (6, 4)
    assert content["files"][1] == {
        "name": "batch-1",
        "rows": 2,
        "size_bytes": 50,
        "crc32": 8,
    }
    assert content["schema"]["arrays"][0] == {
        "name": "x['image']",
        "dtype": "uint8",
        "shape": [2, 3],
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "something"}, "is not of daskdl batch files"),
        ({"version": 2}, "is of version 2, but this daskdl reads up to 1; install"),
        ({"version": "x"}, "is of version x"),
        ({"rows": 7}, "is damaged: .*6 rows instead of 7.*overwrite=True"),
        ({"files": [], "rows": 0}, "is damaged: "),
        ({"files": [{"name": "a/../b"}]}, "is damaged: KeyError"),
        ({"schema": {"x": "array"}}, "is damaged: KeyError"),
        ({"batch_size": None}, "is damaged: TypeError"),
    ],
    ids=["kind", "newer", "version", "rows", "none", "file", "schema", "type"],
)
def test_what_cannot_be_used_is_refused(store, fields, message):
    changed(store, **fields)

    with pytest.raises(DataError, match=message):
        Manifest.read(store)


def test_a_changed_number_is_found(store):
    changed(store, again=False, batch_size=5)

    with pytest.raises(DataError, match="is damaged: its checksum is wrong"):
        Manifest.read(store)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind": ', "is damaged: "),
        (b"\xff\x00", "is damaged: "),
        (b"[1]", "is not of daskdl batch files"),
    ],
    ids=["half", "bytes", "list"],
)
def test_something_else_is_refused(store, content, message):
    store.write("manifest.json", content)

    with pytest.raises(DataError, match=f"manifest.json {message}"):
        Manifest.read(store)


@pytest.mark.parametrize("name", ["../x", ""])
def test_a_file_elsewhere_is_refused(name):
    with pytest.raises(ValueError, match="there cannot be a"):
        BatchFile.from_json({"name": name, "rows": 1, "size_bytes": 1, "crc32": 1})
