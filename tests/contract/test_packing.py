"""Packed files: nothing lost, nothing doubled, also after an interruption."""

import asyncio
import io
import json
import pickle
import re
import shutil
import tempfile
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
import safetensors.numpy
import torch
from dask import delayed
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.data import Npz, files, image_folder, pack, packing
from daskdl.data.inputs import infer_metadata
from daskdl.data.packed import packed_in
from daskdl.data.packing import PackOptions, temporarily_packed, token_of
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, OptionError
from tests.support.manifests import outcome, sealed, variants
from tests.support.numbered import Numbered, Streamed, ids_of, numbered
from tests.support.processes import in_a_fork

LENGTHS = (30, 0, 17, 3, 50)
MANIFEST = "packed.json"
ORIGINALS = "memory://daskdl-test-originals"


@pytest.fixture
def url():
    """A place for packed files: `test_store` has the others."""
    yield "memory://daskdl-test-packed"
    Store("memory://daskdl-test-packed").delete_all()


@pytest.fixture
def small(monkeypatch):
    """Many buckets and pieces: about 12 rows each."""
    monkeypatch.setattr(packing, "BUCKET_BYTES", 12 * 17)
    monkeypatch.setattr(packing, "PIECE_BYTES", 12 * 17)


def fill(url, contents):
    """Write files; returns the URL."""
    store = store_of(url)
    for name, content in contents.items():
        store.write(name, content)
    return url


def pack_rows(url, source=None, **options):
    source = Numbered(LENGTHS) if source is None else source
    return pack(source, url=url, **{"per_file": 4, "client": False, **options})


def read_rows(url):
    return ids_of(files(url)).tolist()


def pack_files(url, count=25, **options):
    contents = {f"{'abc'[i % 3]}/{i:02}.txt": f"{i}".encode() for i in range(count)}
    X = fill(f"{ORIGINALS}/{count}", contents)
    return pack(X, url=url, **{"per_file": 4, "client": False, **options})


def number_in(file):
    return np.zeros(1), int(file.read())


def read_files(url):
    source = files(url, number_in, one_example=True)
    numbers = [y for part in range(source.parts) for y in source.load(part)[1]]
    assert [name.split("/")[-1] for group in source.groups for name in group.names] == [
        f"{number:02}.txt" for number in numbers
    ]
    return [int(number) for number in numbers]


KINDS = {"rows": (pack_rows, read_rows, 100), "files": (pack_files, read_files, 25)}


@pytest.fixture(params=KINDS)
def kind(request):
    """Packs numbered rows or files, and reads their numbers."""
    yield KINDS[request.param]
    Store(ORIGINALS).delete_all()


def names_at(urls):
    """Names of the packed files and of the manifest."""
    return [*(url.rpartition("/")[2] for url in urls), MANIFEST]


def contents(url):
    store = store_of(url)
    return {name: store.read(name) for name in store.names()}


@pytest.fixture
def written(monkeypatch):
    """Names of the files that are written from now on."""
    names, write = [], Store.write

    def noted(store, name, content):
        names.append(name)
        write(store, name, content)

    monkeypatch.setattr(Store, "write", noted)
    return names


def interrupted(monkeypatch, make, url, at, **options):
    """Begin to pack, and interrupt it as this file is written."""
    write = Store.write

    def fails(store, name, content):
        if name == at:
            raise KeyboardInterrupt
        write(store, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fails)
        with pytest.raises(KeyboardInterrupt):
            make(url, **options)


def change_manifest(url, change):
    """Change the JSON of a manifest, and correct its checksum."""
    content = json.loads(Store(url).read(MANIFEST))
    change(content)
    Store(url).write(MANIFEST, sealed(content))


