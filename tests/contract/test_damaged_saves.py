"""Whatever is done to the files of saves: an error of daskdl, or no harm.

Nothing in them is executed, and nothing is written.
"""

import copy
import gc
import hashlib
import json
import os
import pickle
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    Checkpoint,
    DaskDLError,
    EarlyStopping,
    GradientSharing,
    OptionError,
    SaveError,
    Trainer,
)
from daskdl.saving.checkpoints import Series, complete_at
from daskdl.training.checkpointing import resume_plan, start_state
from tests.support.saves import layers, signed

FLIPS, CUTS, CHANGES, FITS = 25, 8, 120, 20  # of each file; of the JSON; of fits
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
MINE = b"the user's own"
FOLDERS = {"trainer": "save", "checkpoint": "checkpoint-000001"}
INDEXES = {
    "trainer": ["trainer.json"],
    "checkpoint": ["common.json", "replica-0.json", "replica-1.json"],
}
TENSORS = {
    "trainer": ["model-", "optimizer-", "extra-"],
    "checkpoint": ["common-", "replica-0-", "replica-1-"],
}
KINDS = pytest.mark.parametrize("kind", FOLDERS)
EACH_TENSORS = pytest.mark.parametrize(
    ("kind", "start"), [(kind, one) for kind in FOLDERS for one in TENSORS[kind]]
)
EACH_FILE = pytest.mark.parametrize(
    ("kind", "start"),
    [(k, one) for k in FOLDERS for one in (*INDEXES[k], *TENSORS[k])],
)
WRONG = [None, True, -1, 2**70, 1.5, 1e308, "x", "../../x", [], {}, [[]], {"x": []}]


class Watch:
    """Records what this thread does that loading never does; there is one hook."""

    ACTIONS = (
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.system",
        "pickle.find_class",
        "socket.connect",
        "subprocess.Popen",
    )

    def __init__(self):
        self.watching = None
        self.seen = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.watching != threading.get_ident():
            return
        writes = event == "open" and set(str(arguments[1])) & set("wax+")
        if event in self.ACTIONS or writes:
            self.seen.append((event, arguments))


WATCH = Watch()


def trainer(*callbacks):
    return Trainer(
        layers,
        nn.CrossEntropyLoss(torch.ones(2)),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=GradientSharing(max_staleness=0, replicas_per_worker=2),
        client=False,
        progress=False,
        telemetry_every=1,
        scheduler=lambda o: lr_scheduler.StepLR(o, 1),
        callbacks=[EarlyStopping("loss", patience=9), *callbacks],
    )


def fits(own, **options):
    return own.fit(X, Y, epochs=2, batch_size=4, **options)


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Files by name: of a trainer, and of a checkpoint in the middle of an epoch."""
    url, folder = (tmp_path_factory.mktemp(name) for name in ("series", "save"))
    own = trainer(Checkpoint(url, "2 steps", keep_last=None))
    fits(own)
    own.save(folder)
    series = Series.at(url)
    [last] = [
        one
        for one in map(complete_at, map(series.folder, series.numbers()))
        if one.header["epoch"] == 1 and one.header["sync_point"] is not None
    ]
    return {
        "trainer": {path.name: path.read_bytes() for path in folder.iterdir()},
        "checkpoint": {name: last.store.read(name) for name in last.store.names()},
    }


class Place:
    """A folder for files of one kind, and a file of the user beside it."""

    def __init__(self, kind, files, around):
        self.kind, self.files, self.around = kind, files, around
        self.folder = around / FOLDERS[kind]
        self.folder.mkdir(parents=True)
        (around / "x").write_bytes(MINE)

    def named(self, start):
        (name,) = (name for name in self.files if name.startswith(start))
        return name

    def index(self, name):
        return json.loads(self.files[name])

    def put(self, changed):
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in {**self.files, **changed}.items():
            if content is not None:
                (self.folder / name).write_bytes(content)

    def outcome(self, changed):
        """What reading comes to with other files, or an error; others are raised."""
        self.put(changed)
        before = sorted((p.name, p.read_bytes()) for p in self.folder.iterdir())
        WATCH.seen.clear()
        gc.disable()  # objects of earlier tests would remove their files meanwhile
        WATCH.watching = threading.get_ident()
        try:
            if self.kind == "trainer":
                return Trainer.load(
                    self.folder, client=False, trusted=["tests.support"]
                )
            plan = resume_plan(self.around, [])
            return [start_state(plan, replica, 2) for replica in range(2)]
        except DaskDLError as error:
            return error
        finally:
            WATCH.watching = None
            gc.enable()
            assert WATCH.seen == []
            after = sorted((p.name, p.read_bytes()) for p in self.folder.iterdir())
            assert after == before


@pytest.fixture
def kind():
    return "trainer"


@pytest.fixture
def place(kind, saves, tmp_path):
    own = Place(kind, saves[kind], tmp_path / "around")
    yield own
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {*own.folder.iterdir()} == {own.around / "x"}
    assert (own.around / "x").read_bytes() == MINE


def places(value, path=()):
    """Paths to everything in some JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


def one_wrong(place, generator):
    """An index with one value replaced, or one field removed."""
    name = generator.choice(INDEXES[place.kind])
    index = place.index(name)
    paths = [path for path in places(index) if path and path[0] != "sha256"]
    *outer, last = generator.choice(paths)
    inner = index
    for step in outer:
        inner = inner[step]
    inner[last] = copy.deepcopy(generator.choice(WRONG))
    if isinstance(last, str) and generator.random() < 0.4:
        del inner[last]
    return {name: signed(index)}


