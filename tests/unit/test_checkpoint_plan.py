"""How one run writes checkpoints."""

import math
import pickle

import pytest

from daskdl import Checkpoint
from daskdl.errors import OptionError
from daskdl.saving.checkpoints import CheckpointPlan, Stamp
from daskdl.training.checkpointing import LOOKED_AT, ResumePlan, checkpoints_of
from tests.support.written import put

NAN, INF = math.nan, math.inf
VERDICT = [[-1, float("nan"), -1, float("nan")], None, None, ""]


@pytest.fixture
def series(in_memory):
    return in_memory


def plan_of(series, first=1, **options):
    rule = Checkpoint(series.store.url, **options)
    return CheckpointPlan(rule.url, rule, "fit", "run", first)


def test_numbers_go_on_from_the_first(series):
    plan = plan_of(series, first=5)

    assert [plan.stamp(n) for n in range(2)] == [
        Stamp("fit", "run", 5),
        Stamp("fit", "run", 6),
    ]


@pytest.mark.parametrize(
    ("options", "losses", "kept"),
    [
        ({"keep_last": None}, [3, 1, 2, 1, 4], [1, 2, 3, 4, 5]),
        ({"keep_last": 2}, [3, 1, 2, 1, 4], [4, 5]),
        ({"keep_last": 9}, [3, 1, 2, 1, 4], [1, 2, 3, 4, 5]),
        ({"keep_last": 1, "keep_best": "loss"}, [3, 1, 2, 1, 4], [2, 5]),
        ({"keep_last": 1, "keep_every": 3}, [3, 1, 2, 1], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [NAN, 3, 2, 5], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [-INF, 3, 2, 5], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [INF, NAN], [2]),
        ({"keep_last": 1, "keep_best": "loss"}, [], []),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_kept(series, options, losses, kept):
    for number, loss in enumerate(losses, 1):
        put(series, number, rows=[{"loss": loss}])

    plan_of(series, **options).prune()

    assert series.numbers() == kept


@pytest.mark.parametrize(
    ("keep_best", "best"), [("val_loss", 2), ("val_accuracy", 3), ("loss", 1)]
)
def test_the_best_is_the_one_whose_last_row_is(series, keep_best, best):
    rows = [{"loss": 0.0, "val_loss": -9.0, "val_accuracy": 9.0}]  # of an epoch before
    scores = {1: (1.0, 2.0, 0.25), 2: (2.0, 1.0, 0.5), 3: (3.0, 3.0, 0.75)}
    for number, values in scores.items():
        row = dict(zip(("loss", "val_loss", "val_accuracy"), values, strict=True))
        put(series, number, rows=[*rows, row])
    put(series, 4, rows=[*rows, {"loss": 9.0}])  # it was not scored

    plan_of(series, keep_last=1, keep_best=keep_best).prune()

    assert series.numbers() == [best, 4]


def test_it_travels(series):
    plan = plan_of(series)

    assert pickle.loads(pickle.dumps(plan)) == plan


def saying(**said):
    """What a checkpoint says beside its count and its replicas."""
    made_of = [{"weight": "float32 (2, 3)"}, "SGD of [1] parameters", None]
    kind = {"kind": "alone", "fingerprint": made_of, "stopping": VERDICT}
    return {"epoch": 0, "sync_point": None, "epochs_before": 0, **kind, **said}


def resumption(series, number):
    put(series, number, **saying())
    return ResumePlan.of(series.newest())


def test_a_fit_has_a_new_origin_and_new_numbers(series):
    rule = Checkpoint(series.store.url)
    put(series, 7)
    series.folder(8).write("replica-0.json", b"of one that was broken off")

    plans = [checkpoints_of([rule], None) for _ in range(2)]

    assert [(plan.first, plan.before) for plan in plans] == [(9, 0)] * 2
    assert plans[0].origin == plans[0].run
    assert plans[0].origin not in (plans[1].origin, "fit")


def test_one_that_is_resumed_has_the_origin_of_before(series):
    resumed = resumption(series, 7)

    plan = checkpoints_of([Checkpoint(series.store.url)], resumed)

    assert (plan.origin, plan.first, plan.before) == ("fit", 8, 7)
    assert plan.run not in ("fit", "run")


def test_one_without_a_checkpoint_among_its_callbacks_writes_none():
    assert checkpoints_of([], None) is None


def test_two_of_them_are_refused(series):
    two = [Checkpoint(series.store.url)] * 2

    with pytest.raises(OptionError, match="at most one Checkpoint"):
        checkpoints_of(two, None)


def test_all_that_is_said_is_read(series):
    rows = [{**dict.fromkeys(LOOKED_AT, 1.0), "epoch": epoch} for epoch in (0, 1)]
    put(series, 4, members=[1, 3], **saying(epoch=2, rows=rows, epochs_before=5))

    found = ResumePlan.of(series.newest())

    assert (found.members, found.epoch) == ([1, 3], 2)
    assert (found.count, found.epochs_before, found.rows) == (4, 5, rows)