class TestBothKinds:
    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("place", ["memory", "local"])
    def test_each_example_is_there_once_and_nothing_else_is_left(
        self, url, small, kind, place, shuffle, tmp_path
    ):
        make, read, count = kind
        url = url if place == "memory" else str(tmp_path / "packed")

        urls = make(url, shuffle=shuffle)

        numbers = read(url)
        assert sorted(numbers) == list(range(count))
        assert shuffle or make is pack_files or numbers == sorted(numbers)
        assert shuffle is False or numbers != sorted(numbers)
        assert urls == [f"{url}/packed-{i:06}.safetensors" for i in range(len(urls))]
        assert len(urls) == -(-count // 4)
        assert Store(url).names() == names_at(urls)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_the_same_seed_gives_the_same_bytes(self, url, small, kind, seed, tmp_path):
        kind[0](url, seed=seed)
        kind[0](str(tmp_path / "again"))

        before, again = contents(url), contents(tmp_path / "again")
        assert (before == again) is (seed == 0)

    @pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
    def test_a_damaged_file_is_named_with_the_remedy(self, url, kind, damage):
        make, read, _ = kind
        name = names_at(make(url))[1]
        store, content = Store(url), bytearray(Store(url).read(f"{name}"))
        content[-1] ^= 1
        store.write(name, content if damage == "changed" else content[:-9])
        if damage == "gone":
            store.delete([name])

        message = "there is no" if damage == "gone" else "is damaged: .*pack again with"
        with pytest.raises(DataError, match=rf"{url}/{name}.*{message}"):
            read(url)

    def test_any_change_of_the_manifest_is_refused_or_changes_no_row(
        self, tmp_path, kind
    ):
        make, read, _ = kind
        url = str(tmp_path)
        make(url, **({"count": 5} if make is pack_files else {"source": Numbered([9])}))
        numbers = sorted(read(url))
        content = json.loads(Store(url).read(MANIFEST))

        for change, variant in variants(content, ("files", "content")):
            Store(url).write(MANIFEST, sealed(variant))
            result = outcome(lambda: sorted(read(url)))
            assert result == numbers or url in result, change

    def test_a_folder_is_known_finished_or_not(self, url, kind):
        make, read, _ = kind
        assert packed_in(Store(url)) is None
        make(url)
        assert packed_in(Store(url)) is not None
        Store(url).delete([MANIFEST])
        assert packed_in(Store(url)) is None
        Store(url).write(".unfinished/origin.json", b"{}")
        with pytest.raises(DataError, match=r"has not been finished; run it again"):
            read(url)


PLACES = [
    (pack_rows, read_rows, ".unfinished/part-000002-0000.rows"),
    (pack_rows, read_rows, ".unfinished/part-000002.json"),
    (pack_rows, read_rows, "packed-000011.safetensors"),
    (pack_rows, read_rows, ".unfinished/bucket-000003.json"),
    (pack_rows, read_rows, MANIFEST),
    (pack_files, read_files, "packed-000003.safetensors"),
    (pack_files, read_files, ".unfinished/bucket-000003.json"),
    (pack_files, read_files, MANIFEST),
]


class TestInterrupted:
    @pytest.mark.parametrize(("make", "read", "at"), PLACES)
    def test_it_cannot_be_read_and_continues_to_the_same_files(
        self, monkeypatch, url, small, make, read, at, tmp_path
    ):
        make(str(tmp_path / "whole"))
        interrupted(monkeypatch, make, url, at)
        with pytest.raises(DataError, match=r"has not been finished; run it again"):
            read(url)

        make(url)

        assert contents(url) == contents(tmp_path / "whole")

    def test_parts_that_were_done_are_not_loaded_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, pack_rows, url, ".unfinished/part-000003.json")
        source = Numbered(LENGTHS)

        pack_rows(url, source)

        assert source.loaded == [3, 4]

    def test_files_that_were_done_are_not_written_again(
        self, monkeypatch, url, small, kind, written
    ):
        make, _, count = kind
        interrupted(monkeypatch, make, url, ".unfinished/bucket-000002.json")
        written.clear()

        make(url)

        # A bucket of rows has three files; the third bucket was half done.
        done = 6 if make is pack_rows else 2
        names = sorted(name for name in written if name.startswith("packed-"))
        assert len(names) == -(-count // 4) - done
        assert names[0] == f"packed-{done:06}.safetensors"
        assert not {f".unfinished/bucket-00000{i}.json" for i in (0, 1)} & {*written}

    def test_a_file_that_is_not_what_was_written_is_made_again(
        self, monkeypatch, url, small, kind
    ):
        make, read, count = kind
        interrupted(monkeypatch, make, url, MANIFEST)
        Store(url).delete(["packed-000004.safetensors"])
        Store(url).write("packed-000005.safetensors", b"x" * 400)

        make(url)

        assert sorted(read(url)) == list(range(count))

    def test_buckets_of_another_plan_are_made_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, pack_rows, url, ".unfinished/bucket-000005.json")
        monkeypatch.setattr(packing, "BUCKET_BYTES", 20 * 17)

        pack_rows(url)

        assert sorted(read_rows(url)) == list(range(100))

    def test_buckets_of_other_rows_are_made_again(self, monkeypatch, url, small):
        monkeypatch.setattr(packing, "token_of", lambda value: "same")
        interrupted(monkeypatch, pack_rows, url, MANIFEST)
        Store(url).delete([".unfinished/part-000002.json"])

        pack_rows(url, Numbered((30, 0, 16, 3, 51)))  # the part has a row less

        assert sorted(read_rows(url)) == [row for row in range(100) if row != 46]

    def test_a_record_that_lacks_a_file_is_made_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, pack_rows, url, MANIFEST)
        record = json.loads(Store(url).read(".unfinished/bucket-000001.json"))
        del record["files"][1]
        Store(url).write(".unfinished/bucket-000001.json", json.dumps(record).encode())

        pack_rows(url)

        assert sorted(read_rows(url)) == list(range(100))

    @pytest.mark.parametrize("finished", [True, False])
    @pytest.mark.parametrize(
        ("make", "change", "message"),
        [
            (pack_rows, {"per_file": 8}, "per_file was 4 and is 8"),
            (pack_rows, {"seed": 1}, "seed was 0 and is 1"),
            (pack_rows, {"source": Numbered([100])}, "data was .*parts was 5 and is 1"),
            (pack_rows, {"transform": tuple}, "transform was None and is '"),
            (pack_files, {"per_file": 5}, "per_file was 4 and is 5"),
            (pack_files, {"shuffle": False}, "seed was 0 and is None"),
            (pack_files, {"count": 24}, "data was '.*' and is '"),
        ],
    )
    def test_another_content_is_refused_or_takes_its_place(
        self, monkeypatch, url, small, make, change, message, finished
    ):
        if finished:
            make(url)
        else:
            interrupted(monkeypatch, make, url, "packed-000003.safetensors")
        before = contents(url)
        what = "packed files" if finished else "unfinished packed files"

        with pytest.raises(OptionError, match=f"there are {what} of .*: .*{message}"):
            make(url, **change)
        assert contents(url) == before
        urls = make(url, **{**change, "transform": None}, overwrite=True)

        read = read_rows if make is pack_rows else read_files
        count = 100 if make is pack_rows else change.get("count", 25)
        assert Store(url).names() == names_at(urls)
        assert sorted(read(url)) == list(range(count))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("part-000000-0000.rows", r"it has 1 bytes instead of \d+"),
            ("part-000000.json", "JSON|Expecting"),
        ],
    )
    def test_a_damaged_file_of_it_is_named(self, monkeypatch, url, name, message):
        interrupted(monkeypatch, pack_rows, url, "packed-000000.safetensors")
        Store(url).write(f".unfinished/{name}", b"{")

        with pytest.raises(DataError, match=rf"{name} is damaged: .*{message}"):
            pack_rows(url)

    def test_a_piece_that_is_gone_is_named_with_the_remedy(self, monkeypatch, url):
        interrupted(monkeypatch, pack_rows, url, "packed-000000.safetensors")
        name = ".unfinished/part-000000-0000.rows"
        Store(url).delete([name])

        with pytest.raises(DataError, match=rf"{name}: .*; pack again with overwrite"):
            pack_rows(url)

    @pytest.mark.parametrize(
        ("make", "read", "name"),
        [
            (pack_rows, read_rows, "part-000000.json"),
            (pack_rows, read_rows, "bucket-000000.json"),
            (pack_files, read_files, "bucket-000000.json"),
        ],
    )
    def test_any_change_of_a_record_is_refused_or_changes_no_row(
        self, monkeypatch, tmp_path, make, read, name
    ):
        url, broken = str(tmp_path / "packed"), tmp_path / "broken"
        rows = make is pack_rows
        options = {"source": Numbered([9])} if rows else {"count": 5}
        interrupted(monkeypatch, make, url, MANIFEST, **options)
        record = json.loads(Store(url).read(f".unfinished/{name}"))

        for change, variant in variants(record):
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(url, broken)
            (broken / ".unfinished" / name).write_text(json.dumps(variant))
            result = outcome(lambda: make(broken, **options) and sorted(read(broken)))
            assert result == [*range(9 if rows else 5)] or str(broken) in result, change


