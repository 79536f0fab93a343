"""A save is there at once or not at all, whenever its writer dies."""

import itertools

import pytest
import torch

from daskdl import DataError, OptionError, SaveError
from daskdl.data.storage import Store
from daskdl.saving import folder as folder_module
from daskdl.saving.folder import Folder, Kind

KIND = Kind("a kind", 1, "index.json", ("model", "extra"))


class Died(BaseException):
    """As if the process had been killed here."""


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    url = str(tmp_path / "save") if request.param == "local" else f"memory:/{tmp_path}"
    yield Folder.at(url, KIND)
    Store(url).delete_all()


def write(folder, number):
    tensors = {"model": {"x": torch.full((3,), number)}, "extra": {}}
    folder.write({"number": number}, tensors, {})


def numbers(folder):
    """The number in the index, and that in the tensors."""
    saved = folder.read()
    return saved.content["number"], int(saved.tensors["model"]["x"][0])


def test_what_is_read_is_what_was_written(folder):
    write(folder, 1)

    saved = folder.read()

    assert saved.content == {"number": 1}
    assert list(saved.tensors) == ["model"]
    assert saved.tensors["model"]["x"].tolist() == [1, 1, 1]


def test_a_new_save_leaves_no_file_of_the_old_one(folder):
    write(folder, 1)
    write(folder, 2)

    assert numbers(folder) == (2, 2)
    assert len(folder.store.names()) == 2


def test_files_that_are_not_of_a_save_stay(folder):
    others = ["model.safetensors", "model-x.safetensors", "note.txt", "below/y.txt"]
    for name in others:
        folder.store.write(name, b"the user's own")

    write(folder, 1)

    assert set(others) < set(folder.store.names())


# Writing the tensors, writing the index, deleting: before and after each.
@pytest.mark.parametrize("died_at", range(6))
def test_a_writer_that_dies_leaves_the_old_save_or_the_new_one(
    folder, died_at, monkeypatch
):
    write(folder, 1)
    moments = itertools.count()

    def dying(method):
        def act(self, *arguments):
            if next(moments) == died_at:
                raise Died
            method(self, *arguments)
            if next(moments) == died_at:
                raise Died

        return act

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", dying(Store.write))
        patched.setattr(Store, "delete", dying(Store.delete))
        with pytest.raises(Died):
            write(folder, 2)

    number = 1 if died_at < 3 else 2
    assert numbers(folder) == (number, number)
    write(folder, 3)  # what was left over is cleared away by the next one
    assert numbers(folder) == (3, 3)
    assert len(folder.store.names()) == 2


def test_a_reader_that_was_overtaken_reads_the_new_save(folder, monkeypatch):
    write(folder, 1)
    read = folder_module.decode_index
    overtaken = []

    def overtaking(kind, encoded):
        decoded = read(kind, encoded)
        if not overtaken:
            overtaken.append(True)
            write(folder, 2)
        return decoded

    monkeypatch.setattr(folder_module, "decode_index", overtaking)

    assert numbers(folder) == (2, 2)


def test_nothing_there_is_an_error_with_the_url(folder):
    with pytest.raises(SaveError, match=f"cannot read .*{folder.store.url}.*no such"):
        folder.read()


def damage_tensors(store, change):
    (name,) = store.names("model-*")
    store.write(name, change(store.read(name)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "bytes instead of"),
        (lambda content: content[:-1] + b"\1", "checksum is wrong"),
    ],
    ids=["truncated", "changed"],
)
def test_a_damaged_file_is_an_error_with_its_name(folder, change, message):
    write(folder, 1)
    damage_tensors(folder.store, change)

    with pytest.raises(SaveError, match=rf"model-\w+\.safetensors .*{message}"):
        folder.read()


def test_a_file_that_is_missing_is_an_error_with_its_name(folder):
    write(folder, 1)
    folder.store.delete(folder.store.names("model-*"))

    with pytest.raises(SaveError, match=r"model-\w+\.safetensors: there is no such"):
        folder.read()


def test_an_index_that_is_too_large_is_not_read(folder, monkeypatch):
    write(folder, 1)
    monkeypatch.setattr(folder_module, "MOST_BYTES", 10)
    monkeypatch.setattr(Store, "read", lambda *_: pytest.fail("it was read"))

    with pytest.raises(SaveError, match=r"its index.json has \d+ bytes"):
        folder.read()


def test_what_cannot_be_written_is_an_error_with_the_url(folder, monkeypatch):
    def refuse(self, name, content):
        raise DataError(f"cannot write {self.url_of(name)}: PermissionError")

    monkeypatch.setattr(Store, "write", refuse)

    with pytest.raises(SaveError, match=r"cannot write .*: PermissionError"):
        write(folder, 1)


@pytest.mark.parametrize("url", [None, 3, b"x", ["x"]])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(OptionError, match="url must be a URL or a path"):
        Folder.at(url, KIND)
