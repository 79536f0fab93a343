"""The command of the benchmarks, and what its questions make of numbers."""

import argparse
import importlib
import math
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import clusters, places, time_to_accuracy, turns
from benchmarks.contestants import CONTESTANTS
from benchmarks.work import WORKS


@pytest.mark.parametrize("name", command.QUESTIONS)
def test_each_question_has_the_name_it_is_asked_by(name):
    module = importlib.import_module(f"benchmarks.{command.QUESTIONS[name]}")

    assert module.QUESTION.name == name
    assert module.QUESTION.parser().parse_args([]).results is not None


@pytest.mark.parametrize("name", command.SCRIPTS)
def test_each_script_is_there(name):
    assert importlib.util.find_spec(f"benchmarks.{name.replace('-', '_')}")


def test_an_unknown_name_is_refused_with_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])

    with pytest.raises(SystemExit):
        command.main()

    assert "time-to-accuracy" in capsys.readouterr().err


def test_each_contestant_has_a_script():
    for contestant in CONTESTANTS.values():
        assert importlib.util.find_spec(f"benchmarks.peers.{contestant.script}")


def test_without_dask_jobqueue_a_queue_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    asked = argparse.Namespace(scheduler=None, cluster="slurm")

    with (
        pytest.raises(SystemExit, match=r"pip install daskdl\[jobqueue\]"),
        clusters.connected(asked),
    ):
        pass


def test_where_there_are_no_namespaces_the_reason_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(turns, "unavailable", lambda: "tc of iproute2 not found")
    question = importlib.import_module("benchmarks.links").QUESTION

    made = question.main(["--no-results"])

    assert made.rows == ()
    assert "tc of iproute2 not found" in capsys.readouterr().out


def test_the_loopback_interface_has_one_rate():
    with (
        places.hosts(2, loopback=True) as place,
        pytest.raises(ValueError, match="got '1gbit'"),
    ):
        place.limit("1gbit")


def test_the_target_is_the_mean_of_the_last_quarter_of_all_seeds():
    runs = [[(1.0, 0.1), (7.6, 0.8), (10.0, 0.9)], [(4.0, 0.2), (10.0, 0.75)]]

    assert time_to_accuracy.target_of(runs) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("work", "target", "seconds"),
    [("mlp", 0.8, 2.0), ("mlp", 0.95, None), ("characters", 0.5, 1.0)],
)
def test_a_target_is_reached_by_the_first_score_that_is_as_good(work, target, seconds):
    curve = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.7)]

    assert time_to_accuracy.first_reached(WORKS[work], curve, target) == seconds


def test_a_time_is_known_only_if_all_seeds_came_to_the_target():
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


def test_all_works_have_rows_that_their_models_take():
    for work in WORKS.values():
        split = work.split()
        assert len(split.x) == len(split.y) > 9000
        assert split.x.shape[1:] == split.x_test.shape[1:]
