"""Which files a user means, and what they are as parts of a source."""

import pickle
import uuid
import zipfile
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from daskdl.data import Csv, Npy, files, pack
from daskdl.data.inputs import infer_metadata, merge_small_parts, source_of
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError
from tests.support import s3


@pytest.fixture
def folder(tmp_path):
    """Three tables of 2, 3 and 4 rows."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.full((i + 2, 2), i, np.float32))
    return tmp_path


@pytest.fixture
def store():
    return Store(f"memory://{uuid.uuid4().hex}")


def names(source):
    return [Path(source.name(part)).name for part in range(source.parts)]


def example(file):
    content = file.read()
    return np.frombuffer(content, "u1"), content[0]


def examples(store, count):
    for i in range(count):
        store.write(f"{i:03}.bin", bytes([i, 7]))


@pytest.mark.parametrize(
    ("paths", "pattern", "expected"),
    [
        ("{0}", None, ["0.npy", "1.npy", "2.npy"]),
        ("{0}", "[12].npy", ["1.npy", "2.npy"]),
        ("{0}/1.npy", None, ["1.npy"]),
        ("{0}/[!1]*", None, ["0.npy", "2.npy"]),
        ("file://{0}/", None, ["0.npy", "1.npy", "2.npy"]),
        (["{0}/2.npy", "{0}/0.npy"], None, ["2.npy", "0.npy"]),
        (["{0}/2.npy", "{0}/[01].npy"], None, ["2.npy", "0.npy", "1.npy"]),
    ],
)
def test_paths_are_folders_files_patterns_and_lists(folder, paths, pattern, expected):
    if isinstance(paths, list):
        paths = [path.format(folder) for path in paths]
    else:
        paths = paths.format(folder)

    source = files(paths, Npy(), pattern=pattern)

    assert (source.parts, source.lengths) == (len(expected), None)
    assert names(source) == expected
    assert len(source.load(0)[0]) == int(expected[0][0]) + 2


@pytest.mark.parametrize("form", ["{}", "{:.8}*"])
def test_files_need_not_be_in_a_folder(form):
    name = f"{uuid.uuid4().hex}.bin"
    root = Store("memory://")
    root.write(name, b"ab")

    source = files(f"memory://{form.format(name)}", example, one_example=True)

    assert source.name(0) == f"memory://{name}"
    assert source.load(0)[1].tolist() == [ord("a")]
    root.delete([name])


def test_a_file_may_be_in_an_archive(tmp_path):
    store = Store(str(tmp_path / "in"))
    store.write("a/0.bin", b"ab")
    store.write("1.bin", b"cd")
    archive = tmp_path / "out.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for name in store.names():
            target.writestr(name, store.read(name))

    whole = files(f"zip://::{archive}", example, one_example=True, files_per_part=1)

    for part, path in enumerate(("1.bin", "a/0.bin")):
        source = files(f"zip://{path}::{archive}", example, one_example=True)
        assert source.name(0) == whole.name(part) == f"zip://{path}::{archive}"
        assert source.load(0)[1] == whole.load(part)[1] == store.read(path)[0]


def test_files_below_the_folder_are_found_and_hidden_ones_are_not(tmp_path):
    store = Store(str(tmp_path))
    for name in ("a/b/c.csv", "_SUCCESS", ".hidden.csv", ".cache/x.csv", "_a/d.csv"):
        store.write(name, b"x\n1\n")

    assert names(files(tmp_path)) == ["d.csv", "c.csv"]


def test_a_path_with_brackets_is_no_pattern(tmp_path):
    inner = tmp_path / "a [1]"
    inner.mkdir()
    np.save(inner / "x[0].npy", np.ones((2, 1)))

    for paths in (inner, inner / "x[0].npy", [inner / "x[0].npy"]):
        assert names(files(paths)) == ["x[0].npy"]


@pytest.mark.parametrize(
    ("templates", "pattern", "message"),
    [
        ("{0}/missing", None, "there are no files at {0}/missing"),
        ("{0}", "*.png", r"there are no files at {0} that match '\*\.png'"),
        ("{0}/*.png", None, r"there are no files that match {0}/\*\.png"),
        (["{0}/0.npy", "{0}/9.npy"], None, "there is no file at {0}/9.npy"),
        (["{0}/0.npy", "{0}/*.png"], None, r"no files that match {0}/\*\.png"),
        ("memory://daskdl-nothing", None, "no files at memory://daskdl-nothing"),
        ("a great film", None, "a str is the path or URL of files; convert text"),
    ],
)
def test_what_matches_nothing_is_named(folder, templates, pattern, message):
    several = isinstance(templates, list)
    paths = [path.format(folder) for path in (templates if several else [templates])]

    with pytest.raises(DataError, match=message.format(folder)):
        files(paths if several else paths[0], pattern=pattern)


@pytest.mark.parametrize(
    ("paths", "options", "message"),
    [
        ([], {}, r"paths must be a path, a URL or a list of them, got \[\]"),
        (3, {}, "paths must be a path, a URL or a list of them, got 3"),
        (["a", 3], {}, "paths must be a path, a URL or a list of them"),
        (["a"], {"pattern": "*"}, r"pattern is for a folder, got a list"),
        ("a", {"files_per_part": 2}, "files_per_part is for files of one example"),
        ("a", {"files_per_part": 0, "one_example": True}, "must be a whole number >="),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(paths, options, message):
    with pytest.raises(OptionError, match=message):
        files(paths, **options)


@pytest.mark.parametrize("names", [["a.txt"], ["a"], ["a.npy.gz"], ["a.csv", "b.npy"]])
def test_unknown_and_mixed_extensions_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(DataError, match=r"one of '\.npy', .*ensors', got ") as raised:
        files(tmp_path)

    assert (
        f"example {tmp_path}/{names[0]}; use daskdl.data.files(X, loader=...)"
        in str(raised.value)
    )


def test_lengths_are_looked_up_and_empty_files_are_passed_over(folder):
    np.save(folder / "1.npy", np.zeros((0, 2), np.float32))

    known = infer_metadata(files(folder), False)

    assert known.lengths == [2, 4]
    assert names(known) == ["0.npy", "2.npy"]
    assert known.first_rows[0].shape == (2, 2)
    assert known.load(1)[0][0, 0] == 2


@pytest.mark.parametrize(
    ("each", "lengths"), [(None, [64, 36]), (30, [30, 30, 30, 10])]
)
def test_files_of_one_example_are_grouped(store, each, lengths):
    examples(store, 100)

    source = files(store.url, example, one_example=True, files_per_part=each)

    assert source.lengths == lengths
    y = np.concatenate([source.load(part)[1] for part in range(source.parts)])
    np.testing.assert_array_equal(y, np.arange(100))
    assert source.load(0)[0].shape == (lengths[0], 2)
    assert source.name(0) == f"{store.url}/000.bin and {lengths[0] - 1} more"
    name, load = source.pieces(1)[2]
    assert (name, load()[1]) == (f"{store.url}/{lengths[0] + 2:03}.bin", lengths[0] + 2)


def test_few_of_a_group_are_loaded_to_look(store):
    examples(store, 5)
    read = []

    def noted(file):
        read.append(file.name)
        return example(file)

    facts = files(store.url, noted, one_example=True).facts(0)

    assert facts.rows == 5
    assert len(facts.first_rows[0]) == len(read) == 2


def test_an_example_of_another_shape_is_named_with_its_file(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"123")
    source = files(tmp_path, example, one_example=True)

    with pytest.raises(
        DataError, match=rf"{tmp_path}/b has .*\(3,\).* and {tmp_path}/a has .*\(2,\)"
    ):
        source.load(0)


def test_classes_are_those_of_the_loader_or_those_that_are_given(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,cat\n")
    loader = Csv(label="y", classes=["cat"])

    assert files(tmp_path, loader).classes == ["cat"]
    assert files(tmp_path, loader, classes=["Katze"]).classes == ["Katze"]


def test_a_file_that_went_is_named(folder):
    source = files(folder)
    (folder / "1.npy").unlink()

    for ask in (source.load, source.facts):
        with pytest.raises(DataError, match=f"cannot read {folder}/1.npy: there is no"):
            ask(1)


def test_a_file_that_went_from_a_server_is_named_when_its_end_is_read(store):
    store.write("a.parquet", b"x")
    source = files(store.url)
    store.delete(["a.parquet"])

    with pytest.raises(DataError, match=r"a\.parquet: there is no such file"):
        source.facts(0)


def test_a_source_travels_without_showing_credentials(folder):
    source = files(
        folder, lambda file: np.load(file) + 1, storage_options={"auto_mkdir": True}
    )

    again = pickle.loads(cloudpickle.dumps(source))

    np.testing.assert_array_equal(again.load(2)[0], np.full((4, 2), 3))
    assert "auto_mkdir" not in repr(again.groups)


def test_files_on_a_server_are_listed_looked_at_and_loaded(bucket, s3_endpoint, folder):
    options = s3.options(s3_endpoint)
    for path in folder.iterdir():
        Store(f"{bucket}/deep", options).write(path.name, path.read_bytes())

    for paths in (
        bucket,
        f"{bucket}/deep/*.npy",
        [f"{bucket}/deep/{i}.npy" for i in range(3)],
    ):
        source = files(paths, storage_options=options)

        known = source.with_facts([source.facts(part) for part in range(3)])

        assert known.lengths == [2, 3, 4]
        assert known.load(2)[0].shape == (4, 2)
        assert known.name(2) == f"{bucket}/deep/2.npy"


def test_what_lies_in_a_folder_is_recognised(folder, tmp_path):
    pack(np.ones((4, 2)), url=tmp_path / "rows", per_file=2, client=False)
    paths = sorted(map(str, folder.glob("*.npy")))
    options = {"per_file": 2, "shuffle": False, "client": False}
    pack(paths, url=tmp_path / "files", **options)

    rows, originals = files(tmp_path / "rows"), files(tmp_path / "files")

    assert (rows.parts, originals.parts) == (2, 2)
    assert (rows.lengths, originals.lengths) == ([2, 2], None)
    assert len(originals.load(0)[0]) == 2 + 3


def test_small_files_of_several_shapes_are_merged_although_some_have_no_rows(tmp_path):
    for number in range(129):  # of one row, but for the first
        rows = np.zeros((min(number, 1), 2 + number // 65))
        np.savez(tmp_path / f"{number:03}.npz", x=rows, y=np.zeros(len(rows)))

    source = merge_small_parts(infer_metadata(source_of(str(tmp_path)), False))

    assert source.parts == 64
    assert [len(source.load(part)[0]) for part in range(64)] == [2] * 64
