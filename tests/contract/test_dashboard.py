"""What the scheduler keeps of a run for the dashboard: numbers, bounds, the end."""

import base64
import dataclasses
import json
import math

import numpy as np
import pytest

from daskdl.channel.dashboard import (
    KEPT_S,
    MAX_EPOCHS,
    MAX_FINISHED,
    MAX_LISTED,
    MAX_REPORTS,
    UPDATE_S,
    Announced,
    Dashboard,
    figures_of,
    head_of,
    metrics,
    replica_rows,
    section_of,
)
from daskdl.channel.leasing import PartitionSizes
from daskdl.channel.protocol import LiveReport
from daskdl.channel.run_state import RunState
from daskdl.channel.transport import Outbox
from tests.sim.world import Process, World
from tests.support.run_states import plan_of

ROW = {
    "epoch": 0,
    "loss": 0.5,
    "examples": 100,
    "density": 0.01,
    "sent_bytes": 10,
    "dense_bytes": 1000,
    "staleness": 0.5,
    "waits": {"lease": 1.5},
}


def run_of(replicas=2, joined=100.0, rows=(500, 500), board=None, **more):
    """A run whose replicas have all joined, and its record; both began at 100 s."""
    sizes = {"train": PartitionSizes(rows, ("",) * len(rows), 1, 1)}
    spec = plan_of(replicas, **{"epochs": 4, "title": "Net", **more})
    spec = dataclasses.replace(spec, sizes=sizes)
    state = RunState(spec, 100.0)
    for replica in spec.replicas:
        state.join(replica, joined, Outbox(math.inf))
    board = Dashboard() if board is None else board
    return state, board.open(state, 100.0)


def live(epoch, step, loss_sum=0.0, examples=0, at_s=0.0, **more):
    return LiveReport(at_s, epoch, step, loss_sum, examples, **more)


def line_of(run, title, name):
    """The measured points of a curve, by the title of its figure."""
    (figure,) = [figure for figure in figures_of(run) if figure.title == title]
    (curve,) = [curve for curve in figure.curves if curve.name == name]
    measured = np.isfinite(curve.y)
    return curve.x[measured].tolist(), curve.y[measured].tolist()


def cells_of(run, replica):
    """The cells of a replica's row in the table."""
    (row,) = [r for r in replica_rows(run) if r["cells"][0] == str(replica)]
    return row["cells"]


