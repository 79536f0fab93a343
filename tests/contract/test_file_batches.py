"""Original files in shards: all of them, once, always the same bytes, or none."""

import json
import re
import tarfile
import uuid
import zipfile
from pathlib import Path

import pytest

from daskdl.data import shards as module
from daskdl.data.shards import INDEX, Index, ShardedFiles, file_batches
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError

FILES = {f"{'abc'[i % 3]}/{i}.txt": f"file {i}".encode() * i for i in range(11)}


@pytest.fixture
def root(tmp_path):
    """A folder of files, one of them empty."""
    return fill(tmp_path / "root")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "packed"


def fill(path):
    store = Store(str(path))
    for name, content in FILES.items():
        store.write(name, content)
    return path


def pack(paths, url, per_batch=4, **options):
    return file_batches(paths, url, per_batch, client=False, **options)


def members(index):
    return [member.name for shard in index.shards for member in shard.members]


def contents(folder):
    """Every file of a local folder."""
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("kind", ["zip", "tar"])
class TestShards:
    def test_every_file_is_in_one_shard(self, root, target, kind):
        index = pack(root, target, format=kind)

        assert sorted(members(index)) == sorted(FILES)
        assert [len(shard.members) for shard in index.shards] == [4, 4, 3]
        assert index.files == 11
        assert index.size_bytes == sum(p.stat().st_size for p in target.glob("s*"))

    def test_other_programs_read_them(self, root, target, kind):
        index = pack(root, target, format=kind)

        read = {}
        for shard in index.shards:
            path = target / shard.name
            if kind == "zip":
                with zipfile.ZipFile(path) as found:
                    assert found.testzip() is None
                    read |= {name: found.read(name) for name in found.namelist()}
            else:
                with tarfile.open(path) as found:
                    read |= {m.name: found.extractfile(m).read() for m in found}
        assert read == FILES

    def test_ranges_in_the_index_are_the_files(self, root, target, kind):
        index = pack(root, target, format=kind)

        for shard in index.shards:
            whole = (target / shard.name).read_bytes()
            for name, start, size, _ in shard.members:
                assert whole[start : start + size] == FILES[name]

    def test_the_same_files_give_the_same_bytes(self, root, target, kind, tmp_path):
        pack(root, target, format=kind)
        before = contents(target)
        for path in root.rglob("*.txt"):
            path.touch()

        pack(root, tmp_path / "again", format=kind)

        assert contents(tmp_path / "again") == before

    @pytest.mark.parametrize("name", ["ünï/日本.txt", "deep/" * 40 + "x.txt"])
    def test_any_name_is_kept(self, target, kind, name):
        store = Store("memory://names")
        store.write(name, b"hello")

        index = pack("memory://names", target, format=kind)

        assert members(index) == [name]
        assert ShardedFiles(Store(str(target)), index).read(name) == b"hello"
        store.delete_all()


class TestOrder:
    def test_it_is_random_from_the_seed(self, root, target, tmp_path):
        index = pack(root, target)

        assert members(index) != sorted(FILES)
        assert members(pack(root, tmp_path / "other", seed=1)) != members(index)
        assert members(pack(root, tmp_path / "same", seed=0)) == members(index)

    def test_without_a_seed_it_is_that_of_the_list(self, root, target, tmp_path):
        listed = [root / name for name in ("c/2.txt", "a/0.txt", "b/1.txt")]

        assert members(pack(root, target, seed=None)) == sorted(FILES)
        assert members(pack(listed, tmp_path / "l", seed=None)) == [
            "c/2.txt",
            "a/0.txt",
            "b/1.txt",
        ]


