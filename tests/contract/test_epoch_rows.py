"""The rows of the history, made of the reports of replicas, and the reports as sent."""

import dataclasses
import math

import pytest

from daskdl.callbacks import EarlyStopping
from daskdl.channel.base import ChannelStats
from daskdl.errors import DataError
from daskdl.evaluation.evaluate import Score
from daskdl.observe.history import COLUMNS
from daskdl.training.base import ExchangeStats
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.telemetry import (
    BestScore,
    EpochReport,
    EpochTotals,
    RowLog,
    reports_of,
)

FIRST = ExchangeStats(
    exchanges=4, density_sum=0.5, threshold=0.25, clipped=1.5, lead_sum=6, steps=5
)
SECOND = ExchangeStats(
    exchanges=1, density_sum=0.75, threshold=0.75, clipped=2.0, lead_sum=4, steps=3
)
CARRIED = ChannelStats(
    sent_bytes=100,
    received_bytes=40,
    frames=4,
    withheld=1,
    refused=2,
    folds=3,
    repaired=4,
    waits_s={"room": 1.0, "lease": 0.5},
)
MORE = ChannelStats(
    sent_bytes=11,
    received_bytes=7,
    frames=1,
    withheld=5,
    refused=1,
    folds=2,
    repaired=1,
    waits_s={"room": 2.0, "gather": 4.0},
)


def note(
    loss_sum,
    examples,
    statistics=FIRST,
    traffic=CARRIED,
    score=None,
    seconds=1.0,
    rate=(0, 0.5),
    skipped=0,
):
    return EpochReport(
        totals=EpochTotals(loss_sum, examples, seconds, skipped),
        exchange=statistics,
        traffic=traffic,
        score=score and Score(*score),
        scheduled=rate[0],
        learning_rate=rate[1],
    )


def row(*notes, size=10, seconds=2.0, columns=(), **counted):
    log = RowLog(size, columns, now=iter((5.0, 5.0 + seconds)).__next__)
    return log.end_epoch(3, notes, {**NOTHING, **counted})


def departed(work):
    """The report on a replica that has handed this work over."""
    [report] = reports_of({}, [work])
    return report


NOTHING = {"repeated": 0, "refused": 0}
TWO = [note(30.0, 10, skipped=5), note(10.0, 30, SECOND, MORE, skipped=3)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("epoch", 3),
        ("loss", 1.0),
        ("examples", 40),
        ("seconds", 2.0),
        ("examples_per_s", 20.0),
        ("density", 0.25),
        ("threshold", 0.5),
        ("learning_rate", 0.5),
        ("sent_bytes", 111),
        ("received_bytes", 47),
        ("dense_bytes", 4 * 10 * 5),
        ("staleness", 1.25),
        ("waits", {"room": 3.0, "lease": 0.5, "gather": 4.0}),
        ("clipped", 3.5),
        ("replicas", 2),
        ("repeated_pieces", 6),
        ("skipped_examples", 8),
        ("refused_messages", 7 + 2 + 1),
        ("repaired_updates", 5),
        ("withheld", 6),
        ("folds", 5),
    ],
)
def test_a_row_sums_up_what_two_replicas_reported(column, expected):
    assert row(*TWO, repeated=6, refused=7)[column] == expected


def test_a_row_has_the_documented_columns_and_no_others():
    assert list(row(*TWO)) == list(COLUMNS)


def test_a_replica_that_has_sent_nothing_has_no_threshold_to_count():
    silent = dataclasses.replace(SECOND, threshold=math.nan)

    assert row(note(1.0, 1), note(1.0, 1, silent))["threshold"] == 0.25
    assert math.isnan(row(note(1.0, 1, silent))["threshold"])


def test_the_learning_rate_is_that_of_the_replica_whose_schedule_is_farthest():
    rates = [(3, 0.3), (7, 0.7), (7, 0.8), (5, 0.5)]

    assert row(*[note(1.0, 1, rate=rate) for rate in rates])["learning_rate"] == 0.7


def test_an_epoch_whose_replicas_are_gone_has_no_loss():
    empty = row()

    assert math.isnan(empty["loss"])
    assert math.isnan(empty["learning_rate"])
    assert (empty["examples"], empty["replicas"], empty["waits"]) == (0, 0, {})


def test_an_epoch_without_steps_and_exchanges_has_zero_rates():
    nothing = ExchangeStats(0, 0.0, math.nan, 0.0, 0, 0)

    idle = row(note(1.0, 1, nothing))

    assert (idle["density"], idle["staleness"], idle["dense_bytes"]) == (0.0, 0.0, 0)


