"""Whatever is done to the files of a save: an error of daskdl, or the same trainer.

Nothing in them is executed, and nothing is written.
"""

import copy
import hashlib
import json
import pickle
import random
import threading
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from daskdl import DaskDLError, GradientSharing, OptionError, SaveError, Trainer
from daskdl.saving.trainer_state import save
from tests.support.saves import (
    WRONG,
    Bomb,
    Watch,
    fitted,
    flipped,
    places,
    replaced,
    signed,
)

FLIPS, CUTS, CHANGES = 100, 40, 400  # for each file; in the JSON


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The files of a save, by name."""
    folder = tmp_path_factory.mktemp("original")
    one = fitted(
        scheduler=lambda o: lr_scheduler.StepLR(o, 1),
        loss=torch.nn.CrossEntropyLoss(torch.ones(2)),
        master=GradientSharing(),
    )
    save(one, folder, True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def around(tmp_path, original):
    """What is there besides the save must be as it was, down to the bytes."""
    folder = tmp_path / "around" / "save"
    folder.mkdir(parents=True)
    (tmp_path / "around" / "x").write_bytes(b"the user's own")
    yield folder
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written - {f"around/save/{p.name}" for p in folder.iterdir()} == {"around/x"}
    assert (tmp_path / "around" / "x").read_bytes() == b"the user's own"


def put(folder, files):
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return sorted((p.name, p.read_bytes()) for p in folder.iterdir())


WATCH = Watch()


def outcome(folder):
    """What loading came to; anything but a trainer or an error of ours is raised."""
    before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    WATCH.watching = threading.get_ident()
    try:
        return Trainer.load(folder, client=False, trusted=["tests.support"])
    except DaskDLError as error:
        return error
    finally:
        WATCH.watching = None
        assert WATCH.seen == []
        assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before


@pytest.mark.parametrize("role", ["model", "optimizer", "extra", "trainer.json"])
class TestDamage:
    def test_any_flipped_bit_is_found(self, around, original, role):
        (name,) = (n for n in original if n.startswith(role))
        generator = random.Random(f"flips {role}")

        for _ in range(FLIPS):
            put(around, {**original, name: flipped(original[name], generator)})
            found = outcome(around)

            if not isinstance(found, SaveError):
                # 1e-05 and 1E-05 are the same number.
                same = {**json.loads((around / name).read_bytes())}
                assert same == json.loads(original[name])

    def test_any_truncated_file_is_found(self, around, original, role):
        (name,) = (n for n in original if n.startswith(role))
        generator = random.Random(f"cuts {role}")

        for _ in range(CUTS):
            length = generator.randrange(len(original[name]))
            put(around, {**original, name: original[name][:length]})

            assert isinstance(outcome(around), SaveError), length


def test_values_of_wrong_types_are_errors_of_ours_or_do_no_harm(around, original):
    index = json.loads(original["trainer.json"])
    generator = random.Random("types")
    paths = [path for path in places(index) if path and path[0] != "sha256"]
    refused = 0

    for _ in range(CHANGES):
        path, wrong = generator.choice(paths), generator.choice(WRONG)
        put(around, {**original, "trainer.json": signed(replaced(index, path, wrong))})
        refused += isinstance(outcome(around), DaskDLError)

    assert refused > CHANGES / 2  # others are, say, the loss in a row of the history


def test_parts_that_are_missing_are_errors_of_ours_or_do_no_harm(around, original):
    index = json.loads(original["trainer.json"])
    paths = [p for p in places(index) if p and isinstance(p[-1], str)]

    for path in random.Random("missing").sample(paths, min(300, len(paths))):
        changed = copy.deepcopy(index)
        inner = changed
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]
        put(around, {**original, "trainer.json": signed(changed)})

        outcome(around)  # raises what is not ours


@pytest.mark.parametrize("role", ["model", "optimizer", "extra"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_in_place_of_tensors_is_refused_and_not_run(
    around, original, tmp_path, role, kind
):
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    if kind == "torch":
        torch.save(Bomb(marker), tmp_path / "around" / "bomb")
        bomb = (tmp_path / "around" / "bomb").read_bytes()
        (tmp_path / "around" / "bomb").unlink()
    index, files = json.loads(original["trainer.json"]), dict(original)
    digest = hashlib.sha256(bomb).hexdigest()
    name = f"{role}-{digest[:16]}.safetensors"
    (entry,) = (entry for entry in index["files"] if entry["role"] == role)
    del files[entry["name"]]
    entry |= {"name": name, "nbytes": len(bomb), "sha256": digest}
    put(around, {**files, name: bomb, "trainer.json": signed(index)})

    found = outcome(around)

    assert isinstance(found, SaveError)
    assert "no safetensors file" in str(found)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "a/../../x", "..", "s3://bucket/x", "x\0y"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(
    around, original, name, monkeypatch
):
    index = json.loads(original["trainer.json"])
    own = (around.parent / "x").read_bytes()
    digest = hashlib.sha256(own).hexdigest()
    index["files"][0] |= {"name": name, "nbytes": len(own), "sha256": digest}
    put(around, {**original, "trainer.json": signed(index)})

    found = outcome(around)

    assert isinstance(found, SaveError)
    assert "describes no file" in str(found)


def partial(name):
    of, keywords = {"import": name}, {"dict": [["shell", True]]}
    return {"partial": {"of": of, "arguments": ["touch"], "keywords": keywords}}


@pytest.mark.parametrize(
    "argument", ["model", "loss", "optimizer", "scheduler", "step", "seed"]
)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"import": "os:abort"}, SaveError),
        ({"import": "pty:spawn"}, SaveError),
        ({"import": "daskdl.training.replica:os.abort"}, OptionError),
        ({"import": "_pytest.config:main"}, OptionError),
        ({"import": "save.payload:Net"}, OptionError),
        (partial("subprocess:call"), SaveError),
        (partial("torch.serialization:load"), OptionError),
        (partial("torch.hub:load"), OptionError),
        (partial("torch.fx.graph_module:reduce_graph_module"), OptionError),
        ({"torch": "hub.load"}, SaveError),
        ({"torch": "nn.functional.torch"}, SaveError),
        ({"object": {"class": "daskdl.trainer:Trainer", "fields": {}}}, OptionError),
        ({"object": {"class": "pathlib:Path", "fields": {}}}, SaveError),
        ({"loss": {"class": "eval", "arguments": {"dict": []}}}, SaveError),
    ],
    ids=lambda value: str(value)[:60],
)
def test_nothing_that_a_file_names_is_imported_or_called(
    around, original, argument, value, error, monkeypatch
):
    marker = around.parent / "ran"
    index = json.loads(original["trainer.json"])
    index["content"]["arguments"][argument] = {"value": value}
    payload = (
        f"import os\nos.mkdir({str(marker)!r})\nfrom torch.nn import Linear as Net"
    )
    put(around, {**original, "payload.py": payload.encode()})
    (around / "trainer.json").write_bytes(signed(index))
    monkeypatch.syspath_prepend(around.parent)  # where "save" is a package

    found = outcome(around)

    assert type(found) is error or (error is OptionError and "trusted=[" in str(found))
    assert not marker.exists()


def test_what_was_made_by_a_newer_daskdl_says_so(around, original):
    index = json.loads(original["trainer.json"])
    put(around, {**original, "trainer.json": signed({**index, "version": 2})})

    assert "of version 2, but this daskdl reads up to 1" in str(outcome(around))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\x80\x04.", b"PK\3\4"]
)
def test_a_foreign_file_is_refused(around, original, content):
    put(around, {**original, "trainer.json": content})

    assert isinstance(outcome(around), SaveError)


def test_the_save_itself_loads(around, original):
    put(around, original)

    found = outcome(around)

    assert not isinstance(found, DaskDLError), found
    assert Path(around).is_dir()


def test_the_watch_sees_what_is_done():
    watch = Watch()
    watch.watching = threading.get_ident()

    pickle.loads(pickle.dumps(Path()))

    watch.watching = None
    assert ("pickle.find_class", ("pathlib", "PosixPath")) in watch.seen
