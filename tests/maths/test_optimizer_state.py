import numpy as np
import pytest
import torch
from torch import nn

from daskdl.training.optimizer_step import OptimizerState, add, restore_, weigh

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
    """Every value of a state, by parameter and name."""
    state = optimizer.state_dict()["state"]
    return {(n, name): v for n, kept in state.items() for name, v in kept.items()}


def restored(make, states, dtype=torch.float32):
    optimizer = trained(make, 0, dtype=dtype)
    restore_(optimizer, add(states))
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_one_replica_comes_back_bit_for_bit(make, dtype):
    before = entries(trained(make, 3, dtype=dtype))
    state = weigh(trained(make, 3, dtype=dtype), 1.0)

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
    states = [weigh(o, w) for o, w in zip(replicas, weights, strict=True)]

    after = entries(restored(make, states))

    own = [entries(o) for o in replicas]
    for key, value in after.items():
        if isinstance(value, torch.Tensor) and value.dim():
            parts = [w * e[key].double() for w, e in zip(weights, own, strict=True)]
            # One rounding of float32 for each replica, relative to the largest.
            torch.testing.assert_close(value.double(), sum(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("steps", [(2, 5), (5, 2)])
def test_step_counters_are_the_largest_whoever_comes_first(name, steps):
    make = OPTIMIZERS[name]
    states = [weigh(trained(make, count), 0.5) for count in steps]

    after = entries(restored(make, states))

    counters = [value for (_, key), value in after.items() if key == "step"]
    assert [float(value) for value in counters] == [5.0, 5.0]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_a_replica_without_state_adds_nothing(name, first):
    make = OPTIMIZERS[name]
    with_state, without = weigh(trained(make, 3), 1.0), weigh(trained(make, 0), 0.0)
    states = [without, with_state] if first else [with_state, without]

    after = entries(restored(make, states))

    before = entries(trained(make, 3))
    assert after.keys() == before.keys() != set()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("values", [(7, None), (None, 7), (3, 7), (7, 3)])
def test_a_scalar_that_one_replica_does_not_have_is_that_of_the_other(values):
    states = [OptimizerState({}, {}, {(0, "step"): value}, []) for value in values]

    assert add(states).scalars == {(0, "step"): 7}


def test_what_only_one_replica_has_keeps_its_dtype():
    keys, dtypes = [(0, "m"), (1, "m")], [torch.float32, torch.bfloat16]
    states = [
        OptimizerState({key: np.ones(1)}, {key: dtype}, {}, [])
        for key, dtype in zip(keys, dtypes, strict=True)
    ]

    total = add(states)

    assert list(total.parts) == keys
    assert total.dtypes == dict(zip(keys, dtypes, strict=True))


def test_counters_are_restored_in_their_dtype():
    optimizer = trained(OPTIMIZERS["momentum"], 0)
    key = (0, "step")
    groups = optimizer.state_dict()["param_groups"]

    restore_(optimizer, OptimizerState({}, {key: torch.float64}, {key: 3.0}, groups))

    step = entries(optimizer)[key]
    assert (step.item(), step.dtype) == (3.0, torch.float64)


def test_the_parts_of_the_replicas_are_left_alone():
    make = OPTIMIZERS["momentum"]
    states = [weigh(trained(make, 2, seed), 0.5) for seed in (1, 2)]
    before = {key: part.copy() for key, part in states[0].parts.items()}

    add(states)

    assert all((states[0].parts[key] == part).all() for key, part in before.items())
