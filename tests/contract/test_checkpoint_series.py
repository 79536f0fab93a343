"""Checkpoints in a folder: which are complete, the newest, and removed."""

import logging
import math
from pathlib import Path

import pytest
import torch

from daskdl import Checkpoint
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError, SaveError
from daskdl.saving.checkpoints import (
    COMMON,
    CheckpointPlan,
    CheckpointStamp,
    Part,
    complete_at,
    of_replica,
)
from daskdl.training.checkpointing import Fingerprint, ResumePlan, start_state
from daskdl.training.epoch_control import StoppingDecision
from daskdl.training.state import UNSHARED
from tests.support.problems import rows, trainer


def write_part(part, stamp, header, state):
    part.write(part.copied(stamp, header, state))


def put(series, number, members=(0, 1), origin="fit", run="run", **header):
    """Write a whole checkpoint.

    Args:
        said: Of the common part, in place of what is said otherwise.
    """
    stamp, folder = CheckpointStamp(origin, run, number), series.folder(number)
    for replica in members:
        put_part(series, stamp, replica)
    header = {"members": list(members), "count": number, "rows": [], **header}
    write_part(Part(folder, COMMON), stamp, header, {"shared": torch.zeros(2)})
    return stamp


def put_part(series, stamp, replica):
    state = {"own": torch.full((2,), float(replica))}
    part = Part(series.folder(stamp.number), of_replica(replica))
    write_part(part, stamp, {}, state)


