"""What is said of training that has diverged, for numbers as they may be."""

import dataclasses
import math

import pytest

from daskdl.training.optimizer_step import Symptoms, diagnosis

NAN = math.nan
FIRST = Symptoms(replica=0, epoch=0, step=1, loss=NAN)
SUDDEN = Symptoms(
    replica=3,
    epoch=2,
    step=80,
    loss=NAN,
    first=2.302585,
    before=0.25,
    learning_rate=0.1,
)
RISING = dataclasses.replace(SUDDEN, loss=math.inf, before=1e30)
HIGH = dataclasses.replace(SUDDEN, loss=512.0, before=400.0, high_steps=200)

# Without the numbers, so that a hint with others is seen too.
LEARNING = "lower the learning rate"
DATA = "look for NaN in X, and for a division by 0 or the logarithm of 0 in the loss"
NOTHING = "nothing had been trained yet: look for NaN and infinity in X and y"
GROUP = "with this update_scale"
SET = "set clip_grad_norm"
CLIPPED = "gradients are clipped already"
AHEAD = "ahead of the slowest"
BEHIND = "thresholds or more"
OFF = "if such a loss is as it should be, set max_loss_rise=None"
ALL = [LEARNING, DATA, NOTHING, GROUP, SET, CLIPPED, AHEAD, BEHIND, OFF]


@pytest.mark.parametrize(
    ("symptoms", "change", "hints"),
    [
        (FIRST, {}, [NOTHING]),
        (FIRST, {"staleness": 5.3, "residual": 40.0, "replicas": 8}, [NOTHING]),
        (SUDDEN, {}, [DATA, LEARNING]),
        (SUDDEN, {"staleness": 5.3, "residual": 40.0}, [DATA, LEARNING]),
        (SUDDEN, {"before": 4.5}, [DATA, LEARNING]),
        (SUDDEN, {"before": 4.7}, [LEARNING, SET]),
        (RISING, {}, [LEARNING, SET]),
        (RISING, {"replicas": 8}, [LEARNING, SET, GROUP]),
        (RISING, {"replicas": 8, "scale": 1 / 8}, [LEARNING, SET]),
        (RISING, {"replicas": 1, "scale": 8.0}, [LEARNING, SET]),
        (RISING, {"clip_grad_norm": 1.0, "gradient_norm": 12.5}, [LEARNING, CLIPPED]),
        (RISING, {"clip_grad_norm": 1.0, "gradient_norm": 0.5}, [LEARNING]),
        (RISING, {"clip_grad_norm": 1.0, "gradient_norm": NAN}, [LEARNING]),
        (RISING, {"staleness": 5.3}, [LEARNING, SET, AHEAD]),
        (RISING, {"staleness": 1.9}, [LEARNING, SET]),
        (RISING, {"residual": 40.0}, [LEARNING, SET, BEHIND]),
        (RISING, {"residual": 9.0}, [LEARNING, SET]),
        (RISING, {"residual": NAN}, [LEARNING, SET]),
        (HIGH, {}, [LEARNING, SET, OFF]),
        (
            HIGH,
            {"replicas": 8, "staleness": 5.3, "residual": 40.0},
            [LEARNING, GROUP, SET, AHEAD, BEHIND, OFF],
        ),
    ],
)
def test_a_hint_is_there_if_its_numbers_say_so(symptoms, change, hints):
    text = diagnosis(dataclasses.replace(symptoms, **change))

    assert {hint for hint in ALL if hint in text} == set(hints)


@pytest.mark.parametrize(
    ("symptoms", "beginning"),
    [
        (
            dataclasses.replace(SUDDEN, loss=0.5, event="parameters became inf"),
            "parameters became inf at step 80 of replica 3, in epoch 2; the last "
            "agreed state is that of epoch 1, and in model_; lower the learning rate, "
            "0.1; set clip_grad_norm",
        ),
        (
            FIRST,
            "the loss became nan at step 1 of replica 0, in epoch 0; the last agreed "
            "state is that of the start, and in model_; ",
        ),
        (
            SUDDEN,
            "the loss became nan at step 80 of replica 3, in epoch 2; it was 2.303 at "
            "its first step and 0.25 just before; the last agreed state is that of "
            "epoch 1, and in model_; ",
        ),
        (
            RISING,
            "the loss became inf at step 80 of replica 3, in epoch 2; it was 2.303",
        ),
        (
            HIGH,
            "the loss ran away: it is 512 at step 80 of replica 3, in epoch 2, and has "
            "been too high for 200 steps; it was 2.303 at its first step; the last "
            "agreed state is that of epoch 1, and in model_; ",
        ),
    ],
)
def test_it_says_what_happened_and_where_the_last_good_state_is(symptoms, beginning):
    assert diagnosis(symptoms).startswith(beginning)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, "lower the learning rate, 0.1; "),
        ({"gradient_norm": 1234.5}, "set clip_grad_norm, the norm is 1234; "),
        (
            {"replicas": 8, "scale": 0.5},
            "8 replicas move 4 times as far as one alone at this rate: lower it",
        ),
        (
            {"clip_grad_norm": 1.0, "gradient_norm": 12.5},
            "already, this one from 12.5 to clip_grad_norm=1; ",
        ),
        ({"staleness": 5.3}, "this replica is 5.3 steps ahead of the slowest"),
        ({"residual": 40.0}, "1 % of the parameters are 40 thresholds or more from"),
    ],
)
def test_a_hint_says_its_numbers(change, hint):
    assert hint in diagnosis(dataclasses.replace(HIGH, **change))


def test_an_optimizer_without_a_rate_has_none_to_say():
    text = diagnosis(dataclasses.replace(HIGH, learning_rate=NAN))

    assert "lower the learning rate; " in text