class TestFinished:
    def test_it_is_not_made_again_and_leftovers_go(self, url, small, kind, written):
        urls = kind[0](url)
        Store(url).write(".unfinished/part-000000.json", b"left there")
        written.clear()

        assert kind[0](url) == urls

        assert not [name for name in written if not name.endswith(".txt")]
        assert Store(url).names() == names_at(urls)

    def test_a_damaged_one_may_be_overwritten_and_files_of_others_stay(self, url, kind):
        make, read, count = kind
        make(url)
        Store(url).write(MANIFEST, b'{"title": "holidays"}')
        Store(url).write("notes.txt", b"mine")
        with pytest.raises(DataError, match=r"json does not .*'daskdl packed files'"):
            make(url)

        urls = make(url, overwrite=True)

        assert sorted(read(url)) == list(range(count))
        assert Store(url).names() == sorted([*names_at(urls), "notes.txt"])


class TestAbandoned:
    """A task that outlives its call leaves nothing."""

    @pytest.mark.parametrize(
        ("make", "at"),
        [
            (pack_rows, ".unfinished/part-000002-0000.rows"),
            (pack_rows, "packed-000011.safetensors"),
            (pack_files, "packed-000003.safetensors"),
        ],
    )
    def test_a_file_that_comes_too_late_is_taken_away(
        self, monkeypatch, url, small, make, at
    ):
        write = Store.write

        def abandoned_at(store, name, content):
            if name == at:
                store.delete(store.names())
            write(store, name, content)

        monkeypatch.setattr(Store, "write", abandoned_at)

        with pytest.raises(DataError, match=r"either packing was abandoned, or the"):
            make(url)

        assert Store(url).names() == []

    def test_a_second_task_for_a_bucket_does_not_take_away_what_is_finished(
        self, monkeypatch, url, small, kind
    ):
        make, read, count = kind
        write, urls = Store.write, []

        def finished_at(store, name, content):
            if name == "packed-000005.safetensors" and not urls:
                urls.append("")
                urls[:] = make(url)
            write(store, name, content)

        monkeypatch.setattr(Store, "write", finished_at)
        with pytest.raises(DataError, match="either packing was abandoned"):
            make(url)

        assert sorted(read(url)) == list(range(count))
        assert Store(url).names() == names_at(urls)

    def test_an_old_task_changes_nothing_of_what_replaced_it(self, url):
        urls = []

        def replaced(rows):
            if not urls:
                urls[:] = pack_rows(url, Numbered([50]), overwrite=True)
            return rows

        with pytest.raises(DataError, match="either packing was abandoned"):
            pack_rows(url, transform=replaced)

        assert sorted(read_rows(url)) == list(range(50))
        assert Store(url).names() == names_at(urls)


