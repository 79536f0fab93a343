"""Messages, payloads and blobs, as they travel."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import dask.config
import numpy as np
import pytest
from distributed.protocol import Serialized, dumps, to_serialize

from daskdl.channel import protocol
from daskdl.channel.protocol import (
    Answer,
    BlobParts,
    FinishedLease,
    Message,
    MessageKind,
    Natural,
    PeerProgress,
    join,
    message_validator,
    unwrap,
    unwrap_arrays,
    validator,
    wrap,
    wrap_arrays,
)
from tests.support.problems import shown

UPDATE = ("update", 1, 2, 3, 4, b"abcd")


@pytest.mark.parametrize("as_sent", [tuple, list])
def test_an_item_comes_back_as_it_was_sent(as_sent):
    item = Message.from_wire(as_sent(UPDATE))

    assert item == Message("update", 1, 2, 3, 4, b"abcd")
    assert type(item.kind) is str


@pytest.mark.parametrize("kind", MessageKind)
def test_every_kind_of_item_can_be_read(kind):
    payloads = {MessageKind.PROGRESS: 5, MessageKind.MEMBERS: (3, ((0, "tcp://a"),))}
    payload = payloads.get(kind)

    assert Message.from_wire((str(kind), 0, 0, 0, 0, payload)).kind == kind.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("nonsense", *UPDATE[1:]), "'nonsense' is not a valid MessageKind"),
        ((None, *UPDATE[1:]), "None is not a valid MessageKind"),
        (("update", -1, 2, 3, 4), "whole numbers >= 0, got (-1, 2, 3, 4, 0)"),
        (("update", 1, 2.5, 3, 4), "whole numbers >= 0, got (1, 2.5, 3, 4, 0)"),
        (("update", 1, 2, "3", 4), "whole numbers >= 0, got (1, 2, '3', 4, 0)"),
        (("update", 1, 2, 3, None), "whole numbers >= 0, got (1, 2, 3, None, 0)"),
        (("update", 1, 2, 3, 4, None, -1), "numbers >= 0, got (1, 2, 3, 4, -1)"),
        (("progress", 1, 0, 3, 0), "progress needs an interval, got None"),
        (("progress", 1, 0, 3, 0, "x"), "progress needs an interval, got 'x'"),
        (("members", 0, 0, 0, 0), "it needs members, got None"),
        (("members", 0, 0, 0, 0, (3, 4)), "it needs members, got (3, 4)"),
        (("members", 0, 0, 0, 0, (3, (("0", "a"),))), "it needs members, got (3"),
    ],
)
def test_fields_that_are_not_those_of_an_item_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Message.from_wire(fields)


@pytest.mark.parametrize("fields", [(), UPDATE[:4], (*UPDATE, 7, 8), None, 5])
def test_another_number_of_fields_is_refused(fields):
    with pytest.raises(TypeError):
        Message.from_wire(fields)


def test_kinds_and_answers_are_plain_text_on_the_wire():
    assert [kind.value for kind in MessageKind] == [
        "update",
        "progress",
        "joined",
        "members",
        "failed",
        "stop",
    ]
    assert [answer.value for answer in Answer] == [
        "ok",
        "stopped",
        "unknown",
        "refused",
    ]


# ---- annotations

MATCHES = [
    (Natural, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None]),
    (float, [1, 0.5, math.nan], [True, "1", None]),
    (bool, [True], [1, None]),
    (str, ["a", ""], [b"a", 1, None]),
    (Natural | None, [None, 3], [-1, "x"]),
    (Sequence[str], [[], ["a"], ("a", "b")], ["a", [1], {"a": 1}, None]),
    (
        tuple[Natural, str],
        [[1, "a"], (1, "a")],
        [[1], [1, "a", 2], ["a", 1], "1a"],
    ),
    (Mapping[str, float], [{}, {"a": 1}], [{1: 1.0}, {"a": "b"}, [["a", 1]]]),
    (PeerProgress, [[0, 0, -1], PeerProgress()], [[0, 0], [0, 0, -2], [0, 0, None]]),
    (
        FinishedLease,
        [{"lease": 0, "examples": 1, "loss": 0.5}],
        [{}, {"lease": 0, "examples": 1}, {"lease": 0, "examples": 1, "loss": "x"}],
    ),
    (
        Sequence[tuple[Natural, Sequence[Natural]]],
        [[], [[0, [1, 2]], [1, []]]],
        [[[0]], [[0, [True]]], [[0, 1]]],
    ),
    (Any, [None, object()], []),
]


@pytest.mark.parametrize(("hint", "good", "bad"), MATCHES, ids=lambda x: shown(x)[:30])
def test_what_is_annotated_is_valid_and_nothing_else(hint, good, bad):
    valid = validator(hint)

    assert all(map(valid, good))
    assert not any(map(valid, bad))


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"step": 1, "names": ["a"]}, True),
        ({"step": 1}, True),
        ({"step": -1}, False),
        ({"step": 1, "names": "a"}, False),
        ({"step": 1, "colour": "red"}, False),
    ],
)
def test_each_field_of_a_message_is_as_annotated_or_missing(fields, valid):
    hints = {"step": Natural, "names": Sequence[str]}

    assert message_validator(hints)(fields) == valid


# ---- payloads


WRAPPED = [
    np.arange(7, dtype=np.uint8),
    np.arange(6.0).reshape(2, 3),
    np.zeros(0, np.int64),
    np.arange(10, dtype=np.int32)[::2],
]


@pytest.mark.parametrize("array", WRAPPED, ids=lambda a: f"{a.dtype}{a.shape}")
def test_an_array_comes_back_as_it_was_wrapped(array):
    back = unwrap(wrap(array))

    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_wrapped_array_is_serialised_already():
    assert isinstance(wrap(WRAPPED[0]), Serialized)


def on_the_wire(payload):
    """Bytes that Dask would send, told to compress."""
    with dask.config.set({"distributed.comm.compression": "lz4"}):
        return sum(len(frame) for frame in dumps({"payload": payload}))


def test_dask_does_not_compress_what_is_wrapped():
    array = np.zeros(2**20, np.uint8)

    assert on_the_wire(to_serialize(array)) < array.nbytes / 10  # it does otherwise
    assert on_the_wire(wrap(array)) >= array.nbytes


@pytest.mark.parametrize("payload", [None, "text", 5, b"bytes"], ids=repr)
def test_other_payloads_stay_as_they_are(payload):
    assert unwrap(payload) is payload


def test_what_was_not_serialised_on_its_way_is_taken_out():
    assert unwrap(to_serialize(WRAPPED[0])) is WRAPPED[0]


def test_the_arrays_of_a_note_are_wrapped_and_the_rest_is_plain():
    note = {"counts": WRAPPED[0], "step": 3, "nested": {"a": 1}}

    wrapped = wrap_arrays(note)

    assert isinstance(wrapped["counts"], Serialized)
    assert (wrapped["step"], wrapped["nested"]) == (3, {"a": 1})
    back = unwrap_arrays(wrapped)
    assert back.keys() == note.keys()
    np.testing.assert_array_equal(back["counts"], WRAPPED[0])


@pytest.mark.parametrize("note", [None, "text", [1, 2]], ids=repr)
def test_a_note_that_is_no_mapping_travels_as_it_is(note):
    assert unwrap_arrays(wrap_arrays(note)) is note


# ---- blobs


ARRAYS = {
    "odd": np.arange(5, dtype=np.uint8),
    "wide": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.empty((0, 4), np.float32),
    "one": np.array(7),
    "strided": np.arange(10, dtype=np.int32)[::3],
}


@pytest.fixture(params=[1, 3, 8, 64, 10**6])
def part_bytes(request, monkeypatch):
    monkeypatch.setattr(protocol, "PART_BYTES", request.param)
    return request.param


def test_arrays_come_out_as_they_went_in(part_bytes):
    parcel = BlobParts(ARRAYS)

    parts = [parcel.part(number) for number in range(parcel.parts)]

    joined = join(parcel.forms, parts)
    assert joined.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert joined[name].dtype == array.dtype
        np.testing.assert_array_equal(joined[name], array)


def test_parts_are_of_bounded_size(part_bytes):
    parcel = BlobParts(ARRAYS)

    sizes = [parcel.part(number).nbytes for number in range(parcel.parts)]

    assert sum(sizes) == parcel.nbytes == 5 + 48 + 0 + 8 + 16
    assert all(size == part_bytes for size in sizes[:-1])
    assert sizes[-1] <= part_bytes


def test_a_part_of_one_array_is_not_copied():
    array = np.arange(8.0)

    assert np.shares_memory(BlobParts({"a": array}).part(0), array)


def test_nothing_is_a_parcel_too():
    parcel = BlobParts({})

    assert (parcel.parts, join(parcel.forms, [parcel.part(0)])) == (1, {})


def test_parts_that_do_not_go_with_the_forms_are_refused():
    parcel = BlobParts({"a": np.arange(4.0)})

    with pytest.raises(ValueError, match="need 32 bytes for 1 arrays, got 31"):
        join(parcel.forms, [parcel.part(0)[:31]])


@pytest.mark.parametrize("number", [-1, 1])
def test_a_part_that_does_not_exist_is_refused(number):
    with pytest.raises(ValueError, match=f"part must be in 0 .. 0, got {number}"):
        BlobParts({"a": np.arange(4.0)}).part(number)
