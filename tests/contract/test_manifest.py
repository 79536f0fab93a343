"""The manifest of packed files and saves: read back, or refused."""

import json

import pytest

from daskdl.data.manifest import File, Manifest, ManifestFormat
from daskdl.data.storage import store_of
from daskdl.errors import DataError
from tests.support.manifests import sealed

KIND = ManifestFormat(
    "daskdl notes", 2, "notes.json", "write notes first", "write them again"
)
FILE = File.of("a.txt", b"hello", rows=5)


@pytest.fixture
def store(tmp_path):
    store = store_of(tmp_path)
    store.write("a.txt", b"hello")
    return store


def written(store):
    Manifest((FILE,), {"seed": 0}).write(store, KIND)
    return json.loads(store.read("notes.json"))


def test_a_manifest_is_read_back(store):
    whole = written(store)

    read = Manifest.read(store, KIND)

    assert list(whole) == ["format", "version", "made_by", "files", "content", "sha256"]
    assert read == Manifest((FILE,), {"seed": 0})
    assert read.files[0].read(store, "") == b"hello"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "something else"}, "not have the format .*; write notes first"),
        ({"format": None}, "not have the format"),
        (
            {"version": 3},
            "has version 3, but this daskdl reads versions up to 2; install",
        ),
        ({"version": None}, "damaged: .*; write them again"),
        ({"version": 0}, "damaged: .*its version is 0; write them again"),
        ({"files": [FILE.to_json() | {"nbytes": "5"}]}, "describes no file"),
        ({"files": [FILE.to_json() | {"sha256": None}]}, "describes no file"),
        ({"files": ["a.txt"]}, "damaged: .*; write them again"),
        ({"files": [{"name": "a.txt"}]}, "damaged: .*; write them again"),
        ({"files": [FILE.to_json()] * 2}, "a file is listed twice"),
        *(
            ({"files": [FILE.to_json() | {"name": name}]}, "describes no file")
            for name in ("", ".", "..", "../x", "a/b", "a\\b", "a\0", 7)
        ),
    ],
)
def test_a_sealed_manifest_of_something_else_is_refused(store, changed, message):
    store.write("notes.json", sealed(written(store) | changed))

    with pytest.raises(DataError, match=message) as error:
        Manifest.read(store, KIND)

    assert store.url_of("notes.json") in str(error.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-20],
        lambda content: content.replace(b'"seed": 0', b'"seed": 1'),
        lambda content: content.replace(b'"seed": 0', b'"seed": NaN'),
        lambda content: b"\xff" + content,
        lambda content: b'{"content": ' * 100_000,
        lambda content: b"",
        lambda content: sealed({"format": "daskdl notes", "version": 2}),
    ],
    ids=["cut", "changed", "NaN", "no text", "too deep", "empty", "nothing in it"],
)
def test_a_damaged_manifest_is_refused_with_the_remedy(store, spoil):
    written(store)
    store.write("notes.json", spoil(store.read("notes.json")))

    with pytest.raises(DataError, match=r"is damaged.*write them again") as error:
        Manifest.read(store, KIND)

    assert store.url_of("notes.json") in str(error.value)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null"])
def test_json_of_something_else_is_refused(store, content):
    store.write("notes.json", content)

    with pytest.raises(
        DataError, match="not have the format 'daskdl notes'; write not"
    ):
        Manifest.read(store, KIND)


def test_a_folder_without_one_is_named(store):
    with pytest.raises(DataError, match=r"notes\.json"):
        Manifest.read(store, KIND)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"hell", "has 4 bytes instead of 5"), (b"hallo", "its checksum is wrong")],
)
def test_a_damaged_file_is_refused_with_the_remedy(store, content, reason):
    assert FILE.is_intact(store)
    store.write("a.txt", content)

    with pytest.raises(DataError, match=rf"{reason}; write them again") as error:
        FILE.read(store, "write them again")

    assert store.url_of("a.txt") in str(error.value)
    assert not FILE.is_intact(store)
    store.delete(["a.txt"])
    assert not FILE.is_intact(store)
