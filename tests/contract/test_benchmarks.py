"""The command of the benchmarks, their results, the page of them, and comparisons."""

import importlib
import json
import math
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    compare,
    contest,
    convergence,
    cuda,
    report,
    time_to_accuracy,
    transformer,
)
from benchmarks.contest import CONTESTANTS
from benchmarks.peers.loop import Arguments, Gauge, Least
from benchmarks.report import bars
from benchmarks.results import Question, Result, columns_of, load
from benchmarks.work import TASKS
from daskdl import GradientSharing, codec

COLUMNS = "case density:.0e ms:.2f ratio:.2f"
ROWS = [{"case": "find", "density": 1e-3, "ms": 1.25, "ratio": 0.5, "more": [1, 2]}]


def result(rows=ROWS, **changes):
    columns = columns_of(COLUMNS)
    return Result("encode", columns, rows, "python -m benchmarks encode", **changes)


def question(rows):
    return Question(
        "encode",
        "What does it cost?",
        lambda asked: rows,
        COLUMNS,
        {"--size": 1},
        lambda rows: bars(rows, "ratio", "case", "density"),
    )


@pytest.mark.parametrize("name", command.QUESTIONS)
def test_the_command_finds_each_question(name):
    asked = command.question_of(name)

    assert asked.name == name
    assert asked.parser().parse_args([]).results is not None
    assert name in report.SECTIONS.values()
    assert "Question: " in asked.text


def test_each_tool_and_each_contestant_has_a_module():
    names = [contestant.script for contestant in CONTESTANTS.values()]
    modules = [*command.TOOLS, *(f"peers.{name}" for name in names)]

    assert all(importlib.util.find_spec(f"benchmarks.{module}") for module in modules)


@pytest.mark.parametrize("name", [*command.QUESTIONS, *command.TOOLS])
def test_the_help_of_each_name_shows_how_to_run_it(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])

    with pytest.raises(SystemExit):
        command.main()

    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m benchmarks {name} ")
    assert f"\nRun:      python -m benchmarks {name}" in text


def test_a_question_prints_a_table_and_writes_json(tmp_path, capsys):
    results = question(ROWS).main(["--size", "3", "--results", str(tmp_path)])

    assert "1.25" in capsys.readouterr().out
    assert (
        results.command == f"python -m benchmarks encode --size 3 --results {tmp_path}"
    )
    (path,) = tmp_path.iterdir()
    assert load(path) == results
    assert json.loads(path.read_text())["commit"]
    assert {"processor", "cores", "memory_gib", "system"} <= set(results.hardware)
    assert {"python", "torch", "distributed", "numpy"} <= set(results.versions)


def test_rows_are_kept_when_a_question_is_interrupted(tmp_path):
    def broken():
        yield from ROWS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        question(broken()).main(["--results", str(tmp_path)])

    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".json.part")  # which the page ignores
    assert list(load(path).rows) == ROWS


def test_the_page_of_the_documentation_is_up_to_date():
    assert report.PAGE.read_text() == report.page(), "run `python -m benchmarks report`"


def test_the_page_shows_the_newest_results(tmp_path):
    result([{**ROWS[0], "ms": 7.0}], date="2026-01-01").save(tmp_path)
    result(date="2026-01-02").save(tmp_path)
    (tmp_path / "kill_z80_2026-01-01.md").write_text("By hand.\n")
    page = tmp_path / "page.md"

    report.main(["--results", str(tmp_path), "--page", str(page)])

    text = page.read_text()
    assert "| find | 1e-03 | 1.25 | 0.50 |" in text
    assert "7.00" not in text
    assert "`python -m benchmarks encode`, 2026-01-02" in text
    assert "## A killed worker\n\nBy hand.\n" in text
    picture = tmp_path / "images" / "benchmark_encode.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_result_of_a_gpu_has_its_name(tmp_path):
    machine = {"processor": "Xeon", "cores": 16, "accelerator": "NVIDIA H100 80GB HBM3"}
    measured = result(date="2026-01-01", hardware=machine)

    assert measured.save(tmp_path).name == "encode_h100-80gb-hbm3_2026-01-01.json"
    assert "NVIDIA H100 80GB HBM3, Xeon, 16 cores" in report.page(tmp_path)


