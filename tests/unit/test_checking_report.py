from daskdl.data.validate import Moved, Offender, Report

COUNTS = {"missing": 0, "unreadable": 1, "non-finite": 120}
OFFENDERS = (
    Offender("s3://x/a", None, "unreadable", "torn"),
    Offender("s3://x/bcd", 7, "non-finite", "x is nan"),
)


def test_a_report_is_a_table():
    report = Report(
        3,
        12,
        1,
        COUNTS,
        OFFENDERS,
        (Moved("s3://x/a", "s3://q/a"), Moved("s3://x/bcd", None, "no permission")),
    )

    assert str(report).splitlines() == [
        "12 files in 3 parts, 1 row",
        "missing     0 files",
        "unreadable  1 file",
        "non-finite  120 rows",
        "",
        "part        row  kind        message",
        "s3://x/a         unreadable  torn",
        "s3://x/bcd  7    non-finite  x is nan",
        "... and more, 2 shown",
        "",
        "1 file moved to quarantine",
        "not moved: s3://x/bcd: no permission",
    ]


def test_a_report_without_offenders_is_short():
    report = Report(1, None, 5, {"missing": 0})

    assert report.ok
    assert report.summary() == "1 part, 5 rows\nnothing is wrong"


def test_a_report_with_offenders_is_not_ok():
    assert not Report(3, 12, 1, COUNTS, OFFENDERS).ok


def test_all_offenders_shown_are_all_there_are():
    counts = {"unreadable": 1, "non-finite": 1}

    assert "and more" not in str(Report(3, None, 1, counts, OFFENDERS))


def test_offenders_go_to_a_frame():
    frame = Report(3, 12, 1, COUNTS, OFFENDERS).to_pandas()

    assert list(frame.columns) == ["part", "row", "kind", "message"]
    assert frame["part"].tolist() == ["s3://x/a", "s3://x/bcd"]
    assert Report(3, 12, 1, {}).to_pandas().columns.tolist() == list(frame.columns)
