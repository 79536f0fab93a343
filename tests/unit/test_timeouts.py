import re
from dataclasses import fields

import dask.config
import pytest

from daskdl import timeouts
from daskdl.errors import OptionError
from daskdl.timeouts import Timeouts

NAMES = [field.name for field in fields(Timeouts)]


def configured(**values):
    return dask.config.set({f"daskdl.timeouts.{k}": v for k, v in values.items()})


def test_without_configuration_the_defaults_hold():
    assert Timeouts.from_config() == Timeouts(60.0, 30.0, 60.0, 10.0, 300.0, 600.0)


@pytest.mark.parametrize("name", NAMES)
def test_each_one_can_be_configured_and_only_it_changes(name):
    with configured(**{name: 7}):
        assert Timeouts.from_config() == Timeouts(**{name: 7.0})


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30s", 30.0), ("500ms", 0.5), ("2 minutes", 120.0), ("1.5", 1.5), (3, 3.0)],
)
def test_text_may_have_a_unit_and_a_plain_number_is_seconds(value, seconds):
    with configured(silence=value):
        silence = Timeouts.from_config().silence

    assert silence == seconds
    assert type(silence) is float


def test_the_configuration_is_read_when_it_is_asked_for():
    with configured(join="5s"):
        inside = Timeouts.from_config().join
    outside = Timeouts.from_config().join

    assert (inside, outside) == (5.0, 60.0)


def test_the_environment_variable_of_the_module_docstring_works():
    (line,) = re.findall(r"DASK_DASKDL\S+", timeouts.__doc__)
    name, value = line.split("=")

    with dask.config.set(dask.config.collect_env({name: value})):
        assert Timeouts.from_config().silence == 30.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bound_that_is_not_positive_is_refused(name, value):
    message = f"daskdl.timeouts.{name} must be > 0 s, got {value!r}"

    with pytest.raises(OptionError, match=re.escape(message)):
        Timeouts(**{name: value})


@pytest.mark.parametrize("value", ["soon", "3 bananas", "-5s", [1], None])
def test_a_value_that_is_no_time_is_refused_by_name(value):
    message = f"daskdl.timeouts.stop must be seconds or text as '30s', got {value!r}"

    with (
        configured(stop=value),
        pytest.raises(OptionError, match=re.escape(message)),
    ):
        Timeouts.from_config()