def damaged(store, name):
    """Flip a bit in the middle of a file."""
    content = bytearray(store.read(name))
    content[len(content) // 2] ^= 1
    store.write(name, bytes(content))


NAN, INF = math.nan, math.inf


def plan_of(series, keep_last=1, **options):
    rule = Checkpoint(series.store.url, keep_last=keep_last, **options)
    return CheckpointPlan(series, rule, "fit", "run", 1)


def resuming(store, stamp, members):
    made_of = Fingerprint({}, "", None)
    return ResumePlan(
        store,
        stamp,
        members,
        1,
        None,
        [],
        StoppingDecision(),
        0,
        {},
        {},
        1,
        UNSHARED,
        made_of,
    )


class TestNewest:
    def test_the_newest_is_the_complete_one_with_the_highest_number(self, series):
        assert series.newest() is None  # nor is the folder there
        for name in ("checkpoint-12/x", "checkpoint-000013x/x", "checkpoint-000014"):
            series.store.write(name, b"")
        for number in (9, 999_999, 1_000_000):
            put(series, number)

        assert series.numbers() == [9, 999_999, 1_000_000]
        assert series.newest().stamp.number == 1_000_000
        series.folder(1_000_000).delete(["replica-1.json"])
        assert series.newest().stamp.number == 999_999

    def test_parts_of_two_checkpoints_are_not_one(self, series):
        put(series, 1)
        put(series, 2)
        put_part(series, CheckpointStamp("fit", "another run", 2), 1)

        assert series.newest().stamp.number == 1

    def test_a_fit_does_not_go_on_from_another_one(self, series):
        put(series, 1, origin="another fit")

        assert plan_of(series).newest() is None
        put(series, 2)
        assert plan_of(series).newest().stamp.number == 2

    @pytest.mark.parametrize("members", [[0, 0], [1, 0], []], ids=str)
    def test_each_replica_is_listed_once_and_in_order(self, series, members):
        put(series, 1, members)

        with pytest.raises(SaveError, match="damaged: its replicas are"):
            series.newest()

    def test_a_run_without_a_checkpoint_ends_with_an_error(self, series):
        put(series, 1, run="an earlier run")
        plan = plan_of(series)

        with pytest.raises(SaveError, match="has no complete checkpoint of this fit"):
            plan.conclude()
        put(series, 2)
        plan.conclude()

    def test_an_older_one_does_not_replace_a_damaged_one(self, series):
        put(series, 1)
        put(series, 2)
        damaged(series.folder(2), "common.json")

        with pytest.raises(SaveError, match="checkpoint-000002"):
            series.newest()
        assert complete_at(series.folder(1)) is not None

    @pytest.mark.parametrize(
        ("method", "verb"), [("folders", "list"), ("exists", "read")]
    )
    def test_a_store_that_cannot_be_read_is_an_error(
        self, series, monkeypatch, method, verb
    ):
        def fails(*_):
            raise DataError("no permission")

        put(series, 1)
        monkeypatch.setattr(Store, method, fails)

        with pytest.raises(SaveError, match=f"cannot {verb} .*: no permission"):
            series.newest()


class TestPrune:
    def test_keep_every_counts_within_the_fit(self, series):
        for number in range(11, 16):
            put(series, number, count=number - 10)

        plan_of(series, keep_every=3).prune()

        assert series.numbers() == [13, 15]

    def test_checkpoints_of_other_fits_and_unfinished_ones_stay(self, series):
        for number in (1, 2):
            put(series, number, origin="another fit")
        put_part(series, CheckpointStamp("fit", "run", 3), 0)  # broken off
        for number in (4, 5):
            put(series, number)
        put_part(series, CheckpointStamp("fit", "run", 6), 1)

        plan_of(series).prune()

        assert series.numbers() == [1, 2, 5, 6]
        assert not [name for name in series.store.names() if "000003" in name]

    def test_a_damaged_checkpoint_stays(self, series, caplog):
        for number in (1, 2):
            put(series, number)
        damaged(series.folder(1), "common.json")

        with caplog.at_level(logging.WARNING):
            plan_of(series).prune()

        assert series.numbers() == [1, 2]
        assert "a damaged checkpoint is not deleted" in caplog.text

    def test_the_common_part_is_deleted_first(self, series, monkeypatch):
        for number in (1, 2):
            put(series, number)

        def dies(self):
            raise DataError("gone away")

        monkeypatch.setattr(Store, "delete_all", dies)

        with pytest.raises(SaveError, match=r"cannot delete .*000001: gone away"):
            plan_of(series).prune()
        assert complete_at(series.folder(1)) is None
        assert series.folder(1).exists("replica-0.json")


@pytest.mark.parametrize(
    ("options", "losses", "kept"),
    [
        ({"keep_last": None}, [3, 1, 2, 1, 4], [1, 2, 3, 4, 5]),
        ({"keep_last": 2}, [3, 1, 2, 1, 4], [4, 5]),
        ({"keep_last": 9}, [3, 1, 2, 1, 4], [1, 2, 3, 4, 5]),
        ({"keep_last": 1, "keep_best": "loss"}, [3, 1, 2, 1, 4], [2, 5]),
        ({"keep_last": 1, "keep_best": "loss", "mode": "max"}, [4, 1, 2], [1, 3]),
        ({"keep_last": 1, "keep_every": 3}, [3, 1, 2, 1], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [NAN, 3, 2, 5], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [-INF, 3, 2, 5], [3, 4]),
        ({"keep_last": 1, "keep_best": "loss"}, [INF, NAN], [2]),
        ({"keep_last": 1, "keep_best": "loss"}, [], []),
    ],
    ids=repr,
)  # fmt: skip
def test_kept_checkpoints(in_memory, options, losses, kept):
    for number, loss in enumerate(losses, 1):
        put(in_memory, number, rows=[{"loss": loss}])

    plan_of(in_memory, **options).prune()

    assert in_memory.numbers() == kept


@pytest.mark.parametrize(
    ("keep_best", "best"), [("val_loss", 2), ("val_accuracy", 3), ("loss", 1)]
)
def test_the_best_is_determined_by_the_last_row(in_memory, keep_best, best):
    rows = [{"loss": 0.0, "val_loss": -9.0, "val_accuracy": 9.0}]  # of an epoch before
    scores = {1: (1.0, 2.0, 0.25), 2: (2.0, 1.0, 0.5), 3: (3.0, 3.0, 0.75)}
    for number, values in scores.items():
        row = dict(zip(("loss", "val_loss", "val_accuracy"), values, strict=True))
        put(in_memory, number, rows=[*rows, row])
    put(in_memory, 4, rows=[*rows, {"loss": 9.0}])  # it was not scored

    plan_of(in_memory, keep_last=1, keep_best=keep_best).prune()

    assert in_memory.numbers() == [best, 4]


class TestParts:
    """What each initial replica of a resumed fit reads."""

    def parts(self, in_memory, members, founders):
        """Which parts each founder takes, and whose optimizer."""
        stamp = put(in_memory, 1, members=members)
        plan = resuming(in_memory.folder(1), stamp, members)
        for place in range(founders):
            start = start_state(plan, place, founders)
            taken = [int(part.values["own"][0]) for part in start.parts]
            yield taken, int(start.donor.values["own"][0])

    @pytest.mark.parametrize(
        ("members", "founders", "expected"),
        [
            ([0, 1, 2], 3, [([0], 0), ([1], 1), ([2], 2)]),
            ([1, 4], 2, [([1], 1), ([4], 4)]),  # others were lost
            ([0, 1, 2, 3, 4], 2, [([0, 2, 4], 0), ([1, 3], 1)]),
            ([0, 1, 2], 1, [([0, 1, 2], 0)]),
            ([0, 1], 5, [([0], 0), ([1], 1), ([], 0), ([], 1), ([], 0)]),
        ],
        ids=["as many", "as many of other numbers", "fewer", "one", "more"],
    )
    def test_each_part_is_taken_once(self, in_memory, members, founders, expected):
        assert list(self.parts(in_memory, members, founders)) == expected

    def test_a_part_of_another_checkpoint_is_refused(self, in_memory):
        stamp = put(in_memory, 1)
        plan = resuming(in_memory.folder(1), stamp, [0, 1])
        put_part(in_memory, CheckpointStamp("fit", "another run", 1), 1)

        start_state(plan, 0, 2)
        with pytest.raises(
            SaveError, match=r"replica-1.json belongs to another checkpoint"
        ):
            start_state(plan, 1, 2)


# ---- the callback `Checkpoint`: what it takes, and when one is due


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, r"url must be the URL or path of a folder, got ''"),
        ({"url": b"x"}, r"url must be .* got b'x'"),
        ({"every": 0}, r"every must be .* >= 1.*got 0"),
        ({"every": "step"}, r"every must be .*got 'step'"),
        ({"keep_last": 0}, r"keep_last must be a whole number >= 1 or None, got 0"),
        ({"keep_last": True}, r"keep_last must be .* got True"),
        ({"keep_every": "2"}, r"keep_every must be .* got '2'"),
        ({"keep_best": "kl"}, "mode must be 'min' or 'max' with keep_best='kl'"),
        ({"keep_best": []}, r"keep_best must be the name of a column .* got \[\]"),
        ({"mode": "max"}, "mode='max' has no effect without keep_best; leave it out"),
        ({"storage_options": "password"}, r"must be a dict.* got a str$"),
    ],
    ids=repr,
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Checkpoint(**{"url": "memory://x", **options})


def test_a_path_becomes_text_so_that_a_trainer_with_it_can_be_saved():
    assert Checkpoint(Path("x")) == Checkpoint("x")


@pytest.mark.parametrize(
    ("callbacks", "resume", "message"),
    [
        ([Checkpoint("memory://x")] * 2, None, "at most one Checkpoint"),
        ([], True, "resume=True needs a Checkpoint among"),
        ([], 3, "must be the URL or path"),
        ([], b"x", "must be the URL or path"),
    ],
    ids=str,
)
def test_invalid_options_of_a_fit_are_refused(callbacks, resume, message):
    with pytest.raises(OptionError, match=message):
        trainer(False, callbacks=callbacks).fit(*rows(16), resume=resume)


def test_storage_options_are_neither_shown_nor_saved(tmp_path):
    rule = Checkpoint(tmp_path / "own", storage_options={"auto_mkdir": True})
    fitted = trainer(False, callbacks=[rule])
    fitted.fit(*rows())
    fitted.save(tmp_path / "save")

    texts = [path.read_text() for path in tmp_path.rglob("*.json")]

    assert len(texts) >= 3
    assert "auto_mkdir" not in f"{rule} {texts}"
