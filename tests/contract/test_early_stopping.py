"""The rule by which a fit ends early: what it takes for better, and refuses."""

import pickle
import re

import pytest

from daskdl.callbacks import EarlyStopping
from daskdl.errors import OptionError

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"monitor": "val_loss"}, False),
        ({"monitor": "loss"}, False),
        ({"monitor": "val_accuracy"}, True),
        ({"monitor": "val_accuracy", "mode": "min"}, False),
        ({"monitor": "loss", "mode": "max"}, True),
    ],
    ids=str,
)
def test_the_best_is_the_largest_accuracy_and_the_least_loss(options, largest):
    rule = EarlyStopping(patience=1, **options)

    assert rule.largest_is_best is largest
    assert rule.is_better(2.0, than=1.0) is largest
    assert rule.is_better(1.0, than=2.0) is not largest
    assert not rule.is_better(1.0, than=1.0)
    assert rule.is_better(1.0, than=NAN)


@pytest.mark.parametrize(
    ("score", "on", "counts"),
    [(0.75, 1.0, True), (0.875, 1.0, False), (0.5, 1.0, True), (2.0, 1.0, False),
     (1.0, 1.0, False), (5.0, NAN, True)],
    ids=str,
)  # fmt: skip
def test_an_improvement_counts_from_min_delta_on(score, on, counts):
    rule = EarlyStopping(patience=1, min_delta=0.25)

    assert rule.improves(score, on) is counts


@pytest.mark.parametrize(
    ("monitor", "score", "enough"),
    [("loss", 0.5, True), ("loss", 0.4, True), ("loss", 0.6, False),
     ("val_accuracy", 0.5, True), ("val_accuracy", 0.4, False)],
)  # fmt: skip
def test_a_score_that_is_the_target_is_enough(monitor, score, enough):
    assert EarlyStopping(monitor, target=0.5).is_enough(score) is enough


def test_without_a_target_nothing_is_enough():
    assert not EarlyStopping(patience=1).is_enough(-1e9)


def test_it_looks_at_each_so_many_th_epoch():
    rule = EarlyStopping(patience=1, every=3)

    assert [epoch for epoch in range(9) if rule.due(epoch)] == [2, 5, 8]


def test_it_stays_on_the_client_and_travels_as_a_value():
    rule = EarlyStopping("loss", patience=2, target=0.25)

    assert not rule.runs_on_workers
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "val_f1"}, "monitor must be one of 'val_loss', 'val_accuracy', "
         "'loss', got 'val_f1'"),
        ({"mode": "least"}, "mode must be one of 'min', 'max', 'auto', got 'least'"),
        ({"patience": 0}, "patience must be a whole number >= 1 or None, got 0"),
        ({"patience": 1.5}, "patience must be a whole number >= 1 or None, got 1.5"),
        ({"patience": True}, "patience must be a whole number >= 1 or None, got True"),
        ({"min_delta": -1.0}, "min_delta must be a number >= 0, got -1.0"),
        ({"min_delta": NAN}, "min_delta must be a number >= 0, got nan"),
        ({"target": NAN}, "target must be a number or None, got nan"),
        ({"target": "low"}, "target must be a number or None, got 'low'"),
        ({"max_seconds": 0}, "max_seconds must be > 0 or None, got 0"),
        ({"max_seconds": float("inf")}, "max_seconds must be > 0 or None, got inf"),
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"check_finite": 1}, "check_finite must be True or False, got 1"),
        ({"restore_best": None}, "restore_best must be True or False, got None"),
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_is_refused(options, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        EarlyStopping(**{"patience": 3, **options})


def test_by_itself_it_is_patience():
    assert EarlyStopping() == EarlyStopping("val_loss", patience=5)
    assert EarlyStopping(target=0.5).patience is None
    assert EarlyStopping(max_seconds=60).patience is None
