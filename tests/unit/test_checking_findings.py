import sys
import zipfile
import zlib

import numpy as np
import pytest

from daskdl.data.storage import Store
from daskdl.data.validate import Expectations, Offender, expectations_of, findings_of
from daskdl.errors import DataError, OptionError
from tests.support.sources import Filed, Parts, Streamed

NONE = Expectations()
GOOD = np.zeros((3, 1)), np.arange(3)
BAD = np.array([[0.0], [np.nan], [0.0]]), np.arange(3)


def missing():
    error = DataError("cannot read s3://x: there is no such file")
    error.__cause__ = FileNotFoundError()
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (missing(), "missing", "cannot read s3://x: there is no such file"),
        (
            FileNotFoundError(2, "No", "a"),
            "missing",
            "FileNotFoundError: [Errno 2] No: ",
        ),
        (DataError("torn"), "unreadable", "torn"),
        (PermissionError("no"), "unreadable", "PermissionError: no"),
        (KeyError("label"), "unreadable", "KeyError: 'label'"),
        (EOFError(), "unreadable", "EOFError"),
        (zlib.error("torn"), "unreadable", "error: torn"),
        (zipfile.BadZipFile("torn"), "unreadable", "BadZipFile: torn"),
    ],
    ids=repr,
)
def test_a_part_that_cannot_be_read_is_an_offender(error, kind, message):
    found = findings_of(Parts(GOOD, error), 1, NONE)

    assert found.rows == 0
    assert found.counts == {kind: 1}
    (offender,) = found.offenders
    assert offender[:3] == ("box 1", None, kind)
    assert offender.message.startswith(message)


@pytest.mark.parametrize(
    "error",
    [OptionError("pip install pillow"), ImportError("no such module")],
    ids=repr,
)
def test_what_says_nothing_about_the_data_comes_out(error):
    with pytest.raises(type(error), match=str(error)):
        findings_of(Parts(error), 0, NONE)


def test_a_sound_part_has_rows_and_nothing_else():
    found = findings_of(Parts(GOOD), 0, NONE)

    assert (found.rows, found.files) == (3, 0)
    assert found.counts == {}
    assert found.offenders == found.wrong_files == []


def test_offenders_are_sorted_by_row():
    x = np.array([[np.inf], [0.0], [np.nan]])
    y = np.array([0.0, np.nan, 9.0])

    found = findings_of(Parts((x, y)), 0, expectations_of((2,), None, 3))

    assert [(one.row, one.kind) for one in found.offenders] == [
        (None, "wrong shape"),
        (0, "non-finite"),
        (1, "missing label"),
        (2, "invalid label"),
        (2, "non-finite"),
    ]


def test_rows_of_a_stream_are_numbered_through_and_its_shape_counts_once():
    x, y = np.zeros((7, 1)), np.arange(7)
    x[5] = np.nan

    found = findings_of(Streamed((x, y)), 0, expectations_of((2,), None, 7))

    assert found.rows == 7
    assert found.counts == {"wrong shape": 1, "non-finite": 1}
    assert [(one.row, one.kind) for one in found.offenders] == [
        (None, "wrong shape"),
        (5, "non-finite"),
    ]


def test_labels_missing_from_a_stream_count_for_every_row():
    found = findings_of(
        Streamed((np.zeros((5, 1)), None)), 0, expectations_of(None, None, 7)
    )

    assert found.counts == {"missing label": 5}
    assert len(found.offenders) == 1


class Breaking(Streamed):
    def stream(self, part, rows):
        yield from super().stream(part, rows)
        raise OSError("torn")


def test_what_came_before_a_stream_broke_counts():
    found = findings_of(Breaking(BAD), 0, NONE)

    assert found.rows == 3
    assert found.counts == {"non-finite": 1, "unreadable": 1}


def test_a_hundred_offenders_are_kept_of_a_stream_and_all_are_counted():
    x = np.full((250, 1), np.nan)

    found = findings_of(Streamed((x, None), step=7), 0, NONE)

    assert found.counts == {"non-finite": 250}
    assert [one.row for one in found.offenders] == list(range(100))


@pytest.fixture
def numbers():
    store = Store("memory://daskdl-findings")
    store.write("1", b"1")
    store.write("2", b"nan")
    store.write("3", b"three")
    yield [store.url_of(name) for name in "1234"]
    store.delete_all()


def test_each_of_several_files_is_named(numbers):
    source = Filed(numbers)

    found = findings_of(source, 0, NONE)

    assert (found.rows, found.files) == (2, 4)
    assert source.loaded == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [one[:3] for one in found.offenders] == [
        (numbers[1], 0, "non-finite"),
        (numbers[2], None, "unreadable"),
        (numbers[3], None, "missing"),
    ]


def test_offenders_are_bounded_over_all_files_of_a_part(numbers, monkeypatch):
    monkeypatch.setattr(sys.modules["daskdl.data.validate"], "SHOWN", 2)

    found = findings_of(Filed(numbers), 0, NONE)

    assert found.counts.total() == 3
    assert [one.part for one in found.offenders] == numbers[1:3]


def test_files_that_are_wrong_and_there_are_those_to_be_moved(numbers):
    found = findings_of(Filed(numbers), 0, NONE)

    assert found.wrong_files == [1, 2]


def test_one_file_is_loaded_as_its_part_and_named(numbers):
    found = findings_of(Filed([numbers[1]]), 0, NONE)

    assert found.offenders == [Offender(numbers[1], 0, "non-finite", "x is nan")]
    assert found.wrong_files == [0]
