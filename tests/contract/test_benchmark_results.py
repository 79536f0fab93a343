"""Results of benchmarks: kept as JSON, rendered into a page, compared with others."""

import json
import math
import sys

import pytest

from benchmarks import compare, report, results
from benchmarks.plots import bars
from benchmarks.questions import Question
from benchmarks.results import Result, load, newest

COLUMNS = {"case": "", "ms": ".2f", "ratio": ".2f"}
ROWS = [{"case": "find", "ms": 1.25, "ratio": 0.5, "more": [1, 2]}]
PAGE = """# Benchmarks

Written by hand.
<!-- results: encode -->
<!-- end of results: encode -->
The end.
"""


def result(rows=ROWS, **changes):
    return Result("encode", COLUMNS, rows, "python -m benchmarks encode", **changes)


def test_a_file_has_all_that_is_needed_to_make_it_again(tmp_path):
    path = result(seeds=[0, 1], notes=["alone"]).save(tmp_path)

    kept = json.loads(path.read_text())
    assert kept["command"] == "python -m benchmarks encode"
    assert kept["seeds"] == [0, 1]
    assert kept["rows"] == ROWS
    assert kept["commit"]
    assert {"processor", "cores", "memory_gib", "system"} <= set(kept["hardware"])
    assert {"python", "torch", "distributed", "numpy"} <= set(kept["versions"])


def test_its_name_says_question_hardware_and_date(tmp_path):
    hardware = {"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2}

    path = result(hardware=hardware, date="2026-11-22").save(tmp_path)

    assert path.name == "encode_xeon-2.50ghz-2cores_2026-11-22.json"


def test_what_was_saved_is_loaded(tmp_path):
    made = result()

    assert load(made.save(tmp_path)) == made


def test_a_number_that_is_none_is_null_in_a_file(tmp_path):
    rows = [{"case": "find", "ratio": math.nan}, {"case": "take", "ratio": math.inf}]

    kept = load(result(rows).save(tmp_path))

    assert [row["ratio"] for row in kept.rows] == [None, None]


def test_the_newest_of_a_question_is_that_of_the_last_date(tmp_path):
    for date in ("2026-11-03", "2027-01-02", "2026-12-31"):
        result(date=date).save(tmp_path)
    result(date="2026-11-09", hardware={"processor": "Z80", "cores": 1}).save(tmp_path)

    assert newest(tmp_path)["encode"].stem.endswith("2027-01-02")


def question(rows):
    return Question(
        "encode",
        "What does it cost?",
        lambda parser: parser.add_argument("--size", type=int, default=1),
        lambda asked: rows,
        COLUMNS,
        lambda made: bars(made, "ratio", "case"),
    )


def test_a_question_prints_a_table_and_writes_json(tmp_path, capsys):
    made = question(ROWS).main(["--size", "3", "--results", str(tmp_path)])

    printed = capsys.readouterr().out
    assert "find" in printed
    assert "1.25" in printed
    assert made.command == (
        f"python -m benchmarks encode --size 3 --results {tmp_path}"
    )
    (path,) = tmp_path.glob("*.json")
    assert load(path) == made
    assert list(tmp_path.iterdir()) == [path]  # pictures are drawn with the page


def test_what_is_known_is_kept_where_a_question_ends_early(tmp_path):
    def broken():
        yield from ROWS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        question(broken()).main(["--results", str(tmp_path)])

    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".json.part")  # nothing that is rendered
    assert list(load(path).rows) == ROWS


def test_a_question_that_could_not_be_asked_leaves_no_file(tmp_path):
    made = question([]).main(["--results", str(tmp_path)])

    assert made.rows == ()
    assert not list(tmp_path.iterdir())


def test_a_table_stands_between_the_comments_of_its_question():
    text = report.section(result(), picture=None)

    page = report.render(PAGE, {"encode": text})

    before, _, rest = page.partition("<!-- results: encode -->\n")
    between, _, after = rest.partition("<!-- end of results: encode -->")
    assert before == "# Benchmarks\n\nWritten by hand.\n"
    assert after == "\nThe end.\n"
    assert "| find | 1.25 | 0.50 |" in between
    assert "`python -m benchmarks encode`" in between


def test_rendering_again_changes_nothing():
    sections = {"encode": report.section(result(), picture="images/x.png")}
    once = report.render(PAGE, sections)

    assert report.render(once, sections) == once
    assert once != PAGE


def test_questions_without_results_are_left_as_they_are():
    assert report.render(PAGE, {}) == PAGE


@pytest.mark.parametrize("page", ["# Nothing\n", PAGE + PAGE], ids=["none", "two"])
def test_a_page_without_one_place_for_a_question_is_refused(page):
    with pytest.raises(ValueError, match="it has to be one"):
        report.render(page, {"encode": "new"})


def test_the_page_of_the_documentation_has_a_place_for_each_question():
    page = report.PAGE.read_text()

    assert report.render(page, dict.fromkeys(report.QUESTIONS, "")) != page


def test_the_report_writes_tables_and_pictures_of_the_newest_results(
    tmp_path, monkeypatch
):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    rows = [{"case": "find", "density": 1e-3, "ms": 1.0, "ratio": 2.0}]
    result(rows).save(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["report", "--results", str(tmp_path), "--page", str(page)]
    )

    report.main()

    assert "| find | 1.00 | 2.00 |" in page.read_text()
    assert "(images/benchmark_encode.png)" in page.read_text()
    picture = tmp_path / "images" / "benchmark_encode.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ratios_are_named_by_what_they_are_of():
    rows = [
        {"contestant": "DDP", "rate": "1gbit", "ratio": 0.5, "samples_per_s": 9.0},
        {"contestant": "daskdl", "rate": "1gbit", "ratio": None},
    ]

    assert compare.ratios(result(rows)) == {"encode, 1gbit, DDP, ratio": 0.5}


def test_the_ratio_of_ratios_is_now_over_then():
    rows = compare.beside({"a": 0.9, "b": 0.5}, {"a": 0.75, "b": 0.5, "c": 1.0})

    assert [row["what"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["now / then"] == pytest.approx(1.2)
    assert rows[1]["now / then"] == 1.0
    assert [row["mark"] for row in rows] == ["!", "", ""]


def test_a_baseline_that_was_written_is_compared_with(tmp_path, capsys, monkeypatch):
    baseline = tmp_path / "baseline.json"
    path = result().save(tmp_path)
    command = ["compare", "--of", str(path), "--baseline", str(baseline)]

    monkeypatch.setattr(sys, "argv", [*command, "--write"])
    compare.main()
    monkeypatch.setattr(sys, "argv", command)
    capsys.readouterr()
    compare.main()

    kept = json.loads(baseline.read_text())
    assert kept["ratios"] == {"encode, find, ratio": 0.5}
    assert kept["commands"] == ["python -m benchmarks encode"]
    assert "1.000" in capsys.readouterr().out


def test_results_are_kept_beside_the_benchmarks():
    assert results.FOLDER.name == "results"
    assert results.FOLDER.is_dir()