A, B = np.arange(6.0).reshape(3, 2), np.array([True, False, True])


class TestRows:
    @settings(max_examples=12)
    @given(
        st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
        st.integers(1, 20),
        st.integers(20, 900),
    )
    def test_any_parts_and_sizes(self, lengths, per_file, bucket_bytes):
        url = "memory://daskdl-test-any"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "BUCKET_BYTES", bucket_bytes)
            patch.setattr(packing, "PIECE_BYTES", bucket_bytes)

            pack_rows(url, Numbered(lengths), per_file=per_file, overwrite=True)

        source = files(url)
        assert sorted(ids_of(source)) == list(range(sum(lengths)))
        assert set(source.lengths[:-1]) <= {per_file}

    def test_rows_of_all_parts_are_mixed(self, url, small):
        pack_rows(url, Numbered([50] * 4), per_file=10)

        parts = ids_of(files(url)).reshape(20, 10) // 50
        assert np.mean([len(set(file)) for file in parts]) > 3

    def test_rows_of_a_part_are_in_another_order_than_those_of_another(self, url):
        pack_rows(url, Numbered([50, 50]), per_file=100)

        ids = ids_of(files(url))
        low, high = ids[ids < 50], ids[ids >= 50] - 50
        assert low.tolist() != high.tolist()

    def test_a_stream_is_written_as_it_comes(self, url, monkeypatch):
        monkeypatch.setattr(packing, "PIECE_BYTES", 1)

        class Watched(Streamed):
            def stream(self, part, rows):
                for i, block in enumerate(super().stream(part, rows)):
                    assert len(Store(url).names(".unfinished/*.rows")) == 7 * i
                    yield block

        pack_rows(url, Watched([10]))
        assert sorted(read_rows(url)) == [*range(10)]

    def test_a_folder_of_them_is_a_source_of_rows(self, url):
        pack_rows(url, Numbered([5, 6]))

        source = files(url)

        (x, y), (like_x, like_y) = source.first_rows, numbered(0, 2)
        assert (source.parts, source.lengths, source.rows) == (3, [4, 4, 3], 11)
        assert source.name(1) == f"{url}/packed-000001.safetensors"
        assert x["pair"][0].shape == like_x["pair"][0].shape
        assert (y.dtype, y.shape) == (like_y.dtype, (2,))
        assert sorted(ids_of(pickle.loads(pickle.dumps(source)))) == list(range(11))
        content = safetensors.numpy.load(Store(url).read("packed-000000.safetensors"))
        assert sorted(content) == ["x['id']", "x['pair'][0]", "y"]

    def test_they_need_no_loader_and_are_no_images(self, url):
        pack_rows(url)

        with pytest.raises(OptionError, match="loader and one_example are for files"):
            files(url, Npz())
        with pytest.raises(DataError, match=f"{url} has packed rows, not image files"):
            image_folder(url)

    def test_classes_are_those_of_the_data_or_of_the_user(self, url):
        pack_rows(url)
        assert files(url).classes == ("a", "b", "c")
        assert files(url, classes=["k", "l", "m"]).classes == ["k", "l", "m"]

        pack_rows(url, classes=["d", "e", "f"], overwrite=True)

        assert files(url).classes == ("d", "e", "f")

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"rows": 5}, r"x\['id'\] is int64 \(20,\), .*listed as .*int64.*\(5,\)"),
            ({"rows": 21}, r"listed as .*int64.*\(21,\)"),
            ({"rows": 0}, r"contents of packed-000000.safetensors are \{'rows': 0"),
            ({"nbytes": 2**40}, "it lists no file that exists in its full size"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_a_manifest_that_its_files_contradict_is_refused(
        self, tmp_path, changed, message
    ):
        pack_rows(tmp_path, Numbered([20]), per_file=20)
        change_manifest(str(tmp_path), lambda m: m["files"][0].update(changed))

        with pytest.raises(DataError, match=rf"is damaged: .*{message}.*; pack again"):
            files(tmp_path).load(0)

    @pytest.mark.parametrize(
        "field", ["schema", "classes", "columns", "scaled_by", "made_from"]
    )
    def test_a_missing_field_of_the_manifest_is_named(self, tmp_path, field):
        pack_rows(tmp_path)
        change_manifest(str(tmp_path), lambda m: m["content"].pop(field))

        with pytest.raises(DataError, match=f"is damaged: .*'{field}'.*; pack again"):
            pack_rows(tmp_path) if field == "made_from" else files(tmp_path)

    def test_no_memory_is_allocated_for_rows_larger_than_a_file(self, tmp_path):
        pack_rows(tmp_path, Numbered([20]))

        def grow(manifest):
            x = manifest["content"]["schema"]["x"]
            x["dict"][0][1] = ["int64", [2**27]]

        change_manifest(str(tmp_path), grow)

        tracemalloc.start()
        with pytest.raises(DataError, match=r"a row has more bytes than its file"):
            files(tmp_path)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert most < 2**24

    @pytest.mark.parametrize(
        "rows",
        [
            (A, None),
            (A.astype("f2"), B),
            ((A, B), B),
            ({"a": A, 7: B}, {"out": A}),
            ({"a": (A, {"b": B})}, (A,)),
            (A.astype(">f8"), np.arange(3, dtype="u8")),
            (np.arange(6.0).reshape(2, 3).T, None),
        ],
        ids=["alone", "half", "tuple", "dict", "nested", "byte order", "transposed"],
    )
    def test_any_structure_comes_back(self, url, rows):
        class Single(Numbered):
            def load(self, part):
                return rows

        pack_rows(url, Single([3]), shuffle=False)

        def shown(tree):
            if isinstance(tree, dict):
                return {key: shown(child) for key, child in tree.items()}
            if isinstance(tree, tuple):
                return tuple(shown(child) for child in tree)
            return tree if tree is None else (tree.dtype.name, tree.tolist())

        assert shown(files(url).load(0)) == shown(rows)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ((A[:0], B[:0]), "nothing to pack: X has no rows"),
            ((A, B[:2]), "part 1: X and y must have the same length, got 3 and 2"),
            ((A.astype(object), B), "part 1: X must hold real numbers"),
            (({1.5: A}, B), "keys of dicts must be strings or whole numbers"),
            ((A.astype("f4"), B), r"part 1 are x: float32 .*before are x: float64"),
            ((A[:, :1], B), r"part 1 are x: float64 \[1\], .*before are .* \[2\], y"),
            ((A, None), r"part 1 are x: float64 \[2\], but .*\[2\], y: bool \[\]; all"),
            (((A,), B), r"part 1 are x\[0\]: .*before are x: "),
        ],
        ids=["none", "lengths", "dtype", "key", "float", "shape", "labels", "tree"],
    )
    def test_rows_that_are_not_like_the_others_are_refused(self, url, rows, message):
        class Two(Numbered):
            def load(self, part):
                return rows if part or not len(rows[0]) else (A, B)

        source = Two([3, 3])
        source.lengths = None  # not counted

        with pytest.raises(DataError, match=message):
            pack_rows(url, source)

    def test_keys_in_another_order_are_other_rows(self, url):
        class Two(Numbered):
            def load(self, part):
                keys = "ab" if part else "ba"
                return {key: {"a": A[:, 0], "b": B * 2.0}[key] for key in keys}, B

        with pytest.raises(DataError, match=r"x\['a'\].*before are x\['b'\]"):
            pack_rows(url, Two([3, 3]))

    def test_a_transform_gets_tensors_of_a_file_and_keeps_the_number_of_rows(self, url):
        sizes = []

        def doubled(rows):
            x, y = rows
            sizes.append(len(y))
            return x["pair"][0].double() * 2, y

        pack_rows(url, Numbered([9]), transform=doubled)

        x, y = files(url).load(0)
        assert x.dtype == "float64"
        assert sorted(sizes) == [1, 4, 4]
        np.testing.assert_array_equal(x[:, 0] / 2 % 3, y)
        with pytest.raises(DataError, match="keep the number of rows, got 3 of 4"):
            pack_rows(url, transform=lambda b: (b[1][1:],) * 2, overwrite=True)

    @pytest.mark.parametrize(
        ("alike", "where"), [(1, "packed-000001.safetensors"), (3, "bucket 1")]
    )
    def test_a_transform_whose_files_differ_is_refused(self, url, small, alike, where):
        calls = []

        def uneven(rows):
            calls.append(rows)
            x, y = rows
            few = len(calls) <= alike
            return x["pair"][0].to(torch.float64 if few else torch.float32), y

        with pytest.raises(DataError, match=rf"{where} are x: float32 .*before are x"):
            pack_rows(url, Numbered([24]), transform=uneven)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (pack_rows, {"per_file": 0}, "per_file must be a whole number >= 1, got 0"),
        (pack_rows, {"per_file": 1.5}, "per_file must be .* >= 1, got 1.5"),
        (pack_rows, {"seed": -1}, "seed must be a whole number >= 0, got -1"),
        (pack_rows, {"transform": 3}, "transform must be a function of rows, or None"),
        (pack_rows, {"root": "a"}, "root is for paths of files, got 'a' and other"),
        (pack_files, {"y": B}, "y is for rows, but X are files.*pass X=daskdl.data.f"),
        (pack_files, {"transform": tuple}, "transform is for rows, but X are files"),
        (pack_files, {"classes": "ab"}, "classes is for rows, but X are files"),
    ],
)
def test_options_outside_what_is_allowed_are_refused(url, make, options, message):
    with pytest.raises(OptionError, match=message):
        make(url, **options)


