"""Whatever is done to the files of a checkpoint: an error of daskdl, or the same.

Nothing in them is executed, and nothing is written.
"""

import hashlib
import json
import pickle
import random
import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    Checkpoint,
    DaskDLError,
    EarlyStopping,
    GradientSharing,
    SaveError,
    Trainer,
)
from daskdl.saving.checkpoints import Series, complete_at
from daskdl.training.checkpointing import restored_state, resume_plan
from tests.support.saves import WRONG, Bomb, Watch, flipped, places, replaced, signed

FLIPS, CUTS, CHANGES, FITS = 30, 10, 200, 20  # for each file; in the JSON; of fits
PARTS = ["common", "replica-0", "replica-1"]
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
WATCH = Watch()


def trainer(*callbacks):
    return Trainer(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=GradientSharing(max_staleness=0, replicas_per_worker=2),
        client=False,
        progress=False,
        scheduler=lambda o: lr_scheduler.StepLR(o, 1),
        callbacks=[EarlyStopping("loss", patience=9), *callbacks],
    )


def fits(own, **options):
    return own.fit(X, Y, epochs=2, batch_size=4, **options)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The files of one in the middle of the second epoch, by name."""
    url = tmp_path_factory.mktemp("original")
    fits(trainer(Checkpoint(url, "2 steps", keep_last=None)))
    series = Series.at(url)
    [last] = [
        one
        for one in map(complete_at, map(series.folder, series.numbers()))
        if one.header["epoch"] == 1 and one.header["sync_point"] is not None
    ]
    return {name: last.store.read(name) for name in last.store.names()}


@pytest.fixture
def around(tmp_path, original):
    """What is there besides must be as it was, down to the bytes."""
    folder = tmp_path / "around" / "checkpoint-000001"
    folder.mkdir(parents=True)
    (tmp_path / "around" / "x").write_bytes(b"the user's own")
    yield folder
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    own = {str(path.relative_to(tmp_path)) for path in folder.iterdir()}
    assert written - own == {"around/x"}
    assert (tmp_path / "around" / "x").read_bytes() == b"the user's own"


def put(folder, files):
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def indexed(original, part):
    return json.loads(original[f"{part}.json"])


def tensors_of(original, part):
    (name,) = (n for n in original if n.startswith(f"{part}-") and "safe" in n)
    return name


def outcome(folder):
    """What all replicas read, or an error of ours; anything else is raised."""
    before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    WATCH.watching = threading.get_ident()
    try:
        plan = resume_plan(folder.parent, [])
        return [restored_state(plan, place, 2) for place in range(2)]
    except DaskDLError as error:
        return error
    finally:
        WATCH.watching = None
        assert WATCH.seen == []
        assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["index", "tensors"])
class TestDamage:
    def name(self, original, part, kind):
        return f"{part}.json" if kind == "index" else tensors_of(original, part)

    def test_any_flipped_bit_is_found(self, around, original, part, kind):
        name = self.name(original, part, kind)
        generator = random.Random(f"flips {part} {kind}")

        for _ in range(FLIPS):
            put(around, {**original, name: flipped(original[name], generator)})
            found = outcome(around)

            if not isinstance(found, SaveError):
                # 1e-05 and 1E-05 are the same number.
                index = json.loads((around / f"{part}.json").read_bytes())
                assert index == indexed(original, part)

    def test_any_truncated_file_is_found(self, around, original, part, kind):
        name = self.name(original, part, kind)
        generator = random.Random(f"cuts {part} {kind}")

        for _ in range(CUTS):
            length = generator.randrange(len(original[name]))
            put(around, {**original, name: original[name][:length]})

            assert isinstance(outcome(around), SaveError), length

    def test_one_that_is_missing_is_found(self, around, original, part, kind):
        name = self.name(original, part, kind)

        put(around, {n: c for n, c in original.items() if n != name})

        assert isinstance(outcome(around), SaveError)


def changed(original, generator):
    """The files with one value of one index replaced by a wrong one."""
    part = generator.choice(PARTS)
    index = indexed(original, part)
    inside = [path for path in places(index) if path and path[0] != "sha256"]
    wrong = replaced(index, generator.choice(inside), generator.choice(WRONG))
    return {**original, f"{part}.json": signed(wrong)}


def test_values_of_wrong_types_are_errors_of_ours_or_do_no_harm(around, original):
    generator = random.Random("types")

    for _ in range(CHANGES):
        put(around, changed(original, generator))

        outcome(around)  # raises what is not ours


def test_nor_do_they_in_a_fit(around, original):
    generator = random.Random("fits")
    ended = []

    for _ in range(FITS):
        put(around, changed(original, generator))
        try:
            ended.append(len(fits(trainer(), resume=around.parent)))
        except DaskDLError as error:
            ended.append(error)

    assert 2 in ended
    assert any(isinstance(end, DaskDLError) for end in ended)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_in_place_of_tensors_is_refused_and_not_run(
    around, original, tmp_path, part, kind
):
    marker, aside = tmp_path / "exploded", around / "bomb"
    bomb = pickle.dumps(Bomb(marker))
    if kind == "torch":
        torch.save(Bomb(marker), aside)
        bomb = aside.read_bytes()
    index, files = indexed(original, part), dict(original)
    digest = hashlib.sha256(bomb).hexdigest()
    name = f"{part}-{digest[:16]}.safetensors"
    del files[tensors_of(original, part)]
    index["files"][0] |= {"name": name, "nbytes": len(bomb), "sha256": digest}
    put(around, {**files, name: bomb, f"{part}.json": signed(index)})

    found = outcome(around)

    assert isinstance(found, SaveError)
    assert "no safetensors file" in str(found)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "..", "x\0y"])
def test_a_file_that_leads_out_of_the_folder_is_refused(around, original, name):
    index = indexed(original, "replica-1")
    own = (around.parent / "x").read_bytes()
    digest = hashlib.sha256(own).hexdigest()
    index["files"][0] |= {"name": name, "nbytes": len(own), "sha256": digest}
    put(around, {**original, "replica-1.json": signed(index)})

    found = outcome(around)

    assert isinstance(found, SaveError)
    assert "describes no file" in str(found)


@pytest.mark.parametrize("replica", ["../../x", "/etc/hostname", -1, 0.5, None])
def test_a_replica_that_leads_out_of_the_folder_is_refused(around, original, replica):
    index = indexed(original, "common")
    said = dict(index["content"]["header"]["dict"])
    said["members"] = [0, replica]
    index["content"]["header"]["dict"] = [[key, value] for key, value in said.items()]
    put(around, {**original, "common.json": signed(index)})

    found = outcome(around)

    assert isinstance(found, SaveError)
    assert "members must be Sequence[int >= 0]" in str(found)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\x80\x04."])
def test_a_foreign_file_is_refused(around, original, content):
    put(around, {**original, "common.json": content})

    assert isinstance(outcome(around), SaveError)


def test_a_part_of_another_checkpoint_is_not_taken(around, original):
    index = indexed(original, "replica-1")
    index["content"]["stamp"][2] += 1
    put(around, {**original, "replica-1.json": signed(index)})

    assert "there is no checkpoint in" in str(outcome(around))


def test_the_checkpoint_itself_is_read(around, original):
    put(around, original)

    first, second = outcome(around)

    assert first.common.keys() == second.common.keys()
    assert len(fits(trainer(), resume=around.parent)) == 2