class TestNumbers:
    def test_losses_are_means_since_the_report_before_and_over_epochs(self):
        _, run = run_of()

        run.report(0, live(0, 1, loss_sum=30.0, examples=10), 101.0)
        run.report(0, live(0, 2, loss_sum=40.0, examples=20), 102.0)
        run.report(0, live(1, 3, loss_sum=45.0, examples=30), 103.0)

        by_step = line_of(run, "Loss by step", "replica 0")
        by_epoch = line_of(run, "Loss by epoch", "replica 0")
        assert by_step == ([1.0, 2.0, 3.0], [3.0, 1.0, 0.5])
        assert by_epoch == ([0.0, 1.0], [2.0, 0.5])

    def test_rates_are_increases_per_second_of_the_replicas_clock(self):
        _, run = run_of()

        early = {"sent_bytes": 50, "waits_s": {"room": 0.5}}
        late = {"sent_bytes": 450, "waits_s": {"room": 1.0, "fetch": 0.5}}
        run.report(0, live(0, 1, examples=10, at_s=5.0, **early), 101.0)
        run.report(0, live(0, 5, examples=90, at_s=7.0, **late), 109.0)

        rates = (
            "Examples per second",
            "Bytes sent per second",
            "Fraction of the time waited",
        )
        lines = [line_of(run, title, "replica 0") for title in rates]
        assert lines == [([9.0], [40.0]), ([9.0], [200.0]), ([9.0], [0.5])]
        assert run.last(0)["examples_per_s"] == 40.0
        (row,) = [row for row in replica_rows(run) if row["cells"][0] == "0"]
        assert row["waits"] == "waits: room 1.0 s, fetch 0.5 s"

    def test_the_last_speed_is_over_a_second_or_more(self):
        _, run = run_of()

        for at_s, examples in ((1.0, 0), (2.0, 10), (2.1, 50), (2.5, 70)):
            run.report(0, live(0, 1, examples=examples, at_s=at_s), 100.0 + at_s)

        assert run.last(0)["examples_per_s"] == pytest.approx(70 / 1.5)

    def test_thinned_reports_have_the_mean_over_those_left_out(self):
        _, run = run_of()
        steps = 4 * MAX_REPORTS

        for step in range(1, steps + 1):
            curve = live(0, step, loss_sum=step, examples=step, at_s=step / 2)
            run.report(0, curve, 100.0 + step)

        x, y = line_of(run, "Examples per second", "replica 0")
        assert MAX_REPORTS / 2 <= len(x) <= MAX_REPORTS
        assert set(y) == {2.0}
        assert set(line_of(run, "Loss by step", "replica 0")[1]) == {1.0}

    def test_the_speed_of_all_is_the_sum_of_those_that_report(self):
        _, run = run_of()
        for replica in (0, 1):
            for second in (1, 2, 3):
                curve = live(0, second, examples=10 * second, at_s=second)
                run.report(replica, curve, 100.0 + second)

        _, speeds = line_of(run, "Examples per second", "all replicas")
        assert speeds == [20.0, 20.0]
        assert run.speed(103.5) == 20.0
        assert run.speed(110.0) == 0.0

    def test_a_report_that_was_overtaken_changes_nothing(self):
        _, run = run_of()
        run.report(0, live(1, 20, 1.0, 10), 101.0)

        run.report(0, live(0, 10, 9.0, 90), 102.0)

        assert run.last(0)["examples"] == 10
        assert len(run.reports.numbered) == 1

    def test_what_was_not_measured_is_left_out(self):
        _, run = run_of()
        run.report(0, live(0, 1, density=0.25), 101.0)
        run.report(0, live(0, 2), 102.0)

        assert line_of(run, "Density", "replica 0") == ([1.0], [0.25])
        assert "Threshold" not in {figure.title for figure in figures_of(run)}

    def test_scores_of_the_history_are_lines_of_their_own(self):
        _, run = run_of()

        run.add_row({**ROW, "val_loss": math.nan})
        run.add_row({**ROW, "epoch": 1, "loss": 0.25, "val_loss": 0.75})

        all_of = line_of(run, "Loss by epoch", "all replicas")
        validation = line_of(run, "Loss by epoch", "validation")
        assert (all_of, validation) == (([0.0, 1.0], [0.5, 0.25]), ([1.0], [0.75]))
        assert "val_loss 0.75" in head_of(run, 110.0)["numbers"]

    def test_logs_and_metrics_have_figures_of_their_own(self):
        _, run = run_of()

        run.add_row({**ROW, "kl": 3.0, "val_kl": 5.0, "val_accuracy": 0.5})
        run.add_row({**ROW, "epoch": 1, "kl": 2.0, "val_kl": math.nan, "val_f1": 0.7})

        titles = [figure.title for figure in figures_of(run)]
        assert titles == ["Loss by epoch", "kl", "accuracy", "f1"]
        assert line_of(run, "kl", "all replicas") == ([0.0, 1.0], [3.0, 2.0])
        assert line_of(run, "kl", "validation") == ([0.0], [5.0])
        assert line_of(run, "accuracy", "validation") == ([0.0], [0.5])
        assert line_of(run, "f1", "validation") == ([1.0], [0.7])

    def test_the_time_left_follows_from_the_mean_speed(self):
        _, run = run_of()
        for replica in (0, 1):
            run.report(replica, live(0, 1), 100.0)
        assert run.left_s(100.0) is None

        run.report(0, live(1, 9, examples=800), 110.0)
        run.report(1, live(1, 9, examples=700), 110.0)

        assert run.left_s(110.0) == pytest.approx(2500 / (1500 / 10))
        assert head_of(run, 110.0)["state"] == "training for 10 s, about 17 s left"

    def test_data_of_unknown_length_take_the_length_of_the_last_epoch(self):
        _, run = run_of(rows=(-1, 500))
        run.report(0, live(0, 1), 100.0)
        run.report(0, live(1, 9, examples=150), 110.0)
        assert run.left_s(110.0) is None

        run.add_row(ROW)

        assert run.left_s(110.0) == pytest.approx(250 / (150 / 10))


