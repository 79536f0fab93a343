"""Which checkpoints are kept."""

import math

import pytest

from daskdl.checkpoints import Entry, Retention


def entries(*scores):
    """In the order in which they were written; numbers are not counts."""
    return [Entry(10 + n, n, score) for n, score in enumerate(scores, 1)]


NAN = math.nan
FIVE = entries(3.0, 1.0, 2.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), {11, 12, 13, 14, 15}),
        (Retention(last=2), {14, 15}),
        (Retention(last=1), {15}),
        (Retention(last=9), {11, 12, 13, 14, 15}),
        (Retention(last=1, every=2), {12, 14, 15}),
        (Retention(last=1, every=5), {15}),
        (Retention(last=1, best=True), {12, 15}),  # the first of equals
        (Retention(last=1, best=True, largest_is_best=True), {15}),
        (Retention(last=1, every=3, best=True), {12, 13, 15}),
    ],
    ids=repr,
)
def test_what_is_kept(retention, kept):
    assert retention.kept(FIVE) == kept


def test_the_largest_may_be_the_best():
    retention = Retention(last=1, best=True, largest_is_best=True)

    assert retention.kept(entries(1.0, 3.0, 3.0, 2.0)) == {12, 14}


@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_what_has_no_score_is_never_the_best(missing):
    retention = Retention(last=1, best=True)

    assert retention.kept(entries(missing, 3.0, 2.0, 5.0)) == {13, 14}
    assert retention.kept(entries(missing, missing)) == {12}


def test_of_none_none_is_kept():
    assert Retention(last=1, every=1, best=True).kept([]) == set()
