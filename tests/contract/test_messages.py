import re

import pytest

from daskdl.channel.protocol import MESSAGE_BYTES, Answer, Message, MessageKind

UPDATE = ("update", 1, 2, 3, 4, b"abcd")


@pytest.mark.parametrize("as_sent", [tuple, list])
def test_an_item_comes_back_as_it_was_sent(as_sent):
    item = Message.from_wire(as_sent(UPDATE))

    assert item == Message("update", 1, 2, 3, 4, b"abcd")
    assert type(item.kind) is str


@pytest.mark.parametrize("kind", MessageKind)
def test_every_kind_of_item_can_be_read(kind):
    payloads = {MessageKind.PROGRESS: 5, MessageKind.ROUTES: (3, ((0, "tcp://a"),))}
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
        (("routes", 0, 0, 0, 0), "routes need members, got None"),
        (("routes", 0, 0, 0, 0, (3, 4)), "routes need members, got (3, 4)"),
        (("routes", 0, 0, 0, 0, (3, (("0", "a"),))), "routes need members, got (3"),
    ],
)
def test_fields_that_are_not_those_of_an_item_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Message.from_wire(fields)


@pytest.mark.parametrize("fields", [(), UPDATE[:4], (*UPDATE, 7, 8), None, 5])
def test_another_number_of_fields_is_refused(fields):
    with pytest.raises(TypeError):
        Message.from_wire(fields)


def test_an_item_weighs_its_payload_and_what_is_around_it():
    assert Message.from_wire(UPDATE).weight() == 4 + MESSAGE_BYTES


def test_kinds_and_answers_are_plain_text_on_the_wire():
    assert [kind.value for kind in MessageKind] == [
        "update",
        "progress",
        "joined",
        "routes",
        "lost",
        "stop",
    ]
    assert [answer.value for answer in Answer] == [
        "ok",
        "stopped",
        "unknown",
        "refused",
    ]
