"""Messages, payloads and blobs, as they travel."""

import re

import numpy as np
import pytest
from distributed.protocol import Serialized

from daskdl.channel import protocol
from daskdl.channel.protocol import (
    BlobParts,
    Message,
    MessageKind,
    join,
    unwrap_arrays,
    wrap_arrays,
)

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


# ---- annotations


# ---- payloads


WRAPPED = [
    np.arange(7, dtype=np.uint8),
    np.arange(6.0).reshape(2, 3),
    np.zeros(0, np.int64),
    np.arange(10, dtype=np.int32)[::2],
]


def test_the_arrays_of_a_note_are_wrapped_and_the_rest_is_plain():
    note = {"counts": WRAPPED[0], "step": 3, "nested": {"a": 1}}

    wrapped = wrap_arrays(note)

    assert isinstance(wrapped["counts"], Serialized)
    assert (wrapped["step"], wrapped["nested"]) == (3, {"a": 1})
    back = unwrap_arrays(wrapped)
    assert back.keys() == note.keys()
    np.testing.assert_array_equal(back["counts"], WRAPPED[0])


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
