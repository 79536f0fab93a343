"""When a loss has run away, and when it is only noisy."""

import math

import numpy as np
import pytest

from daskdl.training.optimizer_step import LossWatch


def stops_at(losses, max_rise=10.0):
    """The first step after which it has run away, counted from 1; None: never."""
    watch = LossWatch(max_rise)
    for step, loss in enumerate(losses, 1):
        if watch.note(float(loss)):
            return step
    return None


def noise(count=2000, seed=0):
    return np.random.default_rng(seed)


def growing(first, factor, count=2000):
    return [first * factor**n for n in range(count) if first * factor**n < 1e300]


RISING = {
    "jumps at once": [2.3] + [400.0] * 999,
    "jumps later": [2.3] * 500 + [400.0] * 999,
    "jumps after it was learned": [2.3] + [0.01] * 500 + [26.0] * 999,
    "from a negative loss": [-3.0] * 300 + [50.0] * 999,
    "from nothing": [0.0] * 300 + [11.0] * 999,
    "grows slowly": growing(2.3, 1.02),
    "noisy, and high": [2.3, *(500 * noise().gamma(8, size=999))],
    "noisy, with some that are low": [2.3, *([500.0] * 19 + [0.0]) * 50],
    "large, and ten times as large": [1e6] * 300 + [2e7] * 999,
}


@pytest.mark.parametrize("losses", RISING.values(), ids=RISING)
def test_a_loss_that_rises_far_and_stays_there_has_run_away(losses):
    assert stops_at(losses) is not None


FINE = {
    "falls": np.geomspace(2.3, 1e-9, 5000),
    "stays": [2.3] * 5000,
    "is close to nothing, and noisy": 1e-9 * noise().lognormal(0, 3, 5000),
    "began at nothing, and is no more than small": [0.0] + [5.0] * 5000,
    "is negative, and noisy": -100 + 90 * noise().normal(size=5000),
    "one row in each batch": 1e6 * noise().chisquare(1, 5000),
    "one row, the first by chance fitted": [0.0, *(1e6 * noise().chisquare(1, 5000))],
    "heavy tails": noise().lognormal(0, 3, 5000),
    "spikes": ([0.5] * 40 + [1e6]) * 100,
    "a bad start that is made good": [2.3, *np.geomspace(1e5, 0.1, 5000)],
    "comes back to where it began": [2.3] + [0.01] * 500 + [2.3] * 5000,
    "goes down from high": [2.3, *np.linspace(1e4, 1e3, 5000)],
    "goes up and down at random": np.cumsum(0.1 * noise().normal(size=5000)),
    "high for a while": ([2.3] * 10 + [90.0] * 150 + [2.0] * 200) * 10,
}


@pytest.mark.parametrize("losses", FINE.values(), ids=FINE)
def test_a_loss_as_training_has_it_has_not(losses):
    assert stops_at(losses) is None


def test_chance_alone_does_not_end_training():
    ended = []
    for seed in range(200):
        random = noise(seed=seed)
        losses = 10 ** random.uniform(-6, 6) * random.chisquare(1, 1000)
        ended.append(stops_at(losses))

    assert ended == [None] * 200


def test_it_takes_four_blocks_of_fifty_steps():
    assert stops_at([1.0] * 50 + [20.0] * 500) == 250
    assert stops_at([1.0] * 51 + [20.0] * 500) == 250  # 1 of 50 may be low
    assert stops_at([1.0] * 60 + [20.0] * 500) == 300
    assert stops_at([1.0] * 50 + [20.0] * 199) is None


@pytest.mark.parametrize(
    ("first", "high", "ended"),
    [
        (1.0, 11.001, True),
        (1.0, 10.999, False),
        (4.0, 44.01, True),
        (4.0, 43.99, False),
        (-4.0, 36.01, True),
        (-4.0, 35.99, False),
        (0.001, 10.002, True),
        (0.001, 10.0, False),
    ],
)
def test_the_bound_is_above_the_first_loss_by_multiples_of_it_or_of_one(
    first, high, ended
):
    assert (stops_at([first] * 50 + [high] * 500) is not None) == ended


def test_another_multiple_is_another_bound():
    losses = [1.0] * 50 + [20.0] * 500

    assert stops_at(losses, max_rise=18.9) is not None
    assert stops_at(losses, max_rise=19.1) is None


def test_without_one_nothing_ends_training():
    assert stops_at([1.0] * 50 + [1e300] * 500, max_rise=None) is None


def test_it_knows_where_the_loss_began_and_where_it_is():
    watch = LossWatch(None)
    assert watch.first is watch.last is None

    for loss in (3.0, 2.0, 4.0):
        watch.note(loss)

    assert (watch.first, watch.last) == (3.0, 4.0)


def test_it_says_on_how_many_steps_it_decided():
    watch = LossWatch(10.0)
    while not watch.note(1.0 if watch.first is None else 50.0):
        assert math.isfinite(watch.last)

    assert watch.recent == 200
