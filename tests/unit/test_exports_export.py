"""Exports: nothing lost, nothing doubled, also after an interruption."""

import logging
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdl.data.batch_files import BatchFiles
from daskdl.data.export import export
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError
from tests.support.numbered import Numbered, Streamed, ids_of

EXPORT = sys.modules["daskdl.data.export"]  # the package has the function

LENGTHS = (30, 0, 17, 3, 50)


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


class Written:
    """Which files are written below a URL, in order, from now on."""

    def __init__(self, monkeypatch):
        self.names = []
        write = Store.write

        def noted(store, name, content):
            self.names.append(name)
            write(store, name, content)

        monkeypatch.setattr(Store, "write", noted)

    def of(self, kind):
        return sorted(name for name in self.names if kind in name)


@pytest.fixture
def written(monkeypatch):
    return Written(monkeypatch)


def interrupted(monkeypatch, url, at):
    """Begin an export, and interrupt it as this file is written."""
    write = Store.write

    def fails(store, name, content):
        if name == at:
            raise KeyboardInterrupt
        write(store, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fails)
        with pytest.raises(KeyboardInterrupt):
            export(Numbered(LENGTHS), url, 4, client=False)


@pytest.mark.parametrize("kind", [Numbered, Streamed])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_is_there_once(url, small, kind, shuffle):
    made = export(kind(LENGTHS), url, 4, shuffle=shuffle, client=False)

    ids = ids_of(BatchFiles(url))
    assert sorted(ids) == list(range(100))
    assert (ids.tolist() == sorted(ids)) is not shuffle
    assert [file.rows for file in made.files] == [4] * 25
    assert made.rows == 100


def test_nothing_else_is_left(url, small):
    made = export(Numbered(LENGTHS), url, 8, client=False)

    assert Store(url).names() == [*(file.name for file in made.files), "manifest.json"]
    assert len(made.files) == 13


def test_files_hold_several_batches(url):
    made = export(Numbered(LENGTHS), url, 4, batches_per_file=6, client=False)

    assert [file.rows for file in made.files] == [24, 24, 24, 24, 4]
    assert made.batch_size == 4


def test_the_size_of_the_buckets_does_not_matter_without_shuffling(url, small):
    export(Numbered(LENGTHS), url, 7, shuffle=False, client=False)

    assert ids_of(BatchFiles(url)).tolist() == list(range(100))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_files(url, small, seed):
    first = export(Numbered(LENGTHS), url, 4, seed=seed, client=False)

    again = export(Numbered(LENGTHS), url, 4, seed=0, client=False, overwrite=True)

    assert (first.files == again.files) is (seed == 0)


def test_rows_of_all_parts_are_mixed(url, small):
    export(Numbered([50] * 4), url, 10, client=False)

    parts = ids_of(BatchFiles(url)).reshape(20, 10) // 50
    assert np.mean([len(set(file)) for file in parts]) > 3


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(20, 900),
)
def test_any_parts_and_sizes(lengths, batch_size, batches_per_file, bucket_bytes):
    url = "memory://daskdl-test-any"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPORT, "BUCKET_BYTES", bucket_bytes)
        patch.setattr(EXPORT, "PIECE_BYTES", bucket_bytes)

        made = export(
            Numbered(lengths),
            url,
            batch_size,
            batches_per_file=batches_per_file,
            client=False,
            overwrite=True,
        )

    assert sorted(ids_of(BatchFiles(url))) == list(range(sum(lengths)))
    full = batch_size * batches_per_file
    assert {file.rows for file in made.files[:-1]} <= {full}


def test_classes_are_kept_or_given(url):
    export(Numbered(LENGTHS), url, 4, client=False)
    assert BatchFiles(url).classes == ("a", "b", "c")

    export(
        Numbered(LENGTHS), url, 4, client=False, classes=["d", "e", "f"], overwrite=True
    )

    assert BatchFiles(url).classes == ("d", "e", "f")


class TestTransform:
    def test_it_gets_each_batch_of_tensors(self, url):
        sizes = []

        def doubled(batch):
            x, y = batch
            sizes.append(len(y))
            return x["pair"][0].double() * 2, y

        export(
            Numbered([9]), url, 2, transform=doubled, batches_per_file=2, client=False
        )

        x, y = BatchFiles(url).load(0)
        assert x.dtype == "float64"
        assert sorted(sizes) == [1, 2, 2, 2, 2]
        np.testing.assert_array_equal(x[:, 0] / 2 % 3, y)

    def test_it_may_not_drop_rows(self, url):
        with pytest.raises(DataError, match="must keep the rows of a batch, got 3 of"):
            export(
                Numbered([4]),
                url,
                4,
                transform=lambda batch: (batch[0]["id"][1:], batch[1][1:]),
                client=False,
            )


