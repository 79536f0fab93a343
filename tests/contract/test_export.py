"""Exports: nothing lost, nothing doubled, also after an interruption."""

import asyncio
import json
import pickle
import shutil
import sys
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

from daskdl.data import BatchFiles
from daskdl.data.batch_files import is_export
from daskdl.data.export import ExportOptions, export, temporary_batches, token_of
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError
from tests.support.manifests import outcome, sealed, variants
from tests.support.numbered import Numbered, Streamed, ids_of, numbered
from tests.support.processes import in_a_fork

EXPORT = sys.modules["daskdl.data.export"]  # the package has the function

LENGTHS = (30, 0, 17, 3, 50)
MANIFEST = "manifest.json"


@pytest.fixture(params=["memory", "local"])
def url(request, tmp_path):
    """A place for an export; in memory its files are deleted afterwards."""
    if request.param == "local":
        yield str(tmp_path / "export")
        return
    yield "memory://daskdl-test-export"
    Store("memory://daskdl-test-export").delete_all()


@pytest.fixture
def small(monkeypatch):
    """Many buckets and pieces: about 12 rows each."""
    monkeypatch.setattr(EXPORT, "BUCKET_BYTES", 12 * 17)
    monkeypatch.setattr(EXPORT, "PIECE_BYTES", 12 * 17)


def exported(url, source=None, **options):
    source = Numbered(LENGTHS) if source is None else source
    return export(source, url=url, **{"batch_size": 4, "client": False, **options})


def names_in(made):
    return [*(file.name for file in made.files), MANIFEST]


@pytest.fixture
def written(monkeypatch):
    """Names of the files that are written from now on."""
    names, write = [], Store.write

    def noted(store, name, content):
        names.append(name)
        write(store, name, content)

    monkeypatch.setattr(Store, "write", noted)
    return names


def interrupted(monkeypatch, url, at, **options):
    """Begin an export, and interrupt it as this file is written."""
    write = Store.write

    def fails(store, name, content):
        if name == at:
            raise KeyboardInterrupt
        write(store, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fails)
        with pytest.raises(KeyboardInterrupt):
            exported(url, **options)


@pytest.mark.parametrize("kind", [Numbered, Streamed])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_is_there_once_and_nothing_else_is_left(url, small, kind, shuffle):
    made = exported(url, kind(LENGTHS), shuffle=shuffle)

    ids = ids_of(BatchFiles(url))
    assert sorted(ids) == list(range(100))
    assert (ids.tolist() == sorted(ids)) is not shuffle
    assert (made.parts, made.lengths, made.rows) == (25, [4] * 25, 100)
    assert Store(url).names() == names_in(made)


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(20, 900),
)
def test_any_parts_and_sizes(lengths, batch_size, batches_per_file, bucket_bytes):
    url = "memory://daskdl-test-any"
    sizes = {"batch_size": batch_size, "batches_per_file": batches_per_file}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPORT, "BUCKET_BYTES", bucket_bytes)
        patch.setattr(EXPORT, "PIECE_BYTES", bucket_bytes)

        made = exported(url, Numbered(lengths), **sizes, overwrite=True)

    assert sorted(ids_of(made)) == list(range(sum(lengths)))
    assert set(made.lengths[:-1]) <= {batch_size * batches_per_file}
    assert made.batch_size == batch_size


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_files(url, small, seed):
    first = exported(url, seed=seed)

    again = exported(url, seed=0, overwrite=True)

    assert (first.files == again.files) is (seed == 0)


def test_rows_of_all_parts_are_mixed(url, small):
    made = exported(url, Numbered([50] * 4), batch_size=10)

    parts = ids_of(made).reshape(20, 10) // 50
    assert np.mean([len(set(file)) for file in parts]) > 3


def test_rows_of_a_part_are_in_another_order_than_those_of_another(url):
    made = exported(url, Numbered([50, 50]), batch_size=100)

    ids = ids_of(made)
    first, second = ids[ids < 50], ids[ids >= 50] - 50
    assert first.tolist() != second.tolist()


