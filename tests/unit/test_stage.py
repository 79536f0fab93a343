"""How much there is to train on, and what the log says of it."""

import logging
from types import SimpleNamespace

import pytest

from daskdl.training.backend import sizes_of
from tests.support.part_sources import Parts

LOGGER = "daskdl.training.backend"


def options(step=4, batch=2):
    """What is asked of the options of a run."""
    sizes = {"train": step, "validation": batch}
    return SimpleNamespace(lease_rows=sizes.__getitem__)


def source(*lengths):
    made = Parts(*lengths)
    made.lengths = lengths
    return made


@pytest.mark.parametrize(
    ("lengths", "small", "large"),
    [
        ((100, 60, 3, 0, 12, 11), 2, 2),
        ((4, 20, 3), 1, 1),
        ((4, 4), 0, 0),
    ],
    ids=["uneven", "one larger", "even"],
)
def test_the_log_says_how_parts_are_leased(caplog, lengths, small, large):
    with caplog.at_level(logging.INFO, LOGGER):
        extent = sizes_of(options(), "train", source(*lengths), replicas=2)

    piece = extent.lease_rows
    least, most = min(lengths), max(lengths)
    assert extent.rows == lengths
    assert [record.getMessage() for record in caplog.records] == [
        f"the train data have {len(lengths)} parts of {least} to {most} rows and are "
        f"leased in pieces of {piece}: {small} smaller parts are put together, {large} "
        "larger ones are split"
    ]


def test_each_phase_has_pieces_of_its_own_size(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        train, validation = (
            sizes_of(options(step=6, batch=5), phase, source(7), replicas=3)
            for phase in ("train", "validation")
        )

    assert (train.lease_rows, validation.lease_rows) == (6, 5)
    assert "the train data have" in caplog.messages[0]
    assert "the validation data have" in caplog.messages[1]


def test_of_parts_whose_rows_are_not_known_nothing_is_said(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        extent = sizes_of(options(), "train", Parts(None, None, None), replicas=2)

    assert extent.rows == (-1, -1, -1)
    assert not caplog.records


def test_keys_of_parts_that_workers_hold_are_passed_on():
    extent = sizes_of(options(), "train", source(8, 8), 2, keys=["", "key"])

    assert extent.keys == ("", "key")