class TestPaths:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*/1.txt", ["b/1.txt"]),
            ("a/*.txt", ["0.txt", "3.txt", "6.txt", "9.txt"]),
            ("a", ["0.txt", "3.txt", "6.txt", "9.txt"]),
            ("a/", ["0.txt", "3.txt", "6.txt", "9.txt"]),
            ("b/1.txt", ["1.txt"]),
            ("**/1*.txt", ["b/1.txt", "b/10.txt"]),
        ],
    )
    @pytest.mark.parametrize("where", ["local", "memory"])
    def test_a_folder_a_glob_or_a_file(self, root, target, pattern, expected, where):
        given = root
        if where == "memory":
            fill("memory://patterns")
            given = "memory://patterns"

        index = pack(f"{given}/{pattern}", target)

        assert sorted(members(index)) == expected

    def test_names_may_be_relative_to_a_folder_above(self, root, target):
        index = pack(root / "a" / "*.txt", target, root=root)

        assert sorted(members(index)) == [n for n in sorted(FILES) if n[0] == "a"]

    def test_a_list_has_the_root_that_all_share(self, root, target, tmp_path):
        same = pack([root / "a/0.txt", root / "a/3.txt"], target)
        above = pack([root / "a/0.txt"], tmp_path / "x", root=tmp_path)

        assert sorted(members(same)) == ["0.txt", "3.txt"]
        assert members(above) == ["root/a/0.txt"]

    def test_a_relative_path_is_one_of_this_process(self, root, target, monkeypatch):
        monkeypatch.chdir(root.parent)

        index = pack(["root/a/0.txt", Path("root/b/1.txt")], target.name)

        assert sorted(members(index)) == ["a/0.txt", "b/1.txt"]
        assert (target / INDEX).is_file()

    def test_urls_of_the_same_files_differ_in_nothing_else(self, root, target):
        local = pack(f"file://{root}", target)
        fill("memory://other")

        remote = pack("memory://other", "memory://packed")

        assert members(local) == members(remote)
        assert [s.members for s in local.shards] == [s.members for s in remote.shards]

    @pytest.mark.parametrize(
        "paths", ["{}/nothing", "{}/*.png", "memory://no/thing", "memory://n/*.png"]
    )
    def test_paths_that_match_nothing_are_named(self, root, target, paths):
        given = paths.format(root)

        with pytest.raises(DataError, match=f"there .* {re.escape(given)}$"):
            pack(given, target)

        assert not target.exists()

    def test_a_list_must_not_be_empty(self, target):
        with pytest.raises(OptionError, match=r"paths must be a path, .* got \[\]"):
            pack([], target)

    def test_a_file_given_twice_is_named(self, root, target):
        with pytest.raises(DataError, match=r"a/0\.txt is in paths twice"):
            pack([root / "a/0.txt", f"file://{root}/a/0.txt"], target, root=root)

    def test_a_file_outside_the_root_is_named(self, root, target):
        with pytest.raises(OptionError, match=r"a/0\.txt is not in the root .*/b$"):
            pack([root / "a/0.txt"], target, root=root / "b")

    def test_two_file_systems_are_refused(self, root, target):
        with pytest.raises(OptionError, match="paths must be on one file system"):
            pack([root / "a/0.txt", "memory://other/a/3.txt"], target)

    def test_a_missing_file_is_named(self, root, target):
        with pytest.raises(DataError, match=r"there is no file at .*a/77\.txt"):
            pack([root / "a/0.txt", root / "a/77.txt"], target)

    def test_a_file_that_cannot_be_read_is_named(self, target):
        fill("memory://there")
        given = ["memory://there/a/0.txt", "memory://there/a/77.txt"]

        with pytest.raises(DataError, match=r"cannot read .*a/77\.txt: there is no"):
            pack(given, target)

        assert not (target / INDEX).exists()

    def test_a_folder_may_have_wildcards_in_its_name(self, tmp_path, target):
        fill(tmp_path / "x[1]")

        assert sorted(members(pack(tmp_path / "x[1]", target))) == sorted(FILES)

    def test_a_folder_may_have_a_root_above_it(self, root, target):
        index = pack(root / "a", target, root=root)

        assert sorted(members(index)) == [n for n in sorted(FILES) if n[0] == "a"]

    @pytest.mark.parametrize("inner", ["", "packed"])
    def test_shards_must_not_be_among_the_files(self, root, inner):
        with pytest.raises(OptionError, match="url must not be in the root"):
            pack(root, root / inner)

    def test_shards_must_not_be_there_however_it_is_written(self, root):
        with pytest.raises(OptionError, match="url must not be in the root"):
            pack(root, f"file://{root}/a/../packed")

    def test_a_file_that_is_in_no_folder_is_packed(self, target):
        name = f"{uuid.uuid4().hex}.txt"
        Store("memory://").write(name, b"one")

        index = pack(f"memory://{name}", target)

        assert members(index) == [name]
        Store("memory://").delete([name])


