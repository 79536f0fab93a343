import uuid

import pytest

from daskdl.data.storage import Store
from daskdl.data.validate import Moved, Quarantine
from daskdl.errors import DataError, OptionError
from tests.support.sources import Filed, Parts


@pytest.fixture(params=["memory", "local"])
def folder(request, tmp_path):
    """A folder with files that have the same name below it."""
    url = "memory://daskdl-quarantine" if request.param == "memory" else str(tmp_path)
    store = Store(url)
    for name in ("data/a/1", "data/b/1", "data/b/2"):
        store.write(name, name.encode())
    yield store
    if request.param == "memory":
        store.delete_all()


def filed(folder):
    return Filed(
        [folder.url_of("data/a/1")], [folder.url_of(f"data/b/{i}") for i in (1, 2)]
    )


def test_files_keep_their_paths_below_the_root(folder):
    source = filed(folder)
    quarantine = Quarantine.of(folder.url_of("bad"), source, {})

    moved = [quarantine.take(source, part, {0: [0], 1: [0]}) for part in (0, 1)]

    assert moved == [
        [Moved(folder.url_of("data/a/1"), folder.url_of("bad/a/1"))],
        [Moved(folder.url_of("data/b/1"), folder.url_of("bad/b/1"))],
    ]
    assert folder.names() == ["bad/a/1", "bad/b/1", "data/b/2"]
    assert folder.read("bad/b/1") == b"data/b/1"


def test_a_task_that_is_run_again_says_the_same(folder):
    source = filed(folder)
    quarantine = Quarantine.of(folder.url_of("bad"), source, {})
    first = quarantine.take(source, 0, {0: [0]})

    again = quarantine.take(source, 0, {0: [0]})

    assert again == first
    assert folder.read("bad/a/1") == b"data/a/1"


def test_a_task_that_was_lost_between_copy_and_deletion_is_completed(folder):
    source = filed(folder)
    folder.write("bad/a/1", folder.read("data/a/1"))

    (moved,) = Quarantine.of(folder.url_of("bad"), source, {}).take(source, 0, {0: [0]})

    assert moved.to == folder.url_of("bad/a/1")
    assert not folder.exists("data/a/1")


def test_a_file_that_is_there_is_not_overwritten(folder):
    source = filed(folder)
    folder.write("bad/a/1", b"another")

    (moved,) = Quarantine.of(folder.url_of("bad"), source, {}).take(source, 0, {0: [0]})

    assert moved.to is None
    assert moved.reason == f"{folder.url_of('bad/a/1')} is another file"
    assert folder.read("bad/a/1") == b"another"
    assert folder.read("data/a/1") == b"data/a/1"


def test_a_file_stays_if_it_cannot_be_copied(folder, monkeypatch):
    def full(self, name, content):
        raise DataError(f"cannot write {self.url_of(name)}: the disk is full")

    source = filed(folder)
    quarantine = Quarantine.of(folder.url_of("bad"), source, {})
    monkeypatch.setattr(Store, "write", full)

    (moved,) = quarantine.take(source, 0, {0: [0]})

    assert moved.to is None
    assert moved.reason.endswith("the disk is full")
    assert folder.exists("data/a/1")


@pytest.mark.parametrize("inside", ["data", "data/b", "data/b/", ""])
def test_a_quarantine_that_has_data_in_it_is_refused(folder, inside):
    with pytest.raises(
        OptionError, match="quarantine must be outside of the data, got"
    ):
        Quarantine.of(folder.url_of(inside), filed(folder), {})


@pytest.mark.parametrize("way", ["file://{}/data", "{}/data/../data", "{}/link"])
def test_a_local_folder_is_the_same_however_it_is_written(tmp_path, way):
    store = Store(str(tmp_path))
    store.write("data/1", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "data")

    with pytest.raises(OptionError, match="must be outside of the data"):
        Quarantine.of(way.format(tmp_path), Filed([store.url_of("data/1")]), {})


def test_a_folder_whose_name_begins_alike_is_outside(folder):
    quarantine = Quarantine.of(folder.url_of("dat"), filed(folder), {})

    assert quarantine.root.url == folder.url_of("data")


def test_a_file_that_is_in_no_folder_is_moved():
    name = uuid.uuid4().hex
    root = Store("memory://")
    root.write(name, b"1")
    source = Filed([root.url_of(name)])
    quarantine = Quarantine.of(f"memory://{uuid.uuid4().hex}", source, {})

    (moved,) = quarantine.take(source, 0, {0: [0]})

    assert moved == Moved(f"memory://{name}", quarantine.store.url_of(name))
    assert quarantine.store.read(name) == b"1"
    assert not root.exists(name)


def test_a_file_keeps_its_path_however_the_others_are_written(tmp_path):
    store = Store(str(tmp_path))
    for name in ("a/1", "b/1"):
        store.write(name, b"1")
    source = Filed([f"{tmp_path}/a/1", f"file://{tmp_path}/b/1"])
    quarantine = Quarantine.of(tmp_path / "bad", source, {})

    moved = quarantine.take(source, 0, {0: [0, 1]})

    assert [one.to for one in moved] == [f"{tmp_path}/bad/{n}" for n in ("a/1", "b/1")]


def test_files_of_two_file_systems_have_no_quarantine(tmp_path):
    source = Filed([f"{tmp_path}/1", "memory://a/1"])

    with pytest.raises(OptionError, match="paths must be on one file system, got"):
        Quarantine.of(tmp_path / "bad", source, {})


def test_a_file_that_a_link_leads_to_is_not_deleted(tmp_path):
    store = Store(str(tmp_path))
    store.write("data/a/1", b"1")
    store.write("data/b/1", b"1")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a").symlink_to(tmp_path / "data" / "a")
    source = Filed([store.url_of("data/a/1"), store.url_of("data/b/1")])

    quarantine = Quarantine.of(store.url_of("bad"), source, {})
    (moved,) = quarantine.take(source, 0, {0: [0]})

    assert moved.to is None
    assert moved.reason.endswith("bad/a/1 is the same file")
    assert store.read("data/a/1") == b"1"


def test_what_is_packed_stays_where_it_is():
    url = "zip://a/1::memory://x/shard.zip"
    source = Filed([url])

    moved = Quarantine.of("memory://bad", source, {}).take(source, 0, {0: [0]})

    assert moved == [Moved(url, None, "it is packed with others")]


def test_data_that_are_not_files_are_refused():
    with pytest.raises(OptionError, match="quarantine is for data that are files"):
        Quarantine.of("memory://bad", Parts(()), {})
