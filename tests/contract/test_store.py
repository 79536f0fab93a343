"""Files at a URL: the same promises on an S3 server, in memory and on disk.

What fails is tried again if that can help; a file is there as a whole or not at all.
"""

import errno
import os
import pickle
import uuid
from typing import ClassVar
from unittest.mock import Mock

import aiohttp
import botocore.exceptions
import pytest
import yarl
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from daskdl.data import storage
from daskdl.data.storage import TEMPORARY, Store, attempt, put, store_of
from daskdl.errors import DataError, OptionError
from tests.support import renames, s3

RENAMES = (renames.Refusing.protocol, renames.Silent.protocol)


@pytest.fixture(params=["local", "file", "memory", "s3", *RENAMES])
def store(request, tmp_path):
    if request.param == "s3":
        endpoint = request.getfixturevalue("s3_endpoint")
        bucket = request.getfixturevalue("bucket")
        return Store(f"{bucket}/folder", s3.options(endpoint))
    if request.param in RENAMES:
        return Store(f"{request.param}://{uuid.uuid4().hex}")
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


@pytest.mark.parametrize(
    ("start", "stop", "part"),
    [(1, 3, b"el"), (None, 2, b"he"), (3, None, b"lo"), (3, 99, b"lo")],
    ids=["middle", "beginning", "end", "beyond the end"],
)
def test_a_part_of_a_file_is_read(store, start, stop, part):
    store.write("a", b"hello")

    assert store.read("a", start, stop) == part


def test_a_file_is_replaced(store):
    store.write("a", b"long content")
    store.write("a", b"")

    assert store.exists("a")
    assert store.read("a") == b""
    assert store.names() == ["a"]


def test_a_file_that_is_not_there_is_named(store):
    with pytest.raises(DataError, match="there is no such file") as raised:
        store.read("missing.npy")

    assert store.url_of("missing.npy") in str(raised.value)


def test_only_a_file_exists(store):
    store.write("a/b", b"1")

    assert store.exists("a/b")
    assert not store.exists("a")
    assert not store.exists("b")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**", ["a.npy", "b.csv", "sub/c.npy", "sub/deep/d.npy"]),
        ("*", ["a.npy", "b.csv"]),
        ("*.npy", ["a.npy"]),
        ("sub/*.npy", ["sub/c.npy"]),
        ("**/*.npy", ["a.npy", "sub/c.npy", "sub/deep/d.npy"]),
        ("[bc].csv", ["b.csv"]),
    ],
)
def test_names_are_those_that_match(store, pattern, expected):
    for name in ("sub/deep/d.npy", "b.csv", "a.npy", "sub/c.npy"):
        store.write(name, b"1")

    assert store.names(pattern) == expected


def test_a_folder_that_is_not_there_has_no_names(store):
    assert store.names() == []


def test_files_that_came_since_are_listed(store):
    store.write("a", b"1")
    before = store.names()

    pickle.loads(pickle.dumps(store)).write("b", b"2")

    assert (before, store.names()) == (["a"], ["a", "b"])
    assert store.exists("b")


@pytest.mark.parametrize(
    ("ask", "before", "after"),
    [
        (Store.names, ["sub/a"], ["more/c", "sub/a", "sub/b"]),
        (Store.folders, ["sub"], ["more", "sub"]),
        (lambda store: store.exists("sub/b"), False, True),
    ],
    ids=["names", "folders", "exists"],
)
def test_what_another_process_wrote_is_seen(s3_endpoint, bucket, ask, before, after):
    store = Store(f"{bucket}/x", s3.options(s3_endpoint))
    store.write("sub/a", b"1")
    writer = S3FileSystem(**store.options, skip_instance_cache=True)
    answer = ask(store)
    for folder in (store.url, store.url_of("sub")):
        S3FileSystem(**store.options).ls(folder)  # which keeps the listing

    for name in ("sub/b", "more/c"):
        writer.pipe_file(store.url_of(name), b"2")

    assert (answer, ask(store)) == (before, after)


def test_there_are_no_files_in_a_file(store):
    store.write("a", b"hello")
    below = Store(store.url_of("a"), store.options)

    assert not below.exists("b")
    assert not below.exists("b/c")
    assert below.names() == []


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