class TestAgain:
    """What was begun is finished; what is finished is left alone."""

    @pytest.fixture
    def written(self, monkeypatch):
        """Names of all files that are written."""
        names, write = [], Store.write

        def noted(store, name, content):
            names.append(name)
            write(store, name, content)

        monkeypatch.setattr(Store, "write", noted)
        return names

    def test_the_index_comes_last(self, root, target, written):
        index = pack(root, target)

        assert written == [*(shard.name for shard in index.shards), INDEX]

    def test_what_is_finished_is_not_packed_again(self, root, target, written):
        index = pack(root, target)
        written.clear()

        assert pack(root, target) == index

        assert written == []

    def test_only_what_is_missing_is_packed(self, root, target, written):
        index = pack(root, target)
        before = contents(target)
        (target / INDEX).unlink()
        (target / index.shards[1].name).unlink()
        written.clear()

        assert pack(root, target) == index

        assert written == [index.shards[1].name, INDEX]
        assert contents(target) == before

    def test_it_goes_on_after_a_failure(self, root, target, written, monkeypatch):
        with monkeypatch.context() as patched:
            packing = module.archived

            def third(files, archive):
                if len(written) == 2:
                    raise KeyboardInterrupt
                return packing(files, archive)

            patched.setattr(module, "archived", third)
            with pytest.raises(KeyboardInterrupt):
                pack(root, target)
        before = contents(target)

        index = pack(root, target)

        assert len(before) == 2
        assert written == [*(shard.name for shard in index.shards), INDEX]
        assert sorted(members(index)) == sorted(FILES)

    @pytest.mark.parametrize("kind", ["zip", "tar"])
    @pytest.mark.parametrize("damage", [b"", b"no archive", None])
    def test_a_shard_that_is_not_what_it_should_be_is_written_anew(
        self, root, target, damage, kind
    ):
        index = pack(root, target, format=kind)
        before = contents(target)
        (target / INDEX).unlink()
        other = before[index.shards[1].name]
        (target / index.shards[0].name).write_bytes(other if damage is None else damage)

        assert pack(root, target, format=kind) == index

        assert contents(target) == before

    @pytest.mark.parametrize("kind", ["zip", "tar"])
    def test_a_cut_shard_is_written_anew(self, root, target, kind):
        index = pack(root, target, format=kind)
        before = contents(target)
        (target / INDEX).unlink()
        name = index.shards[2].name
        (target / name).write_bytes(before[name][:-1100])

        assert pack(root, target, format=kind) == index

        assert contents(target) == before

    @pytest.mark.parametrize(
        "other",
        [{"seed": 1}, {"per_batch": 5}, {"format": "tar"}],
        ids=["seed", "size", "format"],
    )
    def test_other_shards_are_not_mixed_with_those_there(self, root, target, other):
        pack(root, target)
        before = contents(target)

        with pytest.raises(OptionError, match="has shards of other files"):
            pack(root, target, **other)

        assert contents(target) == before

    def test_the_same_names_elsewhere_are_other_files(self, root, target, tmp_path):
        pack(root, target)

        with pytest.raises(OptionError, match="has shards of other files"):
            pack(fill(tmp_path / "elsewhere"), target)

    def test_an_index_of_something_else_is_not_overwritten(self, root, target):
        Store(str(target)).write(INDEX, b'{"title": "holidays"}')

        with pytest.raises(DataError, match=r"index\.json: not an index of shards"):
            pack(root, target)

        assert contents(target) == {INDEX: b'{"title": "holidays"}'}


class TestIndex:
    def test_it_is_read_as_it_was_written(self, root, target):
        index = pack(root, target)

        assert Index.read(Store(str(target))) == index

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"{", "not an index of shards"),
            (b"[]", "not an index of shards"),
            (b'{"format": "daskdl-shards"}', r"not an index of shards \('version'\)"),
            ({"version": 2}, "version 2 of 'zip' shards; this daskdl reads version 1"),
            ({"archive": "rar"}, "version 1 of 'rar' shards"),
            ({"shards": [{"name": "x"}]}, r"not an index of shards \('"),
        ],
        ids=["no json", "a list", "empty", "version", "archive", "shards"],
    )
    def test_another_file_is_refused(self, root, target, content, message):
        pack(root, target)
        if isinstance(content, dict):
            content = json.dumps(json.loads((target / INDEX).read_bytes()) | content)
            content = content.encode()
        (target / INDEX).write_bytes(content)

        with pytest.raises(DataError, match=rf"cannot read {target}/index.json: .*"):
            Index.read(Store(str(target)))
        with pytest.raises(DataError, match=message):
            Index.read(Store(str(target)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "rar"}, 'format must be "zip" or "tar", got \'rar\''),
        ({"per_batch": 0}, "files_per_batch must be a whole number >= 1, got 0"),
        ({"per_batch": 2.0}, "files_per_batch must be a whole number >= 1, got 2.0"),
    ],
)
def test_options_outside_what_is_allowed_are_refused(root, target, options, message):
    with pytest.raises(OptionError, match=message):
        pack(root, target, **options)
