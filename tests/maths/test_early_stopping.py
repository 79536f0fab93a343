"""Early stopping and the epochs with an evaluation, from reports alone."""

import itertools
import math
import re

import pytest

from daskdl.callbacks import Checkpoint, EarlyStopping, Evaluate
from daskdl.errors import OptionError
from daskdl.evaluation.evaluate import Score
from daskdl.training.base import ExchangeStats
from daskdl.training.epoch_control import EvaluationPlan, StoppingDecision
from daskdl.training.telemetry import BestScore, EpochReport, EpochTotals

NAN, INF = math.nan, math.inf
NO_TIME = itertools.repeat(0.0)


def report(best, loss=1.0, score=None, elapsed_s=0.0, examples=10):
    return EpochReport(
        totals=EpochTotals(loss * examples, examples),
        score=score and Score(*score),
        best=best,
        elapsed_s=elapsed_s,
    )


def trained(losses, *, seconds=NO_TIME, epochs=99, monitor="loss", **rule):
    """Return the decisions for these training losses, until one ends the fit."""
    plan = EvaluationPlan(epochs, stopping=EarlyStopping(monitor, **rule))
    decisions = [StoppingDecision()]
    for epoch, (loss, elapsed_s) in enumerate(zip(losses, seconds, strict=False)):
        latest = report(decisions[-1].best, loss, elapsed_s=elapsed_s)
        decisions.append(plan.decide(epoch, [latest]))
        if decisions[-1].reason is not None:
            break
    return decisions[1:]


@pytest.mark.parametrize(
    ("rule", "losses", "epochs", "reason"),
    [
        ({"patience": 1}, [3.0, 2.0, 2.0], 3, "patience"),
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0], 4, "patience"),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.0, 1.5, 1.5], 6, "patience"),
        # Small improvements are the best and add up, but do not count by themselves.
        ({"patience": 2, "min_delta": 0.25}, [1.0, 0.875, 0.8125], 3, "patience"),
        (
            {"patience": 2, "min_delta": 0.25},
            [1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5],
            7,
            "patience",
        ),
        # Patience counts epochs, and ends when the score is looked at.
        ({"patience": 1, "every": 2}, [1.0] * 9, 4, "patience"),
        ({"patience": 3, "every": 2}, [1.0] * 9, 6, "patience"),
        ({"patience": 1, "every": 3}, [1.0] * 9, 6, "patience"),
        ({"target": 0.5}, [1.0, 0.6, 0.5, 0.1], 3, "target"),
        ({"patience": 9}, [1.0, NAN], 2, "not_finite"),
        ({"patience": 9}, [1.0, -INF], 2, "not_finite"),
        # Unchecked, it is no improvement.
        (
            {"patience": 2, "target": 0.0, "check_finite": False},
            [-INF, 1.0, NAN, INF, 0.5],
            4,
            "patience",
        ),
    ],
)
def test_a_fit_ends_for_a_reason_after_a_number_of_epochs(rule, losses, epochs, reason):
    decisions = trained([*losses, 9.0], **rule)

    assert len(decisions) == epochs
    assert decisions[-1].reason == reason


@pytest.mark.parametrize(
    ("decisions", "details"),
    [
        (
            trained([2.0, 1.0, 1.5, 1.25], patience=2),
            "loss has not improved for 2 epochs: it is 1.25, the best was 1 in epoch 1",
        ),
        (
            trained([NAN, INF, 1.0], patience=2, check_finite=False),
            "loss has not been finite for 2 epochs: it is inf",
        ),
        (
            trained([1.0] * 9, seconds=[30.0, 59.9, 60.0], max_seconds=60.0, every=4),
            "60.0 s have passed, max_seconds is 60",
        ),
    ],
)
def test_the_details_explain_the_reason(decisions, details):
    assert decisions[-1].details == details


def test_a_best_below_min_delta_is_kept():
    *_, last = trained([1.0, 0.875, 0.8125], patience=2, min_delta=0.25)

    assert last.best == BestScore(2, 0.8125, 0, 1.0)


def test_the_last_epoch_is_scored_and_gives_no_reason():
    *_, last = trained([1.0, 0.5, 0.25], patience=1, target=0.5, every=5, epochs=3)

    assert (last.reason, last.details, last.score) == (None, "", 0.25)
    assert last.best.best_epoch == 2


