"""Files in shards, read as if they were loose; each is checked."""

import pickle
import re
from itertools import chain

import numpy as np
import pytest

from daskdl.data.formats import FromBytes, OneExample
from daskdl.data.shards import Index, ShardedFiles, Shards, file_batches, is_shards
from daskdl.data.storage import Store
from daskdl.data.tabular_formats import Csv
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

        assert sorted(chain(*groups)) == wanted

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

    def test_an_empty_file_alone_needs_no_request(self, files, monkeypatch):
        monkeypatch.delattr(Store, "read")

        assert files.read("a/0.txt") == b""


def test_a_folder_without_shards_has_no_index(tmp_path):
    store = Store(str(tmp_path))

    assert Index.found(store) is None

    store.write("index.json", b'{"title": "holidays"}')
    assert Index.found(store) is None


def squares(content):
    """Rows of a file: the numbers in it, and their squares."""
    x = np.array([int(n) for n in content.split()], np.float32)[:, None]
    return x, x[:, 0] ** 2


def one(content):
    """A file as one example."""
    return np.frombuffer(content, np.uint8)[:2], int(content[-1:])


class TestShards:
    NUMBERS = tuple(list(range(10 * i, 10 * i + i)) for i in range(1, 8))

    @pytest.fixture(params=["zip", "tar"])
    def url(self, request, tmp_path):
        store = Store(str(tmp_path / "root"))
        for i, numbers in enumerate(self.NUMBERS):
            store.write(f"{i}.txt", " ".join(map(str, numbers)).encode())
        url = tmp_path / "packed"
        file_batches(store.url, url, 3, format=request.param, client=False)
        return url

    def test_each_file_may_give_many_rows(self, url):
        source = Shards(url, FromBytes(squares))

        rows = [source.load(part) for part in range(source.parts)]

        assert source.parts == 3
        x = np.concatenate([x for x, _ in rows])[:, 0]
        assert sorted(x) == [n for numbers in self.NUMBERS for n in numbers]
        np.testing.assert_array_equal(np.concatenate([y for _, y in rows]), x**2)

    def test_lengths_are_known_when_each_part_was_looked_at(self, url):
        source = Shards(url, FromBytes(squares))
        assert source.lengths is None
        assert source.first is None

        known = source.known([source.look(part) for part in range(source.parts)])

        lengths = [len(known.load(part)[0]) for part in range(known.parts)]
        assert known.lengths == lengths
        assert known.first[0].shape[1:] == (1,)
        assert source.lengths is None

    def test_each_file_may_be_one_example(self, url):
        source = Shards(url, OneExample(FromBytes(one), classes=["a", "b"]))

        x, y = source.load(0)

        assert source.lengths == [3, 3, 1]
        assert source.classes == ["a", "b"]
        assert x.shape == (3, 2)
        names = source.paths[:3]
        last = [self.NUMBERS[int(name[0])][-1] % 10 for name in names]
        assert y.tolist() == last
        np.testing.assert_array_equal(source.first[0], x[:1])

    def test_there_may_be_no_labels_and_several_inputs(self, url):
        def load(content):
            x, y = squares(content)
            return {"x": x, "squares": (y,)}

        x, y = Shards(url, FromBytes(load)).load(1)

        assert y is None
        np.testing.assert_array_equal(x["squares"][0], x["x"][:, 0] ** 2)

    def test_csv_files_are_packed_and_read(self, tmp_path):
        store = Store(str(tmp_path / "root"))
        for i in range(4):
            store.write(f"{i}.csv", f"a,label\n{i},1\n{i + 10},0\n".encode())
        file_batches(f"{store.url}/*.csv", tmp_path / "packed", 2, client=False)

        x, y = Shards(tmp_path / "packed", Csv(label="label")).load(0)

        assert sorted(x[:, 0] % 10) == sorted(
            [int(n[0]) for n in names_of(tmp_path)] * 2
        )
        assert y.tolist() == [1, 0, 1, 0]

    def test_it_travels(self, url):
        copy = pickle.loads(pickle.dumps(Shards(url, FromBytes(squares))))

        assert copy.name(0) == Shards(url, FromBytes(squares)).name(0)
        assert len(copy.load(0)[0]) > 0

    def test_what_cannot_be_loaded_is_named(self, url):
        def load(content):
            return np.array([int(content)]), None

        source = Shards(url, FromBytes(load))
        names = [name for name in source.paths[:3] if name != "0.txt"]

        with pytest.raises(
            DataError, match=rf"cannot read \w+://{names[0]}::.*: Value"
        ):
            source.load(0)

    @pytest.mark.parametrize("other", ["shape", "labels"])
    def test_files_that_do_not_fit_together_are_named(self, url, other):
        def load(content):
            x, y = squares(content)
            if content.startswith(b"10"):
                return (x.repeat(2, axis=1), y) if other == "shape" else x
            return x, y

        source = Shards(url, FromBytes(load))
        part = source.paths.index("0.txt") // 3

        with pytest.raises(DataError, match=r"txt::.* gives x of shape .* before it"):
            source.load(part)

    @pytest.mark.parametrize(
        "loader", [squares, FromBytes(squares)], ids=["plain", "of bytes"]
    )
    def test_a_function_gets_the_bytes_of_a_file(self, url, loader):
        wrapped, plain = Shards(url, FromBytes(squares)), Shards(url, loader)

        for part in range(wrapped.parts):
            np.testing.assert_array_equal(plain.load(part)[0], wrapped.load(part)[0])

    def test_without_a_loader_the_extension_decides(self, url):
        with pytest.raises(DataError, match=r"must all be of one of .* got '?\.txt"):
            Shards(url)

    def test_a_folder_without_shards_is_named(self, tmp_path):
        with pytest.raises(DataError, match=r"index\.json: there is no such file"):
            Shards(tmp_path, FromBytes(squares))

    def test_it_is_told_from_other_folders(self, url, tmp_path):
        assert is_shards(url)
        assert is_shards(str(url))
        assert not is_shards(tmp_path)
        assert not is_shards(np.zeros(3))
        assert not is_shards([str(url)])


def names_of(folder):
    """The files of the first shard."""
    return [m.name for m in Index.read(Store(str(folder / "packed"))).shards[0].members]
