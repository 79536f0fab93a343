"""The timeouts: their defaults, and how Dask's configuration changes them."""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace

import dask.config
import pytest

from daskdl import config
from daskdl.config import Timeouts
from daskdl.errors import OptionError

NAMES = [field.name for field in fields(Timeouts)]
DEFAULT = Timeouts(60.0, 30.0, 60.0, 10.0, 300.0, 600.0)


def configured(**values):
    return dask.config.set({f"daskdl.timeouts.{k}": v for k, v in values.items()})


@pytest.mark.parametrize("name", NAMES)
def test_each_bound_has_a_default_and_can_be_configured(name):
    (defaults,) = dask.config.collect_yaml([str(config.FILE)])
    assert defaults["daskdl"]["timeouts"].keys() == set(NAMES)

    with configured(**{name: 7}):
        assert Timeouts.from_config() == replace(DEFAULT, **{name: 7.0})


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30s", 30.0), ("500ms", 0.5), ("2 minutes", 120.0), ("1.5", 1.5), (3, 3.0)],
)
def test_text_may_have_a_unit_and_a_plain_number_is_seconds(value, seconds):
    with configured(silence=value):
        silence = Timeouts.from_config().silence

    assert silence == seconds
    assert type(silence) is float


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, 0, f"daskdl.timeouts.{name} must be > 0 s, got 0") for name in NAMES),
        *(
            ("stop", bad, f"stop must be seconds or text like '30s', got {bad!r}")
            for bad in (-1.0, float("nan"), "soon", "3 bananas", "-5s", [1], None)
        ),
    ],
)
def test_an_invalid_bound_is_refused_by_name(name, value, message):
    with (
        configured(**{name: value}),
        pytest.raises(OptionError, match=re.escape(message)),
    ):
        Timeouts.from_config()


LISTED = ", ".join(
    [f"daskdl.timeouts.{name}" for name in NAMES]
    + ["daskdl.export.url", "daskdl.export.storage_options"]
)


@pytest.mark.parametrize(
    ("wrong", "value", "message"),
    [
        (
            "daskdl.timeouts.sillence",
            "5s",
            "daskdl.timeouts.sillence does not exist in Dask's configuration: did you "
            "mean daskdl.timeouts.silence?",
        ),
        (
            "daskdl.silence",
            5,
            "daskdl.silence does not exist .* daskdl.timeouts.silence",
        ),
        ("daskdl.timeout.stop", 5, "daskdl.timeout.stop .* mean daskdl.timeouts.stop"),
        ("daskdl.export.uri", "s3://a", "daskdl.export.uri .* daskdl.export.url"),
        ("daskdl.timeouts.url", "s3://a", "daskdl.timeouts.url .* daskdl.export.url"),
        ("daskdl.rejoin_timeout", 5, "daskdl.rejoin_timeout .* daskdl.timeouts.rejoin"),
        ("daskdl.colour", "red", f"daskdl.colour .*: there are {LISTED}$"),
        (
            "daskdl_timeouts_silence",
            "5s",
            "daskdl_timeouts_silence .* mean daskdl.timeouts.silence. "
            "In the environment: DASK_DASKDL__TIMEOUTS__SILENCE$",
        ),
        (
            "daskdl.timeouts",
            "5s",
            f"daskdl.timeouts must be a mapping with {', '.join(NAMES)}, got '5s'",
        ),
    ],
)
def test_a_name_that_nothing_reads_is_refused_with_the_nearest(wrong, value, message):
    with dask.config.set({wrong: value}), pytest.raises(OptionError, match=message):
        Timeouts.from_config()


def test_every_name_that_does_not_exist_is_in_the_message():
    names = {"daskdl.sillence": 1, "daskdl.export.uri": 2, "daskdl_x": 3}

    with dask.config.set(names), pytest.raises(OptionError) as refused:
        Timeouts.from_config()

    assert all(f"{name} does not exist" in str(refused.value) for name in names)


@pytest.mark.parametrize(
    "configuration",
    [
        {"daskdl.export.storage-options": {"anon": True, "url": "x"}},
        {"daskdl.export": None},
        {"daskdl": None},
        {"distributed.silence": 1},
    ],
    ids=str,
)
def test_the_options_of_a_store_and_empty_sections_are_accepted(configuration):
    with dask.config.set(configuration):
        assert Timeouts.from_config() == DEFAULT


SHOW = "from daskdl.config import Timeouts; print(Timeouts.from_config())"
MINE = "daskdl:\n  timeouts:\n    silence: 2 minutes\n    data: 7\n"


def test_another_process_reads_them_from_its_files_and_then_its_environment(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    environment = {
        "DASK_CONFIG": str(tmp_path),
        "DASK_DASKDL__TIMEOUTS__STOP": "3s",
        "DASK_DASKDL__TIMEOUTS__DATA": "500ms",
    }

    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )

    expected = replace(DEFAULT, silence=120.0, stop=3.0, data=0.5)
    assert done.stdout == f"{expected}\n", done.stderr


def test_the_users_copy_of_the_defaults_sets_nothing(tmp_path):
    dask.config.ensure_file(source=str(config.FILE), destination=str(tmp_path))

    copy = tmp_path / "daskdl.yaml"
    assert list(dask.config.collect_yaml([str(copy)])) == []
    assert "join: 60s" in copy.read_text()
