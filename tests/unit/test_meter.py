"""Metrics at work on a part: rows of several batches together, and what goes wrong."""

import logging
from typing import ClassVar

import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torchmetrics import MeanSquaredError, R2Score
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassROC,
)

from daskdl.errors import DataError, ModelError
from daskdl.evaluation import metric_state
from daskdl.evaluation.metric_sets import metric_sets
from daskdl.evaluation.metric_state import Meter, computed, measure_of
from daskdl.metrics import ClassificationMetrics
from tests.support.metric_parts import classes, random, shown_of

ROWS = 101
LABELS = classes(0, ROWS, 3)
SCORES = random(1, ROWS, 3)


def measure(metrics, output=SCORES, y=LABELS, **facts):
    (own,) = metric_sets(metrics)
    return measure_of(own, shown_of(output, y, **facts))


def measured(one, output, y, batch_size=10, part=0):
    """What a part comes to, which is told batch by batch."""
    own = Meter([one], f"part {part}")
    for rows in torch.arange(len(y)).split(batch_size):
        own.add(output[rows], y[rows])
    (states,) = own.states(part)
    return states


class Watched(MeanSquaredError):
    """Says how many rows came at each update."""

    updates: ClassVar = []

    def update(self, preds, target):
        self.updates.append(preds.shape)
        super().update(preds, target)


@pytest.fixture
def updates(monkeypatch):
    monkeypatch.setattr(Watched, "updates", [])
    return Watched.updates


class TestUpdates:
    def test_batches_wait_for_each_other(self, updates, monkeypatch):
        monkeypatch.setattr(metric_state, "GATHERED_ROWS", 32)
        one = measure(Watched(), SCORES, SCORES)
        updates.clear()  # of the rehearsal

        measured(one, SCORES, SCORES)

        assert [rows for rows, _ in updates] == [40, 40, 21]

    def test_large_rows_wait_for_fewer(self, updates, monkeypatch):
        monkeypatch.setattr(
            metric_state, "GATHERED_BYTES", 20 * 2 * 3 * 4
        )  # both, of 20 rows
        one = measure(Watched(), SCORES, SCORES)
        updates.clear()

        measured(one, SCORES, SCORES)

        assert [rows for rows, _ in updates] == [20] * 5 + [1]

    def test_rows_of_another_shape_do_not_come_together(self, updates):
        one = measure(Watched(), SCORES, SCORES)
        updates.clear()
        own = Meter([one], "part 0")

        for length in (2, 2, 3, 2):
            own.add(SCORES[:5, :length], SCORES[:5, :length] + 1)
        (states,) = own.states(0)

        assert updates == [(10, 2), (5, 3), (5, 2)]
        assert computed(one, states) == {"Watched": 1.0}

    def test_short_floats_are_told_as_long_ones(self):
        seen = []

        class Dtypes(MeanSquaredError):
            def update(self, preds, target):
                seen.append(preds.dtype)
                super().update(preds, target)

        one = measure(Dtypes(), SCORES, SCORES)
        seen.clear()

        measured(one, SCORES.bfloat16(), SCORES)

        assert seen == [torch.float32]


class TestWhereRowsAreCut:
    """Torchmetrics takes scores for logits if one of those at hand is not in [0, 1]."""

    # Logits that are probabilities by their looks, but for one.
    SCORES = torch.tensor([0.1, 0.2, 0.4, 0.6, 3.0, 0.3, 0.2, 0.1])
    LABELS = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])

    def test_it_makes_a_difference_to_torchmetrics(self):
        together, apart = BinaryAccuracy(), BinaryAccuracy()

        together.update(self.SCORES, self.LABELS)
        for rows in torch.arange(8).split(2):
            apart.update(self.SCORES[rows], self.LABELS[rows])

        assert together.compute() != apart.compute()

    @pytest.mark.parametrize("batch_size", [1, 2, 8])
    @pytest.mark.parametrize("gathered", [1, 4096])
    def test_it_makes_none_here(self, batch_size, gathered, monkeypatch):
        monkeypatch.setattr(metric_state, "GATHERED_ROWS", gathered)
        one = measure(BinaryAccuracy(), self.SCORES, self.LABELS)

        told = computed(one, measured(one, self.SCORES, self.LABELS, batch_size))

        assert told == {"BinaryAccuracy": 5 / 8}  # every logit is above 0

    def test_logarithms_that_rounding_took_above_0_are_no_logits(self):
        output = torch.tensor([[1e-7, -20.0], [-0.7, -0.7]])
        kept = {"kept": KeptScores(2)}
        one = measure(kept, output, LABELS[:2], scale="log_probabilities")

        told = computed(one, measured(one, output, LABELS[:2]))["kept"]

        assert told.max() == 1.0
        assert told.min() < 1e-8  # a softmax of probabilities would be 0.27


