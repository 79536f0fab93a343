"""The callback `Checkpoint`: what it takes, and when one is due."""

from pathlib import Path

import pytest

from daskdl import Checkpoint
from daskdl.errors import OptionError
from tests.support.problems import rows, trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, r"url must be a URL or a path of a folder, got ''"),
        ({"url": b"x"}, r"url must be .* got b'x'"),
        ({"every": 0}, r"every must be .* >= 1.*got 0"),
        ({"every": "step"}, r"every must be .*got 'step'"),
        ({"keep_last": 0}, r"keep_last must be a whole number >= 1 or None, got 0"),
        ({"keep_last": True}, r"keep_last must be .* got True"),
        ({"keep_every": "2"}, r"keep_every must be .* got '2'"),
        ({"keep_best": "kl"}, "mode must be 'min' or 'max' with keep_best='kl'"),
        ({"keep_best": []}, r"keep_best must be the name of a column .* got \[\]"),
        ({"mode": "max"}, "mode='max' is for keep_best, got None"),
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
        ([], 3, "must be a URL or a path"),
        ([], b"x", "must be a URL or a path"),
    ],
    ids=str,
)
def test_invalid_options_of_a_fit_are_refused(callbacks, resume, message):
    with pytest.raises(OptionError, match=message):
        trainer(False, callbacks=callbacks).fit(*rows(16), resume=resume)


def test_storage_options_are_neither_shown_nor_saved(tmp_path):
    rule = Checkpoint(tmp_path / "own", storage_options={"auto_mkdir": True})
    own = trainer(False, callbacks=[rule])
    own.fit(*rows())
    own.save(tmp_path / "save")

    texts = [path.read_text() for path in tmp_path.rglob("*.json")]

    assert len(texts) >= 3
    assert "auto_mkdir" not in f"{rule} {texts}"