def test_a_stream_is_written_as_it_comes(url, monkeypatch):
    monkeypatch.setattr(EXPORT, "PIECE_BYTES", 1)

    class Watched(Streamed):
        def stream(self, part, rows):
            for i, block in enumerate(super().stream(part, rows)):
                assert len(Store(url).names(".unfinished/*.rows")) == 7 * i
                yield block

    assert exported(url, Watched([10])).rows == 10


class TestBatchFiles:
    def test_it_is_a_source_of_rows(self, url):
        made = exported(url, Numbered([5, 6]))

        (x, y), (like_x, like_y) = made.first, numbered(0, 2)
        assert (made.parts, made.lengths) == (3, [4, 4, 3])
        assert made.name(1) == f"{url}/batch-000001.safetensors"
        assert x["pair"][0].shape == like_x["pair"][0].shape
        assert (y.dtype, y.shape) == (like_y.dtype, (2,))
        assert sorted(ids_of(pickle.loads(pickle.dumps(made)))) == list(range(11))
        content = safetensors.numpy.load(Store(url).read(made.files[0].name))
        assert sorted(content) == ["x['id']", "x['pair'][0]", "y"]

    def test_classes_are_kept_or_given(self, url):
        assert exported(url).classes == ("a", "b", "c")

        made = exported(url, classes=["d", "e", "f"], overwrite=True)

        assert made.classes == BatchFiles(url).classes == ("d", "e", "f")

    def test_a_damaged_file_is_named_with_the_remedy(self, url):
        made = exported(url)
        store, name = Store(url), made.files[1].name
        store.write(name, store.read(name)[::-1])

        with pytest.raises(DataError, match=f"{url}/{name} is damaged: .*export a"):
            made.load(1)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"rows": 5}, r"x\['id'\] is int64 \(20,\), .*listed as int64 \(5,\)"),
            ({"rows": 21}, r"listed as int64 \(21,\)"),
            ({"rows": 0}, "whole numbers >= 1"),
            ({"nbytes": 2**40}, "it lists no file that exists in its full size"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_a_manifest_that_its_files_contradict_is_refused(
        self, tmp_path, changed, message
    ):
        exported(str(tmp_path), Numbered([20]), batch_size=20)
        manifest = tmp_path / MANIFEST
        content = json.loads(manifest.read_bytes())
        content["files"][0] |= changed
        manifest.write_bytes(sealed(content))

        with pytest.raises(DataError, match=rf"is damaged: .*{message}.*; export aga"):
            BatchFiles(str(tmp_path)).load(0)

    @pytest.mark.parametrize(
        "field", ["batch_size", "classes", "schema", "columns", "made_from"]
    )
    def test_a_missing_field_of_the_manifest_is_named(self, tmp_path, field):
        exported(str(tmp_path))
        manifest = tmp_path / MANIFEST
        content = json.loads(manifest.read_bytes())
        del content["content"][field]
        manifest.write_bytes(sealed(content))

        with pytest.raises(DataError, match=f"is damaged: .*'{field}'.*; export again"):
            BatchFiles(str(tmp_path))

    def test_no_memory_is_allocated_for_rows_larger_than_a_file(self, tmp_path):
        exported(str(tmp_path), Numbered([20]))
        manifest = tmp_path / MANIFEST
        content = json.loads(manifest.read_bytes())
        content["content"]["schema"]["rows"][0][2] = [2**28]
        manifest.write_bytes(sealed(content))

        tracemalloc.start()
        with pytest.raises(DataError, match=r"a row has more bytes than its file"):
            BatchFiles(str(tmp_path))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert most < 2**24

    def test_any_change_of_the_manifest_is_refused_or_changes_no_row(self, tmp_path):
        exported(str(tmp_path), Numbered([9]))
        manifest = tmp_path / MANIFEST
        content = json.loads(manifest.read_bytes())

        for change, variant in variants(content, ("files", "content")):
            manifest.write_bytes(sealed(variant))
            rows = outcome(lambda: sorted(ids_of(BatchFiles(str(tmp_path)))))
            assert rows == [*range(9)] or str(tmp_path) in rows, change

    def test_an_export_is_known_finished_or_not(self, url, tmp_path):
        exported(url)
        assert is_export(url)
        Store(url).delete([MANIFEST])
        assert not is_export(url)
        with pytest.raises(DataError, match=r"there is no manifest\.json in .*; make"):
            BatchFiles(url)
        Store(url).write(".unfinished/origin.json", b"{}")
        assert is_export(url)
        assert not is_export(tmp_path / "nothing")


A, B = np.arange(6.0).reshape(3, 2), np.array([True, False, True])


class TestRows:
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
        class One(Numbered):
            def load(self, part):
                return rows

        made = exported(url, One([3]), shuffle=False)

        def shown(tree):
            if isinstance(tree, dict):
                return {key: shown(child) for key, child in tree.items()}
            if isinstance(tree, tuple):
                return tuple(shown(child) for child in tree)
            return tree if tree is None else (tree.dtype.name, tree.tolist())

        assert shown(made.load(0)) == shown(rows)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ((A[:0], B[:0]), "nothing to export: X has no rows"),
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
            exported(url, source)


def test_a_transform_gets_each_batch_of_tensors_and_keeps_its_rows(url):
    sizes = []

    def doubled(batch):
        x, y = batch
        sizes.append(len(y))
        return x["pair"][0].double() * 2, y

    options = {"batch_size": 2, "batches_per_file": 2}
    made = exported(url, Numbered([9]), **options, transform=doubled)

    x, y = made.load(0)
    assert x.dtype == "float64"
    assert sorted(sizes) == [1, 2, 2, 2, 2]
    np.testing.assert_array_equal(x[:, 0] / 2 % 3, y)
    with pytest.raises(DataError, match="must keep the rows of a batch, got 1 of 2"):
        exported(url, transform=lambda b: (b[1][1:],) * 2, overwrite=True, **options)


class TestInterrupted:
    PLACES = (
        ".unfinished/part-000002-0000.rows",
        ".unfinished/part-000002.json",
        "batch-000011.safetensors",
        ".unfinished/bucket-000003.json",
        MANIFEST,
    )

    @pytest.mark.parametrize("at", PLACES)
    def test_it_cannot_be_read_and_goes_on_to_the_same_files(
        self, monkeypatch, url, small, at, tmp_path
    ):
        whole = exported(str(tmp_path / "whole"))
        interrupted(monkeypatch, url, at)
        with pytest.raises(DataError, match=r"has not been finished; run it again"):
            BatchFiles(url)

        made = exported(url)

        assert made.files == whole.files
        assert sorted(ids_of(made)) == list(range(100))
        assert Store(url).names() == names_in(made)

    def test_parts_that_were_done_are_not_loaded_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, url, ".unfinished/part-000003.json")
        source = Numbered(LENGTHS)

        exported(url, source)

        assert source.loaded == [3, 4]

    def test_buckets_that_were_done_are_not_written_again(
        self, monkeypatch, url, small, written
    ):
        interrupted(monkeypatch, url, ".unfinished/bucket-000002.json")
        before = [name for name in written if "bucket" in name]
        written.clear()

        exported(url)

        files = sorted(name for name in written if name.startswith("batch-"))
        assert before == [f".unfinished/bucket-00000{i}.json" for i in (0, 1)]
        assert not set(before) & set(written)
        # Three files in each bucket; the third bucket was half done.
        assert (files[0], len(files)) == ("batch-000006.safetensors", 19)

    def test_a_file_that_is_not_what_was_written_is_made_again(
        self, monkeypatch, url, small
    ):
        interrupted(monkeypatch, url, MANIFEST)
        Store(url).delete(["batch-000004.safetensors"])
        Store(url).write("batch-000005.safetensors", b"x" * 400)

        assert sorted(ids_of(exported(url))) == list(range(100))

    def test_buckets_of_another_plan_are_made_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, url, ".unfinished/bucket-000005.json")
        monkeypatch.setattr(EXPORT, "BUCKET_BYTES", 20 * 17)

        assert sorted(ids_of(exported(url))) == list(range(100))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"batch_size": 8}, "batch_size was 4 and is 8"),
            ({"seed": 1}, "seed was 0 and is 1"),
            ({"shuffle": False}, "seed was 0 and is None"),
            ({"source": Numbered([100])}, r"data was .*parts was 5 and is 1"),
            ({"transform": tuple}, "transform was None and is '"),
        ],
        ids=["batch_size", "seed", "shuffle", "data", "transform"],
    )
    def test_another_export_is_refused_or_takes_its_place(
        self, monkeypatch, url, small, change, message
    ):
        interrupted(monkeypatch, url, "batch-000011.safetensors")

        with pytest.raises(OptionError, match=f"an unfinished export .*: .*{message}"):
            exported(url, **change)
        made = exported(url, **{**change, "transform": None}, overwrite=True)

        assert Store(url).names() == names_in(made)
        assert sorted(ids_of(made)) == list(range(100))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("part-000000-0000.rows", r"it has 1 bytes instead of \d+"),
            ("part-000000.json", "JSON|Expecting"),
        ],
    )
    def test_a_damaged_file_of_it_is_named(self, monkeypatch, url, name, message):
        interrupted(monkeypatch, url, "batch-000000.safetensors")
        Store(url).write(f".unfinished/{name}", b"{")

        with pytest.raises(DataError, match=rf"{name} is damaged: .*{message}"):
            exported(url)

    @pytest.mark.parametrize("name", ["part-000000.json", "bucket-000000.json"])
    def test_any_change_of_a_record_is_refused_or_changes_no_row(
        self, monkeypatch, tmp_path, name
    ):
        url, broken = str(tmp_path / "export"), tmp_path / "broken"
        interrupted(monkeypatch, url, MANIFEST, source=Numbered([9]))
        record = json.loads(Store(url).read(f".unfinished/{name}"))

        for change, variant in variants(record):
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(url, broken)
            (broken / ".unfinished" / name).write_text(json.dumps(variant))
            rows = outcome(lambda: sorted(ids_of(exported(broken, Numbered([9])))))
            assert rows == [*range(9)] or str(broken) in rows, change

    def test_a_piece_that_is_gone_is_named_with_the_remedy(self, monkeypatch, url):
        interrupted(monkeypatch, url, "batch-000000.safetensors")
        name = ".unfinished/part-000000-0000.rows"
        Store(url).delete([name])

        with pytest.raises(DataError, match=rf"{name}: .*; export again with overwr"):
            exported(url)


