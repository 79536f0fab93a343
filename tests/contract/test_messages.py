"""Messages, payloads and blobs, as they travel."""

import os
import re

import msgpack
import numpy as np
import pytest
from distributed.protocol import Serialize, Serialized

from daskdl.channel import protocol
from daskdl.channel.protocol import (
    MAX_TEXT,
    BlobParts,
    Failure,
    Message,
    MessageKind,
    check,
    join,
    nbytes_of,
    unwrap_arrays,
    wrap_arrays,
)
from daskdl.training.replica import failure_of

UPDATE = ("update", 1, 2, 3, 4, b"abcd")


@pytest.mark.parametrize("as_sent", [tuple, list])
def test_a_message_arrives_as_it_was_sent(as_sent):
    message = Message.from_wire(as_sent(UPDATE))

    assert message == Message("update", 1, 2, 3, 4, b"abcd")
    assert message.kind is MessageKind.UPDATE


@pytest.mark.parametrize("kind", MessageKind)
def test_every_kind_of_message_can_be_read(kind):
    payloads = {
        MessageKind.PROGRESS: 5,
        MessageKind.MEMBERS: (3, ((0, "tcp://a"),)),
        MessageKind.MEMBER: "tcp://a",
    }
    payload = payloads.get(kind)

    assert Message.from_wire((str(kind), 0, 0, 0, 0, payload)).kind is kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("nonsense", *UPDATE[1:]), "Invalid enum value 'nonsense' - at `$[0]`"),
        (("update", -1, 2, 3, 4), "-1, 2, 3, 4): Expected `int` >= 0 - at `$[1]`"),
        (("update", True, 2, 3, 4), "Expected `int`, got `bool` - at `$[1]`"),
        (("update", 1, 2**63, 3, 4), f"Expected `int` <= {2**63 - 1} - at `$[2]`"),
        (("update", 1, 2.5, 3, 4), "Expected `int`, got `float` - at `$[2]`"),
        (("update", 1, 2, 3, None), "Expected `int`, got `null` - at `$[4]`"),
        (("update", 1, 2, 3, 4, None, -1), "Expected `int` >= 0 - at `$[6]`"),
        (("progress", 1, 0, 3, 0, "x"), "invalid 'x': Expected `int`, got `str`"),
        (("members", 0, 0, 0, 0), "invalid None: Expected `array`, got `null`"),
        (("members", 0, 0, 0, 0, (3, (("0", "a"),))), "got `str` - at `$[1][0][0]`"),
        (("member", 0, 1, 0, 0, 5), "invalid 5: Expected `str | null`, got `int`"),
        ((), "Expected `array` of length 5 to 7, got 0"),
        (UPDATE[:4], "Expected `array` of length 5 to 7, got 4"),
        ((*UPDATE, 7, 8), "Expected `array` of length 5 to 7, got 8"),
        (None, "Expected `array`, got `null`"),
        (5, "Expected `array`, got `int`"),
    ],
)
def test_invalid_fields_are_refused(fields, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Message.from_wire(fields)


ARRAYS = {
    "odd": np.arange(5, dtype=np.uint8),
    "wide": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.empty((0, 4), np.float32),
    "one": np.array(7),
    "strided": np.arange(10, dtype=np.int32)[::3],
}


def test_arrays_in_a_payload_are_wrapped_and_other_values_are_plain():
    payload = {**ARRAYS, "step": 3, "nested": {"a": 1}}

    wrapped = wrap_arrays(payload)

    assert all(isinstance(wrapped[name], Serialized) for name in ARRAYS)
    assert (wrapped["step"], wrapped["nested"]) == (3, {"a": 1})
    np.testing.assert_equal(unwrap_arrays(wrapped), payload)


@pytest.mark.parametrize("part_bytes", [1, 3, 8, 64, 10**6])
def test_blobs_are_rebuilt_from_parts_of_bounded_size(part_bytes, monkeypatch):
    monkeypatch.setattr(protocol, "PART_BYTES", part_bytes)
    blob = BlobParts(ARRAYS)

    parts = [blob.part(number) for number in range(blob.parts)]

    rebuilt = join(blob.forms, parts)
    np.testing.assert_equal(rebuilt, ARRAYS)
    assert [a.dtype for a in rebuilt.values()] == [a.dtype for a in ARRAYS.values()]
    sizes = [part.nbytes for part in parts]
    assert sum(sizes) == blob.nbytes == 5 + 48 + 0 + 8 + 16
    assert all(size == part_bytes for size in sizes[:-1])
    assert sizes[-1] <= part_bytes


def test_the_size_of_a_payload_counts_its_arrays_packed_or_not():
    array = np.zeros(1000)
    payload = {"residual": array, "more": [[array], b"x" * 500]}

    for form in (payload, wrap_arrays(payload), Serialize(payload)):
        assert 16_500 <= nbytes_of(form) < 17_000


FAILURE = failure_of(RuntimeError("boom"), step=3)


def test_a_failure_is_text():
    check({"failure": FAILURE}, {"failure": Failure})

    assert FAILURE["type"] == "ReplicaError"
    assert FAILURE["error"] == "builtins.RuntimeError"
    assert FAILURE["summary"] == "RuntimeError: boom"


@pytest.mark.parametrize(
    "changed",
    [
        {"pickled": b"opened by nobody"},
        {"type": "SystemExit"},
        {"traceback": "x" * (MAX_TEXT + 1)},
        {"notes": ["x" * (MAX_TEXT + 1)]},
        {"summary": b"bytes"},
    ],
)
def test_a_failure_that_is_more_than_bounded_text_is_refused(changed):
    with pytest.raises(TypeError, match="invalid failure "):
        check({"failure": {**FAILURE, **changed}}, {"failure": Failure})


def test_a_long_failure_is_shortened():
    error = RuntimeError("x" * 2 * MAX_TEXT)
    error.add_note("y" * 2 * MAX_TEXT)

    check({"failure": failure_of(error, step=3)}, {"failure": Failure})


class Unprintable(Exception):
    def __str__(self):
        return self.text  # never set


def with_notes(notes):
    error = RuntimeError("boom")
    error.__notes__ = notes
    return error


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (Unprintable("boom"), "Unprintable (its __str__ raises AttributeError)"),
        (with_notes(5), "RuntimeError: boom"),
        (with_notes([Unprintable(), "a note"]), "RuntimeError: boom"),
    ],
)
def test_an_exception_without_a_readable_text_is_reported(error, summary):
    failure = failure_of(error, step=3)

    check({"failure": failure}, {"failure": Failure})
    assert failure["summary"] == summary
    assert type(error).__name__ in failure["traceback"]


def test_a_failure_that_names_a_file_of_any_bytes_can_be_sent():
    error = ValueError(os.fsdecode(b"cannot read bad\xff.npy"))
    error.add_note(str(error))

    failure = failure_of(error, step=3)

    assert msgpack.loads(msgpack.dumps(failure), use_list=False) == failure
    assert failure["summary"] == r"ValueError: cannot read bad\udcff.npy"