@KINDS
def test_undamaged_files_are_read(place):
    assert not isinstance(place.outcome({}), DaskDLError)


@EACH_FILE
def test_any_flipped_bit_is_found(place, start):
    name, generator = place.named(start), random.Random(start)
    for _ in range(FLIPS):
        content = bytearray(place.files[name])
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)

        if not isinstance(place.outcome({name: bytes(content)}), SaveError):
            # 1e-05 and 1E-05 are the same number.
            assert json.loads(content) == place.index(name)


@EACH_FILE
def test_any_truncated_or_missing_file_is_found(place, start):
    name, generator = place.named(start), random.Random(start)
    whole = place.files[name]
    cuts = [whole[: generator.randrange(len(whole))] for _ in range(CUTS)]
    for content in (None, *cuts):
        assert isinstance(place.outcome({name: content}), SaveError)


@KINDS
def test_wrong_values_are_errors_or_harmless(place):
    generator = random.Random("values")

    found = [place.outcome(one_wrong(place, generator)) for _ in range(CHANGES)]

    # Others are, say, the loss in a row of the history.
    assert sum(isinstance(one, DaskDLError) for one in found) > CHANGES / 4


@pytest.mark.parametrize("kind", ["checkpoint"])
def test_wrong_values_are_errors_or_harmless_in_a_fit(place):
    generator, ended = random.Random("fits"), []
    for _ in range(FITS):
        place.put(one_wrong(place, generator))
        try:
            ended.append(len(fits(trainer(), resume=place.around)))
        except DaskDLError as error:
            ended.append(error)

    assert 2 in ended
    assert any(isinstance(end, DaskDLError) for end in ended)


class Bomb:
    """Pickled, it is a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("pickled", ["pickle", "torch"])
@EACH_TENSORS
def test_a_pickle_instead_of_tensors_is_refused_and_not_executed(
    place, tmp_path, start, pickled
):
    marker, aside = tmp_path / "exploded", tmp_path / "bomb"
    with aside.open("wb") as file:
        (pickle.dump if pickled == "pickle" else torch.save)(Bomb(marker), file)
    bomb = aside.read_bytes()
    aside.unlink()
    old, digest = place.named(start), hashlib.sha256(bomb).hexdigest()
    new = f"{start}{digest[:16]}.safetensors"
    [name] = [n for n in INDEXES[place.kind] if old in place.files[n].decode()]
    index = place.index(name)
    [entry] = [entry for entry in index["files"] if entry["name"] == old]
    entry |= {"name": new, "nbytes": len(bomb), "sha256": digest}

    found = place.outcome({old: None, new: bomb, name: signed(index)})

    assert isinstance(found, SaveError)
    assert "no safetensors file" in str(found)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "a/../../x", "..", "s3://bucket/x", "x\0y"]
)
@KINDS
def test_file_names_outside_the_folder_are_refused(place, name):
    manifest = INDEXES[place.kind][-1]
    index, digest = place.index(manifest), hashlib.sha256(MINE).hexdigest()
    index["files"][0] |= {"name": name, "nbytes": len(MINE), "sha256": digest}

    found = place.outcome({manifest: signed(index)})

    assert isinstance(found, SaveError)
    assert "describes no file" in str(found)


def partial(name):
    of, keywords = {"import": name}, {"dict": [["shell", True]]}
    return {"partial": {"of": of, "arguments": ["touch"], "keywords": keywords}}


@pytest.mark.parametrize("argument", ["model", "seed"])
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
def test_code_named_in_a_file_is_not_imported_or_called(
    place, argument, value, error, monkeypatch
):
    marker, index = place.around / "ran", place.index("trainer.json")
    index["content"]["arguments"][argument] = {"value": value}
    payload = (
        f"import os\nos.mkdir({str(marker)!r})\nfrom torch.nn import Linear as Net"
    )
    monkeypatch.syspath_prepend(place.around)  # where "save" is a package

    found = place.outcome(
        {"payload.py": payload.encode(), "trainer.json": signed(index)}
    )

    assert type(found) is error
    assert error is SaveError or "trusted=[" in str(found)
    assert not marker.exists()


@KINDS
def test_a_newer_version_and_foreign_files_are_refused(place):
    name = INDEXES[place.kind][0]

    newer = place.outcome({name: signed({**place.index(name), "version": 2})})

    assert "of version 2, but this daskdl reads up to 1" in str(newer)
    for content in (b"", b"{}", b"[]", b"null", b"\x80\x04.", b"PK\3\4"):
        assert isinstance(place.outcome({name: content}), SaveError), content


@pytest.mark.parametrize("kind", ["checkpoint"])
def test_parts_of_different_checkpoints_are_not_combined(place):
    index = place.index("replica-1.json")
    index["content"]["stamp"][2] += 1

    found = place.outcome({"replica-1.json": signed(index)})

    assert "there is no checkpoint in" in str(found)


def test_the_watch_records_actions():
    WATCH.watching = threading.get_ident()
    pickle.loads(pickle.dumps(Path()))
    WATCH.watching = None

    assert ("pickle.find_class", ("pathlib", "PosixPath")) in WATCH.seen
    WATCH.seen.clear()