def test_a_url_that_cannot_be_opened_is_named():
    with pytest.raises(OptionError, match="cannot open nothing://x"):
        Store("nothing://x").names()


@pytest.mark.parametrize("dropped", [1, 3])
def test_a_dropped_connection_is_tried_again(s3_endpoint, bucket, at_once, dropped):
    Store(bucket, s3.options(s3_endpoint)).write("a", b"hello")

    with s3.door(s3_endpoint, dropped) as door:
        content = Store(bucket, s3.options(door.endpoint)).read("a")

    assert content == b"hello"
    assert door.visits > dropped


def test_a_dropped_connection_does_not_make_a_file_missing(
    bucket, s3_endpoint, at_once, monkeypatch
):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)

    with s3.door(s3_endpoint, 10**9) as door:
        store = Store(bucket, s3.options(door.endpoint))

        for ask in (store.exists, store.read):
            with pytest.raises(DataError, match=f"cannot read {bucket}/a: .*: 4\\)$"):
                ask("a")
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
    ("urls", "folder"),
    [
        (["/a/1", "/a/b/2"], "/a"),
        (["/1", "/a/2"], "/"),
        (["/a/[b]/1", "/a/[b]/2"], "/a/[b]"),
        (["s3://bucket/a*/b/1", "s3://bucket/a*/2"], "s3://bucket/a*"),
        (["memory://what?/1"], "memory://what?"),
        (["memory:///a/1", "memory://a/2"], "memory://a"),
        (["memory://1", "memory://a/2"], "memory://"),
        (["zip://a/1::/x.zip", "zip://a/2::/x.zip"], "zip://a::/x.zip"),
    ],
    ids=range(8),
)
def test_the_common_folder_is_the_deepest_that_contains_all(urls, folder):
    assert storage.common_folder(urls) == folder
    assert all(storage.path_in(folder, url) is not None for url in urls)


@pytest.fixture
def waits(monkeypatch):
    """The waits that were waited for, at once."""
    waited = []
    monkeypatch.setattr(storage.time, "sleep", waited.append)
    return waited


def failing(*errors):
    """Raises these, one each time, then returns."""
    return Mock(side_effect=[*errors, "done"])


def status(number):
    url = yarl.URL("https://x/a")
    request = aiohttp.RequestInfo(url, "GET", {}, url)
    return aiohttp.ClientResponseError(request, (), status=number)


PASSING = [
    ConnectionResetError(),
    TimeoutError(),
    OSError(errno.EIO, "failed"),
    OSError("no number"),
    aiohttp.ClientPayloadError(),
    aiohttp.ClientOSError(errno.EINVAL, "a connection's"),
    status(503),
    botocore.exceptions.EndpointConnectionError(endpoint_url="x"),
]
LASTING = [
    PermissionError(),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EINVAL, "wrong"),
    status(403),
    botocore.exceptions.NoCredentialsError(),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again(error, waits):
    action = failing(error)

    assert attempt(action, "read", "s3://x/a") == "done"
    assert action.call_count == 2
    assert waits == [0.1]


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_does_not_pass_is_raised_at_once_with_the_url(error, waits):
    action = failing(error)

    with pytest.raises(DataError, match="cannot read s3://x/a") as raised:
        attempt(action, "read", "s3://x/a")

    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)
    assert "attempts" not in str(raised.value)
    assert (action.call_count, waits) == (1, [])


class BadRequest(OSError):
    """As gcsfs refuses who is unknown."""

    code = 401


@pytest.mark.parametrize(
    "error",
    [PermissionError("Forbidden"), BadRequest(errno.EPERM), *LASTING[-2:]],
    ids=lambda error: type(error).__name__,
)
def test_missing_credentials_are_told_with_the_place_and_the_remedy(error, waits):
    with pytest.raises(DataError) as raised:
        attempt(failing(error), "read", "s3://x/a")
    with pytest.raises(DataError) as local:
        attempt(failing(error), "read", "/x/a")

    message = str(raised.value)
    assert message.startswith("cannot read s3://x/a on ")
    assert "storage_options=..., or configure fsspec on the workers" in message
    assert "storage_options" not in str(local.value)


def test_waits_grow_and_the_last_attempt_is_told(waits):
    action = failing(*[ConnectionResetError(104, "reset")] * 9)

    with pytest.raises(DataError, match=r"cannot read x: .*reset \(attempts: 4\)$"):
        attempt(action, "read", "x")

    assert action.call_count == 4
    assert waits == [0.1, 0.4, 1.6]