class TestFinished:
    def test_the_same_is_not_made_again_and_leftovers_go(self, url, small, written):
        first = exported(url)
        source = Numbered(LENGTHS)
        Store(url).write(".unfinished/part-000000.json", b"left there")
        written.clear()

        again = exported(url, source)

        assert again.files == first.files
        assert (source.loaded, written) == ([], [])
        assert Store(url).names() == names_in(first)

    def test_other_data_are_refused(self, url):
        source = Numbered(LENGTHS)
        source.values = np.ones(3)
        exported(url)

        with pytest.raises(
            OptionError, match=r"there is an export of other .* data was"
        ):
            exported(url, source)

    def test_a_damaged_one_may_be_overwritten_and_files_of_others_stay(self, url):
        exported(url)
        Store(url).write(MANIFEST, b"{")
        Store(url).write("notes.txt", b"mine")

        made = exported(url, Numbered([5]), overwrite=True)

        assert sorted(ids_of(made)) == list(range(5))
        assert Store(url).names() == [*names_in(made), "notes.txt"]


class TestGivenUp:
    """A task that outlives its export leaves nothing."""

    @pytest.mark.parametrize(
        "at", [".unfinished/part-000002-0000.rows", "batch-000011.safetensors"]
    )
    def test_a_file_that_comes_too_late_is_taken_away(
        self, monkeypatch, url, small, at
    ):
        write = Store.write

        def given_up_at(store, name, content):
            if name == at:
                store.delete(store.names())
            write(store, name, content)

        monkeypatch.setattr(Store, "write", given_up_at)

        with pytest.raises(DataError, match=r"either it was given up, or the URL is"):
            exported(url)

        assert Store(url).names() == []

    def test_a_second_task_for_a_bucket_does_not_take_away_what_is_finished(
        self, monkeypatch, url, small
    ):
        write, made = Store.write, []

        def finished_at(store, name, content):
            if name == "batch-000011.safetensors" and not made:
                made.append(True)
                made.append(exported(url))
            write(store, name, content)

        monkeypatch.setattr(Store, "write", finished_at)
        with pytest.raises(DataError, match="either it was given up"):
            exported(url)

        assert sorted(ids_of(BatchFiles(url))) == list(range(100))
        assert Store(url).names() == names_in(made[1])

    def test_an_old_task_changes_nothing_of_another_export_that_is_finished(self, url):
        made = []

        def replaced(batch):
            if not made:
                made.append(exported(url, Numbered([50]), overwrite=True))
            return batch

        with pytest.raises(DataError, match="either it was given up"):
            exported(url, transform=replaced)

        assert sorted(ids_of(BatchFiles(url))) == list(range(50))
        assert Store(url).names() == names_in(made[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"batches_per_file": 1.5}, "batches_per_file must be .* >= 1, got 1.5"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"transform": 3}, "transform must be a function of a batch, or None"),
    ],
)
def test_options_outside_what_is_allowed_are_refused(url, options, message):
    with pytest.raises(OptionError, match=message):
        exported(url, **options)