def test_the_longest_elapsed_time_of_a_replica_counts():
    plan = EvaluationPlan(9, stopping=EarlyStopping("loss", max_seconds=60))
    reports = [report(BestScore(), elapsed_s=s) for s in (10.0, 61.0, 20.0)]

    assert plan.decide(0, reports).reason == "max_seconds"


@pytest.mark.parametrize(
    ("monitor", "expected"), [("val_loss", 2.0), ("val_accuracy", 0.75)]
)
def test_the_score_covers_the_shares_of_all_replicas(monitor, expected):
    plan = EvaluationPlan(9, True, True, stopping=EarlyStopping(monitor, patience=1))
    # Sums of the losses, right labels, labels and examples.
    reports = [report(BestScore(), score=s) for s in ([8.0, 2, 3, 3], [0.0, 1, 1, 1])]

    assert plan.decide(0, reports).score == expected


@pytest.mark.parametrize(
    ("callbacks", "epochs"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6]),
        ([Evaluate(every=3)], [2, 5, 6]),
        ([EarlyStopping(patience=1, every=4)], [3, 6]),
        ([EarlyStopping("loss", patience=1, every=4)], [0, 1, 2, 3, 4, 5, 6]),
        ([EarlyStopping("loss", patience=1), Evaluate(every=3)], [2, 5, 6]),
        ([EarlyStopping(patience=1, every=2), Evaluate(every=3)], [1, 2, 3, 5, 6]),
    ],
    ids=str,
)
def test_only_epochs_that_need_it_are_scored(callbacks, epochs):
    plan = EvaluationPlan.of(callbacks, 7, validates=True)

    assert [epoch for epoch in range(7) if plan.scored(epoch)] == epochs
    assert not any(map(EvaluationPlan(7).scored, range(7)))  # without validation data


@pytest.mark.parametrize(
    ("callbacks", "validates", "accuracy", "message"),
    [
        ([Evaluate(2)], False, None,
         "Evaluate(every=2) needs validation data, got none; give fit(validation=...)"),
        ([EarlyStopping(patience=1)], False, None,
         "monitor='val_loss' needs validation data, got none; give "
         "fit(validation=...), or monitor='loss'"),
        ([EarlyStopping("val_accuracy", patience=1)], True, False,
         "monitor='val_accuracy' needs labels that are class indices and one output "
         "for each class"),
        ([EarlyStopping("seconds", mode="min")], True, None,
         "monitor must be one of 'loss', 'val_loss' or another column of the history, "
         "got 'seconds'; replicas do not agree on this column"),
        ([EarlyStopping("val_kl", mode="min")], True, True,
         "monitor must be one of 'loss', 'val_loss', 'val_accuracy' or another column "
         "of the history, got 'val_kl'; to log it, a step returns loss, {'kl': ...}"),
        ([Checkpoint("a", keep_best="kl", mode="min")], True, True,
         "keep_best must be one of 'loss', "),
        ([EarlyStopping(patience=1), EarlyStopping("loss", target=1.0)], True, True,
         "callbacks must have at most one EarlyStopping, got [EarlyStopping("),
    ],
    ids=["evaluate", "val_loss", "val_accuracy", "clock", "log", "best", "stoppings"],
)  # fmt: skip
def test_a_rule_without_its_scores_is_refused(callbacks, validates, accuracy, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        EvaluationPlan.of(
            callbacks, 9, validates=validates, accuracy=accuracy, logs=accuracy and ()
        )


@pytest.mark.parametrize(
    ("monitor", "expected"), [("kl", 1.75), ("val_kl", 0.5), ("density", 0.25)]
)
def test_logs_and_other_columns_are_scores(monitor, expected):
    stopping = EarlyStopping(monitor, mode="min", patience=1)
    plan = EvaluationPlan(9, True, False, ("kl",), stopping=stopping)
    reports = [
        EpochReport(
            totals=EpochTotals(1.0, 1, logs=logs),
            score=Score(1.0, 0, 0, 1, logs={"kl": (0.5, 1)}),
            exchange=ExchangeStats(exchanges=2, density_sum=density),
        )
        for logs, density in (({"kl": (6.0, 3)}, 0.75), ({"kl": (1.0, 1)}, 0.25))
    ]

    assert plan.decide(0, reports).score == expected
    assert plan.columns == ("val_loss", "val_kl")