def test_the_measurements_of_a_gpu_run_on_a_cpu(tmp_path):
    arguments = ["--device", "cpu", "--small", "--results", str(tmp_path)]

    rows = cuda.QUESTION.main(arguments).rows

    assert {row["part"] for row in rows} == set(cuda.PARTS)
    measured = {row["case"]: row for row in rows if "ms" in row}
    (computed,) = [row for row in rows if row["case"] not in measured]
    assert computed["case"] == "the same after thousands of steps"
    assert all(row["ms"] > 0 for row in measured.values())
    exchanging = [
        row["density"] > 0 for case, row in measured.items() if case.startswith("fit")
    ]
    assert exchanging == [False, True, True, True, True]
    (path,) = tmp_path.iterdir()
    assert [row["case"] for row in load(path).rows] == [row["case"] for row in rows]


def test_a_measurement_of_a_gpu_that_fails_leaves_the_others(monkeypatch):
    def out_of_memory(sizes, device, until):
        yield {"case": "a matrix", "ms": 1.0}
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setitem(cuda.PARTS, "copies", out_of_memory)
    parts = ["--parts", "copies", "ceilings"]

    rows = cuda.QUESTION.main(["--device=cpu", "--small", "--no-results", *parts]).rows

    assert [row.get("note") for row in rows[:2]] == [
        None,
        "RuntimeError: out of memory",
    ]
    assert [row["part"] for row in rows] == ["copies"] * 2 + ["ceilings"] * 2


@pytest.mark.parametrize(
    ("way", "options"),
    {
        "lockstep": {},
        "lockstep 16": {"exchange_every": 16},
        "lockstep momentum 0.5": {"momentum": 0.5},
        "lockstep 4 momentum 0.8": {"exchange_every": 4, "momentum": 0.8},
    }.items(),
)
def test_a_way_in_lockstep_has_the_interval_and_the_momentum_of_its_name(way, options):
    assert convergence.MASTERS[way] == GradientSharing(max_staleness=0, **options)


def test_in_lockstep_runs_repeat_and_momentum_learns_more_from_the_same_steps(
    monkeypatch, tmp_path, capsys
):
    task = replace(TASKS["diabetes"], epochs=2)
    monkeypatch.setitem(TASKS, "diabetes", task)
    ways = ["lockstep 4", "lockstep 4 momentum 0.5", "lockstep 4 momentum 0.5"]
    rows = []
    for way in ways:
        run = convergence.Run("diabetes", "SGD", 2, way, seed=0)
        returned, scores, sent = convergence.shared(run, 1.0)
        row = convergence.Row(
            **asdict(run), returned=returned, scores=scores, sent=sent, seconds=1.0
        )
        rows.append(row)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows[:2]))

    convergence.main(["--kept", str(file)])

    plain, faster, again = rows
    assert faster.scores[-1] < plain.scores[-1]
    assert faster == again
    table, *_ = capsys.readouterr().out.partition("\n\n")
    for row, line in zip(rows, table.splitlines()[1:], strict=False):
        assert f" 2 {row.way} " in line
        assert f" {row.returned:.4f} " in line


