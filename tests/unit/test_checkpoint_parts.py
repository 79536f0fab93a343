"""One part of a checkpoint, in a folder."""

import math

import pytest
import torch

from daskdl.errors import OptionError, SaveError
from daskdl.saving.checkpoints import COMMON, Part, Stamp, of_replica
from tests.support.fitted_trainers import signed
from tests.support.written import damaged, write_part

STAMP = Stamp("origin", "run", 7)
SAID = {"members": [0, 1], "loss": math.inf, "kind": ("a", None)}


@pytest.fixture
def part(store):
    return Part(store, COMMON)


def content(part):
    """What its index holds, as JSON."""
    import json

    return json.loads(part.store.read(part.index))


def tensor_file(part):
    (name,) = part.store.names("*.safetensors")
    return name


def test_what_was_written_is_read(part):
    state = {"x": torch.tensor([1.5, 2.0]).half(), "more": [{"y": torch.arange(3)}, 1]}

    write_part(part, STAMP, SAID, state)
    stamp, found = part.read()

    assert stamp == STAMP
    assert {name: found[name] for name in SAID} == SAID
    assert torch.equal(found["x"], state["x"])
    assert found["x"].dtype is torch.float16
    assert torch.equal(found["more"][0]["y"], torch.arange(3))
    assert found["more"][1] == 1


def test_what_it_says_is_read_without_its_tensors(part):
    write_part(part, STAMP, SAID, {"x": torch.zeros(2)})
    part.store.delete([tensor_file(part)])

    assert part.header() == (STAMP, SAID)
    with pytest.raises(SaveError, match="no such file"):
        part.read()


def test_one_without_tensors_is_one_file(part):
    write_part(part, STAMP, SAID, {"steps": 3})

    assert part.store.names() == ["common.json"]
    assert part.read()[1]["steps"] == 3


def test_parts_do_not_touch_each_other(part):
    other = Part(part.store, of_replica(1))
    write_part(part, STAMP, SAID, {"x": torch.zeros(2)})

    write_part(other, STAMP, {}, {"x": torch.ones(2)})
    write_part(other, STAMP, {}, {"x": torch.full((2,), 2.0)})

    assert part.read()[1]["x"].tolist() == [0.0, 0.0]
    assert other.read()[1]["x"].tolist() == [2.0, 2.0]
    assert len(part.store.names()) == 4


def test_replica_1_is_not_replica_10(part):
    first, tenth = (Part(part.store, of_replica(n)) for n in (1, 10))
    write_part(tenth, STAMP, {}, {"x": torch.ones(2)})

    write_part(first, STAMP, {}, {"x": torch.zeros(2)})

    assert tenth.read()[1]["x"].tolist() == [1.0, 1.0]


def test_what_cannot_be_written_without_code_is_named(part):
    with pytest.raises(OptionError, match=r"state\.optimizer\.hook .* without code"):
        write_part(part, STAMP, SAID, {"optimizer": {"hook": object()}})

    assert part.store.names() == []


def test_one_that_is_not_there_says_where(part):
    with pytest.raises(SaveError, match=r"cannot read .*common\.json.*no such file"):
        part.header()


@pytest.mark.parametrize("read", [Part.header, Part.read])
def test_a_damaged_index_is_refused(part, read):
    write_part(part, STAMP, SAID, {"x": torch.zeros(2)})
    damaged(part.store, part.index)

    with pytest.raises(SaveError, match="cannot read "):
        read(part)


def test_damaged_tensors_are_refused(part):
    write_part(part, STAMP, SAID, {"x": torch.zeros(2)})
    damaged(part.store, tensor_file(part))

    with pytest.raises(SaveError, match="is damaged: its checksum is wrong"):
        part.read()


def test_tensors_that_were_cut_off_are_refused(part):
    write_part(part, STAMP, SAID, {"x": torch.zeros(2)})
    name = tensor_file(part)
    part.store.write(name, part.store.read(name)[:-4])

    with pytest.raises(SaveError, match=r"has \d+ bytes instead of \d+"):
        part.read()


def test_one_of_a_newer_release_is_refused(part):
    write_part(part, STAMP, SAID, {})
    part.store.write(part.index, signed({**content(part), "version": 2}))

    with pytest.raises(SaveError, match="of version 2, and this daskdl reads up to 1"):
        part.header()


def test_a_save_of_a_trainer_is_none(part):
    write_part(part, STAMP, SAID, {})
    part.store.write(part.index, signed({**content(part), "format": "daskdl trainer"}))

    with pytest.raises(SaveError, match="not of the format 'daskdl checkpoint'"):
        part.read()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"stamp": ["a", "b"]},
        {"stamp": ["a", "b", "7"]},
        {"stamp": "abc"},
        {"stamp": ["a", "b", 7], "header": None},
        {"stamp": ["a", "b", 7], "header": {"tuple": []}},
        {"stamp": ["a", "b", 7], "header": {"dict": []}, "state": {"dict": [[1]]}},
        {"stamp": ["a", "b", 7], "header": {"dict": []}, "state": {"tensor": "x"}},
        {"stamp": ["a", "b", 7], "header": {"dict": []}, "state": [1]},
    ],
    ids=repr,
)
def test_contents_that_are_no_part_are_refused(part, wrong):
    write_part(part, STAMP, SAID, {})
    part.store.write(part.index, signed({**content(part), "content": wrong}))

    with pytest.raises(SaveError, match="is damaged"):
        part.read()
