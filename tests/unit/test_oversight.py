"""Options of a trainer that say what is watched."""

import math
import re

import pytest

from daskdl.errors import OptionError
from daskdl.training.spec import Oversight


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("telemetry_every", "auto"),
        ("telemetry_every", 1),
        ("telemetry_every", None),
        ("max_loss_rise", 0.5),
        ("max_loss_rise", 3),
        ("max_loss_rise", None),
    ],
    ids=repr,
)
def test_an_option_is_taken(option, value):
    assert getattr(Oversight(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("telemetry_every", 0, "a whole number >= 1 or 'auto' or None, got 0"),
        ("telemetry_every", 1.5, "a whole number >= 1 or 'auto' or None, got 1.5"),
        ("telemetry_every", True, "a whole number >= 1 or 'auto' or None, got True"),
        ("telemetry_every", "all", "a whole number >= 1 or 'auto' or None, got 'all'"),
        ("max_loss_rise", 0, "a number > 0 or None, got 0"),
        ("max_loss_rise", True, "a number > 0 or None, got True"),
        ("max_loss_rise", math.inf, "a number > 0 or None, got inf"),
        ("max_loss_rise", math.nan, "a number > 0 or None, got nan"),
        ("max_loss_rise", "10", "a number > 0 or None, got '10'"),
    ],
    ids=repr,
)
def test_an_option_is_refused_by_name(option, value, message):
    with pytest.raises(OptionError, match=re.escape(f"{option} must be {message}")):
        Oversight(**{option: value})
