"""The link between machines, and its units."""

import math
import re

import pytest

from daskdl.errors import OptionError
from daskdl.planning.cost_model import Network


def test_a_gigabit_link_carries_125_megabytes_in_a_second():
    assert Network(1e9, 0.0).seconds(125e6) == 1.0


def test_a_link_without_a_limit_takes_no_time():
    assert Network(math.inf, 0.0).seconds(1e12) == 0.0


@pytest.mark.parametrize(
    ("rate", "latency_s", "text"),
    [
        (10e9, 5e-5, "10 Gbit/s, 0.05 ms one way"),
        (50e6, 0.02, "50 Mbit/s, 20 ms one way"),
        (9600, 0, "9.6 kbit/s, 0 ms one way"),
        (300, 1, "300 bit/s, 1000 ms one way"),
    ],
)
def test_it_prints_its_units(rate, latency_s, text):
    assert str(Network(rate, latency_s)) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.0), "bandwidth_bits_per_s must be a number > 0, got 0"),
        ((-1.0, 0.0), "bandwidth_bits_per_s must be a number > 0, got -1.0"),
        ((math.nan, 0.0), "bandwidth_bits_per_s must be a number > 0, got nan"),
        (
            ("1 Gbit/s", 0.0),
            "bandwidth_bits_per_s must be a number > 0, got '1 Gbit/s'",
        ),
        ((True, 0.0), "bandwidth_bits_per_s must be a number > 0, got True"),
        ((1e9, -0.1), "latency_s must be seconds >= 0, got -0.1"),
        ((1e9, math.inf), "latency_s must be seconds >= 0, got inf"),
        ((1e9, None), "latency_s must be seconds >= 0, got None"),
    ],
    ids=str,
)
def test_what_is_no_link_is_refused(arguments, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Network(*arguments)