def tokens():
    values = [
        ({"a": torch.ones(3)}, [np.ones(2)]),
        da.from_array(np.arange(5), chunks=2),
        [delayed(max)(1, 2), delayed(min)(1, 2)],
    ]
    return [token_of(value) for value in values]


def test_the_same_data_are_known_in_another_session():
    assert in_a_fork(tokens) == tokens()


def npz(rows, start=0, width=2):
    file = io.BytesIO()
    x = np.arange(start, start + rows, dtype=np.float32)[:, None].repeat(width, 1)
    np.savez(file, x=x, y=np.arange(start, start + rows))
    return file.getvalue()


FILES = {f"{'abc'[i % 3]}/{i}.txt": f"file {i}".encode() for i in range(11)}


class TestOriginalFiles:
    @pytest.fixture
    def root(self, tmp_path):
        return fill(tmp_path / "inputs", FILES)

    @pytest.fixture
    def target(self, tmp_path):
        return tmp_path / "packed"

    def names(self, X, target, **options):
        """Names of all files in a folder that has been packed, sorted."""
        pack(X, url=target, per_file=4, client=False, **options)
        return sorted(n for group in packed_in(store_of(target)) for n in group.names)

    @pytest.mark.parametrize(
        "name", ["ä ö/ü.txt", "a" * 120 + "/" + "b" * 120, "with space", "__metadata__"]
    )
    @pytest.mark.parametrize("content", [b"hello", b""])
    def test_any_name_and_content_are_kept(self, root, target, name, content):
        fill(root, {name: content})
        seen = {}

        def load(file):
            seen[file.name.partition(".safetensors/")[2]] = file.read()
            return np.zeros(1)

        assert name in self.names(root, target)
        source = files(target, load)
        for part in range(source.parts):
            source.load(part)
        assert seen == FILES | {name: content}

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
        fill(urls[where], FILES)

        assert self.names(f"{urls[where]}/{pattern}", target) == expected

    @pytest.mark.parametrize(
        ("X", "options", "expected"),
        [
            ("{}/a", {"root": "{}"}, [n for n in sorted(FILES) if n[0] == "a"]),
            (["{}/a/0.txt", "{}/a/3.txt"], {}, ["0.txt", "3.txt"]),
            (["file://{}/a/0.txt", "{}/b/1.txt"], {}, ["a/0.txt", "b/1.txt"]),
            (["{}/a/0.txt"], {"root": "{}/b/../a"}, ["0.txt"]),
        ],
    )
    def test_names_are_relative_to_the_root(self, root, target, X, options, expected):
        options = {key: value.format(root) for key, value in options.items()}
        several = [path.format(root) for path in X] if isinstance(X, list) else None

        assert self.names(several or X.format(root), target, **options) == expected

    @pytest.mark.parametrize(
        ("X", "error", "message"),
        [
            ("{}/nothing", DataError, "there .* {}/nothing$"),
            ("{}/*.png", DataError, r"there .* {}/\*\.png$"),
            (["{}/a/0.txt"] * 2, DataError, r"a/0\.txt is in X twice"),
            (["{}/a/0.txt", "memory://x/y"], OptionError, "must be on one file system"),
            (["{}/a/0.txt", "{}/77"], DataError, "there is no file at {}/77"),
            (["memory://no/thing"], DataError, "cannot read memory://no/thing: there"),
        ],
    )
    def test_what_cannot_be_packed_is_named(self, root, target, X, error, message):
        several = [path.format(root) for path in X] if isinstance(X, list) else None

        with pytest.raises(error, match=message.format(re.escape(str(root)))):
            self.names(several or X.format(root), target)

        assert not (target / MANIFEST).exists()

    def test_a_file_outside_the_root_is_named(self, root, target):
        with pytest.raises(OptionError, match=r"a/0\.txt is not in the root .*/b"):
            self.names([f"{root}/a/0.txt"], target, root=f"{root}/b")

    @pytest.mark.parametrize(
        ("X", "inner"),
        [
            ("{}/inputs", "{}/inputs"),
            ("{}/inputs", "{}/inputs/packed"),
            ("{}/inputs", "file://{}/inputs/a/../packed"),
            ("{}/inputs", "{}/link/packed"),
            ("{}/link", "{}/inputs"),
            ("{}/link", "{}/link/packed"),
        ],
    )
    def test_packed_files_must_not_be_among_the_files(self, root, tmp_path, X, inner):
        (tmp_path / "link").symlink_to(root)

        with pytest.raises(OptionError, match="url must not be in the root"):
            self.names(X.format(tmp_path), inner.format(tmp_path))

    @pytest.fixture
    def packed(self, tmp_path):
        """Five files of 0 to 4 rows, numbered through, two in a packed file."""
        starts = np.cumsum([0, *range(5)]).tolist()
        X = fill(tmp_path / "in", {f"{i}.npz": npz(i, starts[i]) for i in range(5)})
        url = str(tmp_path / "out")
        pack(X, url=url, per_file=2, shuffle=False, client=False)
        return url

    def test_each_file_may_give_many_rows(self, packed):
        source = pickle.loads(pickle.dumps(files(packed)))

        known = infer_metadata(source, False)

        assert (source.parts, source.lengths) == (3, None)
        assert known.lengths == [1, 5, 4]
        assert known.first_rows[0].shape[1:] == (2,)
        y = np.concatenate([known.load(part)[1] for part in range(3)])
        assert y.tolist() == list(range(10))

    def test_each_file_may_be_one_example(self, packed):
        def load(file):
            return np.array([len(file.read())]), int(file.name[-5])

        source = files(packed, load, one_example=True)

        assert source.lengths == [2, 2, 1]
        assert source.load(1)[1].tolist() == [2, 3]
        assert source.facts(2).rows == 1

    def test_files_are_loaded_one_by_one_from_a_packed_file_that_is_read_once(
        self, packed, monkeypatch
    ):
        read, reads = Store.read, []
        monkeypatch.setattr(Store, "read", lambda *a: reads.append(a) or read(*a))
        source = files(packed, Npz())
        reads.clear()

        pieces = source.pieces(1)

        assert [name for name, _ in pieces] == [
            f"{packed}/packed-000001.safetensors/{i}.npz" for i in (2, 3)
        ]
        assert [load()[1].tolist() for _, load in pieces] == [[1, 2], [3, 4, 5]]
        assert len(reads) == 1

    def test_what_does_not_fit_together_is_named(self, tmp_path):
        contents = {"a.npz": npz(2), "b.npz": npz(2, width=3), "c.npz": b"torn"}
        X, url = fill(tmp_path / "in", contents), tmp_path / "out"
        pack(X, url=url, per_file=2, shuffle=False, client=False)
        source = files(url)

        with pytest.raises(
            DataError, match=r"0\.safetensors/b\.npz has .*\(3,\).* and .*/a\.npz has"
        ):
            source.load(0)
        with pytest.raises(DataError, match=r"cannot read /.*1\.safetensors/c\.npz: "):
            source.load(1)

    @pytest.mark.parametrize(
        "names", [["3.npz"], ["2.npz", "3.npz", "9.npz"], ["2.npz", "9.npz"]]
    )
    def test_a_packed_file_whose_files_are_not_those_listed_is_named(
        self, packed, names
    ):
        change_manifest(packed, lambda m: m["files"][1].update(names=names))

        with pytest.raises(
            DataError, match=r"packed-000001.* is damaged: .*files are not those list"
        ):
            files(packed).load(1)


