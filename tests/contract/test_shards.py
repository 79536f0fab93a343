"""Packing of original files into shards, and reading of what is in them."""

import io
import json
import pickle
import re
import tarfile
import uuid
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from daskdl.data import Npz, files
from daskdl.data.files import KIND, pack_files, shards_in
from daskdl.data.manifest import File, Manifest
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, OptionError
from tests.support.manifests import outcome, sealed, variants

FILES = {f"{'abc'[i % 3]}/{i}.txt": f"file {i}".encode() for i in range(11)}
MANIFEST = "shards.json"
KINDS = pytest.mark.parametrize("kind", ["zip", "tar"])


def fill(url, contents=FILES):
    store = store_of(url)
    for name, content in contents.items():
        store.write(name, content)
    return url


@pytest.fixture
def root(tmp_path):
    return fill(tmp_path / "root")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "shards"


def pack(paths, target, per_shard=4, **options):
    return pack_files(
        paths, url=target, files_per_shard=per_shard, client=False, **options
    )


def members(target):
    """Names of all files in the shards of a folder, in order."""
    return [name for shard in shards_in(store_of(target)) for name in shard.names]


def contents(target):
    return {path.name: path.read_bytes() for path in target.iterdir()}


@KINDS
class TestArchives:
    def test_every_file_is_in_one_shard_which_other_programs_read(
        self, root, target, kind
    ):
        urls = pack(root, target, format=kind)
        found = {}

        for url in urls:
            if kind == "zip":
                with zipfile.ZipFile(url) as archive:
                    assert archive.testzip() is None
                    found |= {name: archive.read(name) for name in archive.namelist()}
            else:
                with tarfile.open(url) as archive:
                    found |= {m.name: archive.extractfile(m).read() for m in archive}

        assert found == FILES
        assert len(urls) == 3
        assert sorted(members(target)) == sorted(FILES)
        for shard in shards_in(store_of(target)):
            with fsspec.open(shard.url(0)) as file:
                assert file.read() == FILES[shard.names[0]]

    def test_the_same_files_give_the_same_bytes(self, root, target, kind, tmp_path):
        pack(root, target, format=kind)
        (root / "a/0.txt").touch()  # at another time

        pack(root, tmp_path / "again", format=kind)

        assert contents(tmp_path / "again") == contents(target)

    @pytest.mark.parametrize(
        "name", ["ä ö/ü.txt", "a" * 120 + "/" + "b" * 120, "with space", "-"]
    )
    def test_any_name_is_kept(self, target, kind, name):
        store = store_of(fill(f"memory://{uuid.uuid4().hex}", {name: b"hello"}))

        pack(store.url, target, format=kind)

        seen = []
        files(target, lambda file: seen.append(file.read()) or np.zeros(1)).load(0)
        assert (members(target), seen) == ([name], [b"hello"])