class TestInterrupted:
    PLACES = (
        ".unfinished/part-000002-0000.rows",
        ".unfinished/part-000002.json",
        "batch-000011.safetensors",
        ".unfinished/bucket-000003.json",
        "manifest.json",
    )

    @pytest.mark.parametrize("at", PLACES)
    def test_it_cannot_be_read(self, monkeypatch, url, small, at):
        interrupted(monkeypatch, url, at)

        with pytest.raises(DataError, match=r"has not been finished; run it again"):
            BatchFiles(url)

    @pytest.mark.parametrize("at", PLACES)
    def test_it_goes_on_to_the_same_files(self, monkeypatch, url, small, at, tmp_path):
        whole = export(Numbered(LENGTHS), str(tmp_path / "whole"), 4, client=False)
        interrupted(monkeypatch, url, at)

        made = export(Numbered(LENGTHS), url, 4, client=False)

        assert made == whole
        assert sorted(ids_of(BatchFiles(url))) == list(range(100))
        names = [file.name for file in made.files]
        assert Store(url).names() == [*names, "manifest.json"]

    def test_parts_that_were_done_are_not_loaded_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, url, ".unfinished/part-000003.json")
        source = Numbered(LENGTHS)

        export(source, url, 4, client=False)

        assert source.loaded == [3, 4]

    def test_buckets_that_were_done_are_not_written_again(
        self, monkeypatch, url, small, written
    ):
        interrupted(monkeypatch, url, ".unfinished/bucket-000002.json")
        before = written.of("bucket")
        written.names.clear()

        export(Numbered(LENGTHS), url, 4, client=False)

        assert before == [f".unfinished/bucket-00000{i}.json" for i in (0, 1)]
        assert not set(before) & set(written.of("bucket"))
        # Three files in each bucket; the third bucket was half done.
        assert written.of("batch-")[0] == "batch-000006.safetensors"
        assert len(written.of("batch-")) == 19

    @pytest.mark.parametrize("damage", [b"", b"x" * 400, None])
    def test_a_file_that_is_not_what_was_written_is_made_again(
        self, monkeypatch, url, small, damage
    ):
        interrupted(monkeypatch, url, "manifest.json")
        if damage is None:
            Store(url).delete(["batch-000004.safetensors"])
        else:
            Store(url).write("batch-000004.safetensors", damage)

        export(Numbered(LENGTHS), url, 4, client=False)

        assert sorted(ids_of(BatchFiles(url))) == list(range(100))

    def test_buckets_of_another_deal_are_made_again(self, monkeypatch, url, small):
        interrupted(monkeypatch, url, ".unfinished/bucket-000005.json")
        monkeypatch.setattr(EXPORT, "BUCKET_BYTES", 20 * 17)

        export(Numbered(LENGTHS), url, 4, client=False)

        assert sorted(ids_of(BatchFiles(url))) == list(range(100))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"batch_size": 8}, "batch_size was 4 and is 8"),
            ({"seed": 1}, "seed was 0 and is 1"),
            ({"shuffle": False}, "seed was 0 and is None"),
            ({"X": Numbered([100])}, r"data was .*parts was 5 and is 1"),
            ({"transform": tuple}, "transform was None and is '"),
        ],
        ids=["batch_size", "seed", "shuffle", "data", "transform"],
    )
    def test_another_export_is_refused(self, monkeypatch, url, small, change, message):
        interrupted(monkeypatch, url, "batch-000011.safetensors")
        same = {"X": Numbered(LENGTHS), "batch_size": 4}

        with pytest.raises(
            OptionError, match=f"an unfinished export of other .*: .*{message}"
        ):
            export(**{**same, "url": url, "client": False, **change})

    def test_another_export_may_take_its_place(self, monkeypatch, url, small):
        interrupted(monkeypatch, url, "batch-000011.safetensors")

        made = export(Numbered([9]), url, 8, client=False, overwrite=True)

        names = [file.name for file in made.files]
        assert Store(url).names() == [*names, "manifest.json"]
        assert sorted(ids_of(BatchFiles(url))) == list(range(9))


