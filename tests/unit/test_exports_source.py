"""Batch files are data to train on; what is not is refused."""

import pickle

import pytest

from daskdl.data.batch_files import BatchFiles, is_export
from daskdl.data.export import export
from daskdl.data.storage import Store
from daskdl.errors import DataError
from tests.support.numbered import Numbered, ids_of, numbered


@pytest.fixture
def url(tmp_path):
    export(Numbered([5, 6]), str(tmp_path), 4, client=False)
    return str(tmp_path)


def test_a_part_is_a_file(url):
    source = BatchFiles(url)

    assert (source.parts, source.lengths) == (3, [4, 4, 3])
    assert source.name(1) == f"{url}/batch-000001.safetensors"
    assert source.classes == ("a", "b", "c")


def test_shown_rows_look_like_all_others(url):
    x, y = BatchFiles(url).first

    expected_x, expected_y = numbered(0, 2)
    assert (x["id"].dtype, x["id"].shape) == (expected_x["id"].dtype, (2,))
    assert x["pair"][0].shape == expected_x["pair"][0].shape
    assert (y.dtype, y.shape) == (expected_y.dtype, (2,))
    assert not y.any()


def test_it_travels(url):
    assert sorted(ids_of(pickle.loads(pickle.dumps(BatchFiles(url))))) == list(
        range(11)
    )


def test_a_path_will_do(tmp_path, url):
    assert BatchFiles(tmp_path).parts == 3


def test_a_damaged_file_is_named(url):
    Store(url).write("batch-000001.safetensors", b"")

    with pytest.raises(DataError, match=f"{url}/batch-000001.safetensors is damaged"):
        BatchFiles(url).load(1)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no manifest\.json in .*/x; make"):
        BatchFiles(tmp_path / "x")


def test_an_export_is_known_finished_or_not(url, tmp_path):
    assert is_export(url)
    assert is_export(tmp_path)
    Store(url).delete(["manifest.json"])
    assert not is_export(url)
    Store(url).write(".unfinished/origin.json", b"{}")
    assert is_export(url)


@pytest.mark.parametrize("value", [None, 3, ["a"], "/nothing/here", "a/*.csv"])
def test_something_else_is_not_an_export(value):
    assert not is_export(value)