class TestReplicas:
    def test_each_is_listed_with_the_reason_why_it_has_gone(self):
        state, run = run_of(4, joined=101.5)

        state.lose(1, "no <heartbeat>", 109.0)
        state.leave(2, 110.0, retires=True)
        state.fail(3, {"type": "ReplicaError", "summary": "boom"})
        state.leave(3, 111.0)

        fates = [cells_of(run, replica)[-1] for replica in range(4)]
        assert fates == [
            "tcp://worker-0, joined at 1.5 s",
            "tcp://worker-1, joined at 1.5 s; at 9.0 s lost: no <heartbeat>",
            "tcp://worker-2, joined at 1.5 s; at 10.0 s retired with its worker",
            "tcp://worker-3, joined at 1.5 s; at 11.0 s failed: boom",
        ]
        assert list(run.present) == [0]
        assert list(run.listed) == [0, 1, 2, 3]

    def test_the_first_reason_stays(self):
        state, run = run_of()

        state.leave(1, 109.0)
        state.lose(1, "its worker is gone", 110.0)

        assert run.listed[1].why == "left: its task has ended"
        assert run.listed[1].gone_at == 109.0
        assert not run.listed[1].failed

    def test_one_that_has_not_joined_is_not_listed(self):
        state, run = run_of()

        replica = state.members.assign("tcp://late")
        state.lose(replica, "it was not started", 101.0)

        assert replica not in run.listed

    def test_one_is_not_several(self):
        assert "1 replica" in head_of(run_of(1)[1], 101.0)["numbers"]
        assert "2 replicas" in head_of(run_of(2)[1], 101.0)["numbers"]