OPTIONS = PackOptions(4)
BELOW = "memory://daskdl-test-temporary"


class Workers:
    """A client of workers, one of which is on another machine."""

    asynchronous = False

    def nthreads(self):
        return {"tcp://here:1": 1, "tcp://there:2": 1}

    def sync(self, function):
        return asyncio.run(function())

    async def run(self, function, workers):
        assert function()
        return {worker: "there" not in worker for worker in workers}


class TestTemporary:
    @pytest.fixture(params=["local", "configured"])
    def there(self, request, tmp_path, monkeypatch):
        """Lists all files that there are where temporary ones are made."""
        if request.param == "local":
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            yield lambda: list(map(str, tmp_path.rglob("*")))
            return
        with dask.config.set({"daskdl.export.url": BELOW}):
            yield Store(BELOW).names

    def test_they_are_there_while_they_are_used_and_never_afterwards(self, there):
        with (
            temporarily_packed(Numbered([9, 5]), OPTIONS, client=False) as large,
            temporarily_packed(Numbered([5]), OPTIONS, client=False) as little,
        ):
            assert sorted(ids_of(large)) == list(range(14))
            assert (large.lengths, little.lengths) == ([4, 4, 4, 2], [4, 1])
            assert "daskdl-export-" in there()[0]

        assert there() == []

    def test_nothing_is_there_after_a_failure(self, there):
        class Failing(Numbered):
            def load(self, part):
                raise KeyboardInterrupt

        with (
            pytest.raises(KeyboardInterrupt),
            temporarily_packed(Failing([9, 5]), OPTIONS, client=False),
        ):
            raise AssertionError("this is never reached")

        assert there() == []

    def test_they_may_be_in_the_root_of_a_file_system(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        with (
            dask.config.set({"daskdl.export.url": "memory://"}),
            temporarily_packed(Numbered([9]), OPTIONS, client=False) as packed,
        ):
            assert packed.name(0).startswith("memory://daskdl-export-")

        assert list(tmp_path.iterdir()) == []

    def test_workers_that_do_not_see_the_folder_are_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        with (
            pytest.raises(OptionError, match=r"by tcp://there:2; set daskdl\.exp"),
            temporarily_packed(Numbered([9]), OPTIONS, Workers()),
        ):
            raise AssertionError("this is never reached")

        assert list(tmp_path.iterdir()) == []