class TestPaths:
    def test_the_order_is_random_from_the_seed(self, root, target, tmp_path):
        pack(root, target)
        for i, options in enumerate(({"seed": 1}, {"seed": 0}, {"seed": None})):
            pack(root, tmp_path / str(i), **options)

        assert members(target) != sorted(FILES)
        assert members(tmp_path / "0") != members(target)
        assert members(tmp_path / "1") == members(target)
        assert members(tmp_path / "2") == sorted(FILES)

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*/1.txt", ["b/1.txt"]),
            ("a/*.txt", ["0.txt", "3.txt", "6.txt", "9.txt"]),
            ("a/", ["0.txt", "3.txt", "6.txt", "9.txt"]),
            ("b/1.txt", ["1.txt"]),
            ("**/1*.txt", ["b/1.txt", "b/10.txt"]),
        ],
    )
    @pytest.mark.parametrize("where", ["local", "file", "memory"])
    def test_a_folder_a_pattern_or_a_file(self, root, target, pattern, expected, where):
        urls = {"local": root, "file": f"file://{root}", "memory": "memory://patterns"}
        fill(urls[where])

        pack(f"{urls[where]}/{pattern}", target)

        assert sorted(members(target)) == expected

    @pytest.mark.parametrize(
        ("paths", "options", "expected"),
        [
            ("{}/a", {"root": "{}"}, [n for n in sorted(FILES) if n[0] == "a"]),
            (["{}/a/0.txt", "{}/a/3.txt"], {}, ["0.txt", "3.txt"]),
            (["file://{}/a/0.txt", "{}/b/1.txt"], {}, ["a/0.txt", "b/1.txt"]),
            (["{}/a/0.txt"], {"root": "{}/b/../a"}, ["0.txt"]),
            (["{}/a/0.txt"], {"root": "{}/b"}, None),
        ],
    )
    def test_names_are_relative_to_the_root(
        self, root, target, paths, options, expected
    ):
        several = isinstance(paths, list)
        given = [p.format(root) for p in (paths if several else [paths])]
        options = {key: value.format(root) for key, value in options.items()}

        if expected is None:
            with pytest.raises(OptionError, match="is not in the root"):
                pack(given, target, **options)
            return
        pack(given if several else given[0], target, **options)

        assert sorted(members(target)) == expected

    @pytest.mark.parametrize(
        ("paths", "error", "message"),
        [
            ("{}/nothing", DataError, "there .* {}/nothing$"),
            ("{}/*.png", DataError, r"there .* {}/\*\.png$"),
            ([], OptionError, r"paths must be a path, .* got \[\]"),
            (["{}/a/0.txt"] * 2, DataError, r"a/0\.txt is in paths twice"),
            (["{}/a/0.txt", "memory://x/y"], OptionError, "must be on one file system"),
            (["{}/a/0.txt", "{}/77"], DataError, "there is no file at {}/77"),
            (["memory://no/thing"], DataError, "cannot read memory://no/thing: there"),
        ],
    )
    def test_what_cannot_be_packed_is_named(self, root, target, paths, error, message):
        several = isinstance(paths, list)
        given = [p.format(root) for p in (paths if several else [paths])]

        with pytest.raises(error, match=message.format(re.escape(str(root)))):
            pack(given if several else given[0], target)

        assert not (target / MANIFEST).exists()

    @pytest.mark.parametrize("inner", ["{}", "{}/packed", "file://{}/a/../packed"])
    def test_shards_must_not_be_among_the_files(self, root, inner):
        with pytest.raises(OptionError, match="url must not be in the root"):
            pack(root, inner.format(root))

    @pytest.mark.parametrize(
        ("paths", "inner"),
        [("root", "link/packed"), ("link", "root"), ("link", "link/packed")],
    )
    def test_links_do_not_hide_that_shards_are_among_the_files(
        self, root, tmp_path, paths, inner
    ):
        (tmp_path / "link").symlink_to(root)

        with pytest.raises(OptionError, match="url must not be in the root"):
            pack(tmp_path / paths, tmp_path / inner)

    def test_options_outside_what_is_allowed_are_refused(self, root, target):
        with pytest.raises(OptionError, match="'zip' or 'tar', got 'rar'"):
            pack(root, target, format="rar")
        with pytest.raises(OptionError, match="files_per_shard must be a whole"):
            pack(root, target, 0)


class TestAgain:
    """What was begun is finished; what is finished is left alone."""

    def test_the_manifest_comes_last_and_only_what_is_missing_is_packed(
        self, root, target, monkeypatch
    ):
        written, write = [], Store.write
        monkeypatch.setattr(
            Store, "write", lambda *a: (written.append(a[1]), write(*a))
        )
        urls = pack(root, target)
        shards, before = [Path(url).name for url in urls], contents(target)
        assert written == [*shards, MANIFEST]
        written.clear()

        assert pack(root, target) == urls
        assert written == []

        (target / MANIFEST).unlink()
        (target / shards[1]).unlink()
        assert pack(root, target) == urls
        assert written == [shards[1], MANIFEST]
        assert contents(target) == before

    @KINDS
    @pytest.mark.parametrize("damage", ["changed", "cut"])
    def test_a_shard_that_is_damaged_is_packed_anew(self, root, target, kind, damage):
        urls = pack(root, target, format=kind)
        before = contents(target)
        (target / MANIFEST).unlink()
        content = Path(urls[1]).read_bytes()
        place = content.index(b"file ")
        changed = content[:place] + b"F" + content[place + 1 :]
        Path(urls[1]).write_bytes(changed if damage == "changed" else content[:-9])

        assert pack(root, target, format=kind) == urls

        assert contents(target) == before

    @pytest.mark.parametrize(
        "other",
        [{"seed": 1}, {"per_shard": 5}, {"format": "tar"}, {"elsewhere": True}],
        ids=lambda other: next(iter(other)),
    )
    def test_other_shards_are_not_mixed_with_those_there(
        self, root, target, other, tmp_path
    ):
        pack(root, target)
        before = contents(target)
        paths = fill(tmp_path / "elsewhere") if other.pop("elsewhere", 0) else root

        with pytest.raises(OptionError, match="has shards of other files"):
            pack(paths, target, **other)

        assert contents(target) == before

    def test_a_manifest_of_something_else_is_not_overwritten(self, root, target):
        Store(str(target)).write(MANIFEST, b'{"title": "holidays"}')

        with pytest.raises(DataError, match=r"json is not of .*'daskdl shards'"):
            pack(root, target)

        assert contents(target) == {MANIFEST: b'{"title": "holidays"}'}


def npz(rows, start=0, width=2):
    file = io.BytesIO()
    x = np.arange(start, start + rows, dtype=np.float32)[:, None].repeat(width, 1)
    np.savez(file, x=x, y=np.arange(start, start + rows))
    return file.getvalue()