class TestFinished:
    def test_the_same_is_not_made_again(self, url, small, written, caplog):
        first = export(Numbered(LENGTHS), url, 4, client=False)
        source = Numbered(LENGTHS)
        written.names.clear()

        with caplog.at_level(logging.INFO, "daskdl"):
            again = export(source, url, 4, client=False)

        assert again == first
        assert (source.loaded, written.names) == ([], [])
        assert "has been exported before: 100 rows" in caplog.text

    def test_what_the_last_run_did_not_delete_is_deleted(self, monkeypatch, url):
        with monkeypatch.context() as patch:
            patch.setattr("daskdl.data.batch_files.Progress.end", lambda _: None)
            export(Numbered(LENGTHS), url, 4, client=False)
        assert ".unfinished/origin.json" in Store(url).names()

        export(Numbered(LENGTHS), url, 4, client=False)

        assert not [name for name in Store(url).names() if "unfinished" in name]

    def test_another_export_is_refused(self, url):
        export(Numbered(LENGTHS), url, 4, client=False)

        with pytest.raises(OptionError, match="there is an export of other data or"):
            export(Numbered([100]), url, 4, client=False)

    def test_an_array_of_other_values_is_other_data(self, url):
        first, second = (Numbered(LENGTHS) for _ in range(2))
        second.values = np.ones(3)
        export(first, url, 4, client=False)

        with pytest.raises(OptionError, match="data was '"):
            export(second, url, 4, client=False)

    def test_a_damaged_one_may_be_overwritten(self, url):
        export(Numbered(LENGTHS), url, 4, client=False)
        Store(url).write("manifest.json", b"{")

        export(Numbered(LENGTHS), url, 4, client=False, overwrite=True)

        assert sorted(ids_of(BatchFiles(url))) == list(range(100))

    def test_files_of_others_stay(self, url):
        Store(url).write("notes.txt", b"mine")
        export(Numbered(LENGTHS), url, 4, client=False)

        export(Numbered([5]), url, 4, client=False, overwrite=True)

        assert Store(url).read("notes.txt") == b"mine"


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
            export(Numbered(LENGTHS), url, 4, client=False)

        assert Store(url).names() == []

    def test_a_second_task_for_a_bucket_does_not_take_away_what_is_finished(
        self, monkeypatch, url, small
    ):
        write, made = Store.write, []

        def finished_at(store, name, content):
            if name == "batch-000011.safetensors" and not made:
                made.append(True)
                made.append(export(Numbered(LENGTHS), url, 4, client=False))
            write(store, name, content)

        monkeypatch.setattr(Store, "write", finished_at)
        with pytest.raises(DataError, match="either it was given up"):
            export(Numbered(LENGTHS), url, 4, client=False)

        assert sorted(ids_of(BatchFiles(url))) == list(range(100))
        names = [file.name for file in made[1].files]
        assert Store(url).names() == [*names, "manifest.json"]


class Unlike(Numbered):
    """The last part is of another dtype."""

    def load(self, part):
        x, y = super().load(part)
        return x, y.astype("int16") if part == self.parts - 1 else y


class Objects(Numbered):
    def load(self, part):
        return np.array([object()]), None


class TestRefused:
    def test_parts_that_look_different(self, url):
        with pytest.raises(DataError, match=r"y of part 4 is int16 .*before uint8"):
            export(Unlike(LENGTHS), url, 4, client=False)

    def test_objects(self, url):
        with pytest.raises(DataError, match=r"part 0: x must hold real numbers"):
            export(Objects(LENGTHS), url, 4, client=False)

    def test_no_rows(self, url):
        with pytest.raises(DataError, match="nothing to export: X has no rows"):
            export(Numbered([0, 0]), url, 4, client=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
            ({"batches_per_file": 1.5}, "batches_per_file must be .* >= 1, got 1.5"),
            ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
            ({"transform": 3}, "transform must be a function of a batch, or None"),
        ],
    )
    def test_options(self, url, options, message):
        with pytest.raises(OptionError, match=message):
            export(Numbered(LENGTHS), url, **{"batch_size": 4, **options})

    def test_a_piece_cut_short(self, monkeypatch, url):
        interrupted(monkeypatch, url, "batch-000000.safetensors")
        Store(url).write(".unfinished/part-000000-0000.rows", b"12")

        with pytest.raises(DataError, match=r"part-000000-0000\.rows is damaged"):
            export(Numbered(LENGTHS), url, 4, client=False)

    def test_a_damaged_record(self, monkeypatch, url):
        interrupted(monkeypatch, url, "batch-000000.safetensors")
        Store(url).write(".unfinished/part-000000.json", b"{")

        with pytest.raises(DataError, match=r"part-000000\.json is damaged: "):
            export(Numbered(LENGTHS), url, 4, client=False)


def test_of_a_stream_no_more_is_held_than_goes_into_a_piece(url, monkeypatch):
    monkeypatch.setattr(EXPORT, "PIECE_BYTES", 1)
    held = []
    joined = EXPORT.joined
    monkeypatch.setattr(EXPORT, "joined", lambda b: held.append(len(b)) or joined(b))

    export(Streamed([10]), url, 4, client=False)

    assert held == [1, 1]  # it comes in two