def tokens():
    values = [
        ({"a": torch.ones(3)}, [np.ones(2)]),
        da.from_array(np.arange(5), chunks=2),
        [delayed(max)(1, 2), delayed(min)(1, 2)],
    ]
    return [token_of(value) for value in values]


def test_the_same_data_are_known_in_another_session():
    assert in_a_fork(tokens) == tokens()


OPTIONS = ExportOptions(4)
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
    def files(self, request, tmp_path, monkeypatch):
        """Lists all files that there are where temporary ones are made."""
        if request.param == "local":
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            yield lambda: list(map(str, tmp_path.rglob("*")))
            return
        with dask.config.set({"daskdl.export.url": BELOW}):
            yield Store(BELOW).names

    def test_they_are_there_while_they_are_used_and_never_afterwards(self, files):
        first = temporary_batches(Numbered([9, 5]), OPTIONS, client=False)
        with first as one, temporary_batches(Numbered([5]), OPTIONS, False) as other:
            assert sorted(ids_of(one)) == list(range(14))
            assert (one.lengths, other.lengths) == ([4, 4, 4, 2], [4, 1])
            assert "daskdl-export-" in files()[0]

        assert files() == []

    def test_nothing_is_there_after_a_failure(self, files):
        class Failing(Numbered):
            def load(self, part):
                raise KeyboardInterrupt

        with (
            pytest.raises(KeyboardInterrupt),
            temporary_batches(Failing([9, 5]), OPTIONS, client=False),
        ):
            raise AssertionError("this is never reached")

        assert files() == []

    def test_they_may_be_in_the_root_of_a_file_system(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        with (
            dask.config.set({"daskdl.export.url": "memory://"}),
            temporary_batches(Numbered([9]), OPTIONS, client=False) as batches,
        ):
            assert batches.url.startswith("memory://daskdl-export-")

        assert list(tmp_path.iterdir()) == []

    def test_workers_that_do_not_see_the_folder_are_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        with (
            pytest.raises(OptionError, match=r"by tcp://there:2; set daskdl\.exp"),
            temporary_batches(Numbered([9]), OPTIONS, Workers()),
        ):
            raise AssertionError("this is never reached")

        assert list(tmp_path.iterdir()) == []
