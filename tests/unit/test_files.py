"""Which files a user means, and what they are as parts of a source."""

import pickle
import uuid
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from daskdl.data.files import Files
from daskdl.data.formats import FromBytes, Npy, OneExample
from daskdl.data.shards import archived
from daskdl.data.storage import Store, are_paths
from daskdl.data.tabular_formats import Csv
from daskdl.errors import DataError, OptionError
from tests.support import s3


@pytest.fixture
def folder(tmp_path):
    """Three tables of 2, 3 and 4 rows."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.full((i + 2, 2), i, np.float32))
    return tmp_path


def names(files):
    return [Path(files.name(part)).name for part in range(files.parts)]


def bytes_example(content):
    return np.frombuffer(content, "u1"), content[0]


def examples(store, count):
    for i in range(count):
        store.write(f"{i:03}.bin", bytes([i, 7]))


def test_each_file_of_a_folder_is_a_part(folder):
    files = Files(folder)

    x, y = files.load(1)

    assert files.parts == 3
    assert files.name(1) == f"{folder}/1.npy"
    assert files.lengths is None
    np.testing.assert_array_equal(x, np.full((3, 2), 1, np.float32))
    assert y is None


@pytest.mark.parametrize(
    ("given", "pattern", "found"),
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
def test_paths_are_folders_files_patterns_and_lists(folder, given, pattern, found):
    if isinstance(given, list):
        given = [one.format(folder) for one in given]
    else:
        given = given.format(folder)

    files = Files(given, Npy(), pattern=pattern)

    assert names(files) == found
    assert len(files.load(0)[0]) == int(found[0][0]) + 2


@pytest.mark.parametrize("form", ["{}", "[{}]", "{:.8}*", "[{:.8}*]"])
def test_files_need_not_be_in_a_folder(form):
    name = f"{uuid.uuid4().hex}.bin"
    root = Store("memory://")
    root.write(name, b"ab")
    given = f"memory://{form.strip('[]').format(name)}"

    files = Files(
        [given] if "[" in form else given, OneExample(FromBytes(bytes_example))
    )

    assert files.file_urls(0) == [f"memory://{name}"]
    assert files.load(0)[1].tolist() == [ord("a")]
    root.delete([name])


def test_a_bucket_is_not_taken_for_a_file(bucket, s3_endpoint, monkeypatch):
    options = s3.options(s3_endpoint)
    Store(bucket, options).write("a.bin", b"ab")
    asked = []
    monkeypatch.setattr(Store, "exists", lambda store, name: asked.append(name))

    files = Files(bucket, FromBytes(bytes_example), storage_options=options)

    assert files.file_urls(0) == [f"{bucket}/a.bin"]
    assert asked == []


def test_a_file_may_be_in_an_archive():
    name = uuid.uuid4().hex
    content = archived([("a/0.bin", b"ab"), ("1.bin", b"c")], "zip")
    Store(f"memory://{name}").write("x.zip", content)
    loader = FromBytes(lambda content: np.frombuffer(content, "u1"))
    ends = f"::memory://{name}/x.zip"

    one, all_of_it = (Files(f"zip://{p}{ends}", loader) for p in ("a/0.bin", ""))

    assert one.file_urls(0) == [f"zip://a/0.bin{ends}"]
    assert one.load(0)[0].tolist() == [*b"ab"]
    assert [all_of_it.name(i) for i in range(2)] == [
        f"zip://1.bin{ends}",
        f"zip://a/0.bin{ends}",
    ]


def test_an_archive_that_is_not_there_is_named():
    with pytest.raises(DataError, match=r"cannot open zip://.*no/where\.zip"):
        Files("zip://a.npy::memory://no/where.zip")


def test_files_below_the_folder_are_found_and_hidden_ones_are_not(tmp_path):
    store = Store(str(tmp_path))
    for name in ("a/b/c.csv", "_SUCCESS", ".hidden.csv", ".cache/x.csv", "_a/d.csv"):
        store.write(name, b"x\n1\n")

    assert names(Files(tmp_path)) == ["d.csv", "c.csv"]


def test_a_list_has_files_of_several_folders(tmp_path):
    for folder in "ab":
        Store(f"{tmp_path}/{folder}").write("x.csv", f"v\n{ord(folder)}\n".encode())

    files = Files([f"{tmp_path}/a/x.csv", f"{tmp_path}/b/x.csv"])

    assert [files.load(part)[0].item() for part in range(2)] == [ord("a"), ord("b")]


def test_extensions_may_be_capitals(folder):
    (folder / "0.npy").rename(folder / "A.NPY")

    assert Files(folder).parts == 3


def test_a_path_with_brackets_is_no_pattern(tmp_path):
    inner = tmp_path / "a [1]"
    inner.mkdir()
    np.save(inner / "x[0].npy", np.ones((2, 1)))

    assert names(Files(inner)) == ["x[0].npy"]
    assert names(Files(inner / "x[0].npy")) == ["x[0].npy"]
    assert names(Files([inner / "x[0].npy"])) == ["x[0].npy"]


@pytest.mark.parametrize(
    ("given", "pattern", "message"),
    [
        ("{0}/missing", None, "there are no files at {0}/missing"),
        ("{0}", "*.png", r"there are no files at {0} that match '\*\.png'"),
        ("{0}/*.png", None, r"there are no files that match {0}/\*\.png"),
        (["{0}/0.npy", "{0}/9.npy"], None, "there is no file at {0}/9.npy"),
        (["{0}/0.npy", "{0}/*.png"], None, r"no files that match {0}/\*\.png"),
        ("memory://daskdl-nothing", None, "no files at memory://daskdl-nothing"),
    ],
)
def test_what_matches_nothing_is_named(folder, given, pattern, message):
    several = isinstance(given, list)
    paths = [one.format(folder) for one in (given if several else [given])]

    with pytest.raises(DataError, match=message.format(folder)):
        Files(paths if several else paths[0], pattern=pattern)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, r"paths must be a path, a URL or a list of them, got \[\]"),
        (3, {}, "paths must be a path, a URL or a list of them, got 3"),
        (["a", 3], {}, "paths must be a path, a URL or a list of them"),
        (["a"], {"pattern": "*"}, r"pattern is for a folder, got a list"),
    ],
)
def test_paths_that_are_none_are_refused(given, options, message):
    with pytest.raises(OptionError, match=message):
        Files(given, **options)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.npy.gz"])
def test_an_unknown_extension_is_refused_with_those_that_are_known(tmp_path, name):
    (tmp_path / name).write_bytes(b"")

    with pytest.raises(DataError, match=r"one of '\.npy', .*ensors', got ") as raised:
        Files(tmp_path)

    assert f"got '{Path(name).suffix}', as {tmp_path}/{name}" in str(raised.value)


def test_mixed_extensions_are_refused(folder):
    (folder / "a.csv").write_text("x\n1\n")

    with pytest.raises(DataError, match=r"got '\.csv', '\.npy', as .*give a loader="):
        Files(folder)


def test_a_loader_need_not_fit_the_extension(tmp_path):
    (tmp_path / "a.txt").write_text("x,y\n1,2\n")

    x, y = Files(tmp_path, Csv("y")).load(0)

    assert (x.tolist(), y.tolist()) == ([[1.0]], [2])


def test_lengths_are_looked_up_and_empty_files_are_passed_over(folder):
    np.save(folder / "1.npy", np.zeros((0, 2), np.float32))
    files = Files(folder)

    known = files.known([files.look(part) for part in range(files.parts)])

    assert known.lengths == [2, 4]
    assert names(known) == ["0.npy", "2.npy"]
    assert known.first[0].shape == (2, 2)
    assert known.load(1)[0][0, 0] == 2
    assert files.parts == 3


def test_files_that_are_all_empty_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((0, 2)))
    files = Files(tmp_path)

    with pytest.raises(DataError, match=f"no rows in any file, as {tmp_path}/a.npy"):
        files.known([files.look(0)])


@pytest.mark.parametrize(
    ("each", "lengths"), [(None, [64, 36]), (30, [30, 30, 30, 10])]
)
def test_files_of_one_example_are_grouped(each, lengths):
    store = Store(f"memory://{uuid.uuid4().hex}")
    examples(store, 100)
    load = OneExample(FromBytes(bytes_example))

    files = Files(store.url, load, files_per_part=each)

    assert files.lengths == lengths
    assert files.parts == len(lengths)
    y = np.concatenate([files.load(part)[1] for part in range(files.parts)])
    np.testing.assert_array_equal(y, np.arange(100))
    assert files.load(0)[0].shape == (lengths[0], 2)
    assert files.name(0) == f"{store.url}/000.bin and {lengths[0] - 1} more"


def test_few_of_a_group_are_loaded_to_look():
    store = Store(f"memory://{uuid.uuid4().hex}")
    examples(store, 5)
    read = []

    def example(content):
        read.append(content)
        return bytes_example(content)

    facts = Files(store.url, OneExample(FromBytes(example))).look(0)

    assert facts.rows == 5
    assert len(facts.first[0]) == 2
    assert len(read) == 2


def test_an_example_of_another_shape_is_named_with_its_file(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"123")
    files = Files(tmp_path, OneExample(FromBytes(bytes_example)))

    with pytest.raises(
        DataError, match=rf"{tmp_path}/b has .*\(3,\).* and {tmp_path}/a has .*\(2,\)"
    ):
        files.load(0)


@pytest.mark.parametrize(
    ("loader", "size", "message"),
    [
        (Npy(), 2, "files_per_part is for files of one example each"),
        (OneExample(len), 0, "files_per_part must be >= 1, got 0"),
    ],
)
def test_a_size_that_cannot_be_used_is_refused(folder, loader, size, message):
    with pytest.raises(OptionError, match=message):
        Files(folder, loader, files_per_part=size)


def test_classes_of_the_loader_are_those_of_the_source(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,cat\n")

    assert Files(tmp_path, Csv("y", classes=["cat"])).classes == ["cat"]


def test_a_file_that_went_is_named(folder):
    files = Files(folder)
    (folder / "1.npy").unlink()

    with pytest.raises(DataError, match=f"cannot read {folder}/1.npy: there is no"):
        files.load(1)


def test_a_source_travels(folder):
    files = Files(folder, lambda path: np.load(path) + 1)

    again = pickle.loads(cloudpickle.dumps(files))

    np.testing.assert_array_equal(again.load(2)[0], np.full((4, 2), 3))


def test_files_on_a_server_are_listed_looked_at_and_loaded(bucket, s3_endpoint, folder):
    options = s3.options(s3_endpoint)
    for path in folder.iterdir():
        Store(f"{bucket}/deep", options).write(path.name, path.read_bytes())

    for given in (
        bucket,
        f"{bucket}/deep/*.npy",
        [f"{bucket}/deep/{i}.npy" for i in range(3)],
    ):
        files = Files(given, storage_options=options)

        known = files.known([files.look(part) for part in range(3)])

        assert known.lengths == [2, 3, 4]
        assert known.load(2)[0].shape == (4, 2)
        assert known.name(2) == f"{bucket}/deep/2.npy"


def test_only_paths_and_lists_of_paths_are_paths():
    assert are_paths(Path("x"))
    assert are_paths(["x", Path("y")])
    assert not any(are_paths(v) for v in ([], [1], ("x",), None, np.zeros(3)))
