"""What has to be known of data before anybody trains on them."""

import logging

import numpy as np
import pytest

from daskdl.data.inputs import infer_metadata
from daskdl.data.source import Facts
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, OptionError
from tests.support.sources import Parts, Streamed

X = np.arange(12.0).reshape(6, 2)
BAD = DataError("cannot read it")
TORN = EOFError("torn")


class Known(Parts):
    """Parts that take what was found."""

    def known(self, facts):
        whole = type(self)(*self.pairs)
        whole.facts = facts
        whole.lengths = [fact.rows for fact in facts]
        whole.first = next(fact.first for fact in facts if fact.rows)
        return whole


def test_lengths_and_the_first_rows_are_found():
    source = Known((X[:0], None), (X[:4], None), (X[4:], None))

    whole = infer_metadata(source, False)

    assert whole.lengths == [0, 4, 2]
    assert whole.first[0].tolist() == X[:2].tolist()


@pytest.mark.parametrize("kind", [InMemory, Streamed], ids=["in memory", "sequential"])
def test_what_is_known_is_not_looked_at(kind, caplog):
    if kind is InMemory:
        source = InMemory(X, None, batch_size=2)
    else:
        source = Streamed((X, None))
        source.first = X[:1], None

    with caplog.at_level(logging.INFO, logger="daskdl.data.inputs"):
        assert infer_metadata(source, False) is source

    assert caplog.messages == []


def test_the_log_says_that_it_takes_a_pass_and_what_came_out(caplog):
    with caplog.at_level(logging.INFO, logger="daskdl.data.inputs"):
        infer_metadata(Known((X, None), (X[:1], None)), False)

    assert caplog.messages == [
        "the rows of 2 parts are counted, once",
        "there are 7 rows in 2 parts",
    ]


@pytest.mark.parametrize(
    "error", [BAD, KeyError("mine"), OSError("gone"), TORN], ids=repr
)
def test_a_part_that_cannot_be_read_is_an_error(error):
    with pytest.raises(type(error)) as caught:
        infer_metadata(Known((X, None), error), False)

    assert caught.value is error


@pytest.mark.parametrize(
    "error", [BAD, KeyError("mine"), OSError("gone"), TORN], ids=repr
)
def test_it_is_left_out_if_it_may_be_and_the_log_says_which(error, caplog):
    source = Known(error, (X, None), error)

    whole = infer_metadata(source, False, skips=True)

    assert whole.lengths == [0, 6, 0]
    assert whole.first[0].tolist() == X[:2].tolist()
    assert caplog.messages == [
        f"box 0 is left out: {error}",
        f"box 2 is left out: {error}",
        "2 parts cannot be read and are left out: [0, 2]",
    ]


def test_what_else_is_to_be_changed_is_said_and_not_left_out():
    source = Known((X, None), OptionError("pillow is missing"))

    with pytest.raises(OptionError, match="pillow is missing"):
        infer_metadata(source, False, skips=True)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([(X[:0], None)] * 2, ""),
        ([BAD, (X[:0], None)], ", of which 1 cannot be read"),
    ],
    ids=["empty", "unreadable"],
)
def test_data_without_any_row_are_refused(pairs, why):
    message = f"^X must not be empty, got no rows in 2 parts{why}$"

    with pytest.raises(DataError, match=message):
        infer_metadata(Known(*pairs), False, skips=True)


def test_what_a_source_finds_more_cheaply_is_used():
    class Cheap(Known):
        def look(self, part):
            return Facts(5, (X[:1], None))

        def load(self, part):
            raise AssertionError

    assert infer_metadata(Cheap(1, 2), False).lengths == [5, 5]
