import itertools
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from daskdl.data.storage import Store
from daskdl.data.validate import KINDS, Offender, Report, validate
from daskdl.errors import DataError, OptionError
from tests.support.sources import Filed, Parts

NONE = dict.fromkeys(KINDS, 0)
GOOD = np.zeros((3, 2)), np.array([0, 1, 2])


def wrong(*rows):
    x = np.zeros((3, 2))
    x[list(rows), 1] = np.nan
    return x, np.array([0, 1, 2])


def test_sound_data_are_counted():
    report = validate(
        Parts(GOOD, GOOD), client=False, shapes=(2,), dtypes="float64", labels=3
    )

    assert report == Report(2, None, 6, NONE)
    assert report.ok


def test_labels_that_a_dataset_has_not_are_counted():
    dataset = TensorDataset(torch.zeros(3, 2))

    found = [validate(dataset, labels=n, client=False).counts for n in (None, 2)]

    assert [counts["missing label"] for counts in found] == [0, 3]


def test_all_that_is_wrong_is_counted_and_listed_by_part():
    source = Parts(wrong(2, 0), GOOD, DataError("torn"), wrong(1))

    report = validate(source, client=False, labels=2)

    assert (report.parts, report.rows) == (4, 9)
    assert report.counts == {
        **NONE,
        "unreadable": 1,
        "non-finite": 3,
        "invalid label": 3,
    }
    assert [(one.part, one.row, one.kind) for one in report.offenders] == [
        ("box 0", 0, "non-finite"),
        ("box 0", 2, "invalid label"),
        ("box 0", 2, "non-finite"),
        ("box 1", 2, "invalid label"),
        ("box 2", None, "unreadable"),
        ("box 3", 1, "non-finite"),
        ("box 3", 2, "invalid label"),
    ]
    assert not report.ok


def test_the_order_in_which_parts_come_makes_no_difference(monkeypatch):
    source = Parts(wrong(0), GOOD, wrong(1, 2), DataError("torn"))
    reports = []

    for order in itertools.permutations(range(4)):

        def each(source, function, client, order=order):
            for part in order:
                yield part, function(source, part)

        monkeypatch.setattr(sys.modules["daskdl.data.validate"], "map_parts", each)
        monkeypatch.setattr(sys.modules["daskdl.data.validate"], "SHOWN", 3)
        reports.append(validate(source, client=False))

    assert all(report == reports[0] for report in reports)
    assert [one.part for one in reports[0].offenders] == ["box 0", "box 2", "box 2"]


def test_beyond_a_hundred_offenders_the_counts_are_exact():
    parts = [(np.full((60, 1), np.nan), None)] * 3

    report = validate(Parts(*parts), client=False)

    assert report.counts["non-finite"] == 180
    assert [one.row for one in report.offenders] == [*range(60), *range(40)]


def test_expectations_that_cannot_be_are_refused_before_anything_is_loaded():
    with pytest.raises(OptionError, match="labels must be"):
        validate(Parts(AssertionError()), labels=0, client=False)


@pytest.fixture
def folder():
    store = Store("memory://daskdl-validation")
    for name, content in {"a": b"1", "b": b"nan", "c": b"torn"}.items():
        store.write(f"data/{name}", content)
    yield store
    store.delete_all()


def filed(folder):
    a, b, c, d = (folder.url_of(f"data/{name}") for name in "abcd")
    return Filed([c], [a, b], [d])


def test_nothing_is_moved_unless_asked_for(folder):
    before = folder.names()

    report = validate(filed(folder), client=False)

    assert folder.names() == before
    assert report.moved == ()
    assert report.files == 4
    assert report.counts == {**NONE, "missing": 1, "unreadable": 1, "non-finite": 1}


def test_files_with_something_wrong_go_to_quarantine_and_no_others(folder):
    to = folder.url_of("bad")

    report = validate(filed(folder), client=False, quarantine=to)

    assert folder.names() == ["bad/b", "bad/c", "data/a"]
    assert [(move.url, move.to) for move in report.moved] == [
        (folder.url_of("data/c"), f"{to}/c"),
        (folder.url_of("data/b"), f"{to}/b"),
    ]
    assert report.offenders[0] == Offender(
        folder.url_of("data/c"),
        None,
        "unreadable",
        "ValueError: could not convert string to float: b'torn'",
    )


def test_beyond_a_hundred_offenders_all_files_are_moved(folder):
    urls = [folder.url_of(f"data/many/{i:03}") for i in range(120)]
    for i in range(120):
        folder.write(f"data/many/{i:03}", b"nan")

    report = validate(Filed(urls), client=False, quarantine=folder.url_of("bad"))

    assert len(report.offenders) == 100
    assert len(report.moved) == len(folder.names("bad/**")) == 120


def test_quarantine_is_refused_before_anything_is_loaded():
    with pytest.raises(OptionError, match="quarantine is for data that are files"):
        validate(Parts(AssertionError()), client=False, quarantine="memory://x")
