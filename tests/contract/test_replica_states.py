"""The state of a replica as arrays for another process, and where it was read."""

import numpy as np
import pytest
import torch

from daskdl.errors import SaveError
from daskdl.training.state import (
    LoadedPart,
    ReplicaState,
    StartState,
    copied_state,
    decoded,
    encoded,
)


class Moments:
    """State of a user's own optimizer."""

    def __init__(self, *counts):
        self.counts = counts

    def __eq__(self, _):
        return self.counts == _.counts


@pytest.mark.parametrize(
    "value",
    [
        (1, [2.5, None], {"a": True, 3: float("inf")}),
        torch.float16,
        {"a", "b"},
        [Moments(1, 2)],
        {"deep": {("x", 1): b"bytes"}},
    ],
    ids=["plain", "dtype", "set", "an object", "nested"],
)
def test_any_values_arrive(value):
    state = ReplicaState({"kind": "model"}, {"value": value}, {"value": value})

    arrived = decoded(encoded(state))

    assert arrived == state


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch 2.11
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.eye(3).to_sparse(),
        torch.arange(6.0).reshape(2, 3).T,
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout}",
)
def test_any_tensor_arrives(tensor):
    arrived = decoded(encoded(ReplicaState({}, {"x": tensor}, {}))).common["x"]

    assert (arrived.dtype, arrived.layout) == (tensor.dtype, tensor.layout)
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_later_changes_do_not_arrive():
    weight, array, losses = torch.zeros(2), np.zeros(2), [1.0]
    state = ReplicaState({"losses": losses}, {"weight": weight}, {"array": array})

    arrays = encoded(state)
    weight.add_(1)
    array += 1
    losses.append(2.0)

    arrived = decoded(arrays)
    assert arrived.header == {"losses": [1.0]}
    assert arrived.common["weight"].tolist() == [0.0, 0.0]
    assert arrived.per_replica["array"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("common", "per_replica", "message"),
    [
        ({}, {"steps": 1}, r"^common.json: its state.grid is missing$"),
        ({"grid": 0.5}, {}, r"^replica-3.json: its state.steps is missing$"),
        ({"grid": "x"}, {"steps": 1}, r"^common.json: its state.grid is damaged"),
        ({"grid": 0.5}, {"steps": 1}, r"^common.json, replica-3.json: optimizer is m"),
    ],
)
def test_a_damaged_part_is_named(common, per_replica, message):
    part = LoadedPart(per_replica, "replica-3.json")
    start = StartState("model", LoadedPart(common, "common.json"), part, [part])

    with pytest.raises(SaveError, match=message):
        start.check({"grid": 1.0}, {"steps": 0})


def test_a_copied_state_stays():
    moment, steps = torch.zeros(2), [1, 2]
    copy = copied_state({"state": {0: (moment, steps)}})

    moment.add_(1)
    steps.append(3)

    assert copy["state"][0][0].tolist() == [0.0, 0.0]
    assert copy["state"][0][1] == [1, 2]
