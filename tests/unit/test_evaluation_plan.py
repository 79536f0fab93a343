"""When a fit ends, and in which epochs the model is scored, from notes alone."""

import itertools
import math
import re

import pytest

from daskdl import Callback
from daskdl.callbacks import EarlyStopping, Evaluate
from daskdl.errors import OptionError
from daskdl.evaluation.evaluate import Score
from daskdl.training.epoch_control import EvaluationPlan, StoppingDecision
from daskdl.training.telemetry import BestScore, EpochReport, EpochTotals

NAN, INF = float("nan"), float("inf")


def note(record, loss=1.0, score=None, elapsed_s=0.0, examples=10):
    return EpochReport(
        totals=EpochTotals(loss * examples, examples),
        score=score and Score(*score),
        best=record,
        elapsed_s=elapsed_s,
    )


NO_TIME = itertools.repeat(0.0)


def trained(rule, losses, *, seconds=NO_TIME, epochs=99):
    """The decisions of epochs with these training losses, until one ends the fit."""
    evaluation, decisions = EvaluationPlan(epochs, stopping=rule), [StoppingDecision()]
    for epoch, (loss, elapsed_s) in enumerate(zip(losses, seconds, strict=False)):
        said = note(decisions[-1].best, loss, elapsed_s=elapsed_s)
        decisions.append(evaluation.decide(epoch, [said]))
        if decisions[-1].reason is not None:
            break
    return decisions[1:]


class TestPatience:
    @pytest.mark.parametrize(
        ("patience", "losses", "ended"),
        [
            (1, [3.0, 2.0, 2.0], 2),
            (2, [3.0, 2.0, 2.5, 2.0, 1.0], 3),
            (2, [3.0, 2.0, 2.5, 1.0, 1.5, 1.5], 5),
            (3, [1.0, 1.0, 1.0, 1.0], 3),
        ],
    )
    def test_it_is_used_up_after_so_many_epochs(self, patience, losses, ended):
        decisions = trained(EarlyStopping("loss", patience=patience), [*losses, 9.0])

        assert len(decisions) == ended + 1
        assert decisions[-1].reason == "patience"

    def test_it_says_how_long_and_since_what(self):
        *_, last = trained(EarlyStopping("loss", patience=2), [2.0, 1.0, 1.5, 1.25])

        assert last.details == (
            "loss has not improved for 2 epochs: it is 1.25, the best was 1 in epoch 1"
        )

    def test_it_does_not_speak_of_a_best_that_was_not(self):
        rule = EarlyStopping("loss", patience=2, check_finite=False)

        *_, last = trained(rule, [NAN, INF, 1.0])

        assert last.details == "loss has not been finite for 2 epochs: it is inf"

    def test_less_than_min_delta_is_the_best_but_does_not_count(self):
        rule = EarlyStopping("loss", patience=2, min_delta=0.25)

        *_, last = trained(rule, [1.0, 0.875, 0.8125])

        assert last.reason == "patience"
        assert last.best == BestScore(2, 0.8125, 0, 1.0)

    def test_small_improvements_add_up(self):
        rule = EarlyStopping("loss", patience=2, min_delta=0.25)

        decisions = trained(rule, [1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5])

        assert len(decisions) == 7

    @pytest.mark.parametrize(
        ("every", "patience", "ended"), [(2, 1, 3), (2, 2, 3), (2, 3, 5), (3, 1, 5)]
    )
    def test_it_counts_epochs_and_ends_when_the_score_is_looked_at(
        self, every, patience, ended
    ):
        rule = EarlyStopping("loss", patience=patience, every=every)

        decisions = trained(rule, [1.0] * 20)

        assert len(decisions) == ended + 1
        infer_metadata = [e for e, v in enumerate(decisions) if v.score is not None]
        assert infer_metadata == list(range(every - 1, ended + 1, every))