def test_a_fit_that_diverges_has_a_row_and_is_the_worst(monkeypatch):
    monkeypatch.setitem(TASKS, "diabetes", replace(TASKS["diabetes"], epochs=2))
    run = convergence.Run("diabetes", "SGD", 2, "lockstep 4 momentum 0.9", seed=1)

    returned, scores, sent = convergence.shared(run, rate_factor=1e9)

    diverged = convergence.Row(
        **asdict(run), returned=returned, scores=scores, sent=sent, seconds=1.0
    )
    assert math.isnan(diverged.returned)
    assert len(diverged.scores) == 2
    learned = replace(diverged, seed=0, returned=0.7, scores=[0.8, 0.7], sent=0.1)
    beside = [
        replace(learned, way="synchronous", seed=seed, returned=0.6) for seed in (0, 1)
    ]
    rows = [learned, diverged, *beside]
    assert " nan diabetes, 2 " in convergence.summary(rows).replace("+nan", "nan")
    *_, line = convergence.table(rows).splitlines()
    assert line.split()[-5:-2] == ["+nan", "+nan", "+nan"]  # to sync, worst, best


def test_an_echo_sends_each_update_back_once():
    echo = transformer.Echo(SimpleNamespace(run=7))
    entries_K = np.array([2, -5], np.int32)

    frame = echo.publish(lambda stamp: codec.encode(stamp, 10, 0.5, entries_K), step=3)

    (update,) = echo.drain().updates
    assert update.stamp == codec.Stamp(run=7, origin=1, sequence=1, step=3)
    np.testing.assert_array_equal(update.entries_K, entries_K)
    assert frame.nbytes > 0
    assert not echo.drain().updates
    assert echo.peers() == [1]


def test_a_comparison_shows_the_ratio_of_ratios(tmp_path, capsys):
    baseline = tmp_path / "baseline.json"
    arguments = ["--of", str(result().save(tmp_path)), "--baseline", str(baseline)]

    compare.main([*arguments, "--write"])
    capsys.readouterr()
    compare.main(arguments)

    kept = json.loads(baseline.read_text())
    assert kept["ratios"] == {"encode, find, 0.001, ratio": 0.5}
    assert kept["commands"] == ["python -m benchmarks encode"]
    assert "1.000" in capsys.readouterr().out
    rows = compare.beside({"a": 0.9, "b": 0.5}, {"a": 0.75, "b": 0.5, "c": 1.0})
    assert rows[0]["now / then"] == pytest.approx(1.2)
    assert [row["mark"] for row in rows] == ["!", "", ""]


def test_a_contestant_has_a_time_only_if_all_seeds_reached_the_target():
    reached, not_reached = {"reached_s": 2.0}, {"reached_s": None}

    row = time_to_accuracy.row(
        "daskdl",
        [reached, {"reached_s": 4.0}],
        [{"reached_s": 6.0}] * 2,
        [reached, not_reached],
    )

    assert (row["reached_s"], row["to_single"]) == (3.0, 2.0)
    assert math.isnan(row["to_ddp"])
    assert row["reached"] == "2 of 2"


def test_a_later_part_keeps_the_target_the_settings_and_the_rows(monkeypatch, tmp_path):
    trained = []

    def compete(contestant, place, course, seed=0):
        trained.append((contestant.name, seed, course.rate_factor))
        score = 1.0 if course.rate_factor == 2.0 else 0.5
        return {
            "curve": [(second, score) for second in (1.0, 2.0, 3.0, 4.0)],
            "reached_s": 3.0 if score >= course.target else None,
        }

    monkeypatch.setattr(time_to_accuracy, "compete", compete)
    options = ["--loopback", "--rates", "unlimited", "--rate-factors", "1", "2"]
    options += ["--seeds", "0", "1", f"--results={tmp_path}"]
    question = time_to_accuracy.QUESTION

    question.main([*options, "--contestants", "ddp"])
    (file,) = tmp_path.glob("*.json")
    trained.clear()
    later = question.main([*options, "--contestants", "daskdl", f"--after={file}"])

    tuning = [("daskdl", time_to_accuracy.TUNING_SEED, factor) for factor in (1.0, 2.0)]
    assert trained == [*tuning, ("daskdl", 0, 2.0), ("daskdl", 1, 2.0)]
    names = [CONTESTANTS[name].name for name in ("single", "ddp", "daskdl")]
    assert [row["contestant"] for row in later.rows] == names
    assert {row["target"] for row in later.rows} == {1.0}
    assert {row["rate_factor"] for row in later.rows} == {2.0}