def labels_of(source):
    """All labels, sorted."""
    loaded = [source.load(part)[1] for part in range(source.parts)]
    return np.sort(np.concatenate(loaded)).tolist()


class TestReading:
    """Five files of 0 to 4 rows, numbered through, two in a shard."""

    @pytest.fixture
    def url(self, tmp_path):
        starts = np.cumsum([0, *range(5)]).tolist()
        contents = {f"{i}.npz": npz(i, starts[i]) for i in range(5)}
        fill(tmp_path / "in", contents)
        pack(tmp_path / "in", tmp_path / "out", 2, seed=None)
        return str(tmp_path / "out")

    def test_each_file_may_give_many_rows(self, url):
        source = pickle.loads(pickle.dumps(files(url)))

        known = source.known([source.look(part) for part in range(source.parts)])

        assert (source.parts, source.lengths) == (3, None)
        assert known.lengths == [1, 5, 4]
        assert known.first[0].shape[1:] == (2,)
        y = np.concatenate([known.load(part)[1] for part in range(3)])
        assert y.tolist() == list(range(10))

    def test_each_file_may_be_one_example(self, url):
        def load(file):
            return np.array([len(file.read())]), int(file.name.split("::")[0][6])

        source = files(url, load, one_example=True)

        assert source.lengths == [2, 2, 1]
        assert source.load(1)[1].tolist() == [2, 3]
        assert source.look(2).rows == 1

    def test_files_are_loaded_one_by_one_from_a_shard_that_is_read_once(
        self, url, monkeypatch
    ):
        read, reads = Store.read, []
        monkeypatch.setattr(Store, "read", lambda *a: reads.append(a) or read(*a))
        source = files(url, Npz())
        reads.clear()

        separate = source.separate(1)

        assert [name[:11] for name, _ in separate] == ["zip://2.npz", "zip://3.npz"]
        assert [load()[1].tolist() for _, load in separate] == [[1, 2], [3, 4, 5]]
        assert len(reads) == 1

    def test_what_does_not_fit_together_is_named(self, tmp_path):
        contents = {"a.npz": npz(2), "b.npz": npz(2, width=3), "c.npz": b"torn"}
        fill(tmp_path / "in", contents)
        pack(tmp_path / "in", tmp_path / "out", 2, seed=None)
        source = files(tmp_path / "out")

        with pytest.raises(
            DataError, match=r"zip://b\.npz::.* has .*\(3,\).* and zip://a\.npz"
        ):
            source.load(0)
        with pytest.raises(
            DataError, match=r"cannot read zip://c\.npz::/.*shard-00001"
        ):
            source.load(1)

    @pytest.mark.parametrize("members", [["3.npz"], ["2.npz", "3.npz", "9.npz"]])
    def test_a_shard_whose_files_are_not_those_listed_is_named(self, url, members):
        manifest = Path(url) / MANIFEST
        content = json.loads(manifest.read_bytes())
        content["files"][1]["members"] = members
        manifest.write_bytes(sealed(content))

        with pytest.raises(
            DataError, match=r"shard-00001.* is damaged: .*members diff"
        ):
            files(url).load(1)

    def test_any_change_of_the_manifest_is_refused_or_changes_no_row(self, url):
        manifest = Path(url) / MANIFEST
        content = json.loads(manifest.read_bytes())

        for change, variant in variants(content, ("files", "content")):
            manifest.write_bytes(sealed(variant))
            rows = outcome(lambda: labels_of(files(url, Npz())))
            assert rows == [*range(10)] or url in rows, change

    @KINDS
    def test_members_larger_than_their_shard_are_not_unpacked(self, tmp_path, kind):
        file = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("a", bytes(2**24))
        else:
            with tarfile.open(fileobj=file, mode="w:") as archive:
                info = tarfile.TarInfo("a")
                sparse = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**24)}
                info.pax_headers = sparse
                archive.addfile(info)
        shard = File.of(f"shard.{kind}", file.getvalue(), members=["a"])
        store = store_of(tmp_path)
        store.write(shard.name, file.getvalue())
        Manifest((shard,), {"plan": ""}).write(store, KIND)

        with pytest.raises(DataError, match=rf"shard\.{kind} is damaged: .*larger"):
            files(tmp_path, Npz()).load(0)

    @pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
    def test_a_damaged_shard_is_named(self, url, damage):
        source = files(url, Npz())
        path = Path(source.groups[1].url(0).partition("::")[2])
        content = bytearray(path.read_bytes())
        content[60] ^= 1
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(content if damage == "changed" else content[:-9])

        message = (
            "there is no" if damage == "gone" else "is damaged: .*pack the files a"
        )
        with pytest.raises(DataError, match=rf"{path}.*{message}"):
            source.load(1)
