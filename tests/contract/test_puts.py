"""A file is there as a whole or not at all, on each kind of file system."""

import os
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from daskdl.data.storage import TEMPORARY, Store, put
from daskdl.errors import DataError


@pytest.fixture
def local():
    return fsspec.filesystem("file")


def test_the_bytes_are_on_the_disk_before_the_name_is(local, tmp_path, monkeypatch):
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

    put(local, str(path), b"1")

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


def test_elsewhere_a_temporary_file_is_moved(local, tmp_path):
    names = []

    class Recording(DirFileSystem):
        protocol = "other"

        def pipe_file(self, path, *args, **kwargs):
            names.append(path)
            return super().pipe_file(path, *args, **kwargs)

    put(Recording(str(tmp_path), local), "new/a", b"1")

    assert (tmp_path / "new" / "a").read_bytes() == b"1"
    assert os.listdir(tmp_path / "new") == ["a"]
    assert names[0].endswith(TEMPORARY)


def test_an_object_store_gets_one_put_and_no_folder():
    class Recording(MemoryFileSystem):
        calls: ClassVar[list] = []

        def pipe_file(self, path, value, **_):
            self.calls.append((path, value))

        def makedirs(self, *_, **__):
            raise AssertionError("a folder is made")

    put(Recording(), "/no/such/folder/a", b"1")

    assert Recording.calls == [("/no/such/folder/a", b"1")]
