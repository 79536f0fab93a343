"""Files in shards, read as if they were loose; each is checked."""

import pickle
import re
from itertools import chain

import pytest

from daskdl.data.file_batches import file_batches
from daskdl.data.shards.index import Index
from daskdl.data.shards.sharded_files import ShardedFiles
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

FILES = {f"{'ab'[i % 2]}/{i}.txt": bytes([i]) * i for i in range(9)}


@pytest.fixture(params=["zip", "tar"])
def files(request, tmp_path):
    """The files in shards of four, in a random order."""
    store = Store(str(tmp_path / "root"))
    for name, content in FILES.items():
        store.write(name, content)
    url = tmp_path / "packed"
    index = file_batches(store.url, url, 4, format=request.param, client=False)
    return ShardedFiles(Store(str(url)), index)


class TestShardedFiles:
    def test_names_are_those_of_the_originals(self, files):
        assert files.names() == sorted(FILES)
        assert files.names("a") == [n for n in sorted(FILES) if n[0] == "a"]
        assert files.folders() == ["a", "b"]
        assert files.folders("a") == []
        assert files.exists("a/0.txt")
        assert not files.exists("a/1.txt")

    def test_each_is_read_by_its_name(self, files):
        assert {name: files.read(name) for name in files.names()} == FILES

    def test_a_group_is_read_in_its_order_with_one_request(self, files, monkeypatch):
        groups = files.groups(sorted(FILES), 2)
        requests, read = [], Store.read

        def noted(store, name, start=None, stop=None):
            requests.append(name)
            return read(store, name, start, stop)

        monkeypatch.setattr(Store, "read", noted)

        contents = [list(files.read_all(group)) for group in groups]

        assert contents == [[FILES[name] for name in group] for group in groups]
        assert requests == [shard.name for shard in files.index.shards]
        assert list(chain(*groups)) == [
            member.name for shard in files.index.shards for member in shard.members
        ]

    def test_files_of_several_shards_come_in_the_order_asked_for(self, files):
        names = sorted(FILES, reverse=True)

        assert list(files.read_all(names)) == [FILES[name] for name in names]

    def test_a_group_has_only_what_was_asked_for(self, files):
        wanted = ["a/2.txt", "b/7.txt"]

        groups = files.groups(wanted, 64)

        assert sorted(list(chain(*groups))) == wanted

    def test_it_travels(self, files):
        copy = pickle.loads(pickle.dumps(files))

        assert copy.read("b/5.txt") == FILES["b/5.txt"]

    def test_a_changed_byte_is_noticed_and_named(self, files):
        store, index = files.store, files.index
        shard = index.shards[1]
        member = max(shard.members, key=lambda member: member.size)
        content = bytearray(store.read(shard.name))
        content[member.start] ^= 1
        store.write(shard.name, bytes(content))

        where = re.escape(f"{index.archive}://{member.name}::{store.url}/{shard.name}")
        with pytest.raises(DataError, match=rf"^cannot read {where}: it is damaged"):
            list(files.read_shard(1))
        assert dict(files.read_shard(0)) == {
            m.name: FILES[m.name] for m in index.shards[0].members
        }

    def test_a_cut_shard_is_noticed(self, files):
        shard = files.index.shards[0]
        last = max(shard.members, key=lambda member: member.start)
        content = files.store.read(shard.name)
        files.store.write(shard.name, content[: last.start + last.size - 1])

        with pytest.raises(DataError, match=f"{last.name}::.*it is damaged"):
            list(files.read_shard(0))

    def test_a_missing_shard_is_named(self, files):
        shard = files.index.shards[0]
        files.store.delete([shard.name])

        with pytest.raises(DataError, match=f"{shard.name}: there is no such file"):
            list(files.read_shard(0))

    def test_a_file_that_is_in_no_shard_is_named(self, files):
        with pytest.raises(
            DataError, match=r"cannot read c/1\.txt: no shard at .*pack"
        ):
            files.read("c/1.txt")

    def test_a_url_of_a_file_is_one_that_fsspec_opens(self, files):
        import fsspec

        with fsspec.open(files.url_of("b/5.txt")) as file:
            assert file.read() == FILES["b/5.txt"]
        assert files.url_of("b") == f"{files.store.url}/b"

    def test_an_empty_file_alone_needs_no_request(self, files):
        assert files.read("a/0.txt") == b""


def test_a_folder_without_shards_has_no_index(tmp_path):
    store = Store(str(tmp_path))

    assert Index.found(store) is None

    store.write("index.json", b'{"title": "holidays"}')
    assert Index.found(store) is None
