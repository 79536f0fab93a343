"""Diagnosis of divergence, gradient norms, and averages of optimizer states."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.errors import ModelError
from daskdl.objective import OwnStep
from daskdl.training.optimizer_step import (
    LossWatch,
    Stepper,
    Stepping,
    Symptoms,
    diagnosis,
    scaled,
)
from daskdl.training.tree_reduce import (
    load_optimizer_,
    optimizer_arrays,
    rest_of,
    total_of,
)

NAN = math.nan
FIRST = Symptoms(replica=0, epoch=0, step=1, loss=NAN)
SUDDEN = Symptoms(
    replica=3,
    epoch=2,
    step=80,
    loss=NAN,
    first_loss=2.302585,
    before=0.25,
    learning_rate=0.1,
)
RISING = dataclasses.replace(SUDDEN, loss=math.inf, before=1e30)
HIGH = dataclasses.replace(SUDDEN, loss=512.0, before=400.0, high_steps=200)

# Without the numbers, so that a hint with others is seen too.
LEARNING = "lower the learning rate"
DATA = "check X for NaN, and the loss for a division by 0 or a logarithm of 0"
NOTHING = "no step had succeeded: check X and y for NaN and infinity"
GROUP = "with this update_scale"
SPARSE = "use adapt_rate=False"
AGAIN = "up to 5 times as far as without"
SET = "set clip_grad_norm"
CLIPPED = "gradients are clipped already"
AHEAD = "ahead of the slowest"
BEHIND = "thresholds or more"
OFF = "if such a loss is expected, set max_loss_rise=None"
ALL = [LEARNING, DATA, NOTHING, GROUP, SPARSE, AGAIN, SET, CLIPPED, AHEAD, BEHIND, OFF]


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
        (RISING, {"replicas": 8, "adds_up": True}, [LEARNING, SET, SPARSE]),
        (RISING, {"adds_up": True}, [LEARNING, SET]),
        (RISING, {"replicas": 1, "scale": 8.0}, [LEARNING, SET]),
        (
            RISING,
            {"replicas": 8, "scale": 1 / 8, "momentum": 0.8},
            [LEARNING, SET, AGAIN],
        ),
        (RISING, {"momentum": 0.8}, [LEARNING, SET]),
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
def test_hints_depend_on_the_measurements(symptoms, change, hints):
    text = diagnosis(dataclasses.replace(symptoms, **change))

    assert {hint for hint in ALL if hint in text} == set(hints)


@pytest.mark.parametrize(
    ("symptoms", "beginning"),
    [
        (
            dataclasses.replace(SUDDEN, loss=0.5, event="parameters became inf"),
            "parameters became inf at step 80 of replica 3, in epoch 2; model_ holds "
            "the state agreed on after epoch 1; lower the learning rate, "
            "0.1; set clip_grad_norm",
        ),
        (
            FIRST,
            "the loss became nan at step 1 of replica 0, in epoch 0; model_ holds the "
            "initial state; ",
        ),
        (
            SUDDEN,
            "the loss became nan at step 80 of replica 3, in epoch 2; it was 2.303 at "
            "its first step and 0.25 just before; model_ holds the state agreed on "
            "after epoch 1; ",
        ),
        (
            RISING,
            "the loss became inf at step 80 of replica 3, in epoch 2; it was 2.303",
        ),
        (
            HIGH,
            "the loss diverged: it is 512 at step 80 of replica 3, in epoch 2, and has "
            "been too high for 200 steps; it was 2.303 at its first step; model_ holds "
            "the state agreed on after epoch 1; ",
        ),
    ],
)
def test_the_diagnosis_names_the_event_and_the_last_agreed_state(symptoms, beginning):
    assert diagnosis(symptoms).startswith(beginning)


def stops_at(losses, max_rise=10.0):
    """Return the first step at which divergence is detected, from 1, or None."""
    watch = LossWatch(max_rise)
    for step, loss in enumerate(losses, 1):
        if watch.note(float(loss)):
            return step
    return None


def noise(count=2000, seed=0):
    return np.random.default_rng(seed)


def growing(first, factor, count=2000):
    return [first * factor**n for n in range(count) if first * factor**n < 1e300]


RUNNING_AWAY = {
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


@pytest.mark.parametrize("losses", RUNNING_AWAY.values(), ids=RUNNING_AWAY)
def test_a_lasting_rise_is_divergence(losses):
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
    "large, and three times as large": [1e6] * 300 + [3e6] * 999,
    "goes down from high": [2.3, *np.linspace(1e4, 1e3, 5000)],
    "goes up and down at random": np.cumsum(0.1 * noise().normal(size=5000)),
    "high for a while": ([2.3] * 10 + [90.0] * 150 + [2.0] * 200) * 10,
}


@pytest.mark.parametrize("losses", FINE.values(), ids=FINE)
def test_noise_spikes_and_recoveries_are_no_divergence(losses):
    assert stops_at(losses) is None


def batches(*sizes):
    """Return batches of these sizes, with different rows."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, generator=draw), torch.randn(n, 2, generator=draw))
        for n in sizes
    ]


def linear():
    module = nn.Linear(3, 2)
    torch.nn.init.constant_(module.weight, 0.25)
    torch.nn.init.constant_(module.bias, -0.5)
    return module


