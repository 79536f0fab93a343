"""Files at a URL: the same promises on an S3 server, in memory and on disk."""

import pickle
import uuid

import fsspec
import pytest
from s3fs import S3FileSystem

from daskdl.data import storage
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, OptionError
from tests.support import s3


@pytest.fixture(params=["local", "file", "memory", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        endpoint = request.getfixturevalue("s3_endpoint")
        bucket = request.getfixturevalue("bucket")
        return Store(f"{bucket}/folder", s3.options(endpoint))
    folder = f"{tmp_path}/a [folder]"
    return Store(
        {
            "local": folder,
            "file": f"file://{folder}/",
            "memory": f"memory://{uuid.uuid4().hex}",
        }[request.param]
    )


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(storage, "WAITS_S", (0, 0, 0))


def test_what_was_written_is_read(store):
    store.write("a/b.bin", b"\x00hello")

    assert store.read("a/b.bin") == b"\x00hello"
    assert store.size("a/b.bin") == 6


@pytest.mark.parametrize(
    ("start", "stop", "part"),
    [(1, 3, b"el"), (None, 2, b"he"), (3, None, b"lo"), (3, 99, b"lo")],
    ids=["middle", "beginning", "end", "beyond the end"],
)
def test_a_part_of_a_file_is_read(store, start, stop, part):
    store.write("a", b"hello")

    assert store.read("a", start, stop) == part


def test_a_file_without_bytes_is_a_file(store):
    store.write("empty", b"")

    assert store.exists("empty")
    assert store.read("empty") == b""


def test_a_file_is_replaced(store):
    store.write("a", b"long content")
    store.write("a", b"new")

    assert store.read("a") == b"new"
    assert store.names() == ["a"]


def test_a_file_that_is_not_there_is_named(store):
    with pytest.raises(DataError, match="there is no such file") as raised:
        store.read("missing.npy")

    assert store.url_of("missing.npy") in str(raised.value)


def test_the_size_of_a_file_that_is_not_there_is_refused(store):
    with pytest.raises(DataError, match=r"missing\.npy: there is no such file"):
        store.size("missing.npy")


def test_only_a_file_exists(store):
    store.write("a/b", b"1")

    assert store.exists("a/b")
    assert not store.exists("a")
    assert not store.exists("b")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**", ["a.npy", "b.csv", "sub/c.npy", "sub/deep/d.npy"]),
        ("*", ["a.npy", "b.csv"]),
        ("*.npy", ["a.npy"]),
        ("sub/*.npy", ["sub/c.npy"]),
        ("**/*.npy", ["a.npy", "sub/c.npy", "sub/deep/d.npy"]),
        ("[bc].csv", ["b.csv"]),
    ],
)
def test_names_are_those_that_match(store, pattern, found):
    for name in ("sub/deep/d.npy", "b.csv", "a.npy", "sub/c.npy"):
        store.write(name, b"1")

    assert store.names(pattern) == found


def test_a_folder_that_is_not_there_has_no_names(store):
    assert store.names() == []


def test_files_that_came_since_are_listed(store):
    store.write("a", b"1")
    before = store.names()

    pickle.loads(pickle.dumps(store)).write("b", b"2")

    assert (before, store.names()) == (["a"], ["a", "b"])
    assert store.exists("b")


def test_what_another_process_wrote_is_seen(s3_endpoint, bucket):
    store = Store(f"{bucket}/x", s3.options(s3_endpoint))
    store.write("sub/a", b"1")
    other = S3FileSystem(**store.options, skip_instance_cache=True)
    before = store.names(), store.exists("sub/b")
    S3FileSystem(**store.options).ls(store.url_of("sub"))  # which keeps the listing

    other.pipe_file(store.url_of("sub/b"), b"2")

    assert before == (["sub/a"], False)
    assert store.exists("sub/b")
    assert store.names() == ["sub/a", "sub/b"]


def test_a_file_system_is_told_to_forget_its_listings(monkeypatch):
    store = Store(f"memory://{uuid.uuid4().hex}")
    store.write("a", b"1")
    system, calls = fsspec.filesystem("memory"), []
    monkeypatch.setattr(system, "invalidate_cache", lambda: calls.append("forget"))
    find = system.find
    monkeypatch.setattr(system, "find", lambda path: calls.append("find") or find(path))

    assert store.names() == ["a"]
    assert calls == ["forget", "find"]


def test_there_are_no_files_in_a_file(store):
    store.write("a", b"hello")

    assert not Store(store.url_of("a"), store.options).exists("b")
    assert not Store(store.url_of("a"), store.options).exists("b/c")


def test_a_file_has_no_names_below_it(store):
    store.write("a", b"1")

    assert Store(store.url_of("a"), store.options).names() == []


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no entry")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", refuse)

    with pytest.raises(DataError, match=f"cannot list {tmp_path}: PermissionError"):
        Store(str(tmp_path)).names()