def test_a_record_is_bounded():
    replicas = 2 * MAX_LISTED
    state, run = run_of(replicas)
    for replica in range(replicas):
        for step in range(1, 200):
            run.report(replica, live(step // 20, step, step, step), 101.0 + replica)
        if replica:
            state.lose(replica, "lost", 102.0 + replica)
    for epoch in range(3 * MAX_EPOCHS):
        run.add_row({**ROW, "epoch": epoch})

    assert 0 < len(run.reports.numbered) <= MAX_REPORTS
    assert 0 < len(run.ended.numbered) <= MAX_REPORTS
    assert MAX_EPOCHS / 2 <= len(run.rows.numbered) <= MAX_EPOCHS
    assert list(run.listed) == [0, *range(replicas - MAX_LISTED, replicas)]
    assert len(replica_rows(run)) == MAX_LISTED


class TestTheEnd:
    @pytest.fixture
    def world(self):
        return World(seed=0)

    @pytest.fixture
    def loop(self, world):
        return Process(world, "scheduler").loop

    def test_a_run_that_is_over_stays_for_an_hour_and_then_goes(self, world, loop):
        board, seen = Dashboard(), []
        run_of(run=7, board=board)
        run_of(run=8, board=board)

        board.end(7, loop, finished=True)

        loop.call_later(KEPT_S - 1, lambda: seen.append(list(board.runs)))
        loop.call_later(KEPT_S + 1, lambda: seen.append(list(board.runs)))
        world.run(lambda: len(seen) == 2, KEPT_S + 2)
        assert seen == [[7, 8], [8]]

    def test_the_heading_says_how_and_when_it_ended(self):
        state, run = run_of()

        state.fail(1, {"type": "ReplicaError", "summary": "<x>"})
        run.end(160.0, finished=False)

        head = head_of(run, 190.0)
        assert (head["phase"], head["state"]) == ("failed", "failed after 60 s")
        assert (head["why"], head["ended"]) == ("replica 1 failed: <x>", 160.0)
        assert cells_of(run, 0)[-1] == "tcp://worker-0, joined at 0.0 s"
        assert run.present == {}
        assert list(run.listed) == [0, 1]

    def test_few_runs_that_are_over_stay(self, loop):
        board = Dashboard()
        for run in range(MAX_FINISHED + 3):
            run_of(run=run, board=board)
            board.end(run, loop, finished=True)

        assert list(board.runs) == list(range(3, MAX_FINISHED + 3))

    def test_a_run_that_opens_again_goes_on_in_its_section(self, world, loop):
        board, seen = Dashboard(), []
        state, run = run_of(board=board)
        run_of(run=8, board=board)
        for epoch in range(3):
            run.report(0, live(epoch, 1 + epoch, examples=500 * epoch), 101.0 + epoch)
            run.add_row({**ROW, "epoch": epoch})
        state.lose(0, "it was killed", 104.0)
        state.lose(1, "it was killed", 104.0)
        board.end(run.run, loop, finished=False)

        _, again = run_of({2: "tcp://late"}, board=board, first_epoch=1)

        assert again is run
        assert [*board.runs] == [8, run.run]  # the newest is last
        assert (run.phase, run.epoch, run.row["epoch"]) == ("starting", 1, 0)
        assert list(run.present) == [2]
        assert list(run.listed) == [2, 0, 1]
        assert cells_of(run, 0)[-1].endswith("; at 4.0 s lost: it was killed")
        run.report(2, live(1, 2), 110.0)
        run.report(2, live(1, 3, examples=600), 116.0)
        assert line_of(run, "Loss by step", "replica 0")[0] == [2.0, 3.0]
        assert run.left_s(116.0) == pytest.approx(2400 / (600 / 6))
        loop.call_later(KEPT_S + 1, lambda: seen.append(list(board.runs)))
        world.run(lambda: seen, KEPT_S + 2)
        assert seen == [[8, run.run]]


def test_metrics_have_a_sample_of_each_replica_and_run():
    pytest.importorskip("prometheus_client")
    board = Dashboard()
    state, run = run_of(run=0xAB, board=board, name="resnet")
    waits_s = {"lease": 1.5, "room": 0.25}
    numbers = {"density": 0.5, "sent_bytes": 70, "residual_p99": 3.0}
    run.report(0, live(0, 5, 8.0, 16, waits_s=waits_s, **numbers), 101.0)
    run.report(1, live(0, 5, 8.0, 4), 101.0)
    state.lose(1, "it was cut off", 102.0)
    run.add_row({**ROW, "val_loss": 0.25, "val_accuracy": math.nan, "kl": 2.0})
    metrics().dashboards.add(board)
    try:
        families = list(metrics().collect())
    finally:
        metrics().dashboards.discard(board)

    samples = {
        (
            sample.name.removeprefix("dask_daskdl_"),
            *sample.labels.values(),
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("run") == "000000ab"
    }
    named = "000000ab", "resnet"
    assert samples["examples_total", *named, "0"] == 16
    assert samples["examples_total", *named, "1"] == 4
    assert samples["steps_total", *named, "0"] == 5
    assert samples["loss", *named, "0"] == 0.5
    assert samples["density", *named, "0"] == 0.5
    assert samples["residual_to_threshold_p99", *named, "0"] == 3.0
    assert samples["sent_bytes_total", *named, "0"] == 70
    assert samples["wait_seconds_total", *named, "0", "lease"] == 1.5
    assert samples["wait_seconds_total", *named, "0", "room"] == 0.25
    assert samples["replicas", *named] == 1
    assert samples["replicas_failed_total", *named] == 1
    assert samples["score", *named, "val_loss"] == 0.25
    assert samples["score", *named, "kl"] == 2.0
    assert ("score", *named, "val_accuracy") not in samples
    assert ("loss", *named, "1") not in samples  # it has gone
    kinds = {
        family.name.removeprefix("dask_daskdl_"): family.type for family in families
    }
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {  # Prometheus adds _total
        *("examples", "received_bytes", "replicas_failed", "sent_bytes", "steps"),
        "wait_seconds",
    }
    assert {kinds[name] for name in kinds.keys() - counters} == {"gauge"}


class TestBeforeTheFirstReport:
    def test_it_says_which_workers_are_not_ready(self):
        state = RunState(plan_of(3), 100.0)
        run = Dashboard().open(state, 100.0)
        state.join(1, 101.0, Outbox(math.inf))

        head = head_of(run, 102.0)

        assert head["phase"] == "starting"
        assert head["state"] == (
            "starting: 1 of 3 replicas ready; waiting for tcp://worker-0, "
            "tcp://worker-2 to load the model"
        )
        assert not any("epoch" in number for number in head["numbers"])
        assert section_of(run)["figures"] == []

    def test_a_run_is_announced_before_it_opens(self):
        board = Dashboard()
        run_of(run=1, board=board)
        board.announced[0xAB] = Announced("client", "deep", "Net", "importing torch")

        coming, _ = json.loads(board.answer(100.0))["runs"]

        assert (coming["id"], coming["name"], coming["phase"]) == (
            "000000ab",
            "deep",
            "starting",
        )
        assert coming["state"] == "starting: importing torch"
        run_of(run=0xAB, board=board, name="deep")
        heads = json.loads(board.answer(102.0))["runs"]
        assert [head["id"] for head in heads] == ["000000ab", "00000001"]
        assert heads[0]["state"].startswith("starting: 2 replicas ready")

    def test_then_all_are_in_their_first_step(self):
        _, run = run_of()

        assert head_of(run, 102.0)["state"] == (
            "starting: 2 replicas ready, in the first step"
        )
        run.report(0, live(0, 1), 103.0)
        assert head_of(run, 103.0)["state"] == "training for 3 s"


def test_a_run_that_has_lost_all_replicas_waits_for_a_worker():
    state, run = run_of()
    run.report(0, live(0, 1), 101.0)

    state.lose(0, "it was killed", 104.0)
    state.lose(1, "it was killed", 104.0)

    head = head_of(run, 105.0)
    assert (head["phase"], head["state"]) == ("waiting", "waiting for a worker")
    assert head["why"].startswith("no replica is left: lost replica 0")


class TestAnswers:
    def test_all_viewers_share_an_answer_for_a_time(self):
        board = Dashboard()
        _, run = run_of(board=board)
        of_run = f"{run.run:08x}"
        run.report(0, live(0, 1, 1.0, 1), 100.5)
        before = board.answer(100.5), board.answer_of(of_run, 100.5)
        run.report(0, live(0, 2, 1.0, 2), 100.6)

        soon, later = 100.5 + 0.9 * UPDATE_S, 100.5 + 1.1 * UPDATE_S
        assert board.answer(soon) is before[0]
        assert board.answer_of(of_run, soon) is before[1]
        head = json.loads(board.answer(later))["runs"][0]
        section = json.loads(board.answer_of(of_run, later))
        assert head["version"] == section["version"] != json.loads(before[1])["version"]
        assert board.answer_of(of_run, later + 9.0) is board.answer_of(of_run, later)

    def test_what_begins_or_ends_is_answered_at_once(self):
        board = Dashboard()
        _, run = run_of(run=1, board=board)
        board.answer(100.0)

        run_of(run=2, board=board)
        run.end(100.1, finished=True)

        heads = json.loads(board.answer(100.2))["runs"]
        assert [head["phase"] for head in heads] == ["starting", "finished"]

    def test_a_run_that_has_gone_has_none(self):
        assert Dashboard().answer_of("000000ab", 100.0) is None

    def test_curves_are_numbers_of_32_bits_and_equal_arrays_are_sent_once(self):
        _, run = run_of()
        for step in range(4):
            report = live(0, step, step, 2 * step, step, density=0.5, threshold=0.25)
            run.report(0, report, 100.0 + step)

        section = section_of(run)

        figures = {figure["title"]: figure for figure in section["figures"]}
        (density,) = figures["Density"]["curves"]
        (threshold,) = figures["Threshold"]["curves"]
        assert density["x"] == threshold["x"]
        seconds = base64.b64decode(section["arrays"][density["x"]])
        assert np.frombuffer(seconds, "<f4").tolist() == [0.0, 1.0, 2.0, 3.0]