def test_no_time_goes_to_slower_settings_and_to_contestants_that_never_get_there(
    monkeypatch, tmp_path
):
    trained = []

    def compete(contestant, place, course, seed=0):
        trained.append((contestant.name, seed, course.rate_factor, course.seconds))
        good = contestant.name != CONTESTANTS["post-local-sgd"].name
        return {
            "curve": [(second, 1.0 if good else 0.5) for second in (1.0, 4.0)],
            "reached_s": 3.0 if good and course.target == 1.0 else None,
        }

    monkeypatch.setattr(time_to_accuracy, "compete", compete)
    options = ["--loopback", "--rates", "unlimited", "--rate-factors", "1", "2"]
    options += ["--seeds", "0", "1", "2", "--limit", "9", f"--results={tmp_path}"]

    time_to_accuracy.QUESTION.main([*options, "--contestants", "post-local-sgd"])

    tuning = time_to_accuracy.TUNING_SEED
    of_ddp = [run[1:] for run in trained if run[0] == CONTESTANTS["ddp"].name]
    assert of_ddp[:2] == [(tuning, 1.0, 9.0), (tuning, 2.0, 3.0)]
    assert [run[0] for run in of_ddp[2:]] == [0, 1, 2]
    local = CONTESTANTS["post-local-sgd"].name
    hopeless = [run[1] for run in trained if run[0] == local]
    assert hopeless == [tuning, tuning, 0, 1]


def test_ratios_are_within_a_round_and_failed_rounds_are_left_out():
    def run(speed, early_speed, from_step):
        return {
            "samples_per_s": speed,
            "warm_up_samples_per_s": early_speed,
            "from_step": from_step,
        }

    rounds = [run(10.0, 6.0, 100), {"error": "it broke"}, run(90.0, 8.0, 300)]
    base = [run(10.0, 10.0, 120), run(50.0, 10.0, 500), run(100.0, 20.0, 900)]

    row = contest.row(CONTESTANTS["ddp"], "1gbit", rounds, base)

    assert row["ratio"] == pytest.approx(0.95)
    assert (row["ratio_lowest"], row["ratio_highest"]) == (0.9, 1.0)
    assert (row["samples_per_s"], row["error"]) == (50.0, "it broke")
    assert (row["early"], row["from_step"]) == (0.5, 200.0)


def test_without_a_warm_up_a_contestant_has_no_early_ratio():
    scored = {"samples_per_s": 10.0, "warm_up_samples_per_s": None, "from_step": 0}

    row = contest.row(CONTESTANTS["ddp"], "1gbit", [scored], [scored])

    assert row["ratio"] == 1.0
    assert math.isnan(row["early"])


class Board:
    """A meeting of one process."""

    def wait_for_all(self, name):
        pass

    def put(self, name, value):
        json.dumps(value)


@pytest.mark.parametrize(
    ("least", "step_s", "steps_made", "counted"),
    [(Least(), 0.5, 14, 10), (Least(warm_up=3, counted=2), 60.0, 5, 2)],
    ids=["seconds", "steps"],
)
def test_steps_of_the_warm_up_are_counted_by_themselves(
    least, step_s, steps_made, counted
):
    now = 100.0
    arguments = Arguments(warm_up=2.0, seconds=5.0)
    gauge = Gauge(arguments, Board(), None, None, least, lambda: now)
    gauge.begin()

    steps = 0
    while gauge.goes_on(64):
        now += step_s
        steps += 1

    assert steps == steps_made
    assert gauge.report.steps == counted
    assert gauge.report.rows == 64 * counted
    assert gauge.report.seconds == step_s * counted
    warm_up_steps = steps_made - counted
    assert gauge.report.warm_up_steps == warm_up_steps
    assert gauge.report.warm_up_rows == 64 * warm_up_steps
    assert gauge.report.warm_up_s == step_s * warm_up_steps