class TestOtherReasons:
    def test_a_target_ends_it(self):
        *_, last = trained(EarlyStopping("loss", target=0.5), [1.0, 0.6, 0.5, 0.1])

        assert last[1:] == (0.5, "target", "loss is 0.5, the target 0.5")

    @pytest.mark.parametrize("score", [NAN, INF, -INF])
    def test_a_score_that_is_not_finite_ends_it(self, score):
        first, last = trained(EarlyStopping("loss", patience=9), [1.0, score])

        assert (last.reason, last.details) == ("not_finite", f"loss became {score}")
        assert last.best == first.best

    @pytest.mark.parametrize("score", [NAN, INF, -INF])
    def test_unchecked_it_is_no_improvement(self, score):
        rule = EarlyStopping("loss", patience=2, target=0.0, check_finite=False)

        decisions = trained(rule, [score, 1.0, score, score, 0.5])

        assert len(decisions) == 4
        assert decisions[-1].reason == "patience"
        assert decisions[-1].best.best_epoch == 1

    def test_time_ends_it_in_any_epoch(self):
        rule = EarlyStopping("loss", max_seconds=60.0, every=4)

        decisions = trained(rule, [1.0] * 9, seconds=[30.0, 59.9, 60.0, 70.0])

        assert len(decisions) == 3
        assert decisions[-1][1:] == (
            None,
            "max_seconds",
            "60.0 s have passed, max_seconds is 60",
        )

    def test_the_longest_time_that_a_replica_tells_counts(self):
        evaluation = EvaluationPlan(9, stopping=EarlyStopping("loss", max_seconds=60))
        notes = [note(BestScore(), elapsed_s=s) for s in (10.0, 61.0, 20.0)]

        assert evaluation.decide(0, notes).reason == "max_seconds"

    def test_after_the_last_epoch_there_is_none_but_it_is_looked_at(self):
        rule = EarlyStopping("loss", patience=1, target=0.5, every=5)

        *_, last = trained(rule, [1.0, 0.5, 0.25], epochs=3)

        assert (last.reason, last.details, last.score) == (None, "", 0.25)
        assert last.best.best_epoch == 2

    def test_without_a_rule_there_is_never_one(self):
        assert (
            EvaluationPlan(9).decide(0, [note(BestScore(), NAN)]) == StoppingDecision()
        )


class TestScores:
    def test_the_parts_of_all_replicas_make_the_score(self):
        evaluation = EvaluationPlan(9, True, True, stopping=EarlyStopping(patience=1))
        # Sums of the losses, right labels, labels and examples.
        notes = [note(BestScore(), score=s) for s in ([6.0, 1, 2, 2], [0.0, 1, 1, 1])]

        assert evaluation.decide(0, notes).score == 2.0

    def test_the_accuracy_is_monitored_too(self):
        rule = EarlyStopping("val_accuracy", target=0.75)
        notes = [note(BestScore(), score=s) for s in ([6.0, 2, 3, 3], [0.0, 1, 1, 1])]

        assert (
            EvaluationPlan(9, True, True, stopping=rule).decide(0, notes).score == 0.75
        )


class TestWhenScored:
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
    def test_only_epochs_that_need_it_are(self, callbacks, epochs):
        evaluation = EvaluationPlan.of(callbacks, 7, validates=True)

        assert [epoch for epoch in range(7) if evaluation.scored(epoch)] == epochs

    def test_without_validation_data_none_is(self):
        evaluation = EvaluationPlan.of([Callback()], 7, validates=False)

        assert not any(map(evaluation.scored, range(7)))
        assert evaluation.columns == ()

    @pytest.mark.parametrize(
        ("accuracy", "columns"),
        [(True, ("val_loss", "val_accuracy")), (False, ("val_loss",))],
    )
    def test_a_row_has_a_column_for_each_score(self, accuracy, columns):
        evaluation = EvaluationPlan.of([], 7, validates=True, accuracy=accuracy)

        assert evaluation.columns == columns


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
        ([Evaluate(), Evaluate()], True, True,
         "callbacks must have at most one Evaluate, got [Evaluate(every=1), "),
        ([EarlyStopping(patience=1), EarlyStopping("loss", target=1.0)], True, True,
         "callbacks must have at most one EarlyStopping, got [EarlyStopping("),
    ],
    ids=["evaluate", "val_loss", "val_accuracy", "evaluates", "stoppings"],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused(callbacks, validates, accuracy, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        EvaluationPlan.of(callbacks, 9, validates=validates, accuracy=accuracy)


def test_an_accuracy_that_is_not_known_yet_is_not_refused():
    rule = EarlyStopping("val_accuracy", patience=1)

    evaluation = EvaluationPlan.of([rule], 9, validates=True)

    assert evaluation.stopping is rule
    assert math.isnan(StoppingDecision().best.best_score)
