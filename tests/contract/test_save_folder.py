"""A save is there at once or not at all, however its writer ends; tensors are exact."""

import itertools
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

from daskdl import DataError, OptionError, SaveError
from daskdl.data.manifest import Manifest, ManifestFormat
from daskdl.data.storage import Store
from daskdl.saving.folder import (
    DTYPES,
    SaveFolder,
    decode_tensors,
    encode_tensors,
    folder_store,
)
from tests.support.renames import Refusing, Silent

KIND = ManifestFormat("a kind", 1, "index.json", "look elsewhere", "save again")


class Died(BaseException):
    """As if the process had been killed here."""


@pytest.fixture(params=["local", "memory", Refusing.protocol, Silent.protocol])
def folder(request, tmp_path):
    kind = request.param
    url = str(tmp_path / "save") if kind == "local" else f"{kind}:/{tmp_path}"
    yield SaveFolder(folder_store(url), KIND, ("model", "extra"))
    Store(url).delete_all()


def write(folder, number):
    tensors = encode_tensors({"x": torch.full((3,), number)})
    folder.write({"number": number}, {"model": tensors})


def numbers(folder):
    """The number in the manifest, and that in the tensors."""
    content, tensors = folder.read()
    assert list(tensors) == ["model"]
    return content["number"], int(tensors["model"]["x"][0])


class TestFolder:
    def test_a_new_save_deletes_only_files_of_the_old_one(self, folder):
        others = {"model.safetensors", "model-x.safetensors", "note.txt", "below/y.txt"}
        for name in others:
            folder.store.write(name, b"the user's own")

        for number in (1, 2):
            write(folder, number)

        assert numbers(folder) == (2, 2)
        assert folder.content() == {"number": 2}
        assert len({*folder.store.names()} - others) == 2
        assert others < {*folder.store.names()}

    # Writing the tensors, writing the manifest, deleting: before and after each.
    @pytest.mark.parametrize("died_at", range(6))
    def test_a_writer_that_dies_leaves_the_old_save_or_the_new_one(
        self, folder, died_at, monkeypatch
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

    def test_a_reader_that_is_overtaken_reads_the_new_save(self, folder, monkeypatch):
        write(folder, 1)
        read = Manifest.read
        overtaken = []

        def overtaking(store, kind):
            manifest = read(store, kind)
            if not overtaken:
                overtaken.append(True)
                write(folder, 2)
            return manifest

        monkeypatch.setattr(Manifest, "read", overtaking)

        assert numbers(folder) == (2, 2)

    def test_a_file_of_an_unknown_role_is_refused(self, folder):
        write(folder, 1)

        with pytest.raises(SaveError, match="has the role 'model'"):
            SaveFolder(folder.store, KIND, ("other",)).read()

    def test_storage_errors_contain_the_url(self, folder, monkeypatch):
        with pytest.raises(
            SaveError, match=rf"cannot read {folder.store.url}.*no such"
        ):
            folder.read()

        def refuse(self, name, content):
            raise DataError(f"cannot write {self.url_of(name)}: PermissionError")

        monkeypatch.setattr(Store, "write", refuse)

        with pytest.raises(SaveError, match=r"cannot write .*: PermissionError"):
            write(folder, 1)


def to_bytes(named):
    return bytes(encode_tensors(named).numpy().data)


class TestTensors:
    @pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
    def test_dtypes_are_exact_and_readable_by_safetensors(self, dtype):
        tensor = torch.tensor([[0, 1], [3, 2]]).to(dtype)
        content = to_bytes({"x": tensor, "y": torch.ones(1, dtype=torch.int8)})

        for read in (decode_tensors(content), safetensors.torch.load(content)):
            assert read["x"].dtype == dtype
            assert torch.equal(read["x"], tensor)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(12.0)[3:5],
            torch.ones(1).expand(4),
            torch.tensor(3.5),
            torch.empty(0, 2),
            nn.Parameter(torch.ones(2)),
        ],
        ids=repr,
    )
    def test_views_are_restored_as_contiguous_tensors(self, tensor):
        (read,) = decode_tensors(to_bytes({"x": tensor})).values()

        assert torch.equal(read, tensor)
        assert read.is_contiguous()

    def test_memory_is_reused_only_if_its_size_fits(self):
        first = encode_tensors({"x": torch.arange(4.0)})

        same = encode_tensors({"x": torch.ones(4)}, first)
        larger = encode_tensors({"x": torch.ones(40)}, first)

        assert same.data_ptr() == first.data_ptr() != larger.data_ptr()
        read = decode_tensors(bytes(larger.numpy().data))
        assert torch.equal(read["x"], torch.ones(40))

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (torch.ones(2, dtype=torch.complex64), "x is torch.complex64"),
            (torch.ones(2).to_sparse(), "torch.sparse_coo"),
            (torch.ones(2, device="meta"), "on meta"),
            (nn.UninitializedParameter(), "x is a .*UninitializedParameter"),
        ],
        ids=["complex", "sparse", "meta", "lazy"],
    )
    def test_unsupported_tensors_are_refused_by_name(self, tensor, message):
        with pytest.raises(OptionError, match=message):
            encode_tensors({"x": tensor})

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\0" * 8,
            (2**63).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            pickle.dumps({"x": 1}),
            to_bytes({"x": torch.arange(3)})[:-1],
            to_bytes({"x": torch.arange(3)}) + b"\0",
            safetensors.torch.save({"x": torch.ones(2).to(torch.float8_e5m2)}),
        ],
        ids=["no", "zero", "huge", "list", "pickle", "short", "more", "F8"],
    )
    def test_incomplete_and_foreign_files_are_refused(self, content):
        with pytest.raises(
            SaveError, match=r"not a safetensors file|unsupported dtype"
        ):
            decode_tensors(content)