def test_validation_scores_are_merged_by_their_sums():
    scores = [[3.0, 1, 2, 2], [1.0, 2, 2, 6]]

    merged = row(*[note(1.0, 1, score=score) for score in scores])

    assert merged["val_loss"] == 0.5
    assert merged["val_accuracy"] == 0.75


def test_a_replica_that_validated_nothing_is_left_out():
    merged = row(note(1.0, 1, score=None), note(1.0, 1, score=[3.0, 0, 0, 2]))

    assert merged["val_loss"] == 1.5
    assert "val_accuracy" not in merged


def test_what_departed_replicas_had_finished_was_trained_on():
    left = EpochReport(totals=EpochTotals(dropped=8))

    work = {"train": EpochTotals(32.0, 32).to_wire()}
    assert row(left, departed(work))["examples"] == 32
    with pytest.raises(DataError, match="drop_last=True left out 8 examples"):
        row(left)


def test_what_departed_replicas_had_finished_counts():
    totals = [
        EpochTotals(loss_sum, 5, skipped=2, logs={"kl": (loss_sum / 2, 5)})
        for loss_sum in (20.0, 10.0)
    ]
    gone = [departed({"train": total.to_wire()}) for total in totals]
    epoch_row = row(note(30.0, 10), *gone)

    assert (epoch_row["examples"], epoch_row["loss"], epoch_row["replicas"]) == (
        20,
        3.0,
        1,
    )
    assert (epoch_row["skipped_examples"], epoch_row["kl"]) == (4, 1.5)


def test_early_stopping_and_the_history_see_the_same_loss():
    gone = departed({"train": EpochTotals(20.0, 5).to_wire()})
    plan = EvaluationPlan(9, stopping=EarlyStopping("loss"))
    reports = [note(30.0, 10), gone]

    assert plan.decide(3, reports).score == row(*reports)["loss"] == 50 / 15


def test_what_departed_replicas_had_scored_counts():
    scored = {"score": [9.0, 1, 2, 2, 0.0, {}], "unscored": "", "measured": b""}
    gone = departed({"validation": scored})

    epoch_row = row(note(1.0, 1, score=[3.0, 1, 2, 2]), gone)

    assert (epoch_row["val_loss"], epoch_row["val_accuracy"]) == (3.0, 0.5)


def test_metrics_that_a_departed_replica_had_measured_are_kept():
    score = [9.0, 1, 2, 2, 0.0, {}]
    scored = {"score": score, "unscored": "no label", "measured": b"packed"}

    gone = departed({"validation": scored})

    assert (gone.unscored, gone.measured) == ("no label", b"packed")


def test_scores_that_were_not_computed_are_not_a_number():
    epoch_row = row(note(1.0, 1), columns=("val_loss", "val_accuracy"))

    assert list(epoch_row)[-2:] == ["val_loss", "val_accuracy"]
    assert math.isnan(epoch_row["val_loss"])
    assert math.isnan(epoch_row["val_accuracy"])


def test_scores_that_were_computed_are_in_their_columns():
    reports = [note(1.0, 1, score=[3.0, 1, 2, 2])]

    epoch_row = row(*reports, columns=("val_loss", "val_accuracy"))

    assert (epoch_row["val_loss"], epoch_row["val_accuracy"]) == (1.5, 0.5)


def test_a_report_arrives_as_it_was_sent():
    totals = EpochTotals(1.5, 2, 3.0, 4, "no rows", 5)
    best = BestScore(1, 2.0, 3, 4.0)
    report = note(1.0, 1, score=[3.0, 1, 2, 2])
    sent = dataclasses.replace(
        report,
        totals=totals,
        best=best,
        schedule=b"s",
        checkpoint={"written": 3},
    )

    received = EpochReport.from_wire(sent.to_wire())

    assert received == sent


def test_each_row_has_the_time_since_the_one_before():
    log = RowLog(10, (), now=iter((10.0, 15.0, 17.0)).__next__)

    for epoch in (0, 1):
        log.end_epoch(epoch, TWO, NOTHING)

    assert [row["seconds"] for row in log.rows] == [5.0, 2.0]


def test_rows_of_before_stay_and_are_not_changed():
    before = [{"epoch": 0}]
    log = RowLog(10, (), before, now=iter((10.0, 11.0)).__next__)

    log.end_epoch(1, TWO, NOTHING)

    assert [row["epoch"] for row in log.rows] == [0, 1]
    assert before == [{"epoch": 0}]


def test_examples_that_the_source_has_left_out_are_counted_too():
    log = RowLog(10, (), now=iter((10.0, 11.0)).__next__, left_out=4)

    assert log.end_epoch(0, TWO, NOTHING)["skipped_examples"] == 4 + 5 + 3
