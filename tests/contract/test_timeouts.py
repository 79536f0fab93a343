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
def test_each_one_can_be_configured_and_only_it_changes(name):
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


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bound_that_is_not_positive_is_refused(name, value):
    message = f"daskdl.timeouts.{name} must be > 0 s, got {value!r}"

    with pytest.raises(OptionError, match=re.escape(message)):
        replace(DEFAULT, **{name: value})


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    message = (
        "daskdl.timeouts.sillence does not exist; there are join, request, silence, "
        "stop, rejoin, data"
    )

    with (
        configured(sillence="5s"),
        pytest.raises(OptionError, match=re.escape(message)),
    ):
        Timeouts.from_config()


@pytest.mark.parametrize("value", ["soon", "3 bananas", "-5s", [1], None])
def test_a_value_that_is_no_time_is_refused_by_name(value):
    message = f"daskdl.timeouts.stop must be seconds or text as '30s', got {value!r}"

    with (
        configured(stop=value),
        pytest.raises(OptionError, match=re.escape(message)),
    ):
        Timeouts.from_config()


@pytest.mark.parametrize("name", NAMES)
def test_every_bound_is_in_the_file_of_defaults_and_nowhere_else(name):
    (defaults,) = dask.config.collect_yaml([str(config.FILE)])

    assert defaults["daskdl"]["timeouts"].keys() == set(NAMES)
    with pytest.raises(TypeError, match=f"missing .* argument.*{name}"):
        Timeouts(**{other: 1.0 for other in NAMES if other != name})


SHOW = "from daskdl.config import Timeouts; print(Timeouts.from_config())"
MINE = "daskdl:\n  timeouts:\n    silence: 2 minutes\n    data: 7\n"


def test_another_process_takes_them_from_its_files_and_its_environment(tmp_path):
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

    # What the file says too, the environment says with more right.
    expected = replace(DEFAULT, silence=120.0, stop=3.0, data=0.5)
    assert done.stdout == f"{expected}\n", done.stderr


def test_the_user_finds_a_copy_of_the_defaults_in_which_nothing_is_set(tmp_path):
    dask.config.ensure_file(source=str(config.FILE), destination=str(tmp_path))

    copy = tmp_path / "daskdl.yaml"
    assert list(dask.config.collect_yaml([str(copy)])) == []
    assert "join: 60s" in copy.read_text()
