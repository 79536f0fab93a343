"""Whether there is an accuracy, seen from two rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.data.checks import has_accuracy
from daskdl.objective import OwnStep

X = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2])
LOSS = nn.CrossEntropyLoss()


def own_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("loss", "y", "transform", "expected"),
    [
        (LOSS, CLASSES, None, True),
        (LOSS, CLASSES.to(torch.int32), None, True),
        (LOSS, torch.eye(3), None, False),
        (nn.MSELoss(), torch.zeros(3, 3), None, False),
        (OwnStep(own_step), CLASSES, None, False),
        (LOSS, torch.eye(3), lambda batch: (batch[0], batch[1].argmax(dim=1)), True),
    ],
    ids=["classes", "int32", "shares", "numbers", "step", "transform"],
)
def test_there_is_one_for_class_indices_and_a_score_of_each_class(
    loss, y, transform, expected
):
    assert has_accuracy(nn.Linear(2, 3), loss, X, y, transform) is expected


def test_the_model_is_left_as_it_was_and_the_random_state_too():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 3)).train()
    before = torch.initial_seed(), torch.get_rng_state()

    has_accuracy(model, LOSS, X, CLASSES)

    assert model.training
    assert model[0].num_batches_tracked == 0
    assert torch.initial_seed() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