def test_an_attempt_that_took_long_is_the_last(waits, monkeypatch):
    monkeypatch.setattr(storage, "ENOUGH_S", 0.3)  # less than the second wait
    action = failing(*[ConnectionResetError()] * 9)

    with pytest.raises(DataError, match=r"\(attempts: 2\)"):
        attempt(action, "read", "x")

    assert waits == [0.1]


@pytest.mark.parametrize("error", [FileNotFoundError("a"), KeyError("a")], ids=repr)
def test_what_is_no_failure_of_a_file_system_comes_out_as_it_is(error, waits):
    with pytest.raises(type(error)) as raised:
        attempt(failing(error), "read", "x")

    assert raised.value is error
    assert waits == []


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a"
    order = []
    fsync, replace = os.fsync, os.replace

    def synced(number):
        order.append(("bytes", path.exists()))
        fsync(number)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr(
        "os.replace", lambda *names: (order.append("name"), replace(*names))
    )

    Store(str(tmp_path)).write("new/a", b"1")

    assert path.read_bytes() == b"1"
    assert order[0] == ("bytes", False)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    store.write("a", b"old")

    def fail(_):
        raise PermissionError("no")

    monkeypatch.setattr("os.fsync", fail)

    with pytest.raises(DataError, match=f"cannot write {tmp_path}/a: PermissionError"):
        store.write("a", b"new")

    assert store.read("a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_files_being_written_are_not_listed_but_deleted(tmp_path):
    store = Store(f"{tmp_path}/x")
    store.write(f".1234{TEMPORARY}", b"half")
    store.write("a", b"whole")

    assert store.names() == ["a"]
    store.delete_all()
    assert not (tmp_path / "x").exists()


def test_elsewhere_a_temporary_file_is_moved(tmp_path):
    names = []

    class Recording(DirFileSystem):
        protocol = "other"

        def pipe_file(self, path, *args, **kwargs):
            names.append(path)
            return super().pipe_file(path, *args, **kwargs)

    put(Recording(str(tmp_path), LocalFileSystem()), "new/a", b"1")

    assert (tmp_path / "new" / "a").read_bytes() == b"1"
    assert os.listdir(tmp_path / "new") == ["a"]
    assert names[0].endswith(TEMPORARY)


@pytest.mark.parametrize("kind", [renames.Refusing, renames.Silent])
def test_nothing_temporary_is_left_where_a_rename_does_not_replace(kind):
    folder = uuid.uuid4().hex
    store = Store(f"{kind.protocol}://{folder}")

    store.write("a", b"old")
    store.write("a", b"new")

    assert kind().find(folder) == [f"/{folder}/a"]


@pytest.mark.parametrize(
    "error", [PermissionError("no"), ConnectionResetError(), TimeoutError()], ids=repr
)
def test_a_file_stays_if_it_is_not_the_reason_why_a_rename_fails(
    error, waits, monkeypatch
):
    folder = uuid.uuid4().hex
    store = Store(f"refusing://{folder}")
    store.write("a", b"old")
    monkeypatch.setattr(renames.Refusing, "mv", Mock(side_effect=error))

    with pytest.raises(DataError, match=f"cannot write refusing://{folder}/a"):
        store.write("a", b"new")

    assert store.read("a") == b"old"
    assert renames.Refusing().find(folder) == [f"/{folder}/a"]


def test_a_rename_that_never_happens_is_an_error(waits, monkeypatch):
    folder = uuid.uuid4().hex
    monkeypatch.setattr(renames.Silent, "mv", Mock())

    with pytest.raises(DataError, match="could not be renamed"):
        Store(f"silent://{folder}").write("a", b"1")

    assert renames.Silent().find(folder) == []


def test_an_object_store_gets_one_put_and_no_folder():
    class Recording(MemoryFileSystem):
        calls: ClassVar[list] = []

        def pipe_file(self, path, value, **_):
            self.calls.append((path, value))

        def makedirs(self, *_, **__):
            raise AssertionError("a folder is made")

    put(Recording(), "/no/such/folder/a", b"1")

    assert Recording.calls == [("/no/such/folder/a", b"1")]
