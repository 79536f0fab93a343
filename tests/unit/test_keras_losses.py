"""Losses for models that end in probabilities."""

import pytest
import torch
from torch import nn

from daskdl.keras import CrossEntropyOfProbabilities

SCORES = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], requires_grad=True)
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"weight": torch.tensor([1.0, 2.0, 3.0])}],
    ids=["mean", "sum", "weighted"],
)
def test_it_is_the_cross_entropy_of_the_scores(options):
    expected = nn.CrossEntropyLoss(**options)(SCORES, LABELS)

    loss = CrossEntropyOfProbabilities(**options)(SCORES.softmax(1), LABELS)

    torch.testing.assert_close(loss, expected)


def test_a_probability_of_zero_has_a_finite_loss():
    certain = torch.tensor([[0.0, 1.0]])

    loss = CrossEntropyOfProbabilities()(certain, torch.tensor([0]))

    assert 16 < loss < 17
