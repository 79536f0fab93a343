"""When a fit says that its threshold was too small."""

import logging

import pytest

from daskdl.training.fit import hint_at_small_threshold

LAST = {"density": 0.9, "threshold": 3e-4, "clipped": 12.0}


@pytest.mark.parametrize(
    "other",
    [{"density": 0.02}, {"clipped": 0.0}, {"density": 1.0, "clipped": 0.0}],
    ids=["sparse", "nothing was dropped", "sent whole"],
)
def test_nothing_is_said_where_nothing_is_wrong(other, caplog):
    assert not hint_at_small_threshold({**LAST, **other})
    assert caplog.records == []


def test_what_was_sent_and_dropped_is_said_and_what_to_do(caplog):
    with caplog.at_level(logging.WARNING):
        assert hint_at_small_threshold(LAST)

    (record,) = caplog.records
    said = record.getMessage()
    assert "90 % of all entries were sent, in quanta of 3.0e-04" in said
    assert "1.2e+01 was dropped" in said
    assert "AdaptiveThreshold(initial=1e-2)" in said