class KeptScores(MulticlassAccuracy):
    """Gives back what it got."""

    def __init__(self, classes):
        super().__init__(classes)
        self.add_state("got", [], dist_reduce_fx="cat")

    def update(self, preds, target):
        super().update(preds, target)
        self.got.append(preds)

    def compute(self):
        return self.got if isinstance(self.got, torch.Tensor) else torch.cat(self.got)


def test_metrics_of_ones_own_are_scikit_learns():
    one = measure({"top": MulticlassAccuracy(3, average="micro")})

    states = measured(one, SCORES[:30], LABELS[:30], part=0)
    states += measured(one, SCORES[30:], LABELS[30:], part=1)

    expected = sklearn_metrics.accuracy_score(LABELS, SCORES.argmax(1))
    assert computed(one, states) == {"top": pytest.approx(expected)}


def test_outputs_that_are_classes_are_left_as_they_are():
    chosen = SCORES.argmax(1)
    one = measure({"top": MulticlassAccuracy(3, average="micro")}, chosen)

    told = computed(one, measured(one, chosen, LABELS))

    assert told["top"] == pytest.approx((chosen == LABELS).double().mean().item())


class TestTrouble:
    def test_what_does_not_fit_is_seen_on_two_rows(self):
        with pytest.raises(ModelError, match=r"failed on 2 rows, .*\(2, 3\) .*float32"):
            measure(MeanSquaredError(), SCORES, LABELS)

    def test_a_preset_says_what_it_needs(self):
        with pytest.raises(ModelError, match="outputs must be one score per class"):
            measure(ClassificationMetrics(), SCORES[:, 0], LABELS)

    def test_rows_that_a_metric_refuses_are_named(self):
        wrong = LABELS.clone()
        wrong[57] = 3
        one = measure(MulticlassAccuracy(3))

        with pytest.raises(DataError, match=r"on rows 0 to 100 of part 0: .* \[?3\]?"):
            measured(one, SCORES, wrong)

    @pytest.mark.parametrize(
        "metrics", ["classification", MulticlassAccuracy(3)], ids=["preset", "own"]
    )
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_scores_that_are_no_numbers_are_an_error_that_says_where(
        self, metrics, bad, monkeypatch
    ):
        monkeypatch.setattr(metric_state, "GATHERED_ROWS", 50)
        scores = SCORES.clone()
        scores[[60, 61], [0, 2]] = bad
        one = measure(metrics)

        with pytest.raises(ModelError, match="2 of 50 outputs are NaN") as caught:
            measured(one, scores, LABELS, part=4)

        assert caught.value.__notes__ == ["in rows 50 to 99 of part 4"]

    def test_of_numbers_nan_is_what_comes_out(self):
        wrong = SCORES.clone()
        wrong[3] = float("nan")
        one = measure(MeanSquaredError(), SCORES, SCORES)

        told = computed(one, measured(one, wrong, SCORES))

        assert str(told) == "{'MeanSquaredError': nan}"

    def test_what_cannot_be_computed_is_said(self):
        one = measure(R2Score(), SCORES[:, 0], SCORES[:, 0])

        with pytest.raises(DataError, match=r"could not be computed .* two samples"):
            computed(one, measured(one, SCORES[:1, 0], SCORES[:1, 0]))

    def test_warnings_go_to_the_log(self, caplog):
        caplog.set_level(logging.INFO, metric_state.__name__)
        one = measure(MulticlassAUROC(3))
        only = torch.zeros(5, dtype=torch.int64)

        computed(one, measured(one, SCORES[:5], only))

        assert any("positive samples in targets" in m for m in caplog.messages)


def test_values_are_numbers_and_arrays():
    one = measure({"roc": MulticlassROC(3, thresholds=4), "s": MulticlassAccuracy(3)})

    told = computed(one, measured(one, SCORES, LABELS))

    assert list(told) == ["roc", "s"]
    assert [type(each).__name__ for each in told["roc"]] == ["ndarray"] * 3
    assert type(told["s"]) is float


def test_a_part_without_rows_has_no_states():
    one = measure(MeanSquaredError(), SCORES, SCORES)

    (states,) = Meter([one], "part 0").states(0)

    assert states.metrics == {}
