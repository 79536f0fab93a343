"""The callback `Checkpoint`: what it takes, and when one is due."""

from pathlib import Path

import pytest

from daskdl import Checkpoint
from daskdl.errors import OptionError
from tests.support.problems import rows, trainer


@pytest.mark.parametrize(
    ("every", "due"), [("epoch", [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3])]
)
def test_it_is_due_at_the_end_of_each_so_many_th_epoch(every, due):
    rule = Checkpoint("memory://x", every)

    assert [epoch for epoch in range(5) if rule.due(epoch)] == due


def test_it_needs_no_workers():
    assert not Checkpoint("memory://x").runs_on_workers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, r"url must be a URL or a path of a folder, got ''"),
        ({"url": None}, r"url must be .* got None"),
        ({"url": 3}, r"url must be .* got 3"),
        ({"url": b"x"}, r"url must be .* got b'x'"),
        ({"every": 0}, r"every must be .* >= 1.*got 0"),
        ({"every": True}, r"every must be .*got True"),
        ({"every": "step"}, r"every must be .*got 'step'"),
        ({"every": None}, r"every must be .*got None"),
        ({"keep_last": 0}, r"keep_last must be a whole number >= 1 or None, got 0"),
        ({"keep_last": True}, r"keep_last must be .* got True"),
        ({"keep_last": 1.0}, r"keep_last must be .* got 1.0"),
        ({"keep_every": 0}, r"keep_every must be .* >= 1 or None, got 0"),
        ({"keep_every": "2"}, r"keep_every must be .* got '2'"),
        (
            {"keep_best": "accuracy"},
            r"keep_best must be one of .*'val_loss'.* or None, got 'accuracy'",
        ),
        ({"keep_best": True}, r"keep_best must be one of .* got True"),
        ({"keep_best": []}, r"keep_best must be one of .* got \[\]"),
    ],
    ids=repr,
)
def test_what_is_not_allowed_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Checkpoint(**{"url": "memory://x", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": None},
        {"keep_last": 1, "keep_every": 1, "keep_best": "loss"},
        {"keep_best": "val_accuracy"},
    ],
    ids=repr,
)
def test_what_is_allowed_is_kept_as_it_is(options):
    rule = Checkpoint(**{"url": "memory://x", **options})

    assert {name: getattr(rule, name) for name in options} == options


def test_a_path_becomes_text_so_that_a_trainer_with_it_can_be_saved():
    assert Checkpoint(Path("x")) == Checkpoint("x")


@pytest.mark.parametrize(
    ("callbacks", "resume", "message"),
    [
        ([Checkpoint("memory://x")] * 2, None, "at most one Checkpoint"),
        ([], True, "resume=True needs a Checkpoint among"),
        ([], 3, "must be a URL or a path"),
        ([], b"x", "must be a URL or a path"),
    ],
    ids=str,
)
def test_what_a_fit_cannot_write_or_resume_is_refused(callbacks, resume, message):
    with pytest.raises(OptionError, match=message):
        trainer(False, callbacks=callbacks).fit(*rows(16), resume=resume)


def test_options_of_the_storage_are_neither_shown_nor_saved(tmp_path):
    rule = Checkpoint(tmp_path / "own", storage_options={"auto_mkdir": True})
    own = trainer(False, callbacks=[rule])
    own.fit(*rows())
    own.save(tmp_path / "save")

    texts = [path.read_text() for path in tmp_path.rglob("*.json")]

    assert len(texts) >= 3
    assert "auto_mkdir" not in f"{rule} {texts}"


def test_options_of_the_storage_that_are_no_mapping_are_refused_and_not_shown():
    with pytest.raises(
        OptionError, match=r"storage_options must be a dict.* got a str"
    ):
        Checkpoint("s3://bucket/x", storage_options="password")
