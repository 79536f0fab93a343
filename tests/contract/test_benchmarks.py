"""The command of the benchmarks, their results, the page of them, and comparisons."""

import argparse
import importlib
import json
import math
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import clusters, compare, contest, namespaces, report, time_to_accuracy
from benchmarks.contest import CONTESTANTS
from benchmarks.report import bars
from benchmarks.results import Question, Result, load, newest
from benchmarks.work import WORKS

COLUMNS = {"case": "", "ms": ".2f", "ratio": ".2f"}
ROWS = [{"case": "find", "density": 1e-3, "ms": 1.25, "ratio": 0.5, "more": [1, 2]}]


def result(rows=ROWS, **changes):
    return Result("encode", COLUMNS, rows, "python -m benchmarks encode", **changes)


def question(rows):
    return Question(
        "encode",
        "What does it cost?",
        lambda parser: parser.add_argument("--size", type=int, default=1),
        lambda asked: rows,
        COLUMNS,
        lambda made: bars(made, "ratio", "case"),
    )


class TestCommand:
    @pytest.mark.parametrize("name", command.QUESTIONS)
    def test_each_question_has_the_name_it_is_asked_by(self, name):
        asked = command.question_of(name)

        assert asked.name == name
        assert asked.parser().parse_args([]).results is not None

    def test_each_tool_and_each_contestant_has_a_module(self):
        names = [contestant.script for contestant in CONTESTANTS.values()]
        modules = [*command.TOOLS, *(f"peers.{name}" for name in names)]

        assert all(importlib.util.find_spec(f"benchmarks.{own}") for own in modules)

    def test_an_unknown_name_is_refused_with_those_there_are(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])

        with pytest.raises(SystemExit):
            command.main()

        assert "time-to-accuracy" in capsys.readouterr().err

    def test_without_dask_jobqueue_a_queue_is_refused_with_the_remedy(
        self, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
        asked = argparse.Namespace(scheduler=None, cluster="slurm")

        with (
            pytest.raises(SystemExit, match=r"pip install daskdl\[jobqueue\]"),
            clusters.connected(asked),
        ):
            pass

    def test_where_there_are_no_namespaces_the_reason_is_printed(
        self, monkeypatch, capsys
    ):
        monkeypatch.setattr(contest, "unavailable", lambda: "tc of iproute2 not found")

        made = command.question_of("links").main(["--no-results"])

        assert made.rows == ()
        assert "tc of iproute2 not found" in capsys.readouterr().out

    def test_the_loopback_interface_has_one_rate(self):
        with (
            namespaces.hosts(2, loopback=True) as place,
            pytest.raises(ValueError, match="got '1gbit'"),
        ):
            place.limit("1gbit")

    def test_all_works_have_rows_that_their_models_take(self):
        for work in WORKS.values():
            split = work.split()
            assert len(split.x) == len(split.y) > 9000
            assert split.x.shape[1:] == split.x_test.shape[1:]


class TestResults:
    def test_a_file_has_all_that_is_needed_to_repeat_it(self, tmp_path):
        made = result(seeds=[0, 1], notes=["alone"])
        path = made.save(tmp_path)

        kept = json.loads(path.read_text())
        assert kept["command"] == "python -m benchmarks encode"
        assert kept["seeds"] == [0, 1]
        assert kept["rows"] == ROWS
        assert kept["commit"]
        assert {"processor", "cores", "memory_gib", "system"} <= set(kept["hardware"])
        assert {"python", "torch", "distributed", "numpy"} <= set(kept["versions"])
        assert load(path) == made

    def test_its_name_says_question_hardware_and_date(self, tmp_path):
        hardware = {"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2}

        path = result(hardware=hardware, date="2026-11-22").save(tmp_path)

        assert path.name == "encode_xeon-2.50ghz-2cores_2026-11-22.json"

    def test_numbers_that_json_does_not_have_are_null(self, tmp_path):
        rows = [{"case": "find", "ratio": math.nan}, {"case": "take", "ratio": -1.5}]

        kept = load(result(rows).save(tmp_path))

        assert [row["ratio"] for row in kept.rows] == [None, -1.5]

    def test_the_newest_of_a_question_is_that_of_the_last_date(self, tmp_path):
        for date in ("2026-11-03", "2027-01-02", "2026-12-31"):
            result(date=date).save(tmp_path)
        result(date="2026-11-09", hardware={"processor": "Z80", "cores": 1}).save(
            tmp_path
        )

        assert newest(tmp_path)["encode"].stem.endswith("2027-01-02")

    def test_a_question_prints_a_table_and_writes_json(self, tmp_path, capsys):
        made = question(ROWS).main(["--size", "3", "--results", str(tmp_path)])

        printed = capsys.readouterr().out
        assert "find" in printed
        assert "1.25" in printed
        assert made.command == (
            f"python -m benchmarks encode --size 3 --results {tmp_path}"
        )
        (path,) = tmp_path.iterdir()
        assert load(path) == made

    def test_what_is_known_is_kept_where_a_question_ends_early(self, tmp_path):
        def broken():
            yield from ROWS
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            question(broken()).main(["--results", str(tmp_path)])

        (path,) = tmp_path.iterdir()
        assert path.name.endswith(".json.part")  # nothing that is rendered
        assert list(load(path).rows) == ROWS

    def test_a_question_that_could_not_be_asked_leaves_no_file(self, tmp_path):
        assert question([]).main(["--results", str(tmp_path)]).rows == ()
        assert not list(tmp_path.iterdir())


class TestPage:
    def test_the_page_of_the_documentation_is_what_the_command_writes(self):
        assert report.PAGE.read_text() == report.page(), (
            "run `python -m benchmarks report`"
        )

    def test_each_picture_of_the_page_is_there(self):
        names = [
            line.partition("](")[2].rstrip(")")
            for line in report.page().splitlines()
            if line.startswith("![")
        ]

        assert len(names) > 9
        assert [n for n in names if not (report.PAGE.parent / n).exists()] == []

    def test_each_section_has_a_result(self):
        assert set(report.SECTIONS.values()) <= set(newest())

    def test_tables_and_pictures_are_of_the_newest_results(self, tmp_path):
        result([{**ROWS[0], "ms": 7.0}], date="2026-01-01").save(tmp_path)
        result(date="2026-01-02").save(tmp_path)
        (tmp_path / "kill_z80_2026-01-01.md").write_text("By hand.\n")
        page = tmp_path / "page.md"

        report.main(["--results", str(tmp_path), "--page", str(page)])

        text = page.read_text()
        assert "| find | 1.25 | 0.50 |" in text
        assert "7.00" not in text
        assert "`python -m benchmarks encode`, 2026-01-02" in text
        assert "## A worker is killed\n\nBy hand.\n" in text
        picture = tmp_path / "images" / "benchmark_encode.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


class TestComparisons:
    def test_ratios_are_named_by_what_they_are_of(self):
        rows = [
            {"contestant": "DDP", "rate": "1gbit", "ratio": 0.5, "samples_per_s": 9.0},
            {"contestant": "daskdl", "rate": "1gbit", "ratio": None},
        ]

        assert compare.ratios(result(rows)) == {"encode, 1gbit, DDP, ratio": 0.5}

    def test_the_ratio_of_ratios_is_now_over_then(self):
        rows = compare.beside({"a": 0.9, "b": 0.5}, {"a": 0.75, "b": 0.5, "c": 1.0})

        assert [row["what"] for row in rows] == ["a", "b", "c"]
        assert rows[0]["now / then"] == pytest.approx(1.2)
        assert rows[1]["now / then"] == 1.0
        assert [row["mark"] for row in rows] == ["!", "", ""]

    def test_a_baseline_that_was_written_is_compared_with(self, tmp_path, capsys):
        baseline = tmp_path / "baseline.json"
        path = result().save(tmp_path)
        arguments = ["--of", str(path), "--baseline", str(baseline)]

        compare.main([*arguments, "--write"])
        capsys.readouterr()
        compare.main(arguments)

        kept = json.loads(baseline.read_text())
        assert kept["ratios"] == {"encode, find, 0.001, ratio": 0.5}
        assert kept["commands"] == ["python -m benchmarks encode"]
        assert "1.000" in capsys.readouterr().out

    def test_the_target_is_the_mean_of_the_last_quarter_of_all_seeds(self):
        runs = [[(1.0, 0.1), (7.6, 0.8), (10.0, 0.9)], [(4.0, 0.2), (10.0, 0.75)]]

        assert time_to_accuracy.target_of(runs) == pytest.approx(0.8)

    @pytest.mark.parametrize(
        ("work", "target", "seconds"),
        [("mlp", 0.8, 2.0), ("mlp", 0.95, None), ("characters", 0.5, 1.0)],
    )
    def test_a_target_is_reached_by_the_first_score_that_is_as_good(
        self, work, target, seconds
    ):
        curve = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.7)]

        assert time_to_accuracy.first_reached(WORKS[work], curve, target) == seconds

    def test_a_time_is_known_only_if_all_seeds_came_to_the_target(self):
        reached, not_reached = {"reached_s": 2.0}, {"reached_s": None}

        made = time_to_accuracy.row(
            "daskdl",
            [reached, {"reached_s": 4.0}],
            [{"reached_s": 6.0}] * 2,
            [reached, not_reached],
        )

        assert made["reached_s"] == 3.0
        assert made["to_single"] == 2.0
        assert math.isnan(made["to_ddp"])
        assert made["reached"] == "2 of 2"