def stepper(module, lr=0.5, batch_size=1, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    stepping, device = Stepping(**options), torch.device("cpu")
    return Stepper(module, nn.MSELoss(), optimizer, stepping, device, batch_size)


def gradients(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


class Weighted(nn.CrossEntropyLoss):
    """A step of the user's own, called with the model and a batch."""

    def forward(self, model, batch):
        return super().forward(model(batch[0]), batch[1])


@pytest.mark.parametrize("as_step", [False, True], ids=["loss", "step"])
def test_weights_of_a_loss_move_to_the_models_device(as_step):
    loss, meta = Weighted(weight=torch.ones(2)), torch.device("meta")
    model = linear().to(meta)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    Stepper(model, OwnStep(loss) if as_step else loss, optimizer, Stepping(), meta)

    assert loss.weight.device == meta


class TestGradientNorm:
    @pytest.mark.parametrize("clip", [None, 1e-3])
    def test_it_is_that_of_all_gradients_before_they_are_clipped(self, clip):
        module = linear()
        clipping = stepper(module, clip_grad_norm=clip)
        clipping.backward(batches(4, 4))

        assert clipping.gradient_norm() == pytest.approx(
            float(gradients(module).norm())
        )


class TestALoneRow:
    """Batch norm cannot train on one row; only a remainder has so few."""

    def model(self):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2)
        norm.running_mean += 0.5
        norm.running_var *= 4
        return nn.Sequential(nn.Linear(3, 2), norm, nn.BatchNorm1d(2).eval())

    def test_is_normalized_with_running_statistics(self):
        model, expected = self.model(), self.model().eval()
        before = {name: value.clone() for name, value in model.named_buffers()}
        [(x, y)] = batches(1)
        nn.functional.mse_loss(expected(x), y).backward()

        stepper(model, batch_size=4).backward([(x, y)])

        assert torch.equal(gradients(model), gradients(expected))
        assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
        assert [part.training for part in model] == [True, True, False]

    def test_leaves_batch_statistics_to_the_other_batches_of_its_group(self):
        model = self.model()

        stepper(model, batch_size=4, accumulate=3).backward(batches(4, 1, 4))

        assert model[1].num_batches_tracked == 2

    def test_is_an_error_if_every_batch_has_one_row(self):
        with pytest.raises(ModelError, match="use a batch_size > 1"):
            stepper(self.model(), batch_size=1).backward(batches(1))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def trained(make, steps, seed=0, dtype=torch.float32):
    """An optimizer that has made steps of random gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in ((2, 3), 4)]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return optimizer


def entries(optimizer):
    """Return the values of a state, by parameter and name."""
    state = optimizer.state_dict()["state"]
    return {(n, name): v for n, kept in state.items() for name, v in kept.items()}


def restored(make, states, dtype=torch.float32):
    optimizer = trained(make, 0, dtype=dtype)
    load_optimizer_(optimizer, total_of(states), rest_of(optimizer))
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_one_replica_is_restored_bit_for_bit(make, dtype):
    before = entries(trained(make, 3, dtype=dtype))
    state = optimizer_arrays(trained(make, 3, dtype=dtype), 1.0)

    after = entries(restored(make, [state], dtype))

    assert after.keys() == before.keys()
    for key, value in before.items():
        if not isinstance(value, torch.Tensor):
            assert after[key] == value
            continue
        assert after[key].dtype == value.dtype
        assert torch.equal(after[key], value)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_arrays_of_several_replicas_are_averaged_by_weight(make):
    replicas = [trained(make, 2, seed) for seed in (1, 2, 3)]
    weights = [0.5, 0.25, 0.25]
    states = [optimizer_arrays(o, w) for o, w in zip(replicas, weights, strict=True)]

    after = entries(restored(make, states))

    before = [entries(o) for o in replicas]
    for key, value in after.items():
        if isinstance(value, torch.Tensor) and value.dim():
            parts = [w * e[key].double() for w, e in zip(weights, before, strict=True)]
            # One rounding of float32 for each replica, relative to the largest.
            torch.testing.assert_close(value.double(), sum(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("steps", [(2, 5), (5, 2)])
def test_step_counters_are_the_maximum(name, steps):
    make = OPTIMIZERS[name]
    states = [optimizer_arrays(trained(make, count), 0.5) for count in steps]

    after = entries(restored(make, states))

    counters = [value for (_, key), value in after.items() if key == "step"]
    assert [float(value) for value in counters] == [5.0, 5.0]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_decoupled_weight_decay_stays_as_it_is(kind):
    weights = {}
    for rate_factor in (1, 3):
        weight = nn.Parameter(torch.ones(1))
        optimizer = kind([weight], lr=0.01, weight_decay=0.1)
        weight.grad = torch.full((1,), 100.0)
        with scaled(optimizer, 1.0, rate_factor):
            optimizer.step()
        weights[rate_factor] = weight.item()
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert optimizer.param_groups[0]["weight_decay"] == 0.1

    decay = 0.01 * 0.1 if kind is torch.optim.AdamW else 0
    assert weights[1] == pytest.approx(1 - decay - 0.01, rel=1e-5)
    assert weights[3] == pytest.approx(1 - decay - 0.03, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "decoupled"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adafactor, True),
        (torch.optim.Adam, False),
    ],
)
def test_only_decoupled_weight_decay_does_not_follow_the_rate(kind, decoupled):
    optimizer = kind([nn.Parameter(torch.ones(1))], weight_decay=0.1)
    [group] = optimizer.param_groups

    with scaled(optimizer, 1.0, 2.0):
        assert group["weight_decay"] == (0.05 if decoupled else 0.1)
    assert group["weight_decay"] == 0.1
