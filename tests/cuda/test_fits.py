"""Whole fits on a device, on threads of this process."""

import pytest
import torch

from daskdl import ParameterAveraging
from tests.support.problems import kept, rows, trainer

X, Y = rows()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "master", [kept, ParameterAveraging], ids=["sharing", "averaging"]
)
def test_replicas_on_one_device_learn(device, master, replicas):
    fitted = trainer(False, device=device, master=master(replicas_per_worker=replicas))

    history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))

    assert history.column("replicas") == [replicas] * 4
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["val_accuracy"] > 0.9
    assert {p.device for p in fitted.model_.parameters()} == {torch.device("cpu")}
