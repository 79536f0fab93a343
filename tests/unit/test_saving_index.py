"""The index: what it names is what is there, and a damaged one is refused."""

import json

import pytest

from daskdl import SaveError
from daskdl.saving.folder import (
    File,
    Kind,
    _digest,
    decode_index,
    encode_index,
    file_of,
)

KIND = Kind("a kind", 2, "index.json", ("model", "extra"))
FILES = {"model": file_of("model", b"content")}
CONTENT = {"x": [1, 2.5, None, "é"]}


def encoded(**changes):
    """An index with a right checksum, whatever is in it."""
    index = json.loads(encode_index(KIND, {"daskdl": "0"}, FILES, CONTENT))
    del index["sha256"]
    index.update(changes)
    return json.dumps({**index, "sha256": _digest(index)}).encode()


def entry(**changes):
    return {"model": {**FILES["model"]._asdict(), **changes}}


def test_what_is_read_is_what_was_written():
    assert decode_index(KIND, encode_index(KIND, {}, FILES, CONTENT)) == (
        FILES,
        CONTENT,
    )


def test_a_file_is_named_after_what_is_in_it():
    one, other = file_of("model", b"one"), file_of("model", b"other")

    assert one.name != other.name
    assert one == file_of("model", b"one")
    assert (one.nbytes, len(one.sha256)) == (3, 64)


def test_an_older_version_is_read():
    assert decode_index(KIND, encoded(version=1)) == (FILES, CONTENT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded(version=3), "of version 3, and this daskdl reads up to 2; install"),
        (encoded(version=0), "its version is 0"),
        (encoded(version="1"), "its version is '1'"),
        (encoded(version=True), "its version is True"),
        (encoded(format="another"), "not of the format 'a kind'"),
        (b"[]", "not of the format"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"x": NaN}', "no JSON: NaN"),
        (b"1" * 5000, "no JSON"),
        (encoded().replace(b"2.5", b"2.6"), "its checksum is wrong"),
        (encoded(files=[]), "its files are"),
        (encoded(files={"other": {}}), "a file for 'other'"),
        (encoded(files={"model": 3}), "describes the file of model"),
        (encoded(files={"model": {"name": "x"}}), "describes the file of model"),
        (encoded(files=entry(nbytes=-1.5)), "gives the file of model -1.5 bytes"),
        (encoded(files=entry(more=1)), "describes the file of model"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_sound_index_is_refused(content, message):
    with pytest.raises(SaveError, match=message):
        decode_index(KIND, content)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "s3://other/x",
        "model-0000000000000000.safetensors",
        "..",
        "",
        None,
    ],
)
def test_a_name_that_does_not_follow_from_the_checksum_is_refused(name):
    with pytest.raises(SaveError, match="describes the file of model"):
        decode_index(KIND, encoded(files=entry(name=name)))


def test_a_checksum_that_is_a_path_is_refused():
    digest = "/../../../../etc/passwd".ljust(64, "0")
    file = File(f"model-{digest[:16]}.safetensors", 1, digest)

    with pytest.raises(SaveError, match="describes the file of model"):
        decode_index(KIND, encoded(files={"model": file._asdict()}))