def test_deleted_files_are_gone_and_missing_ones_are_passed_over(store):
    for name in ("a", "b", "sub/c"):
        store.write(name, b"1")

    store.delete(["a", "missing", "sub/c"])

    assert store.names() == ["b"]


def test_all_is_deleted_below_the_folder_only(store):
    store.write("in/a", b"1")
    store.write("in/sub/b", b"1")
    store.write("inside", b"1")
    inner = Store(store.url_of("in"), store.options)

    inner.delete_all()
    inner.delete_all()

    assert store.names() == ["inside"]


def test_options_are_not_shown():
    assert "geheim" not in repr(Store("s3://x", {"secret": "geheim"}))


def test_a_store_is_a_value():
    assert len({Store("s3://x", {"a": 1}), Store("s3://x", {"a": 1})}) == 1


@pytest.mark.parametrize("url", ["nothing://x", "memory://x"])
def test_what_cannot_be_opened_is_named(url, monkeypatch):
    def fail(*_, **__):
        raise ImportError("install it")

    if url == "memory://x":
        monkeypatch.setattr("fsspec.core.url_to_fs", fail)

    with pytest.raises(OptionError, match=f"cannot open {url}"):
        Store(url).names()


@pytest.mark.parametrize("dropped", [1, 3])
def test_a_dropped_connection_is_tried_again(s3_endpoint, bucket, at_once, dropped):
    Store(bucket, s3.options(s3_endpoint)).write("a", b"hello")

    with s3.door(s3_endpoint, dropped) as door:
        content = Store(bucket, s3.options(door.endpoint)).read("a")

    assert content == b"hello"
    assert door.visits > dropped


def test_a_server_that_drops_every_connection_is_named_with_the_file(
    bucket, s3_endpoint, at_once, monkeypatch
):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # else with waits of its own

    with s3.door(s3_endpoint, 10**9) as door:
        store = Store(bucket, s3.options(door.endpoint))
        with pytest.raises(DataError) as raised:
            store.read("a")

    assert str(raised.value).startswith(f"cannot read {bucket}/a: ")
    assert str(raised.value).endswith("(attempts: 4)")
    assert door.visits >= 4  # who asks for a region or on a kept connection adds some


def test_a_dropped_connection_does_not_make_a_file_missing(
    bucket, s3_endpoint, at_once, monkeypatch
):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)

    with s3.door(s3_endpoint, 10**9) as door:
        store = Store(bucket, s3.options(door.endpoint))

        with pytest.raises(DataError, match="cannot read"):
            store.exists("a")
        with pytest.raises(DataError, match="cannot list"):
            store.names()


def test_a_bucket_that_is_not_there_is_not_made(s3_endpoint):
    store = Store("s3://no-such-bucket/x", s3.options(s3_endpoint))

    with pytest.raises(DataError, match=r"cannot write s3://no-such-bucket/x/a: there"):
        store.write("a", b"1")

    assert store.names() == []


def test_a_path_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert store_of("x").url == f"{tmp_path}/x"
    assert store_of(tmp_path / "x").url == f"{tmp_path}/x"
    assert store_of("s3://bucket/x").url == "s3://bucket/x"


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("/a/b.npy", "/a", "b.npy"),
        ("/b.npy", "/", "b.npy"),
        ("file:///b.npy", "file:///", "b.npy"),
        ("memory://b.npy", "memory://", "b.npy"),
        ("s3://bucket/b.npy", "s3://bucket", "b.npy"),
        ("simplecache::s3://bucket/a/b.npy", "simplecache::s3://bucket/a", "b.npy"),
        ("zip://a/b.npy::s3://bucket/x.zip", "zip://a::s3://bucket/x.zip", "b.npy"),
        ("zip://b.npy::memory://x.zip", "zip://::memory://x.zip", "b.npy"),
        ("memory://a*/b.npy", "memory://", "a*/b.npy"),
        ("s3://bucket/a/[bc]/*.npy", "s3://bucket/a", "[bc]/*.npy"),
    ],
)
def test_a_url_has_a_folder_and_a_name_in_it(url, folder, name):
    assert storage.folder_of(url) == folder
    assert storage.joined(folder, name) == storage.joined(f"{folder}", name) == url
    assert storage.path_in(folder, url) == name


@pytest.mark.parametrize(
    ("urls", "common"),
    [
        (["/a/b/1", "/a/bc/2"], "/a"),
        (["/a/1", "/b/2"], "/"),
        (["/1", "/b/2"], "/"),
        (["memory://1", "memory://a/2"], "memory://"),
        (["file:///a/b/1", "/a/c/2"], "/a"),
        (["s3://bucket/a/1", "s3://bucket/b/2"], "s3://bucket"),
        (["zip://a/1::/x.zip", "zip://b/2::/x.zip"], "zip://::/x.zip"),
    ],
)
def test_the_deepest_folder_that_has_all_is_found(urls, common):
    assert storage.common_folder(urls) == common
